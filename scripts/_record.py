"""The record of a video: all that it takes to make it again, as JSON in the MP4, beside it, and in a run's state."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs.errors import NotFoundError, RecordError
from kandinsky5_nabla.configs.tiles import vae_tiles
from kandinsky5_nabla.scripts._checkpoint import PARTS

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline.checks import Settings
    from kandinsky5_nabla.scripts._setup import Setup

FORMAT = 1
"""Of the record: raised when a reader of the old one would misread the new one."""

PACKAGES = ("kandinsky5-nabla", "torch", "diffusers", "transformers")
FIXED = ("scale_factor", "fps")
"""Numbers that no argument sets; they come from the preset."""
_NO_ARGUMENT = (*FIXED, "versions", "short_prompt")

_JSON_TYPES = {"str": str, "int": int, "float": (int, float), "tuple": list, "Mapping": dict}
"""What a field's value is in JSON, by the name of its type."""

_ARGUMENTS = {"preset": "config", "loras": "lora", "num_inference_steps": "steps", "nabla_P": "nabla_p"}
"""Fields whose argument has another name."""


def versions() -> dict[str, str]:
    """Return the versions of this package and of what its numbers depend on."""
    return {name: version(name) for name in PACKAGES}


@dataclass(frozen=True)
class Record:
    """What made one video; no names of outputs, times or timings, so that the same run gives the same bytes.

    Attributes:
        prompt: the text that was encoded.
        short_prompt: what was typed, where that is its expansion; else None.
        negative_prompt: None for the authors' text.
        seed: of its noise.
        preset: name or file.
        model: folder, Hub id or file; None for the checkpoint that comes with the preset.
        revision: the commit of a repository; None for what lies on this machine.
        vae, text_encoder, text_encoder_2: folders of the other parts of a FILE; None where none was given.
        loras: FILE:SCALE.
        embeds: file of the encoded prompt; None where it was encoded in the run.
        height, width: pixels.
        num_frames: frames.
        num_inference_steps: Euler steps.
        guidance_scale, shift: as in `Settings`.
        scale_factor: RoPE divisors along t, h, w.
        nabla_P: None for dense attention.
        fps: frames a second.
        attention: name of the backend.
        device: "cpu", "cuda" or "cuda:N".
        dtype, text_encoder_dtype, dit_dtype: full names.
        vae_tile: name of the tile that was decoded with.
        codec: of the file.
        crf: its quality; None where the codec has no such choice.
        versions: of the packages.
    """

    prompt: str
    short_prompt: str | None
    negative_prompt: str | None
    seed: int
    preset: str
    model: str | None
    revision: str | None
    vae: str | None
    text_encoder: str | None
    text_encoder_2: str | None
    loras: tuple[str, ...]
    embeds: str | None
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    shift: float
    scale_factor: tuple[float, ...]
    nabla_P: float | None
    fps: float
    attention: str
    device: str
    dtype: str
    text_encoder_dtype: str
    dit_dtype: str
    vae_tile: str
    codec: str
    crf: int | None
    versions: Mapping[str, str]

    @classmethod
    def of(
        cls,
        setup: Setup,
        settings: Settings,
        attention: str,
        *,
        prompt: str,
        short_prompt: str | None,
        seed: int,
        embeds: Path | None,
        codec: str,
        crf: int | None,
    ) -> Record:
        """Return the record of a video of a run, as it is known once the checkpoint is loaded."""
        checkpoint, preset = setup.checkpoint, setup.preset
        inside = preset.local_folder is not None and checkpoint.model == preset.model
        parts = dict.fromkeys(PARTS) | {name: str(folder) for name, folder in checkpoint.parts.items()}
        return cls(
            prompt=prompt,
            short_prompt=short_prompt,
            negative_prompt=setup.negative_prompt,
            seed=seed,
            preset=checkpoint.config,
            model=None if inside else checkpoint.model,
            revision=checkpoint.commit,
            **parts,
            loras=tuple(f"{lora.path}:{lora.scale!r}" for lora in setup.loras),
            embeds=None if embeds is None else str(embeds),
            height=settings.height,
            width=settings.width,
            num_frames=settings.num_frames,
            num_inference_steps=settings.num_inference_steps,
            # A preset may say 5 where an argument says 5.0; the JSON of a number must not depend on where it came from.
            guidance_scale=float(settings.guidance_scale),
            shift=float(settings.shift),
            scale_factor=tuple(map(float, settings.scale_factor)),
            nabla_P=None if settings.nabla_P is None else float(settings.nabla_P),
            fps=float(preset.fps),
            attention=attention,
            device=setup.device,
            dtype=setup.dtype,
            text_encoder_dtype=setup.text_encoder_dtype,
            dit_dtype=setup.dit_dtype,
            vae_tile=(setup.tile or vae_tiles()[0]).name,
            codec=codec,
            crf=crf,
            versions=versions(),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values, with its format."""
        return {"format": FORMAT, **asdict(self)}

    def as_json(self) -> str:
        """Return the record in one line, for the comment of a video."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Return the record of `as_json`. Its values are checked as those of any command line, by `arguments`.

        Raises:
            ValueError: if it is no record, or of another format.
        """
        values: Any = None
        with suppress(ValueError, RecursionError):
            values = json.loads(text)
        if not isinstance(values, dict) or "format" not in values:
            raise RecordError("holds no record of a run")
        if (found := values.pop("format")) != FORMAT:
            raise RecordError(f"holds a record of the format {found!r}; this version reads {FORMAT}")
        names = {field.name for field in fields(cls)}
        if differing := sorted(names ^ values.keys()):
            raise RecordError(f"holds a damaged record: {', '.join(differing)} missing or unknown")
        for field in fields(cls):
            value, written = values[field.name], str(field.type)
            if not (_is_of(value, *re.findall(r"\w+", written)[:2]) or (value is None and "None" in written)):
                raise RecordError(f"holds a damaged record: {field.name} is {value!r}")
        values |= {name: tuple(values[name]) for name in ("loras", "scale_factor")}
        return cls(**values)

    def arguments(self) -> list[str]:
        """Return the record as arguments of the command line."""
        values = {_ARGUMENTS.get(name, name): value for name, value in asdict(self).items()}
        return as_argv({name: value for name, value in values.items() if name not in _NO_ARGUMENT})


def _is_of(value: object, kind: str, inner: str = "") -> bool:
    """Return whether a value of JSON is of a field's type; of a list each entry is. True and false are no numbers."""
    if isinstance(value, list):
        return kind == "tuple" and all(_is_of(each, inner) for each in value)
    return isinstance(value, _JSON_TYPES[kind]) and not isinstance(value, bool)


def read_record(path: Path) -> Record:
    """Return the record in a video's comment or in a NAME.json.

    Raises:
        OSError, ValueError: if it cannot be read, or there is none.
    """
    if not os.path.exists(path):  # not Path's, which raises for a name that is too long
        raise NotFoundError("there is no such file")
    from kandinsky5_nabla.pipeline.frames_folder import folder_of_frames

    if folder := folder_of_frames(path):
        raise RecordError(f"is a part of the video in a folder of frames; name the folder, {folder}")
    if path.suffix == ".json":
        return Record.from_json(path.read_text("utf-8-sig"))
    from kandinsky5_nabla.pipeline.export import read_comment

    return Record.from_json(read_comment(path) or "")


def as_argv(values: Mapping[str, Any]) -> list[str]:
    """Return values, by the names that argparse gives them, as a command line's words; None and False as none."""
    words = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [f"{option}={one}" for one in (value if isinstance(value, (list, tuple)) else [value])]
    return words
