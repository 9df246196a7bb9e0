"""Show what NABLA keeps: run the denoising of one video, print a table, draw a picture.

The table has a line for each layer; the picture shows the density of each layer and step, and the blocks of one head.
Exit codes: 0 done; 2 bad input; 1 something failed while running; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs.errors import BackendError, InterruptedRun, SettingsError, UsageError, UserError
from kandinsky5_nabla.scripts._arguments import (
    Parser,
    add_model,
    add_running,
    add_sampling,
    add_size,
    add_speaking,
    fail,
    fail_running,
)
from kandinsky5_nabla.scripts._log import log_problems, say, speaking

if TYPE_CHECKING:
    from PIL import Image

    from kandinsky5_nabla.pipeline.attention_report import AttentionRecord
    from kandinsky5_nabla.scripts._setup import Setup

DEFAULT_PROMPT = "a red square moving left on a white background"
DEFAULT_PRESET = "demo"
DEFAULT_OUTPUT = Path("outputs/attention.png")


@dataclass(frozen=True)
class Inspection:
    """What a run will do.

    Attributes:
        setup: model, numbers and device.
        prompt: what the video shows.
        seed: of the noise.
        map_of: step, layer and head whose blocks are drawn; None for the last step, the middle layer and head 0.
        picture: the PNG to write.
        report: the JSON to write; None for none.
        overwrite: replace existing files.
    """

    setup: Setup
    prompt: str
    seed: int
    map_of: tuple[int, int, int] | None
    picture: Path
    report: Path | None
    overwrite: bool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(prog="inspect_attention.py", description=__doc__, allow_abbrev=False)
    group = parser.add_argument_group("what to run")
    add = group.add_argument
    add(
        "--prompt", type=str, default=DEFAULT_PROMPT, metavar="TEXT", help="what the video shows (default: %(default)s)"
    )
    add_size(group)
    add("--seed", type=int, default=0, metavar="N", help="of the noise (default: %(default)s)")
    add_model(parser, DEFAULT_PRESET)
    add_sampling(parser)
    group = parser.add_argument_group("running")
    add_running(group)
    add_speaking(group)
    add = parser.add_argument_group("what to show").add_argument
    add("--output", type=Path, metavar="FILE.png", help=f"the picture (default: {DEFAULT_OUTPUT})")
    add("--report", type=Path, metavar="FILE.json", help="write all numbers, of each layer and step")
    add("--map", type=_map_of, metavar="STEP,LAYER,HEAD", help="default: the last step, the middle layer, head 0")
    add("--overwrite", action="store_true", help="replace existing files")
    return parser


def _map_of(text: str) -> tuple[int, int, int]:
    try:
        step, layer, head = (int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be three numbers as in 15,2,0, got {text!r}") from error
    return step, layer, head


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    try:
        args = build_parser().parse_args(argv)
    except UsageError as error:
        return fail(2, [error])
    with speaking(args.quiet, args.verbose, args.log):
        return _main(args)


def _main(args: argparse.Namespace) -> int:
    from kandinsky5_nabla.scripts._setup import BadInput  # here: --help answers at once

    try:
        run(make_inspection(args))
    except BadInput as error:
        return fail(2, error.problems)
    except Exception as error:
        return fail_running(error, args.debug)
    except KeyboardInterrupt:
        return fail(130, [InterruptedRun("interrupted")])
    say("done", "done", logging.DEBUG, exit_code=0)
    return 0


def make_inspection(args: argparse.Namespace) -> Inspection:
    """Return what parsed arguments ask for.

    Raises:
        BadInput: with every problem that was found.
    """
    from kandinsky5_nabla.pipeline.checks import Report, prompt_list
    from kandinsky5_nabla.scripts._outputs import folder_problems, named_file_problems
    from kandinsky5_nabla.scripts._setup import BadInput, make_setup, seed_problems

    report = Report()
    setup = make_setup(report, args, default_preset=DEFAULT_PRESET)
    report.attempt(prompt_list, args.prompt)
    report.add(SettingsError, seed_problems(args.seed))
    config = setup.checkpoint.configs["transformer"]
    report.extend(inspection_problems(setup.sparse, args.map, setup.settings.num_inference_steps, config))
    output = args.output or DEFAULT_OUTPUT
    if args.output is None and not output.parent.exists():  # the default's folder is made, unlike one that was named
        report.extend(folder_problems("output", output.parent.parent))
    else:
        report.extend(named_file_problems("output", output, "attention.png", args.overwrite))
    if args.report is not None:
        report.extend(named_file_problems("report", args.report, "report.json", args.overwrite))
    report.extend(log_problems(args.log))
    if report.problems:
        raise BadInput(report.problems)
    return Inspection(setup, args.prompt, args.seed, args.map, output, args.report, args.overwrite)


def inspection_problems(
    sparse: bool, map_of: tuple[int, int, int] | None, steps: int, config: Mapping[str, Any]
) -> list[UserError]:
    """Return why there is nothing to show; what `config`, the transformer's, leaves out is not checked."""
    from kandinsky5_nabla.scripts._attention_picture import MAX_STEPS
    from kandinsky5_nabla.scripts._setup import NOTHING_TO_REPORT

    problems: list[UserError] = [] if sparse else [BackendError(NOTHING_TO_REPORT)]
    if steps > MAX_STEPS:
        problems.append(SettingsError(f"number of steps {steps}: the picture has room for {MAX_STEPS}"))
    counts = {"step": steps, "layer": config.get("num_visual_blocks"), "head": _heads(config)}
    for number, (name, count) in zip(map_of or (0, 0, 0), counts.items(), strict=True):
        if number < 0 or (count is not None and number >= count):
            most = "" if count is None else f" to {count - 1}"
            problems.append(SettingsError(f"--map: {name} {number}: must be from 0{most}"))
    return problems


def _heads(config: Mapping[str, Any]) -> int | None:
    known = "model_dim" in config and "axes_dims" in config
    return config["model_dim"] // sum(config["axes_dims"]) if known else None


def run(inspection: Inspection) -> None:
    """Denoise one video, print the table and write the files.

    Raises:
        BadInput: for what only the loaded checkpoint could tell.
        UserError: if a stage fails; the message names it.
    """
    from kandinsky5_nabla.pipeline.attention_report import MapChoice, recorded_attention, report_of
    from kandinsky5_nabla.pipeline.files import complete_file
    from kandinsky5_nabla.scripts._outputs import write_json
    from kandinsky5_nabla.scripts._progress import denoising_progress
    from kandinsky5_nabla.scripts._run import load, say_what_runs, speak_plainly, stage
    from kandinsky5_nabla.scripts._setup import BadInput

    speak_plainly()
    setup, spent = inspection.setup, {}
    say_what_runs(setup.device, setup.describe())
    with stage("load", spent, f"loading {setup.model}"):
        pipe, setup = load(setup)
    settings, config = pipe.resolve_settings(**setup.given), pipe.transformer.config
    steps = settings.num_inference_steps
    problems = inspection_problems(settings.nabla_P is not None, inspection.map_of, steps, config)
    if problems:
        raise BadInput(problems)
    chosen = MapChoice(*(inspection.map_of or (steps - 1, config["num_visual_blocks"] // 2, 0)))
    with stage("denoise", spent, f"denoising in {steps} steps, seed {inspection.seed}"):
        negative = {} if setup.negative_prompt is None else {"negative_prompt": setup.negative_prompt}
        progress = denoising_progress(pipe, setup.device, steps)
        with recorded_attention(pipe.transformer, chosen) as records, progress as tell:
            request = {**negative, **setup.given, "seed": inspection.seed, "output_type": "latent"}
            pipe(inspection.prompt, **request, callback_on_step_end=tell)
    report = report_of(records)
    print(table(report))
    described = {**setup.describe(settings), "attention": pipe.transformer.attention_backend.get_name()}
    about = f"{described['attention']}, P {settings.nabla_P:g}, {settings.width}x{settings.height}"
    inspection.picture.parent.mkdir(exist_ok=True)  # the default's; another was there when this was planned
    with complete_file(inspection.picture, overwrite=inspection.overwrite) as temporary:
        draw(report, records, chosen, f"{about}, {settings.num_frames} frames").save(temporary)
    print(inspection.picture)
    if inspection.report is not None:
        named = {"prompt": inspection.prompt, "seed": inspection.seed, "map": chosen._asdict()}
        write_json(inspection.report, {**described, **named, "report": report}, overwrite=inspection.overwrite)
        print(inspection.report)


def table(report: Mapping[str, Any]) -> str:
    """Return the lines of a report: one for each layer, then the totals."""
    lines = ["layer   density: min    mean     max    window   blocks in a row"]
    for layer in report["layers"]:
        shares = "".join(
            f"{100 * layer[name]:6.1f} %" for name in ("density_min", "density", "density_max", "window_density")
        )
        blocks = f"{layer['row_min']} to {layer['row_max']} of {layer['blocks']}"
        lines.append(f"{layer['layer']:5d}        {shares}   {blocks}")
    totals = report["totals"]
    return "\n".join(
        [
            *lines,
            f"all layers and steps: density {100 * totals['density']:.1f} %, "
            f"of the window alone {100 * totals['window_density']:.1f} %",
            f"attention: {totals['flops'] / 1e9:.4g} of {totals['dense_flops'] / 1e9:.4g} GFLOP, "
            f"{100 * totals['flops_saved']:.1f} % saved",
            f"seconds: {totals['seconds_selecting']:.2f} selecting, {totals['seconds_attending']:.2f} attending; "
            "first calls may have compiled",
        ]
    )


def draw(
    report: Mapping[str, Any], records: list[AttentionRecord], chosen: tuple[int, int, int], about: str
) -> Image.Image:
    """Return the picture of a report, with the block map that was asked for."""
    from kandinsky5_nabla.scripts._attention_picture import attention_picture

    densities: dict[int, list[float]] = {}
    for row in report["steps_of_layers"]:  # in the order of layers, then steps
        densities.setdefault(row["layer"], []).append(row["density"])
    [kept] = [record.block_map for record in records if record.block_map is not None]
    step, layer, head = chosen
    about_map = (
        f"Blocks kept in step {step}, layer {layer}, head {head}: {int(kept.sum())} of {kept.numel()}; "
        "rows are query blocks, columns key blocks"
    )
    return attention_picture(list(densities.values()), kept.numpy(), about_map, about)


if __name__ == "__main__":
    sys.exit(main())
