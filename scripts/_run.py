"""A planned run: load, encode, then for each video denoise, keep the latents, decode and export."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline, export_video
from kandinsky5_nabla.pipeline.attention_report import AttentionRecord, recorded_attention, report_of
from kandinsky5_nabla.pipeline.embeddings import split_rows
from kandinsky5_nabla.pipeline.latents import save_latents
from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT, TextEmbeddings
from kandinsky5_nabla.scripts._outputs import write_json
from kandinsky5_nabla.scripts._setup import NOTHING_TO_REPORT

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.checks import Settings
    from kandinsky5_nabla.scripts._plan import Plan, Video
    from kandinsky5_nabla.scripts._setup import Setup


def run(plan: Plan, on_video: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Make the videos of a plan; return what was made, with the seconds of each stage.

    `on_video` gets each video's part of the result as soon as its file is complete.

    Raises:
        RuntimeError: if a stage fails; the message names the stage and what was kept.
    """
    speak_plainly()
    setup = plan.setup
    spent: dict[str, float] = {}
    with stage("load", spent, f"loading {setup.model}"):
        pipe = load(setup)
    settings = pipe.resolve_settings(**setup.given)
    if plan.report is not None and settings.nabla_P is None:
        raise RuntimeError(f"the report cannot be made: {NOTHING_TO_REPORT}; leave --report out")
    with stage("text", spent, "encoding the text"):
        texts = _encode(pipe, plan)
    videos, reports = [], []
    for video in plan.videos:
        with _recording(pipe, plan) as records:
            videos.append(_make_video(pipe, plan, settings, video, texts[video.prompt], spent))
        on_video(videos[-1])
        if plan.report is not None:
            named = {name: videos[-1][name] for name in ("file", "seed", "prompt")}
            reports.append({**named, "report": report_of(records)})
            with stage("report", {}, f"writing {plan.report}"):  # again after each video: a later one may fail
                write_json(plan.report, reports, overwrite=plan.overwrite or len(reports) > 1)
    return {**plan.describe(settings), "attention": pipe.transformer.attention_backend.get_name(), "videos": videos}


def load(setup: Setup) -> Kandinsky5NablaPipeline:
    """Return the pipeline of a setup, on its device."""
    pipe = Kandinsky5NablaPipeline.from_pretrained(
        setup.model, dtype=getattr(torch, setup.dtype), preset=setup.config, revision=setup.preset.revision
    )
    if setup.attention is not None:
        pipe.transformer.set_attention_backend(setup.attention)
    if setup.offload == "model":
        pipe.enable_model_cpu_offload(device=setup.device)
    elif setup.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=setup.device)
    else:
        pipe.to(setup.device)
    pipe.set_progress_bar_config(desc="denoise", disable=None, dynamic_ncols=True)  # None: no bar where no terminal
    return pipe


def _recording(pipe: Kandinsky5NablaPipeline, plan: Plan) -> AbstractContextManager[list[AttentionRecord]]:
    return nullcontext([]) if plan.report is None else recorded_attention(pipe.transformer)


def _encode(pipe: Kandinsky5NablaPipeline, plan: Plan) -> dict[str, dict[str, torch.Tensor]]:
    """Return for each prompt the arguments of the pipeline that stand for its text, all encoded in one go."""
    prompts = list(dict.fromkeys(video.prompt for video in plan.videos))
    negative = DEFAULT_NEGATIVE_PROMPT if plan.setup.negative_prompt is None else plan.setup.negative_prompt
    guided = pipe.resolve_settings(**plan.setup.given).guidance_scale != 1
    rows = split_rows(pipe.encode_prompt([*prompts, negative] if guided else prompts), [1] * (len(prompts) + guided))
    against = _arguments(rows.pop(), "negative_") if guided else {}
    return {prompt: _arguments(row, "") | against for prompt, row in zip(prompts, rows, strict=True)}


def _arguments(text: TextEmbeddings, prefix: str) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}prompt_embeds": text.prompt_embeds,
        f"{prefix}prompt_embeds_mask": text.mask,
        f"{prefix}pooled_prompt_embeds": text.pooled,
    }


def _make_video(
    pipe: Kandinsky5NablaPipeline,
    plan: Plan,
    settings: Settings,
    video: Video,
    text: dict[str, torch.Tensor],
    before: dict[str, float],
) -> dict[str, Any]:
    """Make one video; its latents are on disk from the last step until the MP4 is complete."""
    spent = dict(before)
    with stage("denoise", spent, f"denoising in {settings.num_inference_steps} steps, seed {video.seed}"):
        latents = pipe(**text, **plan.setup.given, seed=video.seed, output_type="latent").frames
        save_latents(video.latents, latents, prompt=video.prompt, seed=video.seed, fps=plan.setup.preset.fps)
    kept = f"the latents are kept in {video.latents}"
    with stage("decode", spent, "decoding", kept):
        frames = pipe.decode(latents, "np")[0]
    with stage("export", spent, f"writing {video.output}", kept):
        export_video(
            frames,
            video.output,
            plan.setup.preset.fps,
            overwrite=plan.overwrite,
            num_frames=settings.num_frames,
            comment=_record(pipe, plan, settings, video),
        )
    video.latents.unlink()
    return {
        "file": str(video.output),
        "prompt": video.prompt,
        "width": settings.width,
        "height": settings.height,
        "num_frames": settings.num_frames,
        "fps": plan.setup.preset.fps,
        "seed": video.seed,
        "seconds": {stage: round(seconds, 2) for stage, seconds in spent.items()},
    }


def _record(pipe: Kandinsky5NablaPipeline, plan: Plan, settings: Settings, video: Video) -> str:
    """Return what made a video, as JSON for the file itself; no times, so that the same run gives the same bytes."""
    record = plan.setup.describe(settings)
    record["attention"] = pipe.transformer.attention_backend.get_name()
    negative = plan.setup.negative_prompt
    return json.dumps({"prompt": video.prompt, "seed": video.seed, "negative_prompt": negative, **record})


@contextmanager
def stage(name: str, spent: dict[str, float], title: str, kept: str = "") -> Iterator[None]:
    """Announce a stage, record its seconds in `spent`, and on failure say what failed and what was kept."""
    print(f"{title} ...", file=sys.stderr)
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip()}"
        raise RuntimeError(f"{name} failed with {cause}" + (f"; {kept}" if kept else "")) from error
    except KeyboardInterrupt:
        if kept:
            print(kept, file=sys.stderr)
        raise
    spent[name] = time.perf_counter() - start


def speak_plainly() -> None:
    """Leave the terminal to this program: warnings as one line each, no bars and notes of the libraries."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    handler = logging.StreamHandler()
    handler.addFilter(_name_warnings)
    logging.getLogger("kandinsky5_nabla").addHandler(handler)
    logging.getLogger("kandinsky5_nabla.attention").setLevel(logging.INFO)  # what it compiles, and for how long


def _name_warnings(record: logging.LogRecord) -> bool:
    """Let a line say that it is a warning, and others speak for themselves."""
    if record.levelno >= logging.WARNING:
        record.msg, record.args = f"warning: {record.getMessage()}", ()
    return True
