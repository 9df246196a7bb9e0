"""What ffmpeg leaves open in a GIF: exact delays and a comment, written into its blocks and read back.

Layout of a GIF89a: https://www.w3.org/Graphics/GIF/spec-gif89a.txt
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from ..configs.errors import VideoError

MAGIC = b"GIF8"
"""How every GIF begins."""

_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B
_GRAPHIC_CONTROL, _COMMENT = 0xF9, 0xFE
_MAX_SUB_BLOCK = 255


@dataclass(frozen=True)
class GifTiming:
    """What a GIF's blocks say beside the pixels.

    Attributes:
        delays: how long each frame is shown, in hundredths of a second.
        comment: the first comment of the file; None where it has none.
    """

    delays: tuple[int, ...]
    comment: str | None


def exact_delays(rate: Fraction, count: int) -> tuple[int, ...]:
    """Return how long each of `count` frames is shown at `rate` frames a second, in hundredths of a second.

    A rate such as 24 gives delays of 4 and 5: each frame appears within half a hundredth of its time, and the
    clip ends within half a hundredth of its length, however long it is.
    """
    times = [math.floor(100 * index / rate + Fraction(1, 2)) for index in range(count + 1)]
    return tuple(end - start for start, end in pairwise(times))


def read_gif(path: Path) -> GifTiming:
    """Return what a GIF's blocks say; ValueError for a file that is not complete."""
    return _timing(path.read_bytes(), path)[0]


def finish_gif(path: Path, delays: Sequence[int], comment: str | None) -> None:
    """Write delays (hundredths of a second, one a frame) and a comment into a GIF that has no comment, and check it.

    ffmpeg lets the last frame last as long as the one before, and writes no comments.
    Raises ValueError where the file is not complete or holds another number of frames.
    """
    content = path.read_bytes()
    _, offsets = _timing(content, path)
    if len(offsets) != len(delays):
        raise VideoError(f"{path} is not a complete video: it has {len(offsets)} frames instead of {len(delays)}")
    with path.open("r+b") as file:
        for offset, delay in zip(offsets, delays, strict=True):
            file.seek(offset)
            file.write(delay.to_bytes(2, "little"))
        if comment is not None:
            file.seek(len(content) - 1)  # where the trailer is
            file.write(_comment_block(comment.encode()) + bytes([_TRAILER]))
    if read_gif(path) != GifTiming(tuple(delays), comment):
        raise VideoError(f"{path} is not a complete video: its delays or its comment are not those that were written")


def _comment_block(text: bytes) -> bytes:
    parts = [text[start : start + _MAX_SUB_BLOCK] for start in range(0, len(text), _MAX_SUB_BLOCK)]
    return bytes([_EXTENSION, _COMMENT]) + b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


def _timing(content: bytes, path: Path) -> tuple[GifTiming, list[int]]:
    """Return what the blocks say, and where in the file each frame's delay is written."""
    offsets, comments = [], []
    frames = 0
    try:
        for label, position in _blocks(content):
            if label == _GRAPHIC_CONTROL:
                offsets.append(position + 2)  # after the size of the sub-block and the flags
            elif label == _COMMENT:
                comments.append(b"".join(_sub_blocks(content, position)).decode(errors="replace"))
            elif label == _IMAGE:
                frames += 1
    except (IndexError, ValueError) as error:
        raise VideoError(f"{path} is not a complete video: its GIF blocks break off") from error
    if len(offsets) != frames:
        raise VideoError(f"{path} has {frames} frames and {len(offsets)} delays; a GIF with a delay a frame works")
    delays = tuple(int.from_bytes(content[offset : offset + 2], "little") for offset in offsets)
    return GifTiming(delays, comments[0] if comments else None), offsets


def _blocks(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield the label of each block and where its sub-blocks begin.

    Raises IndexError or ValueError where the blocks do not end with the file.
    """
    position = 13 + _palette_bytes(content[10])
    while content[position] != _TRAILER:
        if content[position] == _EXTENSION:
            label, start = content[position + 1], position + 2
        elif content[position] == _IMAGE:
            label, start = _IMAGE, position + 11 + _palette_bytes(content[position + 9])  # ... and its code size
        else:
            raise VideoError(f"no block begins with {content[position]:#x}")
        yield label, start
        position = start + sum(1 + len(part) for part in _sub_blocks(content, start)) + 1
    if position + 1 != len(content):
        raise VideoError("the file goes on after its end")


def _sub_blocks(content: bytes, position: int) -> Iterator[bytes]:
    while size := content[position]:
        yield content[position + 1 : position + 1 + size]
        position += 1 + size


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
