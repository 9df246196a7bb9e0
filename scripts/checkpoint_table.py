"""Print the README's table of checkpoints: parameters counted on meta at full shape, and the memory plan of each.

A file with the header of each published transformer, and no weights behind it, goes through the checks that loading
begins with. The plans are for one video with guidance in bf16 on a CUDA device with so much memory free.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs import Preset, load_preset, preset_names

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.sizes import Sizes

BUDGETS = (12, 24, 48, 80, 141)  # GB
FAMILIES = ("lite", "pro")


def transformer_on_meta(family: str, preset: Preset, folder: Path) -> int:
    """Return the parameters of a published transformer, built on meta from the header of a file of its full shape.

    The config comes from the shapes of the header, the attention from the preset, as for a file of the original layout.
    """
    import torch

    from kandinsky5_nabla.models.architecture import config_from_headers
    from kandinsky5_nabla.models.headers import read_headers
    from kandinsky5_nabla.models.loading import build_on_meta
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
    from kandinsky5_nabla.pipeline.single_file import attention_of

    with torch.device("meta"):
        published = Kandinsky5Transformer(**published_config(family), **attention_of(preset))
    file = folder / f"{preset.name}.safetensors"
    write_header(file, {name: tuple(tensor.shape) for name, tensor in published.state_dict().items()})
    headers = read_headers([file])
    config = config_from_headers(headers, **attention_of(preset))
    model = build_on_meta(Kandinsky5Transformer, config, headers, str(file))
    file.unlink()
    return sum(parameter.numel() for parameter in model.parameters())


def published_config(family: str) -> dict[str, Any]:
    """Return the config of a published transformer without its attention (checkpoints.md)."""
    from kandinsky5_nabla.pipeline.sizes import PUBLISHED_AXES, PUBLISHED_TRANSFORMERS

    return {**PUBLISHED_TRANSFORMERS[family], "axes_dims": PUBLISHED_AXES[family], "visual_cond": True}


def write_header(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of bf16 tensors that holds a hole in place of their numbers: it takes no disk."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)


def plans(preset: Preset, sizes: Sizes) -> list[str]:
    """Return for each budget the way that `--offload auto` takes, or the change that would fit."""
    from kandinsky5_nabla.pipeline.memory import GB, Run, choose

    attention = "NABLA_ATTN" if preset.attention == "nabla" else "SDPA"
    run = Run(preset.height, preset.width, preset.num_frames, attention=attention)
    ways = []
    for budget in BUDGETS:
        try:
            plan = choose(sizes, run, budget * GB)
            way = plan.offload + (" with release" if plan.release else "")
            ways.append(f"{way}, {plan.needed / GB:.0f} GB")
        except ValueError as error:
            ways.append(f"`{str(error).partition('What would fit: ')[2]}`")
    return ways


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0."""
    parser = argparse.ArgumentParser(prog="checkpoint_table.py", description=__doc__)
    parser.parse_args(arguments)
    from kandinsky5_nabla.pipeline.sizes import published_sizes

    columns = ["preset", "attention", "default size", "parameters", *(f"{budget} GB" for budget in BUDGETS)]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as folder:
        for name in preset_names():
            preset, family = load_preset(name), name.partition("-")[0]
            if family not in FAMILIES:
                continue
            count = transformer_on_meta(family, preset, Path(folder))
            attention = "dense" if preset.nabla_P is None else f"NABLA, P {preset.nabla_P:g}"
            size = f"{preset.height}x{preset.width}, {preset.num_frames} frames"
            cells = [f"`{name}`", attention, size, f"{count / 1e9:.3f} B", *plans(preset, published_sizes(family))]
            print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
