"""Block-sparse attention: compiled FlexAttention where it can run, the masked reference where it cannot."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from .mask import to_block_mask
from .order import BLOCK
from .reference import masked_attention

logger = logging.getLogger(__name__)

MAX_GRAPHS = 1024
"""Graphs that FlexAttention may compile to: one per geometry, dtype and grad mode. Dynamo's own limit is 8."""

_failed: dict[str, str] = {}
"""Device types on which a compilation has failed in this process, with the reason."""


def block_sparse_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept_BHNN: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Return exact softmax attention over the kept blocks, for q, k, v `[B, S, H, D]`, in the dtype of `query`.

    `kept_BHNN` is a bool block map `[B, H, N, N]`; the blocks that it leaves out are skipped. The sparse kernel
    has no backward pass here, so where a gradient is needed the masked reference runs: the same function, at
    dense cost. It also runs, after a warning, where FlexAttention cannot be compiled.

    Raises:
        ValueError: if only the reference can run and its score matrix would not fit.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return masked_attention(query, key, value, kept_BHNN, softmax_scale)
    if torch.compiler.is_compiling():
        return _opaque_attention(query, key, value, kept_BHNN, softmax_scale)
    return _compiled_or_reference(query, key, value, kept_BHNN, softmax_scale)


@torch.library.custom_op("kandinsky5_nabla::block_sparse_attention", mutates_args=())
def _opaque_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept_BHNN: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """One node in the graph of a caller who compiles the model; when it runs, it is what runs uncompiled.

    FlexAttention itself cannot be part of such a graph on the CPU: Inductor (torch 2.13) finds no name for a block
    map and no 4-D shape for q where they are computed in the same graph, and raises NoValidChoicesError.
    """
    return _compiled_or_reference(query, key, value, kept_BHNN, softmax_scale).contiguous()


@_opaque_attention.register_fake
def _opaque_attention_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept_BHNN: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def why_not_compiled(device_type: str) -> str | None:
    """Return why FlexAttention cannot be compiled for `device_type`, or None if it can, as far as is known."""
    return _failed.get(device_type) or _missing_compiler(device_type)


def _compiled_or_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept_BHNN: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    from torch._inductor.exc import InductorError

    device_type = query.device.type
    if why_not_compiled(device_type) is None:
        # Dynamo counts the graphs of all sizes, dtypes and grad modes together; past its limit `fullgraph` raises.
        limit = torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, accumulated_recompile_limit=MAX_GRAPHS)
        try:
            with limit:
                return _run_flex_attention(query, key, value, kept_BHNN, softmax_scale)
        except InductorError as error:
            _failed[device_type] = f"its compilation failed: {str(error).strip().splitlines()[0]}"
    _warn_once(
        f"block-sparse FlexAttention cannot run on {device_type}, since {why_not_compiled(device_type)}. "
        "The masked reference runs instead: the same result, at dense cost"
    )
    return masked_attention(query, key, value, kept_BHNN, softmax_scale)


def _run_flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept_BHNN: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    q_BHSD, k_BHSD, v_BHSD = (x_BSHD.transpose(1, 2) for x_BSHD in (query, key, value))
    # CUDA tiles must divide the 64-token block; the defaults (128) are refused. Larger ones were not measured.
    tiles = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK} if query.is_cuda else None
    out_BHSD = _compiled_flex_attention()(
        q_BHSD,
        k_BHSD,
        v_BHSD,
        block_mask=to_block_mask(kept_BHNN),
        scale=softmax_scale,
        kernel_options=tiles,
    )
    return out_BHSD.transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """The one place where FlexAttention is compiled. `fullgraph`: raise rather than fall back to dense."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@functools.cache
def _missing_compiler(device_type: str) -> str | None:
    if device_type == "cuda":
        return None if importlib.util.find_spec("triton") else "the package triton is not installed"
    if device_type != "cpu":
        return "it compiles for cpu and cuda only"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (install g++ or clang++, or name one in the variable CXX)"
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
