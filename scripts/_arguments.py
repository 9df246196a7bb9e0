"""What the command lines of a pipeline share: their arguments, and how they report what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
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


def add_size(group: argparse._ArgumentGroup) -> None:
    """Add what a video should not show, and its size."""
    add = group.add_argument
    add("--negative-prompt", metavar="TEXT", help="what it should not show (default: the authors' text)")
    add("--height", type=int, metavar="PIXELS", help="a multiple of 16")
    add("--width", type=int, metavar="PIXELS", help="likewise")
    add("--num-frames", type=int, metavar="N", help="4k + 1, such as 121 or 241")
    add("--duration", type=float, metavar="SECONDS", help="in place of --num-frames")


def add_model(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the preset, with the name of the one that runs where neither is given, and the checkpoint."""
    add = parser.add_argument_group("model").add_argument
    add("--config", metavar="NAME|FILE.yaml", help=f"a preset, such as demo (default: {default})")
    add("--model", metavar="HUB_ID|FOLDER", help="a checkpoint in the Diffusers layout (default: the preset's)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of the denoising and the attention."""
    add = parser.add_argument_group("sampling (defaults: the preset's)").add_argument
    add("--steps", type=int, metavar="N", help="Euler steps")
    add("--guidance-scale", type=float, metavar="W", help="1 is no guidance, and half the work")
    add("--shift", type=float, metavar="S", help="shift of the schedule")
    add("--nabla-p", type=float, metavar="P", help="share of attention that NABLA keeps, more than 0, at most 1")
    add("--attention", metavar="NAME", help="NABLA_ATTN, NABLA_REFERENCE or SDPA (default: the checkpoint's)")


def add_running(group: argparse._ArgumentGroup) -> None:
    """Add where and how it runs."""
    add = group.add_argument
    add("--device", metavar="cpu|cuda[:N]", help="default: cuda; the demo runs on a CPU where there is no cuda")
    add("--dtype", choices=DTYPES, help="of the transformer and text encoders (default: bfloat16, on a CPU float32)")
    add("--offload", choices=OFFLOADS, default="none", help="keep parts that do not run in CPU memory")
    add("--debug", action="store_true", help="show the traceback of an error")


def fail(code: int, problems: list[str], as_json: bool = False, done: Sequence[dict[str, Any]] = ()) -> int:
    """Report problems, and in JSON the videos that were complete before; return the exit code."""
    problems = [" ".join(problem.split()) for problem in problems]  # one line each, whatever the libraries say
    if as_json:
        videos = {"videos": list(done)} if done else {}
        print(json.dumps({"error": {"exit_code": code, "problems": problems}, **videos}))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return code


def fail_running(error: Exception, debug: bool, as_json: bool = False, done: Sequence[dict[str, Any]] = ()) -> int:
    """Report what failed while running; return the exit code 1."""
    return fail(1, [f"{error}" if debug else f"{error} (--debug shows the traceback)"], as_json, done)
