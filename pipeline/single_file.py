"""A pipeline from one transformer file of the original layout; its other parts come from folders or the Hub."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configs import Preset, find_preset, load_preset, preset_names
from ..configs.arguments import checked_path
from ..configs.errors import ArgumentError, CheckpointError, NotFoundError, PresetError
from ..models.architecture import config_from_headers
from ..models.headers import DIFFUSERS_WEIGHTS, TRANSFORMERS_WEIGHTS, read_headers
from .hub_files import Part
from .safety import TOKENIZER_FILES, WEIGHTS, check_part, check_part_weights, read_json, width_problems

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig

    from .pipeline import Kandinsky5NablaPipeline


@dataclass(frozen=True)
class Source:
    """Where a part comes from if the caller gives no folder.

    Attributes:
        repository: on the Hub.
        subfolder: in it; empty for the repository's own root.
        part: its files there, those of the tokenizer included.
        tokenizer: the component whose files lie beside the part's; None for a part without.
    """

    repository: str
    subfolder: str
    part: Part
    tokenizer: str | None


_TEXT = Part(("config.json", "*.json", "*.txt"), TRANSFORMERS_WEIGHTS)

SOURCES = {
    "vae": Source("hunyuanvideo-community/HunyuanVideo", "vae", Part(("config.json",), DIFFUSERS_WEIGHTS), None),
    "text_encoder": Source("Qwen/Qwen2.5-VL-7B-Instruct", "", _TEXT, "tokenizer"),
    "text_encoder_2": Source("openai/clip-vit-large-patch14", "", _TEXT, "tokenizer_2"),
}
"""The repositories that the authors' code takes the other parts from (checkpoints.md, "Original layout")."""


def load_single_file(
    cls: type[Kandinsky5NablaPipeline],
    file: str | os.PathLike,
    *,
    preset: str | None = None,
    vae: str | os.PathLike | None = None,
    text_encoder: str | os.PathLike | None = None,
    text_encoder_2: str | os.PathLike | None = None,
    without: Collection[str] = (),
    torch_dtype: torch.dtype | None = None,
    text_encoder_dtype: torch.dtype | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | None = None,
    offline: bool = False,
) -> Kandinsky5NablaPipeline:
    """Return a pipeline whose transformer is a single safetensors file.

    Everything is compared, from headers and configs, before any weights are read or downloaded.

    Args:
        cls: of the pipeline.
        file: the transformer. Its sizes follow from its tensors' shapes.
        preset: name or YAML file; says what the shapes do not tell, the attention. Found by the file's name if None.
        vae: a folder, of a whole checkpoint in the Diffusers layout or of the part itself; None is its repository in
            `SOURCES`.
        text_encoder: likewise. The tokenizer lies in the same folder, or beside it as `tokenizer`.
        text_encoder_2: likewise, with `tokenizer_2`.
        without: "text_encoder", "text_encoder_2" or both, if prompts come as embeddings: neither they nor their
            tokenizers are looked for, fetched or loaded.
        torch_dtype: of transformer and text encoders, fp32 if None; the VAE is loaded in fp32 always.
        text_encoder_dtype: of `text_encoder`, if it is another one.
        quantization_config: of `text_encoder` (`pipeline.precision`).
        cache_dir: of the Hub's files.
        token: for the Hub.
        offline: take repositories from the cache alone.

    Raises:
        OSError: if the file or a folder is missing, or a repository cannot be fetched (`hub.fetch`).
        ValueError: if the file is no Kandinsky 5 transformer, no preset is known, or a part does not fit; the message
            has all problems.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    from ..models.loading import build_on_meta, checked_dtype, load_single_transformer
    from ..models.transformer import Kandinsky5Transformer

    _check_without(without)
    given = {"vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}
    for name, path in {**given, "cache_dir": cache_dir}.items():
        if path is not None:
            checked_path(name, path)
    file, dtype = checked_file(checked_path("file", file)), checked_dtype(torch_dtype)
    encoder_dtype = dtype if text_encoder_dtype is None else checked_dtype(text_encoder_dtype)
    chosen = preset_of_file(file, preset)
    headers = read_headers([file])
    config = config_from_headers(headers, **attention_of(chosen))
    build_on_meta(Kandinsky5Transformer, config, headers, str(file))
    names = [name for name in SOURCES if name not in without]
    hub = {"cache_dir": cache_dir, "token": token, "offline": offline}
    _raise_all(file, width_problems(config, {name: _config_of(name, given[name], hub) for name in names}))
    folders: dict[str, Path] = {}
    for name in names:
        folders |= _folders(name, given[name], hub)
    _raise_all(file, _problems(folders))
    transformer = load_single_transformer(file, config, dtype)
    quantised = {"dtype": encoder_dtype, "quantization_config": quantization_config}
    parts = _load_parts(folders, dtype, quantised)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=chosen.shift)
    return cls(transformer=transformer, **parts, scheduler=scheduler, preset=preset or chosen.name)


def checked_file(file: Path) -> Path:
    """Return the file.

    Raises:
        FileNotFoundError: if it is missing.
        ValueError: if it is a folder or no safetensors file by its name.
    """
    if file.is_dir():
        raise CheckpointError(f"{file} is a folder; from_pretrained loads folders in the Diffusers layout")
    if not file.is_file():
        raise NotFoundError(f"{file} is missing")
    if file.suffix != ".safetensors":
        raise CheckpointError(f"{file}: only .safetensors files are read; others can run code when they are")
    return file


def _check_without(without: object) -> None:
    left_out = sorted(SOURCES.keys() - {"vae"})
    named = list(without) if isinstance(without, Collection) and not isinstance(without, str) else [without]
    if isinstance(without, str) or any(name not in left_out for name in named):
        raise ArgumentError(f"without {without!r}: only text encoders can be left out; must be a list of {left_out}")


def preset_of_file(file: Path, preset: str | None) -> Preset:
    """Return the preset that was named, or the one whose transformer in the original layout has the file's name.

    Raises:
        ValueError: if there is none.
    """
    found = find_preset(str(file)) if preset is None else load_preset(preset)
    if found is None:
        names = ", ".join(preset_names())
        raise PresetError(
            f"{file}: no preset knows a file of this name, and its shapes do not tell the attention; name the preset "
            f"that it was trained as: {names}"
        )
    return found


def attention_of(preset: Preset) -> dict[str, Any]:
    """Return the attention keys of a transformer's config (checkpoints.md) as a preset has them."""
    nabla = preset.attention == "nabla"
    wT, wH, wW = preset.nabla_window or (None, None, None)
    return {
        "attention_type": "nabla" if nabla else "regular",
        "attention_P": preset.nabla_P,
        "attention_wT": wT,
        "attention_wH": wH,
        "attention_wW": wW,
        "attention_add_sta": True,
        "attention_method": "topcdf",
        # Nothing reads these four; the published configs have them.
        "attention_causal": False,
        "attention_local": False,
        "attention_glob": False,
        "attention_window": 3,
    }


def _problems(folders: Mapping[str, Path]) -> list[str]:
    """Return why the folders of the parts cannot be loaded, by name of the part."""
    problems = []
    for name, folder in folders.items():
        found = check_part(name, folder)
        problems += found or (check_part_weights(name, folder) if name in WEIGHTS else [])
    return list(dict.fromkeys(problems))  # a tokenizer may lie in its encoder's folder


def _raise_all(file: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{file} and the other parts cannot be loaded together: " + "; ".join(problems))


def _config_of(name: str, given: str | os.PathLike | None, hub: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's config; of a repository nothing else is downloaded yet."""
    if given is not None:
        return read_json(part_folder(name, Path(given)) / "config.json")
    from .hub import fetch_file

    source = SOURCES[name]
    path = f"{source.subfolder}/config.json" if source.subfolder else "config.json"
    return read_json(fetch_file(source.repository, path, **hub).folder / path)


def _folders(name: str, given: str | os.PathLike | None, hub: Mapping[str, Any]) -> dict[str, Path]:
    """Return the folders of a part and its tokenizer; its repository's are downloaded or from the cache."""
    source = SOURCES[name]
    if given is not None:
        folder = part_folder(name, Path(given))
        tokenizer = None if source.tokenizer is None else _tokenizer_folder(name, folder, source.tokenizer)
    else:
        from .hub import fetch

        snapshot = fetch(source.repository, parts={source.subfolder: source.part}, **hub)
        folder = tokenizer = snapshot.folder / source.subfolder
    if source.tokenizer is None or tokenizer is None:
        return {name: folder}
    return {name: folder, source.tokenizer: tokenizer}


def part_folder(name: str, folder: Path) -> Path:
    """Return the part's own folder, in a whole checkpoint or given itself."""
    for candidate in (folder / name, folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise NotFoundError(f"{name} {folder}: neither {folder / name / 'config.json'} nor {folder / 'config.json'} exists")


def _tokenizer_folder(name: str, folder: Path, tokenizer: str) -> Path:
    """Return where a text encoder's tokenizer lies: with it, or in a checkpoint's folder of its own."""
    candidates = (folder, folder.parent / tokenizer)
    for candidate in candidates:
        if any((candidate / file).is_file() for file in TOKENIZER_FILES):
            return candidate
    looked_in = " nor ".join(map(str, candidates))
    raise NotFoundError(f"{name} {folder}: neither {looked_in} has a tokenizer ({' or '.join(TOKENIZER_FILES)})")


def _load_parts(folders: Mapping[str, Path], dtype: torch.dtype, text_encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts by name; `text_encoder` has the dtype and the quantisation of the first one."""
    import torch
    from diffusers import AutoencoderKLHunyuanVideo
    from transformers import CLIPTextModel, CLIPTokenizer, Qwen2Tokenizer

    from ..models.text_encoder import QwenTextEncoder

    vae = {"torch_dtype": torch.float32, "use_safetensors": True}
    clip = {"dtype": dtype, "use_safetensors": True}
    loaders: dict[str, tuple[Any, Mapping[str, Any]]] = {
        "vae": (AutoencoderKLHunyuanVideo, vae),
        "text_encoder": (QwenTextEncoder, text_encoder),
        "tokenizer": (Qwen2Tokenizer, {}),
        "text_encoder_2": (CLIPTextModel, clip),
        "tokenizer_2": (CLIPTokenizer, {}),
    }
    return {name: loaders[name][0].from_pretrained(folder, **loaders[name][1]) for name, folder in folders.items()}
