"""What the pipeline returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.utils import BaseOutput


@dataclass
class Kandinsky5PipelineOutput(BaseOutput):
    """Videos, in the form that `output_type` asked for.

    Attributes:
        frames: "pil": a list of lists of PIL images; "np": float `[B, F, H, W, 3]` in 0..1; "pt": float
            `[B, F, 3, H, W]` in 0..1; "latent", or after an interrupt: fp32 latents `[B, T, H, W, C]`.
    """

    frames: Any
