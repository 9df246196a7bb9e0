"""Latents: their shape, the noise they start from, and what to say of those that are not finite.

Legend: B videos, T latent frames, H/W latent rows and columns, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..configs.errors import ArgumentError, NotFiniteError, SettingsError
from .checks import Geometry, is_whole

LATENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_latents(latents: object, channels: int) -> None:
    """Raise an ArgumentError for what is no latents `[B, T, H, W, channels]` in floating point."""
    if not isinstance(latents, torch.Tensor) or latents.dim() != 5 or latents.shape[-1] != channels:
        shown = tuple(latents.shape) if isinstance(latents, torch.Tensor) else type(latents).__name__
        raise ArgumentError(f"latents {shown}: must be a tensor [B, T, H, W, {channels}], channels last")
    if latents.dtype not in LATENT_DTYPES:
        raise ArgumentError(f"latents of {latents.dtype}: must be of {', '.join(map(str, LATENT_DTYPES))}")


def latent_shape(
    num_frames: int, height: int, width: int, channels: int, geometry: Geometry
) -> tuple[int, int, int, int]:
    """Return `(T, H, W, C)` for a video of `num_frames` frames of `height` x `width` pixels."""
    return (
        (num_frames - 1) // geometry.temporal_ratio + 1,
        height // geometry.spatial_ratio,
        width // geometry.spatial_ratio,
        channels,
    )


def make_generators(
    count: int, generator: torch.Generator | Sequence[torch.Generator] | None, seed: int | None
) -> list[torch.Generator | None]:
    """Return one generator per video; video i of a seed has the seed `seed + i`, so each can be made alone.

    Raises:
        ValueError: if both are given, a list has another length, a generator is not on the CPU, or the seed is
            no whole number of 0 to 2**63 - 1.
    """
    if generator is not None and seed is not None:
        raise ArgumentError("give a generator or a seed, not both")
    if seed is not None:
        if not is_whole(seed) or not 0 <= seed <= 2**63 - count:
            raise SettingsError(f"seed {seed!r}: must be a whole number from 0 to 2**63 - 1")
        return [torch.Generator("cpu").manual_seed(int(seed) + i) for i in range(count)]
    if generator is None or isinstance(generator, torch.Generator):
        generators: list[torch.Generator | None] = [generator] * count
    elif isinstance(generator, (list, tuple)) and all(isinstance(one, torch.Generator) for one in generator):
        generators = [*generator]
    else:
        raise ArgumentError(f"generator {generator!r}: must be a torch.Generator or a list of them")
    if len(generators) != count:
        raise ArgumentError(f"{len(generators)} generators for {count} videos: give one, or one for each video")
    for one in generators:
        if one is not None and one.device.type != "cpu":
            raise ArgumentError(
                f"a generator on {one.device}: noise is drawn on the CPU, so that a seed means the same on every "
                'device; use torch.Generator("cpu") or seed='
            )
    return generators


def draw_noise(shape: Sequence[int], generators: Sequence[torch.Generator | None]) -> torch.Tensor:
    """Return standard normal noise `[len(generators), *shape]`, fp32 on the CPU.

    Each video has a draw of its own from its generator (None is torch's global one), so that a video does not
    depend on its neighbours, and every device starts from the same noise.
    """
    return torch.stack([torch.randn(*shape, generator=generator, dtype=torch.float32) for generator in generators])


def first_not_finite(model: torch.nn.Module, call: Callable[[], Any]) -> str | None:
    """Return the name of the first layer with a NaN or an infinity in its output when the model is called again.

    None where there is none: the call is not what made them, or the layers are compiled into one piece.
    """
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not found and not all(torch.isfinite(each).all() for each in tensors if isinstance(each, torch.Tensor)):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        call()
    except Exception:  # such as memory that runs out: the error that is on its way must not be lost
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return next(iter(found), None)


def not_finite(when: str, computed_in: torch.dtype | None = None) -> NotFiniteError:
    """Return the error of latents with a NaN or an infinity, of which decoding would make black frames.

    `computed_in` is the dtype of the model that made them, where it is known: it tells the likely cause.
    """
    cause = "damaged weights, or a guidance scale or LoRA that is far too strong"
    if computed_in in (None, torch.float16):
        cause = f"float16, which ends at 65504 (try bfloat16 or float32), or {cause}"
    return NotFiniteError(f"the latents {when} are not finite (NaN or infinity). Likely cause: {cause}")
