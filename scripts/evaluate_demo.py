"""Score how well the model inside follows its prompts.

A grid of prompts goes through the pipeline, and image analysis judges the clips. Prints a Markdown table for trained
combinations, held-out combinations and held-out phrasings, and a report of the VAE.
`--confusion` scores the scorer instead, on rendered scenes whose truth is known.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.pipeline.precision import FLOAT_DTYPES
from kandinsky5_nabla.scripts._demo_scenes import (
    HELD_OUT_PHRASINGS,
    TRAINED_PHRASINGS,
    Words,
    all_words,
    caption,
    combinations,
    fits,
)
from kandinsky5_nabla.scripts.make_demo_checkpoint import DEFAULT_OUTPUT, SHAPES

if TYPE_CHECKING:
    import numpy as np

    from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
    from kandinsky5_nabla.pipeline.attention_report import AttentionRecord

GROUPS = {"trained": 0.5, "held-out combinations": 0.25, "held-out phrasings": 0.25}  # share of the clips
PROPERTIES = ("colour", "direction", "background", "shape", "motion", "single", "all")
BATCH = 12
GRID_SEED = 11
SHEET_PROMPTS = (
    "a red square moving left on a white background",
    "a small blue circle moving up quickly on a black background",
    "A yellow triangle is moving right quickly.",
    "Here is a large green square, which is standing still on a gray background.",
    "an orange circle moving down on a white background",
    "a small white triangle moving left slowly on a gray background",
)
SHEET_FRAMES = 6


@dataclass(frozen=True)
class Task:
    """One clip to make: its group, what it shows, its prompt and its seed."""

    group: str
    words: Words
    prompt: str
    seed: int


def make_grid(clips: int) -> list[Task]:
    """Return the prompts of an evaluation: shapes and phrasings in turn, the rest drawn from a fixed seed."""
    chance = random.Random(GRID_SEED)
    tasks = []
    for group, share in GROUPS.items():
        phrasings = HELD_OUT_PHRASINGS if group == "held-out phrasings" else TRAINED_PHRASINGS
        held_out = group == "held-out combinations"
        kinds = shapes_in_turn(combinations(held_out), chance)
        for index in range(round(clips * share)):
            words, phrasing = draw(kinds[index % len(kinds)], phrasings[index % len(phrasings)], held_out, chance)
            tasks.append(Task(group, words, caption(phrasing, words), seed=1000 + len(tasks)))
    return tasks


def shapes_in_turn(kinds: list[tuple[str, str, str]], chance: random.Random) -> list[tuple[str, str, str]]:
    """Return the combinations (colour, shape, direction) shuffled, one of each shape after the other."""
    shuffled = chance.sample(kinds, len(kinds))
    of_shape = [[kind for kind in shuffled if kind[1] == shape] for shape in SHAPES]
    return [kind for triple in zip(*of_shape, strict=True) for kind in triple]


def draw(kind: tuple[str, str, str], phrasing: str, held_out: bool, chance: random.Random) -> tuple[Words, str]:
    """Draw a scene of a combination that the phrasing can describe."""
    options = [words for words in all_words(held_out) if words.combination == kind and fits(phrasing, words)]
    return chance.choice(options), phrasing


def make_clips(pipe: Kandinsky5NablaPipeline, tasks: Sequence[Task], **settings: Any) -> Iterator[np.ndarray]:
    """Yield the clip of each task, `[F, H, W, 3]` in 0 .. 1, made in batches."""
    from kandinsky5_nabla.pipeline.latents import make_generators

    for first in range(0, len(tasks), BATCH):
        batch = tasks[first : first + BATCH]
        generators = [make_generators(1, None, task.seed)[0] for task in batch]
        yield from pipe([task.prompt for task in batch], generator=generators, output_type="np", **settings).frames
        print(f"{first + len(batch)}/{len(tasks)} clips", file=sys.stderr)


def mean_density(records: Sequence[AttentionRecord]) -> float | None:
    """Return the share of blocks that NABLA keeps, the mean over layers and model calls; None with other backends."""
    return fmean(record.density for record in records) if records else None


def load(options: argparse.Namespace) -> Kandinsky5NablaPipeline:
    """Return the pipeline with the attention and dtype that were asked for."""
    import torch
    from diffusers.utils import logging

    from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline

    logging.disable_progress_bar()
    pipe = Kandinsky5NablaPipeline.from_pretrained(options.model, dtype=getattr(torch, options.dtype), preset="demo")
    if options.attention is not None:
        pipe.transformer.set_attention_backend(options.attention)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(options.device)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the pipeline that the command line gives."""
    given = {
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance_scale,
        "shift": options.shift,
        "nabla_P": options.nabla_p,
    }
    return {name: value for name, value in given.items() if value is not None}


def evaluate(pipe: Kandinsky5NablaPipeline, options: argparse.Namespace) -> dict[str, Any]:
    """Make and judge the grid; return a report in plain values."""
    from kandinsky5_nabla.pipeline.attention_report import recorded_attention
    from kandinsky5_nabla.scripts._demo_score import judge, look

    tasks, start = make_grid(options.clips), time.perf_counter()
    clips = []
    with recorded_attention(pipe.transformer) as records:
        for task, frames in zip(tasks, make_clips(pipe, tasks, **settings_of(options)), strict=True):
            seen = look(frames)
            clips.append(asdict(task) | {"seen": asdict(seen), "right": judge(seen, task.words)})
    return {
        "attention": pipe.transformer.attention_backend.get_name(),
        "dtype": options.dtype,
        "given": settings_of(options),
        "density": mean_density(records),
        "seconds_per_clip": (time.perf_counter() - start) / len(tasks),
        "scores": {group: score([clip for clip in clips if clip["group"] == group]) for group in GROUPS}
        | {"all clips": score(clips)},
        "shapes": shape_scores(clips),
        "clips": clips,
    }


def score(clips: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the number of clips and the share with each property right."""
    shares = {name: sum(clip["right"][name] for clip in clips) / max(len(clips), 1) for name in PROPERTIES}
    return {"clips": len(clips)} | shares


def shape_scores(clips: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of right shapes among the clips of each shape."""
    of_shape = {shape: [clip for clip in clips if clip["words"]["shape"] == shape] for shape in SHAPES}
    return {shape: score(some)["shape"] for shape, some in of_shape.items()}


def report_vae(pipe: Kandinsky5NablaPipeline, count: int) -> dict[str, float]:
    """Return the VAE's PSNR on unseen scenes at full size, and the share of frames with one object and no ghost."""
    from kandinsky5_nabla.scripts._demo_scenes import render
    from kandinsky5_nabla.scripts._demo_score import look
    from kandinsky5_nabla.scripts._demo_vae import psnr, reconstruct, unseen_scenes

    ratios, single = [], []
    for scene in unseen_scenes(count):
        clip = render(scene, pipe.defaults.height)
        again = reconstruct(pipe.vae, clip)
        ratios.append(psnr(again, clip))
        single.append(look(again.numpy()).single)
    return {"psnr": sum(ratios) / count, "psnr_lowest": min(ratios), "single": sum(single) / count, "scenes": count}


def to_markdown(report: dict[str, Any]) -> str:
    """Return the tables of a report."""
    lines = ["| | clips | " + " | ".join(PROPERTIES) + " |", "|---" * (len(PROPERTIES) + 2) + "|"]
    for group, scores in report["scores"].items():
        shares = " | ".join(f"{100 * scores[name]:.1f} %" for name in PROPERTIES)
        lines.append(f"| {group} | {scores['clips']} | {shares} |")
    shapes = ", ".join(f"{shape} {100 * share:.1f} %" for shape, share in report["shapes"].items())
    density = "" if report["density"] is None else f" Kept blocks: {100 * report['density']:.1f} %."
    lines += ["", f"Attention {report['attention']}, {report['dtype']}.{density} Shape by shape: {shapes}."]
    if vae := report.get("vae"):
        lines += [
            "",
            f"VAE at 256x256, 17 frames, on {vae['scenes']} unseen scenes: PSNR {vae['psnr']:.1f} dB (lowest "
            f"{vae['psnr_lowest']:.1f}); one object and no ghost in {100 * vae['single']:.1f} % of the frames.",
        ]
    return "\n".join(lines)


def write_sheet(pipe: Kandinsky5NablaPipeline, path: Path, **settings: Any) -> None:
    """Write a picture of six clips, one a row, and print which prompt each row shows."""
    from kandinsky5_nabla.scripts.contact_sheet import contact_sheet, evenly_spaced

    words = next(all_words(held_out=False))  # a task needs some; a sheet is for looking at
    tasks = [Task("sheet", words, prompt, seed=7) for prompt in SHEET_PROMPTS]
    cells = []
    for frames in make_clips(pipe, tasks, **settings):
        cells += [(frames[index] * 255).round().astype("uint8") for index in evenly_spaced(SHEET_FRAMES, len(frames))]
    contact_sheet(dict(enumerate(cells)), SHEET_FRAMES).save(path)
    for row, prompt in enumerate(SHEET_PROMPTS, 1):
        print(f"row {row}: {prompt}")


def print_confusion() -> None:
    """Print what the scorer calls rendered shapes and blobs, clean and disturbed."""
    from kandinsky5_nabla.scripts._demo_disturb import DISTURBANCES, confusion

    for name in DISTURBANCES:
        table = confusion(name)
        seen = [*SHAPES, "blob", "nothing"]
        print(f"\n{name}:\n\n| drawn | " + " | ".join(seen) + " |\n" + "|---" * (len(seen) + 1) + "|")
        for drawn, counts in table.items():
            print(f"| {drawn} | " + " | ".join(str(Counter(counts)[shape]) for shape in seen) + " |")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="evaluate_demo.py", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_OUTPUT, help="checkpoint folder (default: the one inside)"
    )
    parser.add_argument("--clips", type=int, default=144, help="half trained, a quarter each held out (default: 144)")
    parser.add_argument("--attention", metavar="NAME", help="NABLA_ATTN, NABLA_REFERENCE or SDPA (default: NABLA_ATTN)")
    parser.add_argument("--nabla-p", type=float, metavar="P")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance-scale", type=float, metavar="W")
    parser.add_argument("--shift", type=float, metavar="S")
    parser.add_argument("--dtype", choices=FLOAT_DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vae-scenes", type=int, default=24, metavar="N", help="scenes of the VAE's report; 0: none")
    parser.add_argument("--output-json", type=Path, metavar="FILE.json")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="write a picture of six prompts")
    parser.add_argument("--confusion", action="store_true", help="score the scorer on rendered scenes, make no clips")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, print the tables and return the exit code."""
    options = make_parser().parse_args(arguments)
    if options.confusion:
        print_confusion()
        return 0
    pipe = load(options)
    report: dict[str, Any] = {}
    if options.clips:
        report = evaluate(pipe, options)
        if options.vae_scenes:
            report["vae"] = report_vae(pipe, options.vae_scenes)
        report["markdown"] = to_markdown(report)
        print(report["markdown"])
        print(f"{report['seconds_per_clip']:.1f} s a clip", file=sys.stderr)
    elif options.vae_scenes:
        report["vae"] = report_vae(pipe, options.vae_scenes)
        print(json.dumps(report["vae"]))
    if options.output_json:
        options.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.sheet:
        write_sheet(pipe, options.sheet, **settings_of(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
