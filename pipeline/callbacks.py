"""A call's callback: what it gets after each step, and what it may replace."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..configs.errors import ArgumentError
from .denoise import Guidance

CALLBACK_TENSORS = ("latents", "prompt_embeds", "negative_prompt_embeds")


def checked_callback_tensors(callback: object, names: object) -> tuple[str, ...]:
    """Return the names of the tensors that a callback is to get; one name alone may be a text.

    Raises:
        ValueError: if it cannot be called, or a name is not of `CALLBACK_TENSORS`.
    """
    if callback is not None and not callable(callback):
        raise ArgumentError(f"callback_on_step_end {callback!r}: must be a function, not {type(callback).__name__}")
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, (list, tuple, set, frozenset)):
        raise ArgumentError(
            f"callback_on_step_end_tensor_inputs {names!r}: must be a list of {', '.join(CALLBACK_TENSORS)}"
        )
    for name in listed:
        if name not in CALLBACK_TENSORS:
            raise ArgumentError(f"callback tensor {name!r}: must be one of {', '.join(CALLBACK_TENSORS)}")
    return tuple(listed)


def callback_tensors(latents: torch.Tensor, guidance: Guidance, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the tensors of these names."""
    negative = None if guidance.negative is None else guidance.negative.prompt_embeds
    values = (latents, guidance.positive.prompt_embeds, negative)
    return {name: value for name, value in zip(CALLBACK_TENSORS, values, strict=True) if name in names}


def with_changes(latents: torch.Tensor, guidance: Guidance, changed: Any) -> tuple[torch.Tensor, Guidance]:
    """Return latents and guidance with the tensors that a callback replaced; None replaces nothing.

    Raises:
        ValueError: if it is no dict of tensors that a callback may replace, a shape has changed, or its latents are
            not finite.
    """
    if changed is None:
        return latents, guidance
    present = callback_tensors(latents, guidance, CALLBACK_TENSORS)
    if not isinstance(changed, dict) or not changed.keys() <= present.keys():
        shown = list(changed) if isinstance(changed, dict) else type(changed).__name__
        raise ArgumentError(f"a callback returned {shown}; it may return a dict of {', '.join(CALLBACK_TENSORS)}")
    for name, tensor in changed.items():
        _check_change(name, tensor, present[name])
    positive, negative = guidance.positive, guidance.negative
    if "prompt_embeds" in changed:
        positive = dataclasses.replace(positive, prompt_embeds=changed["prompt_embeds"])
    if negative is not None and "negative_prompt_embeds" in changed:
        negative = dataclasses.replace(negative, prompt_embeds=changed["negative_prompt_embeds"])
    latents = changed.get("latents", latents).to(latents.device, torch.float32)
    return latents, dataclasses.replace(guidance, positive=positive, negative=negative)


def _check_change(name: str, tensor: Any, present: torch.Tensor | None) -> None:
    if present is None and tensor is None:  # negative embeddings of a run without guidance, given back
        return
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"a callback returned {name} as {type(tensor).__name__}; it must be a tensor")
    if present is None or tensor.shape != present.shape:
        raise ArgumentError(f"a callback returned {name} in another shape than it was given")
    if name == "latents" and not torch.isfinite(tensor).all():
        raise ArgumentError("a callback returned latents that are not finite (NaN or infinity)")
