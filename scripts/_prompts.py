"""A file of many prompts, read row by row: what is wrong with a row is told with its line, and the others go on.

Formats by suffix: `.txt` has a prompt a line; `.csv` names its columns in the first row; `.jsonl` has an object a line.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs.errors import PromptsFileError

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
        OSError: if it cannot be read.
        ValueError: if it is of another kind, not UTF-8, without a prompt column, or without any row.
    """
    readers = {".txt": _txt, ".csv": _csv, ".jsonl": _jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PromptsFileError(f"{path}: must be a name that ends in {', '.join(readers)}; .txt has a prompt a line")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptsFileError(f"{path}: byte {error.start} is not UTF-8; save the file in UTF-8") from error
    rows = list(reader(path, text))
    if not rows:
        raise PromptsFileError(f"{path}: has no prompt; a line, or a row below the column names, is one")
    return rows


def _txt(path: Path, text: str) -> Iterator[Row]:
    for line, prompt in enumerate(text.splitlines(), start=1):
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
    for line, content in enumerate(text.split("\n"), start=1):  # JSON may hold what splitlines takes for a line's end
        if not content.strip():
            continue
        try:
            values = json.loads(content)
        except ValueError as error:
            yield Row(line, problems=(f"is not JSON: {error}",))
            continue
        if isinstance(values, dict):
            yield _row(line, {name: value for name, value in values.items() if value is not None})
        else:
            yield Row(line, problems=(f'is no object such as {{"prompt": "a cat"}}: {content.strip()[:40]}',))


def _row(line: int, values: dict[str, Any]) -> Row:
    """Return a row of named values, each text or already of its type."""
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
            problems.append(f"{name} {value!r}: must be {'text' if kind is str else 'a whole number'}")
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
    return f"there is no column {name!r}: {f'{near[0]} is meant?' if near else ''} they are {', '.join(COLUMNS)}"
