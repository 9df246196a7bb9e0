"""The plain reference: dense softmax attention in fp32 under a block map. Every sparse kernel must match it."""

from __future__ import annotations

import torch

from .order import BLOCK

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


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept_BHNN: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v over the kept blocks, for q, k, v `[B, S, H, D]`, in the dtype of `query`.

    The whole `[B, H, S, S]` score matrix is built in fp32. Differentiable.

    Raises:
        ValueError: if the score matrix would be larger than `MAX_SCORE_BYTES`.
    """
    B, S, H, _ = query.shape
    problem = score_matrix_problem(B, S, H)
    if problem:
        raise ValueError(problem)
    q_BHSD, k_BHSD, v_BHSD = (x_BSHD.transpose(1, 2).float() for x_BSHD in (query, key, value))
    kept_BHSS = kept_BHNN.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    scores_BHSS = (q_BHSD @ k_BHSD.transpose(-2, -1) * softmax_scale).masked_fill(~kept_BHSS, float("-inf"))
    return (scores_BHSS.softmax(-1) @ v_BHSD).transpose(1, 2).to(query.dtype)
