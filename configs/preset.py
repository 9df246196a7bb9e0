"""The preset: a YAML file read strictly into a frozen dataclass."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from .errors import PresetError
from .rules import PARSERS, broken_rules

_FOLDER = Path(__file__).parent
_OWNER, _OLD_OWNER = "kandinskylab/", "ai-forever/"  # the repositories moved from the old name
_DIFFUSERS = "-Diffusers"  # a repository without it holds the same checkpoint in the original layout
_CLASSES = {(1.0, 2.0, 2.0): "SD", (1.0, 3.16, 3.16): "HD"}  # a resolution class is its RoPE divisors


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
        original_file: name of the transformer's file in the original layout; None where there is no such file.
        attention: "nabla" or "dense".
        attention_decided_by: who decides on attention and P where transformer/config.json says something else:
            "checkpoint", or "preset" where one config.json serves several presets.
        nabla_P: the share of attention that NABLA keeps, in (0, 1]; None with dense attention.
        nabla_window: NABLA's window along (time, height, width), in blocks; None with dense attention.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance; 1.0 is none (one transformer call a step).
        shift: shift of the flow-matching schedule.
        num_frames: default number of frames, 4k + 1; the longest that the checkpoint was made for.
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
    original_file: str | None
    attention: str
    attention_decided_by: str
    nabla_P: float | None
    nabla_window: tuple[int, int, int] | None
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
        _raise_all(broken_rules(self))

    @property
    def local_folder(self) -> Path | None:
        """The checkpoint's folder; None where `model` is a Hub repository."""
        return Path(self.model) if os.path.isabs(self.model) else None

    @property
    def seconds(self) -> float:
        """Length of the default video: the first frame is at 0 s."""
        return (self.num_frames - 1) / self.fps

    def cautions(self, num_frames: int, height: int, width: int) -> list[str]:
        """Return a sentence for each way in which a video that can be made is not what the checkpoint was made for.

        They are about its length and its size in pixels, which must be possible (`pipeline.checks`).
        """
        found = []
        if num_frames > self.num_frames:
            asked = f"{round((num_frames - 1) / self.fps, 2):g} s ({num_frames} frames)"
            made_for = f"{round(self.seconds, 2):g} s ({self.num_frames} frames)"
            found.append(f"the video is to last {asked}, and {self.name} was made for {made_for}: it may fall apart")
        if (height, width) not in self.sizes:
            found.append(_size_caution(self, height, width))
        return found

    def differences(self, transformer_config: Mapping[str, Any], scheduler_config: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each value that the checkpoint's own files and the preset give differently.

        `transformer_config` is transformer/config.json and `scheduler_config` scheduler/scheduler_config.json; what
        they leave out, or all of it where they are empty, is no difference. A sentence has both values and says which
        one is used, as long as the request has none of its own.
        """
        return list(_differences(self, transformer_config, scheduler_config))


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
    raise PresetError(
        f"unknown preset {text!r}: did you mean {_nearest(text, preset_names())!r}? "
        f"The presets are {names}; the name of a .yaml file works too"
    )


def find_preset(model: str, size: tuple[int, int] | None = None) -> Preset | None:
    """Return the preset of a checkpoint, or None where no preset fits.

    `model` is one of:
        * a Hub repository, in the Diffusers or the original layout, under its owner's old name "ai-forever/" too;
        * a folder that has the name of the repository, or lies in the Hub's cache as the repository's;
        * the preset's own folder;
        * a file, there or not, with the name of the original layout's.

    Where several presets share the checkpoint, one for each resolution class, it is the one that has the `size`
    (height, width) in pixels; without a size, or with one that none of them has, that of the smallest class.
    """
    found = [preset for preset in _all_presets() if _is_checkpoint_of(preset, model)]
    with_size = [preset for preset in found if size in preset.sizes]
    return min(with_size or found, key=lambda preset: preset.scale_factor, default=None)


@cache  # the files of the package stay as they are while it runs
def _all_presets() -> tuple[Preset, ...]:
    return tuple(load_preset(name) for name in preset_names())


def _is_checkpoint_of(preset: Preset, model: str) -> bool:
    folder, repository = preset.local_folder, preset.model
    if os.path.isdir(model):
        if folder is not None:
            return folder.is_dir() and os.path.samefile(model, folder)
        model = _repository_of_folder(os.path.abspath(model))
        repository = repository if "/" in model else repository.partition("/")[2]
    elif model.endswith(".safetensors"):
        return os.path.basename(model) == preset.original_file
    if model.startswith(_OLD_OWNER):
        model = _OWNER + model.removeprefix(_OLD_OWNER)
    return folder is None and model in (repository, repository.removesuffix(_DIFFUSERS))


def _repository_of_folder(path: str) -> str:
    """Return owner/name of a folder .../models--owner--name/snapshots/REVISION of the Hub's cache, else its name."""
    *_, cached, snapshots, name = ("", "", *Path(path).parts)
    if snapshots == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return name


def _size_caution(preset: Preset, height: int, width: int) -> str:
    """Return what is to be said of a size that the preset does not have."""

    def distance(size: tuple[int, int]) -> tuple[float, int]:
        return abs(math.log(size[0] * width / (size[1] * height))), abs(size[0] - height)

    near_height, near_width = min(preset.sizes, key=distance)
    factors = ", ".join(f"{factor:g}" for factor in preset.scale_factor)
    name = _CLASSES.get(preset.scale_factor)
    scale = f"RoPE scale ({factors})" + (f" of the {name} class" if name else "")
    sentence = (
        f"{height}x{width} (height x width) is no size that {preset.name} was trained for: it runs with the {scale}; "
        f"the trained size nearest in shape is {near_height}x{near_width}"
    )
    for other in _all_presets():
        if other.model == preset.model and (height, width) in other.sizes:
            sentence += f"; the preset {other.name} of the same checkpoint has {height}x{width}"
    return sentence


def _differences(preset: Preset, transformer: Mapping[str, Any], scheduler: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `Preset.differences` returns; the window is used as the checkpoint has it, whoever decides."""
    ours = {"dense": "regular", "nabla": "nabla"}[preset.attention]
    theirs = transformer.get("attention_type") or ours
    by_preset = preset.attention_decided_by == "preset"
    config, compared = "transformer/config.json", []
    compared.append((config, "attention_type", theirs, ours, by_preset))
    if ours == theirs == "nabla":  # otherwise there is nothing to compare: dense attention has neither
        window = tuple(transformer.get(key) for key in ("attention_wT", "attention_wH", "attention_wW"))
        compared.append((config, "attention_P", transformer.get("attention_P"), preset.nabla_P, by_preset))
        compared.append(
            (config, "attention_wT, wH, wW", None if None in window else window, preset.nabla_window, False)
        )
    compared.append(("scheduler/scheduler_config.json", "shift", scheduler.get("shift"), preset.shift, False))
    for file, key, theirs, ours, by_preset in compared:
        if theirs is not None and theirs != ours:
            used = "preset" if by_preset else "checkpoint"
            yield f"{file} has {key} {theirs!r}, the preset {preset.name} has {ours!r}: the {used}'s is used"


def _read_preset(path: Path) -> Preset:
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # no UTF-8, no date, too deep
        raise PresetError(f"the preset {path} cannot be read: {error}") from error
    try:
        if isinstance(node, yaml.MappingNode):
            _raise_all(_repeated_keys([key.value for key, _ in node.value]))
        return _parse_preset(data, path.absolute().parent)
    except ValueError as error:
        raise PresetError(f"the preset {path} is not valid: {error}") from error


def _repeated_keys(keys: list[str]) -> Iterator[str]:
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:  # YAML itself would take the last one
            yield f"key {key!r} is given {keys.count(key)} times"


def _parse_preset(data: object, folder: Path) -> Preset:
    """Return the preset in parsed YAML; a relative model is in `folder`."""
    if not isinstance(data, Mapping):
        raise PresetError(f"it must map keys to values, got {type(data).__name__}")
    _raise_all(_wrong_keys(data))
    values, problems = {}, []
    for key, parse in PARSERS.items():
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


def _raise_all(problems: Iterable[str]) -> None:
    if listed := list(problems):
        raise PresetError("; ".join(listed))


def _nearest(word: str, words: list[str]) -> str:
    return get_close_matches(word, words, n=1, cutoff=0.0)[0]
