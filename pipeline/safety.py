"""What a checkpoint's folder may hold, found before anything of it is loaded.

`check_folder` reads JSON and the headers of safetensors files; it needs no torch, so that a command line can ask it at
once. `check_weights` builds the parts without memory (on meta) and compares their tensors with the files'.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..configs.errors import CheckpointError
from ..models.headers import (
    DIFFUSERS_WEIGHTS,
    TRANSFORMERS_WEIGHTS,
    TensorHeader,
    differences,
    impossible_counts,
    read_headers,
    weight_files,
)
from .components import LOADERS, to_loaders

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

WEIGHTS = {
    "transformer": DIFFUSERS_WEIGHTS,
    "vae": DIFFUSERS_WEIGHTS,
    "text_encoder": TRANSFORMERS_WEIGHTS,
    "text_encoder_2": TRANSFORMERS_WEIGHTS,
}
"""The parts that have weights, and the name of their file."""

TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
"""One of them a tokenizer must have: transformers builds an empty one from none, whose every prompt is nothing."""

_ENCODERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}
_PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_CODE = ("auto_map", "custom_code", "custom_pipeline", "trust_remote_code")
_QUANTISED = ("text_encoder", "tokenizer")  # which may share a folder
_VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")  # their keys are words, not settings

# What each part reads of its files, under other names, and what it leaves out: Qwen's eyes and mouth, CLIP's eyes.
_RENAMED = {"text_encoder": r"^model\.(language_model\.)?", "text_encoder_2": r"^text_model\."}
_LEFT_OUT = {
    "text_encoder": r"^(model\.)?visual\.|^lm_head\.",
    "text_encoder_2": r"^(vision_model|text_projection|visual_projection)\.|^logit_scale$|\bposition_ids$",
}

# part -> (key of its config.json, key of the transformer's that must be equal)
_WIDTHS = {
    "text_encoder": ("hidden_size", "in_text_dim"),
    "text_encoder_2": ("hidden_size", "in_text_dim2"),
    "vae": ("latent_channels", "out_visual_dim"),
}

# part -> (file, key, largest value) of a number above 0 that the pipeline reads, if the file has it
_NUMBERS = {
    "vae": ("config.json", "scaling_factor", math.inf),
    "scheduler": ("scheduler_config.json", "shift", math.inf),
    "transformer": ("config.json", "attention_P", 1.0),
}


def check_folder(folder: Path, without: Collection[str] = ()) -> list[str]:
    """Return why a folder in the Diffusers layout must not or cannot be loaded, one sentence each; reads no weights.

    Checked are the classes that model_index.json names, code that a config names, pickle files, missing or damaged
    files, and whether the parts are of one width. Symbolic links are followed: the Hub's cache is made of them.

    Args:
        folder: of the checkpoint.
        without: parts that are not loaded from it, such as those that the caller has already.
    """
    if not folder.is_dir():
        return [f"{folder} is no folder"]
    try:
        index = read_json(folder / "model_index.json")
    except ValueError as error:
        return [str(error)]
    problems = list(_code_problems(folder, ""))
    try:
        to_loaders(index)
    except ValueError as error:
        problems.append(f"{folder}: {error}")
    parts = _parts(index, without)
    for part in parts:
        problems += check_part(part, folder / part)
    configs = {part: _config_or_nothing(folder / part / "config.json") for part in parts if part in WEIGHTS}
    for tokenizer, encoder in _ENCODERS.items():
        if tokenizer in parts and (folder / tokenizer).is_dir():
            problems += _vocabulary_problems(folder / tokenizer, encoder, configs.get(encoder, {}))
    return problems + width_problems(configs.get("transformer", {}), configs)


def check_weights(folder: Path, without: Collection[str] = ()) -> list[str]:
    """Return where the tensors of a folder that passed `check_folder` are not those that its configs ask for.

    Only headers are read, and no memory is taken for weights; needs torch, diffusers and transformers.
    """
    parts = _parts(read_json(folder / "model_index.json"), without)
    return [problem for part in parts if part in WEIGHTS for problem in check_part_weights(part, folder / part)]


def require_loadable(folder: Path, without: Collection[str] = ()) -> None:
    """Raise one ValueError with all that `check_folder` finds or, if it finds nothing, `check_weights`."""
    problems = check_folder(folder, without) or check_weights(folder, without)
    if problems:
        raise CheckpointError("the checkpoint cannot be loaded: " + "; ".join(problems))


def check_part(part: str, folder: Path) -> list[str]:
    """Return what `check_folder` finds in the folder of one part."""
    if not folder.is_dir():
        return [f"{part}: the folder {folder} is missing"]
    problems = [*_code_problems(folder, part), *_number_problems(folder, part)]
    return problems + list(_file_problems(folder, WEIGHTS[part])) if part in WEIGHTS else problems


def check_part_weights(part: str, folder: Path) -> list[str]:
    """Return where the tensors of one part, whose folder passed `check_part`, are not those of its config.json."""
    import torch

    try:
        headers = read_headers(weight_files(folder, WEIGHTS[part]))
    except ValueError as error:  # two files hold the same name
        return [str(error)]
    config = folder / "config.json"
    if problems := [text for values in _objects(read_json(config)) for text in impossible_counts(values, headers)]:
        return [f"{config}: {problem}" for problem in problems]
    try:
        with torch.device("meta"):
            model = _build(part, folder)
    except Exception as error:  # the config is a stranger's, and three libraries read it
        return [f"{config} cannot be built: {error}"]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = _as_loaded(part, headers)
    if part == "text_encoder" and read_json(config).get("quantization_config"):
        expected, found = _without_linear_weights(model, expected), _without_linear_weights(model, found)
    problems = differences(expected, found)
    shown = "; ".join(problems[:5])
    return [f"the weights in {folder} do not fit their config in {len(problems)} tensors: {shown}"] if problems else []


def width_problems(transformer: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return where a part's config.json has another width than the transformer's; unknown numbers are no problem."""
    problems = []
    for part, (key, wanted_key) in _WIDTHS.items():
        width = _text_side(parts.get(part, {}), key)
        wanted = transformer.get(wanted_key)
        if None not in (width, wanted) and width != wanted:
            problems.append(f"{part} has {key} {width}, and the transformer has {wanted_key} {wanted}")
    return problems


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file that holds an object.

    Raises:
        ValueError: if it is missing, cannot be read or holds something else; the message names it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:  # not readable, no UTF-8, no JSON, too deep
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _parts(index: Mapping[str, Any], without: Collection[str]) -> list[str]:
    """Return the parts that the index names and that are to be loaded."""
    return [part for part in LOADERS if part not in without and isinstance(index.get(part), list) and any(index[part])]


def _text_side(config: Mapping[str, Any], key: str) -> Any:
    """Return a value of a config, or of the text's in the config of the whole Qwen2.5-VL or CLIP; None without it."""
    nested = config.get("text_config")
    return (nested if isinstance(nested, dict) and key in nested else config).get(key)


def _vocabulary_problems(folder: Path, encoder: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a tokenizer's words are none, or reach beyond the encoder's table of embeddings."""
    file = next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)
    if file is None:
        yield f"{folder} has neither {' nor '.join(TOKENIZER_FILES)}"
        return
    try:
        content = read_json(file)
    except ValueError as error:
        yield str(error)
        return
    words: Any = content
    if file.name == TOKENIZER_FILES[0]:
        words = content.get("model")
        words = words.get("vocab") if isinstance(words, dict) else None
    ids = list(words.values()) if isinstance(words, dict) else []
    if not ids or not all(type(number) is int for number in ids):
        yield f"{file} has no vocabulary, from words to numbers"
        return
    size = _text_side(config, "vocab_size")
    if isinstance(size, int) and max(ids) >= size:
        yield f"{file} has numbers up to {max(ids)}, and {encoder} knows {size} words: it is another model's tokenizer"


def _number_problems(folder: Path, part: str) -> Iterator[str]:
    """Yield why a number of a part's file is none; the VAE's would be asked for after all the work."""
    if part not in _NUMBERS:
        return
    name, key, largest = _NUMBERS[part]
    file = folder / name
    value = _config_or_nothing(file).get(key, 1.0)
    if value is None and key == "attention_P":  # of dense attention
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= largest or value == math.inf:
        most = "" if largest == math.inf else f" and at most {largest:g}"
        yield f"{file}: {key} {value!r} must be a number above 0{most}"


def _config_or_nothing(file: Path) -> dict[str, Any]:
    """Return a config; empty where `check_part` has reported it."""
    try:
        return read_json(file)
    except ValueError:
        return {}


def _code_problems(folder: Path, part: str) -> Iterator[str]:
    """Yield what the settings in a part's folder ask for besides data."""
    for path in sorted(folder.glob("*.json")):
        if path.name in _VOCABULARIES or path.name.endswith(".index.json"):
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            yield f"{path} cannot be read: {error}"
            continue
        if path.name.endswith("config.json") and not isinstance(content, dict):
            yield f"{path} must hold a JSON object, not a {type(content).__name__}"
        objects = list(_objects(content))
        for values in objects:
            yield from (f"{path}: {problem}" for problem in _setting_problems(values, part))
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        yield f"{adapter} would have the part loaded from wherever it says; remove it, a LoRA is loaded by its own name"


def _setting_problems(values: Mapping[str, Any], part: str) -> Iterator[str]:
    for key, value in values.items():
        if key in _CODE and value:
            yield f"{key} asks for code of the checkpoint, and only data is loaded; remove it"
        elif key == "quantization_config" and value and not (part in _QUANTISED and _by_bitsandbytes(value)):
            yield f"{key}: only {_QUANTISED[0]} may be quantised, by bitsandbytes; take weights that are not"
        elif key.lstrip("_") == "attn_implementation" and "/" in str(value):
            yield f"{key} {value!r} asks for code from the Hub; remove it"
        elif any(
            isinstance(text, str) and text.endswith(".py") for text in (value if isinstance(value, list) else [value])
        ):
            yield f"{key} {value!r} names a file of code, and only data is loaded; remove it"


def _by_bitsandbytes(value: Any) -> bool:
    return isinstance(value, dict) and value.get("quant_method") == "bitsandbytes"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value, however deep: without recursion."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _file_problems(folder: Path, weights: str) -> Iterator[str]:
    """Yield which files of a part with weights are missing, damaged or no data."""
    if not (folder / "config.json").is_file():
        yield f"{folder / 'config.json'} is missing"
    try:
        files = weight_files(folder, weights)
    except (FileNotFoundError, ValueError) as error:
        names = sorted(path.name for path in folder.iterdir())
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles and not any(name.endswith(".safetensors") for name in names):
            yield (
                f"{folder} has its weights as {', '.join(pickles)} alone, and a pickle file can run code when it is "
                f"read; save them as {weights}"
            )
        else:
            yield str(error)
        return
    for file in files:
        try:
            read_headers([file])
        except ValueError as error:
            yield str(error)


def _build(part: str, folder: Path) -> nn.Module:
    """Return a part as its config describes it, built on the device of the context."""
    if part == "transformer":
        from ..models.loading import read_config
        from ..models.transformer import Kandinsky5Transformer

        return Kandinsky5Transformer(**read_config(folder / "config.json", Kandinsky5Transformer))
    if part == "vae":
        from diffusers import AutoencoderKLHunyuanVideo

        vae: Any = AutoencoderKLHunyuanVideo.from_config(read_json(folder / "config.json"))
        return vae
    if part == "text_encoder_2":
        from transformers import CLIPTextConfig, CLIPTextModel

        return CLIPTextModel(CLIPTextConfig.from_pretrained(folder))
    from transformers import AutoConfig, Qwen2_5_VLTextConfig

    from ..models.text_encoder import QwenTextEncoder

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    if not isinstance(config, Qwen2_5_VLTextConfig):
        raise CheckpointError(f"it is of type {config.model_type!r}; qwen2_5_vl is needed")
    return QwenTextEncoder(config)


def _as_loaded(part: str, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers of the tensors that a part reads, under the names that it gives them."""
    if part not in _RENAMED:
        return dict(headers)
    read = {name: header for name, header in headers.items() if not re.search(_LEFT_OUT[part], name)}
    return {re.sub(_RENAMED[part], "", name): header for name, header in read.items()}


def _without_linear_weights(model: nn.Module, tensors: Mapping[str, T]) -> dict[str, T]:
    """Leave out what bitsandbytes stores packed, with its scales: `QwenTextEncoder` compares it when it is loaded."""
    from torch import nn

    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    packed = tuple(
        f"{name}.{stored}" for name in linear for stored in ("weight", "SCB")
    )  # weight.absmax, weight_format
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(packed)}
