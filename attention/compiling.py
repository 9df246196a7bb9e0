"""torch.compile for the hot functions of this package: where it can run, and what it says about itself."""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

MAX_GRAPHS = 1024
"""Graphs that one function may compile to: one per geometry, dtype and grad mode. Dynamo's own limit is 8."""

_failed: dict[str, str] = {}
"""Device types on which a compilation has failed in this process, with the reason."""
_known: set[tuple[Any, ...]] = set()
"""Functions and inputs that have been compiled in this process."""


def why_not_compiled(device_type: str) -> str | None:
    """Return why nothing can be compiled for `device_type`, or None if it can, as far as is known."""
    return _failed.get(device_type) or _missing_compiler(device_type)


def run_compiled(
    function: Callable[..., Any], name: str, *tensors: torch.Tensor, dynamic: bool = False, **arguments: Any
) -> Any:
    """Call `function(*tensors, **arguments)` compiled, and say when it compiles and how long that took.

    `dynamic` makes one graph for all sizes, otherwise each size has its own. With `fullgraph` a function that does
    not compile raises; it never falls back to something else in silence.

    Raises:
        CannotCompile: if it cannot be compiled here.
    """
    from torch._inductor.exc import InductorError

    device_type = tensors[0].device.type
    problem = why_not_compiled(device_type)
    if problem is not None:
        raise CannotCompile(problem)
    sizes = () if dynamic else tuple(tensor.shape for tensor in tensors)
    case = (function, sizes, tensors[0].dtype, device_type, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    # Dynamo counts the graphs of all sizes, dtypes and grad modes together; past its limit `fullgraph` raises.
    limit = torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, accumulated_recompile_limit=MAX_GRAPHS)
    try:
        with limit:
            if case in _known:
                return _compiled(function, dynamic)(*tensors, **arguments)
            logger.info("compiling %s for %s (later runs find it in the compiler's cache) ...", name, device_type)
            start = time.perf_counter()
            result = _compiled(function, dynamic)(*tensors, **arguments)
    except InductorError as error:
        _failed[device_type] = f"its compilation failed: {str(error).strip().splitlines()[0]}"
        raise CannotCompile(_failed[device_type]) from error
    logger.info("%s is compiled (%.1f s)", name, time.perf_counter() - start)
    _known.add(case)
    return result


class CannotCompile(RuntimeError):
    """There is no compiler for the device, or it failed; the message says which."""


@functools.cache
def _compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


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
