"""Prompt to video: `Kandinsky5NablaPipeline`, and the stages that it is made of.

The names are loaded on first use: the checks of the command line need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import export_video, read_comment
    from .output import Kandinsky5PipelineOutput
    from .pipeline import Kandinsky5NablaPipeline

__all__ = ["Kandinsky5NablaPipeline", "Kandinsky5PipelineOutput", "export_video", "read_comment"]

_HOMES = {
    "Kandinsky5NablaPipeline": "pipeline",
    "Kandinsky5PipelineOutput": "output",
    "export_video": "export",
    "read_comment": "export",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
