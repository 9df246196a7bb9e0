"""List the presets: what each checkpoint is, and how it runs by default."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kandinsky5_nabla import configs
from kandinsky5_nabla.configs import Preset, load_preset, preset_names

_GAP = 2  # spaces between columns
_HEADER = ("preset", "attention", "steps", "guidance", "shift", "frames", "seconds", "height x width")
_NUMBERS = {"steps", "guidance", "shift", "frames", "seconds"}  # aligned to the right


def table(presets: Iterable[Preset]) -> str:
    """Return two tables in plain text, a line for each preset: how it runs by default, and where its checkpoint is."""
    presets = list(presets)
    runs = _aligned([_HEADER, *(_run(preset) for preset in presets)])
    places = _aligned([("preset", "repository"), *((preset.name, _place(preset)) for preset in presets)])
    return f"{runs}\n\n{places}"


def _run(preset: Preset) -> tuple[str, ...]:
    return (
        preset.name,
        "dense" if preset.nabla_P is None else f"NABLA, P {preset.nabla_P:g}",
        str(preset.num_inference_steps),
        f"{preset.guidance_scale:g}",
        f"{preset.shift:g}",
        str(preset.num_frames),
        f"{preset.seconds:g}",
        f"{preset.height}x{preset.width}",
    )


def _place(preset: Preset) -> str:
    if preset.local_folder is None:
        return preset.model
    return "inside the package" if Path(configs.__file__).parent in preset.local_folder.parents else preset.model


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows, of which the first is the header, with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (
        [
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(rows[0], row, widths, strict=True)
        ]
        for row in rows
    )
    return "\n".join((" " * _GAP).join(row).rstrip() for row in cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the presets of the package; return 0."""
    argparse.ArgumentParser(prog="list_presets.py", description=__doc__).parse_args(argv)
    print(table(load_preset(name) for name in preset_names()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
