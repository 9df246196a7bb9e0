"""Token order for NABLA: frames in order, inside a frame 8x8-token tiles, so that 64 tokens make a block.

Legend: B batch, T frames, H rows, W columns, C channels, S = T*H*W tokens; y, x index the tiles.
"""

from __future__ import annotations

import torch

TILE = 8
"""Side of a tile in tokens."""
BLOCK = TILE * TILE
"""Tokens in a block: one tile of one frame."""


def to_blocks(x_BTHWC: torch.Tensor) -> torch.Tensor:
    """Flatten `[B, T, H, W, C]` to `[B, S, C]` in block order (numerics.md, "Order of tokens").

    Raises:
        ValueError: if H or W is no multiple of 8.
    """
    _, _, H, W, _ = x_BTHWC.shape
    if H % TILE or W % TILE:
        raise ValueError(f"a frame of {H}x{W} tokens does not divide into {TILE}x{TILE} tiles")
    x_BTyixjC = x_BTHWC.unflatten(3, (W // TILE, TILE)).unflatten(2, (H // TILE, TILE))
    return x_BTyixjC.transpose(3, 4).flatten(1, 5)


def from_blocks(x_BSC: torch.Tensor, visual_shape: tuple[int, int, int]) -> torch.Tensor:
    """Undo `to_blocks`: `[B, S, C]` in block order to `[B, T, H, W, C]` with `(T, H, W) = visual_shape`."""
    T, H, W = visual_shape
    x_BTyxijC = x_BSC.unflatten(1, (T, H // TILE, W // TILE, TILE, TILE))
    return x_BTyxijC.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def block_order(visual_shape: tuple[int, int, int], device: torch.device | str | None = None) -> torch.Tensor:
    """Return `[S]`: the raster index of the token at each position of the block order."""
    T, H, W = visual_shape
    raster_THW = torch.arange(T * H * W, device=device).view(1, T, H, W, 1)
    return to_blocks(raster_THW).flatten()
