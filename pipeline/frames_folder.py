"""A video as a folder of PNGs, exact to the last bit, that takes its name only when it is complete.

The folder holds frame-0000.png, frame-0001.png, ... and metadata.json: the rate, which PNGs cannot hold, the size,
the number of frames, and the comment.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..configs.errors import NotFoundError, TakenError, VideoError
from .codecs import VideoInfo
from .files import temporary_name

METADATA = "metadata.json"
_FRAME = re.compile(r"frame-\d{4,}\.png")


@contextmanager
def complete_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; when the body ends it becomes `path`, when it raises it goes.

    `overwrite` replaces a folder that is empty or holds the frames of such a video and nothing else.
    Raises, before the body runs, FileExistsError for a name that is taken and not to be replaced,
    FileNotFoundError for a missing folder around it, NotADirectoryError, or the OSError of a folder that cannot be
    written to. Of two writers of one name one fails, unless both overwrite.
    """
    if not path.parent.is_dir():
        raise NotFoundError(f"the folder {path.parent} does not exist; create it first")
    check_replaceable(path, overwrite=overwrite)
    temporary = temporary_name(path, "")
    try:
        temporary.mkdir()
        yield temporary
        if overwrite and _exists(path):
            _replace_folder(temporary, path)
        else:
            _rename_to_free_name(temporary, path)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def check_replaceable(path: Path, *, overwrite: bool) -> None:
    """Raise FileExistsError, NotADirectoryError or another OSError unless a folder of frames may take this name."""
    if not _exists(path):
        return
    if not overwrite:
        raise TakenError(f"{path} exists; choose another name or ask to overwrite it")
    if path.is_symlink() or not path.is_dir():
        raise TakenError(f"{path} is not a folder; choose another name for a folder of frames")
    _refuse_other_content(path, path)


def write_frames(frames: Iterator[np.ndarray], folder: Path, rate: Fraction, comment: str | None) -> VideoInfo:
    """Write frames (uint8 [H, W, 3], one at a time) and their metadata to an empty folder; return what it holds."""
    height = width = count = 0
    for count, frame in enumerate(frames, start=1):
        height, width, _ = frame.shape
        Image.fromarray(frame).save(_frame_path(folder, count - 1))
    metadata = {"fps": str(rate), "num_frames": count, "width": width, "height": height}
    if comment is not None:
        metadata["comment"] = comment
    (folder / METADATA).write_text(json.dumps(metadata, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return VideoInfo(width, height, rate, count)


def probe_frames(folder: Path) -> VideoInfo:
    """Decode a folder's frames one by one and return what it holds; ValueError where it is not complete."""
    info = _info(folder)
    for index in range(info.num_frames):
        _read_frame(folder, index, info)
    return info


def read_frames(folder: Path, indices: Sequence[int]) -> np.ndarray:
    """Return the frames of these numbers as uint8 [F, H, W, 3]; ValueError where one is missing or damaged."""
    info = _info(folder)
    return np.stack([_read_frame(folder, index, info) for index in indices])


def read_frames_comment(folder: Path) -> str | None:
    """Return the comment beside a folder's frames, None where there is none; ValueError without metadata."""
    return _metadata(folder).get("comment")


def folder_of_frames(file: Path) -> Path | None:
    """Return the folder of frames that a file is a part of, None for a file that is no such part."""
    files = {METADATA, _frame_path(file.parent, 0).name}
    is_part = file.name == METADATA or _FRAME.fullmatch(file.name) is not None
    return file.parent if is_part and all((file.parent / name).is_file() for name in files) else None


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = json.loads((folder / METADATA).read_text("utf-8-sig"))
    except FileNotFoundError as error:
        raise VideoError(f"{folder} is not a complete video: it has no {METADATA}") from error
    except (ValueError, RecursionError) as error:
        raise VideoError(f"{folder} is not a complete video: its {METADATA} is damaged ({error})") from error
    if not isinstance(metadata, dict):
        raise VideoError(f"{folder} is not a complete video: its {METADATA} is no JSON object")
    return metadata


def _info(folder: Path) -> VideoInfo:
    metadata = _metadata(folder)
    try:
        rate = Fraction(metadata["fps"])
        return VideoInfo(int(metadata["width"]), int(metadata["height"]), rate, int(metadata["num_frames"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise VideoError(f"{folder} is not a complete video: its {METADATA} tells no size, rate or number") from error


def _read_frame(folder: Path, index: int, info: VideoInfo) -> np.ndarray:
    path = _frame_path(folder, index)
    try:
        with Image.open(path) as image:
            array = np.asarray(image)
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a damaged PNG
        raise VideoError(f"{folder} is not a complete video: {path.name} cannot be read ({error})") from error
    if array.shape != (info.height, info.width, 3):
        size = f"{info.height}x{info.width}"
        raise VideoError(f"{folder} is not a complete video: {path.name} is no RGB image of {size} (height x width)")
    return array


def _frame_path(folder: Path, index: int) -> Path:
    return folder / f"frame-{index:04}.png"


def _exists(path: Path) -> bool:
    """Whether something has this name, a dangling link too; OSError for a name that the system refuses."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _refuse_other_content(folder: Path, name: Path) -> None:
    """Raise FileExistsError where a folder holds what this module does not write; `name` stands for it."""
    with os.scandir(folder) as entries:
        files = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    ours = {file for file in files if _FRAME.fullmatch(file)}
    if _frame_path(folder, 0).name in ours:  # a metadata.json alone may be anyone's
        ours.add(METADATA)
    others = sorted(file for file, is_file in files.items() if file not in ours or not is_file)
    if others:
        named = ", ".join(others[:3]) + (" and more" if others[3:] else "")
        raise TakenError(f"{name} holds {named} beside frames and is not replaced; choose another name")


def _replace_folder(source: Path, path: Path) -> None:
    """Put a folder in the place of one with frames, which goes only when its successor has the name.

    No call replaces a folder that is not empty: for a moment between two renames none has the name.
    """
    aside = temporary_name(path, "")
    os.rename(path, aside)
    try:
        _refuse_other_content(aside, path)  # what came meanwhile; now that the name is gone, nothing follows
        os.rename(source, path)
    except BaseException:
        os.rename(aside, path)
        raise
    shutil.rmtree(aside)


def _rename_to_free_name(source: Path, path: Path) -> None:
    """Give a folder a name that must be free; os.rename replaces at most an empty folder that appeared meanwhile."""
    try:
        os.rename(source, path)
    except OSError as error:
        if _exists(path):
            raise TakenError(f"{path} appeared meanwhile and is kept; choose another name") from error
        raise
