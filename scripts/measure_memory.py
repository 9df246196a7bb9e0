"""Compare the memory plan with reality on a CPU: each stage in a process of its own, as a Markdown table.

A row builds a part with random weights, few blocks and wide layers, runs its stage once, and reports how far the peak
of the resident memory rose above the idle process, in which everything is imported and a toy has run. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kandinsky5_nabla.configs.tiles import Tile
from kandinsky5_nabla.pipeline.memory import (
    GB,
    TEXT_TOKENS,
    Run,
    decode_activations,
    denoise_activations,
    latent_size,
    text_activations,
)
from kandinsky5_nabla.pipeline.sizes import Part, sizes_of_configs
from kandinsky5_nabla.scripts._benchmark import hardware, peak_above_inputs

Widths = Mapping[str, Any]
TEXT: Widths = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 32000}
DIT: Widths = {"model_dim": 896, "time_dim": 256, "ff_dim": 3584, "num_text_blocks": 1, "num_visual_blocks": 1}
DIT_FIXED: Widths = {"axes_dims": (16, 24, 24), "in_text_dim": 512, "in_text_dim2": 64, "visual_cond": True}
NARROW: Widths = {"ff_dim": 896}  # so that the attention is the worst point, not the feed-forward
VAE: Widths = {"block_out_channels": (32, 64, 128, 128)}
TOYS: Mapping[str, Widths] = {
    "text": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100},
    "denoise": {"model_dim": 128, "ff_dim": 128},
    "decode": {"block_out_channels": (32, 32, 32, 32)},
}
TOY_SIZE = {"height": 128, "width": 128, "num_frames": 5}
P = 0.3  # NABLA's, to be done soon: its memory does not depend on how many blocks are kept


@dataclass(frozen=True)
class Case:
    """A row: the stage, the run, and the widths of the part that runs."""

    stage: str
    run: Run
    widths: Widths = field(default_factory=dict)

    def describe(self) -> str:
        """Return what is run."""
        run = self.run
        size = f"{run.num_frames} frames of {run.height}x{run.width}"
        what = {
            "text": f"{TEXT_TOKENS} tokens",
            "denoise": f"{size}, {run.attention}",
            "decode": f"{size}, tile {run.tile.name}",
        }[self.stage]
        return ", ".join([what, run.dtype, *(f"{name} {value}" for name, value in self.widths.items())])


def _case(stage: str, widths: Widths, attention: str = "SDPA", dtype: str = "float32", **size: Any) -> Case:
    size = {"height": 512, "width": 768, "num_frames": 61} | size
    return Case(stage, Run(**size, device="cpu", dtype=dtype, attention=attention), widths)


CASES = {
    "text": _case("text", TEXT),
    "dense": _case("denoise", {**DIT, "model_dim": 1792, "ff_dim": 1792}, num_frames=37),
    "nabla": _case("denoise", DIT, "NABLA_ATTN"),
    "nabla-narrow": _case("denoise", {**DIT, **NARROW}, "NABLA_ATTN", num_frames=65),
    "large-tile": _case(
        "decode",
        {"block_out_channels": (8, 16, 32, 32), "norm_num_groups": 8, "mid_block_add_attention": False},
        height=512,
        width=512,
        num_frames=17,
        tile=Tile(512, 384, 16, 12),
    ),
    "tile": _case("decode", VAE, height=256, width=256, num_frames=17),
}


def estimate_and_rise(case: Case) -> tuple[float, float]:
    """Return the estimated and the measured GB of a case."""
    stage = {"text": _text, "denoise": _denoise, "decode": _decode}[case.stage]
    toy_run = Run(**TOY_SIZE, device="cpu", dtype=case.run.dtype, attention=case.run.attention)
    stage(toy_run, {**case.widths, **TOYS[case.stage]})[
        1
    ]()  # imports, thread pools and compilers are no stage's memory
    if case.run.attention == "NABLA_ATTN":
        _compile_attention(case)
    estimated: list[float] = []

    def build_and_run() -> None:
        nbytes, run = stage(case.run, case.widths)
        estimated.append(nbytes / GB)
        run()

    rise = peak_above_inputs(build_and_run, "cpu")
    return estimated[0], rise


def in_own_process(name: str) -> tuple[float, float]:
    """Return `estimate_and_rise` of a case, by its name, from a process of its own."""
    command = [sys.executable, __file__, "--rise-of", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    estimated, rise = (float(number) for number in result.stdout.split()[-2:])
    return estimated, rise


Stage = tuple[float, Callable[[], object]]
"""Estimated bytes of a part's weights and activations, and what runs it."""


def _text(run: Run, widths: Widths) -> Stage:
    from transformers import Qwen2_5_VLTextConfig

    from kandinsky5_nabla.models.text_encoder import QwenTextEncoder

    head_dim = 16
    heads = {"num_attention_heads": widths["hidden_size"] // head_dim, "num_key_value_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    with torch.device("meta"):
        model = QwenTextEncoder(Qwen2_5_VLTextConfig(**widths, **heads, **tokens, rope_parameters=rope))
    _fill(model, run.dtype)
    dims = widths["hidden_size"], widths["intermediate_size"]
    sizes = sizes_of_configs({**DIT, **DIT_FIXED}, text_dims=dims, text_encoder=_part(model))
    ids = torch.zeros(1, TEXT_TOKENS, dtype=torch.long)
    nbytes = sizes.text_encoder.nbytes(run.dtype, run.dtype) + text_activations(sizes, run)
    return nbytes, lambda: model(input_ids=ids, use_cache=False)


def _denoise(run: Run, widths: Widths) -> Stage:
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
    from kandinsky5_nabla.pipeline.denoise import Guidance, denoise, make_attention_metadata
    from kandinsky5_nabla.pipeline.text import TextEmbeddings

    nabla = run.attention != "SDPA"
    config = {**widths, **DIT_FIXED, "attention_type": "nabla" if nabla else "regular", "attention_add_sta": False}
    with torch.device("meta"):
        model = Kandinsky5Transformer(**config)
    _fill(model, run.dtype)
    sizes, dtype = sizes_of_configs(config), getattr(torch, run.dtype)
    shape = (*latent_size(run), sizes.channels)
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
    text = TextEmbeddings(
        torch.zeros(1, TEXT_TOKENS, config["in_text_dim"], dtype=dtype),
        mask,
        torch.zeros(1, config["in_text_dim2"], dtype=dtype),
    )
    metadata = make_attention_metadata(model, shape, P, "cpu")

    def one_step() -> torch.Tensor:
        noise = torch.randn(1, *shape)
        return denoise(model, noise, torch.tensor([1.0, 0.0]), Guidance(text, None, 1.0), (1.0, 2.0, 2.0), metadata)

    return sizes.transformer.nbytes(run.dtype, run.dtype) + denoise_activations(sizes, run), one_step


def _compile_attention(case: Case) -> None:
    """Compile the kernels for the case's shape and dtype, on blocks that see themselves alone."""
    from kandinsky5_nabla.attention.flex import block_sparse_attention
    from kandinsky5_nabla.attention.lists import BlockLists
    from kandinsky5_nabla.attention.order import BLOCK, tile_grid
    from kandinsky5_nabla.attention.selection import select_blocks

    T, H, W = latent_size(case.run)
    blocks, head_dim = math.prod(tile_grid((T, H // 2, W // 2))), sum(DIT_FIXED["axes_dims"])
    heads = case.widths["model_dim"] // head_dim
    x_BSHD = torch.zeros(1, blocks * BLOCK, heads, head_dim, dtype=getattr(torch, case.run.dtype))
    own = torch.eye(blocks, dtype=torch.bool)
    select_blocks(x_BSHD, x_BSHD, own, P)
    lists = BlockLists.of_map(own.expand(1, heads, blocks, blocks))
    block_sparse_attention(x_BSHD, x_BSHD, x_BSHD, lists, head_dim**-0.5)


def _decode(run: Run, widths: Widths) -> Stage:
    from diffusers import AutoencoderKLHunyuanVideo

    from kandinsky5_nabla.pipeline.decode import decode_latents

    with torch.device("meta"):
        vae = AutoencoderKLHunyuanVideo(**widths)
    _fill(vae, "float32")
    sizes = sizes_of_configs({**DIT, **DIT_FIXED}, widths["block_out_channels"], vae=_part(vae))
    latents = torch.randn(1, *latent_size(run), 16)
    nbytes = sizes.vae.nbytes("float32", "float32") + decode_activations(sizes, run)
    return nbytes, lambda: decode_latents(vae, latents, "cpu", run.tile)


def _fill(model: torch.nn.Module, dtype: str) -> None:
    """Give a model that was built on meta its memory and small numbers."""
    torch.nn.Module.to(model, getattr(torch, dtype)).to_empty(device="cpu")
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data.uniform_(-0.02, 0.02)
    model.eval().requires_grad_(False)


def _part(model: torch.nn.Module) -> Part:
    return Part(sum(parameter.numel() for parameter in model.parameters()))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="measure_memory.py", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="rows (default: all)")
    parser.add_argument("--rise-of", choices=CASES, help=argparse.SUPPRESS)
    return parser


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = make_parser().parse_args(argv)
    if options.rise_of is not None:
        print(*estimate_and_rise(CASES[options.rise_of]))
        return 0
    from diffusers import __version__ as diffusers_version
    from transformers import __version__ as transformers_version

    versions = f"torch {torch.__version__}, diffusers {diffusers_version}, transformers {transformers_version}"
    print(f"{hardware('cpu')}; {versions}\n")
    print("| stage | what runs | estimated | measured | estimated / measured |\n|---|---|---|---|---|")
    for name in options.cases:
        case = CASES[name]
        estimated, rise = in_own_process(name)
        print(
            f"| {case.stage} | {case.describe()} | {estimated:.2f} GB | {rise:.2f} GB | {estimated / rise:.2f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
