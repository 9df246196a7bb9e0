"""Export: frames become a video, a file or a folder, that takes its name only when it is complete and read back."""

import os
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..configs.arguments import checked_path
from ..configs.errors import NotFiniteError, VideoError, WriteError
from .checks import is_whole
from .codecs import Codec, VideoInfo, check_comment, find_codec
from .encode import encode
from .files import complete_file
from .frames_folder import complete_folder
from .gif import exact_delays, finish_gif
from .videos import probe_video, read_comment, read_video

__all__ = ["VideoInfo", "export_video", "probe_video", "read_comment", "read_video", "to_uint8"]

Frame = Image.Image | np.ndarray | torch.Tensor


def export_video(
    frames: Iterable[Frame],
    path: str | os.PathLike[str],
    fps: float | Fraction = 24,
    *,
    codec: str = "h264",
    crf: int | None = None,
    overwrite: bool = False,
    num_frames: int | None = None,
    comment: str | None = None,
) -> Path:
    """Write frames to a video of exactly their size, number and rate; return its path.

    The same frames give the same bytes, as uint8, as float or as a tensor. The video is written under a
    temporary name in the same folder, read back and only then named; an error leaves nothing behind.

    | codec  | path       | holds                                                                            |
    |--------|------------|----------------------------------------------------------------------------------|
    | h264   | NAME.mp4   | H.264, yuv420p, crf 18 by default; even sizes                                    |
    | h265   | NAME.mp4   | H.265, yuv420p, crf 20 by default, smaller and slower; even sizes from 16 pixels |
    | gif    | NAME.gif   | 256 colours for the whole clip, for which ffmpeg keeps all frames in memory, 4   |
    |        |            | bytes a pixel; loops; at most 50 fps. GIF counts in 1/100 s: where frames do not |
    |        |            | take whole ones (24 fps), delays differ by 1 and each frame is within 1/200 s of |
    |        |            | its time                                                                         |
    | frames | NAME, a    | frame-0000.png, ...: the pixels themselves; metadata.json: rate, size, number    |
    |        | folder     | and comment                                                                      |

    Args:
        frames: what `to_uint8` takes, all of one height and width: a list, an array [F, H, W, 3], a tensor
            [F, 3, H, W], or an iterator, which is consumed one frame at a time.
        path: a name as the codec's files have it, in a folder that exists.
        fps: frames a second, at most 1000; kept as a fraction whose denominator is at most 1001.
        codec: one of the above (`codecs.CODECS`).
        crf: quality of h264 and h265, 0 (best) to 51; None for the codec's own.
        overwrite: replace a file of this name, or a folder that is empty or holds nothing but such frames.
        num_frames: how many frames `frames` must give; any other number is an error.
        comment: a text for the video's metadata, such as how it was made; `read_comment` gives it back.

    Raises:
        ValueError: a frame, size, number or argument that cannot be written as asked; arguments are checked before
            the first frame is drawn.
        FileExistsError, FileNotFoundError, OSError: the path cannot be written, found before the first frame is
            drawn (FileExistsError also where the name was taken meanwhile, OSError where a PNG or the end of a GIF
            cannot be written).
        RuntimeError: ffmpeg failed, or what it wrote is not what it was given (a full disk, for example).
    """
    path, chosen = checked_path("path", path), find_codec(codec)
    chosen.check_path(path)
    quality, rate = chosen.quality(crf), chosen.rate(fps)
    check_comment(comment)
    if num_frames is not None and (not is_whole(num_frames) or num_frames < 1):
        raise VideoError(f"num_frames {num_frames!r}: must be a whole number, at least 1")
    drawn = _drawn(frames)
    naming = complete_file if chosen.suffix else complete_folder
    with naming(path, overwrite=overwrite) as temporary:
        written = encode(_checked_frames(drawn, num_frames, chosen), temporary, chosen, rate, quality, comment)
        try:
            if chosen.name == "gif":
                finish_gif(temporary, exact_delays(rate, written.num_frames), comment)
            found, kept = probe_video(temporary), read_comment(temporary)
        except ValueError as error:
            raise WriteError(f"the video was not written completely (is the disk full?): {error}") from error
        if (found, kept) != (written, comment):
            difference = f"{written} became {found}" if found != written else "its comment is not what was given"
            raise WriteError(f"the video was not written completely (is the disk full?): {difference}")
    return path


def _drawn(frames: Iterable[Frame]) -> Iterator[Frame]:
    try:
        return iter(frames)
    except TypeError as error:  # also of a tensor without dimensions
        raise VideoError(f"frames: must be a list, array, tensor or iterator, not {type(frames).__name__}") from error


def to_uint8(frame: Frame, name: str = "frame") -> np.ndarray:
    """Return a frame as contiguous uint8 [H, W, 3] in RGB; `name` stands for it in errors.

    Takes an RGB image, an array [H, W, 3], or a tensor [H, W, 3] or [3, H, W]; uint8, or floating point, where 0..1
    is clamped and rounded (not cut off) to 0..255. A value that is not finite is a ValueError.
    """
    if isinstance(frame, Image.Image):
        if frame.mode != "RGB":
            raise VideoError(f"{name} is an image of mode {frame.mode}; frame.convert('RGB') works")
        array = np.asarray(frame)
    elif isinstance(frame, torch.Tensor):
        array = _tensor_to_array(frame)
    elif isinstance(frame, np.ndarray):
        array = frame
    else:
        raise VideoError(f"{name} is a {type(frame).__name__}; images, arrays and tensors work, one a frame")
    if array.ndim != 3 or array.shape[-1] != 3:
        layouts = "[H, W, 3]; a tensor may also be [3, H, W]"
        raise VideoError(f"{name} has the shape {list(array.shape)}; it must be {layouts}")
    if np.issubdtype(array.dtype, np.floating):
        array = _float_to_uint8(array, name)
    if array.dtype != np.uint8:
        raise VideoError(f"{name} has the dtype {array.dtype}; uint8 and floating point in 0..1 work")
    return np.ascontiguousarray(array)


def _tensor_to_array(frame: torch.Tensor) -> np.ndarray:
    frame = frame.detach().cpu()
    if frame.is_floating_point():  # numpy has no bfloat16
        frame = frame.float()
    array = frame.numpy()
    channels_first = array.ndim == 3 and array.shape[0] == 3 and array.shape[-1] != 3
    return array.transpose(1, 2, 0) if channels_first else array


def _float_to_uint8(array: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(array).all():
        raise NotFiniteError(f"{name} holds values that are not finite (NaN or infinity)")
    if array.max() > 2 or array.min() < -1:  # far outside: 0..255 given as floats would all become white
        raise VideoError(f"{name} holds floats from {array.min():g} to {array.max():g}; 0..1 is meant")
    # In fp32 whatever the dtype: fp16 cannot tell 254.4 from 254.5, and one precision gives one file.
    return np.rint(array.clip(0, 1).astype(np.float32) * 255).astype(np.uint8)


def _checked_frames(frames: Iterator[Frame], num_frames: int | None, codec: Codec) -> Iterator[np.ndarray]:
    """Yield frames as uint8 [H, W, 3]; the first says the size, which the codec must hold, `num_frames` the number."""
    size, count = None, 0
    for frame in frames:
        if count == num_frames:
            raise VideoError(f"there are more than the {num_frames} frames asked for")
        array = to_uint8(frame, f"frame {count}")
        height, width, _ = array.shape
        if size is None:
            size = height, width
            codec.check_size(height, width)
        if (height, width) != size:
            raise VideoError(
                f"frame {count} is {height}x{width} (height x width), the first is {size[0]}x{size[1]}; "
                "all frames must have one size"
            )
        yield array
        count += 1
    if not count:
        raise VideoError("there are no frames to write; a video has at least one")
    if num_frames not in (None, count):
        raise VideoError(f"there are {count} frames, {num_frames} were asked for")
