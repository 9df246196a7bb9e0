"""What is seen of a denoising: a bar on a terminal, a few lines elsewhere, and each step in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from tqdm import tqdm

from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.attention_report import watched_density
from kandinsky5_nabla.scripts._log import is_shown, say

BETWEEN_LINES = 10.0
"""Seconds from one line to the next where there is no bar; the first and the last step have one always."""

StepEnd = Callable[[Kandinsky5NablaPipeline, int, torch.Tensor, dict[str, Any]], None]
"""A `callback_on_step_end` of the pipeline."""


@dataclass(frozen=True)
class Step:
    """What is told of a step.

    Attributes:
        number: from 1.
        steps: of the whole denoising.
        seconds: since the step before it.
        pace: seconds a step, the mean of those that this run has made, without the first if there are others: that
            one may have compiled.
        density: share of the blocks that NABLA kept, the mean of layers and model calls; None with dense attention.
        memory: bytes: on CUDA the most that the denoising had allocated so far, on a CPU what is resident.
    """

    number: int
    steps: int
    seconds: float
    pace: float
    density: float | None
    memory: int

    @property
    def seconds_left(self) -> float:
        """What the remaining steps will take."""
        return (self.steps - self.number) * self.pace

    @property
    def state(self) -> str:
        """Density and memory, for people."""
        density = "" if self.density is None else f"density {100 * self.density:.1f} %, "
        return f"{density}{self.memory / 1e9:.1f} GB"

    @property
    def line(self) -> str:
        """All of it, for people."""
        left = f"{tqdm.format_interval(self.seconds_left)} left, " if self.number < self.steps else ""
        return f"step {self.number} of {self.steps}: {self.pace:.2f} s a step, {left}{self.state}"

    @property
    def fields(self) -> dict[str, Any]:
        """All of it, for a log."""
        return {
            "step": self.number,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "steps_per_second": round(1 / self.pace, 4),
            "seconds_left": round(self.seconds_left, 1),
            "density": self.density,
            "memory_GB": round(self.memory / 1e9, 3),
        }


@contextmanager
def denoising_progress(
    pipe: Kandinsky5NablaPipeline, device: str, steps: int, completed: int = 0, **about: Any
) -> Iterator[StepEnd]:
    """Yield a callback that tells of each step, in place of the pipeline's own bar.

    Args:
        pipe: what denoises within the body.
        device: where.
        steps: of the whole denoising.
        completed: those of them that are done before.
        about: fields of each step in the log.
    """
    pipe.set_progress_bar_config(disable=True)
    if _is_cuda(device):
        torch.cuda.reset_peak_memory_stats(device)
    shown = None if is_shown(logging.INFO) else True  # None: where there is a terminal
    with (
        watched_density(pipe.transformer) as density,
        tqdm(total=steps, initial=completed, desc="denoise", disable=shown, dynamic_ncols=True) as bar,
    ):
        yield _Progress(device, density, bar, about)


class _Progress:
    """The callback."""

    def __init__(self, device: str, density: Callable[[], float | None], bar: tqdm, about: dict[str, Any]) -> None:
        self._device, self._density, self._bar, self._about = device, density, bar, about
        self._ends = [time.perf_counter()]
        self._spoken = self._ends[0]

    def __call__(
        self, pipe: Kandinsky5NablaPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        self._ends.append(now := time.perf_counter())
        *_, before, _ = self._ends
        counted = self._ends[1:] if len(self._ends) > 2 else self._ends
        pace = (now - counted[0]) / (len(counted) - 1)
        ended = Step(step + 1, self._bar.total, now - before, pace, self._density(), _memory(self._device))
        self._bar.set_postfix_str(ended.state, refresh=False)
        self._bar.update()
        due = self._bar.disable and self._is_due(ended, now)
        say("step", ended.line, logging.INFO if due else logging.DEBUG, **ended.fields, **self._about)

    def _is_due(self, ended: Step, now: float) -> bool:
        first = len(self._ends) == 2
        if not first and ended.number < ended.steps and now - self._spoken < BETWEEN_LINES:
            return False
        self._spoken = now
        return True


def _is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _memory(device: str) -> int:
    return torch.cuda.max_memory_allocated(device) if _is_cuda(device) else psutil.Process().memory_info().rss
