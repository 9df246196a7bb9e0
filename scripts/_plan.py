"""The command line's request, resolved and checked as a whole before any weight is read."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs import find_preset
from kandinsky5_nabla.pipeline.checks import MAX_COUNT, Report, prompt_list
from kandinsky5_nabla.scripts._outputs import (
    LATENTS_SUFFIX,
    file_problems,
    folder_problems,
    free_names,
    named_file_problems,
    safe_name,
    taken,
)
from kandinsky5_nabla.scripts._setup import (
    NOTHING_TO_REPORT,
    BadInput,
    Setup,
    make_setup,
    seed_problems,
)

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.embeds_file import EmbedsFile


@dataclass(frozen=True)
class Video:
    """One video of a run."""

    prompt: str
    seed: int
    output: Path

    @property
    def latents(self) -> Path:
        """Where the latents lie while they are decoded."""
        return _latents_of(self.output)


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        setup: model, numbers and device.
        videos: one for each prompt and seed.
        report: where to write what the attention did; None for nowhere.
        embeds: prompts that are encoded already; None where they are to be encoded.
        save_embeds: where to write the encoded prompts; None for nowhere.
        overwrite: replace existing files.
    """

    setup: Setup
    videos: list[Video]
    report: Path | None
    embeds: EmbedsFile | None
    save_embeds: Path | None
    overwrite: bool

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        outputs = [{"file": str(v.output), "seed": v.seed, "prompt": v.prompt} for v in self.videos]
        report = {} if self.report is None else {"report": str(self.report)}
        return {**self.setup.describe(), "memory": self.memory_lines(), "outputs": outputs, **report}

    def memory_lines(self) -> list[str]:
        """Return what each stage is expected to take, for people."""
        memory = self.setup.memory
        return ["memory: planned once the checkpoint is here"] if memory is None else memory.lines()


def make_plan(args: argparse.Namespace) -> Plan:
    """Return the plan of parsed arguments.

    Raises:
        BadInput: with every problem that was found.
    """
    report = Report()
    embeds = None if args.embeds is None else _load_embeds(report, args.embeds)
    if embeds is not None and not args.prompt:
        args.prompt = list(embeds.texts.prompts)
    setup = make_setup(report, args, args.num_videos, len(args.prompt or [""]))
    if not args.prompt:
        report.add([] if args.embeds else ["no prompt was given: add --prompt TEXT (an empty text is allowed)"])
    else:
        report.attempt(prompt_list, args.prompt)
    report.add([] if args.seed is None else seed_problems(args.seed, args.num_videos))
    unusable = (
        folder_problems("output", Path()) if args.output is None else file_problems("output", args.output, "video.mp4")
    )
    videos = [] if unusable or args.num_videos > MAX_COUNT else _videos(args)
    files = [path for video in videos for path in (video.output, video.latents)]
    report.add(unusable or taken("output", files, args.overwrite))
    if args.report is not None:
        report.add(named_file_problems("report", args.report, "report.json", args.overwrite))
        report.add([] if setup.sparse else [f"--report: {NOTHING_TO_REPORT}; leave it out"])
    if args.save_embeds is not None:
        report.add(named_file_problems("save-embeds", args.save_embeds, "prompts.safetensors", args.overwrite))
        report.add(["--save-embeds: the prompts come from --embeds already; leave one out"] if args.embeds else [])
    if embeds is not None:
        report.add(_embeds_problems(embeds, setup, args.prompt))
    if report.problems:
        raise BadInput(report.problems)
    return Plan(setup, videos, args.report, embeds, args.save_embeds, args.overwrite)


def _load_embeds(report: Report, path: Path) -> EmbedsFile | None:
    from kandinsky5_nabla.pipeline.embeds_file import load_embeds  # here: it loads torch

    try:
        return load_embeds(path)
    except (OSError, ValueError) as error:
        report.add([f"--embeds: {error}"])
        return None


def _embeds_problems(embeds: EmbedsFile, setup: Setup, prompts: list[str]) -> Iterator[str]:
    """Yield why encoded prompts do not serve this run."""
    from kandinsky5_nabla.pipeline.embeds_file import check_fits
    from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT

    negative = DEFAULT_NEGATIVE_PROMPT if setup.negative_prompt is None else setup.negative_prompt
    guided = setup.settings.guidance_scale != 1
    for problem in embeds.texts.problems(prompts, negative if guided else None):
        yield f"--embeds {embeds.path}: {problem}"
    config = setup.checkpoint.configs["transformer"]
    if config or find_preset(setup.model) is not None:  # a published one that is not here yet has the published widths
        try:
            check_fits(embeds, config)
        except ValueError as error:
            yield f"--embeds: {error}"


def _videos(args: argparse.Namespace) -> list[Video]:
    first = secrets.randbelow(2**31) if args.seed is None else args.seed
    pairs = [(prompt, first + i) for prompt in args.prompt or [] for i in range(args.num_videos)]
    if args.output is None:
        names = [Path(f"{safe_name(prompt)}-{seed}.mp4") for prompt, seed in pairs]
        outputs = free_names(names, lambda name: not args.overwrite and (name.exists() or _latents_of(name).exists()))
    elif len(pairs) == 1:
        outputs = [args.output]
    else:
        outputs = [args.output.with_stem(f"{args.output.stem}-{i + 1}") for i in range(len(pairs))]
    return [Video(prompt, seed, output) for (prompt, seed), output in zip(pairs, outputs, strict=True)]


def _latents_of(output: Path) -> Path:
    return output.with_suffix(LATENTS_SUFFIX)
