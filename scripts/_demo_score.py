"""What a clip of the demo shows, by image analysis alone: colour, shape, direction, background, motion, ghosts.

Legend: F frames, H/W rows and columns. Lengths are in parts of the frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kandinsky5_nabla.scripts._demo_scenes import DIRECTION, PALETTE, TRIANGLE_HEIGHT, Words
from kandinsky5_nabla.scripts.make_demo_checkpoint import BACKGROUNDS, COLOURS, SHAPES

BLOB = "blob"
NOTHING = "nothing"

MIN_CONTRAST = 0.15  # of an object against its background, RGB distance
COLOUR_TOLERANCE = 0.35  # RGB distance to the palette; the palette's nearest pair is 0.45 apart
MIN_AREA = 0.01  # of an object, in parts of the frame; a small triangle has 0.044
MIN_OVERLAP = 0.88  # intersection over union with the best template; a circle and its square reach 0.83
MIN_LEAD = 0.03  # of the best template over the second
MAX_SOFTNESS = 1.5  # area above a quarter of the contrast over the area above three quarters
GHOST_LEVEL, GHOST_SHARE, GHOST_GAP = 0.2, 0.1, 0.04  # contrast, area against the object's, distance from it
SINGLE_FRAMES = 0.9  # share of the frames with one object and no ghost
STILL_WAY, MOVING_WAY = 0.05, 0.08
MAX_WOBBLE = 0.03  # distance of a centre from the straight, even way


@dataclass(frozen=True)
class Seen:
    """What a clip shows.

    Attributes:
        colour: of COLOURS, or "nothing".
        shape: of SHAPES, or "blob", or "nothing".
        direction: a key of DIRECTION, "askew" for a way along no axis, or "nothing".
        background: of BACKGROUNDS, or "nothing".
        steady: whether the object goes its way straight and evenly, or stands still.
        single: share of the frames with one connected object and no ghost.
        overlap: mean intersection over union with the templates of SHAPES, in their order.
        softness: mean of MAX_SOFTNESS's ratio.
        way: from the first to the last frame, (x, y).
    """

    colour: str
    shape: str
    direction: str
    background: str
    steady: bool
    single: float
    overlap: tuple[float, ...]
    softness: float
    way: tuple[float, float]


@dataclass(frozen=True)
class Blob:
    """The object in one frame: its mask `[H, W]`, its centre, colour and softness, and whether it is alone."""

    mask: np.ndarray
    centre: tuple[float, float]
    colour: np.ndarray
    softness: float
    alone: bool


def judge(seen: Seen, words: Words) -> dict[str, bool]:
    """Return which properties of a clip are those that were asked for; "all" is every one of them."""
    right = {
        "colour": seen.colour == words.colour,
        "direction": seen.direction == words.motion,
        "background": seen.background == words.background,
        "shape": seen.shape == words.shape,
        "motion": seen.steady,
        "single": seen.single >= SINGLE_FRAMES,
    }
    return right | {"all": all(right.values())}


def look(frames: np.ndarray) -> Seen:
    """Return what a clip `[F, H, W, 3]` in 0 .. 1 shows."""
    background = border_colour(frames)
    found = [find_object(frame, background) for frame in frames]
    blobs = [blob for blob in found if blob is not None]
    name = nearest(background, BACKGROUNDS)
    if len(blobs) < SINGLE_FRAMES * len(frames):
        return Seen(NOTHING, NOTHING, NOTHING, name, False, 0.0, (0.0,) * len(SHAPES), 0.0, (0.0, 0.0))
    times = np.array([index for index, blob in enumerate(found) if blob is not None]) / max(len(frames) - 1, 1)
    way, wobble = follow(times, np.array([blob.centre for blob in blobs]))
    overlap = np.mean([template_overlaps(blob.mask) for blob in blobs], axis=0)
    softness = float(np.mean([blob.softness for blob in blobs]))
    return Seen(
        colour=nearest(np.median([blob.colour for blob in blobs], axis=0), COLOURS),
        shape=name_shape(overlap, softness),
        direction=name_direction(way),
        background=name,
        steady=wobble <= MAX_WOBBLE,
        single=sum(blob.alone for blob in blobs) / len(frames),
        overlap=tuple(round(float(value), 3) for value in overlap),
        softness=round(softness, 3),
        way=(round(float(way[0]), 3), round(float(way[1]), 3)),
    )


def border_colour(frames: np.ndarray) -> np.ndarray:
    """Return the median RGB of the outermost pixels of all frames."""
    width = max(1, frames.shape[1] // 64)
    edges = (frames[:, :width], frames[:, -width:], frames[:, :, :width], frames[:, :, -width:])
    return np.median(np.concatenate([edge.reshape(-1, 3) for edge in edges]), axis=0)


def nearest(colour: np.ndarray, names: tuple[str, ...]) -> str:
    """Return the name of the nearest colour, or "nothing" where none is near."""
    distances = {name: float(np.linalg.norm(colour - np.array(PALETTE[name]))) for name in names}
    best = min(distances, key=distances.__getitem__)
    return best if distances[best] <= COLOUR_TOLERANCE else NOTHING


def find_object(frame: np.ndarray, background: np.ndarray) -> Blob | None:
    """Return the object of a frame `[H, W, 3]`: the largest region above half the contrast; None if there is none."""
    difference_HW = np.linalg.norm(blur3(frame) - background, axis=-1)
    contrast = np.quantile(difference_HW, 1 - MIN_AREA)
    if contrast < MIN_CONTRAST:
        return None
    mask_HW = largest_region(difference_HW > contrast / 2)
    contrast = float(np.median(difference_HW[mask_HW]))  # of the object, whatever a brighter speck has
    mask_HW = largest_region(difference_HW > contrast / 2)
    area = mask_HW.sum()
    if area < MIN_AREA * mask_HW.size:
        return None
    near_HW = grow(mask_HW, max(1, round(GHOST_GAP * len(mask_HW))))
    core = (difference_HW > 0.75 * contrast) & near_HW
    halo = (difference_HW > 0.25 * contrast) & near_HW
    ghosts = (difference_HW > max(GHOST_LEVEL * contrast, MIN_CONTRAST / 2)) & ~near_HW
    y, x = (float(indices.mean() + 0.5) for indices in np.nonzero(mask_HW))
    H, W = mask_HW.shape
    colour = np.median(frame[core & mask_HW], axis=0) if (core & mask_HW).any() else np.median(frame[mask_HW], axis=0)
    return Blob(
        mask_HW, (x / W, y / H), colour, float(halo.sum() / max(core.sum(), 1)), bool(ghosts.sum() < GHOST_SHARE * area)
    )


def template_overlaps(mask_HW: np.ndarray) -> list[float]:
    """Return the intersection over union of a mask with each of SHAPES, of the mask's area, at its centre of mass."""
    y, x = (indices.mean() for indices in np.nonzero(mask_HW))
    rows, columns = (np.arange(size) for size in mask_HW.shape)
    area = mask_HW.sum()
    overlaps = []
    for shape in SHAPES:
        template_HW = template(shape, columns[None, :] - x, rows[:, None] - y, area)
        overlaps.append(float((template_HW & mask_HW).sum() / (template_HW | mask_HW).sum()))
    return overlaps


def template(shape: str, x: np.ndarray, y: np.ndarray, area: float) -> np.ndarray:
    """Return where a shape of this area is, around its centre of mass at (0, 0); x and y are in pixels, y down."""
    if shape == "circle":
        return x**2 + y**2 <= area / np.pi
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) <= np.sqrt(area) / 2
    height = np.sqrt(area * TRIANGLE_HEIGHT)  # of an equilateral triangle, whose centre is a third above its base
    return (y <= height / 3) & (np.abs(x) * TRIANGLE_HEIGHT - y <= 2 * height / 3)


def name_shape(overlap: np.ndarray, softness: float) -> str:
    """Return the shape whose template fits best, or "blob" for what is soft, fits none or fits two."""
    second, best = np.sort(overlap)[-2:]
    if softness > MAX_SOFTNESS or best < MIN_OVERLAP or best - second < MIN_LEAD:
        return BLOB
    return SHAPES[int(np.argmax(overlap))]


def follow(times: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the way `[2]` of an object between times 0 and 1, and its largest distance from the even way."""
    design = np.stack([np.ones_like(times), times], axis=1)
    (start, way), *_ = np.linalg.lstsq(design, centres, rcond=None)
    return way, float(np.linalg.norm(centres - start - times[:, None] * way, axis=1).max())


def name_direction(way: np.ndarray) -> str:
    """Return the direction of a way (x, y): along one axis at least twice as far as along the other, or none."""
    small, large = np.sort(np.abs(way))
    if large <= STILL_WAY:
        return "standing still"
    if large < MOVING_WAY or small > large / 2:
        return "askew"
    axis = int(np.argmax(np.abs(way)))
    return next(name for name, step in DIRECTION.items() if step[axis] == np.sign(way[axis]) and any(step))


def blur3(image_HWC: np.ndarray) -> np.ndarray:
    """Return the mean over 3x3 pixels."""
    padded = np.pad(image_HWC, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    return (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9


def grow(mask_HW: np.ndarray, pixels: int) -> np.ndarray:
    """Return the mask grown by a square of this many pixels to each side."""
    H, W = mask_HW.shape
    grown = np.zeros_like(mask_HW)
    for row in range(-pixels, pixels + 1):  # rows first, then columns: a square is the product of both
        grown[max(0, row) : H + min(0, row)] |= mask_HW[max(0, -row) : H + min(0, -row)]
    rows, grown = grown, np.zeros_like(mask_HW)
    for column in range(-pixels, pixels + 1):
        grown[:, max(0, column) : W + min(0, column)] |= rows[:, max(0, -column) : W + min(0, -column)]
    return grown


def largest_region(mask_HW: np.ndarray) -> np.ndarray:
    """Return the largest 4-connected region of a mask, as a mask; runs of a row are joined with those above."""
    runs = [(row, start, end) for row, line in enumerate(mask_HW) for start, end in row_runs(line)]
    parent = list(range(len(runs)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    above = 0  # the first run that may touch the current one: runs are sorted by row and start
    for index, (row, start, end) in enumerate(runs):
        while runs[above][0] < row - 1 or (runs[above][0] == row - 1 and runs[above][2] <= start):
            above += 1
        other = above
        while runs[other][0] == row - 1 and runs[other][1] < end:
            parent[root(index)] = root(other)
            other += 1
    sizes = np.zeros(len(runs) + 1, dtype=int)
    for index, (_, start, end) in enumerate(runs):
        sizes[root(index)] += end - start
    region_HW = np.zeros_like(mask_HW)
    for index, (row, start, end) in enumerate(runs):
        if root(index) == np.argmax(sizes):
            region_HW[row, start:end] = True
    return region_HW


def row_runs(line_W: np.ndarray) -> list[tuple[int, int]]:
    """Return the (start, end) of the runs of true values of a row, ends excluded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], line_W, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
