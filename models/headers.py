"""The headers of safetensors files: names, shapes and sizes of tensors, none of which is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..configs.errors import CheckpointError, NotFoundError

_LFS_POINTER = b"version https://git-lfs"

DIFFUSERS_WEIGHTS = "diffusion_pytorch_model.safetensors"
TRANSFORMERS_WEIGHTS = "model.safetensors"

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32}
_BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16}  # everything else has 8

_COUNTS = ("num_text_blocks", "num_visual_blocks", "num_hidden_layers", "layers_per_block", "depth")
"""Config keys that say how often something is built; to build it 10**9 times, if only on meta, takes for ever."""


@dataclass(frozen=True)
class TensorHeader:
    """What a file says of one of its tensors.

    Attributes:
        file: where it lies.
        dtype: as safetensors calls it, such as "BF16" or "F8_E4M3".
        shape: of the tensor.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * _BITS.get(self.dtype, 8) // 8

    @property
    def floating(self) -> bool:
        """Whether the numbers stand for themselves; integers need scales that we do not know."""
        return "F" in self.dtype  # F32, BF16, F8_E4M3


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of some files, by name.

    Raises:
        ValueError: if a file is cut short or damaged, or two files hold the same name; the message names the file.
    """
    headers: dict[str, TensorHeader] = {}
    for file in files:
        with _open(file, "np") as weights:  # numpy: needs no torch, and maps a file of any size read-only
            for name in weights.keys():  # noqa: SIM118  (safe_open is not iterable)
                if name in headers:
                    raise CheckpointError(f"{name} is in {headers[name].file} and in {file}")
                tensor = weights.get_slice(name)
                headers[name] = TensorHeader(file, tensor.get_dtype(), tuple(tensor.get_shape()))
    return headers


def weight_files(folder: Path, weights: str = DIFFUSERS_WEIGHTS) -> list[Path]:
    """Return the safetensors files of a part's folder: the single one, or the shards that the index names.

    Raises:
        FileNotFoundError: if there are no weights or a shard is missing; the message names the file.
        ValueError: if the index is not one, or names a file outside the folder.
    """
    index = folder / f"{weights}.index.json"
    if (folder / weights).is_file():
        return [folder / weights]
    if not index.is_file():
        raise NotFoundError(f"{folder} has neither {weights} nor {index.name}")
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to shards")
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{index} names {', '.join(outside)}; shards lie beside their index")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise NotFoundError(f"{index} names shards that are missing: {', '.join(missing)}")
    return [folder / shard for shard in shards]


def differences(expected: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorHeader]) -> list[str]:
    """Return a sentence for each tensor that is missing, unexpected, of another shape, or not floating point."""
    problems = [
        f"{name} is {header.dtype}, not floating point" for name, header in headers.items() if not header.floating
    ]
    problems += [f"{name} is missing" for name in expected.keys() - headers.keys()]
    problems += [f"{name} is unexpected" for name in headers.keys() - expected.keys()]
    problems += [
        f"{name} has shape {list(headers[name].shape)}, the config asks for {list(expected[name])}"
        for name in expected.keys() & headers.keys()
        if headers[name].shape != tuple(expected[name])
    ]
    return sorted(problems)


def impossible_counts(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> list[str]:
    """Return a sentence for each number of layers in a config that is above the number of tensors in its files.

    They are to be refused before the model is built, on meta too.
    """
    counts = {key: config[key] for key in _COUNTS if isinstance(config.get(key), int)}
    return [
        f"{key} is {count}, and the files hold {len(headers)} tensors"
        for key, count in counts.items()
        if count > len(headers)
    ]


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a safetensors file, whose errors do not name it, to read torch tensors.

    Raises:
        ValueError: if the file is cut short or damaged.
    """
    with _open(file, "pt") as weights:
        yield weights


@contextmanager
def _open(file: Path, framework: str) -> Iterator[Any]:
    try:
        with safe_open(file, framework=framework) as weights:
            yield weights
    except SafetensorError as error:
        with file.open("rb") as content:
            if content.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(f"{file} only points to the weights; `git lfs pull` fetches them") from error
        raise CheckpointError(f"{file} is cut short or damaged: {error}; download it again") from error
