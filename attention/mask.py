"""Which key blocks each query block sees: the window mask, and NABLA's selection under the seeds' names.

Legend: B batch, H heads, N blocks; query blocks are rows, key blocks columns.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..configs.errors import BackendError
from .selection import check_mass, select_blocks

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
    if not _are_sizes(grid) or not _are_sizes(window):
        raise BackendError(
            f"grid {grid} and window {window} must be three sizes each, whole numbers of at least 1 on every axis"
        )
    near_t, near_y, near_x = (_near(int(size), int(width), device) for size, width in zip(grid, window, strict=True))
    seen = (
        near_t[:, None, None, :, None, None]
        & near_y[None, :, None, None, :, None]
        & near_x[None, None, :, None, None, :]
    )
    N = math.prod(map(int, grid))
    return seen.reshape(N, N)


def _are_sizes(sizes: Sequence[int]) -> bool:
    listed = list(sizes) if isinstance(sizes, Iterable) else []
    return len(listed) == 3 and all(isinstance(size, numbers.Integral) and size >= 1 for size in listed)


def _near(size: int, width: int, device: torch.device | str | None) -> torch.Tensor:
    position = torch.arange(size, device=device)
    return (position[:, None] - position[None, :]).abs() <= width // 2


def nabla_mask(query: torch.Tensor, key: torch.Tensor, sta_mask: torch.Tensor, P: float) -> torch.Tensor:
    """Return the kept blocks, bool `[B, H, N, N]`; arguments as for `select_blocks`.

    Raises:
        ValueError: as `select_blocks`, and if q or k is no tensor in floating point, or `sta_mask` is no bool tensor
            beside them. Their values are not looked at, which would wait for a GPU.
    """
    _check(query, key, sta_mask, P)
    return select_blocks(query, key, sta_mask, P).kept


def nablaT_v2(q: torch.Tensor, k: torch.Tensor, sta: torch.Tensor, thr: float = 0.9) -> BlockMask:
    """Return NABLA's selection as a FlexAttention `BlockMask`; arguments and errors as of `nabla_mask`, `thr` is P."""
    _check(q, k, sta, thr)
    return select_blocks(q, k, sta, thr).to_block_mask()


def _check(query: torch.Tensor, key: torch.Tensor, sta_mask: torch.Tensor, P: float) -> None:
    check_mass(P)
    for name, tensor in (("query", query), ("key", key), ("sta_mask", sta_mask)):
        if not isinstance(tensor, torch.Tensor):
            raise BackendError(f"{name}: must be a tensor, not {type(tensor).__name__}")
    if sta_mask.dtype != torch.bool:
        raise BackendError(f"sta_mask of {sta_mask.dtype}: must be bool; sta_mask.bool() works")
    if len({query.device, key.device, sta_mask.device}) > 1:
        raise BackendError(f"query, key and sta_mask are on {query.device}, {key.device}, {sta_mask.device}: use one")
    for name, tensor in (("query", query), ("key", key)):
        if not tensor.is_floating_point() or not tensor.numel():
            raise BackendError(f"{name} {tuple(tensor.shape)} of {tensor.dtype}: must hold floating point numbers")
