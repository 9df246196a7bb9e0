"""The command line's request, resolved and checked as a whole before any weight is read."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs import find_preset
from kandinsky5_nabla.configs.errors import (
    BackendError,
    EmbedsError,
    OutputError,
    PromptError,
    PromptsFileError,
    SettingsError,
    StateError,
    TakenError,
    UsageError,
    UserError,
    kind_of,
)
from kandinsky5_nabla.pipeline.checks import MAX_COUNT, Report, prompt_list
from kandinsky5_nabla.pipeline.codecs import Codec
from kandinsky5_nabla.scripts._batch import MANIFEST, Batch, earlier_reports, plan_batch, planned_for_all
from kandinsky5_nabla.scripts._expand import check_expansion
from kandinsky5_nabla.scripts._log import log_problems
from kandinsky5_nabla.scripts._outputs import (
    folder_problems,
    named_file_problems,
    taken,
    video_problems,
)
from kandinsky5_nabla.scripts._repeat import Saved, running_arguments
from kandinsky5_nabla.scripts._setup import (
    NOTHING_TO_REPORT,
    BadInput,
    Setup,
    make_setup,
    seed_problems,
)
from kandinsky5_nabla.scripts._videos import Video, codec_of, videos_of

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.embeds_file import EmbedsFile
    from kandinsky5_nabla.pipeline.preview import PreviewMap


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        setup: model, numbers and device.
        videos: one for each prompt and seed.
        codec: of their files.
        crf: their quality; None where the codec has no such choice.
        report: where to write what the attention did; None for nowhere.
        reports: those of rows that are done, which stay in its file; None where there is no such file.
        embeds: prompts that are encoded already; None where they are to be encoded.
        save_embeds: where to write the encoded prompts; None for nowhere.
        overwrite: replace existing files.
        saved: the state to go on from, or the record that was repeated; None for a run of its own.
        decode_only: decode the state's latents and leave it as it is.
        checkpoint_every: steps from one save of the state to the next; None for as often as a minute of work asks for.
        keep_state: leave the state where it is when the video is complete.
        running: arguments that a command which goes on has to repeat.
        batch: the file of prompts that the videos come from; None for those of the command line.
        preview: the colours of latents, for pictures on the way and a contact sheet in the end; None for neither.
    """

    setup: Setup
    videos: list[Video]
    codec: Codec
    crf: int | None
    report: Path | None
    reports: list[dict[str, Any]] | None
    embeds: EmbedsFile | None
    save_embeds: Path | None
    overwrite: bool
    saved: Saved | None
    decode_only: bool
    checkpoint_every: int | None
    keep_state: bool
    running: dict[str, Any]
    batch: Batch | None
    preview: PreviewMap | None

    @property
    def state(self) -> Saved | None:
        """The state to go on from; None where the run has to make its own."""
        return None if self.saved is None or self.saved.folder is None else self.saved

    def sheet(self, video: Video) -> dict[str, str]:
        """Return the name of a video's contact sheet, as "sheet"; nothing where there is to be none."""
        return {} if self.preview is None else {"sheet": str(video.sheet)}

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        outputs = [{"file": str(v.output), **self.sheet(v), "seed": v.seed, **v.texts()} for v in self.videos]
        report = {} if self.report is None else {"report": str(self.report)}
        state = {} if self.state is None else {"state": str(self.state.folder), "completed_steps": self.state.completed}
        batch = {} if self.batch is None else self.batch.describe()
        return {**self.setup.describe(), "memory": self.memory_lines(), "outputs": outputs, **report, **state, **batch}

    def cautions(self) -> list[str]:
        """Return sentences about what may not come out as expected: a size's once, however many rows have it."""
        sized = [replace(self.setup.settings, **video.given) for video in self.videos]
        of_size = [self.setup.preset.cautions(each.num_frames, each.height, each.width) for each in sized]
        of_state = [] if self.saved is None else self.saved.cautions()
        if self.report is not None and self.saved is not None and self.saved.completed:
            done, steps = self.saved.completed, self.saved.record.num_inference_steps
            missing = "every step is done" if done == steps else f"the first {done} of {steps} steps are done"
            of_state.append(f"{self.report}: {missing}, and a report is made in the steps: it will not have those")
        return [*dict.fromkeys(itertools.chain(*of_size)), *self.setup.differences, *of_state]

    def memory_lines(self) -> list[str]:
        """Return what each stage is expected to take, for people."""
        if self.setup.memory is not None:
            return self.setup.memory.lines()
        return ["memory: that of the VAE" if self.decode_only else "memory: planned once the checkpoint is here"]


def make_plan(args: argparse.Namespace, saved: Saved | None = None, argv: Sequence[str] = ()) -> Plan:
    """Return the plan of parsed arguments, which `_repeat.complete` may have completed from a record.

    `argv` are the arguments as they were typed: a run over a file of prompts goes on by the same command.

    Raises:
        BadInput: with every problem that was found.
    """
    report = Report()
    goes_on = saved is not None and saved.folder is not None
    embeds = saved.embeds if saved is not None and goes_on else _load_embeds(report, args.embeds)
    if embeds is not None and not args.prompt:
        args.prompt = list(embeds.texts.prompts)
    setup = make_setup(report, args, args.num_videos, len(args.prompt or [""]))
    report.extend(_prompt_problems(args, saved))
    if args.negative_prompt is not None:
        report.attempt(prompt_list, args.negative_prompt, "negative prompt")
    report.add(SettingsError, [] if args.seed is None else seed_problems(args.seed, args.num_videos))
    codec = codec_of(args)
    crf = report.attempt(codec.quality, args.crf)
    report.attempt(codec.rate, setup.preset.fps)
    own = saved is not None and args.resume is not None and saved.owns_output()
    overwrite = args.overwrite or own
    if args.prompts is None:
        batch, videos = None, _videos(report, args, codec, saved, overwrite)
        report.add(TakenError, _state_problems(videos, args.overwrite or goes_on))
    else:
        batch = plan_batch(report, args, setup, codec, crf, argv)
        videos = [] if batch is None else batch.videos
    if saved is not None:
        report.extend(saved.problems(setup))
    if args.checkpoint_every is not None and not 1 <= args.checkpoint_every <= MAX_COUNT:
        report.add(SettingsError, [f"--checkpoint-every {args.checkpoint_every}: must be from 1 to {MAX_COUNT} steps"])
    reports = None if args.report is None else _reports(report, args, setup, batch, videos)
    if args.save_embeds is not None:
        report.extend(named_file_problems("save-embeds", args.save_embeds, "prompts.safetensors", args.overwrite))
        if args.embeds is not None:
            report.add(UsageError, ["--save-embeds: the prompts come from --embeds already; leave one out"])
        if len({video.negative_prompt for video in videos}) > 1:
            report.add(
                UsageError, ["--save-embeds: holds one negative prompt, and the rows have several; leave it out"]
            )
    report.extend(log_problems(args.log))
    if embeds is not None:
        if not goes_on:
            report.add(EmbedsError, _text_problems(embeds, setup, args.prompt))
        report.extend(_width_problems(embeds, setup, goes_on))
    preview = _preview(report, args, setup, [] if batch else videos)  # a row's sheet is checked with the row
    if batch is not None and not report.problems:
        setup = planned_for_all(report, setup, videos) if videos else setup
        report.add(PromptsFileError, [] if videos or batch.done else batch.describe()["bad"])
    if args.expand_prompt:
        check_expansion(report, args, setup.checkpoint)
    if report.problems:
        raise BadInput(report.problems)
    return Plan(
        setup,
        videos,
        codec,
        crf,
        args.report,
        reports,
        embeds,
        args.save_embeds,
        overwrite,
        saved,
        args.decode_only is not None,
        args.checkpoint_every,
        args.keep_state,
        running_arguments(args),
        batch,
        preview,
    )


def _prompt_problems(args: argparse.Namespace, saved: Saved | None) -> list[UserError]:
    """Return what is wrong with where the prompts come from."""
    if args.prompts is not None:
        others = {"--from": saved} if saved else {"--prompt": args.prompt, "--embeds": args.embeds}
        both = " and ".join(name for name, value in others.items() if value)
        sentence = f"--prompts {args.prompts}: has the prompts of the run; leave {both} out"
        return [UsageError(sentence)] if both else []
    if not args.prompt:
        sentence = "no prompt was given: add --prompt TEXT (an empty text is allowed)"
        return [] if args.embeds else [PromptError(sentence)]
    report = Report()
    report.attempt(prompt_list, args.prompt)
    return report.problems


def _videos(
    report: Report, args: argparse.Namespace, codec: Codec, saved: Saved | None, overwrite: bool
) -> list[Video]:
    """Return the videos of the command line's prompts; what is wrong with their names goes into the report."""
    typed = {} if saved is None else {saved.record.prompt: saved.record.short_prompt}
    unusable = folder_problems("output", Path()) if args.output is None else video_problems(args.output, codec)
    videos = [] if unusable or args.num_videos > MAX_COUNT else videos_of(args, codec, typed)
    report.extend(unusable or taken("output", [video.output for video in videos], overwrite, codec))
    report.extend(taken("output", [video.record for video in videos], overwrite))
    return videos


def _load_embeds(report: Report, path: Path | None) -> EmbedsFile | None:
    if path is None:
        return None
    from kandinsky5_nabla.pipeline.embeds_file import load_embeds  # here: it loads torch

    try:
        return load_embeds(path)
    except (OSError, ValueError) as error:
        report.add(kind_of(error, EmbedsError), [f"--embeds: {error}"])
        return None


def _preview(report: Report, args: argparse.Namespace, setup: Setup, videos: list[Video]) -> PreviewMap | None:
    """Return the colours of latents, if asked for; why they, or the contact sheets, are not to be had is reported."""
    if args.preview is None:
        return None
    known = not report.problems  # of a checkpoint that is refused nothing more is read
    report.extend(taken("output", [video.sheet for video in videos], args.overwrite))
    if not known:
        return None
    from kandinsky5_nabla.scripts._preview import find_map  # here: it loads torch

    return report.attempt(find_map, args.preview, setup.checkpoint)


def _reports(
    report: Report, args: argparse.Namespace, setup: Setup, batch: Batch | None, videos: list[Video]
) -> list[dict[str, Any]] | None:
    """Return the reports of rows that are done, whose file is continued; why there can be no file is reported."""
    earlier = None if batch is None else earlier_reports(args.report, batch)
    overwrite = args.overwrite or earlier is not None
    report.extend(named_file_problems("report", args.report, "report.json", overwrite))
    names = {os.path.realpath(video.record): "the video's own record" for video in videos}
    if batch is not None:
        names[os.path.realpath(batch.folder / MANIFEST)] = "the manifest of the videos"
    if name := names.get(os.path.realpath(args.report)):
        report.add(OutputError, [f"report {args.report}: is the name of {name}; choose another"])
    report.add(BackendError, [] if setup.sparse else [f"--report: {NOTHING_TO_REPORT}; leave it out"])
    return earlier


def _text_problems(embeds: EmbedsFile, setup: Setup, prompts: list[str]) -> Iterator[str]:
    """Yield which texts of this run are not among the encoded ones."""
    from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT

    negative = DEFAULT_NEGATIVE_PROMPT if setup.negative_prompt is None else setup.negative_prompt
    guided = setup.settings.guidance_scale != 1
    for problem in embeds.texts.problems(prompts, negative if guided else None):
        yield f"--embeds {embeds.path}: {problem}"


def _width_problems(embeds: EmbedsFile, setup: Setup, of_state: bool) -> Iterator[UserError]:
    """Yield why the transformer cannot take encoded texts; those of a state nobody has named."""
    from kandinsky5_nabla.pipeline.embeds_file import check_fits

    config = setup.checkpoint.configs["transformer"]
    if config or find_preset(setup.model) is not None:  # a published one that is not here yet has the published widths
        try:
            check_fits(embeds, config)
        except ValueError as error:
            yield StateError(str(error)) if of_state else EmbedsError(f"--embeds: {error}")


def _state_problems(videos: list[Video], overwrite: bool) -> Iterator[str]:
    """Yield which states of other runs are in the way, and which run is being made right now."""
    for folder in (video.state for video in videos):
        if os.path.exists(folder.path) and not os.path.isdir(folder.path):
            yield f"output {folder}: is where the state of the run lies, and a file has that name; choose another name"
        elif folder.in_use():
            yield folder.in_use_sentence()
        elif folder.exists() and not overwrite:
            yield (
                f"output {folder}: holds the state of a run; --resume {folder} goes on with it, --overwrite begins anew"
            )
