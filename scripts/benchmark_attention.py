"""Time block-sparse attention beside dense attention, interleaved in one process; print a Markdown table.

The block map is random at the density asked for, the same number of blocks in every row, since the time depends on
how many blocks are kept and not on which. Mask building is timed apart, on the same q and k.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kandinsky5_nabla.attention import nabla_mask, sta_mask
from kandinsky5_nabla.attention.flex import block_sparse_attention
from kandinsky5_nabla.attention.order import BLOCK
from kandinsky5_nabla.attention.sdpa import dense_attention

PEAK_DENSITY = 0.2


def make_inputs(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v, random normal `[1, S, H, D]`."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 1, tokens, heads, head_dim, generator=generator).to(device, dtype)
    return qkv[0], qkv[1], qkv[2]


def random_map(tokens: int, heads: int, density: float, device: str) -> torch.Tensor:
    """Return a bool block map `[1, H, N, N]` that keeps the same number of random blocks in every row."""
    blocks = tokens // BLOCK
    order = torch.rand(1, heads, blocks, blocks, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return (order < round(density * blocks)).to(device)


def interleaved_medians(functions: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Return the median seconds of each function; the first call of each, which may compile, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent) for name, spent in times.items()}


def peak_of_new_process(arguments: list[str]) -> float:
    """Return the peak GB of a fresh process that runs the sparse kernel once."""
    command = [sys.executable, __file__, "--peak-only", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def hardware(device: str) -> str:
    """Return the name of what was measured on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="a multiple of 64 (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.5, 1.0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak-only", action="store_true", help="print the process's peak GB after one sparse call")
    args = parser.parse_args(argv)

    q, k, v = make_inputs(args.tokens, args.heads, args.head_dim, getattr(torch, args.dtype), args.device)
    scale = args.head_dim**-0.5
    maps = {density: random_map(args.tokens, args.heads, density, args.device) for density in args.densities}
    if args.peak_only:
        with torch.no_grad():
            block_sparse_attention(q, k, v, maps[args.densities[0]], scale)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
        return 0
    window = sta_mask((args.tokens // BLOCK, 1, 1), (1, 1, 1), args.device)
    functions: dict[str, Callable[[], object]] = {"dense": lambda: dense_attention(q, k, v, scale)}
    functions["mask"] = lambda: nabla_mask(q, k, window, 0.9)
    for density, kept in maps.items():
        functions[f"{density}"] = lambda kept=kept: block_sparse_attention(q, k, v, kept, scale)
    with torch.no_grad():
        medians = interleaved_medians(functions, args.repeats, args.device)

    print(f"{args.tokens} tokens, {args.heads} heads of {args.head_dim}, {args.dtype}; {hardware(args.device)};")
    print(f"torch {torch.__version__}; medians of {args.repeats}, interleaved\n")
    print("| | ms | dense / this |\n|---|---|---|")
    print(f"| dense (SDPA) | {medians['dense'] * 1e3:.0f} | 1.0 |")
    for density in maps:
        seconds = medians[f"{density}"]
        print(f"| block-sparse, density {density:g} | {seconds * 1e3:.0f} | {medians['dense'] / seconds:.1f} |")
    print(f"| selecting the blocks | {medians['mask'] * 1e3:.0f} | |")
    if args.device == "cpu":
        size = ["--tokens", str(args.tokens), "--heads", str(args.heads), "--head-dim", str(args.head_dim)]
        peak = peak_of_new_process([*size, "--dtype", args.dtype, "--densities", str(PEAK_DENSITY)])
        scores = args.heads * args.tokens**2 * 4 / 1e9
        print(f"\nA fresh process peaks at {peak:.2f} GB (density {PEAK_DENSITY:g}); dense scores: {scores:.1f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
