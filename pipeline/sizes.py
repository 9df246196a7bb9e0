"""How many numbers the parts of a checkpoint hold, and how wide its activations are: from configs and headers alone.

Plain Python: neither torch nor a weight is loaded. Legend: M model dim, E time dim, F feed-forward dim, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "nf4": 0.5625}
"""Bytes of a weight. Of the last three only weights of linear layers are so small; nf4 has an fp32 scale per 64."""
QUANTISED = ("fp8", "int8", "nf4")


@dataclass(frozen=True)
class Part:
    """How many numbers a model holds.

    Attributes:
        numbers: all of them.
        fp32: those that stay fp32 in every dtype.
        linear: weights of linear layers, which int8, nf4 and fp8 make small.
        leaf: the most that sequential offload moves at once: a layer, or one of the transformer's attentions.
    """

    numbers: int
    fp32: int = 0
    linear: int = 0
    leaf: int = 0

    def nbytes(self, dtype: str, compute: str) -> int:
        """Return the bytes in a dtype; what int8, nf4 and fp8 leave out is in the dtype `compute`."""
        small = self.linear if dtype in QUANTISED else 0
        rest = BYTES[compute if dtype in QUANTISED else dtype] * (self.numbers - self.fp32 - small)
        return math.ceil(4 * self.fp32 + BYTES[dtype] * small + rest)


@dataclass(frozen=True)
class Sizes:
    """A checkpoint's parts and the widths that its activations have.

    Attributes:
        transformer: all of the transformer.
        block: its visual block, the largest thing that group offload moves at once.
        outside: what is in none of its blocks.
        text_encoder: Qwen2.5-VL's language model.
        text_encoder_2: CLIP's text model.
        vae: encoder and decoder.
        model_dim, ff_dim, heads, head_dim: of the transformer.
        channels: latent channels, without those of the conditioning.
        in_channels: with them.
        patch_size: latents per token along t, h, w.
        text_dim, text_ff_dim: hidden and feed-forward dim of the text encoder.
        vae_channels: of the decoder's levels, from the last to the first (`block_out_channels`).
    """

    transformer: Part
    block: Part
    outside: Part
    text_encoder: Part
    text_encoder_2: Part
    vae: Part
    model_dim: int
    ff_dim: int
    heads: int
    head_dim: int
    channels: int
    in_channels: int
    patch_size: tuple[int, int, int]
    text_dim: int
    text_ff_dim: int
    vae_channels: tuple[int, ...]


PUBLISHED_TRANSFORMERS: dict[str, dict[str, int]] = {  # checkpoints.md; the keys are those of transformer/config.json
    "lite": {"time_dim": 512, "model_dim": 1792, "ff_dim": 7168, "num_text_blocks": 2, "num_visual_blocks": 32},
    "pro": {"time_dim": 1024, "model_dim": 4096, "ff_dim": 16384, "num_text_blocks": 4, "num_visual_blocks": 60},
}
PUBLISHED_AXES = {"lite": (16, 24, 24), "pro": (32, 48, 48)}
# Counted on models built on meta from the published configs, without Qwen's vision tower and output head:
# Qwen/Qwen2.5-VL-7B-Instruct, openai/clip-vit-large-patch14, hunyuanvideo-community/HunyuanVideo (vae/).
QWEN = Part(7_070_619_136, linear=6_525_288_448, leaf=544_997_376)
CLIP = Part(123_060_480, linear=84_934_656, leaf=37_945_344)
VAE = Part(246_478_803, leaf=7_077_888)
_QWEN_DIMS, _VAE_CHANNELS = (3584, 18944), (128, 256, 512, 512)


def published_sizes(family: str) -> Sizes:
    """Return the sizes of the published checkpoints "lite" and "pro", for which no file is needed."""
    config = {**PUBLISHED_TRANSFORMERS[family], "axes_dims": PUBLISHED_AXES[family], "visual_cond": True}
    return sizes_of_configs(config)


def sizes_of_configs(
    transformer: Mapping[str, Any],
    vae_channels: tuple[int, ...] = _VAE_CHANNELS,
    text_dims: tuple[int, int] = _QWEN_DIMS,
    text_encoder: Part = QWEN,
    text_encoder_2: Part = CLIP,
    vae: Part = VAE,
) -> Sizes:
    """Return the sizes of a checkpoint; the transformer's follow exactly from its config, the others are given."""
    get = {"in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 3584, "in_text_dim2": 768, "visual_cond": False}
    c = {**get, "patch_size": (1, 2, 2), **transformer}
    M, E, F, D, patch = c["model_dim"], c["time_dim"], c["ff_dim"], sum(c["axes_dims"]), math.prod(c["patch_size"])
    in_channels = 2 * c["in_visual_dim"] + 1 if c["visual_cond"] else c["in_visual_dim"]

    def block(attentions: int, modulations: int) -> Part:
        linear = 4 * attentions * M * M + 2 * M * F
        fp32 = modulations * M * (E + 1)
        return Part(linear + fp32 + attentions * (4 * M + 2 * D), fp32, linear)

    time, modulation = E * (M + 1) + E * (E + 1), 2 * M * (E + 1)
    embeddings = M * (c["in_text_dim"] + 3) + E * (c["in_text_dim2"] + 3) + M * (in_channels * patch + 1)
    out = patch * c["out_visual_dim"] * (M + 1)
    outside = Part(time + modulation + embeddings + out, time + modulation)
    text, visual = (c["num_text_blocks"], block(1, 6)), (c["num_visual_blocks"], block(2, 9))
    numbers, fp32, linear = (
        getattr(outside, name) + sum(count * getattr(part, name) for count, part in (text, visual))
        for name in ("numbers", "fp32", "linear")
    )
    return Sizes(
        # A linear layer, an attention, or the modulation of a block, which is fp32 and counts twice.
        transformer=Part(numbers, fp32, linear, leaf=max(M * F, 4 * M * (M + 1) + 2 * D, 2 * 9 * M * (E + 1))),
        block=visual[1],
        outside=outside,
        text_encoder=text_encoder,
        text_encoder_2=text_encoder_2,
        vae=vae,
        model_dim=M,
        ff_dim=F,
        heads=M // D,
        head_dim=D,
        channels=c["out_visual_dim"],
        in_channels=in_channels,
        patch_size=tuple(c["patch_size"]),
        text_dim=text_dims[0],
        text_ff_dim=text_dims[1],
        vae_channels=vae_channels,
    )


def sizes_of_folder(folder: Path, without: Collection[str] = ()) -> Sizes:
    """Return the sizes of a checkpoint in the Diffusers layout, from its configs and safetensors headers.

    Args:
        folder: of the checkpoint.
        without: parts that are not loaded, and need not be there, such as "text_encoder".

    Raises:
        FileNotFoundError: if a config or weights are missing.
        ValueError: if a file is damaged.
    """
    from ..models.headers import DIFFUSERS_WEIGHTS, TRANSFORMERS_WEIGHTS
    from .safety import read_json

    weights = {
        "text_encoder": TRANSFORMERS_WEIGHTS,
        "text_encoder_2": TRANSFORMERS_WEIGHTS,
        "vae": DIFFUSERS_WEIGHTS,
    }
    parts = {
        name: Part(0) if name in without else part_of_folder(folder / name, file) for name, file in weights.items()
    }
    text_dims = _QWEN_DIMS
    if "text_encoder" not in without:
        text = read_json(folder / "text_encoder" / "config.json")
        text = text.get("text_config", text)
        text_dims = text["hidden_size"], text["intermediate_size"]
    vae_channels = tuple(read_json(folder / "vae" / "config.json")["block_out_channels"])
    return sizes_of_configs(read_json(folder / "transformer" / "config.json"), vae_channels, text_dims, **parts)


def part_of_folder(folder: Path, weights: str) -> Part:
    """Count the weights of a part's folder, whose file or shards are named as `weights` in `models.headers`.

    Qwen's vision tower and output head are not loaded and not counted.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if a file is damaged.
    """
    from ..models.headers import read_headers, weight_files

    headers = read_headers(weight_files(folder, weights))
    kept = {
        name: header
        for name, header in headers.items()
        if not name.removeprefix("model.").startswith(("visual.", "lm_head."))
    }
    linear = sum(h.numel for name, h in kept.items() if len(h.shape) == 2 and "embed" not in name)
    counts = [header.numel for header in kept.values()]
    return Part(sum(counts), linear=linear, leaf=max(counts))
