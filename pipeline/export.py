"""Export: frames become an H.264 MP4 that takes its name only when it is complete; videos are read back."""

import math
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image

from .files import complete_file

Frame = Image.Image | np.ndarray | torch.Tensor

# Untagged H.264 is shown as BT.601 by some players and BT.709 by others: convert to BT.709 and say so in the
# file. The flags keep the conversion exact (a flat colour comes back within 2 of 255) and equal on every CPU.
_RGB_TO_BT709 = (
    "scale=out_color_matrix=bt709:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_int+bitexact,"
    "format=yuv420p,"
    "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv"
)
# x264's output depends on its number of threads, which it takes from the machine unless it is told.
_ENCODER_THREADS = "4"


class _FfmpegError(RuntimeError):
    """ffmpeg ended with an error; the message is the last line of its log."""


@dataclass(frozen=True)
class VideoInfo:
    """What a video file holds: size in pixels, exact frame rate (frames a second), number of frames."""

    width: int
    height: int
    fps: Fraction
    num_frames: int


def export_video(
    frames: Iterable[Frame],
    path: str | os.PathLike[str],
    fps: float | Fraction = 24,
    *,
    crf: int = 18,
    overwrite: bool = False,
    num_frames: int | None = None,
    comment: str | None = None,
) -> Path:
    """Write frames to an H.264 (yuv420p) MP4 of exactly their size, number and rate; return its path.

    The same frames give the same bytes, as uint8, as float or as a tensor. The file is written under a
    temporary name in the same folder, read back and only then named; an error leaves nothing behind.

    Args:
        frames: what `to_uint8` takes, all of one even height and width: a list, an array [F, H, W, 3], a tensor
            [F, 3, H, W], or an iterator, which is consumed one frame at a time.
        path: a name that ends in .mp4, in a folder that exists.
        fps: frames a second, at most 1000; kept as a fraction whose denominator is at most 1001.
        crf: x264's quality, 0 (lossless) to 51.
        overwrite: replace a file of this name.
        num_frames: how many frames `frames` must give; any other number is an error.
        comment: a text for the file's metadata, such as how the video was made.

    Raises:
        ValueError: a frame, size, number or argument that cannot be written as asked.
        FileExistsError, FileNotFoundError, OSError: the path cannot be written, found before the first frame is
            drawn (FileExistsError also where the name was taken meanwhile).
        RuntimeError: ffmpeg failed, or what it wrote is not what it was given (a full disk, for example).
    """
    path = Path(path)
    if path.suffix.lower() != ".mp4":
        raise ValueError(f"the video's name must end in .mp4, got {path.name!r}: {path.with_suffix('.mp4')} works")
    if not 0 <= crf <= 51:
        raise ValueError(f"crf must be between 0 and 51, got {crf}")
    rate = _frame_rate(fps)
    with complete_file(path, overwrite=overwrite) as temporary:
        written = _encode(_checked_frames(frames, num_frames), temporary, rate, crf, comment)
        _check_read_back(temporary, written)
    return path


def to_uint8(frame: Frame, name: str = "frame") -> np.ndarray:
    """Return a frame as contiguous uint8 [H, W, 3] in RGB; `name` stands for it in errors.

    Takes an RGB image, an array [H, W, 3], or a tensor [H, W, 3] or [3, H, W]; uint8, or floating point, where 0..1
    is clamped and rounded (not cut off) to 0..255. A value that is not finite is a ValueError.
    """
    if isinstance(frame, Image.Image):
        if frame.mode != "RGB":
            raise ValueError(f"{name} is an image of mode {frame.mode}; frame.convert('RGB') works")
        array = np.asarray(frame)
    elif isinstance(frame, torch.Tensor):
        array = _tensor_to_array(frame)
    elif isinstance(frame, np.ndarray):
        array = frame
    else:
        raise ValueError(f"{name} is a {type(frame).__name__}; images, arrays and tensors work, one a frame")
    if array.ndim != 3 or array.shape[-1] != 3:
        layouts = "[H, W, 3]; a tensor may also be [3, H, W]"
        raise ValueError(f"{name} has the shape {list(array.shape)}; it must be {layouts}")
    if np.issubdtype(array.dtype, np.floating):
        array = _float_to_uint8(array, name)
    if array.dtype != np.uint8:
        raise ValueError(f"{name} has the dtype {array.dtype}; uint8 and floating point in 0..1 work")
    return np.ascontiguousarray(array)


def read_video(path: str | os.PathLike[str], indices: Sequence[int] | None = None) -> tuple[np.ndarray, VideoInfo]:
    """Return a video's frames as uint8 [F, H, W, 3] in RGB (read-only), and what the file holds.

    `indices` picks frames by number from 0, in increasing order; only these are kept in memory.
    Raises FileNotFoundError for a missing file, ValueError for one that is no complete video.
    """
    info = probe_video(path)
    select = "null"
    if indices is not None:
        ordered = sorted(set(indices))
        if ordered != list(indices) or not ordered or not 0 <= ordered[0] <= ordered[-1] < info.num_frames:
            rule = f"increasing and within 0..{info.num_frames - 1}"
            raise ValueError(f"frame numbers of {path} must be {rule}, got {list(indices)}")
        select = "select=" + "+".join(f"eq(n\\,{index})" for index in ordered)
    raw = _decode(path, "-vf", select, "-f", "rawvideo", "-pix_fmt", "rgb24")
    count = info.num_frames if indices is None else len(indices)
    return np.frombuffer(raw, np.uint8).reshape(count, info.height, info.width, 3), info


def probe_video(path: str | os.PathLike[str]) -> VideoInfo:
    """Decode a video from end to end and return what it holds.

    Raises FileNotFoundError for a missing file, ValueError for one that is no complete video.
    """
    # framecrc is a few "#key 0: value" lines, then a line for each frame that was decoded; unlike the rate in
    # ffmpeg's log, which is rounded, its time base is exact.
    lines = _decode(path, "-f", "framecrc").decode().splitlines()
    header = dict(line.removeprefix("#").split(" 0: ", 1) for line in lines if " 0: " in line)
    count = sum(not line.startswith("#") for line in lines)
    if not count:
        raise ValueError(f"{path} is not a complete video: it has no frames")
    width, height = map(int, header["dimensions"].split("x"))
    return VideoInfo(width, height, 1 / Fraction(header["tb"]), count)


def _frame_rate(fps: float | Fraction) -> Fraction:
    """Return the rate as a fraction that ffmpeg keeps exactly (it cuts terms above 1001000)."""
    rate = Fraction(float(fps)).limit_denominator(1001) if math.isfinite(fps) else Fraction(0)
    if not 0 < rate <= 1000:
        raise ValueError(f"fps must be a positive number, at most 1000, got {fps}")
    return rate


def _tensor_to_array(frame: torch.Tensor) -> np.ndarray:
    frame = frame.detach().cpu()
    if frame.is_floating_point():  # numpy has no bfloat16
        frame = frame.float()
    array = frame.numpy()
    channels_first = array.ndim == 3 and array.shape[0] == 3 and array.shape[-1] != 3
    return array.transpose(1, 2, 0) if channels_first else array


def _float_to_uint8(array: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds values that are not finite (NaN or infinity)")
    if array.max() > 2 or array.min() < -1:  # far outside: 0..255 given as floats would all become white
        raise ValueError(f"{name} holds floats from {array.min():g} to {array.max():g}; 0..1 is meant")
    # In fp32 whatever the dtype: fp16 cannot tell 254.4 from 254.5, and one precision gives one file.
    return np.rint(array.clip(0, 1).astype(np.float32) * 255).astype(np.uint8)


def _checked_frames(frames: Iterable[Frame], num_frames: int | None) -> Iterator[np.ndarray]:
    """Yield frames as uint8 [H, W, 3]; the first says the size, `num_frames` the number."""
    size, count = None, 0
    for frame in frames:
        if count == num_frames:
            raise ValueError(f"there are more than the {num_frames} frames asked for")
        array = to_uint8(frame, f"frame {count}")
        height, width, _ = array.shape
        if size is None:
            size = height, width
            _check_even(height, width)
        if (height, width) != size:
            raise ValueError(
                f"frame {count} is {height}x{width} (height x width), the first is {size[0]}x{size[1]}; "
                "all frames must have one size"
            )
        yield array
        count += 1
    if not count:
        raise ValueError("there are no frames to write; a video has at least one")
    if num_frames not in (None, count):
        raise ValueError(f"there are {count} frames, {num_frames} were asked for")


def _check_even(height: int, width: int) -> None:
    if height % 2 or width % 2 or not height or not width:
        sizes = {
            f"{max(2, height + dh)}x{max(2, width + dw)}"
            for dh in ((-1, 1) if height % 2 else (0,))
            for dw in ((-1, 1) if width % 2 else (0,))
        }
        raise ValueError(
            f"the frames are {height}x{width} (height x width); H.264 with yuv420p needs even numbers: "
            f"{', '.join(sorted(sizes))} would work"
        )


def _encode(frames: Iterator[np.ndarray], path: Path, rate: Fraction, crf: int, comment: str | None) -> VideoInfo:
    """Encode frames of one size to `path`; return what the file must now hold."""
    first = next(frames)
    height, width, _ = first.shape
    source = f"-f rawvideo -pixel_format rgb24 -video_size {width}x{height} -framerate {rate} -i pipe:0"
    encoder = f"-c:v libx264 -crf {crf} -threads {_ENCODER_THREADS} -vf {_RGB_TO_BT709}"
    # bitexact: no version or date in the file. faststart: the index comes first, so players need not load it all.
    container = "-flags:v +bitexact -fflags +bitexact -movflags +faststart -f mp4"
    metadata = [] if comment is None else ["-metadata", f"comment={comment}"]
    arguments = [*source.split(), *encoder.split(), *container.split(), *metadata, "-y", f"file:{path}"]
    count = 0
    with _ffmpeg(arguments, stdin=subprocess.PIPE) as process:
        for frame in chain([first], frames):
            count += 1
            if not _send(frame, process.stdin):
                break
    return VideoInfo(width, height, rate, count)


def _send(frame: np.ndarray, pipe: IO[bytes] | None) -> bool:
    """Hand a frame to ffmpeg; False where ffmpeg has ended, whose exit status then tells the reason."""
    assert pipe is not None
    try:
        pipe.write(frame.data)
    except OSError:
        return False
    return True


def _check_read_back(path: Path, written: VideoInfo) -> None:
    try:
        found = probe_video(path)
    except ValueError as error:
        raise RuntimeError(f"the video was not written completely (is the disk full?): {error}") from error
    if found != written:
        raise RuntimeError(f"the video was not written completely (is the disk full?): {written} became {found}")


def _decode(path: str | os.PathLike[str], *output: str) -> bytes:
    """Return what ffmpeg makes of each frame of a video, without dropping or doubling any."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"the video {path} does not exist")
    source = ["-xerror", "-i", f"file:{os.fspath(path)}", "-map", "0:v:0", "-fps_mode", "passthrough"]
    try:
        with _ffmpeg([*source, *output, "pipe:1"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            return process.stdout.read()
    except _FfmpegError as error:
        raise ValueError(f"{path} is not a complete video: {error}") from error


@contextmanager
def _ffmpeg(
    arguments: Sequence[str], stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ffmpeg around the body, which feeds or reads its pipe; it has ended when the block is left.

    Raises _FfmpegError where ffmpeg fails; kills it where the body raises.
    imageio-ffmpeg brings the program; its own writer ignores the exit status and cannot hand over the log.
    """
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=log)
        try:
            yield process
            _close_pipes(process)
            process.wait()
        finally:  # after an error or an interrupt it is still running
            process.kill()
            _close_pipes(process)
            process.wait()
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no message")
            raise _FfmpegError(f"ffmpeg ended with status {process.returncode}: {last.strip()}")


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # ffmpeg ended before it took everything: its status tells why
                pipe.close()
