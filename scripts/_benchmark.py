"""What the benchmark's tables share: inputs, interleaved timing, memory of a fresh process, what was measured on."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kandinsky5_nabla.attention.order import BLOCK


def interleaved_medians(functions: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Return the median seconds of each function; the first call of each, which may compile, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            synchronise(device)
            start = time.perf_counter()
            function()
            synchronise(device)
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent) for name, spent in times.items()}


def synchronise(device: str) -> None:
    """Wait for what was started on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_above_inputs(function: Callable[[], object], device: str) -> float:
    """Return the GB that a call takes beyond what is in memory before it, on Linux or CUDA."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e9
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far, which making the inputs has set, is forgotten
    function()
    return (_status("VmHWM") - before) * 1024 / 1e9


def _status(name: str) -> int:
    """Return the kB that Linux reports of this process: VmRSS is what is in memory now, VmHWM the highest so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def in_fresh_process(script: str, arguments: Sequence[str]) -> float:
    """Return the number that a script prints last, run with these arguments in a process of its own."""
    result = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{result.stderr[-2000:]}")
    return float(result.stdout.split()[-1])


def hardware(device: str) -> str:
    """Return the name of what was measured on."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def draw_qkv(
    blocks: int, heads: int, head_dim: int, dtype: torch.dtype, device: str, strength: float, count: int = 3
) -> list[torch.Tensor]:
    """Return `count` of q, k, v `[1, S, H, D]`: normal tokens; those of q and k share a mean in each block.

    The means walk slowly from block to block, so that blocks attend to those that are near. The stronger they are,
    the fewer blocks hold the mass P; without them random q and k keep about 90 % of the blocks at P = 0.9.
    """
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(blocks, 1, heads, head_dim, generator=generator)
    walk = steps.cumsum(0) / torch.arange(1, blocks + 1).sqrt()[:, None, None, None]
    tensors = []
    for index in range(count):
        x = torch.randn(blocks, BLOCK, heads, head_dim, generator=generator)
        if index < 2:
            x += strength * walk
        tensors.append(x.flatten(0, 1)[None].to(device, dtype))
    return tensors


def random_map(blocks: int, heads: int, density: float, device: str) -> torch.Tensor:
    """Return a bool block map `[1, H, N, N]` that keeps the same number of random blocks in every row."""
    order = torch.rand(1, heads, blocks, blocks, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return (order < round(density * blocks)).to(device)
