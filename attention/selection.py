"""NABLA's selection: the largest entries of each row of the block map that together hold the mass P, without sorting.

Legend: B batch, H heads, S tokens, D head dim, N = S / 64 blocks, R rows of the block map; query blocks are rows.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from ..configs.errors import BackendError, SettingsError
from .compiling import CannotCompile, run_compiled, why_not_compiled
from .lists import BlockLists, Workspace, edge_blocks, rows_at_once
from .order import BLOCK

logger = logging.getLogger(__name__)

BITS_OF_TWO = 0x40000000
"""The bit pattern of 2.0, above every share. Non-negative floats are in the order of their bit patterns."""
ROUNDS, ROUNDS_AT_ONCE = 30, 10
"""Bisections of 0 .. 2**30, and how many of them are compiled together: more would compile longer, not run faster."""
WORTH_COMPILING = 2**20
"""Entries of a layer's block map from which the compiled functions are used; below, 30 small passes cost nothing."""


def select_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    sta_mask: torch.Tensor,
    P: float,
    real_S: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> BlockLists:
    """Return the kept blocks for q, k `[B, S, H, D]` in block order, in the workspace's buffers if one is given.

    Per row, the largest entries of `block_map` that together hold the mass P are kept, ties at the smallest of them
    included, and always the largest one; `sta_mask` (bool, broadcastable `[N, N]` or `[1, 1, N, N]`) is OR-ed in
    (numerics.md, "NABLA"). `real_S` (bool `[S]`) is False for padding, which counts in no mean.

    Raises:
        ValueError: if P is not in (0, 1] or a shape does not fit.
    """
    if not 0 < P <= 1:
        raise SettingsError(f"P={P}: the kept mass must be in (0, 1]")
    _check_shapes(query, key)
    B, S, H, _ = query.shape
    N = S // BLOCK
    if sta_mask.shape[-2:] != (N, N):
        raise BackendError(f"sta_mask {tuple(sta_mask.shape)} does not fit {N} blocks of {BLOCK} tokens")
    if torch.compiler.is_compiling():
        return BlockLists(*_opaque_selection(query, key, sta_mask, P, real_S))
    lists = (workspace or Workspace()).lists(B, H, N, query.device, edges=real_S is not None)
    with torch.no_grad():
        _select(query, key, sta_mask, P, real_S, lists)
    return lists


def check_mass(P: float) -> None:
    """Raise a SettingsError unless P is a number in (0, 1]."""
    if not isinstance(P, numbers.Real) or not 0 < P <= 1:
        raise SettingsError(f"P={P!r}: the kept mass must be a number in (0, 1]")


def _select(
    query: torch.Tensor,
    key: torch.Tensor,
    sta_mask: torch.Tensor,
    P: float,
    real_S: torch.Tensor | None,
    lists: BlockLists,
) -> None:
    q_BHND, k_BHND = block_means(query, real_S), block_means(key, real_S)
    sta_BHNN = sta_mask.expand_as(lists.kept)
    if query.is_cuda and why_not_compiled("cuda") is None:
        from .triton_selection import select_with_triton

        select_with_triton(q_BHND, k_BHND, sta_BHNN, P, lists, None if real_S is None else edge_blocks(real_S))
    else:
        _keep(q_BHND, k_BHND, sta_BHNN, P, lists.kept)
        lists.fill(real_S)


@torch.library.custom_op("kandinsky5_nabla::select_blocks", mutates_args=())
def _opaque_selection(
    query: torch.Tensor, key: torch.Tensor, sta_mask: torch.Tensor, P: float, real_S: torch.Tensor | None
) -> list[torch.Tensor]:
    """One node in the graph of a caller who compiles the model (see `flex`)."""
    lists = _empty_lists(query, real_S)
    _select(query, key, sta_mask, P, real_S, lists)
    return lists.tensors()


@_opaque_selection.register_fake
def _opaque_selection_shapes(
    query: torch.Tensor, key: torch.Tensor, sta_mask: torch.Tensor, P: float, real_S: torch.Tensor | None
) -> list[torch.Tensor]:
    return _empty_lists(query, real_S).tensors()


def _empty_lists(query: torch.Tensor, real_S: torch.Tensor | None) -> BlockLists:
    B, S, H, _ = query.shape
    return BlockLists.empty(B, H, S // BLOCK, query.device, edges=real_S is not None)


def block_means(x_BSHD: torch.Tensor, real_S: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean over the real tokens of each block, fp32 `[B, H, N, D]` (a view of `[B, N, H, D]`)."""
    compiled = x_BSHD.numel() >= WORTH_COMPILING
    if real_S is None:
        return _run(compiled, _mean_of_blocks, x_BSHD).transpose(1, 2)
    return _run(compiled, _mean_of_real_tokens, x_BSHD, real_S).transpose(1, 2)


def block_map(query: torch.Tensor, key: torch.Tensor, real_S: torch.Tensor | None = None) -> torch.Tensor:
    """Return softmax(mean(q block) . mean(k block) / sqrt(D)), fp32 `[B, H, N, N]`, for q, k `[B, S, H, D]`.

    Means and softmax are in fp32 whatever the dtype of q and k: in bf16, 1 to 10 % of the kept blocks differ.

    Raises:
        ValueError: if q and k differ in shape or S is no multiple of 64.
    """
    _check_shapes(query, key)
    return _softmax_of_products(block_means(query, real_S), block_means(key, real_S))


def _check_shapes(query: torch.Tensor, key: torch.Tensor) -> None:
    if query.shape != key.shape or query.dim() != 4 or query.shape[1] % BLOCK:
        raise BackendError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be [B, S, H, D] "
            f"with S a multiple of {BLOCK} tokens"
        )


def _keep(
    q_BHND: torch.Tensor, k_BHND: torch.Tensor, sta_BHNN: torch.Tensor, P: float, kept_BHNN: torch.Tensor
) -> None:
    """Write the kept blocks, so many rows at once as the cache holds: of one head, or of several whole ones."""
    B, H, N, _ = kept_BHNN.shape
    rows = rows_at_once(N, kept_BHNN.device)
    heads = max(1, rows // N)
    compiled = kept_BHNN.numel() >= WORTH_COMPILING
    for b in range(B):
        for first in range(0, H, heads):
            some = slice(first, first + heads)
            for start in range(0, N, rows):
                part = (b, some, slice(start, start + rows))
                map_HRN = _softmax_of_products(q_BHND[part], k_BHND[b, some])
                torch.ge(map_HRN, smallest_kept(map_HRN, P, compiled), out=kept_BHNN[part])
                kept_BHNN[part].logical_or_(sta_BHNN[part])


def _softmax_of_products(q_xRD: torch.Tensor, k_xND: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q_xRD @ k_xND.transpose(-2, -1) / math.sqrt(q_xRD.shape[-1]), dim=-1)


def smallest_kept(map_xRN: torch.Tensor, P: float, compiled: bool = False) -> torch.Tensor:
    """Return the largest value v, fp32 `[..., R, 1]`, such that the entries >= v of its row sum to more than P.

    Found by bisection over the bit patterns of non-negative floats. 0 where no entries do, as with P = 1.
    """
    low_xR1 = torch.zeros(*map_xRN.shape[:-1], 1, dtype=torch.int32, device=map_xRN.device)
    if P < 1:  # at 1 everything is kept, whatever the sum is rounded to
        high_xR1 = torch.full_like(low_xR1, BITS_OF_TWO)
        mass = torch.full((), P, device=map_xRN.device)  # a tensor: another P is no other graph
        for _ in range(0, ROUNDS, ROUNDS_AT_ONCE):
            low_xR1, high_xR1 = _run(compiled, _bisect, map_xRN, low_xR1, high_xR1, mass)
    return low_xR1.view(torch.float32)


def _bisect(
    map_xRN: torch.Tensor, low_xR1: torch.Tensor, high_xR1: torch.Tensor, mass: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Halve the interval of bit patterns ROUNDS_AT_ONCE times; entries >= low sum to more than `mass`, or low is 0."""
    for _ in range(ROUNDS_AT_ONCE):
        middle_xR1 = (low_xR1 + high_xR1) >> 1
        above_xRN = torch.where(map_xRN >= middle_xR1.view(torch.float32), map_xRN, 0.0)
        exceeds_xR1 = above_xRN.sum(-1, keepdim=True) > mass
        low_xR1 = torch.where(exceeds_xR1, middle_xR1, low_xR1)
        high_xR1 = torch.where(exceeds_xR1, high_xR1, middle_xR1)
    return low_xR1, high_xR1


def _mean_of_blocks(x_BSHD: torch.Tensor) -> torch.Tensor:
    return x_BSHD.unflatten(1, (-1, BLOCK)).mean(2, dtype=torch.float32)


def _mean_of_real_tokens(x_BSHD: torch.Tensor, real_S: torch.Tensor) -> torch.Tensor:
    real_N64 = real_S.unflatten(0, (-1, BLOCK))
    sums_BNHD = (x_BSHD.unflatten(1, (-1, BLOCK)) * real_N64[..., None, None]).sum(2, dtype=torch.float32)
    return sums_BNHD / real_N64.sum(1)[:, None, None]


def _run(compiled: bool, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Call a function, compiled where that is asked for and possible: it is the same function, only slower, without."""
    if compiled and why_not_compiled(tensors[0].device.type) is None:
        try:
            return run_compiled(function, "NABLA's selection", *tensors, dynamic=True)
        except CannotCompile as problem:
            logger.warning("NABLA's selection runs uncompiled, and slower, since %s", problem)
    return function(*tensors)
