"""A planned run: load, encode, then for each video denoise, keep the latents, decode and export."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline, export_video
from kandinsky5_nabla.pipeline.embeddings import split_rows
from kandinsky5_nabla.pipeline.latents import save_latents
from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT, TextEmbeddings

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.checks import Settings
    from kandinsky5_nabla.scripts._plan import Plan, Video


def run(plan: Plan, on_video: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Make the videos of a plan; return what was made, with the seconds of each stage.

    `on_video` gets each video's part of the result as soon as its file is complete.

    Raises:
        RuntimeError: if a stage fails; the message names the stage and what was kept.
    """
    _speak_plainly()
    spent: dict[str, float] = {}
    with _stage("load", spent, f"loading {plan.model}"):
        pipe = _load(plan)
    with _stage("text", spent, "encoding the text"):
        texts = _encode(pipe, plan)
    settings = pipe.resolve_settings(**plan.given)
    videos = []
    for video in plan.videos:
        videos.append(_make_video(pipe, plan, settings, video, texts[video.prompt], spent))
        on_video(videos[-1])
    return {**plan.describe(settings), "attention": pipe.transformer.attention_backend.get_name(), "videos": videos}


def _load(plan: Plan) -> Kandinsky5NablaPipeline:
    pipe = Kandinsky5NablaPipeline.from_pretrained(
        plan.model, dtype=getattr(torch, plan.dtype), preset=plan.config, revision=plan.preset.revision
    )
    if plan.attention is not None:
        pipe.transformer.set_attention_backend(plan.attention)
    if plan.offload == "model":
        pipe.enable_model_cpu_offload(device=plan.device)
    elif plan.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=plan.device)
    else:
        pipe.to(plan.device)
    pipe.set_progress_bar_config(desc="denoise", disable=None, dynamic_ncols=True)  # None: no bar where no terminal
    return pipe


def _encode(pipe: Kandinsky5NablaPipeline, plan: Plan) -> dict[str, dict[str, torch.Tensor]]:
    """Return for each prompt the arguments of the pipeline that stand for its text, all encoded in one go."""
    prompts = list(dict.fromkeys(video.prompt for video in plan.videos))
    negative = DEFAULT_NEGATIVE_PROMPT if plan.negative_prompt is None else plan.negative_prompt
    guided = pipe.resolve_settings(**plan.given).guidance_scale != 1
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
    with _stage("denoise", spent, f"denoising in {settings.num_inference_steps} steps, seed {video.seed}"):
        latents = pipe(**text, **plan.given, seed=video.seed, output_type="latent").frames
        save_latents(video.latents, latents, prompt=video.prompt, seed=video.seed, fps=plan.preset.fps)
    kept = f"the latents are kept in {video.latents}"
    with _stage("decode", spent, "decoding", kept):
        frames = pipe.decode(latents, "np")[0]
    with _stage("export", spent, f"writing {video.output}", kept):
        export_video(
            frames,
            video.output,
            plan.preset.fps,
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
        "fps": plan.preset.fps,
        "seed": video.seed,
        "seconds": {stage: round(seconds, 2) for stage, seconds in spent.items()},
    }


def _record(pipe: Kandinsky5NablaPipeline, plan: Plan, settings: Settings, video: Video) -> str:
    """Return what made a video, as JSON for the file itself; no times, so that the same run gives the same bytes."""
    record = {name: value for name, value in plan.describe(settings).items() if name != "outputs"}
    record["attention"] = pipe.transformer.attention_backend.get_name()
    return json.dumps({"prompt": video.prompt, "seed": video.seed, "negative_prompt": plan.negative_prompt, **record})


@contextmanager
def _stage(name: str, spent: dict[str, float], title: str, kept: str = "") -> Iterator[None]:
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


def _speak_plainly() -> None:
    """Leave the terminal to this program: warnings as one line each, no bars and notes of the libraries."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("kandinsky5_nabla").addHandler(handler)
