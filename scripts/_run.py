"""A planned run: load, encode, then for each video denoise, keep the latents, decode and export."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kandinsky5_nabla.configs.tiles import next_smaller, vae_tiles
from kandinsky5_nabla.models.text_encoder import QwenTextEncoder
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline, export_video
from kandinsky5_nabla.pipeline.attention_report import AttentionRecord, recorded_attention, report_of
from kandinsky5_nabla.pipeline.embeddings import split_rows
from kandinsky5_nabla.pipeline.embeds_file import EncodedTexts, save_embeds
from kandinsky5_nabla.pipeline.latents import save_latents
from kandinsky5_nabla.pipeline.lora import load_loras, with_triggers
from kandinsky5_nabla.pipeline.offload import apply as place
from kandinsky5_nabla.pipeline.offload import release
from kandinsky5_nabla.pipeline.precision import cast_transformer, compute_dtype, text_encoder_quantization
from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT, TextEmbeddings
from kandinsky5_nabla.scripts._memory import plan_memory
from kandinsky5_nabla.scripts._outputs import write_json
from kandinsky5_nabla.scripts._setup import NOTHING_TO_REPORT

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.checks import Settings
    from kandinsky5_nabla.scripts._plan import Plan, Video
    from kandinsky5_nabla.scripts._setup import Setup

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""What torch's error names where the memory of a CPU is used up."""


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
        pipe, setup = load(setup)
    settings = pipe.resolve_settings(**setup.given)
    if plan.report is not None and settings.nabla_P is None:
        raise RuntimeError(f"the report cannot be made: {NOTHING_TO_REPORT}; leave --report out")
    with stage("text", spent, "encoding the text" if plan.embeds is None else f"reading {plan.embeds.path}"):
        guided = settings.guidance_scale != 1
        texts = _encode(pipe, plan, guided) if plan.embeds is None else plan.embeds.texts
        arguments = _arguments_of(texts, [video.prompt for video in plan.videos], guided)
    if plan.save_embeds is not None:
        with stage("text", {}, f"writing {plan.save_embeds}"):
            save_embeds(
                plan.save_embeds,
                texts,
                model=setup.model,
                revision=setup.checkpoint.commit,
                dtype=setup.text_encoder_dtype,
                overwrite=plan.overwrite,
            )
    assert setup.memory is not None, "load has planned it"
    if setup.memory.release:
        release(pipe, "text_encoder", "text_encoder_2")
    run = Run(pipe, plan, setup, settings, pipe.transformer.attention_backend.get_name())
    videos, reports = [], []
    for video in plan.videos:
        with _recording(pipe, plan) as records:
            videos.append(_make_video(run, video, arguments[video.prompt], spent))
        on_video(videos[-1])
        if plan.report is not None:
            named = {name: videos[-1][name] for name in ("file", "seed", "prompt")}
            reports.append({**named, "report": report_of(records)})
            with stage("report", {}, f"writing {plan.report}"):  # again after each video: a later one may fail
                write_json(plan.report, reports, overwrite=plan.overwrite or len(reports) > 1)
    described = plan.describe() | setup.describe(settings, run.attention)
    return {**described, "videos": videos}


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
    print(setup.memory.line(), file=sys.stderr)
    pipe = _folder(setup) if checkpoint.file is None else _single_file(setup, checkpoint.file)
    if setup.attention is not None:
        pipe.transformer.set_attention_backend(setup.attention)
    load_loras(pipe, setup.loras)
    if setup.dit_dtype != setup.dtype:
        cast_transformer(pipe.transformer, setup.dit_dtype, getattr(torch, setup.dtype))
    place(pipe, setup.memory, setup.device)
    pipe.set_progress_bar_config(desc="denoise", disable=None, dynamic_ncols=True)  # None: no bar where no terminal
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


def _encode(pipe: Kandinsky5NablaPipeline, plan: Plan, guided: bool) -> EncodedTexts:
    """Encode all prompts in one go, and what they are guided against."""
    prompts = list(dict.fromkeys(video.prompt for video in plan.videos))
    negative = DEFAULT_NEGATIVE_PROMPT if plan.setup.negative_prompt is None else plan.setup.negative_prompt
    texts = with_triggers(prompts, pipe.acting_trigger_words)
    rows = split_rows(pipe.encode_prompt([*texts, negative] if guided else texts), [1] * (len(prompts) + guided))
    against = (negative, rows.pop()) if guided else None
    return EncodedTexts(dict(zip(prompts, rows, strict=True)), against)


def _arguments_of(texts: EncodedTexts, prompts: list[str], guided: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Return for each prompt the arguments of the pipeline that stand for its text."""
    against = _arguments(texts.negative[1], "negative_") if guided and texts.negative is not None else {}
    return {prompt: _arguments(texts.prompt(prompt), "") | against for prompt in prompts}


def _arguments(text: TextEmbeddings, prefix: str) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}prompt_embeds": text.prompt_embeds,
        f"{prefix}prompt_embeds_mask": text.mask,
        f"{prefix}pooled_prompt_embeds": text.pooled,
    }


@dataclasses.dataclass(frozen=True)
class Run:
    """What all videos of a run share: the loaded pipeline, what was planned, and what is known since it was loaded."""

    pipe: Kandinsky5NablaPipeline
    plan: Plan
    setup: Setup
    settings: Settings
    attention: str


def _make_video(run: Run, video: Video, text: dict[str, torch.Tensor], before: dict[str, float]) -> dict[str, Any]:
    """Make one video; its latents are on disk from the last step until the MP4 is complete."""
    spent, pipe, settings, fps = dict(before), run.pipe, run.settings, run.setup.preset.fps
    with stage("denoise", spent, f"denoising in {settings.num_inference_steps} steps, seed {video.seed}"):
        latents = pipe(**text, **run.setup.given, seed=video.seed, output_type="latent").frames
        save_latents(video.latents, latents, prompt=video.prompt, seed=video.seed, fps=fps)
    kept = f"the latents are kept in {video.latents}"
    with stage("decode", spent, "decoding", kept):
        if run.setup.memory is not None and run.setup.memory.release and len(run.plan.videos) == 1:
            release(pipe, "transformer")
        frames, run = _decode(run, latents)
    with stage("export", spent, f"writing {video.output}", kept):
        export_video(
            frames,
            video.output,
            fps,
            overwrite=run.plan.overwrite,
            num_frames=settings.num_frames,
            comment=_record(run, video),
        )
    video.latents.unlink()
    return {
        "file": str(video.output),
        "prompt": video.prompt,
        "width": settings.width,
        "height": settings.height,
        "num_frames": settings.num_frames,
        "fps": fps,
        "seed": video.seed,
        **({} if run.setup.tile is None else {"vae_tile": run.setup.tile.name}),
        "seconds": {stage: round(seconds, 2) for stage, seconds in spent.items()},
    }


def _decode(run: Run, latents: torch.Tensor) -> tuple[Any, Run]:
    """Return the frames, and the run with the tile that made them: the next smaller one where memory runs out."""
    try:
        return run.pipe.decode(latents, "np", run.setup.tile)[0], run
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and a CPU's allocator has no class of its own
        smaller = next_smaller(run.setup.tile or vae_tiles()[0])
        if smaller is None or not (isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)):
            raise
    # Out here, since the error holds on to what was in memory.
    print(f"out of memory: decoding again in smaller tiles (--vae-tile {smaller.name}) ...", file=sys.stderr)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    run = dataclasses.replace(run, setup=dataclasses.replace(run.setup, tile=smaller))
    return run.pipe.decode(latents, "np", smaller)[0], run


def _record(run: Run, video: Video) -> str:
    """Return what made a video, as JSON for the file itself; no times, so that the same run gives the same bytes."""
    record = run.setup.describe(run.settings, run.attention)
    negative = run.setup.negative_prompt
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
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for each layer and prompt
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
