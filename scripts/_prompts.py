"""A file of many prompts, read row by row: what is wrong with a row is told with its line, and the others go on.

Formats by suffix: `.txt` has a prompt a line; `.csv` names its columns in the first row; `.jsonl` has an object a line.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs.errors import NotFoundError, PromptsFileError
from kandinsky5_nabla.pipeline.checks import shortened

COLUMNS: dict[str, type] = {
    "prompt": str,
    "negative_prompt": str,
    "seed": int,
    "height": int,
    "width": int,
    "num_frames": int,
}
"""What a row may set, and its type."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        line: its number in the file, from 1; of a row of several lines the first.
        prompt: what the video shows.
        given: the other columns that the row sets.
        problems: why it cannot be used, one sentence each; empty for a good row.
    """

    line: int
    prompt: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_prompts(path: Path) -> list[Row]:
    """Return the rows of a prompts file, good and bad ones, in their order; empty lines are none.

    Raises:
        NotFoundError: if it is not there.
        PromptsFileError: if it is of another kind, cannot be read, is not UTF-8, or has no prompt column or no row.
    """
    readers = {".txt": _txt, ".csv": _csv, ".jsonl": _jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PromptsFileError(f"{path}: must be a name that ends in {', '.join(readers)}; .txt has a prompt a line")
    if not os.path.exists(path):  # not Path's, which raises for a name that is too long
        raise NotFoundError(f"{path}: there is no such file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise PromptsFileError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise PromptsFileError(f"{path}: byte {error.start} is not UTF-8; save the file in UTF-8") from error
    rows = list(reader(path, text))
    if not rows:
        raise PromptsFileError(f"{path}: has no prompt; a line, or a row below the column names, is one")
    return rows


def _txt(path: Path, text: str) -> Iterator[Row]:
    for line, prompt in enumerate(_lines(text), start=1):
        if prompt.strip():
            yield Row(line, prompt.strip())


def _csv(path: Path, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names = [name.strip().lower() for name in next(reader, [])]
    _require_columns(path, names)
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:  # the reader goes on behind it
            yield Row(line, problems=(f"is not CSV: {error}",))
            continue
        if values is None:
            return
        if not any(value.strip() for value in values):
            continue
        if len(values) != len(names):
            yield Row(line, problems=(f"has {len(values)} values for {len(names)} columns; quote values with commas",))
            continue
        yield _row(line, {name: value for name, value in zip(names, values, strict=True) if value.strip()})


def _require_columns(path: Path, names: list[str]) -> None:
    if "prompt" not in names:
        raise PromptsFileError(
            f"{path}: the first row must name the columns, prompt among them; it is {', '.join(names)!r}"
        )
    problems = [_unknown(name) for name in names if name not in COLUMNS]
    problems += [f"there are two columns {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise PromptsFileError(f"{path}: {'; '.join(problems)}")


def _jsonl(path: Path, text: str) -> Iterator[Row]:
    for line, content in enumerate(_lines(text), start=1):
        if not content.strip():
            continue
        try:
            values = json.loads(content, object_pairs_hook=_object)
        except PromptsFileError as error:
            yield Row(line, problems=(str(error),))
            continue
        except (ValueError, RecursionError) as error:
            yield Row(line, problems=(f"is not JSON: {error}",))
            continue
        if isinstance(values, dict):
            yield _row(line, {name: value for name, value in values.items() if value is not None}, _as_json)
        else:
            yield Row(line, problems=(f'is no object such as {{"prompt": "a cat"}}: {content.strip()[:40]}',))


def _lines(text: str) -> list[str]:
    """Return the lines of a text; `splitlines` would end one at U+2028 and the like, which texts and JSON may hold."""
    return re.split(r"\r\n|\r|\n", text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; of two values of a name json would take the last one."""
    names = [name for name, _ in pairs]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise PromptsFileError(f"there are two values of {', '.join(map(repr, twice))}")
    return dict(pairs)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _row(line: int, values: dict[str, Any], spelled: Callable[[Any], str] = repr) -> Row:
    """Return a row of named values, each text or already of its type, `spelled` in messages as in the file."""
    problems = [_unknown(name) for name in values if name not in COLUMNS]
    if "prompt" not in values:
        problems.append("has no prompt")
    given = {}
    for name, value in values.items():
        kind = COLUMNS.get(name)
        if kind is None:
            continue
        try:
            given[name] = _typed(value, kind)
        except (TypeError, ValueError):
            wanted = "text" if kind is str else "a whole number"
            problems.append(f"{name} {shortened(spelled(value))}: must be {wanted}")
    return Row(line, given.pop("prompt", ""), given, tuple(problems))


def _typed(value: Any, kind: type) -> Any:
    """Return a value of its type.

    Raises:
        TypeError, ValueError: if it is not of it; true is no number, and 1.5 no whole one.
    """
    if kind is str:
        if not isinstance(value, str):
            raise TypeError
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return int(value)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COLUMNS, n=1)
    meant = f" {near[0]} is meant?" if near else ""
    return f"there is no column {shortened(name)!r}:{meant} they are {', '.join(COLUMNS)}"
