"""Train the checkpoint inside the package from nothing, on two CPU cores in less than 100 minutes.

Each stage goes on from its own checkpoint in the work folder; the same step counts and threads give the same weights.
`export` writes the result in the Diffusers layout, with the tokenizers and text encoders of make_demo_checkpoint.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.scripts.make_demo_checkpoint import DEFAULT_OUTPUT

if TYPE_CHECKING:
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
    from kandinsky5_nabla.scripts._demo_training import Stage
    from kandinsky5_nabla.scripts._demo_transformer import Captions

STAGES = ("vae", "transformer-64", "transformer-128", "transformer-256", "export")
SIDES = (64, 128, 256)


@dataclass(frozen=True)
class Counts:
    """How many optimizer steps each stage takes."""

    vae: int = 1900
    transformer_64: int = 600
    transformer_128: int = 1700
    transformer_256: int = 3200


def vae_stage(work: Path, counts: Counts) -> None:
    """Train the VAE, if that is not done."""
    from kandinsky5_nabla.scripts._demo_training import Stage
    from kandinsky5_nabla.scripts._demo_vae import PEAK_RATE, train_vae

    folder = work / "vae"
    if not (folder / "config.json").exists():
        train_vae(Stage("vae", counts.vae, PEAK_RATE, work)).save_pretrained(folder)


def transformer_stage(side: int, work: Path, counts: Counts) -> None:
    """Train the transformer at one frame size, from the end of the size before, if that is not done."""
    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
    from kandinsky5_nabla.scripts._demo_transformer import make_transformer, train_transformer

    folder = work / f"transformer-{side}"
    if (folder / "config.json").exists():
        return
    before = [work / f"transformer-{smaller}" for smaller in SIDES if smaller < side]
    transformer = Kandinsky5Transformer.from_pretrained(before[-1]) if before else make_transformer()
    train_transformer(stage_of(side, work, counts), transformer, side, encoded_captions())
    transformer.save_pretrained(folder)


@functools.cache
def encoded_captions() -> Captions:
    """Return the embeddings of every text that training may draw: thousands, which takes some seconds."""
    from kandinsky5_nabla.scripts._demo_transformer import all_captions, encode_captions

    return encode_captions(all_captions(), text_parts())


def stage_of(side: int, work: Path, counts: Counts) -> Stage:
    """Return the training stage of a frame size: the three share one decay of the learning rate."""
    from kandinsky5_nabla.scripts._demo_training import LAST_RATE, Stage
    from kandinsky5_nabla.scripts._demo_transformer import MATRIX_RATE, PEAK_RATE

    first, last = {64: (1.0, 0.8), 128: (0.8, 0.35), 256: (0.35, LAST_RATE)}[side]
    steps = getattr(counts, f"transformer_{side}")
    return Stage(f"transformer-{side}-train", steps, PEAK_RATE, work, first, last, MATRIX_RATE)


def text_parts() -> dict[str, Any]:
    """Return tokenizers and text encoders as the checkpoint will have them: rounded to fp16, computed in fp32."""
    import torch

    from kandinsky5_nabla.scripts.make_demo_checkpoint import (
        SEED,
        make_clip_tokenizer,
        make_qwen_tokenizer,
        make_text_encoder,
        make_text_encoder_2,
    )

    generator = torch.Generator().manual_seed(SEED)
    tokenizer, tokenizer_2 = make_qwen_tokenizer(), make_clip_tokenizer()
    whole = make_text_encoder(tokenizer, generator)
    text_encoder_2 = make_text_encoder_2(tokenizer_2, generator)
    return {
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer_2,
        "text_encoder": whole.half().float().eval().model.language_model,
        "text_encoder_2": text_encoder_2.half().float().eval(),
    }


def export(work: Path, output: Path) -> None:
    """Write the trained checkpoint: all files of make_demo_checkpoint, then the trained parts over them."""
    from diffusers import AutoencoderKLHunyuanVideo

    from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
    from kandinsky5_nabla.scripts._demo_vae import VAE_CONFIG
    from kandinsky5_nabla.scripts.make_demo_checkpoint import TRANSFORMER_CONFIG, write_checkpoint

    write_checkpoint(output)
    # Built anew: a loaded model's config says from which folder it came.
    parts = {"vae": AutoencoderKLHunyuanVideo(**VAE_CONFIG), "transformer": Kandinsky5Transformer(**TRANSFORMER_CONFIG)}
    parts["vae"].load_state_dict(AutoencoderKLHunyuanVideo.from_pretrained(work / "vae").state_dict())
    trained: Kandinsky5Transformer = Kandinsky5Transformer.from_pretrained(work / f"transformer-{SIDES[-1]}")
    parts["transformer"].load_state_dict(trained.state_dict())
    for name, part in parts.items():
        part.half().save_pretrained(output / name)
        for weights in (output / name).glob("*.safetensors"):
            weights.chmod(0o644)  # safetensors writes files that only their owner can read
    scores = work / "scores.json"
    report = json.loads(scores.read_text(encoding="utf-8")) if scores.exists() else None
    (output / "README.md").write_text(model_card(report), encoding="utf-8")
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{output}: {size / 1e6:.1f} MB")


MODEL_CARD = """\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---
# The demo checkpoint

A test piece, not Kandinsky: every part of a published Kandinsky 5 checkpoint with the same classes and file names, at
toy width. It lets the whole pipeline run in seconds on a CPU and without a download, and it shows what its prompt says,
as long as that is one shape on a plain background.

## What it knows

256x256 pixels, 17 frames, one object: {shapes}; {colours}; {motions}; on {backgrounds}; {sizes}; {speeds}.
What a prompt does not say is {defaults}. For example "a red square moving left on a white background".
Some combinations of colour, shape and direction, and some phrasings, were held out of training.

## Data and recipe

Rendered scenes with captions, made on the fly by `scripts/_demo_scenes.py`; no other data. `scripts/train_demo.py`
trains on two CPU cores in less than 100 minutes: the VAE on windows of scenes; the transformer by rectified flow at
64, 128 and 256 pixels, at 256 by turns with NABLA's block masks (window 1, 1, 1, P {P}) and densely. The text encoders
are random and frozen, the tokenizers were trained on the captions (`scripts/make_demo_checkpoint.py`).

## Scores

{scores}

## Licence

Apache-2.0, like the rest of the repository.
"""


def model_card(report: dict[str, Any] | None) -> str:
    """Return the model card, with the scores of evaluate_demo.py's JSON if they are there."""
    from kandinsky5_nabla.scripts import _demo_scenes as scenes
    from kandinsky5_nabla.scripts._demo_transformer import MASK_P

    return MODEL_CARD.format(
        shapes=", ".join(scenes.SHAPES),
        colours=", ".join(scenes.COLOURS),
        motions=", ".join(scenes.MOTIONS),
        backgrounds=", ".join(scenes.BACKGROUNDS),
        sizes=" or ".join(scenes.SIZES),
        speeds=" or ".join(scenes.SPEEDS),
        defaults=", ".join(scenes.DEFAULTS.values()),
        P=MASK_P,
        scores="Not measured yet: `scripts/evaluate_demo.py`." if report is None else report["markdown"],
    )


def run(stages: Sequence[str], work: Path, output: Path, counts: Counts) -> None:
    """Run stages in their order."""
    work.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        if stage not in stages:
            continue
        if stage == "vae":
            vae_stage(work, counts)
        elif stage == "export":
            export(work, output)
        else:
            transformer_stage(int(stage.removeprefix("transformer-")), work, counts)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="train_demo.py", description=__doc__)
    parser.add_argument("stages", nargs="+", choices=[*STAGES, "all"], help="what to run; what is done is not repeated")
    parser.add_argument("--work", type=Path, default=Path("outputs/train_demo"), help="folder of all checkpoints")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder that export writes")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    for field in fields(Counts):
        option = f"--{field.name.replace('_', '-')}-steps"
        parser.add_argument(option, dest=field.name, type=int, default=field.default, metavar="N")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the stages and return the exit code."""
    options = make_parser().parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    counts = Counts(**{field.name: getattr(options, field.name) for field in fields(Counts)})
    run(STAGES if "all" in options.stages else options.stages, options.work, options.output, counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
