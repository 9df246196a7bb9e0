"""The demo's world: one shape on a plain background, in words and in pixels, and what training never sees.

Legend: F frames, H/W rows and columns. Lengths are in parts of the frame, (0, 0) is its upper left corner.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kandinsky5_nabla.scripts.make_demo_checkpoint import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    PHRASINGS,
    SHAPES,
    SIZES,
    SPEEDS,
)

if TYPE_CHECKING:
    import torch

PALETTE = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 0.7, 0.0),
    "blue": (0.0, 0.2, 1.0),
    "yellow": (1.0, 0.95, 0.0),
    "purple": (0.6, 0.0, 0.8),
    "orange": (1.0, 0.5, 0.0),
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "gray": (0.5, 0.5, 0.5),
}
"""RGB in 0 .. 1 of the colours of objects and backgrounds."""

RADIUS = {"small": 0.16, "large": 0.26}
HALF_WIDTH = {"circle": 1.0, "square": 1.0, "triangle": 1.25}
"""Of each shape, in radii: a triangle is wider, so that it is not much smaller than the circle."""
TRAVEL = {"slowly": 0.13, "quickly": 0.26}
"""The way from the first to the last frame."""
DIRECTION = {
    "moving left": (-1, 0),
    "moving right": (1, 0),
    "moving up": (0, -1),
    "moving down": (0, 1),
    "standing still": (0, 0),
}
DEFAULTS = {"size": "large", "speed": "quickly", "background": "black"}
"""What a caption means that does not say."""

FRAMES = 17
MARGIN = 0.025  # between the object and the border
# How far from the middle of the frame the object may be halfway through the clip, along each axis. Outlines at places
# that are anywhere take far more than 100 minutes to learn; where the object has its place, they come quickly.
SPREAD = 0.02
TRIANGLE_HEIGHT = 3**0.5  # of a triangle of half base 1: it is equilateral

TRAINED_PHRASINGS = (
    *PHRASINGS,
    "a {background} background with a {size} {colour} {shape} {pace}",
    "{background} background: one {size} {colour} {shape}, {pace}",
    "We see a {size} {shape}. It is {colour}, it is {pace}, and the background is {background}.",
    "{pace}: a {size} {colour} {shape} on {background}",
    "{colour} {shape}, {background} background, {pace}",
    "The background is {background}, and the {shape} is {colour} and {pace}.",
    "On {background}: {size} {colour} {shape}, {motion}.",
)
HELD_OUT_PHRASINGS = (
    "a clip of a {colour} {shape} {motion}, the background is {background}",
    "Here is a {size} {colour} {shape}, which is {pace} on a {background} background.",
    "{colour} {shape} on a {background} background, {motion}",
    "In front of a {background} background the {shape} is {motion}, and the {shape} is {colour}.",
)


@dataclass(frozen=True)
class Words:
    """What a caption can say of a scene."""

    shape: str
    colour: str
    motion: str
    background: str
    size: str
    speed: str

    @property
    def combination(self) -> tuple[str, str, str]:
        """Colour, shape and direction: what is held out, or not, as a whole."""
        return self.colour, self.shape, self.motion


@dataclass(frozen=True)
class Scene:
    """A scene: its words, and where the object's centre is halfway through the clip."""

    words: Words
    x: float
    y: float

    def centre(self, time: float) -> tuple[float, float]:
        """Return the object's centre at a time in 0 .. 1."""
        dx, dy = DIRECTION[self.words.motion]
        way = TRAVEL[self.words.speed] * (time - 0.5)
        return self.x + dx * way, self.y + dy * way


def is_held_out(colour: str, shape: str, motion: str) -> bool:
    """Tell whether training never sees this combination: one of seven, spread so that every pair of words is seen."""
    return (COLOURS.index(colour) + 2 * SHAPES.index(shape) + 3 * MOTIONS.index(motion)) % len(COLOURS) == 0


def combinations(held_out: bool) -> list[tuple[str, str, str]]:
    """Return the combinations of colour, shape and direction that are held out, or those that are not."""
    return [each for each in itertools.product(COLOURS, SHAPES, MOTIONS) if is_held_out(*each) is held_out]


def all_words(held_out: bool) -> Iterator[Words]:
    """Yield everything that a caption can say, held out or not; never a white object on white."""
    for colour, shape, motion in combinations(held_out):
        for background, size, speed in itertools.product(BACKGROUNDS, SIZES, SPEEDS):
            if colour != background and not (motion == "standing still" and speed != DEFAULTS["speed"]):
                yield Words(shape, colour, motion, background, size, speed)


def fits(phrasing: str, words: Words) -> bool:
    """Tell whether a phrasing says all that is not the default."""
    says = {"size": "{size}" in phrasing, "background": "{background}" in phrasing, "speed": "{pace}" in phrasing}
    return all(says[name] or getattr(words, name) == default for name, default in DEFAULTS.items())


def caption(phrasing: str, words: Words) -> str:
    """Return the caption of a scene."""
    pace = words.motion if words.motion == "standing still" else f"{words.motion} {words.speed}"
    text = phrasing.format(
        shape=words.shape,
        colour=words.colour,
        motion=words.motion,
        background=words.background,
        size=words.size,
        pace=pace,
    )
    return text.replace("a orange", "an orange")


def captions_of(words: Words, phrasings: Sequence[str] = TRAINED_PHRASINGS) -> list[str]:
    """Return the captions of a scene in all phrasings that fit it."""
    return [caption(phrasing, words) for phrasing in phrasings if fits(phrasing, words)]


def half_width(words: Words) -> float:
    """Return the distance from the object's middle to its left and right end."""
    return RADIUS[words.size] * HALF_WIDTH[words.shape]


def draw_words(chance: random.Random) -> Words:
    """Draw what training shows: triangles, which are learned last, and the defaults more often than the rest."""
    kinds = combinations(held_out=False)
    colour, shape, motion = chance.choice([*kinds, *(kind for kind in kinds if kind[1] == "triangle")])
    background = chance.choice([name for name in (*BACKGROUNDS, "black") if name != colour])
    speed = DEFAULTS["speed"] if motion == "standing still" else chance.choice(SPEEDS)
    return Words(shape, colour, motion, background, chance.choice(SIZES), speed)


def place(words: Words, chance: random.Random) -> Scene:
    """Draw a place near the middle of the frame where the object stays inside it for the whole clip."""
    taken, way = half_width(words) + MARGIN, TRAVEL[words.speed] / 2
    reach = [min(SPREAD, 0.5 - taken - way * abs(step)) for step in DIRECTION[words.motion]]
    x, y = (0.5 + chance.uniform(-most, most) for most in reach)
    return Scene(words, x, y)


def draw_scene(chance: random.Random) -> Scene:
    """Draw a scene of the training set."""
    return place(draw_words(chance), chance)


def coverage(
    scene: Scene, scale: int, window: tuple[int, int] = (0, 0), side: int | None = None, frames: int = FRAMES
) -> torch.Tensor:
    """Return how much of each pixel the object covers, `[F, H, W]` in 0 .. 1, edges anti-aliased.

    Args:
        scene: what to draw.
        scale: pixels of the whole frame's side.
        window: left and upper pixel of the part that is drawn.
        side: pixels of that part's side; None is the whole frame.
        frames: number of frames.
    """
    import torch

    side = scale if side is None else side
    pixels = torch.arange(side) + 0.5
    extent = half_width(scene.words) * scale
    centres = [scene.centre(frame / max(frames - 1, 1)) for frame in range(frames)]
    x_FHW, y_FHW = torch.broadcast_tensors(
        torch.stack([pixels + window[0] - x * scale for x, _ in centres])[:, None, :],
        torch.stack([pixels + window[1] - y * scale for _, y in centres])[:, :, None],
    )
    return (0.5 - signed_distance(scene.words.shape, x_FHW, y_FHW, extent)).clamp(0, 1)


def signed_distance(shape: str, x: torch.Tensor, y: torch.Tensor, extent: float) -> torch.Tensor:
    """Return the distance to the outline of a shape around the origin, negative inside; y points down.

    `extent` is half its width. Outside, at corners, the distance is that of the edges' lines.
    """
    import torch

    if shape == "circle":
        return torch.hypot(x, y) - extent
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - extent
    base = y - extent * TRIANGLE_HEIGHT / 2
    # A side's line through the apex (0, -h/2) and (1, h/2); its normal of length 1 is (h, -1) / 2 with h = sqrt(3).
    sides = (TRIANGLE_HEIGHT * x.abs() - (y + extent * TRIANGLE_HEIGHT / 2)) / 2
    return torch.maximum(base, sides)


def paint(coverage_FHW: torch.Tensor, words: Words) -> torch.Tensor:
    """Return the pixels `[F, H, W, 3]` in 0 .. 1 of an object that covers its background so far."""
    import torch

    colour, background = torch.tensor(PALETTE[words.colour]), torch.tensor(PALETTE[words.background])
    return background + coverage_FHW[..., None] * (colour - background)


def render(scene: Scene, scale: int, frames: int = FRAMES) -> torch.Tensor:
    """Return the whole clip, `[F, scale, scale, 3]` in 0 .. 1."""
    return paint(coverage(scene, scale, frames=frames), scene.words)
