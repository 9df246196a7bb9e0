"""The checkpoint of a command line: where it comes from, and what its own files say before any weight is read."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kandinsky5_nabla.configs import Preset, find_preset, load_preset, preset_names
from kandinsky5_nabla.configs.arguments import HUB_ID
from kandinsky5_nabla.configs.errors import (
    ArgumentError,
    CheckpointError,
    DownloadError,
    LoraError,
    NotFoundError,
    OutputError,
    PresetError,
    RepositoryError,
    TakenError,
    UsageError,
    UserError,
    kind_of,
)
from kandinsky5_nabla.models.architecture import config_from_headers
from kandinsky5_nabla.models.headers import read_headers, weight_files
from kandinsky5_nabla.pipeline.checks import Report
from kandinsky5_nabla.pipeline.hub_files import check_repo_id
from kandinsky5_nabla.pipeline.lora_files import LoraRequest, find_lora, lora_problems, parse_lora, read_lora
from kandinsky5_nabla.pipeline.safety import check_folder, check_weights, read_json
from kandinsky5_nabla.pipeline.single_file import SOURCES, attention_of, checked_file, part_folder

DEFAULT_PRESET = "lite-t2v-10s-sft"
ORIGINAL_FOLDER = "model"  # of the transformer in a repository of the original layout
PARTS = ("vae", "text_encoder", "text_encoder_2")
TEXT_PARTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


@dataclass(frozen=True)
class Checkpoint:
    """Where the models of a run come from.

    Attributes:
        model: folder, Hub id or file, as it was asked for.
        kind: "folder" in the Diffusers layout, "hub" for a repository of that layout, "file" for a transformer in the
            original layout, "original" for a repository with such a file.
        config: name or file of the preset.
        preset: where the defaults come from.
        configs: by part, "transformer", "vae" and "scheduler": what config.json says; empty where it does not lie here.
        parts: folders for the other parts of a single file; those that are left out come from their repositories.
        cache_dir: of the Hub's files; None for the usual one.
        offline: open no connection.
        left_out: parts that are not loaded.
        revision: of a repository, where another than the preset's was asked for.
        folder: where the Diffusers layout lies, once it lies here.
        file: where the file of the original layout lies, once it lies here.
        commit: of the repository, once it was fetched.
    """

    model: str
    kind: str
    config: str
    preset: Preset
    configs: dict[str, dict[str, Any]]
    parts: dict[str, Path] = field(default_factory=dict)
    cache_dir: Path | None = None
    offline: bool = False
    left_out: tuple[str, ...] = ()
    revision: str | None = None
    folder: Path | None = None
    file: Path | None = None
    commit: str | None = None

    @property
    def without_text(self) -> bool:
        """Whether the text encoders are left out."""
        return "text_encoder" in self.left_out

    def fetched(self) -> Checkpoint:
        """Return the checkpoint with its folder on this machine: a repository is downloaded, or found in the cache.

        Raises:
            OSError: if it cannot be; the message names repository, file and remedy.
        """
        if self.folder is not None or self.file is not None:
            return self
        from kandinsky5_nabla.pipeline.hub import fetch, fetch_file
        from kandinsky5_nabla.pipeline.hub_files import PARTS as FOLDERS

        where = {"revision": self.revision or self.preset.revision, **self._hub}
        if self.kind == "original":
            name = f"{ORIGINAL_FOLDER}/{self.preset.original_file}"
            snapshot = fetch_file(self.model, name, **where)
            found = dataclasses.replace(self, file=snapshot.folder / name, commit=snapshot.commit)
            return dataclasses.replace(found, configs=_configs_of_file(found))
        needed = {name: part for name, part in FOLDERS.items() if name not in self.left_out}
        snapshot = fetch(self.model, parts=needed, **where)
        configs = _read_configs(snapshot.folder)
        return dataclasses.replace(self, folder=snapshot.folder, commit=snapshot.commit, configs=configs)

    def vae_folder(self) -> Path:
        """Return the VAE's folder on this machine; of a repository nothing else is fetched.

        Raises:
            OSError: as `fetched`.
        """
        if self.folder is not None:
            return self.folder / "vae"
        if "vae" in self.parts:
            return part_folder("vae", self.parts["vae"])
        from kandinsky5_nabla.pipeline.hub import fetch

        source = SOURCES["vae"]
        if self.kind == "hub":
            source = dataclasses.replace(source, repository=self.model, subfolder="vae")
        revision = self.revision or self.preset.revision if self.kind == "hub" else None
        parts = {source.subfolder: source.part}
        return fetch(source.repository, revision=revision, parts=parts, **self._hub).folder / source.subfolder

    @property
    def _hub(self) -> dict[str, Any]:
        return {"cache_dir": self.cache_dir, "offline": self.offline}


def find_checkpoint(report: Report, args: argparse.Namespace, default_preset: str) -> Checkpoint | None:
    """Return the checkpoint of parsed arguments; what is wrong with it goes into the report.

    None without a preset, since then there are no defaults to check anything against.
    """
    preset = report.attempt(_preset, args, default_preset)
    if preset is None:
        return None
    model = args.model or preset.model
    parts = {name: Path(path) for name in PARTS if (path := getattr(args, name, None)) is not None}
    report.extend(cache_problems(args.cache_dir))
    kind = _kind(model, preset)
    if args.revision is not None and kind in ("folder", "file"):
        report.add(UsageError, [f"--revision {args.revision}: for a repository of the Hub; leave it out for {model}"])
    if parts and kind not in ("file", "original"):
        options = ", ".join("--" + name.replace("_", "-") for name in parts)
        sentence = f"{options}: for a transformer in a file of its own (--model FILE.safetensors); leave it out"
        report.add(UsageError, [sentence])
    found = Checkpoint(
        model,
        kind,
        args.config or preset.name,
        preset,
        {"transformer": {}, "vae": {}, "scheduler": {}},
        parts,
        args.cache_dir,
        args.offline,
        _left_out(args),
        args.revision,
        Path(model) if kind == "folder" else None,
        Path(model) if kind == "file" else None,
    )
    for name, folder in parts.items() if kind in ("file", "original") else ():
        try:
            part_folder(name, folder)
        except FileNotFoundError:
            sentence = f"--{name.replace('_', '-')} {folder}: has no config.json, nor has {folder / name}"
            report.add(NotFoundError, [sentence])
    if kind == "file":
        try:
            return dataclasses.replace(found, configs=_configs_of_file(found))
        except (OSError, ValueError) as error:
            report.add(kind_of(error, CheckpointError), [f"model {error}"])
            return found
    if kind == "folder":
        problems = check_folder(Path(model), found.left_out)
        if not problems and Path(model) != preset.local_folder:  # which is ours, and imports take seconds
            problems = check_weights(Path(model), found.left_out)
        report.add(CheckpointError, problems)
        return found if problems else dataclasses.replace(found, configs=_read_configs(Path(model)))
    if not HUB_ID.fullmatch(model):
        sentence = (
            f"model {model!r}: there is no such folder, and it is no Hub id (owner/name); "
            f"the presets are {', '.join(preset_names())} (--config)"
        )
        report.add(NotFoundError, [sentence])
        return found
    try:
        check_repo_id(model)
        # Offline, what is missing in the cache is found now, not when everything else is ready.
        return found.fetched() if args.offline else found
    except ArgumentError as error:  # which names no repository
        report.add(RepositoryError, [f"model {model!r}: {error}"])
    except (UserError, OSError) as error:
        report.add(kind_of(error, DownloadError), [str(error)])
    return found


def cache_problems(folder: Path | None) -> list[UserError]:
    """Return why a folder cannot be the Hub's cache; it need not exist yet."""
    if folder is None:
        return []
    try:
        if stat.S_ISDIR(folder.stat().st_mode):
            return []
        return [TakenError(f"--cache-dir {folder}: is a file; name a folder")]
    except FileNotFoundError:
        from kandinsky5_nabla.scripts._outputs import folder_problems  # here: it loads torch

        return folder_problems("cache", next(above for above in folder.absolute().parents if above.exists()))
    except OSError as error:  # a name that is too long, or below a file
        return [OutputError(f"--cache-dir {folder}: {error.strerror}; name a folder")]


def unknown_repository(model: str) -> str:
    """Return a sentence about a Hub id that is no published checkpoint's, with the nearest one's."""
    published = dict.fromkeys(load_preset(name).model for name in preset_names())
    near = difflib.get_close_matches(model, published, n=1, cutoff=0.8)
    folder = (
        f"there is no folder {model}, so it is taken for a repository of the Hub; "
        if Path(model).parent.is_dir()
        else ""
    )
    return f"{folder}no preset knows {model}{f': did you mean {near[0]}?' if near else ''}"


def _preset(args: argparse.Namespace, default: str) -> Preset:
    """Return the preset that was named, or the model's own at the size that was asked for, or the default."""
    if args.config is not None:
        return load_preset(args.config)
    if args.model is None:
        return load_preset(default)
    size = None if None in (args.height, args.width) else (args.height, args.width)
    found = find_preset(args.model, size)
    if found is not None:
        return found
    if args.model.endswith(".safetensors"):
        raise PresetError(
            f"model {args.model}: no preset knows a file of this name, and its shapes do not tell the attention; "
            f"name the preset that it was trained as with --config: {', '.join(preset_names())}"
        )
    index = Path(args.model) / "model_index.json"
    name = read_json(index).get("preset") if os.path.isfile(index) else None  # Path's raises for a long name
    return load_preset(name or DEFAULT_PRESET)


def _left_out(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the parts that these arguments, which may be those of another command line, do not need."""
    if getattr(args, "decode_only", None) is not None:
        return (*TEXT_PARTS, "transformer")
    return TEXT_PARTS if getattr(args, "embeds", None) is not None else ()


def _kind(model: str, preset: Preset) -> str:
    if model.endswith(".safetensors"):
        return "file"
    if os.path.isdir(model):
        return "folder"
    original = preset.original_file is not None and f"{model}-Diffusers".endswith(preset.model.partition("/")[2])
    return "original" if original else "hub"


def _configs_of_file(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the configs that a file in the original layout stands for; its sizes follow from its tensors.

    Raises:
        FileNotFoundError, ValueError: if there is no such file, or it is no Kandinsky 5 transformer.
    """
    assert checkpoint.file is not None, "it lies here"
    headers = read_headers([checked_file(checkpoint.file)])
    return {"transformer": config_from_headers(headers, **attention_of(checkpoint.preset)), "vae": {}, "scheduler": {}}


def _read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configs of the parts of a folder; empty ones for what is missing or, as was reported, unreadable."""
    files = {"transformer": "config.json", "vae": "config.json", "scheduler": "scheduler_config.json"}
    return {part: Report().attempt(read_json, folder / part / file) or {} for part, file in files.items()}


def find_loras(report: Report, texts: Sequence[str], checkpoint: Checkpoint) -> list[LoraRequest]:
    """Return the LoRAs of FILE[:SCALE] texts; why one cannot be loaded goes into the report.

    Their shapes are compared with the transformer's where that lies here; else when it is loaded.
    """
    requests = [request for text in texts if (request := report.attempt(parse_lora, text)) is not None]
    missing = [request.path for request in requests if not os.path.exists(request.path)]
    # A repository is not looked for: nothing may be fetched before the whole request is checked.
    remedy = "`hf download OWNER/NAME --local-dir FOLDER` fetches one of the Hub"
    report.add(NotFoundError, [f"LoRA {path}: there is no such file; {remedy}" for path in missing])
    report.add(LoraError, _repeated(requests))
    if not requests or report.problems:
        return requests
    if checkpoint.file is not None or checkpoint.folder is not None:
        report.extend(lora_problems(requests, _linear_shapes(checkpoint)))
    else:
        for request in requests:
            try:
                read_lora(find_lora(request.path))
            except (OSError, ValueError) as error:
                report.add(kind_of(error, LoraError), [str(error)])
    return requests


def _repeated(requests: Sequence[LoraRequest]) -> Iterator[str]:
    """Yield each LoRA that is given more than once, whose scales would add up in silence."""
    files: dict[str, list[LoraRequest]] = {}
    for request in requests:
        files.setdefault(os.path.realpath(request.path), []).append(request)
    for same in files.values():
        if len(same) > 1:
            path, scales = same[0].path, [request.scale for request in same]
            given = " and ".join(f"{scale:g}" for scale in scales)
            yield f"LoRA {path}: is given {len(same)} times, at {given}; give it once, such as {path}:{sum(scales):g}"


def _linear_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Return `(out, in)` of the transformer's linear layers, from its tensors' headers."""
    file, folder = checkpoint.file, checkpoint.folder
    files = [file] if file is not None else weight_files(folder / "transformer") if folder is not None else []
    weights = {n.removesuffix(".weight"): h.shape for n, h in read_headers(files).items() if n.endswith(".weight")}
    return {name: (shape[0], shape[1]) for name, shape in weights.items() if len(shape) == 2}
