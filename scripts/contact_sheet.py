"""Draw a contact sheet: one PNG with evenly spaced frames of a video, each with its number."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kandinsky5_nabla.configs.errors import OutputError, SettingsError, UserError

if TYPE_CHECKING:  # imported where they are used: --help answers at once
    import numpy as np
    from PIL import Image

_MAX_WIDTH = 1600  # pixels of the whole sheet: it fits on a screen
_GAP = 8  # pixels between frames
_CAPTION = 16  # pixels below each frame; the default font is 10 high
DEFAULT_FRAMES, DEFAULT_COLUMNS = 12, 4


def contact_sheet(frames: "Mapping[int, np.ndarray]", columns: int) -> "Image.Image":
    """Return a grid of frames, row by row, with their numbers below.

    `frames` maps a frame's number to its pixels, uint8 [H, W, 3], all of one size. They are scaled down, never
    up, to a sheet at most 1600 pixels wide. Raises ValueError where not even one pixel of a frame would be left.
    """
    from PIL import Image, ImageDraw

    height, width, _ = next(iter(frames.values())).shape
    columns = min(columns, len(frames))
    cell_width = min(width, (_MAX_WIDTH - _GAP) // columns - _GAP)
    if cell_width < 1:
        most = (_MAX_WIDTH - _GAP) // (1 + _GAP)
        raise SettingsError(f"{columns} columns leave no room for a frame; at most {most} fit on {_MAX_WIDTH} pixels")
    cell_height = max(1, round(height * cell_width / width))
    step_x, step_y = cell_width + _GAP, cell_height + _CAPTION + _GAP
    rows = -(-len(frames) // columns)
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for cell, (number, frame) in enumerate(frames.items()):
        x, y = _GAP + cell % columns * step_x, _GAP + cell // columns * step_y
        sheet.paste(Image.fromarray(frame).resize((cell_width, cell_height), Image.Resampling.LANCZOS), (x, y))
        draw.text((x, y + cell_height + 2), str(number), fill="black")
    return sheet


def evenly_spaced(count: int, total: int) -> list[int]:
    """Return `count` of the numbers 0..total-1, evenly spaced, the first and (for count > 1) the last included."""
    if not 1 <= count <= total:
        raise SettingsError(
            f"the number of frames must be between 1 and {total}, as many as the video has, got {count}"
        )
    return [round(index * (total - 1) / max(1, count - 1)) for index in range(count)]


def write_contact_sheet(video: Path, output: Path, columns: int, count: int | None, overwrite: bool) -> None:
    """Write the sheet of `count` frames of a video (None: up to DEFAULT_FRAMES) as a PNG.

    Raises ValueError, FileNotFoundError or FileExistsError for what cannot be read or written as asked.
    """
    from kandinsky5_nabla.pipeline.export import probe_video, read_video
    from kandinsky5_nabla.pipeline.files import complete_file

    if output.suffix.lower() != ".png":
        raise OutputError(f"the sheet's name must end in .png, got {output.name!r}")
    if columns < 1:
        raise SettingsError(f"--columns must be at least 1, got {columns}")
    total = probe_video(video).num_frames
    numbers = evenly_spaced(min(DEFAULT_FRAMES, total) if count is None else count, total)
    with complete_file(output, overwrite=overwrite) as temporary:
        frames, _ = read_video(video, numbers)
        contact_sheet(dict(zip(numbers, frames, strict=True)), columns).save(temporary)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="contact_sheet.py", description=__doc__)
    parser.add_argument("video", type=Path, metavar="VIDEO.mp4")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="default: the video's name with .png")
    parser.add_argument(
        "--columns", type=int, default=DEFAULT_COLUMNS, metavar="N", help="in a row (default: %(default)s)"
    )
    parser.add_argument(
        "--frames", type=int, metavar="N", help=f"how many (default: {DEFAULT_FRAMES}, or all of a shorter video)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write a contact sheet and print its path; return 0, 2 for bad input, 1 where writing failed."""
    arguments = _parser().parse_args(argv)
    output = arguments.output or arguments.video.with_suffix(".png")
    try:
        write_contact_sheet(arguments.video, output, arguments.columns, arguments.frames, arguments.overwrite)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the sheet could not be written: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
