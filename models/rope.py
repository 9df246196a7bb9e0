"""Rotary position embedding in 1-D (text) and 3-D (video).

The tables are functions of shape and scale, computed in fp32 in each forward: there is no buffer that a cast to
half precision could round or that loading on `meta` could leave empty.
Legend: B batch, S tokens, H heads, D head dim, P = D / 2 rotated pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..configs.errors import SettingsError

MAX_POSITIONS = 128
"""Positions per video axis that the published models know (checkpoints.md): 509 frames, 2048 pixels."""


class Rope(NamedTuple):
    """Cosines and sines of the rotation angles, fp32 `[S, P]` each."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_1d(length: int, dim: int, device: torch.device) -> Rope:
    """Return the table for positions 0 .. length - 1 over all `dim` channels of a head."""
    angles_SP = _angles(length, dim, 1.0, device)
    return Rope(angles_SP.cos(), angles_SP.sin())


def rope_3d(
    visual_shape: tuple[int, int, int],
    axes_dims: tuple[int, int, int],
    scale_factor: tuple[float, float, float],
    device: torch.device,
) -> Rope:
    """Return the table for `visual_shape = (T, H, W)` tokens in raster order, S = T * H * W.

    The axes share the head's channels in the order t, h, w as `axes_dims` says; angles are divided by the
    `scale_factor` of their axis.

    Raises:
        ValueError: if an axis is longer than 128 positions.
    """
    if max(visual_shape) > MAX_POSITIONS:
        raise SettingsError(
            f"{visual_shape} tokens (frames, rows, columns): at most {MAX_POSITIONS} positions an axis are known, "
            "that is 509 frames and 2048 pixels"
        )
    angles_THWP = [
        _angles(length, dim, scale, device).view([-1 if i == axis else 1 for i in range(3)] + [dim // 2])
        for axis, (length, dim, scale) in enumerate(zip(visual_shape, axes_dims, scale_factor, strict=True))
    ]
    angles_SP = torch.cat([a.expand(*visual_shape, -1) for a in angles_THWP], dim=-1).flatten(0, 2)
    return Rope(angles_SP.cos(), angles_SP.sin())


def _angles(length: int, dim: int, scale: float, device: torch.device) -> torch.Tensor:
    """Return position * exp(-ln(10000) * i / (dim/2)) / scale, `[length, dim/2]`."""
    index = torch.arange(dim // 2, dtype=torch.float32, device=device)
    frequency = torch.exp(-math.log(10000.0) * index / (dim // 2))
    position = torch.arange(length, dtype=torch.float32, device=device)
    return torch.outer(position, frequency) / scale


def apply_rope(x_BSHD: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate neighbouring channel pairs of fp32 `[B, S, H, D]`: (x0 cos - x1 sin, x0 sin + x1 cos)."""
    cos_S1P, sin_S1P = rope.cos[:, None], rope.sin[:, None]
    x0, x1 = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((x0 * cos_S1P - x1 * sin_S1P, x0 * sin_S1P + x1 * cos_S1P), dim=-1).flatten(-2)
