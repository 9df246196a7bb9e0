"""Strict loading of the transformer's weights from safetensors: checked on headers, built on meta, read once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from .transformer import Kandinsky5Transformer

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = WEIGHTS + ".index.json"

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")

IMPLIED_ARGUMENTS = {
    "device_map": (None,),
    "max_memory": (None,),
    "offload_folder": (None,),
    "offload_state_dict": (None, False),
    "variant": (None,),
    "use_safetensors": (None, True),
    "use_flashpack": (None, False),
    "disable_mmap": (None, False),
    "low_cpu_mem_usage": (None, True),
    "quantization_config": (None,),
}
"""Arguments that diffusers passes to every model, with the values that ask for what is done here anyway."""


def load_transformer(
    cls: type[Kandinsky5Transformer],
    source: str | os.PathLike,
    torch_dtype: torch.dtype | None,
    subfolder: str | None,
    **kwargs: Any,
) -> Kandinsky5Transformer:
    """Load a transformer; see `Kandinsky5Transformer.from_pretrained`."""
    dtype = torch.float32 if torch_dtype is None else torch_dtype
    if dtype not in DTYPES:
        raise ValueError(f"torch_dtype {dtype!r}: {', '.join(map(str, DTYPES))} are supported")
    folder = _local_folder(source, subfolder, **kwargs)
    config = read_config(folder / "config.json", cls)
    files = weight_files(folder)
    with torch.device("meta"):
        model = cls(**config)
    _check_names_and_shapes(model, files, folder)
    tensors = {}
    for file in files:
        with _open(file) as weights:
            for name in weights.keys():  # noqa: SIM118  (safe_open is not iterable)
                keep = any(part in name for part in cls._keep_in_fp32_modules)
                tensors[name] = weights.get_tensor(name).to(torch.float32 if keep else dtype)
    model.load_state_dict(tensors, strict=True, assign=True)
    model.register_to_config(_name_or_path=str(source))
    return model.eval()


def read_config(path: Path, cls: type[Kandinsky5Transformer]) -> dict[str, Any]:
    """Return the config as keyword arguments of `cls`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it has a key that `cls` does not know: the weights may mean something else than we compute.
    """
    config = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("_")}
    unknown = sorted(set(config) - cls._get_init_keys(cls))
    if unknown:
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}; this is no config of a Kandinsky 5 transformer")
    return config


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: the single one, or the shards that the index names.

    Raises:
        FileNotFoundError: if there are no weights or a shard is missing; the message names the file.
        ValueError: if the index is not one, or names a file outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    weight_map = json.loads((folder / INDEX).read_text()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to shards")
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ValueError(f"{folder / INDEX} names {', '.join(outside)}; shards lie beside their index")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder / INDEX} names shards that are missing: {', '.join(missing)}")
    return [folder / shard for shard in shards]


def _check_names_and_shapes(model: torch.nn.Module, files: list[Path], folder: Path) -> None:
    """Compare the files' headers with the model on meta; no tensor is read yet."""
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for file in files:
        with _open(file) as weights:
            for name in weights.keys():  # noqa: SIM118
                tensor = weights.get_slice(name)
                found[name] = tuple(tensor.get_shape())
                if "F" not in tensor.get_dtype():  # F32, BF16, F8_E4M3; an I8 needs scales that we do not know
                    problems.append(f"{name} is {tensor.get_dtype()}, not floating point")
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems += [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {list(found[name])}, the config asks for {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        raise ValueError(f"the weights in {folder} do not fit its config.json in {len(problems)} tensors: {shown}")


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a safetensors file, whose errors do not name it."""
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except SafetensorError as error:
        raise ValueError(f"{file} is cut short or damaged: {error}; download it again") from error


def _local_folder(source: str | os.PathLike, subfolder: str | None, **kwargs: Any) -> Path:
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    for name, value in kwargs.items():
        if name not in IMPLIED_ARGUMENTS or value not in IMPLIED_ARGUMENTS[name]:
            known = IMPLIED_ARGUMENTS.get(name)
            rule = f"only {' or '.join(map(repr, known))} is supported" if known else "no such argument"
            raise ValueError(f"Kandinsky5Transformer.from_pretrained: {name}={value!r}: {rule}")
    if not os.path.isdir(source):
        from huggingface_hub import snapshot_download

        prefix = f"{subfolder}/" if subfolder else ""
        parts = [prefix + name for name in ("config.json", "*.safetensors", "*.safetensors.index.json")]
        source = snapshot_download(str(source), allow_patterns=parts, **hub)
    return Path(source) / subfolder if subfolder else Path(source)
