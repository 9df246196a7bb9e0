"""The schedule of the flow: from noise (sigma 1) to video (sigma 0)."""

from __future__ import annotations

import torch


def make_sigmas(num_inference_steps: int, shift: float) -> torch.Tensor:
    """Return `num_inference_steps + 1` falling noise levels from 1 to 0, fp32.

    u = linspace(1, 0, steps + 1) and sigma = s u / (1 + (s - 1) u), with the shift s applied once (numerics.md).
    The model's time is sigma * 1000.
    """
    u = torch.linspace(1, 0, num_inference_steps + 1, dtype=torch.float32)
    return shift * u / (1 + (shift - 1) * u)
