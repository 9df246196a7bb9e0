"""Videos are read back: what a file or a folder of frames holds, its pixels and its comment."""

import os
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from ..configs.arguments import checked_path
from ..configs.errors import VideoError
from .codecs import VideoInfo
from .ffmpeg import decode, read
from .frames_folder import probe_frames, read_frames, read_frames_comment
from .gif import MAGIC, read_gif


def probe_video(path: str | os.PathLike[str]) -> VideoInfo:
    """Decode a video, a file or a folder that `export_video` wrote, from end to end and return what it holds.

    Raises FileNotFoundError for a missing file, ValueError for one that is no complete video.
    """
    path = checked_path("path", path)
    if path.is_dir():
        return probe_frames(path)
    # framecrc is a few "#key 0: value" lines, then a line for each frame that was decoded; unlike the rate in
    # ffmpeg's log, which is rounded, its time base is exact.
    lines = decode(path, "-f", "framecrc").decode().splitlines()
    header = dict(line.removeprefix("#").split(" 0: ", 1) for line in lines if " 0: " in line)
    count = sum(not line.startswith("#") for line in lines)
    if not count:
        raise VideoError(f"{path} is not a complete video: it has no frames")
    width, height = map(int, header["dimensions"].split("x"))
    rate = _mean_rate(path, count) if _is_gif(path) else 1 / Fraction(header["tb"])
    return VideoInfo(width, height, rate, count)


def read_video(path: str | os.PathLike[str], indices: Sequence[int] | None = None) -> tuple[np.ndarray, VideoInfo]:
    """Return a video's frames as uint8 [F, H, W, 3] in RGB (perhaps read-only), and what the video holds.

    `indices` picks frames by number from 0, in increasing order; only these are kept in memory.
    Raises FileNotFoundError for a missing file, ValueError for one that is no complete video.
    """
    path, info = checked_path("path", path), probe_video(path)
    wanted = list(range(info.num_frames) if indices is None else indices)
    if sorted(set(wanted)) != wanted or not wanted or not 0 <= wanted[0] <= wanted[-1] < info.num_frames:
        rule = f"increasing and within 0..{info.num_frames - 1}"
        raise VideoError(f"frame numbers of {path} must be {rule}, got {wanted}")
    if path.is_dir():
        return read_frames(path, wanted), info
    select = "null" if indices is None else "select=" + "+".join(f"eq(n\\,{index})" for index in wanted)
    raw = decode(path, "-vf", select, "-f", "rawvideo", "-pix_fmt", "rgb24")
    return np.frombuffer(raw, np.uint8).reshape(len(wanted), info.height, info.width, 3), info


def read_comment(path: str | os.PathLike[str]) -> str | None:
    """Return the comment that `export_video` put into a video, exactly; None where there is none.

    Raises FileNotFoundError for a missing file, ValueError for one that is no video.
    """
    path = checked_path("path", path)
    if path.is_dir():
        return read_frames_comment(path)
    if _is_gif(path):
        return read_gif(path).comment
    # Lines of KEY=VALUE, first those of the file; a backslash comes before a character that means no syntax.
    for entry in re.findall(rb"((?:\\.|[^\\\n])*)\n", read(path, "-f", "ffmetadata"), re.DOTALL):
        if entry.startswith(b"["):
            break
        if entry.startswith(b"comment="):
            return re.sub(rb"\\(.)", rb"\1", entry.removeprefix(b"comment="), flags=re.DOTALL).decode(errors="replace")
    return None


def _is_gif(path: Path) -> bool:
    if not path.exists():
        return False  # whoever opens it says so
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _mean_rate(path: Path, count: int) -> Fraction:
    delays = read_gif(path).delays
    if len(delays) != count or not sum(delays):
        raise VideoError(f"{path} is not a complete video: {count} of {len(delays)} frames in {sum(delays)} / 100 s")
    return Fraction(100 * count, sum(delays))
