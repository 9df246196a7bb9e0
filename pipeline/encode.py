"""Encode: frames go through ffmpeg, or into PNGs, one at a time; what must be in the file is known afterwards."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from ..configs.errors import WriteError
from .codecs import Codec, VideoInfo
from .ffmpeg import FfmpegError, run_ffmpeg
from .frames_folder import write_frames
from .gif import exact_delays

# bitexact: no version or date in the file.
_BITEXACT = ("-flags:v", "+bitexact", "-fflags", "+bitexact")


def encode(
    frames: Iterator[np.ndarray], path: Path, codec: Codec, rate: Fraction, crf: int | None, comment: str | None
) -> VideoInfo:
    """Write frames of one size, uint8 [H, W, 3], to `path`; return what it must now hold.

    A GIF has its delays and comment yet to come (`finish_gif`). Raises WriteError where ffmpeg fails.
    """
    if not codec.encoder:
        return write_frames(frames, path, rate, comment)
    first = next(frames)
    height, width, _ = first.shape
    with _metadata_input(comment if codec.suffix == ".mp4" else None) as metadata:
        source = f"-f rawvideo -pixel_format rgb24 -video_size {width}x{height} -framerate {rate} -i pipe:0"
        quality = [] if crf is None else ["-crf", str(crf)]
        output = [*codec.encoder, *quality, *_BITEXACT, "-y", f"file:{path}"]
        count = _feed(chain([first], frames), [*source.split(), *metadata, *output])
    if codec.name == "gif":
        rate = Fraction(100 * count, sum(exact_delays(rate, count)))
    return VideoInfo(width, height, rate, count)


def _feed(frames: Iterator[np.ndarray], arguments: list[str]) -> int:
    """Hand frames to ffmpeg as they come; return their number."""
    count = 0
    try:
        with run_ffmpeg(arguments, stdin=subprocess.PIPE) as process:
            for frame in frames:
                count += 1
                if not _send(frame, process.stdin):
                    break
    except FfmpegError as error:
        raise WriteError(str(error)) from error
    return count


def _send(frame: np.ndarray, pipe: IO[bytes] | None) -> bool:
    """Hand a frame to ffmpeg; False where ffmpeg has ended, whose exit status then tells the reason."""
    assert pipe is not None
    try:
        pipe.write(frame.data)
    except OSError:
        return False
    return True


@contextmanager
def _metadata_input(comment: str | None) -> Iterator[list[str]]:
    """Yield arguments that make ffmpeg take a comment from a file: an argument's length is limited, a file's is not."""
    if comment is None:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "metadata.txt")
        text = re.sub(r"([=;#\\\n\r])", r"\\\1", comment)
        # No newline at the end: after a comment that ends in a backslash ffmpeg would read it as a part of it.
        file.write_bytes(f";FFMETADATA1\ncomment={text}".encode())
        yield ["-f", "ffmetadata", "-i", f"file:{file}", "-map_metadata", "1", "-map", "0:v"]
