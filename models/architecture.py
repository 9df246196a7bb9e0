"""The transformer's config from its tensors' names and shapes: files of the original layout come without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..configs.errors import CheckpointError
from .headers import TensorHeader

PATCH_SIZE = (1, 2, 2)
"""Of all published models; the shapes tell only its product."""
_PATCH = 4

_IN_VISUAL = "visual_embeddings.in_layer.weight"
_OUT_VISUAL = "out_layer.out_layer.weight"
_NORM = "visual_transformer_blocks.0.self_attention.query_norm.weight"

# config key -> the tensor whose shape has it, and along which axis
_SIZES: dict[str, tuple[str, int]] = {
    "model_dim": (_IN_VISUAL, 0),
    "time_dim": ("time_embeddings.in_layer.weight", 0),
    "in_text_dim": ("text_embeddings.in_layer.weight", 1),
    "in_text_dim2": ("pooled_text_embeddings.in_layer.weight", 1),
    "ff_dim": ("visual_transformer_blocks.0.feed_forward.in_layer.weight", 0),
}
_AXES = {_IN_VISUAL: 2, _OUT_VISUAL: 2, _NORM: 1} | {name: 2 for name, _ in _SIZES.values()}
"""The tensors that are read, with their number of axes."""


def config_from_headers(headers: Mapping[str, TensorHeader], **attention: Any) -> dict[str, Any]:
    """Return the config of a transformer as keyword arguments of `Kandinsky5Transformer`.

    The axes of a head share its dim as 1/4, 3/8, 3/8 (t, h, w), as in the published models: 64 is 16, 24, 24 and 128
    is 32, 48, 48. Only the tensors that tell a size are looked at; loading compares all of them.

    Args:
        headers: of all tensors of the file.
        attention: the config keys that the shapes do not tell, such as `attention_type` and `attention_P`.

    Raises:
        ValueError: if the file is no Kandinsky 5 transformer, or its shapes tell no config; the message names what
            was looked for.
    """
    _require_tensors(headers)
    out_channels, out_rest = divmod(headers[_OUT_VISUAL].shape[0], _PATCH)
    in_channels, in_rest = divmod(headers[_IN_VISUAL].shape[1], _PATCH)
    head_dim = headers[_NORM].shape[0]
    problems = []
    if in_rest or out_rest or in_channels not in (out_channels, 2 * out_channels + 1):
        problems.append(
            f"{_OUT_VISUAL} {list(headers[_OUT_VISUAL].shape)} writes C channels in patches of {_PATCH}, and "
            f"{_IN_VISUAL} {list(headers[_IN_VISUAL].shape)} has to read C or, with visual_cond, 2 C + 1 of them"
        )
    if head_dim < 16 or head_dim % 16:
        problems.append(f"{_NORM} {[head_dim]}: a head dim is a multiple of 16, to be shared as 1/4, 3/8, 3/8")
    counts = {
        f"num_{kind}_blocks": _count(f"{kind}_transformer_blocks", headers, problems) for kind in ("text", "visual")
    }
    if problems:
        raise CheckpointError(f"{_file_of(headers)}: the shapes tell no config: " + "; ".join(problems))
    sizes = {key: headers[name].shape[axis] for key, (name, axis) in _SIZES.items()}
    return {
        **sizes,
        **counts,
        "in_visual_dim": out_channels,
        "out_visual_dim": out_channels,
        "visual_cond": in_channels != out_channels,
        "patch_size": PATCH_SIZE,
        "axes_dims": (head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8),
        **attention,
    }


def _require_tensors(headers: Mapping[str, TensorHeader]) -> None:
    """Refuse a file that lacks one of the tensors that are read, or has it with another number of axes."""
    missing = [name for name in _AXES if name not in headers or len(headers[name].shape) != _AXES[name]]
    if not missing:
        return
    looked_for = ", ".join(f"{name} with {_AXES[name]} axes" for name in missing)
    example = f", such as {next(iter(headers))}" if headers else ""
    hint = "; it is a LoRA, which load_lora_weights reads" if any("lora_" in name for name in headers) else ""
    raise CheckpointError(
        f"{_file_of(headers)} is no transformer of Kandinsky 5: looked for {looked_for}; it holds {len(headers)} "
        f"tensors{example}{hint}"
    )


def _count(prefix: str, headers: Mapping[str, TensorHeader], problems: list[str]) -> int:
    """Return how many blocks there are, numbered from 0; their number is at most that of the tensors."""
    pattern = re.compile(re.escape(prefix) + r"\.(0|[1-9][0-9]{0,8})\.")
    numbers = {int(match[1]) for match in map(pattern.match, headers) if match}
    absent = next((number for number in range(len(numbers)) if number not in numbers), None)
    if absent is not None:
        problems.append(f"{prefix}.{absent} is missing, and there is a {prefix}.{max(numbers)}")
    return len(numbers)


def _file_of(headers: Mapping[str, TensorHeader]) -> str:
    return str(next(iter(headers.values())).file) if headers else "the file"
