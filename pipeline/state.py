"""The state of a denoising run in a file: one versioned dict of tensors and plain values.

Legend: B videos, T latent frames, H/W latent rows and columns, C channels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..configs.errors import NotFoundError, StateError, WriteError
from .files import complete_file

KIND = "kandinsky5-nabla denoising state"
VERSION = 1
"""Of the format: raised when a reader of the old one would misread the new one."""

State = Mapping[str, torch.Tensor | str | int | float | bool | None]
"""`latents`, fp32 `[B, T, H, W, C]`; `completed`, the number of steps that they have behind them; and whatever else a
run needs to go on, such as caches, under names of its own."""


def save_state(path: str | os.PathLike, state: State) -> Path:
    """Write a state to a safetensors file; an earlier one is replaced when the new one is on disk as a whole.

    Raises:
        ValueError: if it has no finite `latents` of five dimensions in fp32, or no number of `completed` steps.
        OSError: if it cannot be written; an earlier file is as it was.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    if problem := _problem(state):
        raise StateError(f"this state cannot be saved to {path}: {problem}")
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items() if torch.is_tensor(value)}
    plain = {name: value for name, value in state.items() if name not in tensors}
    metadata = {name: json.dumps(value) for name, value in {**plain, "kind": KIND, "version": VERSION}.items()}
    try:
        with durable_file(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise WriteError(f"the state {path} cannot be written: {error}") from error
    return path


def load_state(path: str | os.PathLike) -> dict[str, Any]:
    """Return what `save_state` wrote, its tensors on the CPU.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, of another kind or of another version of the format.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"there is no state {path}")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            state |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is not iterable)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path} is damaged, or no state of a denoising run: {error}") from error
    kind, version = state.pop("kind", None), state.pop("version", None)
    if kind != KIND:
        raise StateError(f"{path} is no state of a denoising run")
    if version != VERSION:
        raise StateError(f"{path} has the format {version!r}; this version reads {VERSION}: start the run anew")
    if problem := _problem(state):
        raise StateError(f"{path} is damaged: {problem}")
    return state


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """`complete_file` that replaces `path` and outlives a power cut: content and name are on disk when it ends."""
    with complete_file(path, overwrite=True) as temporary:
        yield temporary
        flush(temporary)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    if path.is_dir() and os.name != "posix":
        return  # such systems open no folders, and write their names through
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _problem(state: State) -> str | None:
    """Return what is wrong with the two values that every state has."""
    latents, completed = state.get("latents"), state.get("completed")
    if not isinstance(latents, torch.Tensor) or latents.dim() != 5 or latents.dtype != torch.float32:
        return "it has no latents [B, T, H, W, C] in fp32"
    if not torch.isfinite(latents).all():
        return "its latents are not finite (NaN or infinity)"
    if not isinstance(completed, int) or isinstance(completed, bool) or completed < 0:
        return f"completed {completed!r} is no number of steps"
    return None
