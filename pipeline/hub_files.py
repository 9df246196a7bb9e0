"""Which files of a repository are needed, and whether they are whole. Nothing here talks to the Hub."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from ..configs.errors import ArgumentError, CheckpointError
from ..models.headers import DIFFUSERS_WEIGHTS, TRANSFORMERS_WEIGHTS, read_headers, weight_files

MODEL_INDEX = "model_index.json"


@dataclass(frozen=True)
class Part:
    """What is needed of one folder of a repository.

    Attributes:
        files: names of small files, all of them needed; or patterns, of which one file at least has to be there.
        weights: the safetensors file, which may come as shards beside an index; None for a part without weights.
    """

    files: tuple[str, ...]
    weights: str | None = None


_MODEL = Part(("config.json",), DIFFUSERS_WEIGHTS)
_TEXT_ENCODER = Part(("config.json",), TRANSFORMERS_WEIGHTS)
_TOKENIZER = Part(("*.json", "*.txt"))

PARTS: dict[str, Part] = {
    "": Part((MODEL_INDEX,)),
    "transformer": _MODEL,
    "vae": _MODEL,
    "text_encoder": _TEXT_ENCODER,
    "text_encoder_2": _TEXT_ENCODER,
    "tokenizer": _TOKENIZER,
    "tokenizer_2": _TOKENIZER,
    "scheduler": Part(("scheduler_config.json",)),
}
"""The Diffusers layout by folder. Nothing else is fetched: no other format or precision of the weights, no pictures.

A part that model_index.json names with null, or not at all, is not needed.
"""


def needed_files(
    folder: Path, names: Collection[str], parts: Mapping[str, Part], files: Sequence[str] = ()
) -> list[str]:
    """Return the names of the files that are needed, as far as model_index.json and the indexes in `folder` tell.

    Args:
        folder: where a commit's files lie, as far as they are there.
        names: all that the commit has. What is needed and not among them is returned as well.
        parts: what is needed of which folder; "" is the repository's root.
        files: names that are needed beside the parts.

    Raises:
        ValueError: if model_index.json or an index is damaged; the message names the file.
    """
    needed = list(files)
    for directory, part in _used_parts(folder, parts).items():
        beside = [path.name for path in map(PurePosixPath, names) if str(path.parent) == (directory or ".")]
        found = [name for name in beside if any(fnmatchcase(name, pattern) for pattern in part.files)]
        here = found + [file for file in part.files if file not in found and not ("*" in file and found)]
        if part.weights is not None:
            here += _weights_of(folder / directory, beside, part.weights)
        needed += [f"{directory}/{name}" if directory else name for name in here]
    return list(dict.fromkeys(needed))


def check_repo_id(repo_id: str) -> None:
    """Raise an ArgumentError for what cannot be the id of a repository."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ArgumentError(str(error)) from error


def is_weights(name: str) -> bool:
    """Whether it is a file of weights."""
    return name.endswith(".safetensors")


def wrong_sizes(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return what is wrong with the files that have not the given number of bytes."""
    found = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in sizes}
    return {
        name: f"has {size} bytes, the Hub records {sizes[name]}" for name, size in found.items() if size != sizes[name]
    }


def require_whole_weights(folder: Path, parts: Mapping[str, Part], files: Sequence[str] = ()) -> None:
    """Read the headers of all weights; arguments as of `needed_files`.

    Raises:
        FileNotFoundError: if a shard that an index names is missing.
        ValueError: if a file is cut short or damaged; the message names it.
    """
    for name in filter(is_weights, files):
        read_headers([folder / name])
    for directory, part in _used_parts(folder, parts).items():
        if part.weights is not None:
            read_headers(weight_files(folder / directory, part.weights))


def remove_cached(path: Path) -> None:
    """Remove a cached file and all that its links lead to: the client links a blob that it finds, whatever it holds."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


def hash_file(path: Path, digest: Any) -> str:
    """Return the hex digest of a file, with `digest` an object of hashlib."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _used_parts(folder: Path, parts: Mapping[str, Part]) -> Mapping[str, Part]:
    if "" not in parts or MODEL_INDEX not in parts[""].files or not (folder / MODEL_INDEX).is_file():
        return parts
    index = _read_json(folder / MODEL_INDEX)
    named = {name for name, classes in index.items() if isinstance(classes, list) and any(classes)}
    return {directory: part for directory, part in parts.items() if directory in named or not directory}


def _weights_of(folder: Path, beside: Collection[str], weights: str) -> list[str]:
    """Return the single file where there is one, as `weight_files` does, or the index with its shards."""
    index = f"{weights}.index.json"
    if weights in beside or index not in beside:
        return [weights]
    if not (folder / index).is_file():
        return [index]
    shards = _read_json(folder / index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError(f"{folder / index} has no weight_map from tensors to shards")
    return [index, *sorted(set(shards.values()))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content
