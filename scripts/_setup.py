"""Model, numbers and device of a command line's run, resolved and checked before any weight is read."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kandinsky5_nabla.configs import Preset, find_preset
from kandinsky5_nabla.configs.errors import DeviceError, SettingsError, UsageError, UserError
from kandinsky5_nabla.configs.tiles import Tile, find_tile
from kandinsky5_nabla.pipeline.checks import MAX_COUNT, Geometry, Report, Settings, frames_of_duration
from kandinsky5_nabla.pipeline.lora_files import LoraRequest
from kandinsky5_nabla.pipeline.memory import MemoryPlan
from kandinsky5_nabla.pipeline.precision import full_dtype_name, precision_problems
from kandinsky5_nabla.scripts._checkpoint import (
    DEFAULT_PRESET,
    Checkpoint,
    find_checkpoint,
    find_loras,
    unknown_repository,
)
from kandinsky5_nabla.scripts._memory import plan_memory

NOTHING_TO_REPORT = "attention is dense here and keeps every block, so there is nothing to report"


class BadInput(Exception):
    """The request cannot be honoured; `problems` says why."""

    def __init__(self, problems: Iterable[UserError]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(map(str, self.problems)))


@dataclass(frozen=True)
class Setup:
    """What a run of the pipeline needs besides prompts and files.

    Attributes:
        checkpoint: where the models come from, with the preset of the defaults.
        geometry: of the checkpoint, with the attention, as far as it is known before it is loaded.
        given: the numbers that were given, by the names of `Settings`; None for those that were not.
        settings: all the numbers, as far as they are known before the checkpoint is loaded.
        largest: those of the video that takes the most memory, where videos differ.
        negative_prompt: None for the authors' text.
        attention: name of the backend, None for the checkpoint's.
        device: "cpu", "cuda" or "cuda:N".
        dtype: what is computed in.
        text_encoder_dtype, dit_dtype: what the weights are kept in, where that is something else.
        offload: as asked: "auto", or a way of `pipeline.memory`.
        tile: of the VAE; None for the first of the table.
        num_videos: videos in all.
        memory: the plan; None where the sizes of the checkpoint are not known before it is downloaded.
        loras: LoRAs with their scales.
        differences: sentences about where the checkpoint is not what its preset says.
        expand_prompt: whether the text encoder rewrites short prompts before it encodes them.
    """

    checkpoint: Checkpoint
    geometry: Geometry
    given: dict[str, Any]
    settings: Settings
    largest: Settings
    negative_prompt: str | None
    attention: str | None
    device: str
    dtype: str
    text_encoder_dtype: str
    dit_dtype: str
    offload: str
    tile: Tile | None
    num_videos: int
    memory: MemoryPlan | None
    loras: list[LoraRequest]
    differences: list[str]
    expand_prompt: bool

    @property
    def preset(self) -> Preset:
        """The preset of the defaults."""
        return self.checkpoint.preset

    @property
    def sparse(self) -> bool:
        """Whether the attention is NABLA's, as far as it is known before the checkpoint is loaded."""
        return self.geometry.nabla

    def resized(self, report: Report, given: Mapping[str, Any]) -> Setup:
        """Return the setup with other numbers of `Settings`; what is wrong with them goes into the report."""
        settings = dataclasses.replace(self.settings, **given)
        resized = dataclasses.replace(self, given={**self.given, **given}, settings=settings, largest=settings)
        problems = settings.problems(self.geometry)
        report.add(SettingsError, problems)
        return resized if problems else resized.planned(report)

    def planned(self, report: Report) -> Setup:
        """Return the setup with the plan of its memory; why it does not fit goes into the report."""
        return dataclasses.replace(self, memory=report.attempt(plan_memory, self))

    @property
    def model(self) -> str:
        """Folder, Hub id or file of the checkpoint."""
        return self.checkpoint.model

    def describe(self, settings: Settings | None = None, attention: str | None = None) -> dict[str, Any]:
        """Return the setup as plain values, with what is known once the checkpoint is loaded."""
        commit = self.checkpoint.commit
        numbers = asdict(settings or self.settings)
        del numbers["num_videos"]  # each video has a line of its own
        dtypes = {"text_encoder_dtype": self.text_encoder_dtype, "dit_dtype": self.dit_dtype}
        loras = [f"{lora.path}:{lora.scale:g}" for lora in self.loras]
        return {
            "preset": self.preset.name,
            "model": self.model,
            **({"revision": commit} if commit else {}),
            **({"loras": loras} if loras else {}),
            **numbers,
            "fps": self.preset.fps,
            "attention": attention or self.attention or "the checkpoint's",
            "device": self.device,
            "dtype": self.dtype,
            **{name: dtype for name, dtype in dtypes.items() if dtype != self.dtype},
            "offload": self.offload if self.memory is None else self.memory.offload,
            **({} if self.tile is None else {"vae_tile": self.tile.name}),
            **({"expand_prompt": True} if self.expand_prompt else {}),
        }


def make_setup(
    report: Report,
    args: argparse.Namespace,
    num_videos: int = 1,
    num_prompts: int = 1,
    default_preset: str = DEFAULT_PRESET,
) -> Setup:
    """Return the setup of parsed arguments, for so many videos of each prompt; what is wrong goes into the report.

    `default_preset` is for arguments that name neither a preset nor a model.

    Raises:
        BadInput: without a preset, since then there are no defaults to check the rest against.
    """
    checkpoint = find_checkpoint(report, args, default_preset)
    if checkpoint is None:
        raise BadInput(report.problems)
    preset, configs = checkpoint.preset, checkpoint.configs
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
    known = _numbers_of(configs, geometry, preset) | {name: v for name, v in given.items() if v is not None}
    settings = Settings.from_preset(preset, geometry, **known, num_videos=num_videos)
    problems = settings.problems(geometry)
    report.add(SettingsError, problems)
    before = len(report.problems)
    device = _device(report, args.device, preset)
    if args.offload not in ("auto", "none") and device == "cpu":
        report.add(
            SettingsError, [f"--offload {args.offload}: moves parts to the CPU, and this run is on it; leave it out"]
        )
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    setup = Setup(
        checkpoint,
        geometry,
        given,
        settings,
        settings,
        args.negative_prompt,
        args.attention,
        device,
        dtype,
        full_dtype_name(args.text_encoder_dtype or dtype),
        full_dtype_name(args.dit_dtype or dtype),
        args.offload,
        None if args.vae_tile is None else report.attempt(find_tile, args.vae_tile),
        num_videos * num_prompts,
        None,
        find_loras(report, args.lora, checkpoint),
        _differences(args, checkpoint),
        getattr(args, "expand_prompt", False),  # other command lines have no prompts
    )
    existing = device if len(report.problems) == before else None
    report.extend(precision_problems(setup.text_encoder_dtype, setup.dit_dtype, existing))
    if report.problems:  # a plan of memory would be about another run
        return setup
    return setup.planned(report)


def _differences(args: argparse.Namespace, checkpoint: Checkpoint) -> list[str]:
    """Return what a user should know before hours of work; nothing about numbers that were given."""
    preset = checkpoint.preset
    transformer = dict(checkpoint.configs["transformer"])
    scheduler = {} if args.shift is not None else checkpoint.configs["scheduler"]
    if args.nabla_p is not None:
        transformer.pop("attention_P", None)
    if args.attention is not None:
        transformer.pop("attention_type", None)
    differences = preset.differences(transformer, scheduler)
    if checkpoint.kind == "hub" and args.config is None and find_preset(checkpoint.model) is None:
        differences.append(
            f"{unknown_repository(checkpoint.model)}; the defaults are those of {preset.name} (--config)"
        )
    return differences


def seed_problems(seed: int, num_videos: int = 1) -> list[str]:
    """Return why a seed cannot be the first of so many videos; a number that none can have is judged elsewhere."""
    last = seed + min(max(1, num_videos), MAX_COUNT) - 1
    if seed >= 0 and last < 2**63:
        return []
    of_last = f", and that of the last of {num_videos} videos would be {last}" if 0 <= seed < 2**63 else ""
    return [f"seed {seed}: must be from 0 to 2**63 - 1{of_last}"]


def _geometry(report: Report, attention: str | None, configs: dict[str, dict[str, Any]], preset: Preset) -> Geometry:
    """Return the geometry that the checkpoint's configs describe, as far as they lie here, with the attention."""
    nabla = preset.attention == "nabla"
    if preset.attention_decided_by == "checkpoint":
        nabla = configs["transformer"].get("attention_type", preset.attention) == "nabla"
    if attention is not None:
        from kandinsky5_nabla.attention import get_attention_backend

        backend = report.attempt(get_attention_backend, attention)
        nabla = backend.token_order == "blocks" if backend is not None else nabla
    return Geometry.from_configs(configs["vae"], configs["transformer"], nabla)


def _numbers_of(configs: dict[str, dict[str, Any]], geometry: Geometry, preset: Preset) -> dict[str, Any]:
    """Return the numbers that the checkpoint's own files give, as the pipeline reads them once it is loaded."""
    decides = geometry.nabla and preset.attention_decided_by == "checkpoint"
    P = configs["transformer"].get("attention_P") if decides else None
    numbers = {"shift": configs["scheduler"].get("shift"), "nabla_P": P}
    return {name: number for name, number in numbers.items() if number is not None}


def _num_frames(report: Report, args: argparse.Namespace, geometry: Geometry, preset: Preset) -> int | None:
    if args.duration is None:
        return args.num_frames
    if args.num_frames is not None:
        report.add(UsageError, ["--num-frames and --duration say the same thing: give one of them"])
    return report.attempt(frames_of_duration, geometry, args.duration, preset.fps)


def _device(report: Report, name: str | None, preset: Preset) -> str:
    """Return the device: as asked, else cuda, else the CPU for the demo, which is made for it."""
    import torch

    cuda = torch.cuda.is_available()
    if name is None:
        if not cuda and preset.local_folder is None:
            sentence = (
                f"{preset.name} needs a CUDA device, and there is none: try --config demo, "
                "or add --device cpu to run it here, slowly and with much memory"
            )
            report.add(DeviceError, [sentence])
        return "cuda" if cuda else "cpu"
    if name == "cpu":
        return name
    if not re.fullmatch(r"cuda(:\d+)?", name):
        report.add(DeviceError, [f"device {name!r}: must be cpu, cuda or cuda:N"])
    elif not cuda:
        report.add(DeviceError, [f"device {name}: there is no CUDA device here; --device cpu works"])
    elif int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        report.add(DeviceError, [f"device {name}: there are {torch.cuda.device_count()}, from cuda:0"])
    return name
