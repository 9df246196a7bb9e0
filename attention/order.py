"""Token order for NABLA: frames in order, inside a frame 8x8-token tiles, so that 64 tokens make a block.

Frames that do not divide into tiles are padded at their right and lower edges. Legend: B batch, T frames, H rows,
W columns, C channels, S tokens with the padding; y, x index the tiles.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

TILE = 8
"""Side of a tile in tokens."""
BLOCK = TILE * TILE
"""Tokens in a block: one tile of one frame."""


def tile_grid(visual_shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many blocks `(T, H, W)` tokens make along each axis; tiles at the edges may be part padding."""
    T, H, W = visual_shape
    return T, math.ceil(H / TILE), math.ceil(W / TILE)


def to_blocks(x_BTHWC: torch.Tensor) -> torch.Tensor:
    """Flatten `[B, T, H, W, C]` to `[B, S, C]` in block order (numerics.md, "Order of tokens"); padding is zero."""
    _, _, H, W, _ = x_BTHWC.shape
    if H % TILE or W % TILE:
        x_BTHWC = F.pad(x_BTHWC, (0, 0, 0, -W % TILE, 0, -H % TILE))
    x_BTyixjC = x_BTHWC.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))
    return x_BTyixjC.transpose(3, 4).flatten(1, 5)


def from_blocks(x_BSC: torch.Tensor, visual_shape: tuple[int, int, int]) -> torch.Tensor:
    """Undo `to_blocks`: `[B, S, C]` in block order to `[B, T, H, W, C]` with `(T, H, W) = visual_shape`."""
    _, H, W = visual_shape
    x_BTyxijC = x_BSC.unflatten(1, (*tile_grid(visual_shape), TILE, TILE))
    return x_BTyxijC.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :H, :W]


def block_order(visual_shape: tuple[int, int, int], device: torch.device | str | None = None) -> torch.Tensor:
    """Return `[S]`: the raster index of the token at each position of the block order, -1 for padding."""
    raster_THW = torch.arange(1, math.prod(visual_shape) + 1, device=device).view(1, *visual_shape, 1)
    return to_blocks(raster_THW).flatten() - 1


def real_tokens(visual_shape: tuple[int, int, int], device: torch.device | str | None = None) -> torch.Tensor | None:
    """Return bool `[S]`, False for the padding in block order; None where the frame divides into tiles."""
    _, H, W = visual_shape
    return block_order(visual_shape, device) >= 0 if H % TILE or W % TILE else None
