"""NABLA's selection as Triton kernels for CUDA: products, then softmax, bisection and lists of a row in one pass.

The formulas are those of `selection` and `lists`, whose intermediate results never leave the registers here. Importing
this module imports Triton, hence it is imported on use. On CPU tensors it runs in Triton's interpreter, if
TRITON_INTERPRET=1 was set before Triton was imported.

Legend: B batch, H heads, R query blocks (rows), N key blocks (columns), R = N in attention, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .lists import BlockLists
from .selection import BITS_OF_TWO, ROUNDS

TILE, DEPTH = 64, 32
"""The product kernel makes 64 x 64 scores at once, from 32 channels at a time."""
ENTRIES_PER_THREAD, MAX_WARPS = 16, 32
"""A row stays in registers, 1464 blocks in those of 4 warps: ptxas spills none up to 8192 blocks (compute capability
8.0, 9.0). The speed of other numbers of warps was not measured."""
WARP = 32


def select_with_triton(
    q_BHND: torch.Tensor,
    k_BHND: torch.Tensor,
    sta_BHNN: torch.Tensor,
    P: float,
    lists: BlockLists,
    edge_N: torch.Tensor | None = None,
) -> None:
    """Fill `lists` with the blocks that `select_blocks` keeps, from the block means q, k (fp32, any strides).

    `sta_BHNN` (bool, broadcastable to `[B, H, N, N]`) is OR-ed in. `edge_N` (bool `[N]`) is True for blocks that are
    part padding, which go to the edge lists; it is given if and only if `lists` has those. P is in (0, 1]. The result
    is that of the torch version up to the rounding of sums.
    """
    # The scores lie where the indices will: each program of the second kernel reads its row before it writes it.
    scores_BHNN = lists.indices.view(torch.float32)
    write_scores(q_BHND, k_BHND, scores_BHNN)
    select_from_scores(scores_BHNN, sta_BHNN, P, lists, edge_N)


def write_scores(q_BHRD: torch.Tensor, k_BHND: torch.Tensor, scores_BHRN: torch.Tensor) -> None:
    """Write q k^T / sqrt(D) in fp32.

    Not by torch.matmul: that would round q and k to TF32 for callers who allow this, process-wide, for their own
    products, and with 10 bits of mantissa other blocks would be kept.
    """
    B, H, R, D = q_BHRD.shape
    N = k_BHND.shape[2]
    assert k_BHND.shape == (B, H, N, D)
    assert scores_BHRN.shape == (B, H, R, N)
    assert scores_BHRN.is_contiguous()
    assert q_BHRD.dtype == k_BHND.dtype == scores_BHRN.dtype == torch.float32
    grid = (triton.cdiv(R, TILE), triton.cdiv(N, TILE), B * H)
    sizes = H, R, N, q_BHRD.stride(), k_BHND.stride()
    _launch(_products, grid, q_BHRD, k_BHND, scores_BHRN, D**-0.5, *sizes, D=D, TILE=TILE, DEPTH=DEPTH)


def select_from_scores(
    scores_BHRN: torch.Tensor,
    sta_BHRN: torch.Tensor,
    P: float,
    lists: BlockLists,
    edge_N: torch.Tensor | None = None,
) -> None:
    """Fill `lists` from the scores before the softmax, fp32; the other arguments are those of `select_with_triton`.

    `scores_BHRN` may share the memory of `lists.indices`.
    """
    _, H, R, N = lists.kept.shape
    assert scores_BHRN.shape == lists.kept.shape
    assert scores_BHRN.dtype == torch.float32
    assert scores_BHRN.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in lists.tensors())
    assert (edge_N is None) == (lists.edge_counts is None) == (lists.edge_indices is None)
    width = max(WARP, triton.next_power_of_2(N))
    warps = min(MAX_WARPS, math.ceil(width / (WARP * ENTRIES_PER_THREAD)))
    sta_BHRN = sta_BHRN.expand_as(lists.kept).view(torch.int8)  # Triton has no pointers to bool
    edge_N = None if edge_N is None else edge_N.contiguous().view(torch.int8)
    outputs = lists.kept.view(torch.int8), lists.counts, lists.indices, lists.edge_counts, lists.edge_indices
    _launch(
        _selection,
        (lists.counts.numel(),),
        *(scores_BHRN, sta_BHRN, edge_N),
        *outputs,
        *(P, H, R, N, sta_BHRN.stride()),
        ROUNDS=ROUNDS if P < 1 else 0,  # at 1 everything is kept, whatever the sum is rounded to
        BITS_OF_TWO=BITS_OF_TWO,
        WIDTH=width,
        num_warps=warps,
    )


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run the kernel on the device of its first argument, which need not be the current one."""
    with torch.cuda.device_of(arguments[0]):  # does nothing for a CPU
        kernel[grid](*arguments, **constants, enable_fp_fusion=True)  # the default depends on Triton's version


@triton.jit
def _products(
    q: tl.tensor,
    k: tl.tensor,
    scores: tl.tensor,
    scale: tl.tensor,
    H: tl.tensor,
    R: tl.tensor,
    N: tl.tensor,
    q_strides: tl.tensor,
    k_strides: tl.tensor,
    D: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One program: a tile of one head's scores."""
    head = tl.program_id(2).to(tl.int64)  # of all batches; B H R N may exceed 32 bits
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    q_rows = q + (head // H) * q_strides[0] + (head % H) * q_strides[1] + row[:, None] * q_strides[2]
    k_columns = k + (head // H) * k_strides[0] + (head % H) * k_strides[1] + column[None, :] * k_strides[2]
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, D, DEPTH):
        channel = first + tl.arange(0, DEPTH)
        q_mask = (row[:, None] < R) & (channel[None, :] < D)
        k_mask = (column[None, :] < N) & (channel[:, None] < D)
        q_tile = tl.load(q_rows + channel[None, :] * q_strides[3], q_mask, 0.0)
        k_tile = tl.load(k_columns + channel[:, None] * k_strides[3], k_mask, 0.0)
        total = tl.dot(q_tile, k_tile, total, input_precision="ieee")  # the default is TF32
    place = (head * R + row[:, None]) * N + column[None, :]
    tl.store(scores + place, total * scale, (row[:, None] < R) & (column[None, :] < N))


@triton.jit
def _selection(
    scores: tl.tensor,
    sta: tl.tensor,
    edge: tl.tensor,
    kept: tl.tensor,
    counts: tl.tensor,
    indices: tl.tensor,
    edge_counts: tl.tensor,
    edge_indices: tl.tensor,
    P: tl.tensor,
    H: tl.tensor,
    R: tl.tensor,
    N: tl.tensor,
    sta_strides: tl.tensor,
    ROUNDS: tl.constexpr,
    BITS_OF_TWO: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program: one row. `edge` and the edge lists are None without edges."""
    row = tl.program_id(0).to(tl.int64)  # of all heads and batches; B H R N may exceed 32 bits
    column = tl.arange(0, WIDTH)
    is_column = column < N
    score = tl.load(scores + row * N + column, is_column, -float("inf"))
    sta_row = sta + (row // (H * R)) * sta_strides[0] + (row // R % H) * sta_strides[1] + (row % R) * sta_strides[2]
    in_window = tl.load(sta_row + column * sta_strides[3], is_column, 0) != 0
    weight = tl.exp(score - tl.max(score))
    share = weight / tl.sum(weight)

    low = tl.full((), 0, tl.int32)
    high = tl.full((), BITS_OF_TWO, tl.int32)
    for _ in range(ROUNDS):
        middle = (low + high) >> 1
        above = tl.where(share >= middle.to(tl.float32, bitcast=True), share, 0.0)
        exceeds = tl.sum(above) > P
        low = tl.where(exceeds, middle, low)
        high = tl.where(exceeds, high, middle)
    is_kept = ((share >= low.to(tl.float32, bitcast=True)) | in_window) & is_column

    # Where `scores` is the memory of `indices`, no warp may write before all have read. The sums over the row imply
    # that already; the barrier says it, and costs one beside the two of every round.
    tl.debug_barrier()
    tl.store(kept + row * N + column, is_kept.to(tl.int8), is_column)
    if edge is None:
        _store_list(is_kept, counts + row, indices + row * N, N, WIDTH)
    else:
        is_edge = tl.load(edge + column, is_column, 0) != 0
        _store_list(is_kept & ~is_edge, counts + row, indices + row * N, N, WIDTH)
        _store_list(is_kept & is_edge, edge_counts + row, edge_indices + row * N, N, WIDTH)


@triton.jit
def _store_list(is_chosen: tl.tensor, count: tl.tensor, indices: tl.tensor, N: tl.tensor, WIDTH: tl.constexpr) -> None:
    """Write the chosen columns, ascending, behind them the others, and how many were chosen; see `lists._compact`."""
    column = tl.arange(0, WIDTH)
    chosen = is_chosen.to(tl.int32)
    up_to_here = tl.cumsum(chosen)
    total = tl.sum(chosen)
    place = tl.where(is_chosen, up_to_here - 1, total + column - up_to_here)
    tl.store(indices + place, column, column < N)
    tl.store(count, total)
