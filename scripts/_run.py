"""A planned run: load, encode the text of all videos, then make one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLHunyuanVideo

from kandinsky5_nabla.configs.errors import BackendError, CheckpointError
from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.attention_report import AttentionRecord, recorded_attention, report_of
from kandinsky5_nabla.pipeline.embeds_file import save_embeds
from kandinsky5_nabla.pipeline.lora import load_loras
from kandinsky5_nabla.pipeline.offload import apply as place
from kandinsky5_nabla.pipeline.offload import release
from kandinsky5_nabla.pipeline.precision import cast_transformer, compute_dtype, text_encoder_quantization
from kandinsky5_nabla.pipeline.safety import check_part, check_part_weights
from kandinsky5_nabla.scripts._arguments import Unfinished
from kandinsky5_nabla.scripts._batch import Failure, Rows
from kandinsky5_nabla.scripts._expand import expand_videos
from kandinsky5_nabla.scripts._log import say
from kandinsky5_nabla.scripts._memory import plan_memory
from kandinsky5_nabla.scripts._outputs import write_json
from kandinsky5_nabla.scripts._setup import NOTHING_TO_REPORT
from kandinsky5_nabla.scripts._stages import say_what_runs, speak_plainly, stage
from kandinsky5_nabla.scripts._texts import Texts
from kandinsky5_nabla.scripts._video import Run, make_video

if TYPE_CHECKING:
    from kandinsky5_nabla.scripts._interrupt import Interrupts
    from kandinsky5_nabla.scripts._plan import Plan
    from kandinsky5_nabla.scripts._setup import Setup
    from kandinsky5_nabla.scripts._videos import Video


def run(
    plan: Plan,
    on_video: Callable[[dict[str, Any]], None],
    on_failure: Callable[[Failure], None],
    interrupts: Interrupts,
) -> dict[str, Any]:
    """Make the videos of a plan; return what was made, with the seconds of each stage.

    `on_video` gets each video's part of the result as soon as its file is complete, `on_failure` each row of a file
    of prompts that has none; the run goes on with the next row.

    Raises:
        UserError: if a stage fails before the first video; the message names it.
        Unfinished: if a video is not completed that is of no such row, or nothing more can be written.
    """
    speak_plainly()
    say_what_runs(plan.setup.device, plan.describe())
    rows = None if plan.batch is None else Rows(plan.batch, on_failure)
    nothing = {**plan.describe(), "videos": []}  # where every row is done
    described = _make_all(plan, on_video, rows, interrupts) if plan.videos else nothing
    if rows is None:
        return described
    say("done", rows.summary())
    failed = [failure.describe() for failure in rows.failed]
    return {**described, "failed": failed}


def _make_all(
    plan: Plan, on_video: Callable[[dict[str, Any]], None], rows: Rows | None, interrupts: Interrupts
) -> dict[str, Any]:
    """Load, encode all text, and make one video after the other; see `run`."""
    spent: dict[str, float] = {}
    with stage("load", spent, f"loading {plan.setup.model}"):
        pipe, setup = _decoder(plan.setup) if plan.decode_only else load(plan.setup)
    if plan.decode_only:
        assert plan.state is not None, "it has the latents"
        of_all = Run(pipe, plan, setup, setup.settings, plan.state.record.attention, None, interrupts)
    else:
        of_all = _encoded(pipe, plan, setup, interrupts, spent)
        plan = of_all.plan
    videos, reports = [], [*(plan.reports or [])]
    for video in plan.videos:
        with _recording(pipe, plan) as records:
            made = _attempt(of_all, video, spent, rows)
        if made is None:
            continue
        videos.append(made)
        on_video(made)
        if plan.report is not None:
            named = {name: made[name] for name in ("file", "seed", "prompt")}
            reports.append({**named, "report": report_of(records) if records else None})  # none where no step was left
            with stage("report", {}, f"writing {plan.report}"):  # again after each video: a later one may fail
                again = plan.overwrite or plan.reports is not None or len(videos) > 1
                write_json(plan.report, reports, overwrite=again)
    described = plan.describe() | setup.describe(of_all.settings, of_all.attention)
    return {**described, "videos": videos}


def _attempt(of_all: Run, video: Video, before: dict[str, float], rows: Rows | None) -> dict[str, Any] | None:
    """Make a video and return what it is; None where it is that of a row, and another one may succeed."""
    try:
        made = make_video(of_all.of(video), video, before)
    except Unfinished as error:
        if rows is None or error.ends_all:
            raise
        rows.fail(video, error.problem)
        return None
    if rows is not None:
        rows.complete(video)
    return made


def _encoded(
    pipe: Kandinsky5NablaPipeline, plan: Plan, setup: Setup, interrupts: Interrupts, spent: dict[str, float]
) -> Run:
    """Return the run once its text is encoded, or read, and the text encoders are released where that was planned."""
    settings = pipe.resolve_settings(**setup.given)
    if plan.report is not None and settings.nabla_P is None:
        raise BackendError(f"the report cannot be made: {NOTHING_TO_REPORT}; leave --report out")
    if setup.expand_prompt:
        plan = expand_videos(pipe, plan, spent)
    with stage("text", spent, "encoding the text" if plan.embeds is None else f"reading {plan.embeds.path}"):
        if plan.embeds is None:
            texts = Texts.encoded(pipe, plan.videos, guided=settings.guidance_scale != 1)
        else:
            texts = Texts.saved(plan.embeds.texts, plan.videos)
    if plan.save_embeds is not None:
        with stage("text", {}, f"writing {plan.save_embeds}"):
            save_embeds(
                plan.save_embeds,
                texts.together(),
                model=setup.model,
                revision=setup.checkpoint.commit,
                dtype=setup.text_encoder_dtype,
                overwrite=plan.overwrite,
            )
    assert setup.memory is not None, "load has planned it"
    if setup.memory.release:
        release(pipe, "text_encoder", "text_encoder_2")
    return Run(pipe, plan, setup, settings, pipe.transformer.attention_backend.get_name(), texts, interrupts)


def load(setup: Setup) -> tuple[Kandinsky5NablaPipeline, Setup]:
    """Return the pipeline of a setup, placed as its memory plan says, and the setup with all that is known now.

    Raises:
        OSError: if the checkpoint cannot be fetched.
        ValueError: if it is not what it should be, or does not fit into the memory.
    """
    checkpoint = setup.checkpoint.fetched()
    setup = dataclasses.replace(setup, checkpoint=checkpoint)
    setup = dataclasses.replace(setup, memory=plan_memory(setup))
    assert setup.memory is not None, "the checkpoint is here"
    say("memory", setup.memory.line(), needed_GB=round(setup.memory.needed / 1e9, 3))
    pipe = _folder(setup) if checkpoint.file is None else _single_file(setup, checkpoint.file)
    if setup.attention is not None:
        pipe.transformer.set_attention_backend(setup.attention)
    load_loras(pipe, setup.loras)
    if setup.dit_dtype != setup.dtype:
        cast_transformer(pipe.transformer, setup.dit_dtype, getattr(torch, setup.dtype))
    place(pipe, setup.memory, setup.device)
    return pipe, setup


def _decoder(setup: Setup) -> tuple[Kandinsky5NablaPipeline, Setup]:
    """Return a pipeline of the VAE alone on its device; errors as of `load`."""
    folder = setup.checkpoint.vae_folder()
    if problems := check_part("vae", folder) or check_part_weights("vae", folder):
        raise CheckpointError(f"the checkpoint cannot be loaded: {'; '.join(problems)}")
    vae = AutoencoderKLHunyuanVideo.from_pretrained(folder, torch_dtype=torch.float32, use_safetensors=True)
    pipe = Kandinsky5NablaPipeline(None, vae, preset=setup.checkpoint.config)
    pipe.to(setup.device)
    return pipe, setup


def _folder(setup: Setup) -> Kandinsky5NablaPipeline:
    checkpoint = setup.checkpoint
    assert checkpoint.folder is not None, "it was fetched"
    given: dict[str, Any] = dict.fromkeys(checkpoint.left_out)
    if setup.text_encoder_dtype != setup.dtype and not checkpoint.without_text:
        given["text_encoder"] = QwenTextEncoder.from_pretrained(
            checkpoint.folder / "text_encoder",
            dtype=compute_dtype(setup.text_encoder_dtype, setup.device),
            quantization_config=text_encoder_quantization(setup.text_encoder_dtype, setup.device),
        )
    dtypes = {"default": getattr(torch, setup.dtype), "vae": torch.float32}
    return Kandinsky5NablaPipeline.from_pretrained(checkpoint.folder, dtype=dtypes, preset=checkpoint.config, **given)


def _single_file(setup: Setup, file: Path) -> Kandinsky5NablaPipeline:
    checkpoint = setup.checkpoint
    return Kandinsky5NablaPipeline.from_single_file(
        file,
        preset=checkpoint.config,
        without=checkpoint.left_out,
        torch_dtype=getattr(torch, setup.dtype),
        text_encoder_dtype=compute_dtype(setup.text_encoder_dtype, setup.device),
        quantization_config=text_encoder_quantization(setup.text_encoder_dtype, setup.device),
        cache_dir=checkpoint.cache_dir,
        offline=checkpoint.offline,
        **checkpoint.parts,
    )


def _recording(pipe: Kandinsky5NablaPipeline, plan: Plan) -> AbstractContextManager[list[AttentionRecord]]:
    return nullcontext([]) if plan.report is None else recorded_attention(pipe.transformer)
