"""Time NABLA: making the block lists, against diffusers' own, and attending to them, against dense attention.

Both sides run in one process, one after the other, and the medians are printed as Markdown tables with the memory
that each takes above its inputs, measured in a process of its own. `--cuda` prints the tables for a GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kandinsky5_nabla.attention import sta_mask
from kandinsky5_nabla.attention.flex import block_sparse_attention
from kandinsky5_nabla.attention.lists import BlockLists, Workspace
from kandinsky5_nabla.attention.order import BLOCK
from kandinsky5_nabla.attention.sdpa import dense_attention
from kandinsky5_nabla.attention.selection import select_blocks
from kandinsky5_nabla.pipeline.precision import FLOAT_DTYPES
from kandinsky5_nabla.scripts._benchmark import (
    draw_qkv,
    hardware,
    in_fresh_process,
    interleaved_medians,
    peak_above_inputs,
    random_map,
)

P = 0.9  # as the published checkpoints
WINDOW = (11, 3, 3)
DENSITY = 0.2  # what sparse attention with its selection is timed at, beside the other densities
WARM_UP_BLOCKS = 120  # of the call that compiles, before memory is measured


@dataclass(frozen=True)
class Geometry:
    """A size to measure: its grid of blocks (T, rows, columns), heads, head dim, and what has it.

    `strength` of the block means gives the density that is printed.
    """

    name: str
    grid: tuple[int, int, int]
    heads: int
    head_dim: int
    strength: float = 1.6

    @property
    def blocks(self) -> int:
        """N."""
        T, H, W = self.grid
        return T * H * W


GEOMETRIES = {
    geometry.blocks: geometry
    for geometry in (
        Geometry("Lite, 17 frames of 512x768", (5, 4, 6), 28, 64),
        Geometry("Lite, 81 frames of 512x768", (21, 4, 6), 28, 64),
        Geometry("Lite, 241 frames of 512x512", (61, 4, 4), 28, 64),
        Geometry("Lite, 241 frames of 512x768", (61, 4, 6), 28, 64),
        Geometry("Pro, 33 frames of 768x1280", (9, 6, 10), 32, 128),
        Geometry("Pro, 121 frames of 768x1280", (31, 6, 10), 32, 128),
    )
}
ON_CPU, ON_CUDA = (120, 504, 976, 1464, 540), (1464, 1860)


def selections(geometry: Geometry, dtype: torch.dtype, device: str) -> dict[str, Callable[[], object]]:
    """Return what makes the block lists: ours and that of the installed diffusers, on the same q and k."""
    from diffusers.models.transformers.transformer_kandinsky import nablaT_v2

    q, k = draw_qkv(geometry.blocks, geometry.heads, geometry.head_dim, dtype, device, geometry.strength, count=2)
    window = sta_mask(geometry.grid, WINDOW, device)[None, None]
    workspace = Workspace()
    return {
        "ours": lambda: select_blocks(q, k, window, P, workspace=workspace),
        "diffusers": lambda: nablaT_v2(q, k, window, thr=P),
    }


def print_selections(blocks: Sequence[int], dtype: str, device: str, repeats: int) -> None:
    """Print the table of making the block lists."""
    print(f"\nBlock lists from q and k ({dtype}, P {P}, window {WINDOW}):\n")
    print("| size | blocks | heads x dim | density | ours | diffusers | ratio | memory: ours | diffusers |")
    print("|---|---|---|---|---|---|---|---|---|")
    for count in blocks:
        geometry = GEOMETRIES[count]
        functions = selections(geometry, getattr(torch, dtype), device)
        medians = interleaved_medians(functions, repeats, device)
        lists = functions["ours"]()
        assert isinstance(lists, BlockLists)
        density = lists.kept.float().mean().item()
        if device == "cuda":
            peaks = [peak_above_inputs(function, device) for function in functions.values()]
        else:
            of = ["--blocks", str(count), "--dtype", dtype]
            peaks = [in_fresh_process(__file__, ["--peak-of", name, *of]) for name in functions]
        print(
            f"| {geometry.name} | {count} | {geometry.heads} x {geometry.head_dim} | {density:.2f} "
            f"| {medians['ours'] * 1e3:.1f} ms "
            f"| {medians['diffusers'] * 1e3:.0f} ms | {medians['diffusers'] / medians['ours']:.1f}x "
            f"| {peaks[0]:.2f} GB | {peaks[1]:.2f} GB |",
            flush=True,
        )


def print_attention(blocks: int, heads: int, head_dim: int, dtype: str, device: str, repeats: int) -> None:
    """Print the table of block-sparse attention beside dense attention."""
    q, k, v = draw_qkv(blocks, heads, head_dim, getattr(torch, dtype), device, strength=1.6)
    scale, tokens = head_dim**-0.5, blocks * BLOCK
    window = sta_mask((blocks, 1, 1), (1, 1, 1), device)
    workspace = Workspace()
    functions: dict[str, Callable[[], object]] = {"dense": lambda: dense_attention(q, k, v, scale)}
    functions["selection"] = lambda: select_blocks(q, k, window, P, workspace=workspace)
    densities = (0.1, DENSITY, 0.3, 0.5, 1.0)
    for density in densities:
        lists = BlockLists.of_map(random_map(blocks, heads, density, device))
        functions[f"{density}"] = functools.partial(block_sparse_attention, q, k, v, lists, scale)
    medians = interleaved_medians(functions, repeats, device)
    flops = 4 * heads * head_dim * tokens**2

    print(f"\n{tokens} tokens, {heads} heads of {head_dim}, {dtype}:\n")
    print("| | ms | dense / this | useful TFLOP/s |\n|---|---|---|---|")
    print(f"| dense (SDPA) | {medians['dense'] * 1e3:.1f} | 1.0 | {flops / medians['dense'] / 1e12:.2f} |")
    for density in densities:
        seconds = medians[f"{density}"]
        rate = flops * density / seconds / 1e12
        print(f"| density {density:g} | {seconds * 1e3:.1f} | {medians['dense'] / seconds:.2f} | {rate:.2f} |")
    print(f"| selecting the blocks | {medians['selection'] * 1e3:.1f} | | |")
    both = medians[f"{DENSITY}"] + medians["selection"]
    ratio = medians["dense"] / both
    print(f"| density {DENSITY:g} with its selection | {both * 1e3:.1f} | {ratio:.2f} | |")
    print(f"\nThat is {ratio * DENSITY:.2f} / density times as fast as dense attention.")
    if device == "cpu":
        size = ["--blocks", str(blocks), "--heads", str(heads), "--head-dim", str(head_dim), "--dtype", dtype]
        peak = in_fresh_process(__file__, ["--peak-of", "attention", *size])
        scores = heads * tokens**2 * 4 / 1e9
        print(
            f"Sparse attention (density {DENSITY:g}) takes {peak:.2f} GB above q, k, v; scores would: {scores:.1f} GB."
        )


def peak_of(name: str, geometry: Geometry, dtype: torch.dtype) -> float:
    """Return the GB above its inputs that a function takes on a CPU, what it compiles set aside."""
    small = Geometry("warm-up", (WARM_UP_BLOCKS, 1, 1), geometry.heads, geometry.head_dim)
    if name != "attention":
        if name == "ours":
            selections(small, dtype, "cpu")[name]()
        return peak_above_inputs(selections(geometry, dtype, "cpu")[name], "cpu")
    q, k, v = draw_qkv(geometry.blocks, geometry.heads, geometry.head_dim, dtype, "cpu", geometry.strength)
    lists = BlockLists.of_map(random_map(geometry.blocks, geometry.heads, DENSITY, "cpu"))
    block_sparse_attention(q, k, v, lists, 1.0)  # compiles, for this size alone
    return peak_above_inputs(lambda: block_sparse_attention(q, k, v, lists, 1.0), "cpu")


def positive(text: str) -> int:
    """Return a whole number from 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be 1 or more")
    return number


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="benchmark_attention.py", description=__doc__)
    add = parser.add_argument
    add("--tables", nargs="+", choices=("selection", "attention"), default=["selection", "attention"])
    add("--blocks", type=positive, nargs="+", help=f"of the table of selections: {', '.join(map(str, GEOMETRIES))}")
    add(
        "--tokens",
        type=positive,
        default=16384,
        help="of the table of attention, 64 times a number (%(default)s)",
    )
    add("--heads", type=positive, default=8, help="of the table of attention (default: %(default)s)")
    add("--head-dim", type=positive, default=64, help="of the table of attention (default: %(default)s)")
    add("--dtype", choices=FLOAT_DTYPES, default="bfloat16")
    add("--repeats", type=positive, default=5, help="calls that count, after one that does not (default: %(default)s)")
    add("--cuda", action="store_true", help="the tables for a GPU: all selections, attention as Lite and Pro have it")
    add("--peak-of", choices=("ours", "diffusers", "attention"), help=argparse.SUPPRESS)
    return parser


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.cuda and not torch.cuda.is_available():
        parser.error("--cuda: torch sees no CUDA device")
    if options.peak_of is not None:
        geometry = GEOMETRIES.get(options.blocks[0])
        if geometry is None or options.peak_of == "attention":
            geometry = Geometry("given", (options.blocks[0], 1, 1), options.heads, options.head_dim)
        print(peak_of(options.peak_of, geometry, getattr(torch, options.dtype)))
        return 0
    blocks = options.blocks or (list(GEOMETRIES) if options.cuda else ON_CPU)
    unknown = [count for count in blocks if count not in GEOMETRIES]
    if unknown or options.tokens % BLOCK:
        parser.error(f"--blocks {unknown}: one of {list(GEOMETRIES)}" if unknown else "--tokens: a multiple of 64")

    device = "cuda" if options.cuda else "cpu"
    from diffusers import __version__ as diffusers_version

    print(f"{hardware(device)}; torch {torch.__version__}, diffusers {diffusers_version}; medians of {options.repeats}")
    if "selection" in options.tables:
        print_selections(blocks, options.dtype, device, options.repeats)
    if "attention" in options.tables:
        sizes = [(options.tokens // BLOCK, options.heads, options.head_dim)]
        if options.cuda:
            sizes = [(g.blocks, g.heads, g.head_dim) for g in (GEOMETRIES[count] for count in ON_CUDA)]
        for size in sizes:
            print_attention(*size, options.dtype, device, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
