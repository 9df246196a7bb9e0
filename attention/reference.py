"""The plain reference of NABLA: selection by sorting, dense softmax attention in fp32. What is fast must match it."""

from __future__ import annotations

import torch

from ..configs.errors import BackendError
from .order import BLOCK
from .selection import block_map

MAX_SCORE_BYTES = 4 * 2**30
"""Largest score matrix that the reference will allocate: 4 GiB, about 16k tokens with four heads."""


def score_matrix_problem(batch: int, tokens: int, heads: int) -> str | None:
    """Return why the reference cannot run over so many tokens, or None if it can."""
    score_bytes = 4 * batch * heads * tokens**2
    if score_bytes <= MAX_SCORE_BYTES:
        return None
    return (
        f"masked reference attention over {tokens} tokens with {heads} heads and batch {batch} needs a score matrix "
        f"of {score_bytes / 2**30:.1f} GiB; its limit is {MAX_SCORE_BYTES / 2**30:.0f} GiB. Use NABLA_ATTN, whose "
        "kernel needs a C++ compiler (CPU) or Triton (CUDA), or ask for fewer frames or a smaller size"
    )


def kept_by_sorting(
    query: torch.Tensor, key: torch.Tensor, sta_mask: torch.Tensor, P: float, real_S: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the kept blocks, bool `[B, H, N, N]`, as numerics.md describes them; arguments as for `select_blocks`."""
    return largest_by_sorting(block_map(query, key, real_S), P) | sta_mask


def largest_by_sorting(map_xN: torch.Tensor, P: float) -> torch.Tensor:
    """Return the largest entries of each row that together hold the mass P, bool `[..., N]`; of ties, some."""
    ascending, order = map_xN.sort(dim=-1)
    kept = ascending.cumsum_(-1) >= 1 - P
    kept[..., -1] = True  # rounding may leave even the full sum below 1 - P
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept_BHNN: torch.Tensor,
    softmax_scale: float,
    real_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v over the kept blocks, for q, k, v `[B, S, H, D]`, in the dtype of `query`.

    The whole `[B, H, S, S]` score matrix is built in fp32. Differentiable. Keys where `real_S` is False are left out.

    Raises:
        ValueError: if the score matrix would be larger than `MAX_SCORE_BYTES`.
    """
    B, S, H, _ = query.shape
    problem = score_matrix_problem(B, S, H)
    if problem:
        raise BackendError(problem)
    q_BHSD, k_BHSD, v_BHSD = (x_BSHD.transpose(1, 2).float() for x_BSHD in (query, key, value))
    kept_BHSS = kept_BHNN.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    if real_S is not None:
        kept_BHSS = kept_BHSS & real_S
    scores_BHSS = (q_BHSD @ k_BHSD.transpose(-2, -1) * softmax_scale).masked_fill(~kept_BHSS, float("-inf"))
    return (scores_BHSS.softmax(-1) @ v_BHSD).transpose(1, 2).to(query.dtype)
