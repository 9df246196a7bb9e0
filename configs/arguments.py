"""What a Python call is given, checked before it is used: paths, repositories, names of keyword arguments."""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .errors import ArgumentError, CheckpointError, NotFoundError
from .preset import load_preset, preset_names

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # "./name" is a folder


def checked_path(name: str, value: object) -> Path:
    """Return a path; ArgumentError for what is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise ArgumentError(f"{name} {value!r}: must be a text or a pathlib.Path, not {type(value).__name__}")
    if "\0" in str(value):
        raise ArgumentError(f"{name} {str(value)!r}: no file's name holds a NUL character; leave it out")
    return Path(value)


def folder_or_hub_id(source: object) -> str:
    """Return what names a checkpoint, a folder that is there or the id of a repository, as text.

    Raises:
        ValueError: if it is no text or path, or a file.
        FileNotFoundError: if there is no such folder, and it is no Hub id.
    """
    checked_path("checkpoint", source)
    text = str(source)
    if os.path.isfile(text):
        raise CheckpointError(f"{text} is a file; from_single_file loads a transformer of the original layout")
    if not os.path.isdir(text) and not HUB_ID.fullmatch(text):
        published = [model for name in preset_names() if HUB_ID.fullmatch(model := load_preset(name).model)]
        near = difflib.get_close_matches(text, published, n=1, cutoff=0.0)[0]
        raise NotFoundError(
            f"{text!r}: there is no such folder, and it is no Hub id (owner/name); the nearest published is {near!r}"
        )
    return text


def check_names(call: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raise an ArgumentError for the first name of an argument that is not known, with the nearest one that is."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
            instead = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ArgumentError(f"{call}: {name!r} is no argument of it; {instead}")
