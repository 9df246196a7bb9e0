"""The language model of Qwen2.5-VL alone: its vision tower and output head are neither built nor read."""

import copy
import math
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,  # noqa: F401 (diffusers looks up a component's base class in the component's module)
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
)
from transformers.quantizers.auto import AutoQuantizationConfig

from ..configs.errors import ArgumentError, CheckpointError, DtypeError

# transformers strips or adds the base prefix "model." by itself; the newer layout nests one level deeper.
_KEY_MAPPING = {r"^model\.language_model\.": ""}
_CONFIG_KWARGS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


class QwenTextEncoder(Qwen2_5_VLTextModel):
    """Qwen2.5-VL's language model, loaded from a checkpoint of the whole Qwen2.5-VL or from its own.

    `forward(input_ids [B, L])` gives `last_hidden_state [B, L, D]`, after the final norm.
    """

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?visual\.", r"^lm_head\."]  # noqa: RUF012 (base class type)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *model_args: Any,
        config: PreTrainedConfig | str | PathLike | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        use_safetensors: bool | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load strictly, from safetensors only; the other arguments are transformers' own.

        `Qwen2_5_VLForConditionalGeneration` was saved with the keys `model.language_model.*` or, by other
        versions of transformers, `model.*`; both are read, and so is what this class saves.

        With a `quantization_config` (`pipeline.precision` makes it) the weights of the Linear layers are quantised
        while they are read; the embedding table, the norms and the biases keep the dtype that is asked for. Files
        that bitsandbytes has quantised before load without one.

        Raises:
            ValueError: the config is not one of Qwen2.5-VL; use_safetensors is False; a parameter is missing
                from the files, has another shape, or is not in the model; the files are quantised in another way
                than is asked for, or not by bitsandbytes.
        """
        if use_safetensors is False:
            raise ArgumentError("use_safetensors=False: only safetensors files are read, leave the argument out")
        text_config = _text_config(config or pretrained_model_name_or_path, kwargs)
        _check_quantization(text_config, quantization_config, pretrained_model_name_or_path)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            config=text_config,
            quantization_config=quantization_config,
            use_safetensors=True,
            key_mapping=_KEY_MAPPING,
            # Shapes are judged below, together with the names, so that the error names every parameter.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **kwargs,
        )
        model, info = loaded
        _refuse_what_does_not_fit(model, info, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model


def _text_config(source: PreTrainedConfig | str | PathLike, kwargs: dict[str, Any]) -> Qwen2_5_VLTextConfig:
    """Return the language model's part of a config, which published files nest or keep flat."""
    if not isinstance(source, PreTrainedConfig):
        hub_kwargs = {name: kwargs[name] for name in _CONFIG_KWARGS if name in kwargs}
        source = AutoConfig.from_pretrained(source, trust_remote_code=False, **hub_kwargs)
    text_config = source.get_text_config()
    if not isinstance(text_config, Qwen2_5_VLTextConfig):
        raise CheckpointError(f"the text encoder's config is of type {source.model_type!r}; qwen2_5_vl is needed")
    if text_config is not source and hasattr(source, "quantization_config"):
        text_config = copy.deepcopy(text_config)  # the config of the whole says how its parts are stored
        text_config.quantization_config = source.quantization_config
    return text_config


def _check_quantization(
    text_config: Qwen2_5_VLTextConfig, asked: BitsAndBytesConfig | None, source: str | PathLike
) -> None:
    """Refuse what transformers would only warn of: for quantised files it does not heed what is asked for."""
    stored = getattr(text_config, "quantization_config", None)
    if stored is None:
        return
    if isinstance(stored, dict):
        stored = AutoQuantizationConfig.from_dict(stored)
    if not isinstance(stored, BitsAndBytesConfig):
        raise CheckpointError(
            f"the text encoder in {source} is quantised by {stored.quant_method.value}: only bitsandbytes' int8 and "
            "nf4 are read, and weights that are not quantised"
        )
    if asked is not None and asked.quantization_method() != stored.quantization_method():
        raise DtypeError(
            f"the text encoder in {source} is stored as {stored.quantization_method()} and cannot become "
            f"{asked.quantization_method()}: leave quantization_config out, or take weights that are not quantised"
        )


def _refuse_what_does_not_fit(model: Qwen2_5_VLTextModel, info: dict[str, Any], source: str | PathLike) -> None:
    """Raise a ValueError that names every parameter that transformers would only have warned about."""
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} has the shape {list(found)}, the config asks for {list(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    problems += [f"{name} is not in the model" for name in sorted(info["unexpected_keys"])]
    known = info["missing_keys"] | {name for name, _, _ in info["mismatched_keys"]}
    problems += [problem for name, problem in _quantisation_problems(model) if name not in known]
    if problems:
        raise CheckpointError(f"the text encoder in {source} does not fit its config: " + "; ".join(problems))


def _quantisation_problems(model: Qwen2_5_VLTextModel) -> Iterator[tuple[str, str]]:
    """Yield the names of weights that do not fit, and how: transformers compares no shapes of what it quantises.

    Scales are judged too, since the kernels read as many as the shape asks for, whatever there is.
    """
    for module, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        weight: Any = layer.weight  # of a class of bitsandbytes
        name, wanted = f"{module}.weight", [layer.out_features, layer.in_features]
        state = getattr(weight, "quant_state", None)  # of 4 bits: the weight itself is a column of packed bytes
        found = list(weight.shape if state is None else state.shape)
        if found != wanted:
            yield name, f"{name} has the shape {found}, the config asks for {wanted}"
        elif state is not None:
            sizes = weight.nbytes, state.absmax.numel()
            expected = math.ceil(math.prod(wanted) / 2), math.ceil(math.prod(wanted) / state.blocksize)
            if sizes != expected:
                yield name, f"{name} has {sizes[0]} bytes and {sizes[1]} scales, not {expected[0]} and {expected[1]}"
        elif hasattr(weight, "SCB"):
            scales = 0 if weight.SCB is None else weight.SCB.numel()
            if weight.dtype != torch.int8 or scales != layer.out_features:
                yield name, f"{name} is {weight.dtype} with {scales} scales, not int8 with {layer.out_features}"
