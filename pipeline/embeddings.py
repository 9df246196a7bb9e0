"""What a user gives as text, checked, and text embeddings on their way into the transformer.

Legend: B prompts, L tokens, D and D2 widths of the Qwen and CLIP embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..configs.errors import EmbedsError
from .checks import prompt_list
from .text import TextEmbeddings

TextSource = list[str] | TextEmbeddings
"""Prompts to encode, or what a user encoded before."""


@dataclass(frozen=True)
class GivenText:
    """The arguments of a call that stand for the prompts, or for the negative prompts.

    Attributes:
        prompt: a text or several.
        prompt_embeds: `[B, L, D]`.
        pooled: `[B, D2]`.
        mask: `[B, L]`, true for real tokens; None means that all are real.
        prefix: "" or "negative_", how the arguments' names begin.
    """

    prompt: str | Sequence[str] | None
    prompt_embeds: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    prefix: str = ""

    def source(self, text_dim: int, pooled_dim: int) -> TextSource | None:
        """Return the prompts or the embeddings, whichever was given, or None for neither.

        Raises:
            ValueError: if both are given, the list of prompts is empty, a prompt is no text, a part of the
                embeddings is missing or misshapen, or a prompt has no real token.
        """
        embedded = any(tensor is not None for tensor in (self.prompt_embeds, self.pooled, self.mask))
        if self.prompt is None:
            return self._embeddings(text_dim, pooled_dim) if embedded else None
        if embedded:
            raise EmbedsError(f"give {self.prefix}prompt or {self.prefix}prompt_embeds, not both")
        return prompt_list(self.prompt, f"{self.prefix}prompt")

    def _embeddings(self, text_dim: int, pooled_dim: int) -> TextEmbeddings:
        name, embeds, pooled = self.prefix, self.prompt_embeds, self.pooled
        if embeds is None or pooled is None:
            raise EmbedsError(f"{name}prompt_embeds and {name}pooled_prompt_embeds come together: give both")
        _check_floats(f"{name}prompt_embeds", embeds)
        _check_floats(f"{name}pooled_prompt_embeds", pooled)
        if embeds.dim() != 3 or embeds.shape[-1] != text_dim or not embeds.numel():
            raise EmbedsError(f"{name}prompt_embeds {tuple(embeds.shape)}: must be [B, L, {text_dim}]")
        B, L, _ = embeds.shape
        if tuple(pooled.shape) != (B, pooled_dim):
            raise EmbedsError(f"{name}pooled_prompt_embeds {tuple(pooled.shape)}: must be [{B}, {pooled_dim}]")
        mask = self._mask(B, L).to(embeds.device)
        for argument, numbers in (("prompt_embeds", embeds[mask]), ("pooled_prompt_embeds", pooled)):
            if not torch.isfinite(numbers).all():  # padding may hold anything
                raise EmbedsError(f"{name}{argument}: holds NaN or infinity; encode the prompts again")
        return TextEmbeddings(embeds, mask, pooled)

    def _mask(self, B: int, L: int) -> torch.Tensor:
        name, mask = f"{self.prefix}prompt_embeds_mask", self.mask
        if mask is None:
            return torch.ones(B, L, dtype=torch.bool)
        if not isinstance(mask, torch.Tensor):
            raise EmbedsError(f"{name}: must be a tensor, not {type(mask).__name__}")
        if tuple(mask.shape) != (B, L):
            raise EmbedsError(f"{name} {tuple(mask.shape)}: must be [{B}, {L}]")
        if not ((mask == 0) | (mask == 1)).all():
            raise EmbedsError(f"{name}: must hold true and false, or 1 and 0, for real tokens and padding")
        if not mask.any(dim=1).all():
            raise EmbedsError(f"{name}: every prompt needs at least one real token")
        return mask.bool()


def _check_floats(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise EmbedsError(f"{name}: must be a tensor, not {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise EmbedsError(f"{name} of {tensor.dtype}: must be floating point, as encode_prompt returns it")


def number_of_prompts(source: TextSource) -> int:
    """Return B."""
    return len(source) if isinstance(source, list) else len(source.prompt_embeds)


def split_rows(text: TextEmbeddings, counts: Sequence[int]) -> list[TextEmbeddings]:
    """Return the embeddings of the first `counts[0]` prompts, of the next `counts[1]`, and so on."""
    parts = zip(*(tensor.split(list(counts)) for tensor in (text.prompt_embeds, text.mask, text.pooled)), strict=True)
    return [TextEmbeddings(*part) for part in parts]


def for_transformer(
    text: TextEmbeddings, repeats: int, device: torch.device | str, dtype: torch.dtype
) -> TextEmbeddings:
    """Return the embeddings as the transformer reads them, each prompt `repeats` times: p0 p0 p1 p1.

    Padding behind the longest prompt is cut off: what a prompt gives must not depend on how it was padded. The
    mask goes to the CPU, where looking at it does not wait for a GPU.
    """
    longest = int(text.mask.any(dim=0).nonzero().max()) + 1
    return TextEmbeddings(
        text.prompt_embeds[:, :longest].repeat_interleave(repeats, dim=0).to(device, dtype),
        text.mask[:, :longest].repeat_interleave(repeats, dim=0).cpu(),
        text.pooled.repeat_interleave(repeats, dim=0).to(device, dtype),
    )
