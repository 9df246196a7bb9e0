"""The codecs that a video can be written with, as data, and what each can hold.

Plain Python: a command line lists and checks codecs without loading torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import MappingProxyType

from ..configs.errors import OutputError, VideoError
from .checks import is_number, is_whole

MAX_CRF = 51
"""The worst quality of x264 and x265; 0 is the best, and lossless (in yuv420p) for x264."""

# Untagged video is shown as BT.601 by some players and BT.709 by others: convert to BT.709 and say so in the
# file. The flags keep the conversion exact (a flat colour comes back within 2 of 255) and equal on every CPU.
_RGB_TO_BT709 = (
    "scale=out_color_matrix=bt709:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_int+bitexact,"
    "format=yuv420p,"
    "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv"
)
# One palette for the whole clip, for which ffmpeg holds all frames until it is made. Ordered dithering gives smaller
# files, but bands in a smooth sky; where nothing changes, the rectangle keeps this dithering from moving.
_ONE_PALETTE = "split[a][b];[a]palettegen[palette];[b][palette]paletteuse=dither=sierra2_4a:diff_mode=rectangle"
# faststart: the index comes first, so players need not load the whole file.
_MP4 = ("-movflags", "+faststart", "-f", "mp4")


@dataclass(frozen=True)
class Codec:
    """A way to write a video, and what it can hold.

    Attributes:
        name: what `export_video` takes.
        suffix: how its files' names end; empty where the video is a folder.
        encoder: ffmpeg's arguments for the encoder and the container; empty where ffmpeg has no part in it.
        default_crf: quality where none is asked for, as x264 and x265 count it; None where there is no such choice.
        size_step: height and width are multiples of this, in pixels.
        min_size: smallest height and width, in pixels.
        min_fps: lowest rate, frames a second.
        max_fps: highest rate, frames a second.
    """

    name: str
    suffix: str
    encoder: tuple[str, ...] = ()
    default_crf: int | None = None
    size_step: int = 1
    min_size: int = 1
    min_fps: Fraction = Fraction(1, 1001)
    max_fps: Fraction = Fraction(1000)

    def check_path(self, path: str | os.PathLike[str]) -> None:
        """Raise ValueError unless the path is named as this codec's files are; the message gives a name that works."""
        path = Path(path)
        if path.name and path.suffix.lower() == self.suffix:
            return
        if path.name and path.name.lower() == self.suffix:
            works = path.with_name(f"video{path.name}")
            raise OutputError(f"the video's name has nothing before its suffix {path.name!r}: {works} works")
        wanted = f"end in {self.suffix}" if self.suffix else "be that of a folder, without a suffix"
        works = path.with_suffix(self.suffix) if path.name else Path(f"video{self.suffix}")
        message = f"the video's name must {wanted}, got {path.name!r}: {works} works for codec {self.name!r}"
        others = [codec.name for codec in CODECS.values() if path.suffix and codec.suffix == path.suffix.lower()]
        raise OutputError(message + (f", {path} for {' and '.join(map(repr, others))}" if others else ""))

    def quality(self, crf: int | None) -> int | None:
        """Return the crf to encode with, where None asks for the default; None where the codec has no such choice.

        Raises ValueError for a crf that the codec does not take.
        """
        if crf is None:
            return self.default_crf
        if self.default_crf is None:
            takers = " and ".join(codec.name for codec in CODECS.values() if codec.default_crf is not None)
            raise VideoError(f"crf {crf!r}: codec {self.name!r} has no such quality; leave it out ({takers} take it)")
        if not is_whole(crf) or not 0 <= crf <= MAX_CRF:
            nearest = min(max(int(crf), 0), MAX_CRF) if is_whole(crf) else self.default_crf
            raise VideoError(f"crf {crf!r}: must be a whole number from 0 to {MAX_CRF}; {nearest} works")
        return int(crf)

    def rate(self, fps: float | Fraction) -> Fraction:
        """Return the rate as a fraction that every file keeps; ffmpeg cuts terms above 1001000.

        Raises ValueError for a rate that the codec cannot hold.
        """
        rate = Fraction(float(fps)).limit_denominator(1001) if is_number(fps) else Fraction(0)
        if not self.min_fps <= rate <= self.max_fps:
            within = f"from {self.min_fps} to {self.max_fps} with codec {self.name!r}"
            raise VideoError(f"fps must be a number {within}, got {fps!r}")
        return rate

    def check_size(self, height: int, width: int) -> None:
        """Raise ValueError unless frames of this size, in pixels, can be held; the message gives sizes that can."""
        heights, widths = self._near_sizes(height), self._near_sizes(width)
        if heights == [height] and widths == [width]:
            return
        numbers = "even numbers" if self.size_step == 2 else "numbers"
        sizes = ", ".join(f"{h}x{w}" for h, w in product(heights, widths))
        raise VideoError(
            f"the frames are {height}x{width} (height x width); codec {self.name!r} needs {numbers} of at least "
            f"{self.min_size}: {sizes} would work"
        )

    def _near_sizes(self, size: int) -> list[int]:
        below = size // self.size_step * self.size_step
        return sorted({max(self.min_size, candidate) for candidate in (below, below + size % self.size_step * 2)})


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            # x264's output depends on its number of threads, which it takes from the machine unless it is told.
            Codec(
                name="h264",
                suffix=".mp4",
                encoder=("-vf", _RGB_TO_BT709, "-c:v", "libx264", "-threads", "4", *_MP4),
                default_crf=18,
                size_step=2,
                min_size=2,
            ),
            # x265 too takes its threads from the machine, and would write the CPU's features into the file (info).
            # Its lookahead in slices would depend on them as well. hvc1 is the tag that Apple's players open.
            # crf: FFmpeg's guide (trac.ffmpeg.org/wiki/Encode/H.265) takes x265's 28 for x264's 23. On four short
            # synthetic clips the same VMAF as x264's 18 lay between 18 and 20; on three 20 costs at most 1.3 points.
            Codec(
                name="h265",
                suffix=".mp4",
                encoder=(
                    *("-vf", _RGB_TO_BT709, "-c:v", "libx265", "-tag:v", "hvc1", "-x265-params"),
                    "info=0:pools=4:frame-threads=4:lookahead-slices=0:log-level=error",
                    *_MP4,
                ),
                default_crf=20,
                size_step=2,
                min_size=16,
            ),
            # A GIF counts in hundredths of a second: at most 65535, and browsers take less than 2 for 10.
            Codec(
                name="gif",
                suffix=".gif",
                encoder=("-filter_complex", _ONE_PALETTE, "-fps_mode", "passthrough", "-c:v", "gif", "-f", "gif"),
                min_fps=Fraction(1, 655),
                max_fps=Fraction(50),
            ),
            Codec(name="frames", suffix=""),
        )
    }
)
"""All codecs by name: H.264 and H.265 (yuv420p) in an MP4, an animated GIF, a folder of PNGs."""


@dataclass(frozen=True)
class VideoInfo:
    """What a video holds.

    Attributes:
        width: pixels.
        height: pixels.
        fps: exact rate, frames a second; of a GIF, whose frames may differ by 1/100 s, the mean.
        num_frames: number of frames.
    """

    width: int
    height: int
    fps: Fraction
    num_frames: int


def find_codec(name: str) -> Codec:
    """Return the codec of this name; ValueError, with all names, where there is none."""
    if not isinstance(name, str) or name not in CODECS:
        raise VideoError(f"codec {name!r} is not known; {', '.join(CODECS)} are")
    return CODECS[name]


def check_comment(comment: str | None) -> None:
    """Raise ValueError for a text that cannot be kept in a video's metadata; None is no text."""
    if comment is None:
        return
    if not isinstance(comment, str):
        raise VideoError(f"the comment {comment!r} must be a text, not {type(comment).__name__}")
    if not comment:
        raise VideoError("the comment is empty, which a video does not tell from no comment; leave it out")
    if "\0" in comment:
        raise VideoError(f"the comment holds a NUL character at position {comment.index(chr(0))}; leave that out")
    if any("\ud800" <= character <= "\udfff" for character in comment):
        raise VideoError(f"the comment is no valid text (it holds bytes that are not UTF-8): {comment!r}")
