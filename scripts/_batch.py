"""A run over a file of prompts: its rows as videos in one folder, what is done already, and the manifest."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs.errors import PromptsFileError, SettingsError, TakenError, UserError, kind_of
from kandinsky5_nabla.pipeline.checks import Report, prompt_list
from kandinsky5_nabla.pipeline.codecs import Codec
from kandinsky5_nabla.scripts._arguments import described
from kandinsky5_nabla.scripts._outputs import folder_problems, safe_name, taken, write_json
from kandinsky5_nabla.scripts._prompts import Row, read_prompts
from kandinsky5_nabla.scripts._record import Record, read_record, versions
from kandinsky5_nabla.scripts._repeat import command_line, holds
from kandinsky5_nabla.scripts._setup import Setup, seed_problems
from kandinsky5_nabla.scripts._videos import Video, drawn_seed

MANIFEST = "manifest.json"
SIZE = ("height", "width", "num_frames")
STEM_BYTES = 60
"""Of a prompt in a name: with the line, the seed and a suffix a name stays below 100 bytes."""

_COMPARED = (
    *("negative_prompt", "seed", "preset", "model", "vae", "text_encoder", "text_encoder_2", "loras", "dtype"),
    *("text_encoder_dtype", "dit_dtype", "height", "width", "num_frames", "num_inference_steps", "guidance_scale"),
    *("scale_factor", "fps", "codec", "crf"),
)
"""Fields of a record that are known before the checkpoint is loaded, and in which two runs differ if at all."""

_OF_CHECKPOINT = {"shift": "scheduler", "nabla_P": "transformer"}
"""Numbers that the config of a part may have: they are known if they are given, or that part lies here."""


@dataclass(frozen=True)
class Failure:
    """A row without a video, and why; `line` is its line in the file."""

    line: int
    problems: tuple[UserError, ...]

    def sentences(self, source: Path) -> list[str]:
        """Return the problems with the place where they are."""
        return [f"{source} line {self.line}: {problem}" for problem in self.problems]

    def describe(self) -> dict[str, Any]:
        """Return the failure as plain values."""
        return {"line": self.line, **described(self.problems)}


@dataclass(frozen=True)
class Batch:
    """The rows of a file.

    Attributes:
        source: the file.
        folder: where the videos go.
        seed: of the rows that have none; it is drawn where none was given.
        videos: those that are to be made.
        done: those that were made before, by the same run.
        bad: rows that cannot be made.
        again: the command line that goes on where this one was stopped.
        sizes: bytes of the videos that earlier runs have made in the folder, by name.
    """

    source: Path
    folder: Path
    seed: int
    videos: list[Video]
    done: list[Video]
    bad: list[Failure]
    again: str
    sizes: dict[str, int]

    def describe(self) -> dict[str, Any]:
        """Return as plain values what a run over the file would do."""
        bad = [sentence for failure in self.bad for sentence in failure.sentences(self.source)]
        return {"prompts": str(self.source), "folder": str(self.folder), "done_before": len(self.done), "bad": bad}


class Rows:
    """What becomes of the rows in a run, in the manifest beside the videos; it is written anew with each change."""

    def __init__(self, batch: Batch, on_failure: Callable[[Failure], None]) -> None:
        """Write the manifest, and hand each bad row to `on_failure`; errors as those of `complete_file`."""
        self.failed: list[Failure] = []
        self._batch, self._on_failure = batch, on_failure
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}
        # Those of bad rows stay, too: a damaged video must not be taken for done the next time.
        self._sizes = batch.sizes | {video.output.name: _size_of(video.output) for video in batch.done}
        for status, videos in {"done": batch.done, "waiting": batch.videos}.items():
            for video in videos:
                about = {"prompt": video.prompt, "seed": video.seed, "file": video.output.name}
                self._rows[_place(video)] = {"line": video.line, "status": status, **about}
        for failure in batch.bad:
            self._rows[failure.line, 0] = {"line": failure.line, "status": "failed"}
        batch.folder.mkdir(exist_ok=True)
        for failure in batch.bad:
            self._fail(self._rows[failure.line, 0], failure)
        self._write()

    def complete(self, video: Video) -> None:
        """Note that a video is complete."""
        self._rows[_place(video)]["status"] = "done"
        self._sizes[video.output.name] = _size_of(video.output)
        self._write()

    def fail(self, video: Video, problem: UserError) -> None:
        """Note that a video could not be made."""
        row = self._rows[_place(video)]
        self._fail(row, Failure(row["line"], (problem,)))
        self._write()

    def summary(self) -> str:
        """Return how many rows came to what."""
        counts = Counter(row["status"] for row in self._rows.values())
        return f"{self._batch.folder / MANIFEST}: {', '.join(f'{count} {status}' for status, count in counts.items())}"

    def _fail(self, row: dict[str, Any], failure: Failure) -> None:
        row |= {"status": "failed", **described(failure.problems)}
        self.failed.append(failure)
        self._on_failure(failure)

    def _write(self) -> None:
        rows = [self._rows[place] for place in sorted(self._rows)]
        source = {"prompts": str(self._batch.source), "seed": self._batch.seed}
        content = {**source, "rows": rows, "bytes": self._sizes}
        write_json(self._batch.folder / MANIFEST, content, overwrite=True)


def plan_batch(
    report: Report, args: argparse.Namespace, setup: Setup, codec: Codec, crf: int | None, argv: Sequence[str]
) -> Batch | None:
    """Return what a run over a file of prompts has to do, None where the file or the folder cannot be used at all.

    What is wrong with the file goes into the report, what is wrong with a row into the batch.
    """
    folder = args.output or args.prompts.with_suffix("")
    report.extend(_folder_problems(folder))
    try:
        rows = read_prompts(args.prompts)
    except (OSError, ValueError) as error:
        report.add(kind_of(error, PromptsFileError), [f"--prompts {error}"])
        return None
    earlier = (Report() if args.overwrite else report).attempt(_read_manifest, folder) or (None, {})
    seed = args.seed if args.seed is not None else earlier[0]
    again = command_line(_without(argv, "--save-embeds"))  # it is written by the time that this is asked for
    batch = Batch(args.prompts, folder, drawn_seed() if seed is None else seed, [], [], [], again, earlier[1])
    if report.problems:  # rows would be checked against numbers that are wrong themselves
        return batch
    sized: dict[tuple[int | None, ...], tuple[list[UserError], Setup]] = {}
    for row in rows:
        size = tuple(row.given.get(name) for name in SIZE)
        if size not in sized:
            sized[size] = _resized(setup, size)
        problems, of_row = sized[size]
        checked = Report()
        checked.add(PromptsFileError, row.problems)
        checked.extend(problems)
        found = list(_videos_of_row(checked, row, args, batch, of_row, codec, crf))
        if checked.problems:
            batch.bad.append(Failure(row.line, tuple(checked.problems)))
        else:
            batch.done.extend(video for video, done in found if done)
            batch.videos.extend(video for video, done in found if not done)
    return batch


def planned_for_all(report: Report, setup: Setup, videos: Sequence[Video]) -> Setup:
    """Return the setup with the memory of the largest video: placed for that one, all of them fit."""
    sizes = {tuple(video.given.get(name) for name in SIZE) for video in videos}
    all_settings = [_resized(setup, size)[1].settings for size in sizes]
    most = max(all_settings, key=lambda each: each.height * each.width * each.num_frames)
    return replace(setup, num_videos=len(videos), largest=most).planned(report)


def _videos_of_row(
    report: Report, row: Row, args: argparse.Namespace, batch: Batch, setup: Setup, codec: Codec, crf: int | None
) -> Iterator[tuple[Video, bool]]:
    """Yield the videos of a row and whether each is done; what is wrong goes into the report."""
    seed = row.given.get("seed", batch.seed)
    report.add(SettingsError, seed_problems(seed, args.num_videos))
    negative = row.given.get("negative_prompt", args.negative_prompt)
    report.attempt(prompt_list, [row.prompt, negative or ""])
    given = {name: row.given[name] for name in SIZE if name in row.given}
    for i in range(0 if report.problems else args.num_videos):
        name = f"{row.line:04}-{safe_name(row.prompt, STEM_BYTES)}-{seed + i}{codec.suffix}"
        video = Video(row.prompt, seed + i, batch.folder / name, negative, given, row.line)
        video, done = _compared(report, video, setup, codec, crf, batch.sizes.get(video.output.name), args)
        if args.preview is not None and not (done or video.begun):
            report.extend(taken("output", [video.sheet], args.overwrite))
        yield video, done


def _compared(
    report: Report,
    video: Video,
    setup: Setup,
    codec: Codec,
    crf: int | None,
    size: int | None,
    args: argparse.Namespace,
) -> tuple[Video, bool]:
    """Return a video and whether it is done; a file of another run in its place goes into the report.

    With `--overwrite` what is the same already stays, and what is not is made anew.
    """
    begun = video.state.exists()
    there = [path for path in (video.output, video.record) if os.path.lexists(path)]
    if not begun and not there:
        return video, False
    if video.state.in_use():
        report.add(TakenError, [video.state.in_use_sentence()])
        return video, False
    in_the_way = video.state if begun else there[-1]
    remedy = "--overwrite makes it anew, another --output leaves it"
    problems = Report() if args.overwrite else report
    try:
        record = video.state.read_settings()[1] if begun else read_record(there[-1])
    except (OSError, ValueError) as error:
        problems.add(TakenError, [f"{in_the_way}: is in the way ({error}); {remedy}"])
        return video, False
    differences = list(_differences(record, video, setup, codec, crf))
    if args.overwrite and record.versions != versions():
        differences.append("other versions")
    if differences:
        problems.add(TakenError, [f"{in_the_way}: was made with {', '.join(differences)}; {remedy}"])
        return video, False
    complete = video.output in there
    if begun:  # its state is left of a run that was killed, or was kept on purpose
        complete = args.keep_state and len(there) == 2 and all(holds(path, record) for path in there)
    elif complete and size not in (None, found := _size_of(video.output)):
        problems.add(TakenError, [f"{video.output}: has {found} bytes and was written with {size}; {remedy}"])
        return video, False
    return replace(video, begun=not complete), complete


def _differences(record: Record, video: Video, setup: Setup, codec: Codec, crf: int | None) -> Iterator[str]:
    """Yield in what a record differs from what a video of this run would have, as far as that is known now."""
    attention = setup.attention or record.attention
    typed = record.prompt if record.short_prompt is None else record.short_prompt
    named = {"prompt": video.prompt, "short_prompt": None, "seed": video.seed, "embeds": None}
    setup = replace(setup, negative_prompt=video.negative_prompt)
    expected = Record.of(setup, setup.settings, attention, **named, codec=codec.name, crf=crf)
    record = replace(record, prompt=typed)  # whether it was expanded is not known before the text encoder is loaded
    configs = setup.checkpoint.configs
    numbers = [name for name, part in _OF_CHECKPOINT.items() if setup.given[name] is not None or configs[part]]
    compared = [*_COMPARED, "prompt", "attention", *numbers, *(["vae_tile"] if setup.tile is not None else [])]
    for name in compared:
        was, here = getattr(record, name), getattr(expected, name)
        if was != here:
            yield f"{name} {was!r}, not {here!r}"


def _resized(setup: Setup, size: tuple[int | None, ...]) -> tuple[list[UserError], Setup]:
    """Return the setup at another size, and what is wrong with that."""
    report = Report()
    given = {name: value for name, value in zip(SIZE, size, strict=True) if value is not None}
    return report.problems, setup.resized(report, given)


def _folder_problems(folder: Path) -> list[UserError]:
    """Return why the videos cannot lie in a folder, which is made if need be."""
    if os.path.isdir(folder):
        return folder_problems("output", folder)
    if os.path.lexists(folder):
        return [TakenError(f"output {folder}: is a file, and with --prompts the output is a folder; name another")]
    return folder_problems("output", folder.parent)


def _read_manifest(folder: Path) -> tuple[int | None, dict[str, int]]:
    """Return the seed of an earlier run in a folder, and the bytes of its videos; None and nothing without one.

    Raises:
        TakenError: if it is damaged, or no manifest.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None, {}
    try:
        manifest = json.loads(path.read_text("utf-8"))
        seed, sizes = manifest["seed"], dict(manifest["bytes"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error)
    else:
        if type(seed) is int and not seed_problems(seed):
            return seed, sizes
        reason = f"its seed is {seed!r}"
    remedy = "--overwrite replaces it, another --output leaves it"
    raise TakenError(f"{path}: is damaged, or no manifest of a run over prompts ({reason}); {remedy}")


def earlier_reports(path: Path, batch: Batch) -> list[dict[str, Any]] | None:
    """Return the reports of done rows in a file of an earlier run; None where it is no such file."""
    try:
        reports = json.loads(path.read_text("utf-8"))
        if all({"file", "report"} <= each.keys() for each in reports):
            done = {str(video.output) for video in batch.done}
            return [each for each in reports if each["file"] in done]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _size_of(output: Path) -> int:
    """Return the bytes of a video, those of a folder of frames together."""
    files = output.iterdir() if output.is_dir() else [output]
    return sum(file.stat().st_size for file in files)


def _without(argv: Sequence[str], option: str) -> Iterator[str]:
    """Yield a command line's words but for an option and its value."""
    words = iter(argv)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            yield word


def _place(video: Video) -> tuple[int, int]:
    assert video.line is not None, "it is of a row"
    return video.line, video.seed
