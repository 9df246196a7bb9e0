"""One video of a run: denoised step by step into its state, decoded, exported, and described in its record."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from kandinsky5_nabla.configs.errors import InterruptedRun, OutOfMemoryError
from kandinsky5_nabla.configs.tiles import find_tile, next_smaller
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline, export_video
from kandinsky5_nabla.pipeline.embeds_file import EncodedTexts
from kandinsky5_nabla.pipeline.files import remove_leftovers
from kandinsky5_nabla.pipeline.offload import release
from kandinsky5_nabla.pipeline.text import TextEmbeddings
from kandinsky5_nabla.scripts._arguments import Unfinished
from kandinsky5_nabla.scripts._failures import is_out_of_memory, kind_of_failure
from kandinsky5_nabla.scripts._log import say
from kandinsky5_nabla.scripts._memory import less_for_denoising
from kandinsky5_nabla.scripts._outputs import taken, write_json
from kandinsky5_nabla.scripts._preview import Previews, write_sheet
from kandinsky5_nabla.scripts._progress import StepEnd, denoising_progress
from kandinsky5_nabla.scripts._record import Record
from kandinsky5_nabla.scripts._repeat import go_on_command
from kandinsky5_nabla.scripts._stages import stage
from kandinsky5_nabla.scripts._state import StateFolder

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.checks import Settings
    from kandinsky5_nabla.scripts._interrupt import Interrupts
    from kandinsky5_nabla.scripts._plan import Plan
    from kandinsky5_nabla.scripts._setup import Setup
    from kandinsky5_nabla.scripts._texts import Texts
    from kandinsky5_nabla.scripts._videos import Video

MOST_AT_RISK = 60.0
"""Seconds of denoising that a power cut may cost, unless a single step takes longer."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What all videos of a run share: the loaded pipeline, what was planned, and what is known since it was loaded.

    Attributes:
        attention: name of the backend.
        texts: the encoded texts; None for a run that only decodes.
    """

    pipe: Kandinsky5NablaPipeline
    plan: Plan
    setup: Setup
    settings: Settings
    attention: str
    texts: Texts | None
    interrupts: Interrupts

    def of(self, video: Video) -> Run:
        """Return the run with the numbers and the negative prompt of one of its videos."""
        given = {**self.setup.given, **video.given}
        setup = dataclasses.replace(self.setup, given=given, negative_prompt=video.negative_prompt)
        return dataclasses.replace(self, setup=setup, settings=dataclasses.replace(self.settings, **video.given))

    def record_of(self, video: Video) -> Record:
        """Return the record of a video; that of a state is kept, but for what a decoding may choose."""
        file: dict[str, Any] = {"codec": self.plan.codec.name, "crf": self.plan.crf}
        if self.plan.state is not None:
            tile = {} if self.setup.tile is None else {"vae_tile": self.setup.tile.name}
            return dataclasses.replace(self.plan.state.record, **tile, **file)
        embeds = None if self.plan.embeds is None else self.plan.embeds.path
        named = {"prompt": video.prompt, "short_prompt": video.short_prompt, "seed": video.seed, "embeds": embeds}
        return Record.of(self.setup, self.settings, self.attention, **named, **file)

    def texts_of(self, video: Video) -> EncodedTexts:
        """Return the texts of a video."""
        assert self.texts is not None, "only a run that decodes has none"
        return self.texts.of(video)

    def folder_of(self, video: Video) -> StateFolder:
        """Return where the state of a video lies: beside it, but for one that is decoded to another name."""
        state = None if self.plan.state is None else self.plan.state.folder
        return state or video.state


def make_video(run: Run, video: Video, before: dict[str, float]) -> dict[str, Any]:
    """Make one video and return what it is; until its file is complete its state is on disk.

    Raises:
        Unfinished: if a stage fails or is interrupted; it says what was kept, and how to go on.
    """
    plan, settings, spent = run.plan, run.settings, dict(before)
    overwrite = plan.overwrite or video.begun  # a run that was killed may have written its video already
    folder, record = run.folder_of(video), run.record_of(video)
    with _kept(run, folder, video), nullcontext() if plan.decode_only else folder.held():
        if not plan.decode_only:
            for path in (video.output, video.record, video.sheet):  # of a process that was killed in writing them
                remove_leftovers(path)
        if plan.state is None and not (video.begun and folder.exists()):
            _refuse_what_appeared(video, plan)
            with stage("state", {}, f"keeping the state of the run in {folder}"):
                folder.create(video.output, record, run.texts_of(video))
        latents = _denoised(run, video, folder, spent)
        frames, tile = _decode(run, latents, record.vae_tile, folder, spent)
        if tile != record.vae_tile:
            record = dataclasses.replace(record, vae_tile=tile)
            if not plan.decode_only:
                folder.write_settings(video.output, record)
        with stage("export", spent, f"writing {video.output}"):
            export_video(
                frames,
                video.output,
                run.setup.preset.fps,
                codec=plan.codec.name,
                crf=plan.crf,
                overwrite=overwrite,
                num_frames=settings.num_frames,
                comment=record.as_json(),
            )
            write_json(video.record, record.as_dict(), overwrite=overwrite)
            if plan.preview is not None:
                write_sheet(frames, video.sheet, overwrite=overwrite)
        if not (plan.keep_state or plan.decode_only):
            folder.remove()
    return {
        "file": str(video.output),
        **plan.sheet(video),
        **video.texts(),
        "width": settings.width,
        "height": settings.height,
        "num_frames": settings.num_frames,
        "fps": run.setup.preset.fps,
        "seed": video.seed,
        "vae_tile": record.vae_tile,
        "seconds": {stage: round(seconds, 2) for stage, seconds in spent.items()},
    }


def _refuse_what_appeared(video: Video, plan: Plan) -> None:
    """Raise an error if a name was taken since the run was planned: before the work, not after it."""
    if not (plan.overwrite or video.begun):
        for problem in taken("output", [video.output, video.record], False, plan.codec):
            raise problem


@contextmanager
def _kept(run: Run, folder: StateFolder, video: Video) -> Iterator[None]:
    """Say of whatever ends the body what was kept, which command goes on, and which videos were not begun."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        said, command = ["interrupted" if interrupted else str(error)], None
        if folder.exists() and not folder.in_use():
            state = folder.load()
            after = "" if state is None else f" after step {state['completed']} of {run.settings.num_inference_steps}"
            said.append(f"the {'encoded text' if state is None else 'state'}{after} is kept in {folder}")
            command = None if run.plan.decode_only else go_on_command(folder, run.plan.running)
        if run.plan.batch is not None:
            command = run.plan.batch.again
        elif waiting := run.plan.videos[run.plan.videos.index(video) + 1 :]:
            said.append(f"not begun: {', '.join(str(other.output) for other in waiting)}")
        code, ends_all = 130 if interrupted else 1, interrupted or _is_of_the_disk(error)
        kind = InterruptedRun if interrupted else kind_of_failure(error)
        raise Unfinished(code, kind("; ".join(said)), command, ends_all) from error


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Return whether an error says that files cannot be written, which the next video would meet, too."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, FileExistsError):
            return True
        error = error.__cause__
    return False


def _arguments(text: TextEmbeddings, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the arguments of the pipeline that stand for a text."""
    return {
        f"{prefix}prompt_embeds": text.prompt_embeds,
        f"{prefix}prompt_embeds_mask": text.mask,
        f"{prefix}pooled_prompt_embeds": text.pooled,
    }


def _denoised(run: Run, video: Video, folder: StateFolder, spent: dict[str, float]) -> torch.Tensor:
    """Return the final latents `[1, T, H, W, C]`, from the last step that the state has; they are in it afterwards.

    Raises:
        KeyboardInterrupt: after the step in which that was asked for.
    """
    steps, state = run.settings.num_inference_steps, folder.load()
    done = 0 if state is None else state["completed"]
    latents = None if state is None else state["latents"]
    if latents is not None and done == steps:
        return latents
    texts = run.texts_of(video)
    text = _arguments(texts.prompt(video.prompt))
    text |= {} if texts.negative is None else _arguments(texts.negative[1], "negative_")
    goes_on, colours = f", from step {done + 1}" if done else "", run.plan.preview
    previews = None if colours is None else Previews(colours, folder.preview, run.settings, latents)
    drawn = "" if colours is None else f", preview in {folder.preview}"
    progress = denoising_progress(run.pipe, run.setup.device, steps, done, file=str(video.output))
    title = f"denoising in {steps} steps{goes_on}, seed {video.seed}{drawn}"
    with stage("denoise", spent, title), _denoising(run), progress as tell:
        [latents] = run.pipe(
            **text,
            **run.setup.given,
            seed=video.seed,
            latents=latents,
            first_step=done,
            callback_on_step_end=_Saves(run, folder, previews, tell),
            output_type="latent",
            return_dict=False,
        )
    if run.interrupts.requested:
        raise KeyboardInterrupt
    return latents


class _Saves:
    """The pipeline's callback that saves, draws and tells of a step, and ends an interrupted run."""

    def __init__(self, run: Run, folder: StateFolder, previews: Previews | None, tell: StepEnd) -> None:
        self._run, self._folder, self._previews, self._tell = run, folder, previews, tell
        self._saved = self._step_began = time.perf_counter()

    def __call__(
        self, pipe: Kandinsky5NablaPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        interrupted = self._run.interrupts.requested
        if interrupted or self._is_time(step + 1):
            self._folder.save(tensors["latents"], step + 1)
            self._saved = time.perf_counter()
        if self._previews is not None:
            self._previews(step, tensors["latents"])
        self._step_began = time.perf_counter()
        self._tell(pipe, step, timestep, tensors)
        pipe._interrupt = interrupted

    def _is_time(self, completed: int) -> bool:
        every, now = self._run.plan.checkpoint_every, time.perf_counter()
        if completed == self._run.settings.num_inference_steps:
            return True
        if every is not None:
            return completed % every == 0
        return now - self._saved + (now - self._step_began) > MOST_AT_RISK  # after one more step it would be too late


@contextmanager
def _denoising(run: Run) -> Iterator[None]:
    """Let the first Ctrl-C wait for the end of a step, and add to an error of memory what would need less."""
    try:
        with run.interrupts.after_step():
            yield
    except Exception as error:
        if run.interrupts.requested and not isinstance(error, OSError):  # but for a save that failed
            raise KeyboardInterrupt from error  # a terminal sends Ctrl-C to compilers too, which end at once
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"{error}. {less_for_denoising(run.setup)}") from error
        raise


def _decode(
    run: Run, latents: torch.Tensor, tile: str, folder: StateFolder, spent: dict[str, float]
) -> tuple[Any, str]:
    """Return the frames `[F, H, W, 3]` and the tile that they were decoded with: a smaller one, if memory ran out.

    Raises:
        MemoryError: if it ran out with that, too.
    """
    with stage("decode", spent, "decoding"):
        if run.setup.memory is not None and run.setup.memory.release and len(run.plan.videos) == 1:
            release(run.pipe, "transformer")
        first, smaller = find_tile(tile), next_smaller(find_tile(tile))
        try:
            return run.pipe.decode(latents, "np", first)[0], tile
        except (RuntimeError, MemoryError) as error:
            if smaller is None or not is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())
            say("warning", f"memory ran out ({reason}): decoding again with {smaller.name}", logging.WARNING)
        release(run.pipe)  # out of the except block, whose error holds what was decoded so far
        try:
            return run.pipe.decode(latents, "np", smaller)[0], smaller.name
        except (RuntimeError, MemoryError) as error:
            last = next_smaller(smaller)
            if last is None or not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(f"{error}. --decode-only {folder} --vae-tile {last.name} takes less") from error
