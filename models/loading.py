"""Strict loading of the transformer's weights from safetensors: checked on headers, built on meta, read once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..configs.arguments import folder_or_hub_id
from ..configs.errors import ArgumentError, CheckpointError, DtypeError
from .headers import TensorHeader, differences, impossible_counts, open_weights, read_headers, weight_files

if TYPE_CHECKING:
    from .transformer import Kandinsky5Transformer

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
    dtype = checked_dtype(torch_dtype)
    folder = _local_folder(source, subfolder, **kwargs)
    config = read_config(folder / "config.json", cls)
    model = _load(cls, config, weight_files(folder), dtype, str(folder))
    model.register_to_config(_name_or_path=str(source))
    return model


def load_single_transformer(
    file: Path, config: Mapping[str, Any], torch_dtype: torch.dtype | None
) -> Kandinsky5Transformer:
    """Load a transformer from one safetensors file of the original layout, as strictly as a folder.

    Args:
        file: holds all tensors, under the names of the Diffusers layout.
        config: of the transformer, as `architecture.config_from_headers` returns it.
        torch_dtype: dtype of the weights, fp32 if None; the parts that numerics.md lists stay fp32.

    Raises:
        ValueError: if the file is damaged, or its tensors are not those of the config; nothing is read before.
    """
    from .transformer import Kandinsky5Transformer

    model = _load(Kandinsky5Transformer, config, [file], checked_dtype(torch_dtype), str(file))
    model.register_to_config(_name_or_path=str(file))
    return model


def build_on_meta(
    cls: type[Kandinsky5Transformer],
    config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    source: str,
) -> Kandinsky5Transformer:
    """Return the model without memory for its weights, if its tensors are those of the headers.

    `source` is what an error calls the files.

    Raises:
        ValueError: if the config cannot be built, or a tensor is missing, unexpected, of another shape or not
            floating point; a message about a shape has both.
    """
    if problems := impossible_counts(config, headers):
        raise CheckpointError(f"the weights in {source} do not fit their config: " + "; ".join(problems))
    try:
        with torch.device("meta"):
            model = cls(**config)
    except (TypeError, RuntimeError, OverflowError) as error:  # a size that is no number, or is beyond any
        raise CheckpointError(f"the config of {source} cannot be built: {error}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if problems := differences(expected, headers):
        shown = "; ".join(problems[:5])
        raise CheckpointError(f"the weights in {source} do not fit their config in {len(problems)} tensors: {shown}")
    return model


def checked_dtype(torch_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that weights are loaded in, fp32 if None.

    Raises:
        ValueError: if it is not one of `DTYPES`.
    """
    dtype = torch.float32 if torch_dtype is None else torch_dtype
    if dtype not in DTYPES:
        raise DtypeError(f"torch_dtype {dtype!r}: {', '.join(map(str, DTYPES))} are supported")
    return dtype


def read_config(path: Path, cls: type[Kandinsky5Transformer]) -> dict[str, Any]:
    """Return the config as keyword arguments of `cls`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it has a key that `cls` does not know: the weights may mean something else than we compute.
    """
    config = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if not key.startswith("_")}
    unknown = sorted(set(config) - cls._get_init_keys(cls))
    if unknown:
        raise CheckpointError(
            f"{path}: unknown keys {', '.join(unknown)}; this is no config of a Kandinsky 5 transformer"
        )
    return config


def _load(
    cls: type[Kandinsky5Transformer], config: Mapping[str, Any], files: list[Path], dtype: torch.dtype, source: str
) -> Kandinsky5Transformer:
    model = build_on_meta(cls, config, read_headers(files), source)
    tensors = {}
    for file in files:
        with open_weights(file) as weights:
            for name in weights.keys():  # noqa: SIM118  (safe_open is not iterable)
                keep = any(part in name for part in cls._keep_in_fp32_modules)
                tensors[name] = weights.get_tensor(name).to(torch.float32 if keep else dtype)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


def _local_folder(source: str | os.PathLike, subfolder: str | None, **kwargs: Any) -> Path:
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    for name, value in kwargs.items():
        if name not in IMPLIED_ARGUMENTS or value not in IMPLIED_ARGUMENTS[name]:
            known = IMPLIED_ARGUMENTS.get(name)
            rule = f"only {' or '.join(map(repr, known))} is supported" if known else "no such argument"
            raise ArgumentError(f"Kandinsky5Transformer.from_pretrained: {name}={value!r}: {rule}")
    source = folder_or_hub_id(source)
    if not os.path.isdir(source):
        from huggingface_hub import snapshot_download

        prefix = f"{subfolder}/" if subfolder else ""
        parts = [prefix + name for name in ("config.json", "*.safetensors", "*.safetensors.index.json")]
        source = snapshot_download(source, allow_patterns=parts, **hub)
    return Path(source) / subfolder if subfolder else Path(source)
