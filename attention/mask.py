"""Which key blocks each query block sees: the window mask, and NABLA's selection under the seeds' names.

Legend: B batch, H heads, N blocks; query blocks are rows, key blocks columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..configs.errors import BackendError
from .selection import select_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def sta_mask(
    grid: tuple[int, int, int], window: tuple[int, int, int], device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the spatio-temporal window mask, bool `[N, N]`, for `grid = (T, Hblocks, Wblocks)`.

    Block (t, y, x) sees (t', y', x') iff |t-t'| <= wT//2, |y-y'| <= wH//2 and |x-x'| <= wW//2, with
    `window = (wT, wH, wW)`.

    Raises:
        ValueError: if a size or a window is less than 1, or there are not three of each.
    """
    if len(grid) != 3 or len(window) != 3 or not all(size >= 1 for size in (*grid, *window)):
        raise BackendError(f"grid {grid} and window {window} must be three sizes each, at least 1 on every axis")
    near_t, near_y, near_x = (_near(size, width, device) for size, width in zip(grid, window, strict=True))
    seen = (
        near_t[:, None, None, :, None, None]
        & near_y[None, :, None, None, :, None]
        & near_x[None, None, :, None, None, :]
    )
    return seen.reshape(math.prod(grid), math.prod(grid))


def _near(size: int, width: int, device: torch.device | str | None) -> torch.Tensor:
    position = torch.arange(size, device=device)
    return (position[:, None] - position[None, :]).abs() <= width // 2


def nabla_mask(query: torch.Tensor, key: torch.Tensor, sta_mask: torch.Tensor, P: float) -> torch.Tensor:
    """Return the kept blocks, bool `[B, H, N, N]`; arguments and errors as for `select_blocks`."""
    return select_blocks(query, key, sta_mask, P).kept


def nablaT_v2(q: torch.Tensor, k: torch.Tensor, sta: torch.Tensor, thr: float = 0.9) -> BlockMask:
    """Return NABLA's selection as a FlexAttention `BlockMask`; arguments as for `nabla_mask`, `thr` is P."""
    return select_blocks(q, k, sta, thr).to_block_mask()
