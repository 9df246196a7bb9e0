"""Write a transformer of the original layout, one safetensors file, in the Diffusers layout; or the other way round.

Tensors are copied byte by byte through a small buffer: memory does not grow with the files. What is written appears
under its name only when it is complete.

Exit codes: 0 done; 2 bad input, found before anything is written; 1 something failed while writing; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs.errors import (
    CheckpointError,
    InterruptedRun,
    NotFoundError,
    OutputError,
    RequestError,
    SettingsError,
    TakenError,
    UsageError,
    UserError,
    kind_of,
)
from kandinsky5_nabla.scripts._arguments import Parser, fail, fail_running

if TYPE_CHECKING:
    from kandinsky5_nabla.configs import Preset
    from kandinsky5_nabla.models.headers import TensorHeader
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer

FORMAT = {"format": "pt"}
"""The metadata of a safetensors file by which libraries know that its tensors are torch's."""
ORIGINAL_METADATA = "original_metadata"
"""Key under which the Diffusers layout keeps what a file of the original layout had in place of `FORMAT`."""
DEFAULT_SHARD_SIZE = "5GB"

_BUFFER = 2**24  # bytes
_WRITTEN_FIRST = ("F64", "F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "F8_E5M2")  # as safetensors sorts: widest first

Write = Callable[[], str]
"""Writes what was checked, and returns what a person wants to know of it."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        description="Convert a transformer between the original layout (one file) and the Diffusers layout (a folder).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="FILE.safetensors, or a folder in the Diffusers layout")
    add("dest", type=Path, metavar="DEST", help="the folder that a file becomes, or the file that a folder becomes")
    add("--to", choices=("diffusers", "original"), help="the layout of DEST (default: the one that SOURCE has not)")
    add("--config", metavar="NAME|FILE.yaml", help="preset of the attention in config.json (default: by SOURCE's name)")
    add("--parts", type=Path, metavar="FOLDER", help="copy the other parts of this checkpoint, so that DEST is whole")
    add("--max-shard-size", metavar="SIZE", help=f"of a file in the Diffusers layout (default: {DEFAULT_SHARD_SIZE})")
    add("--overwrite", action="store_true", help="replace DEST")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Convert; return the exit code."""
    try:
        args = build_parser().parse_args(argv)
        write = _check(args)
    except (UserError, ValueError) as error:
        return fail(2, [kind_of(error, RequestError)(str(error))])
    except KeyboardInterrupt:
        return fail(130, [InterruptedRun("interrupted")])
    try:
        print(write())
    except Exception as error:
        return fail_running(error, args.debug)
    except KeyboardInterrupt:
        return fail(130, [InterruptedRun("interrupted")])
    return 0


def _check(args: argparse.Namespace) -> Write:
    """Return what writes DEST.

    Raises:
        FileNotFoundError: if SOURCE is missing.
        ValueError: with all that is wrong.
    """
    if not args.source.exists():
        raise NotFoundError(f"{args.source} is missing")
    layout = "original" if args.source.is_dir() else "diffusers"
    if args.to not in (None, layout):
        kind = "a folder, which" if args.source.is_dir() else "a file, which"
        raise UsageError(f"--to {args.to}: {args.source} is {kind} has that layout; leave --to out, or give another")
    return _check_to_original(args) if layout == "original" else _check_to_diffusers(args)


def _check_to_original(args: argparse.Namespace) -> Write:
    from kandinsky5_nabla.configs import find_preset
    from kandinsky5_nabla.models.headers import DIFFUSERS_WEIGHTS, read_headers, weight_files
    from kandinsky5_nabla.models.loading import build_on_meta, read_config
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
    from kandinsky5_nabla.pipeline.checks import Report
    from kandinsky5_nabla.pipeline.files import complete_file
    from kandinsky5_nabla.pipeline.safety import check_part
    from kandinsky5_nabla.scripts._outputs import named_file_problems

    folder = args.source / "transformer" if (args.source / "transformer").is_dir() else args.source
    report = Report()
    for name in ("config", "parts", "max_shard_size"):
        if getattr(args, name) is not None:
            sentence = f"--{name.replace('_', '-')}: is for the Diffusers layout, and {args.source} has it already"
            report.add(UsageError, [sentence])
    report.extend(named_file_problems("DEST", args.dest, "transformer.safetensors", args.overwrite))
    report.add(OutputError, _overlap_problems(args))
    report.add(CheckpointError, check_part("transformer", folder))
    report.raise_if_any()
    headers = read_headers(weight_files(folder, DIFFUSERS_WEIGHTS))
    build_on_meta(
        Kandinsky5Transformer, read_config(folder / "config.json", Kandinsky5Transformer), headers, str(folder)
    )
    metadata = _original_metadata(headers)

    def write() -> str:
        with complete_file(args.dest, overwrite=args.overwrite) as temporary:
            write_tensors(temporary, headers, metadata)
        advice = (
            "" if find_preset(str(args.dest)) else "; it does not tell the attention: load it with its preset's name"
        )
        return f"{args.dest}: {_size(headers)}{advice}"

    return write


def _check_to_diffusers(args: argparse.Namespace) -> Write:
    from kandinsky5_nabla.models.architecture import config_from_headers
    from kandinsky5_nabla.models.headers import read_headers
    from kandinsky5_nabla.models.loading import build_on_meta
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
    from kandinsky5_nabla.pipeline.checks import Report
    from kandinsky5_nabla.pipeline.single_file import attention_of, checked_file, preset_of_file

    file = checked_file(args.source)
    report = Report()
    report.extend(_folder_problems(args.dest, args.overwrite))
    report.add(OutputError, _overlap_problems(args))
    headers = report.attempt(read_headers, [file]) or {}
    preset = report.attempt(preset_of_file, file, args.config)
    attention = {} if preset is None else attention_of(preset)
    config = report.attempt(config_from_headers, headers, **attention) if headers else None
    if config is not None:
        report.add(CheckpointError, _part_problems(args.parts, config))
    report.raise_if_any()
    assert preset is not None, "the report had a problem otherwise"
    assert config is not None, "likewise"
    model = build_on_meta(Kandinsky5Transformer, config, headers, str(file))
    in_order = {name: headers[name] for name in model.state_dict()}
    shards = _shards(in_order, args.max_shard_size or DEFAULT_SHARD_SIZE)

    def write() -> str:
        with complete_folder(args.dest) as temporary:
            _write_transformer(temporary / "transformer", model, shards, _kept_metadata(file))
            if args.parts is not None:
                _copy_parts(args.parts, temporary, preset)
        files = "one file" if len(shards) == 1 else f"{len(shards)} files"
        return f"{args.dest}: {_size(headers)} in {files}, with the attention of {preset.name}"

    return write


def write_tensors(path: Path, headers: Mapping[str, TensorHeader], metadata: Mapping[str, str] | None) -> None:
    """Copy tensors, byte by byte, into one safetensors file, the same that safetensors' `save_file` would write."""
    sources = {file: _raw_header(file) for file in {header.file for header in headers.values()}}
    content: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end, spans = 0, []
    for name in sorted(headers, key=lambda name: (_rank(headers[name].dtype), name)):
        file = headers[name].file
        entries, start = sources[file]
        first, last = entries[name]["data_offsets"]
        spans.append((file, start + first, last - first))
        content[name] = {**entries[name], "data_offsets": [end, end + last - first]}
        end += last - first
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out, ExitStack() as stack:
        opened = {file: stack.enter_context(file.open("rb")) for file in sources}
        out.write(struct.pack("<Q", len(text)) + text)
        for file, start, length in spans:
            opened[file].seek(start)
            for offset in range(0, length, _BUFFER):
                out.write(opened[file].read(min(_BUFFER, length - offset)))


def _raw_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the JSON of a safetensors file that `read_headers` has accepted, and where its data starts."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return json.loads(stream.read(length)), 8 + length


def _rank(dtype: str) -> int:
    return _WRITTEN_FIRST.index(dtype) if dtype in _WRITTEN_FIRST else len(_WRITTEN_FIRST)


def _kept_metadata(file: Path) -> dict[str, str]:
    """Return the metadata of the Diffusers layout, which keep those of the file if they are others."""
    original = _raw_header(file)[0].get("__metadata__")
    return FORMAT if original == FORMAT else {**FORMAT, ORIGINAL_METADATA: json.dumps(original)}


def _original_metadata(headers: Mapping[str, TensorHeader]) -> dict[str, str] | None:
    """Return the metadata that the file had before it was converted, if it was."""
    kept = (_raw_header(next(iter(headers.values())).file)[0].get("__metadata__") or {}).get(ORIGINAL_METADATA)
    original = FORMAT if kept is None else json.loads(kept)
    if original is not None and not (isinstance(original, dict) and all(isinstance(v, str) for v in original.values())):
        raise CheckpointError(f"{ORIGINAL_METADATA} in the metadata must be an object of texts, or null, not {kept}")
    return original


def _shards(headers: dict[str, TensorHeader], max_size: str) -> dict[str, dict[str, TensorHeader]]:
    """Return the files of the Diffusers layout with their tensors, as diffusers would divide them."""
    from huggingface_hub import split_state_dict_into_shards_factory

    try:
        split = split_state_dict_into_shards_factory(
            headers,
            get_storage_size=lambda header: header.nbytes,
            filename_pattern="diffusion_pytorch_model{suffix}.safetensors",
            max_shard_size=max_size,
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return {file: {name: headers[name] for name in names} for file, names in split.filename_to_tensors.items()}


def _write_transformer(
    folder: Path,
    model: Kandinsky5Transformer,
    shards: Mapping[str, Mapping[str, TensorHeader]],
    metadata: Mapping[str, str],
) -> None:
    folder.mkdir()
    for file, headers in shards.items():
        write_tensors(folder / file, headers, metadata)
    if len(shards) > 1:
        total = sum(header.nbytes for headers in shards.values() for header in headers.values())
        weight_map = {name: file for file, headers in shards.items() for name in headers}
        _write_json(
            folder / "diffusion_pytorch_model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    (folder / "config.json").write_text(model.to_json_string(), encoding="utf-8")


def _part_problems(parts: Path | None, config: Mapping[str, Any]) -> list[str]:
    """Return why the other parts of a checkpoint cannot be copied, or do not fit the transformer."""
    from kandinsky5_nabla.pipeline.safety import WEIGHTS, check_folder, read_json, width_problems

    if parts is None:
        return []
    if problems := check_folder(parts, without=("transformer",)):
        return [f"--parts: {problem}" for problem in problems]
    configs = {part: parts / part / "config.json" for part in WEIGHTS if part != "transformer"}
    return width_problems(config, {part: read_json(path) for part, path in configs.items() if path.is_file()})


def _copy_parts(parts: Path, dest: Path, preset: Preset) -> None:
    """Copy all parts but the transformer; shift and preset are the transformer's, whatever was with the parts."""
    from kandinsky5_nabla.configs import preset_names
    from kandinsky5_nabla.pipeline.components import LOADERS, PUBLISHED_AS
    from kandinsky5_nabla.pipeline.safety import read_json

    index = read_json(parts / "model_index.json")
    for part in LOADERS.keys() - {"transformer"}:
        if any(index[part]):
            shutil.copytree(parts / part, dest / part)
    scheduler = dest / "scheduler" / "scheduler_config.json"
    if scheduler.is_file():
        _write_json(scheduler, {**read_json(scheduler), "shift": preset.shift})
    index.pop("preset", None)
    if preset.name in preset_names():
        index["preset"] = preset.name
    (transformer,) = LOADERS["transformer"].values()
    _write_json(dest / "model_index.json", {**index, "transformer": list(PUBLISHED_AS[transformer])})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def complete_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`; when the body ends it takes the place of `path`, when it raises it goes."""
    from kandinsky5_nabla.pipeline.files import temporary_name

    temporary, old = (temporary_name(path, "") for _ in range(2))
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(temporary, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _folder_problems(dest: Path, overwrite: bool) -> list[UserError]:
    """Return why DEST cannot become a folder. A folder that holds more than a checkpoint is not replaced."""
    from kandinsky5_nabla.pipeline.components import LOADERS
    from kandinsky5_nabla.scripts._outputs import folder_problems

    if os.path.lexists(dest) and not dest.is_dir():
        return [TakenError(f"DEST {dest}: is a file; name a folder")]
    there = sorted(path.name for path in dest.iterdir()) if dest.is_dir() else []
    others = [name for name in there if name not in (*LOADERS, "model_index.json")]
    if others and overwrite:
        held = ", ".join(others[:3])
        return [TakenError(f"DEST {dest}: holds {held}, which no checkpoint has; it is not replaced, name another")]
    if there and not overwrite:
        return [TakenError(f"DEST {dest}: exists; choose another name or add --overwrite")]
    return folder_problems("DEST", dest.absolute().parent)


def _overlap_problems(args: argparse.Namespace) -> list[str]:
    """Return why DEST cannot be replaced by what is read from it."""
    dest = args.dest.resolve()
    read = [path for path in (args.source, args.parts) if path is not None]
    return [
        f"DEST {args.dest}: holds or lies in {path}, which is read; name another"
        for path in read
        if dest in (path.resolve(), *path.resolve().parents) or path.resolve() in dest.parents
    ]


def _size(headers: Mapping[str, TensorHeader]) -> str:
    total = sum(header.nbytes for header in headers.values())
    return f"{len(headers)} tensors, {total / 1e9:.3g} GB"


if __name__ == "__main__":
    sys.exit(main())
