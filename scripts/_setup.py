"""Model, numbers and device of a command line's run, resolved and checked before any weight is read."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs import Preset, find_preset, load_preset, preset_names
from kandinsky5_nabla.pipeline.checks import Geometry, Report, Settings, frames_of_duration
from kandinsky5_nabla.pipeline.components import to_loaders

DEFAULT_PRESET = "lite-t2v-10s-sft"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # "./name" is a folder
NOTHING_TO_REPORT = "attention is dense here and keeps every block, so there is nothing to report"


class BadInput(Exception):
    """The request cannot be honoured; `problems` says why, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Setup:
    """What a run of the pipeline needs besides prompts and files.

    Attributes:
        config: name or file of the preset.
        preset: where the defaults come from.
        model: folder or Hub id.
        transformer: the checkpoint's transformer/config.json; empty where it does not lie here.
        given: the numbers that were given, by the names of `Settings`; None for those that were not.
        settings: all the numbers, as far as they are known before the checkpoint is loaded.
        negative_prompt: None for the authors' text.
        attention: name of the backend, None for the checkpoint's.
        sparse: whether the attention is NABLA's, as far as it is known before the checkpoint is loaded.
        device: "cpu", "cuda" or "cuda:N".
        dtype: of the transformer and the text encoders.
        offload: "none", "model" or "sequential".
    """

    config: str
    preset: Preset
    model: str
    transformer: dict[str, Any]
    given: dict[str, Any]
    settings: Settings
    negative_prompt: str | None
    attention: str | None
    sparse: bool
    device: str
    dtype: str
    offload: str

    def describe(self, settings: Settings | None = None) -> dict[str, Any]:
        """Return the setup as plain values, with the settings that the checkpoint gave once it was loaded."""
        numbers = asdict(settings or self.settings)
        del numbers["num_videos"]  # each video has a line of its own
        return {
            "preset": self.preset.name,
            "model": self.model,
            **numbers,
            "fps": self.preset.fps,
            "attention": self.attention or "the checkpoint's",
            "device": self.device,
            "dtype": self.dtype,
            "offload": self.offload,
        }


def make_setup(
    report: Report, args: argparse.Namespace, num_videos: int = 1, default_preset: str = DEFAULT_PRESET
) -> Setup:
    """Return the setup of parsed arguments; what is wrong with them goes into the report.

    `default_preset` is for arguments that name neither a preset nor a model.

    Raises:
        BadInput: without a preset, since then there are no defaults to check the rest against.
    """
    preset = report.attempt(_preset, args, default_preset)
    if preset is None:
        raise BadInput(report.problems)
    model = args.model or preset.model
    report.attempt(_check_model, model)
    configs = _read_configs(report, Path(model))
    geometry = _geometry(report, args.attention, configs, preset)
    given = {
        "height": args.height,
        "width": args.width,
        "num_frames": _num_frames(report, args, geometry, preset),
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance_scale,
        "shift": args.shift,
        "nabla_P": args.nabla_p,
    }
    known = _numbers_of(configs, geometry) | {name: v for name, v in given.items() if v is not None}
    settings = Settings.from_preset(preset, geometry, **known, num_videos=num_videos)
    report.add(settings.problems(geometry))
    device = _device(report, args.device, preset)
    if args.offload != "none" and device == "cpu":
        report.add([f"--offload {args.offload}: moves parts to the CPU, and this run is on it; leave it out"])
    return Setup(
        args.config or preset.name,
        preset,
        model,
        configs["transformer"],
        given,
        settings,
        args.negative_prompt,
        args.attention,
        geometry.nabla,
        device,
        args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        args.offload,
    )


def seed_problems(seed: int, num_videos: int = 1) -> list[str]:
    """Return why a seed cannot be the first of so many videos."""
    if 0 <= seed <= 2**63 - 1 - max(0, num_videos):
        return []
    return [f"seed {seed}: must be from 0 to 2**63 - 1"]


def _preset(args: argparse.Namespace, default: str) -> Preset:
    """Return the preset that was named, or the model's own, or the default."""
    if args.config is not None:
        return load_preset(args.config)
    if args.model is None:
        return load_preset(default)
    found = find_preset(args.model)
    if found is not None:
        return found
    index = _read_json(Path(args.model) / "model_index.json")
    return load_preset(index.get("preset") or DEFAULT_PRESET)


def _check_model(model: str) -> None:
    if model.endswith(".safetensors"):
        raise ValueError(f"model {model}: a single file is not supported yet; give a folder in the Diffusers layout")
    if os.path.isdir(model):
        missing = [
            name
            for name in ("model_index.json", "transformer/config.json", "vae/config.json")
            if not os.path.isfile(os.path.join(model, name))
        ]
        if missing:
            raise ValueError(f"model folder {model}: {', '.join(missing)} is missing; it is no Diffusers layout")
        _check_classes(Path(model) / "model_index.json")
    elif not HUB_ID.fullmatch(model):
        raise ValueError(
            f"model {model!r}: there is no such folder, and it is no Hub id (owner/name); "
            f"the presets are {', '.join(preset_names())} (--config)"
        )


def _check_classes(index: Path) -> None:
    content = _read_json(index)
    try:
        to_loaders(content)
    except ValueError as error:
        raise ValueError(f"{index.parent}: {error}") from error


def _read_configs(report: Report, model: Path) -> dict[str, dict[str, Any]]:
    """Return the configs of a local checkpoint's parts; empty ones where the checkpoint is not local."""
    files = {"transformer": "config.json", "vae": "config.json", "scheduler": "scheduler_config.json"}
    return {part: report.attempt(_read_json, model / part / file) or {} for part, file in files.items()}


def _geometry(report: Report, attention: str | None, configs: dict[str, dict[str, Any]], preset: Preset) -> Geometry:
    """Return the geometry that the checkpoint's configs describe, as far as they lie here, with the attention."""
    nabla = configs["transformer"].get("attention_type", preset.attention) == "nabla"
    if attention is not None:
        from kandinsky5_nabla.attention import get_attention_backend

        backend = report.attempt(get_attention_backend, attention)
        nabla = backend.token_order == "blocks" if backend is not None else nabla
    return Geometry.from_configs(configs["vae"], configs["transformer"], nabla)


def _numbers_of(configs: dict[str, dict[str, Any]], geometry: Geometry) -> dict[str, Any]:
    """Return the numbers that the checkpoint's own files give, as the pipeline reads them once it is loaded."""
    P = configs["transformer"].get("attention_P") if geometry.nabla else None
    numbers = {"shift": configs["scheduler"].get("shift"), "nabla_P": P}
    return {name: number for name, number in numbers.items() if number is not None}


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file of a local checkpoint; empty where the checkpoint is not local.

    Raises:
        ValueError: if the file cannot be read or holds something else; the message names it.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not readable, no UTF-8, no JSON
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _num_frames(report: Report, args: argparse.Namespace, geometry: Geometry, preset: Preset) -> int | None:
    if args.duration is None:
        return args.num_frames
    if args.num_frames is not None:
        report.add(["--num-frames and --duration say the same thing: give one of them"])
    return report.attempt(frames_of_duration, geometry, args.duration, preset.fps)


def _device(report: Report, name: str | None, preset: Preset) -> str:
    """Return the device: as asked, else cuda, else the CPU for the demo, which is made for it."""
    import torch

    cuda = torch.cuda.is_available()
    if name is None:
        if not cuda and preset.local_folder is None:
            report.add(
                [
                    f"{preset.name} needs a CUDA device, and there is none: try --config demo, "
                    "or add --device cpu to run it here, slowly and with much memory"
                ]
            )
        return "cuda" if cuda else "cpu"
    if name == "cpu":
        return name
    if not re.fullmatch(r"cuda(:\d+)?", name):
        report.add([f"device {name!r}: must be cpu, cuda or cuda:N"])
    elif not cuda:
        report.add([f"device {name}: there is no CUDA device here; --device cpu works"])
    elif int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        report.add([f"device {name}: there are {torch.cuda.device_count()}, from cuda:0"])
    return name
