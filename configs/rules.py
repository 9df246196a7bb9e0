"""The rules of a preset: how each entry of its YAML is read, and which values no run could honour."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .errors import PresetError

if TYPE_CHECKING:
    from .preset import Preset

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FILE = re.compile(r"[^/\\]+\.safetensors")
_MAX_FRAMES, _MAX_PIXELS = 509, 2048  # RoPE tables reach 128 positions on each axis


def broken_rules(preset: Preset) -> Iterator[str]:
    """Yield every value that no run could honour, with its rule."""
    if not os.path.isabs(preset.model) and not _HUB_ID.fullmatch(preset.model):
        yield f"model must be owner/name on the Hub, an absolute path or ./folder, got {preset.model!r}"
    if preset.original_file is not None and not _FILE.fullmatch(preset.original_file):
        yield f"original_file must be the name of a .safetensors file, without a folder, got {preset.original_file!r}"
    yield from _broken_attention_rules(preset)
    for key in ("num_inference_steps", "shift", "fps", "max_sequence_length", "prompt_prefix_tokens"):
        value = getattr(preset, key)
        if value is not None and not value > 0:
            yield f"{key} must be positive, got {value}"
    if preset.guidance_scale < 1:
        yield f"guidance_scale must be at least 1 (no guidance), got {preset.guidance_scale}"
    if not min(preset.scale_factor) > 0:
        yield f"scale_factor must be positive on each axis, got {preset.scale_factor}"
    frames = preset.num_frames
    if not 1 <= frames <= _MAX_FRAMES or frames % 4 != 1:
        nearest = sorted({min(max(frames - (frames - 1) % 4 + step, 1), _MAX_FRAMES) for step in (0, 4)})
        yield f"num_frames must be 4k + 1, at most {_MAX_FRAMES}, got {frames} (nearest: {nearest})"
    yield from _broken_size_rules(preset)


def _broken_attention_rules(preset: Preset) -> Iterator[str]:
    if preset.attention_decided_by not in ("checkpoint", "preset"):
        yield f"attention_decided_by must be 'checkpoint' or 'preset', got {preset.attention_decided_by!r}"
    P, window = preset.nabla_P, preset.nabla_window
    if preset.attention == "nabla":
        if P is None or not 0 < P <= 1:
            yield f"nabla_P must be in (0, 1] with nabla attention, got {P}"
        if window is None or min(window) < 1:
            yield f"nabla_window must be at least 1 on each axis with nabla attention, got {window}"
    elif preset.attention == "dense":
        for key, value in (("nabla_P", P), ("nabla_window", window)):
            if value is not None:
                yield f"{key} must be null with dense attention, got {value}"
    else:
        yield f"attention must be 'nabla' or 'dense', got {preset.attention!r}"


def _broken_size_rules(preset: Preset) -> Iterator[str]:
    multiple = 16  # the VAE halves three times and a patch is 2x2
    for height, width in dict.fromkeys(((preset.height, preset.width), *preset.sizes)):
        if any(side % multiple or not 0 < side <= _MAX_PIXELS for side in (height, width)):
            rule = f"multiples of {multiple}, at most {_MAX_PIXELS}"
            yield f"height and width must be {rule}, got {height}x{width}"
    if (preset.height, preset.width) not in preset.sizes:
        yield f"height and width must be one of sizes {preset.sizes}, got {(preset.height, preset.width)}"


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise PresetError("text")
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise PresetError("an integer")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise PresetError("a number")
    return float(value)


def _sizes(value: object) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((_integer(height), _integer(width)) for height, width in _nonempty_list(value))
    except (TypeError, ValueError) as error:
        raise PresetError("a list of [height, width], integers") from error


def _along_axes(parse: Callable[[object], Any], what: str) -> Callable[[object], tuple[Any, Any, Any]]:
    def parse_three(value: object) -> tuple[Any, Any, Any]:
        try:
            time, height, width = _nonempty_list(value)
            return parse(time), parse(height), parse(width)
        except ValueError as error:
            raise PresetError(f"a list of three {what} [time, height, width]") from error

    return parse_three


def _nonempty_list(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise PresetError("a list")
    return value


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    def parse_optional(value: object) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise PresetError(f"{error} or null") from error

    return parse_optional


PARSERS: dict[str, Callable[[object], Any]] = {
    "name": _text,
    "description": _text,
    "model": _text,
    "revision": _optional(_text),
    "original_file": _optional(_text),
    "attention": _text,
    "attention_decided_by": _text,
    "nabla_P": _optional(_number),
    "nabla_window": _optional(_along_axes(_integer, "integers")),
    "num_inference_steps": _integer,
    "guidance_scale": _number,
    "shift": _number,
    "num_frames": _integer,
    "height": _integer,
    "width": _integer,
    "sizes": _sizes,
    "scale_factor": _along_axes(_number, "numbers"),
    "fps": _number,
    "prompt_prefix_tokens": _optional(_integer),
    "max_sequence_length": _integer,
}
"""One parser a field of `Preset`; a parser's ValueError says what the value must be."""
