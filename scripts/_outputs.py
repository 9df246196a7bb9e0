"""The files that a command line writes: their names, and why one cannot be written, found before anything runs."""

from __future__ import annotations

import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs.errors import NotFoundError, OutputError, TakenError, UserError
from kandinsky5_nabla.pipeline.codecs import Codec
from kandinsky5_nabla.pipeline.files import complete_file
from kandinsky5_nabla.pipeline.frames_folder import check_replaceable

MAX_STEM_BYTES = 70
"""With the seed, a number and .mp4 a name stays below 100 bytes."""


def safe_name(prompt: str, most: int = MAX_STEM_BYTES) -> str:
    """Return a file name's stem from a prompt: letters, digits and dashes, so many bytes at most, never empty."""
    folded = unicodedata.normalize("NFC", prompt).lower()
    words = re.sub(r"[^\w]+", "-", folded).strip("-_")
    return words.encode()[:most].decode(errors="ignore").strip("-_") or "video"


def free_names(names: list[Path], is_taken: Callable[[Path], bool]) -> list[Path]:
    """Return the names, numbered where one is taken already, on disk or in this run."""
    free: dict[Path, None] = {}  # in order, and quick to look up
    for name in names:
        candidate, number = name, 1
        while candidate in free or is_taken(candidate):
            number += 1
            candidate = name.with_stem(f"{name.stem}-{number}")
        free[candidate] = None
    return list(free)


def file_problems(kind: str, path: Path, example: str) -> list[UserError]:
    """Return why no file can be written to `path`, whatever exists in its folder; its suffix must be the example's."""
    suffix, problems = Path(example).suffix, folder_problems(kind, path.parent)
    if os.path.isdir(path):
        problems.insert(0, TakenError(f"{kind} {path}: is a folder; name a file in it, such as {path / example}"))
    elif path.name.lower() == suffix:
        problems.insert(0, OutputError(f"{kind} {path}: has nothing before {suffix}; {path.with_name(example)} works"))
    elif path.suffix.lower() != suffix:
        problems.insert(0, OutputError(f"{kind} {path}: must be a name that ends in {suffix}"))
    return problems


def video_problems(path: Path, codec: Codec) -> list[UserError]:
    """Return why no video of a codec can be written to `path`, whatever exists in its folder."""
    if codec.suffix and os.path.isdir(path):
        return file_problems("output", path, f"video{codec.suffix}")
    try:
        codec.check_path(path)
    except OutputError as error:
        return [OutputError(f"output {path}: {error}"), *folder_problems("output", path.parent)]
    return folder_problems("output", path.parent)


def folder_problems(kind: str, folder: Path) -> list[UserError]:
    """Return why no file can be written in a folder."""
    if not os.path.isdir(folder):
        return [NotFoundError(f"{kind} folder {folder}: does not exist; create it first")]
    reason = _why_not_writable(folder)
    return [] if reason is None else [OutputError(f"{kind} folder {folder}: cannot be written to ({reason})")]


def _why_not_writable(folder: Path) -> str | None:
    """Try it: permissions alone do not tell, of a full or a special file system for example."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def taken(kind: str, paths: Iterable[Path], overwrite: bool, codec: Codec | None = None) -> Iterator[UserError]:
    """Yield a problem for each file that would replace another, or whose name the system refuses.

    With the codec `frames` the paths are those of folders.
    """
    for path in paths:
        try:
            path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:  # such as a name that is too long
            yield OutputError(f"{kind} {path}: {error.strerror}")
            continue
        except ValueError as error:  # a NUL character
            yield OutputError(f"{kind} {str(path)!r}: {error}")
            continue
        if codec is not None and not codec.suffix and overwrite:
            try:
                check_replaceable(path, overwrite=True)
            except OSError as error:
                yield TakenError(f"{kind} {error}")
        elif path.is_dir() and (codec is None or codec.suffix):
            yield TakenError(f"{kind} {path}: is a folder; name another file")
        elif not overwrite:
            yield TakenError(f"{kind} {path}: exists; choose another name or add --overwrite")


def named_file_problems(kind: str, path: Path, example: str, overwrite: bool) -> list[UserError]:
    """Return why no file can be written under the name that a user gave."""
    return file_problems(kind, path, example) or list(taken(kind, [path], overwrite))


def write_json(path: Path, content: Any, *, overwrite: bool) -> None:
    """Write a JSON file that appears when it is complete; errors as those of `complete_file`."""
    with complete_file(path, overwrite=overwrite) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
