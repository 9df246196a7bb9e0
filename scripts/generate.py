"""Make a video of a prompt with Kandinsky 5 and NABLA attention.

Exit codes: 0 done; 2 bad input, found before any weight is read; 1 something failed while running; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

DTYPES = ("float32", "bfloat16", "float16")
OFFLOADS = ("none", "model", "sequential")


class BadUsage(Exception):
    """The command line cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse's prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise `BadUsage`."""
        raise BadUsage(f"{message} (--help lists the arguments)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        description="Make a video of a prompt with Kandinsky 5 and NABLA attention.",
        epilog='Try it without a download: %(prog)s --config demo --prompt "a red square moving left"',
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to make").add_argument
    add("--prompt", action="append", metavar="TEXT", help="what the video shows; repeat it for several videos")
    add("--negative-prompt", metavar="TEXT", help="what it should not show (default: the authors' text)")
    add("--height", type=int, metavar="PIXELS", help="a multiple of 128 (of 16 with dense attention)")
    add("--width", type=int, metavar="PIXELS", help="likewise")
    add("--num-frames", type=int, metavar="N", help="4k + 1, such as 121 or 241")
    add("--duration", type=float, metavar="SECONDS", help="in place of --num-frames")
    add("--num-videos", type=int, default=1, metavar="N", help="videos per prompt, of seeds SEED, SEED + 1, ...")
    add("--seed", type=int, metavar="N", help="of the noise (default: drawn, printed and recorded)")
    add("--output", type=Path, metavar="FILE.mp4", help="default: a name made of prompt and seed, in this folder")
    add("--overwrite", action="store_true", help="replace existing files")

    add = parser.add_argument_group("model").add_argument
    add("--config", metavar="NAME|FILE.yaml", help="a preset, such as demo (default: lite-t2v-10s-sft)")
    add("--model", metavar="HUB_ID|FOLDER", help="a checkpoint in the Diffusers layout (default: the preset's)")

    add = parser.add_argument_group("sampling (defaults: the preset's)").add_argument
    add("--steps", type=int, metavar="N", help="Euler steps")
    add("--guidance-scale", type=float, metavar="W", help="1 is no guidance, and half the work")
    add("--shift", type=float, metavar="S", help="shift of the schedule")
    add("--nabla-p", type=float, metavar="P", help="share of attention that NABLA keeps, more than 0, at most 1")
    add("--attention", metavar="NAME", help="NABLA_ATTN, NABLA_REFERENCE or SDPA (default: the checkpoint's)")

    add = parser.add_argument_group("running").add_argument
    add("--device", metavar="cpu|cuda[:N]", help="default: cuda; the demo runs on a CPU where there is no cuda")
    add("--dtype", choices=DTYPES, help="of the transformer and text encoders (default: bfloat16, on a CPU float32)")
    add("--offload", choices=OFFLOADS, default="none", help="keep parts that do not run in CPU memory")
    add("--dry-run", action="store_true", help="check everything, print what would run, read no weights")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--version", action="store_true", help="print the versions of this package and of torch")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _main(build_parser().parse_args(argv))
    except BadUsage as error:
        return _fail("--json" in argv, 2, [str(error)])
    except KeyboardInterrupt:
        return _fail("--json" in argv, 130, ["interrupted"])


def _main(args: argparse.Namespace) -> int:
    if args.version:
        print(_versions())
        return 0
    from kandinsky5_nabla.scripts._plan import BadInput, make_plan  # here: --help answers at once

    done: list[dict[str, Any]] = []
    try:
        plan = make_plan(args)
        if args.dry_run:
            result: dict[str, Any] = {"dry_run": True, **plan.describe()}
        else:
            from kandinsky5_nabla.scripts._run import run

            def on_video(video: dict[str, Any]) -> None:
                done.append(video)
                if not args.json:
                    print(_line(video), flush=True)

            result = run(plan, on_video)
    except BadInput as error:
        return _fail(args.json, 2, error.problems)
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return _fail(args.json, 1, [f"{error}" if args.debug else f"{error} (--debug shows the traceback)"], done)
    except KeyboardInterrupt:
        return _fail(args.json, 130, ["interrupted"], done)
    if args.json:
        print(json.dumps(result))
    elif args.dry_run:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    return 0


def _fail(as_json: bool, code: int, problems: list[str], done: Sequence[dict[str, Any]] = ()) -> int:
    """Report problems, and in JSON the videos that were complete before; return the exit code."""
    problems = [" ".join(problem.split()) for problem in problems]  # one line each, whatever the libraries say
    if as_json:
        videos = {"videos": list(done)} if done else {}
        print(json.dumps({"error": {"exit_code": code, "problems": problems}, **videos}))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return code


def _line(video: dict[str, Any]) -> str:
    """Return what a person wants to know of a finished video."""
    seconds = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in video["seconds"].items())
    frames = f"{video['num_frames']} frame{'' if video['num_frames'] == 1 else 's'}"
    return (
        f"{video['file']}: {video['width']}x{video['height']}, {frames} at {video['fps']:g} fps, "
        f"seed {video['seed']}; {seconds}"
    )


def _versions() -> str:
    from importlib.metadata import version

    names = ("kandinsky5-nabla", "torch", "diffusers", "transformers")
    return ", ".join(f"{name} {version(name)}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
