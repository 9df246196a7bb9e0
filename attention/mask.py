"""Which key blocks each query block sees: the window mask and NABLA's data-dependent selection.

Legend: B batch, H heads, S tokens, D head dim, N = S / 64 blocks; query blocks are rows, key blocks columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .order import BLOCK

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def sta_mask(
    grid: tuple[int, int, int], window: tuple[int, int, int], device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the spatio-temporal window mask, bool `[N, N]`, for `grid = (T, Hblocks, Wblocks)`.

    Block (t, y, x) sees (t', y', x') iff |t-t'| <= wT//2, |y-y'| <= wH//2 and |x-x'| <= wW//2, with
    `window = (wT, wH, wW)`.

    Raises:
        ValueError: if a size or a window is less than 1.
    """
    if min(*grid, *window) < 1:
        raise ValueError(f"grid {tuple(grid)} and window {tuple(window)} must be at least 1 on every axis")
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


def block_map(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return softmax(mean(q block) . mean(k block) / sqrt(D)), fp32 `[B, H, N, N]`, for q, k `[B, S, H, D]`.

    Means and softmax are in fp32 whatever the dtype of q and k: in bf16, 1 to 10 % of the kept blocks differ.

    Raises:
        ValueError: if q and k differ in shape or S is no multiple of 64.
    """
    if query.shape != key.shape or query.dim() != 4 or query.shape[1] % BLOCK:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be [B, S, H, D] "
            f"with S a multiple of {BLOCK} tokens"
        )
    q_BHND, k_BHND = (
        x_BSHD.unflatten(1, (-1, BLOCK)).mean(2, dtype=torch.float32).transpose(1, 2) for x_BSHD in (query, key)
    )
    return torch.softmax(q_BHND @ k_BHND.transpose(-2, -1) / math.sqrt(query.shape[-1]), dim=-1)


def nabla_mask(query: torch.Tensor, key: torch.Tensor, sta_mask: torch.Tensor, P: float) -> torch.Tensor:
    """Return the kept blocks, bool `[B, H, N, N]`, for query and key `[B, S, H, D]` in block order.

    Per row, the largest entries of `block_map` that together hold the mass P are kept, and always the largest
    one; `sta_mask` (bool, broadcastable `[N, N]` or `[1, 1, N, N]`) is OR-ed in (numerics.md, "NABLA").

    Raises:
        ValueError: if P is not in (0, 1] or a shape does not fit.
    """
    if not 0 < P <= 1:
        raise ValueError(f"P={P}: the kept mass must be in (0, 1]")
    map_BHNN = block_map(query, key)
    if sta_mask.shape[-2:] != map_BHNN.shape[-2:]:
        raise ValueError(f"sta_mask {tuple(sta_mask.shape)} does not fit {map_BHNN.shape[-1]} blocks of {BLOCK} tokens")
    return _largest_with_mass(map_BHNN, P) | sta_mask


def _largest_with_mass(map_BHNN: torch.Tensor, P: float) -> torch.Tensor:
    ascending, order = map_BHNN.sort(dim=-1)
    kept = ascending.cumsum_(-1) >= 1 - P
    kept[..., -1] = True  # rounding may leave even the full sum below 1 - P
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def nablaT_v2(q: torch.Tensor, k: torch.Tensor, sta: torch.Tensor, thr: float = 0.9) -> BlockMask:
    """Return NABLA's selection as a FlexAttention `BlockMask`; arguments as for `nabla_mask`, `thr` is P."""
    return to_block_mask(nabla_mask(q, k, sta, thr))


def to_block_mask(kept_BHNN: torch.Tensor) -> BlockMask:
    """Return the `BlockMask` of a bool block map `[B, H, N, N]` in a form that is right on every path.

    Compiled FlexAttention reads the block lists; uncompiled FlexAttention ignores them and reads `mask_mod`
    alone, and would be dense without one. Here both say the same. Only full blocks are listed, since every
    kept block is kept whole. The index tensor of the (empty) partial list is a tensor of its own because one
    tensor passed twice does not compile on the CPU (numerics.md, "FlexAttention").
    """
    from torch.nn.attention.flex_attention import BlockMask  # on use: imports of this package load no kernels

    counts_BHN = kept_BHNN.sum(-1, dtype=torch.int32)
    lists_BHNN = kept_BHNN.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    def is_kept(b: torch.Tensor, h: torch.Tensor, q_token: torch.Tensor, kv_token: torch.Tensor) -> torch.Tensor:
        return kept_BHNN[b, h, q_token // BLOCK, kv_token // BLOCK]

    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts_BHN),
        torch.zeros_like(lists_BHNN),
        full_kv_num_blocks=counts_BHN,
        full_kv_indices=lists_BHNN,
        BLOCK_SIZE=BLOCK,
        mask_mod=is_kept,
        compute_q_blocks=False,  # only the backward pass reads the transposed lists
    )
