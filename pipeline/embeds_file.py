"""Prompts that are encoded, in a file: the text encoders need not be loaded for them again.

One safetensors file holds the embeddings of several prompts and of the prompt against which they are guided, with
where they come from. Legend: L tokens, D and D2 widths of the Qwen and CLIP embeddings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..configs.errors import EmbedsError, NotFoundError
from .embeddings import for_transformer
from .files import complete_file
from .text import TextEmbeddings, clean_prompt

KIND = "kandinsky5-nabla text embeddings"
VERSION = 1
"""Of the format: raised when a reader of the old one would misread the new one."""

PUBLISHED_WIDTHS = {"in_text_dim": 3584, "in_text_dim2": 768}
"""Of Qwen2.5-VL-7B and CLIP ViT-L, as the keys of a transformer's config."""

_TENSORS = tuple(field.name for field in fields(TextEmbeddings))
_NEGATIVE = "negative"


@dataclass(frozen=True)
class EncodedTexts:
    """Prompts with their embeddings, one row each: `[1, L, D]`, `[1, L]` and `[1, D2]`.

    Attributes:
        prompts: from the prompt to its embeddings.
        negative: a negative prompt with its embeddings, or None for what is not guided.
    """

    prompts: Mapping[str, TextEmbeddings]
    negative: tuple[str, TextEmbeddings] | None = None

    def problems(self, prompts: list[str], negative_prompt: str | None) -> list[str]:
        """Return why a run cannot do with these texts, one sentence each; empty if it can.

        Args:
            prompts: those of the run; as in `prompt`, only white space may differ.
            negative_prompt: None for a run without guidance.
        """
        known = {clean_prompt(prompt) for prompt in self.prompts}
        found = [
            f"the prompt {text!r} is not among the saved ones" for text in prompts if clean_prompt(text) not in known
        ]
        if negative_prompt is None:
            return found
        if self.negative is None:
            found.append("they have no negative prompt: save them again with guidance, or run with guidance scale 1")
        elif clean_prompt(self.negative[0]) != clean_prompt(negative_prompt):
            found.append(f"their negative prompt is {self.negative[0]!r}, not {negative_prompt!r}")
        return found

    def prompt(self, text: str) -> TextEmbeddings:
        """Return the embeddings of a prompt, which is cleaned before it is compared, as it is before it is encoded.

        Raises:
            KeyError: if it is not among them.
        """
        return {clean_prompt(prompt): embeds for prompt, embeds in self.prompts.items()}[clean_prompt(text)]

    def rows(self) -> dict[str, TextEmbeddings]:
        """Return the embeddings by the names that they have in the file."""
        rows = {str(i): embeds for i, embeds in enumerate(self.prompts.values())}
        return rows if self.negative is None else {**rows, _NEGATIVE: self.negative[1]}


@dataclass(frozen=True)
class EmbedsFile:
    """What a file of embeddings holds.

    Attributes:
        path: the file.
        texts: prompts and negative prompt.
        model: folder or Hub id of the checkpoint whose text encoders made them.
        revision: its commit; None where it was not known.
        dtype: what the text encoder was kept in, such as "bfloat16" or "nf4".
        package: the version of this package that wrote the file.
    """

    path: Path
    texts: EncodedTexts
    model: str
    revision: str | None
    dtype: str
    package: str


def save_embeds(
    path: str | os.PathLike,
    texts: EncodedTexts,
    *,
    model: str,
    revision: str | None = None,
    dtype: str,
    overwrite: bool = False,
) -> Path:
    """Write embeddings to a safetensors file, which appears under its name when it is complete.

    The tensors keep their dtype; padding behind a prompt's last token is left out.

    Args:
        path: the file.
        texts: prompts and negative prompt with their embeddings.
        model: where the text encoders come from.
        revision: their commit, where it is known.
        dtype: what the text encoder was kept in.
        overwrite: replace an existing file.

    Raises:
        ValueError: if there is no prompt, a shape is not that of one row, or embeddings are not finite.
        OSError: of `complete_file`, such as FileExistsError.
    """
    from safetensors.torch import save_file

    path = Path(path)
    rows = texts.rows()
    problems = ["there is no prompt"] if not texts.prompts else _row_problems(rows)
    if problems:
        raise EmbedsError(f"these embeddings cannot be saved to {path}: " + "; ".join(problems))
    tensors = {
        f"{name}.{part}": getattr(row, part).detach().contiguous()
        for name, embeds in rows.items()
        for row in [for_transformer(embeds, 1, "cpu", embeds.prompt_embeds.dtype)]
        for part in _TENSORS
    }
    metadata = {
        "kind": KIND,
        "version": VERSION,
        "prompts": list(texts.prompts),
        "negative_prompt": None if texts.negative is None else texts.negative[0],
        "model": model,
        "revision": revision,
        "dtype": dtype,
        "package": version("kandinsky5-nabla"),
    }
    with complete_file(path, overwrite=overwrite) as temporary:
        save_file(tensors, temporary, metadata={name: json.dumps(value) for name, value in metadata.items()})
    return path


def load_embeds(path: str | os.PathLike) -> EmbedsFile:
    """Return what `save_embeds` wrote, on the CPU.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is cut short, damaged, of another kind or of another version of the format; the message
            names the file and what is wrong with it.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise NotFoundError(f"there is no file of embeddings {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = _metadata(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is not iterable)
    except (SafetensorError, OSError) as error:
        raise EmbedsError(f"{path} is cut short or damaged, or holds no embeddings: {error}") from error
    texts = _texts(path, metadata, tensors)
    return EmbedsFile(path, texts, *(metadata[name] for name in ("model", "revision", "dtype", "package")))


def check_fits(embeds: EmbedsFile, transformer_config: Mapping[str, Any]) -> None:
    """Refuse embeddings of other widths than a transformer reads.

    Args:
        embeds: as loaded.
        transformer_config: its `in_text_dim` and `in_text_dim2` are as published where they are left out.

    Raises:
        ValueError: if a width differs; the message has both.
    """
    row = next(iter(embeds.texts.rows().values()))
    found = (row.prompt_embeds.shape[-1], row.pooled.shape[-1])
    wanted = tuple(transformer_config.get(name, width) for name, width in PUBLISHED_WIDTHS.items())
    if found != wanted:
        raise EmbedsError(
            f"{embeds.path} has embeddings {found[0]} and {found[1]} wide, of {embeds.model}; this transformer reads "
            f"{wanted[0]} and {wanted[1]}: encode the prompts with its own text encoders"
        )


def _metadata(path: Path, written: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a file's metadata, each of the type that it must have."""
    values: dict[str, Any] = {}
    for name, text in written.items():
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = None  # another program's
    if values.get("kind") != KIND:
        raise EmbedsError(f"{path} holds no embeddings that were saved here; make such a file with --save-embeds")
    if values.get("version") != VERSION:
        raise EmbedsError(
            f"{path} has the format {values.get('version')!r} (of kandinsky5-nabla {values.get('package')}), this "
            f"version reads {VERSION}: encode the prompts again"
        )
    types = {"prompts": list, "negative_prompt": str | None, "model": str, "revision": str | None} | dict.fromkeys(
        ("dtype", "package"), str
    )
    wrong = [name for name, kind in types.items() if name not in values or not isinstance(values[name], kind)]
    prompts = values.get("prompts")
    if not wrong and not (prompts and all(isinstance(p, str) for p in prompts) and len({*prompts}) == len(prompts)):
        wrong = ["prompts"]
    if wrong:
        raise EmbedsError(
            f"{path} is damaged: its metadata has no readable {', '.join(wrong)}; encode the prompts again"
        )
    return values


def _texts(path: Path, metadata: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> EncodedTexts:
    """Return the texts of a file, once its tensors are what the metadata say."""
    prompts, negative = metadata["prompts"], metadata["negative_prompt"]
    names = [str(i) for i in range(len(prompts))] + ([] if negative is None else [_NEGATIVE])
    expected = {f"{name}.{part}" for name in names for part in _TENSORS}
    problems = [f"{name} is missing" for name in sorted(expected - tensors.keys())]
    problems += [f"{name} is unexpected" for name in sorted(tensors.keys() - expected)]
    rows = {}
    if not problems:
        rows = {name: TextEmbeddings(*(tensors[f"{name}.{part}"] for part in _TENSORS)) for name in names}
        problems = _row_problems(rows)
    if problems:
        raise EmbedsError(f"{path} is damaged: {'; '.join(problems)}; encode the prompts again")
    by_prompt = {prompt: rows[str(i)] for i, prompt in enumerate(prompts)}
    return EncodedTexts(by_prompt, None if negative is None else (negative, rows[_NEGATIVE]))


def _row_problems(rows: Mapping[str, TextEmbeddings]) -> list[str]:
    """Return what is wrong with the tensors, by the names of their rows."""
    problems = [f"{name}: {problem}" for name, row in rows.items() for problem in [_row_problem(row)] if problem]
    widths = {(row.prompt_embeds.shape[-1], row.pooled.shape[-1]) for row in rows.values()}
    if not problems and len(widths) > 1:
        problems.append(f"the prompts have embeddings of different widths, {sorted(widths)}")
    return problems


def _row_problem(row: TextEmbeddings) -> str | None:
    """Return what is wrong with the embeddings of one prompt."""
    embeds, mask, pooled = row.prompt_embeds, row.mask, row.pooled
    shapes = [tuple(tensor.shape) for tensor in (embeds, mask, pooled)]
    if [len(shape) for shape in shapes] != [3, 2, 2] or shapes[1] != shapes[0][:2] or {s[0] for s in shapes} != {1}:
        return f"shapes {shapes[0]}, {shapes[1]}, {shapes[2]}; must be (1, L, D), (1, L), (1, D2)"
    if mask.dtype != torch.bool or not embeds.is_floating_point() or not pooled.is_floating_point():
        return f"dtypes {embeds.dtype}, {mask.dtype}, {pooled.dtype}; must be floating point, bool, floating point"
    if not mask.any():
        return "no real token"
    if not (torch.isfinite(embeds[mask]).all() and torch.isfinite(pooled).all()):
        return "NaN or infinity; a text encoder in float16 can overflow, keep it in bfloat16 or float32"
    return None
