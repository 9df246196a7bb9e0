"""Latents as small pictures without the VAE: a linear map from their channels to colours.

Legend: B videos, T latent frames, H/W latent rows and columns, C channels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..configs.errors import CheckpointError, PreviewError
from ..models.headers import read_headers, weight_files
from .safety import read_json

if TYPE_CHECKING:
    import numpy as np

KIND = "kandinsky5-nabla preview map"
FORMAT = 1
"""Of the file: raised when a reader of the old one would misread the new one."""

SHIPPED = Path(__file__).parents[1] / "configs" / "preview"
"""The maps that come with the package, as `scripts/fit_preview.py` writes them."""

ENCODER_END = ("quant_conv.weight", "quant_conv.bias")
"""The encoder's last layer. It says what each channel means; a decoder that was trained further leaves it alone."""


@dataclass(frozen=True)
class PreviewMap:
    """A linear map from latents to colours: `latents @ weights + bias` is RGB in 0 .. 1.

    Attributes:
        vae: the VAE that it was fitted for, by its `vae_fingerprint`.
        weights: `[C, 3]`.
        bias: `[3]`.
    """

    vae: str
    weights: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]

    def to_json(self) -> str:
        """Return the map as the text of a file."""
        return json.dumps({"kind": KIND, "format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PreviewMap:
        """Return the map of `to_json`.

        Raises:
            PreviewError: if it is none, or of another format.
        """
        values: Any = None
        with suppress(ValueError, RecursionError):
            values = json.loads(text)
        if not isinstance(values, dict) or values.pop("kind", None) != KIND:
            raise PreviewError("holds no map of a preview")
        if (found := values.pop("format", None)) != FORMAT:
            raise PreviewError(f"holds a map of the format {found!r}; this version reads {FORMAT}")
        if problems := list(_problems(values)):
            raise PreviewError(f"holds a damaged map: {'; '.join(problems)}")
        return cls(values["vae"], tuple(map(tuple, values["weights"])), tuple(values["bias"]))


def preview_frames(latents_THWC: torch.Tensor, preview_map: PreviewMap) -> np.ndarray:
    """Return the colours of latents as uint8 `[T, H, W, 3]`.

    Raises:
        PreviewError: if they have another number of channels than the map.
    """
    weights_C3 = torch.tensor(preview_map.weights)
    if latents_THWC.shape[-1] != len(weights_C3):
        raise PreviewError(f"these latents have {latents_THWC.shape[-1]} channels, and the map has {len(weights_C3)}")
    colours_THW3 = latents_THWC.float().cpu() @ weights_C3 + torch.tensor(preview_map.bias)
    return (colours_THW3.clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def clean_estimate(
    before: torch.Tensor, after: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor
) -> torch.Tensor:
    """Return the latents without noise that an Euler step was heading for, as `before` and `after` are.

    The step was after = before + (sigma_next - sigma) * v along v = noise - clean, and `after` is
    clean + sigma_next * v. After the last step, at sigma 0, it is `after` itself.
    """
    velocity = (after - before) / (sigma_next - sigma)
    return after - sigma_next * velocity


def vae_fingerprint(folder: Path) -> str:
    """Return what tells the latents of a VAE from those of another: its encoder's last layer, and its scaling factor.

    A copy in half precision has the same one, and so has a VAE of which only the decoder was trained further.

    Raises:
        OSError: if a file is missing.
        CheckpointError: if one is damaged, or the layer is not there.
    """
    from safetensors import safe_open

    headers = read_headers(weight_files(folder))
    if missing := [name for name in ENCODER_END if name not in headers]:
        raise CheckpointError(f"the VAE in {folder} has no {' and no '.join(missing)}")
    digest = hashlib.sha256(repr(read_json(folder / "config.json").get("scaling_factor")).encode())
    for name in ENCODER_END:
        with safe_open(headers[name].file, framework="pt") as file:
            digest.update(file.get_tensor(name).half().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def shipped_maps() -> list[PreviewMap]:
    """Return the maps that come with the package."""
    return [PreviewMap.from_json(path.read_text("utf-8")) for path in sorted(SHIPPED.glob("*.json"))]


def _problems(values: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the fields of a map."""
    if differing := sorted({"vae", "weights", "bias"} ^ values.keys()):
        yield f"{', '.join(differing)} missing or unknown"
        return
    if not isinstance(values["vae"], str):
        yield f"vae is {values['vae']!r}"
    if not isinstance(values["weights"], list) or not values["weights"]:
        yield f"weights are {values['weights']!r}"
        return
    rows = {f"weights of channel {c}": row for c, row in enumerate(values["weights"])} | {"bias": values["bias"]}
    for name, row in rows.items():
        if not isinstance(row, list) or len(row) != 3 or not all(map(_is_number, row)):
            yield f"{name} must be three numbers, not {row!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
