"""Arguments completed from a record: of a state (`--resume`, `--decode-only`) or of a video (`--from`)."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs.errors import NotFoundError, RecordError, StateError, UsageError, UserError
from kandinsky5_nabla.pipeline.checks import Geometry
from kandinsky5_nabla.pipeline.codecs import CODECS
from kandinsky5_nabla.scripts._record import FIXED, Record, as_argv, read_record, versions
from kandinsky5_nabla.scripts._setup import BadInput, Setup
from kandinsky5_nabla.scripts._state import SUFFIX, StateFolder
from kandinsky5_nabla.scripts._videos import codec_of_suffix, name_beside

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.embeds_file import EmbedsFile

SOURCES = {"resume": "--resume", "decode_only": "--decode-only", "repeat": "--from"}
RUNNING = (
    "cache_dir",
    "offline",
    "offload",
    "checkpoint_every",
    "keep_state",
    "preview",
    "overwrite",
    "json",
    "debug",
    "log",
    "quiet",
    "verbose",
)
"""Arguments that change no number: a resumed run may have others, and the command that goes on repeats them."""
REPLACED = {
    "config": ("model", "revision"),
    "model": ("revision", "vae", "text_encoder", "text_encoder_2"),
    "duration": ("num_frames",),
    "codec": ("crf",),
}
"""What an argument beside `--from` puts out of force, besides its own value of the record."""
FREE = {
    "resume": (*RUNNING, "report", "dry_run"),
    "decode_only": (*RUNNING, "dry_run", "vae_tile", "codec", "crf", "output"),
}
"""What a state leaves open, for each way to use it."""
_INSTEAD = dict.fromkeys(FREE, "leave it out") | {"repeat": "add --prompt TEXT, or leave it out"}


@dataclass(frozen=True)
class Saved:
    """What arguments were completed from.

    Attributes:
        source: file or folder.
        record: its record.
        output: the video that the record is of.
        folder: the state; None for a record alone, which is the beginning of a new run.
        embeds: the encoded text of the state.
        completed: steps that the state has behind it.
        shape: of the state's latents; None where it has none yet.
        chosen: whether the arguments name a preset or model of their own.
    """

    source: Path
    record: Record
    output: Path
    folder: StateFolder | None = None
    embeds: EmbedsFile | None = None
    completed: int = 0
    shape: tuple[int, ...] | None = None
    chosen: bool = False

    def owns_output(self) -> bool:
        """Return whether the video is complete already: its run ended while it put its state away."""
        files = [path for path in (self.output, self.output.with_suffix(".json")) if os.path.exists(path)]
        return self.output in files and all(holds(path, self.record) for path in files)

    def cautions(self) -> list[str]:
        """Return a sentence where other versions than the record's are installed."""
        now, then = versions(), self.record.versions
        changed = [f"{name} {then.get(name)}, here {now[name]}" for name in now if then.get(name) != now[name]]
        return [f"{self.source} was made with {'; '.join(changed)}: numbers may differ"] if changed else []

    def problems(self, setup: Setup) -> Iterator[UserError]:
        """Yield which numbers of the preset are no longer those of the record, and whether the latents are its own."""
        now = {"scale_factor": tuple(map(float, setup.settings.scale_factor)), "fps": float(setup.preset.fps)}
        for name in () if self.chosen else FIXED:
            if now[name] != getattr(self.record, name):
                yield RecordError(
                    f"{self.source} was made with {name} {getattr(self.record, name)}, and the preset "
                    f"{self.record.preset} has {now[name]} now: use the preset as it was"
                )
        if self.shape is not None and self.shape != (expected := _shape_of_latents(setup, self.shape[-1])):
            shapes = f"its latents are {self.shape}, those of its video are {expected}"
            yield StateError(f"{self.folder}: {shapes}; start the run anew")


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Saved | None]:
    """Return the arguments with those that a record has, and the record; as they are where none was named.

    Raises:
        BadInput: if there is no usable record, or an argument contradicts a state.
    """
    given = {name: value for name, value in vars(args).items() if value != parser.get_default(name)}
    sources = [name for name in SOURCES if name in given]
    if not sources:
        return args, None
    if len(sources) > 1:
        both = " and ".join(SOURCES[name] for name in sources)
        raise BadInput([UsageError(f"{both} exclude each other: give one")])
    way, source = sources[0], given.pop(sources[0])
    if "expand_prompt" in given and (way != "repeat" or "prompt" not in given):
        problem = f"--expand-prompt: {SOURCES[way]} {source} takes that run's text as it is; {_INSTEAD[way]}"
        raise BadInput([UsageError(problem)])
    try:
        saved = _saved_video(source) if way == "repeat" else _saved_state(source)
        recorded = vars(parser.parse_args(saved.record.arguments()))
    except (OSError, ValueError) as error:  # also the UsageError of a value that no argument can have
        kind = NotFoundError if isinstance(error, NotFoundError) else RecordError if way == "repeat" else StateError
        raise BadInput([kind(f"{SOURCES[way]} {source}: {error}")]) from error
    if way != "resume" and "codec" not in given and (codec := _codec_of_output(given, recorded["codec"])):
        given["codec"] = codec
    replaced = {name: None for argument in given for name in REPLACED.get(argument, ())}
    if saved.folder is None:
        if given.get("attention") == "SDPA":  # dense attention has no P
            replaced["nabla_p"] = None
        chosen = not {"config", "model"}.isdisjoint(given)
        return argparse.Namespace(**recorded | replaced | given), dataclasses.replace(saved, chosen=chosen)
    codec = given.get("codec", recorded["codec"])
    other = None if codec == recorded["codec"] else name_beside(saved.output, CODECS[codec], args.overwrite)
    recorded["output"] = other or saved.output
    problems = list(_contradictions(given, recorded, saved, FREE[way]))
    if way == "decode_only" and saved.completed < saved.record.num_inference_steps:
        problems.append(
            f"--decode-only {source}: {saved.completed} of {saved.record.num_inference_steps} steps are done; "
            f"go on with --resume {saved.folder}"
        )
    if problems:
        raise BadInput(map(StateError, problems))
    return argparse.Namespace(**recorded | replaced | given | {way: source, "embeds": saved.folder.text}), saved


def _codec_of_output(given: dict[str, Any], recorded: str) -> str | None:
    """Return the codec that a given output's suffix stands for, None where the record's has that suffix, too."""
    by_suffix = codec_of_suffix(given["output"]) if "output" in given else None
    return None if by_suffix is None or CODECS[by_suffix].suffix == CODECS[recorded].suffix else by_suffix


def go_on_command(folder: StateFolder, args: dict[str, Any]) -> str:
    """Return the command line that goes on from a state."""
    return command_line(["--resume", str(folder), *as_argv(args)])


def command_line(words: Iterable[str]) -> str:
    """Return what a shell takes to start this program with other arguments."""
    program = [sys.executable, sys.argv[0]] if sys.argv[0].endswith(".py") else [sys.argv[0]]
    return shlex.join([*program, *words])


def running_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that a command which goes on has to repeat."""
    values = {name: getattr(args, name) for name in (*RUNNING, "report")}
    return values | ({"offload": None} if args.offload == "auto" else {})


def _saved_state(source: Path) -> Saved:
    if not source.name:  # "." or "/"
        raise NotFoundError(f"names no state; they are called NAME{SUFFIX}")
    folder = StateFolder(source) if source.suffix == SUFFIX else StateFolder.of(source)
    if not folder.exists():
        if source.parent.suffix == SUFFIX and StateFolder(source.parent).exists():
            raise StateError(f"is a part of a state; name the folder, {source.parent}")
        if StateFolder(source).exists():
            raise StateError(f"is a state whose name does not end in {SUFFIX}; rename the folder to {folder}")
    output, record = folder.read_settings()
    saved = Saved(source, record, output, folder, _text_of(folder, record))
    state = folder.load()
    if state is None:
        return saved
    if state["completed"] > record.num_inference_steps:
        raise StateError(f"{folder} is damaged: {state['completed']} of {record.num_inference_steps} steps are done")
    return dataclasses.replace(saved, completed=state["completed"], shape=tuple(state["latents"].shape))


def _text_of(folder: StateFolder, record: Record) -> EmbedsFile:
    """Return the encoded text of a state; StateError unless it is that of its record."""
    from kandinsky5_nabla.pipeline.embeds_file import load_embeds  # here: it loads torch
    from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT

    negative = DEFAULT_NEGATIVE_PROMPT if record.negative_prompt is None else record.negative_prompt
    try:
        embeds = load_embeds(folder.text)
    except NotFoundError as error:
        raise StateError(f"{folder} is damaged: there is no {folder.text}") from error
    except (OSError, ValueError) as error:  # which speaks of the option that has such files
        raise StateError(f"{folder.text} is cut short or damaged, or holds no encoded text") from error
    if embeds.texts.problems([record.prompt], negative if record.guidance_scale != 1 else None):
        raise StateError(f"{folder.text} is not the text of the run in {folder}")
    return embeds


def _shape_of_latents(setup: Setup, channels: int) -> tuple[int, ...]:
    """Return `[1, T, H, W, C]` of a setup's video; `channels` for where its VAE does not lie here yet."""
    from kandinsky5_nabla.pipeline.latents import latent_shape  # here: it loads torch

    settings, configs = setup.settings, setup.checkpoint.configs
    geometry = Geometry.from_configs(configs["vae"], configs["transformer"], False)
    channels = configs["vae"].get("latent_channels", channels)
    return (1, *latent_shape(settings.num_frames, settings.height, settings.width, channels, geometry))


def _saved_video(source: Path) -> Saved:
    return Saved(source, read_record(source), source)


def holds(path: Path, record: Record) -> bool:
    """Return whether a video, or the JSON file beside it, has this record."""
    try:
        return read_record(path) == record
    except (OSError, ValueError):
        return False


def _contradictions(
    given: dict[str, Any], recorded: dict[str, Any], saved: Saved, free: tuple[str, ...]
) -> Iterator[str]:
    """Yield each argument that would make another video than the state's."""
    for name, value in given.items():
        if name in free or value == recorded[name]:
            continue
        if name == "device" and _kind(value) == _kind(recorded[name]):  # the same on another of the GPUs
            continue
        known = "nothing of the kind" if recorded[name] in (None, []) else recorded[name]
        known = ", ".join(known) if isinstance(known, list) else known
        yield (
            f"{' '.join(as_argv({name: value}))}: the run in {saved.folder} has {known}; leave it out to go on with "
            "that run, or start another"
        )


def _kind(device: str) -> str:
    return device.partition(":")[0]
