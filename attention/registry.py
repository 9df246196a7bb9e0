"""Backends by name: what was asked is what runs, or an error says why not."""

from __future__ import annotations

import difflib
from typing import Any

from ..configs.errors import BackendError
from .abstract import AttentionBackend
from .nabla import NablaAttentionBackend, NablaReferenceBackend
from .sdpa import SdpaAttentionBackend

_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.get_name(): backend for backend in (NablaAttentionBackend, NablaReferenceBackend, SdpaAttentionBackend)
}


def list_attention_backends() -> list[str]:
    """Return the names that `get_attention_backend` knows."""
    return list(_BACKENDS)


def get_attention_backend(name: str, **facts: Any) -> type[AttentionBackend]:
    """Return the backend called `name`, able to run what `facts` describe.

    `facts` are keyword arguments of `AttentionBackend.validate_configuration`, such as `head_size`.

    Raises:
        ValueError: if there is no such backend (with the nearest name), or it cannot run this (with all reasons).
    """
    if not isinstance(name, str) or name not in _BACKENDS:
        nearest = difflib.get_close_matches(str(name).upper(), _BACKENDS, n=1, cutoff=0.0)
        raise BackendError(
            f"unknown attention backend {name!r}; known are {', '.join(_BACKENDS)}; did you mean {nearest[0]}?"
        )
    backend = _BACKENDS[name]
    backend.require(**facts)
    return backend
