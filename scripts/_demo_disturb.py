"""Rendered clips whose truth is known, clean and disturbed: what the demo's scorer is scored on.

Legend: F frames, H/W rows and columns.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kandinsky5_nabla.scripts._demo_scenes import RADIUS, Scene, draw_scene, paint, render
from kandinsky5_nabla.scripts._demo_score import blur3, look
from kandinsky5_nabla.scripts.make_demo_checkpoint import SHAPES

SIDE, CLIP_FRAMES, CLIPS = 128, 5, 24
BLOBS = ("soft disc", "rounded square", "lumpy disc", "ellipse")


def keep(clip: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Return the clip as it is."""
    return clip


def add_noise(clip: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Add normal noise of deviation 0.06."""
    return clip + 0.06 * chance.standard_normal(clip.shape)


def blur(clip: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Blur by about 1.5 of 128 pixels."""
    for _ in range(3):
        clip = np.stack([blur3(frame) for frame in clip])
    return clip


def add_ghost(clip: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Add what the clip shows a second time, faint and moved by half a frame."""
    background = clip[:, :1, :1]
    return clip + 0.24 * np.roll(clip - background, clip.shape[1] // 2, axis=(1, 2))


DISTURBANCES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "clean": keep,
    "noise": add_noise,
    "blur": blur,
    "ghost": add_ghost,
}


def draw_shape(kind: str, scene: Scene, frames: int = CLIP_FRAMES) -> np.ndarray:
    """Return a clip `[F, SIDE, SIDE, 3]` of the scene with another of SHAPES, or of BLOBS, as its object."""
    import torch

    if kind in SHAPES:
        return render(replace(scene, words=replace(scene.words, shape=kind)), SIDE, frames).numpy()
    pixels = np.arange(SIDE) + 0.5
    radius = RADIUS[scene.words.size] * SIDE
    coverage = []
    for frame in range(frames):
        x, y = scene.centre(frame / (frames - 1))
        coverage.append(draw_blob(kind, pixels[None, :] - x * SIDE, pixels[:, None] - y * SIDE, radius))
    return paint(torch.tensor(np.stack(coverage), dtype=torch.float32), scene.words).numpy()


def draw_blob(kind: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Return the coverage `[H, W]` of something that is no circle, no square and no triangle."""
    distance, angle = np.hypot(x, y), np.arctan2(y, x)
    if kind == "soft disc":
        return np.exp(-2 * (distance / radius) ** 2)
    if kind == "ellipse":
        return (np.hypot(x / 1.25, y * 1.25) < radius).astype(float)
    if kind == "lumpy disc":
        return (distance < radius * (1 + 0.2 * np.cos(3 * angle + 0.5))).astype(float)
    corner = 0.65 * radius  # the corners' radius: halfway between a circle and a square
    outside = np.hypot(*(np.maximum(np.abs(each) - radius + corner, 0) for each in (x, y)))
    return (outside < corner).astype(float)


def confusion(disturbance: str) -> dict[str, Counter[str]]:
    """Return for each drawn shape and blob how often the scorer called it what, over CLIPS scenes each."""
    table = {}
    for kind in (*SHAPES, *BLOBS):
        chance, noise = random.Random(3), np.random.default_rng(3)
        calls: Counter[str] = Counter()
        for _ in range(CLIPS):
            scene = draw_scene(chance)
            calls[look(DISTURBANCES[disturbance](draw_shape(kind, scene), noise)).shape] += 1
        table[kind] = calls
    return table
