"""Files of LoRAs: found, read by their headers in several formats, compared with the transformer's layers.

Nothing here imports torch, so that a command line can check LoRAs before anything is loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configs.arguments import checked_path
from ..configs.errors import CheckpointError, LoraError, NotFoundError, UserError, kind_of
from ..models.headers import open_weights, read_headers

if TYPE_CHECKING:
    import torch

WEIGHT_NAMES = ("lora.safetensors", "pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""What Kandinsky's authors, diffusers and peft call the file of a LoRA."""

CONFIG_NAMES = ("config_lora.json", "adapter_config.json")
"""What Kandinsky's authors and peft call the file beside it that says its alpha."""

FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""What makes `a/b.bin` a missing file and no Hub id."""

TRIGGER_KEYS = ("trigger", "trigger_word", "instance_prompt")
"""Where a file's metadata may name the trigger words; the published camera LoRAs use the first."""

PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.")
"""What formats put before a module's name, in this order."""

_KEY = re.compile(r"(?P<module>.+?)\.(?:lora[_.](?P<part>A|B|down|up)(?:\.[^.]+)?\.weight|alpha)")  # .default: peft
_PARTS = {"A": "A", "down": "A", "B": "B", "up": "B", None: "alpha"}
_MODULE = r"(.*\.)?({})"  # what one of peft's patterns must match
_INSIDE_AN_ADAPTER = re.compile(r"\.(base_layer|lora_[AB])\b")


@dataclass(frozen=True)
class LoraRequest:
    """A LoRA that a user asks for.

    Attributes:
        path: file, folder or Hub id.
        scale: factor of its change of the weights.
    """

    path: str
    scale: float = 1.0


@dataclass(frozen=True)
class Target:
    """How a LoRA changes the weight W of a linear layer: W + alpha / rank * B A.

    Attributes:
        key_A: name in the file of A, `[rank, in]`.
        key_B: name in the file of B, `[out, rank]`.
        rank: of the change.
        alpha: as peft counts it.
    """

    key_A: str
    key_B: str
    rank: int
    alpha: float


@dataclass(frozen=True)
class Lora:
    """What a LoRA says of itself.

    Attributes:
        source: the file, or how messages call a state dict.
        shapes: of its tensors, by key.
        alphas: the numbers under keys that end in `.alpha`.
        integers: keys of tensors that are not floating point.
        config: `lora_alpha`, `alpha_pattern` and what else peft writes; empty if the LoRA has none.
        trigger: words that belong before the prompt, or "".
    """

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    alphas: Mapping[str, float]
    integers: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    trigger: str = ""

    def targets(self, linears: Mapping[str, tuple[int, int]]) -> dict[str, Target]:
        """Return what it changes, by module, in a transformer with these linear layers (`linear_layers`).

        Raises:
            ValueError: if any of its tensors fits no layer, with names and shapes, or it has none.
        """
        problems = [f"{key} is not floating point" for key in self.integers]
        parts = self._parts(linears, problems)
        targets = {}
        for module, keys in parts.items():
            target = self._target(module, keys, linears[module])
            if isinstance(target, Target):
                targets[module] = target
            else:
                problems.append(target)
        if not parts:
            problems.append("nothing in it matches a layer")
        if problems:
            shown = [*problems[:5], *([f"and {len(problems) - 5} more"] if len(problems) > 5 else [])]
            raise LoraError(f"{self.source} is no LoRA of this transformer: {'; '.join(shown)}")
        return targets

    def _parts(self, linears: Mapping[str, tuple[int, int]], problems: list[str]) -> dict[str, dict[str, str]]:
        """Return the keys of A, B and alpha by module; what is none of them goes into the problems."""
        modules = {f"lora_unet_{name.replace('.', '_')}": name for name in linears} | {name: name for name in linears}
        parts: dict[str, dict[str, str]] = {}
        strangers: dict[str, None] = {}
        for key in (*self.shapes, *self.alphas):
            found = _KEY.fullmatch(_without_prefixes(key))
            if found is None:
                problems.append(f"{key} is neither lora_A, lora_B nor alpha of a linear layer")
            elif found["module"] not in modules:
                strangers[found["module"]] = None
            else:
                module = modules[found["module"]]
                first = parts.setdefault(module, {}).setdefault(_PARTS[found["part"]], key)
                if first != key:
                    problems.append(f"{key} stands for the same as {first}")
        problems += [f"{name} is no linear layer of it" for name in strangers]
        return parts

    def _target(self, module: str, keys: Mapping[str, str], weight: tuple[int, int]) -> Target | str:
        """Return what a layer's tensors do to it, or why they cannot."""
        if not {"A", "B"} <= keys.keys():
            return f"{module} has {' and '.join(keys.values())} alone; lora_A and lora_B come together"
        A, B = self.shapes[keys["A"]], self.shapes[keys["B"]]
        if len(A) != 2 or len(B) != 2 or A[0] != B[1] or not A[0] or (B[0], A[1]) != weight:
            return f"{module}: lora_A {list(A)} and lora_B {list(B)} do not fit its weight {list(weight)}"
        rank = A[0]
        stated = _by_pattern(module, self.config.get("rank_pattern"), self.config.get("r", rank))
        if stated != rank:
            return f"{module} has rank {rank} in the tensors and {stated!r} in the config beside them"
        alpha = _by_pattern(module, self.config.get("alpha_pattern"), self.config.get("lora_alpha", rank))
        alpha = self.alphas.get(keys.get("alpha", ""), alpha)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            return f"{module} has the alpha {alpha!r}; it must be a finite number"
        return Target(keys["A"], keys["B"], rank, alpha * math.sqrt(rank) if self.config.get("use_rslora") else alpha)


def parse_lora(text: str) -> LoraRequest:
    """Return what `FILE[:SCALE]` asks for; the name may hold colons, the scale is 1 if left out.

    Raises:
        ValueError: if the name is empty or the scale no finite number.
    """
    path, colon, number = text.rpartition(":")
    scale = _number(number) if colon else None
    if scale is None:
        if path.endswith(".safetensors") or (path and not number.strip()):
            raise LoraError(f"LoRA {text!r}: the scale {number!r} must be a finite number, such as 0.8")
        path, scale = text, 1.0
    if not path.strip() or not math.isfinite(scale):
        raise LoraError(f"LoRA {text!r}: give FILE[:SCALE], a file's name and a finite number")
    return LoraRequest(path, scale)


def with_triggers(prompts: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the prompts with the LoRAs' trigger words before each; those that a prompt has are not repeated."""
    return [" ".join([*(text for text in words if not _says(prompt, text)), prompt]) for prompt in prompts]


def find_lora(
    source: str | Path,
    *,
    weight_name: str | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """Return the safetensors file of a LoRA: a file, one in a folder, or one of a Hub repository, which is downloaded.

    Args:
        source: file, folder or Hub id.
        weight_name: the file in the folder, if it holds several and none is called as in `WEIGHT_NAMES`.
        subfolder: folder in the folder or repository.
        revision: of the repository, like the arguments that follow.
        token: for the Hub.
        cache_dir: of the Hub.
        local_files_only: open no connection.
        force_download: download again.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if there are several, or it is no safetensors file.
    """
    path = checked_path("LoRA", source)
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and path.suffix not in FILE_SUFFIXES:
        from huggingface_hub import snapshot_download

        where = f"{subfolder}/" if subfolder else ""
        path = Path(
            snapshot_download(
                str(source),
                allow_patterns=[where + name for name in (weight_name or "*.safetensors", *CONFIG_NAMES)],
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                force_download=force_download,
            )
        )
    if path.is_dir():
        path = _lora_in(path / subfolder if subfolder else path, weight_name)
    if not path.is_file():
        raise NotFoundError(f"LoRA {path}: there is no such file")
    if path.suffix != ".safetensors":
        raise LoraError(f"LoRA {path}: only safetensors files are read; pickle files can run code")
    return path


def read_lora(file: Path) -> Lora:
    """Return what a safetensors file, and the config beside it, say of a LoRA; only its alphas are read.

    Raises:
        ValueError: if the file is damaged, or the config is of something else than a plain LoRA.
    """
    try:
        headers = read_headers([file])
    except CheckpointError as error:
        raise LoraError(str(error)) from error
    scalars = [key for key in headers if key.endswith(".alpha")]
    with open_weights(file) as weights:
        metadata = weights.metadata() or {}
        alphas = {key: float(weights.get_tensor(key)) for key in scalars if headers[key].numel == 1}
    tensors = {key: header for key, header in headers.items() if key not in alphas}
    words = (" ".join(metadata.get(key, "").split()) for key in TRIGGER_KEYS)
    return Lora(
        source=str(file),
        shapes={key: header.shape for key, header in tensors.items()},
        alphas=alphas,
        integers=[key for key, header in tensors.items() if not header.floating],
        config=_config(file, metadata),
        trigger=next(filter(None, words), ""),
    )


def lora_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Lora:
    """Return what a state dict says of a LoRA."""
    alphas = {key: float(x) for key, x in tensors.items() if key.endswith(".alpha") and x.numel() == 1}
    rest = {key: x for key, x in tensors.items() if key not in alphas}
    integers = [key for key, x in rest.items() if not x.is_floating_point()]
    return Lora("this state dict", {key: tuple(x.shape) for key, x in rest.items()}, alphas, integers)


def linear_layers(transformer: Any) -> dict[str, tuple[int, int]]:
    """Return `(out, in)` of a transformer's linear layers by name, whether or not LoRAs are loaded.

    Of a checkpoint that is not loaded, the shapes of the `.weight` tensors with two dimensions say the same.
    """
    return {
        name: (module.out_features, module.in_features)
        for name, module in transformer.named_modules()
        if hasattr(module, "in_features") and not _INSIDE_AN_ADAPTER.search(name)
    }


def lora_problems(requests: Sequence[LoraRequest], linears: Mapping[str, tuple[int, int]]) -> list[UserError]:
    """Return every reason why LoRAs cannot be loaded into a transformer with these linear layers."""
    problems = []
    for request in requests:
        try:
            read_lora(find_lora(request.path)).targets(linears)
        except (UserError, ValueError, FileNotFoundError) as error:  # the Hub's client has its own
            problems.append(kind_of(error, LoraError)(str(error)))
    return problems


def parameter_keys(targets: Mapping[str, Target]) -> dict[str, str]:
    """Return which key of the file stands for each of peft's parameters."""
    pairs = {module: (("A", target.key_A), ("B", target.key_B)) for module, target in targets.items()}
    return {f"{module}.lora_{part}.weight": key for module, parts in pairs.items() for part, key in parts}


def peft_config(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Return the values of peft's LoraConfig, named as diffusers reads them: a rule, and exceptions by layer."""
    ranks = {module: target.rank for module, target in targets.items()}
    alphas = {module: target.alpha for module, target in targets.items()}
    config: dict[str, Any] = {"target_modules": list(targets)}
    for name, pattern, values in (("r", "rank_pattern", ranks), ("lora_alpha", "alpha_pattern", alphas)):
        config[name] = Counter(values.values()).most_common(1)[0][0]
        exceptions = {module: value for module, value in values.items() if value != config[name]}
        config[pattern] = {f"^{re.escape(module)}": value for module, value in exceptions.items()}
    return {f"transformer.{key}": value for key, value in config.items()}


def _lora_in(folder: Path, weight_name: str | None) -> Path:
    if weight_name is not None:
        return folder / weight_name
    files = sorted(folder.glob("*.safetensors"))
    chosen = [file for file in files if file.name in WEIGHT_NAMES] or files
    if not chosen:
        raise NotFoundError(f"LoRA {folder}: the folder holds no safetensors file")
    if len(chosen) > 1:
        raise LoraError(f"LoRA {folder}: give one file of {', '.join(file.name for file in chosen)}")
    return chosen[0]


def _config(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return what peft calls the config: in the file's metadata as diffusers writes it, or in a file beside it."""
    written = {"its metadata": metadata["lora_adapter_metadata"]} if metadata.get("lora_adapter_metadata") else {}
    beside = [file.parent / name for name in CONFIG_NAMES if (file.parent / name).is_file()]
    texts = written or {path.name: path for path in beside[:1]}
    for where, text in texts.items():
        try:
            config = json.loads(text.read_text(encoding="utf-8") if isinstance(text, Path) else text)
        except (OSError, ValueError, RecursionError) as error:
            raise LoraError(f"{file}: {where} cannot be read: {error}") from error
        if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA" or config.get("use_dora"):
            raise LoraError(f"{file}: {where} does not describe a plain LoRA")
        config = {key.removeprefix("transformer."): value for key, value in config.items()}
        for name in ("rank_pattern", "alpha_pattern"):
            if not _are_patterns(config.get(name) or {}):
                raise LoraError(f"{file}: {where} has the {name} {config[name]!r}; it must map patterns to numbers")
        return config
    return {}


def _are_patterns(value: Any) -> bool:
    try:
        return isinstance(value, dict) and all(re.compile(_MODULE.format(pattern)) for pattern in value)
    except re.error:
        return False


def _by_pattern(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """Return the value of the first of peft's patterns that matches a module."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(_MODULE.format(pattern), module):
            return value
    return default


def _without_prefixes(key: str) -> str:
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    return key


def _says(prompt: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", " ".join(prompt.split())) is not None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
