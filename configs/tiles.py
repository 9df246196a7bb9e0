"""The tiles of the VAE decoder: a fixed table, so that pixels never depend on how much memory happens to be free."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import PresetError, SettingsError

TABLE = Path(__file__).with_name("vae_tiles.yml")


@dataclass(frozen=True)
class Tile:
    """What the decoder makes at once; neighbours overlap by side - stride and are blended there.

    Attributes:
        side: height and width in pixels, a multiple of 8.
        stride: pixels from one tile to the next, a multiple of 8.
        frames: video frames after the first one of a tile, a multiple of 4.
        frame_stride: frames from one tile to the next, a multiple of 4.
    """

    side: int
    stride: int
    frames: int
    frame_stride: int

    @property
    def name(self) -> str:
        """How a user calls it, such as "256x16": pixels a side and frames."""
        return f"{self.side}x{self.frames}"

    @property
    def volume(self) -> int:
        """Pixels that are decoded at once, which is what memory grows with."""
        return self.side**2 * (self.frames + 1)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with it."""
        if self.side % 8 or self.stride % 8 or not 0 < self.stride <= self.side:
            yield f"side {self.side} and stride {self.stride} must be multiples of 8, the stride 8 to side"
        if self.frames % 4 or self.frame_stride % 4 or not 0 < self.frame_stride <= self.frames:
            yield f"frames {self.frames} and frame_stride {self.frame_stride} must be multiples of 4, likewise"


@functools.cache
def vae_tiles() -> tuple[Tile, ...]:
    """Return the table, largest tile first; the first is the default."""
    return read_tiles(TABLE)


def find_tile(name: str) -> Tile:
    """Return a tile of the table by its name.

    Raises:
        ValueError: if there is none; the message lists them.
    """
    names = {tile.name: tile for tile in vae_tiles()}
    if name not in names:
        raise SettingsError(f"VAE tile {name!r}: must be one of {', '.join(names)} (pixels a side x frames)")
    return names[name]


def next_smaller(tile: Tile) -> Tile | None:
    """Return the next tile of the table, or None after the smallest.

    Raises:
        ValueError: if the tile is not in the table.
    """
    tiles = vae_tiles()
    if tile not in tiles:
        raise SettingsError(f"VAE tile {tile}: is not in the table {TABLE.name}")
    following = tiles.index(tile) + 1
    return tiles[following] if following < len(tiles) else None


def read_tiles(path: Path) -> tuple[Tile, ...]:
    """Read a table strictly.

    Raises:
        ValueError: if it cannot be read, or with every row that is wrong.
    """
    import yaml

    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PresetError(f"the table of tiles {path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise PresetError(f"the table of tiles {path} must be a list of rows")
    found = [f"row {i}: {problem}" for i, row in enumerate(rows, 1) for problem in _row_problems(row)]
    if not found:
        volumes = [Tile(**row).volume for row in rows]
        found = (
            [] if volumes == sorted(set(volumes), reverse=True) else ["rows must go from the largest to the smallest"]
        )
    if found:
        raise PresetError(f"the table of tiles {path} is not valid: {'; '.join(found)}")
    return tuple(Tile(**row) for row in rows)


def _row_problems(row: Any) -> Iterator[str]:
    keys = [field.name for field in fields(Tile)]
    if not isinstance(row, dict) or set(row) != set(keys):
        yield f"must have the keys {', '.join(keys)} and no others, got {row!r}"
    elif not all(type(value) is int for value in row.values()):
        yield f"all values must be whole numbers, got {row!r}"
    else:
        yield from Tile(**row).problems()
