"""One call's request, resolved and checked as a whole: every problem is found before anything is encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from ..attention import AttentionMetadata
from ..configs.errors import ArgumentError, PromptError, SettingsError
from .callbacks import checked_callback_tensors
from .checks import Geometry, Report, Settings
from .denoise import make_attention_metadata
from .embeddings import GivenText, TextSource, number_of_prompts
from .latents import check_latents, latent_shape, make_generators
from .text import DEFAULT_NEGATIVE_PROMPT, check_max_sequence_length

if TYPE_CHECKING:
    from .pipeline import Kandinsky5NablaPipeline

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
NO_TEXT_ENCODER = (
    "this pipeline has no text encoder, or lacks a part of one: give prompt_embeds with pooled_prompt_embeds, and "
    "negative_prompt_embeds with negative_pooled_prompt_embeds or guidance_scale=1"
)
NO_TRANSFORMER = "this pipeline has no transformer and can only decode latents (pipe.decode)"


@dataclass(frozen=True)
class Request:
    """What a call of the pipeline runs.

    Attributes:
        settings: the numbers.
        positive: prompts or their embeddings, B of them.
        negative: likewise, B of them or one for all; None without guidance.
        generators: of the noise, one for each of the B * num_videos videos.
        latent_shape: `(T, H, W, C)` of one video.
        attn_metadata: of the run, its window mask built; None for dense attention.
        max_sequence_length: limit of a prompt in tokens.
        callback_tensors: names of the tensors that a callback gets.
    """

    settings: Settings
    positive: TextSource
    negative: TextSource | None
    generators: list[torch.Generator | None]
    latent_shape: tuple[int, int, int, int]
    attn_metadata: AttentionMetadata | None
    max_sequence_length: int
    callback_tensors: tuple[str, ...]


def resolve_request(
    pipe: Kandinsky5NablaPipeline,
    positive: GivenText,
    negative: GivenText,
    *,
    latents: torch.Tensor | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    seed: int | None,
    max_sequence_length: int | None,
    output_type: str,
    callback: object,
    callback_tensors: Sequence[str],
    **given: Any,
) -> Request:
    """Return the request of a call: what is given (fields of `Settings`), and the preset's values for the rest.

    Raises:
        ValueError: with every problem.
    """
    if pipe.transformer is None:
        raise ArgumentError(NO_TRANSFORMER)
    geometry, config, report = pipe.geometry, pipe.transformer.config, Report()
    channels = config["out_visual_dim"]
    if latents is not None:
        check_latents(latents, channels)
        if not torch.isfinite(latents).all():
            raise ArgumentError("latents: hold NaN or infinity; give noise, or what a callback or a call gave")
        given = _size_of(latents, geometry) | {name: value for name, value in given.items() if value is not None}
    report.add(ArgumentError, _scheduler_problems(pipe.scheduler))
    report.raise_if_any()
    settings = pipe.resolve_settings(**given)
    if max_sequence_length is None:
        max_sequence_length = pipe.defaults.max_sequence_length

    report.add(SettingsError, settings.problems(geometry))
    report.attempt(check_max_sequence_length, max_sequence_length)
    report.attempt(check_output_type, output_type)
    names = report.attempt(checked_callback_tensors, callback, callback_tensors)
    sources = _text_sources(report, positive, negative, settings.guidance_scale, config)
    encoders = (pipe.text_encoder, pipe.tokenizer, pipe.text_encoder_2, pipe.tokenizer_2)
    if None in encoders and any(isinstance(source, list) for source in sources):
        report.add(ArgumentError, [NO_TEXT_ENCODER])
    report.raise_if_any()
    count = number_of_prompts(sources[0]) * settings.num_videos
    shape = latent_shape(settings.num_frames, settings.height, settings.width, channels, geometry)
    if latents is not None and tuple(latents.shape) != (count, *shape):
        report.add(ArgumentError, [f"latents {tuple(latents.shape)}: must be {(count, *shape)} for this request"])
    attn_metadata = report.attempt(
        make_attention_metadata, pipe.transformer, shape, settings.nabla_P, pipe._execution_device
    )
    generators = report.attempt(make_generators, count, generator, seed)
    report.raise_if_any()
    assert generators is not None, "the report has raised"
    assert names is not None, "the report has raised"
    return Request(settings, *sources, generators, shape, attn_metadata, int(max_sequence_length), names)


def check_output_type(output_type: object, known: Sequence[str] = OUTPUT_TYPES) -> None:
    """Raise an ArgumentError for a type of output that is not known."""
    if output_type not in known:
        raise ArgumentError(f"output_type {output_type!r}: must be one of {', '.join(known)}")


def _text_sources(
    report: Report, positive: GivenText, negative: GivenText, guidance_scale: float, config: Any
) -> tuple[TextSource, TextSource | None]:
    """Return the prompts and, with guidance, the negative ones; what is wrong with them goes into the report."""
    widths = (config["in_text_dim"], config["in_text_dim2"])
    source = report.attempt(positive.source, *widths)
    if source is None:
        report.add(PromptError, [] if report.problems else ["nothing to make a video of: give prompt or prompt_embeds"])
        return [], None
    if isinstance(guidance_scale, float | int) and guidance_scale == 1:  # what is no number is in the report
        return source, None
    against = report.attempt(negative.source, *widths) or [DEFAULT_NEGATIVE_PROMPT]
    if number_of_prompts(against) not in (1, number_of_prompts(source)):
        report.add(
            PromptError,
            [
                f"{number_of_prompts(against)} negative prompts for {number_of_prompts(source)} prompts: "
                "give one for all, or one for each"
            ],
        )
    return source, against


def _scheduler_problems(scheduler: object) -> Iterator[str]:
    if scheduler is not None and not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        yield (
            f"scheduler {type(scheduler).__name__}: this pipeline has its own Euler schedule and reads only the "
            "shift of a FlowMatchEulerDiscreteScheduler; give shift= and num_inference_steps= instead"
        )


def _size_of(latents: torch.Tensor, geometry: Geometry) -> dict[str, int]:
    T, H, W = latents.shape[1:4]
    return {
        "num_frames": (T - 1) * geometry.temporal_ratio + 1,
        "height": H * geometry.spatial_ratio,
        "width": W * geometry.spatial_ratio,
    }
