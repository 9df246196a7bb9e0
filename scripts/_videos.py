"""The videos of a run: what each shows, its numbers, and the names of its files."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kandinsky5_nabla.pipeline.codecs import CODECS, Codec
from kandinsky5_nabla.scripts._outputs import free_names, safe_name
from kandinsky5_nabla.scripts._state import SUFFIX, StateFolder


@dataclass(frozen=True)
class Video:
    """One video of a run.

    Attributes:
        prompt: what it shows.
        seed: of its noise.
        output: the file, or the folder of frames.
        negative_prompt: None for the authors' text.
        given: numbers of its own, by the names of `Settings`.
        line: of the file of prompts; None for a prompt of the command line.
        begun: files of the same run are there, its state or what is left of the video: the run goes on from them.
        short_prompt: what was typed, where `prompt` is its expansion.
    """

    prompt: str
    seed: int
    output: Path
    negative_prompt: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None
    begun: bool = False
    short_prompt: str | None = None

    @property
    def record(self) -> Path:
        """Where its record lies, beside it."""
        return self.output.with_suffix(".json")

    @property
    def sheet(self) -> Path:
        """Where its contact sheet lies, if there is one."""
        return self.output.with_suffix(".png")

    @property
    def state(self) -> StateFolder:
        """Where its state lies, beside it."""
        return StateFolder.of(self.output)

    def texts(self) -> dict[str, str]:
        """Return prompt and, where there is one, short prompt, as plain values."""
        return {"prompt": self.prompt, **({} if self.short_prompt is None else {"short_prompt": self.short_prompt})}


def codec_of(args: argparse.Namespace) -> Codec:
    """Return the codec that was asked for, or the one that the output's suffix stands for."""
    by_suffix = None if args.output is None else codec_of_suffix(args.output)
    return CODECS[args.codec or by_suffix or "h264"]


def codec_of_suffix(output: Path) -> str | None:
    """Return the name of the first codec whose files end as an output does; None where there is none."""
    suffix = (output.suffix or output.name).lower()  # of a name such as .gif, too, which has no other part
    return next((codec.name for codec in CODECS.values() if codec.suffix and codec.suffix == suffix), None)


def drawn_seed() -> int:
    """Return a seed for a run that was given none."""
    return secrets.randbelow(2**31)


def videos_of(args: argparse.Namespace, codec: Codec, typed: Mapping[str, str | None]) -> list[Video]:
    """Return the videos of the prompts of a command line, one for each prompt and seed.

    `typed` has for a prompt of a record what it was expanded from; names are made of that.
    """
    first = drawn_seed() if args.seed is None else args.seed
    pairs = [(prompt, first + i) for prompt in args.prompt or [] for i in range(args.num_videos)]
    if args.output is None:
        names = [Path(f"{safe_name(typed.get(prompt) or prompt)}-{seed}{codec.suffix}") for prompt, seed in pairs]
        outputs = free_names(names, lambda name: not args.overwrite and _is_taken(name))
    elif len(pairs) == 1:
        outputs = [args.output]
    else:
        outputs = [args.output.with_stem(f"{args.output.stem}-{i + 1}") for i in range(len(pairs))]
    return [
        Video(prompt, seed, output, args.negative_prompt, short_prompt=typed.get(prompt))
        for (prompt, seed), output in zip(pairs, outputs, strict=True)
    ]


def name_beside(video: Path, codec: Codec, overwrite: bool) -> Path:
    """Return the default name for a video decoded anew with another codec: none whose record is another video's."""
    others = {other.suffix for other in CODECS.values()} - {codec.suffix}

    def is_taken(name: Path) -> bool:
        own_state = name.with_suffix("") == video.with_suffix("")
        of_another = any(os.path.exists(name.with_suffix(suffix)) for suffix in others)
        return of_another or (not overwrite and _is_taken(name, own_state))

    [free] = free_names([video.with_suffix(codec.suffix)], is_taken)
    return free


def _is_taken(output: Path, own_state: bool = False) -> bool:
    suffixes = (output.suffix, ".json", ".png", *([] if own_state else [SUFFIX]))
    return any(os.path.exists(output.with_suffix(suffix)) for suffix in suffixes)
