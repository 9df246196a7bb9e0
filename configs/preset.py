"""The preset: a YAML file read strictly into a frozen dataclass."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_OWNER, _OLD_OWNER = "kandinskylab/", "ai-forever/"  # the repositories moved from the old name
_MAX_FRAMES, _MAX_PIXELS = 509, 2048  # RoPE tables reach 128 positions on each axis


@dataclass(frozen=True)
class Preset:
    """Everything that a run needs and that the checkpoint's own files do not say, or may not say.

    Constructing one checks every value; a ValueError lists all that are wrong.

    Attributes:
        name: how `--config` calls it; the name of its file.
        description: one line for people.
        model: a Hub repository ("owner/name") or the absolute path of a folder in the Diffusers layout. In YAML a
            folder may be written relative to the YAML file, as "./name".
        revision: the Hub revision (branch, tag or commit); None is the default branch.
        attention: "nabla" or "dense".
        nabla_P: the share of attention that NABLA keeps, in (0, 1]; None with dense attention.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance; 1.0 is none (one transformer call a step).
        shift: shift of the flow-matching schedule.
        num_frames: default number of frames, 4k + 1.
        height: default height in pixels.
        width: default width in pixels.
        sizes: all (height, width) that the checkpoint was trained for.
        scale_factor: RoPE divisors for (time, height, width).
        fps: frames a second.
        prompt_prefix_tokens: tokens of the prompt template before the prompt, where it is known; None is not checked.
        max_sequence_length: limit of the prompt in tokens, the template not counted.
    """

    name: str
    description: str
    model: str
    revision: str | None
    attention: str
    nabla_P: float | None
    num_inference_steps: int
    guidance_scale: float
    shift: float
    num_frames: int
    height: int
    width: int
    sizes: tuple[tuple[int, int], ...]
    scale_factor: tuple[float, float, float]
    fps: float
    prompt_prefix_tokens: int | None
    max_sequence_length: int

    def __post_init__(self) -> None:
        _raise_all(_broken_rules(self))

    @property
    def local_folder(self) -> Path | None:
        """The checkpoint's folder; None where `model` is a Hub repository."""
        return Path(self.model) if os.path.isabs(self.model) else None


def preset_names() -> list[str]:
    """Return the names of the presets in the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_preset(name_or_path: str | Path) -> Preset:
    """Read a preset by its name, or from a YAML file of the user's.

    Raises ValueError for an unknown name (with the nearest), a missing file, and for a file with unknown, missing
    or wrong entries (with the file, every entry and its rule).
    """
    text = str(name_or_path)
    if text in preset_names():
        return _read_preset(_FOLDER / f"{text}.yaml")
    if text.endswith((".yaml", ".yml")):
        return _read_preset(Path(text))
    names = ", ".join(preset_names())
    raise ValueError(
        f"unknown preset {text!r}: did you mean {_nearest(text, preset_names())!r}? "
        f"The presets are {names}; the name of a .yaml file works too"
    )


def find_preset(model: str) -> Preset | None:
    """Return the preset of a checkpoint, or None where no preset fits.

    `model` is a Hub repository, under its owner's old name "ai-forever/" too, a folder that has the name of the
    repository, or the preset's own folder.
    """
    presets = [load_preset(name) for name in preset_names()]
    if os.path.isdir(model):
        return next((preset for preset in presets if _is_folder_of(preset, model)), None)
    if model.startswith(_OLD_OWNER):
        model = _OWNER + model.removeprefix(_OLD_OWNER)
    return next((preset for preset in presets if preset.model == model), None)


def _is_folder_of(preset: Preset, folder: str) -> bool:
    if preset.local_folder is not None:
        return preset.local_folder.is_dir() and os.path.samefile(folder, preset.local_folder)
    return os.path.basename(os.path.abspath(folder)) == preset.model.partition("/")[2]


def _read_preset(path: Path) -> Preset:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the preset {path} cannot be read: {error}") from error
    try:
        return _parse_preset(data, path.absolute().parent)
    except ValueError as error:
        raise ValueError(f"the preset {path} is not valid: {error}") from error


def _parse_preset(data: object, folder: Path) -> Preset:
    """Return the preset in parsed YAML; a relative model is in `folder`."""
    if not isinstance(data, Mapping):
        raise ValueError(f"it must map keys to values, got {type(data).__name__}")
    _raise_all(_wrong_keys(data))
    values, problems = {}, []
    for key, parse in _PARSERS.items():
        try:
            values[key] = parse(data[key])
        except ValueError as error:
            problems.append(f"{key} must be {error}, got {data[key]!r}")
    _raise_all(problems)
    if values["model"].startswith("."):
        values["model"] = os.path.normpath(folder / values["model"])
    return Preset(**values)


def _wrong_keys(data: Mapping[Any, Any]) -> Iterator[str]:
    known = [field.name for field in fields(Preset)]
    for key in data:
        if key not in known:
            yield f"unknown key {key!r} (the nearest is {_nearest(str(key), known)!r})"
    for key in known:
        if key not in data:
            yield f"missing key {key!r}"


def _broken_rules(preset: Preset) -> Iterator[str]:
    """Yield every value that no run could honour, with its rule."""
    if not os.path.isabs(preset.model) and not _HUB_ID.fullmatch(preset.model):
        yield f"model must be owner/name on the Hub, an absolute path or ./folder, got {preset.model!r}"
    if preset.attention not in ("nabla", "dense"):
        yield f"attention must be 'nabla' or 'dense', got {preset.attention!r}"
    elif preset.attention == "dense" and preset.nabla_P is not None:
        yield f"nabla_P must be null with dense attention, got {preset.nabla_P}"
    elif preset.attention == "nabla" and (preset.nabla_P is None or not 0 < preset.nabla_P <= 1):
        yield f"nabla_P must be in (0, 1] with nabla attention, got {preset.nabla_P}"
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


def _broken_size_rules(preset: Preset) -> Iterator[str]:
    multiple = 16  # the VAE halves three times and a patch is 2x2
    for height, width in dict.fromkeys(((preset.height, preset.width), *preset.sizes)):
        if any(side % multiple or not 0 < side <= _MAX_PIXELS for side in (height, width)):
            rule = f"multiples of {multiple}, at most {_MAX_PIXELS}"
            yield f"height and width must be {rule}, got {height}x{width}"
    if (preset.height, preset.width) not in preset.sizes:
        yield f"height and width must be one of sizes {preset.sizes}, got {(preset.height, preset.width)}"


def _raise_all(problems: Iterator[str] | list[str]) -> None:
    if listed := list(problems):
        raise ValueError("; ".join(listed))


def _nearest(word: str, words: list[str]) -> str:
    return get_close_matches(word, words, n=1, cutoff=0.0)[0]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("an integer")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a number")
    return float(value)


def _sizes(value: object) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((_integer(height), _integer(width)) for height, width in _nonempty_list(value))
    except (TypeError, ValueError) as error:
        raise ValueError("a list of [height, width], integers") from error


def _scale_factor(value: object) -> tuple[float, float, float]:
    try:
        time, height, width = _nonempty_list(value)
        return _number(time), _number(height), _number(width)
    except ValueError as error:
        raise ValueError("a list of three numbers [time, height, width]") from error


def _nonempty_list(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list")
    return value


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    def parse_optional(value: object) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise ValueError(f"{error} or null") from error

    return parse_optional


# One parser a field; a parser's ValueError says what the value must be.
_PARSERS: dict[str, Callable[[object], Any]] = {
    "name": _text,
    "description": _text,
    "model": _text,
    "revision": _optional(_text),
    "attention": _text,
    "nabla_P": _optional(_number),
    "num_inference_steps": _integer,
    "guidance_scale": _number,
    "shift": _number,
    "num_frames": _integer,
    "height": _integer,
    "width": _integer,
    "sizes": _sizes,
    "scale_factor": _scale_factor,
    "fps": _number,
    "prompt_prefix_tokens": _optional(_integer),
    "max_sequence_length": _integer,
}
