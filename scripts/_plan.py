"""The command line's request, resolved and checked as a whole before any weight is read."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs import Preset, find_preset, load_preset, preset_names
from kandinsky5_nabla.pipeline.checks import MAX_COUNT, Geometry, Report, Settings, frames_of_duration, prompt_list
from kandinsky5_nabla.pipeline.components import to_loaders

DEFAULT_PRESET = "lite-t2v-10s-sft"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # "./name" is a folder
MAX_STEM_BYTES = 70
"""With the seed, a number and .mp4 a name stays below 100 bytes."""


class BadInput(Exception):
    """The request cannot be honoured; `problems` says why, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Video:
    """One video of a run."""

    prompt: str
    seed: int
    output: Path

    @property
    def latents(self) -> Path:
        """Where the latents lie while they are decoded."""
        return _latents_of(self.output)


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        config: name or file of the preset.
        preset: where the defaults come from.
        model: folder or Hub id.
        given: the numbers that were given, by the names of `Settings`; None for those that were not.
        settings: all the numbers, as far as they are known before the checkpoint is loaded.
        videos: one for each prompt and seed.
        negative_prompt: None for the authors' text.
        attention: name of the backend, None for the checkpoint's.
        device: "cpu", "cuda" or "cuda:N".
        dtype: of the transformer and the text encoders.
        offload: "none", "model" or "sequential".
        overwrite: replace existing files.
    """

    config: str
    preset: Preset
    model: str
    given: dict[str, Any]
    settings: Settings
    videos: list[Video]
    negative_prompt: str | None
    attention: str | None
    device: str
    dtype: str
    offload: str
    overwrite: bool

    def describe(self, settings: Settings | None = None) -> dict[str, Any]:
        """Return the plan as plain values, with the settings that the checkpoint gave once it was loaded."""
        numbers = asdict(settings or self.settings)
        del numbers["num_videos"]  # `outputs` has one entry for each
        return {
            "preset": self.preset.name,
            "model": self.model,
            **numbers,
            "fps": self.preset.fps,
            "attention": self.attention or "the checkpoint's",
            "device": self.device,
            "dtype": self.dtype,
            "offload": self.offload,
            "outputs": [{"file": str(v.output), "seed": v.seed, "prompt": v.prompt} for v in self.videos],
        }


def _latents_of(output: Path) -> Path:
    return output.with_suffix(".latents.safetensors")


def make_plan(args: argparse.Namespace) -> Plan:
    """Return the plan of parsed arguments.

    Raises:
        BadInput: with every problem that was found.
    """
    report = Report()
    preset = report.attempt(_preset, args)
    if preset is None:  # without it there are no defaults to check the rest against
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
    settings = Settings.from_preset(preset, geometry, **known, num_videos=args.num_videos)
    report.add(settings.problems(geometry))
    if not args.prompt:
        report.add(["no prompt was given: add --prompt TEXT (an empty text is allowed)"])
    else:
        report.attempt(prompt_list, args.prompt)
    if args.seed is not None and not 0 <= args.seed <= 2**63 - 1 - max(0, args.num_videos):
        report.add([f"seed {args.seed}: must be from 0 to 2**63 - 1"])
    unusable = _output_problems(args.output)
    videos = [] if unusable or args.num_videos > MAX_COUNT else _videos(args)
    report.add(unusable or _taken(videos, args.overwrite))
    device = _device(report, args.device, preset)
    if args.offload != "none" and device == "cpu":
        report.add([f"--offload {args.offload}: moves parts to the CPU, and this run is on it; leave it out"])
    if report.problems:
        raise BadInput(report.problems)
    return Plan(
        args.config or preset.name,
        preset,
        model,
        given,
        settings,
        videos,
        args.negative_prompt,
        args.attention,
        device,
        args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        args.offload,
        args.overwrite,
    )


def _preset(args: argparse.Namespace) -> Preset:
    """Return the preset that was named, or the model's own, or the default."""
    if args.config is not None:
        return load_preset(args.config)
    if args.model is None:
        return load_preset(DEFAULT_PRESET)
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
    tiled = configs["transformer"].get("attention_type", preset.attention) == "nabla"
    if attention is not None:
        from kandinsky5_nabla.attention import get_attention_backend

        backend = report.attempt(get_attention_backend, attention)
        tiled = backend.token_order == "blocks" if backend is not None else tiled
    return Geometry.from_configs(configs["vae"], configs["transformer"], tiled)


def _numbers_of(configs: dict[str, dict[str, Any]], geometry: Geometry) -> dict[str, Any]:
    """Return the numbers that the checkpoint's own files give, as the pipeline reads them once it is loaded."""
    P = configs["transformer"].get("attention_P") if geometry.tiled else None
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


def _videos(args: argparse.Namespace) -> list[Video]:
    first = secrets.randbelow(2**31) if args.seed is None else args.seed
    pairs = [(prompt, first + i) for prompt in args.prompt or [] for i in range(args.num_videos)]
    if args.output is None:
        names = [Path(f"{safe_name(prompt)}-{seed}.mp4") for prompt, seed in pairs]
        outputs = _free_names(names, args.overwrite)
    elif len(pairs) == 1:
        outputs = [args.output]
    else:
        outputs = [args.output.with_stem(f"{args.output.stem}-{i + 1}") for i in range(len(pairs))]
    return [Video(prompt, seed, output) for (prompt, seed), output in zip(pairs, outputs, strict=True)]


def safe_name(prompt: str) -> str:
    """Return a file name's stem from a prompt: letters, digits and dashes, at most 70 bytes, never empty."""
    folded = unicodedata.normalize("NFC", prompt).lower()
    words = re.sub(r"[^\w]+", "-", folded).strip("-_")
    return words.encode()[:MAX_STEM_BYTES].decode(errors="ignore").strip("-_") or "video"


def _free_names(names: list[Path], overwrite: bool) -> list[Path]:
    """Return the names, numbered where one is taken already, on disk or in this run."""
    free: dict[Path, None] = {}  # in order, and quick to look up
    for name in names:
        candidate, number = name, 1
        while candidate in free or (not overwrite and (candidate.exists() or _latents_of(candidate).exists())):
            number += 1
            candidate = name.with_stem(f"{name.stem}-{number}")
        free[candidate] = None
    return list(free)


def _output_problems(output: Path | None) -> list[str]:
    """Return why no file can be written there, whatever exists in the folder."""
    problems = []
    if output is not None and os.path.isdir(output):
        problems.append(f"output {output}: is a folder; name a file in it, such as {output / 'video.mp4'}")
    elif output is not None and output.suffix.lower() != ".mp4":
        problems.append(f"output {output}: must be a name that ends in .mp4")
    folder = Path() if output is None else output.parent
    if not os.path.isdir(folder):
        problems.append(f"output folder {folder}: does not exist; create it first")
    elif (reason := _why_not_writable(folder)) is not None:
        problems.append(f"output folder {folder}: cannot be written to ({reason})")
    return problems


def _why_not_writable(folder: Path) -> str | None:
    """Try it: permissions alone do not tell, of a full or a special file system for example."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def _taken(videos: list[Video], overwrite: bool) -> Iterator[str]:
    """Yield a sentence for each file of the run that would replace another, or whose name the system refuses."""
    for path in (path for video in videos for path in (video.output, video.latents)):
        try:
            path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:  # such as a name that is too long
            yield f"output {path}: {error.strerror}"
            continue
        if path.is_dir():
            yield f"output {path}: is a folder; name another file"
        elif not overwrite:
            kept = " (latents of a run that did not finish)" if path.suffix == ".safetensors" else ""
            yield f"output {path}: exists{kept}; choose another name or add --overwrite"


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
