"""The loop that all training stages of the demo share: optimizers, a moving average, checkpoints, progress lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from kandinsky5_nabla.scripts._demo_muon import Muon

WARM_UP = 50  # steps
LAST_RATE = 0.02  # the last step's learning rate, in parts of the peak
EMA_DECAY = 0.99
REPORT_EVERY, SAVE_EVERY = 50, 200  # steps

LossOfStep = Callable[[int], torch.Tensor]
"""Returns the loss of a step; what it draws depends on the step's number alone, so that a resumed run goes on alike."""


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        name: of the stage, and of its checkpoint file.
        steps: how many.
        peak_rate: AdamW's learning rate after the warm-up.
        matrix_rate: Muon's, likewise.
        folder: where the checkpoint is.
        first_rate, last_rate: where on the linear decay from 1 to LAST_RATE the stage begins and ends, in parts of
            the peak: stages that continue each other share one decay.
    """

    name: str
    steps: int
    peak_rate: float
    folder: Path
    first_rate: float = 1.0
    last_rate: float = LAST_RATE
    matrix_rate: float = 0.0

    @property
    def file(self) -> Path:
        """The checkpoint: weights, their moving average, the optimizers' states and the next step."""
        return self.folder / f"{self.name}.pt"

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, in parts of the peak."""
        decay = self.first_rate + (self.last_rate - self.first_rate) * step / max(self.steps, 1)
        return decay * min(1.0, (step + 1) / WARM_UP)

    def optimizers(self, weights: list[nn.Parameter], matrices: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Return Muon for the matrices, if there are any, and AdamW for the other weights."""
        theirs = {id(matrix) for matrix in matrices}
        others = [weight for weight in weights if id(weight) not in theirs]
        adam = torch.optim.AdamW(others, lr=self.peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
        return [adam, Muon(matrices, lr=self.matrix_rate)] if matrices else [adam]


def generator_of(name: str, step: int) -> torch.Generator:
    """Return the generator of one step of a stage."""
    return torch.Generator().manual_seed(int.from_bytes(name.encode()[:4], "little") * 1_000_003 + step)


def train(
    stage: Stage,
    module: nn.Module,
    loss_of_step: LossOfStep,
    check: Callable[[], str],
    matrices: Sequence[nn.Parameter] = (),
    check_every: int = 500,
) -> None:
    """Train a module from its stage's checkpoint, or from its present weights where there is none.

    `matrices` are the weights that Muon trains. At the end the module holds the moving average of the weights. `check`
    returns what a progress line says besides the loss; it is called with the average in the module.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    average = [weight.detach().clone() for weight in weights]
    optimizers = stage.optimizers(weights, matrices)
    peaks = [optimizer.defaults["lr"] for optimizer in optimizers]
    first = _resume(stage, module, average, optimizers)
    print(f"{stage.name}: steps {first} to {stage.steps}", flush=True)
    start, losses = time.perf_counter(), []
    for step in range(first, stage.steps):
        loss = loss_of_step(step)
        module.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * stage.rate(step)
            optimizer.step()
        torch._foreach_lerp_(average, [weight.detach() for weight in weights], 1 - min(EMA_DECAY, step / (step + 10)))
        losses.append(loss.item())
        done = step + 1
        if done % REPORT_EVERY == 0 or done == stage.steps:
            seconds = (time.perf_counter() - start) / (done - first)
            mean = sum(losses) / len(losses)
            print(f"{stage.name} {done}/{stage.steps} loss {mean:.4f} {seconds:.3f} s/step", flush=True)
            losses = []
        if done % SAVE_EVERY == 0 or done == stage.steps:
            _save(stage, module, average, optimizers, done)
        if done % check_every == 0 and done != stage.steps:
            print(f"{stage.name} {done}/{stage.steps} {_check_average(weights, average, check)}", flush=True)
    _put(weights, average)
    print(f"{stage.name} done, {check()}, {time.perf_counter() - start:.0f} s", flush=True)


def _resume(
    stage: Stage, module: nn.Module, average: list[torch.Tensor], optimizers: list[torch.optim.Optimizer]
) -> int:
    """Load the checkpoint if there is one and return the step to begin with."""
    if not stage.file.exists():
        return 0
    state = torch.load(stage.file, weights_only=True)
    module.load_state_dict(state["module"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for tensor, saved in zip(average, state["average"], strict=True):
        tensor.copy_(saved)
    return min(state["step"], stage.steps)


def _save(
    stage: Stage, module: nn.Module, average: list[torch.Tensor], optimizers: list[torch.optim.Optimizer], step: int
) -> None:
    """Write the checkpoint beside its name first: an interruption leaves the old one whole."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    state = {"module": module.state_dict(), "average": average, "optimizers": states, "step": step}
    stage.folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, stage.file.with_suffix(".part"))
    os.replace(stage.file.with_suffix(".part"), stage.file)


def _put(weights: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(weights, values)


def _check_average(weights: list[nn.Parameter], average: list[torch.Tensor], check: Callable[[], str]) -> str:
    """Return what `check` says of the moving average; the weights are back in place afterwards."""
    trained = [weight.detach().clone() for weight in weights]
    _put(weights, average)
    try:
        return check()
    finally:
        _put(weights, trained)
