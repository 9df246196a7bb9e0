"""Draw what NABLA kept: a heat map of the density over layers and steps, and the blocks of one head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kandinsky5_nabla.configs.errors import SettingsError

if TYPE_CHECKING:  # imported where they are used: --help answers at once
    import numpy as np
    from PIL import Image

MAX_WIDTH = 1600  # pixels: it fits on a screen
GAP = 12  # pixels around the panels
LABEL = 40  # pixels for the numbers beside and below a heat map
CELL_WIDTH, CELL_HEIGHT = 40, 20  # of the heat map, at most
NUMBER_WIDTH = 28  # pixels from which a cell has room for its number
LINE = 16  # pixels of a line of text; the default font is 10 high
LEGEND_WIDTH, LEGEND_TICKS = 400, 5
BLOCK_SIDE, MAP_SIDE = 16, 640  # pixels of a block at most, and of the whole map where its blocks can be larger
MAX_STEPS = MAX_WIDTH - 2 * GAP - LABEL
SCALE_STEP = 0.05  # the scale begins and ends at multiples of it

# Dark to light, evenly spaced: viridis at 0, 1/4, 1/2, 3/4, 1 (matplotlib).
COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
KEPT, SKIPPED, GRID = (59, 82, 139), (255, 255, 255), (225, 225, 225)


def attention_picture(
    densities: Sequence[Sequence[float]], kept_NN: np.ndarray, about_map: str, about_run: str
) -> Image.Image:
    """Return the whole picture: heat map, legend and block map, one below the other, each with a line above.

    `densities` holds a row for each layer with a number in 0 .. 1 for each step; `kept_NN` is bool `[N, N]`.
    """
    scale = scale_of(densities)
    return _stack(
        [
            (f"Density: share of the blocks that are kept, in %. {about_run}", heat_map(densities, scale)),
            ("", legend(scale)),
            (about_map, block_image(kept_NN)),
        ]
    )


def scale_of(densities: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the densities that the darkest and the lightest colour stand for: all of them lie between."""
    low = math.floor(min(map(min, densities)) / SCALE_STEP) * SCALE_STEP
    high = math.ceil(max(map(max, densities)) / SCALE_STEP) * SCALE_STEP
    return (low, high) if high - low > SCALE_STEP / 2 else (low - SCALE_STEP, high)


def colour_of(value: float, scale: tuple[float, float]) -> tuple[int, int, int]:
    """Return the colour of a density."""
    low, high = scale
    place = min(max((value - low) / (high - low), 0), 1) * (len(COLOURS) - 1)
    first = min(int(place), len(COLOURS) - 2)
    part = place - first
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(COLOURS[first], COLOURS[first + 1], strict=True))
    return red, green, blue


def heat_map(densities: Sequence[Sequence[float]], scale: tuple[float, float]) -> Image.Image:
    """Return a cell for each layer (rows, from the top) and step (columns), with its number where there is room.

    Raises:
        ValueError: if there are more steps than pixels.
    """
    from PIL import Image, ImageDraw

    layers, steps = len(densities), len(densities[0])
    if steps > MAX_STEPS:
        raise SettingsError(f"{steps} steps leave no room for a cell; at most {MAX_STEPS} fit on {MAX_WIDTH} pixels")
    width = min(CELL_WIDTH, MAX_STEPS // steps)
    wide = max(LABEL + steps * width, LEGEND_WIDTH + 2 * LABEL)  # the line below needs room too
    image = Image.new("RGB", (wide, layers * CELL_HEIGHT + 2 * LINE), "white")
    draw = ImageDraw.Draw(image)
    for layer, row in enumerate(densities):
        y = layer * CELL_HEIGHT
        draw.text((LABEL - 6, y + CELL_HEIGHT // 2), str(layer), fill="black", anchor="rm")
        for step, density in enumerate(row):
            x, colour = LABEL + step * width, colour_of(density, scale)
            draw.rectangle((x, y, x + width - 1, y + CELL_HEIGHT - 1), fill=colour)
            if width >= NUMBER_WIDTH:
                ink = "black" if sum(colour) > 330 else "white"
                middle = (x + width // 2, y + CELL_HEIGHT // 2)
                draw.text(middle, f"{100 * density:.0f}", fill=ink, anchor="mm")
    below = layers * CELL_HEIGHT + LINE // 2
    every = -(-NUMBER_WIDTH // width)  # steps from one number below to the next
    for step in range(0, steps, every):
        draw.text((LABEL + step * width + width // 2, below), str(step), fill="black", anchor="mm")
    draw.text((0, below + LINE), "layers from the top, steps from the left", fill="black", anchor="lm")
    return image


def legend(scale: tuple[float, float]) -> Image.Image:
    """Return a bar of all colours, with the numbers that they stand for below."""
    from PIL import Image, ImageDraw

    low, high = scale
    image = Image.new("RGB", (LEGEND_WIDTH + 2 * LABEL, CELL_HEIGHT + LINE), "white")
    draw = ImageDraw.Draw(image)
    for x in range(LEGEND_WIDTH):
        colour = colour_of(low + x / (LEGEND_WIDTH - 1) * (high - low), scale)
        draw.line((LABEL + x, 0, LABEL + x, CELL_HEIGHT - 1), fill=colour)
    for tick in range(LEGEND_TICKS):
        share = tick / (LEGEND_TICKS - 1)
        place = (LABEL + round(share * (LEGEND_WIDTH - 1)), CELL_HEIGHT + LINE // 2)
        draw.text(place, f"{100 * (low + share * (high - low)):.4g} %", fill="black", anchor="mm")
    return image


def block_image(kept_NN: np.ndarray) -> Image.Image:
    """Return the kept blocks as squares, query blocks as rows; where N is large a pixel is a share of several."""
    from PIL import Image

    N = len(kept_NN)
    # Image.fromarray reads no bool; colours are put on at the end, so that shares become shades.
    gray = Image.fromarray(kept_NN.astype("uint8") * 255)
    largest = MAX_WIDTH - 2 * GAP
    if largest < N:
        gray = gray.resize((largest, largest), Image.Resampling.BOX)
        return _coloured(gray)
    side = max(1, min(BLOCK_SIDE, MAP_SIDE // N))
    image = _coloured(gray.resize((N * side, N * side), Image.Resampling.NEAREST))
    return _with_grid(image, side) if side >= 4 else image


def _coloured(gray: Image.Image) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.colorize(gray, black=SKIPPED, white=KEPT)


def _with_grid(image: Image.Image, side: int) -> Image.Image:
    """Draw a line at the left and upper edge of each block, and around all of them."""
    from PIL import Image, ImageDraw

    framed = Image.new("RGB", (image.width + 1, image.height + 1), GRID)
    framed.paste(image)
    draw = ImageDraw.Draw(framed)
    for place in range(0, framed.width, side):
        draw.line((place, 0, place, framed.height - 1), fill=GRID)
        draw.line((0, place, framed.width - 1, place), fill=GRID)
    return framed


def _stack(panels: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Return the panels below each other, each under its text."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    widths = [max(panel.width, math.ceil(font.getlength(text))) for text, panel in panels]
    heights = [panel.height + (LINE if text else 0) + GAP for text, panel in panels]
    picture = Image.new("RGB", (max(widths) + 2 * GAP, sum(heights) + GAP), "white")
    draw = ImageDraw.Draw(picture)
    y = GAP
    for (text, panel), height in zip(panels, heights, strict=True):
        if text:
            draw.text((GAP, y), text, fill="black", font=font)
        picture.paste(panel, (GAP, y + height - GAP - panel.height))
        y += height
    return picture
