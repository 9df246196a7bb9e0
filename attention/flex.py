"""Block-sparse attention: compiled FlexAttention where it can run, the masked reference where it cannot."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from .compiling import CannotCompile, run_compiled
from .lists import BlockLists
from .order import BLOCK
from .reference import masked_attention

logger = logging.getLogger(__name__)


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lists: BlockLists,
    softmax_scale: float,
    real_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return exact softmax attention over the kept blocks, for q, k, v `[B, S, H, D]`, in the dtype of `query`.

    The blocks that the lists leave out are skipped, and so is the padding, where `real_S` (bool `[S]`) is False. The
    sparse kernel has no backward pass here, so where a gradient is needed the masked reference runs: the same
    function, at dense cost. It also runs, after a warning, where FlexAttention cannot be compiled.

    Raises:
        ValueError: if only the reference can run and its score matrix would not fit.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return masked_attention(query, key, value, lists.kept, softmax_scale, real_S)
    if torch.compiler.is_compiling():
        return _opaque_attention(query, key, value, lists.tensors(), softmax_scale, real_S)
    return _compiled_or_reference(query, key, value, lists, softmax_scale, real_S)


@torch.library.custom_op("kandinsky5_nabla::block_sparse_attention", mutates_args=())
def _opaque_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lists: Sequence[torch.Tensor],
    softmax_scale: float,
    real_S: torch.Tensor | None,
) -> torch.Tensor:
    """One node in the graph of a caller who compiles the model; when it runs, it is what runs uncompiled.

    FlexAttention itself cannot be part of such a graph on the CPU: Inductor (torch 2.13) finds no name for a block
    map and no 4-D shape for q where they are computed in the same graph, and raises NoValidChoicesError.
    """
    return _compiled_or_reference(query, key, value, BlockLists(*lists), softmax_scale, real_S).contiguous()


@_opaque_attention.register_fake
def _opaque_attention_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lists: Sequence[torch.Tensor],
    softmax_scale: float,
    real_S: torch.Tensor | None,
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _compiled_or_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lists: BlockLists,
    softmax_scale: float,
    real_S: torch.Tensor | None,
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q_BHSD, k_BHSD, v_BHSD = (_to_kernel_layout(x_BSHD) for x_BSHD in (query, key, value))
    try:
        out_BHSD = run_compiled(
            flex_attention,
            f"block-sparse attention over {query.shape[1]} tokens",
            q_BHSD,
            k_BHSD,
            v_BHSD,
            block_mask=lists.to_block_mask(real_S),
            scale=softmax_scale,
            kernel_options=kernel_options(query),
        )
    except CannotCompile as problem:
        _warn_once(
            f"block-sparse FlexAttention cannot run on {query.device.type}, since {problem}. "
            "The masked reference runs instead: the same result, at dense cost"
        )
        return masked_attention(query, key, value, lists.kept, softmax_scale, real_S)
    return out_BHSD.transpose(1, 2).to(query.dtype)


def _to_kernel_layout(x_BSHD: torch.Tensor) -> torch.Tensor:
    """Return `[B, H, S, D]`: a view on CUDA, on a CPU a copy in fp32 whose heads lie one after the other.

    The CPU kernel multiplies tiles of 64 tokens, which then are contiguous: 1.2 times as fast. Its products of bf16
    take twice as long as those of fp32 where the CPU has no instructions for them (benchmarks/NOTES.md).
    """
    x_BHSD = x_BSHD.transpose(1, 2)
    return x_BHSD if x_BHSD.is_cuda else x_BHSD.to(torch.float32).contiguous()


def kernel_options(query: torch.Tensor) -> dict[str, int | bool] | None:
    """Return FlexAttention's options for this device.

    On CUDA tiles must divide the 64-token block, and the defaults (128) are refused; 64 is the one choice until others
    were measured. Every query block keeps at least its largest key block, so no row of the softmax is empty, which is
    what ROWS_GUARANTEED_SAFE asks for: the kernel then need not look for rows whose maximum is -inf.
    """
    if not query.is_cuda:
        return None
    return {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "ROWS_GUARANTEED_SAFE": True}


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
