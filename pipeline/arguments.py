"""What `Kandinsky5NablaPipeline` is built from and loaded with, checked before anything is read or fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo, SchedulerMixin
from diffusers.quantizers import PipelineQuantizationConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configs import load_preset
from ..configs.arguments import check_names, checked_path
from ..configs.errors import ArgumentError, DeviceError
from ..models.loading import IMPLIED_ARGUMENTS, checked_dtype
from ..models.transformer import Kandinsky5Transformer
from .components import LOADERS

PART_CLASSES: dict[str, type] = {
    "transformer": Kandinsky5Transformer,
    "vae": AutoencoderKLHunyuanVideo,
    "text_encoder": PreTrainedModel,
    "tokenizer": PreTrainedTokenizerBase,
    "text_encoder_2": PreTrainedModel,
    "tokenizer_2": PreTrainedTokenizerBase,
    "scheduler": SchedulerMixin,
}

HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only")

HANDED_ON = (
    "device_map",
    "max_memory",
    "offload_folder",
    "offload_state_dict",
    "low_cpu_mem_usage",
    "quantization_config",
    "use_flashpack",
    "disable_mmap",
)
"""What `DiffusionPipeline.from_pretrained` reads of a folder. It takes any keyword, and only logs those it ignores."""

FIXED: dict[str, Any] = {
    "custom_pipeline": None,
    "custom_revision": None,
    "trust_remote_code": False,
    "use_safetensors": True,
    "variant": None,
    "use_onnx": False,
    "force_download": False,
    "proxies": None,
    "mirror": None,
    "output_loading_info": False,
    "load_connected_pipeline": False,
}
"""Arguments of diffusers that are taken with the value that asks for what is done here anyway."""


def check_parts(parts: Mapping[str, object]) -> None:
    """Raise an ArgumentError for a part of a class that no pipeline can run; all but the VAE may be None."""
    for name, part in parts.items():
        wanted = PART_CLASSES[name]
        if part is None and name != "vae":
            continue
        if not isinstance(getattr(part, "_orig_mod", part), wanted):  # torch.compile keeps the module there
            none = "" if name == "vae" else " or None"
            raise ArgumentError(f"{name}: must be a {wanted.__name__}{none}, not {type(part).__name__}")


def loader_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Hub's arguments, and diffusers', of those that `from_pretrained` was given.

    Raises:
        ValueError: if one is unknown (with the nearest), or has a value that cannot be honoured.
    """
    known = ("torch_dtype", "dtype", "preset", *LOADERS, *HUB_ARGUMENTS, *HANDED_ON, *FIXED)
    check_names("from_pretrained", given, known)
    for name, only in FIXED.items():
        if given.get(name) not in (None, only):
            raise ArgumentError(
                f"from_pretrained: {name}={given[name]!r}: only {name}={only} is supported: safetensors files and "
                "settings of a folder or the Hub, no code"
            )
    _check_values(given)
    check_parts({name: given[name] for name in LOADERS if name in given})
    rest = {name: value for name, value in given.items() if name in ("preset", *LOADERS, *HANDED_ON)}
    dtypes = _dtypes(given.get("dtype"), given.get("torch_dtype"))
    return {name: given.get(name) for name in HUB_ARGUMENTS}, rest | {"dtype": dtypes}


def _check_values(given: Mapping[str, Any]) -> None:
    if given.get("cache_dir") is not None:
        checked_path("cache_dir", given["cache_dir"])
    if not isinstance(revision := given.get("revision"), str | None):
        raise ArgumentError(f"revision {revision!r}: must be the name of a branch, a tag or a commit's hash")
    if given.get("preset") is not None:
        load_preset(given["preset"])
    quantization = given.get("quantization_config")
    if not isinstance(quantization, PipelineQuantizationConfig | None):
        found = type(quantization).__name__
        raise ArgumentError(f"quantization_config: must be diffusers' PipelineQuantizationConfig, not {found}")
    for name in HANDED_ON if "transformer" not in given else ():  # whose loader would say so after the text encoders
        allowed = IMPLIED_ARGUMENTS[name]
        if name != "quantization_config" and given.get(name) not in (None, *allowed):
            rule = " or ".join(map(repr, allowed))
            raise ArgumentError(f"from_pretrained: {name}={given[name]!r}: only {rule} is supported")


def _dtypes(dtype: Any, torch_dtype: Any) -> dict[str, torch.dtype]:
    """Return the dtypes by part, as diffusers takes them, of the newer and the older argument."""
    if dtype is not None and torch_dtype not in (None, dtype):
        raise ArgumentError(f"from_pretrained: dtype={dtype} and torch_dtype={torch_dtype}: give one of them")
    given = torch_dtype if dtype is None else dtype
    if not isinstance(given, dict):
        return {"default": checked_dtype(given), "vae": torch.float32}
    check_names("from_pretrained(torch_dtype={...})", given, ("default", *LOADERS))
    return {name: checked_dtype(value) for name, value in given.items()}


def check_device(device: Any) -> None:
    """Raise a DeviceError unless torch can put a tensor there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: torch was built without it
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise DeviceError(f"device {device!r}: cannot be used here ({reason}); 'cpu' works") from error
