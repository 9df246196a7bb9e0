"""Files that appear under their name only when they are complete."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..configs.errors import NotFoundError, TakenError


@contextmanager
def complete_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary name beside `path`; when the body ends the file becomes `path`, when it raises it goes.

    Raises, before the body runs, FileExistsError (unless `overwrite`), FileNotFoundError for a missing folder, or
    the OSError of a folder that cannot be written to. Two writers of one name cannot both succeed unless both
    overwrite.
    """
    if not path.parent.is_dir():
        raise NotFoundError(f"the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise TakenError(f"{path} is a folder; give the name of a file")
    with suppress(FileNotFoundError):
        path.lstat()  # also refuses a name that is too long for the file system
        if not overwrite:
            raise TakenError(f"{path} exists; choose another name or ask to overwrite it")
    temporary = temporary_name(path)
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # some libraries write files that only their owner can read
        if overwrite:
            os.replace(temporary, path)
        else:
            _rename_to_free_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path, suffix: str | None = None) -> Path:
    """Return an unused name beside `path`, hidden, with its suffix or another; `remove_leftovers` knows it again."""
    return path.with_name(f".{_mark(path)}{uuid.uuid4().hex[:16]}{path.suffix if suffix is None else suffix}")


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed have left of writing `path`; nobody may be writing it now."""
    for left in path.parent.glob(f".{_mark(path)}" + "[0-9a-f]" * 16 + "*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)


def _mark(path: Path) -> str:
    return hashlib.sha256(path.name.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _rename_to_free_name(source: Path, path: Path) -> None:
    """Give a file a name that must be free; unlike os.rename, never replace a file that appeared meanwhile."""
    try:
        os.link(source, path)
    except FileExistsError as error:
        raise TakenError(f"{path} appeared meanwhile and is kept; choose another name") from error
    except OSError:  # a file system without hard links: claim the name, then replace our own claim
        path.touch(exist_ok=False)
        try:
            os.replace(source, path)
        except BaseException:
            path.unlink()
            raise
