"""The denoising loop: Euler steps along the model's velocity, with classifier-free guidance.

Legend: B videos, T/H/W latent frames, rows and columns, C channels.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..attention import (
    AttentionMetadata,
    NablaAttentionMetadata,
    NablaAttentionMetadataBuilder,
    sta_mask,
)
from ..attention.order import tile_grid
from ..configs.errors import ArgumentError, BackendError, SettingsError
from .latents import first_not_finite, not_finite
from .text import TextEmbeddings

if TYPE_CHECKING:
    from ..models.transformer import Kandinsky5Transformer


@dataclasses.dataclass(frozen=True)
class Guidance:
    """What steers the denoising.

    Attributes:
        positive: embeddings of the prompts, B of them.
        negative: embeddings of the negative prompts, B of them; None without guidance.
        scale: w in v = v_neg + w * (v_pos - v_neg); 1 is no guidance.
    """

    positive: TextEmbeddings
    negative: TextEmbeddings | None
    scale: float


NextStep = tuple[torch.Tensor, Guidance] | None
"""Latents and guidance of the next step, or None to stop the loop."""

StepEnd = Callable[[int, torch.Tensor, Guidance], NextStep]
"""Called after each step with its index, the latents and the guidance."""


@torch.no_grad()
def denoise(
    transformer: Kandinsky5Transformer,
    latents: torch.Tensor,
    sigmas: torch.Tensor,
    guidance: Guidance,
    scale_factor: tuple[float, float, float],
    attn_metadata: AttentionMetadata | None,
    on_step_end: StepEnd | None = None,
    first_step: int = 0,
) -> torch.Tensor:
    """Integrate from noise to latents: x <- x + (sigma_next - sigma) * v, in fp32 whatever the model's dtype.

    Args:
        transformer: the velocity model.
        latents: fp32 `[B, T, H, W, C]` at sigmas[first_step]; not written to.
        sigmas: fp32 `[steps + 1]` of `make_sigmas`, those of the whole run.
        guidance: text and guidance scale.
        scale_factor: RoPE divisors along t, h, w.
        attn_metadata: metadata of the run (`make_attention_metadata`); None is dense attention.
        on_step_end: see `StepEnd`.
        first_step: index of the step to begin with; those before it are done.

    Returns:
        fp32 `[B, T, H, W, C]`, at sigma 0, or where `on_step_end` stopped the loop.

    Raises:
        NotFiniteError: if the latents stop being finite; the message names the step and, where it can be found, the
            layer.
    """
    for step in range(first_step, len(sigmas) - 1):
        if attn_metadata is not None:
            attn_metadata = dataclasses.replace(attn_metadata, current_timestep=step)
        predict = partial(guided_velocity, transformer, latents, sigmas[step], guidance, scale_factor, attn_metadata)
        latents = latents + (sigmas[step + 1] - sigmas[step]) * predict()
        if not torch.isfinite(latents).all():
            where = first_not_finite(transformer, predict)
            when = f"after step {step + 1} of {len(sigmas) - 1}{f' (first in {where})' if where else ''}"
            raise not_finite(when, transformer.dtype)
        if on_step_end is not None:
            answer = on_step_end(step, latents, guidance)
            if answer is None:
                break
            latents, guidance = answer
    return latents


def check_first_step(first_step: int, steps: int, latents: torch.Tensor | None) -> None:
    """Refuse to begin with a step that a run has not, or within it without latents.

    Raises:
        ValueError: if it is no whole number from 0 to `steps`, or above 0 without latents.
    """
    if not isinstance(first_step, numbers.Integral) or isinstance(first_step, bool) or not 0 <= first_step <= steps:
        raise SettingsError(f"first_step {first_step!r}: must be a whole number from 0 to the {steps} steps of the run")
    if first_step > 0 and latents is None:
        raise ArgumentError(f"first_step {first_step}: needs latents=, as they were after {first_step} steps")


def guided_velocity(
    transformer: Kandinsky5Transformer,
    latents: torch.Tensor,
    sigma: torch.Tensor,
    guidance: Guidance,
    scale_factor: tuple[float, float, float],
    attn_metadata: AttentionMetadata | None,
) -> torch.Tensor:
    """Return v_neg + w * (v_pos - v_neg), fp32 `[B, T, H, W, C]`; one model call instead of two when w = 1."""

    def velocity(text: TextEmbeddings) -> torch.Tensor:
        mask_BL = None if text.mask.all() else text.mask.to(latents.device)  # no mask: SDPA's fastest kernels
        timestep_B = (sigma * 1000).to(latents.device, torch.float32).expand(len(latents))
        return transformer(
            model_input(transformer, latents),
            text.prompt_embeds,
            text.pooled,
            timestep_B,
            encoder_attention_mask=mask_BL,
            scale_factor=scale_factor,
            attn_metadata=attn_metadata,
            return_dict=False,
        )[0].float()

    positive = velocity(guidance.positive)
    if guidance.negative is None:
        return positive
    negative = velocity(guidance.negative)
    return negative + guidance.scale * (positive - negative)


def model_input(transformer: Kandinsky5Transformer, latents: torch.Tensor) -> torch.Tensor:
    """Return the latents in the model's dtype; with `visual_cond` C zeros and a zero mask channel follow them."""
    return F.pad(latents, (0, transformer.in_channels - latents.shape[-1])).to(transformer.dtype)


def make_attention_metadata(
    transformer: Kandinsky5Transformer, latent_shape: tuple[int, ...], nabla_P: float | None, device: torch.device | str
) -> AttentionMetadata | None:
    """Return the metadata of a run over latents `(T, H, W, C)`, its window mask built; None for dense attention.

    Raises:
        ValueError: if the chosen backend cannot run this size, or the checkpoint's config has no window.
    """
    backend, config = transformer.attention_backend, transformer.config
    if not issubclass(backend.get_metadata_cls(), NablaAttentionMetadata):
        return None
    assert nabla_P is not None, "Settings give NABLA its P"
    T, H, W = (size // patch for size, patch in zip(latent_shape[:3], config["patch_size"], strict=True))
    head_size = sum(config["axes_dims"])
    heads = config["model_dim"] // head_size
    backend.require(num_heads=heads, head_size=head_size, visual_shape=(T, H, W), dtype=transformer.dtype)
    grid = tile_grid((T, H, W))
    if config["attention_add_sta"] is False:
        N = math.prod(grid)
        window_NN = torch.zeros(N, N, dtype=torch.bool, device=device)
    else:
        window_NN = sta_mask(grid, _window(config), device)
    return NablaAttentionMetadataBuilder().build(0, window_NN, nabla_P, (T, H, W))


def _window(config: Any) -> tuple[int, int, int]:
    window = (config["attention_wT"], config["attention_wH"], config["attention_wW"])
    if None in window:
        raise BackendError(
            "NABLA needs the window attention_wT, attention_wH, attention_wW of the checkpoint's config, which has "
            f"{window}: this checkpoint was trained with dense attention; use the backend SDPA"
        )
    return window
