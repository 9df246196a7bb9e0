"""The language model of Qwen2.5-VL alone: its vision tower and output head are neither built nor read."""

from os import PathLike
from typing import Any

from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,  # noqa: F401 (diffusers looks up a component's base class in the component's module)
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
)

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
        use_safetensors: bool | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load strictly, from safetensors only; the other arguments are transformers' own.

        `Qwen2_5_VLForConditionalGeneration` was saved with the keys `model.language_model.*` or, by other
        versions of transformers, `model.*`; both are read, and so is what this class saves.

        Raises:
            ValueError: the config is not one of Qwen2.5-VL; use_safetensors is False; a parameter is missing
                from the files, has another shape, or is not in the model.
        """
        if use_safetensors is False:
            raise ValueError("use_safetensors=False: only safetensors files are read, leave the argument out")
        text_config = _text_config(config or pretrained_model_name_or_path, kwargs)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            config=text_config,
            use_safetensors=True,
            key_mapping=_KEY_MAPPING,
            # Shapes are judged below, together with the names, so that the error names every parameter.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **kwargs,
        )
        model, info = loaded
        _refuse_what_does_not_fit(info, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model


def _text_config(source: PreTrainedConfig | str | PathLike, kwargs: dict[str, Any]) -> Qwen2_5_VLTextConfig:
    """Return the language model's part of a config, which published files nest or keep flat."""
    if not isinstance(source, PreTrainedConfig):
        hub_kwargs = {name: kwargs[name] for name in _CONFIG_KWARGS if name in kwargs}
        source = AutoConfig.from_pretrained(source, trust_remote_code=False, **hub_kwargs)
    text_config = source.get_text_config()
    if not isinstance(text_config, Qwen2_5_VLTextConfig):
        raise ValueError(f"the text encoder's config is of type {source.model_type!r}; qwen2_5_vl is needed")
    return text_config


def _refuse_what_does_not_fit(info: dict[str, Any], source: str | PathLike) -> None:
    """Raise a ValueError that names every parameter that transformers would only have warned about."""
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} has the shape {list(found)}, the config asks for {list(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    problems += [f"{name} is not in the model" for name in sorted(info["unexpected_keys"])]
    if problems:
        raise ValueError(f"the text encoder in {source} does not fit its config: " + "; ".join(problems))
