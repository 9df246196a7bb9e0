"""The parts of a checkpoint: which classes its model_index.json may name, and which of ours or theirs load them.

Plain data, like `checks`: nothing is imported here. diffusers finds a class outside its own libraries only in a
module that is loaded already; `pipeline.pipeline` imports ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from ..configs.errors import CheckpointError

PUBLISHED_PIPELINE = "Kandinsky5T2VPipeline"
OUR_PIPELINE = "Kandinsky5NablaPipeline"

_TRANSFORMER = ("kandinsky5_nabla.models.transformer", "Kandinsky5Transformer")
_TEXT_ENCODER = ("kandinsky5_nabla.models.text_encoder", "QwenTextEncoder")
_TOKENIZER = ("transformers", "Qwen2Tokenizer")

# component -> class in model_index.json -> class that loads it. Nothing else is loaded.
LOADERS: dict[str, dict[tuple[str, str], tuple[str, str]]] = {
    "transformer": {("diffusers", "Kandinsky5Transformer3DModel"): _TRANSFORMER},
    "vae": {("diffusers", "AutoencoderKLHunyuanVideo"): ("diffusers", "AutoencoderKLHunyuanVideo")},
    "text_encoder": {
        ("transformers", "Qwen2_5_VLForConditionalGeneration"): _TEXT_ENCODER,
        ("transformers", "Qwen2_5_VLTextModel"): _TEXT_ENCODER,
    },
    "tokenizer": {
        # The processor needs torchvision for its image side; only the text side is used.
        ("transformers", "Qwen2VLProcessor"): _TOKENIZER,
        ("transformers", "Qwen2_5_VLProcessor"): _TOKENIZER,
        ("transformers", "Qwen2TokenizerFast"): _TOKENIZER,
        ("transformers", "Qwen2Tokenizer"): _TOKENIZER,
    },
    "text_encoder_2": {("transformers", "CLIPTextModel"): ("transformers", "CLIPTextModel")},
    "tokenizer_2": {
        ("transformers", "CLIPTokenizer"): ("transformers", "CLIPTokenizer"),
        ("transformers", "CLIPTokenizerFast"): ("transformers", "CLIPTokenizer"),
    },
    "scheduler": {("diffusers", "FlowMatchEulerDiscreteScheduler"): ("diffusers", "FlowMatchEulerDiscreteScheduler")},
}

# What save_pretrained writes for classes of ours, so that diffusers opens the folder.
PUBLISHED_AS: dict[tuple[str, str], tuple[str, str]] = {
    _TRANSFORMER: ("diffusers", "Kandinsky5Transformer3DModel"),
    _TEXT_ENCODER: ("transformers", "Qwen2_5_VLTextModel"),
}


def to_loaders(index: dict[str, Any]) -> dict[str, Any]:
    """Return a model_index.json whose components name the classes that load them.

    Raises:
        ValueError: if it is another pipeline's, lacks a component, or names a component or a class that is not in
            `LOADERS`.
    """
    pipeline = index.get("_class_name")
    if pipeline not in (PUBLISHED_PIPELINE, OUR_PIPELINE):
        raise CheckpointError(f"model_index.json is of a {pipeline}; a {PUBLISHED_PIPELINE} is needed")
    problems, loaders = _unknown_components(index), {}
    for component, known in LOADERS.items():
        named = index.get(component)
        if not _is_component(named):
            problems.append(f"{component} is missing")
        elif named[0] is None:  # saved without this part
            loaders[component] = (None, None)
        elif all(isinstance(word, str) for word in named) and tuple(named) in known:
            loaders[component] = known[tuple(named)]
        else:
            allowed = " or ".join(".".join(name) for name in known)
            problems.append(f"{component} is a {'.'.join(map(str, named))}, only {allowed} is loaded")
    if problems:
        raise CheckpointError("model_index.json cannot be loaded: " + "; ".join(problems))
    return {**index, **loaders}


def _unknown_components(index: dict[str, Any]) -> list[str]:
    """Return a sentence for each entry that names a class for something that is no part of the pipeline."""
    unknown = [name for name, named in index.items() if name not in LOADERS and _is_component(named) and any(named)]
    return [
        f"{name!r} is a {'.'.join(map(str, index[name]))}, and the only parts are {', '.join(LOADERS)}"
        for name in unknown
    ]


def _is_component(named: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(named, (list, tuple)) and len(named) == 2


def to_published(index: dict[str, Any]) -> dict[str, Any]:
    """Return a model_index.json that names the published classes."""
    published = dict(index)
    for component in LOADERS.keys() & index.keys():
        published[component] = PUBLISHED_AS.get(tuple(index[component]), index[component])
    return {**published, "_class_name": PUBLISHED_PIPELINE}
