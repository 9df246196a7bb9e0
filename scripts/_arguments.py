"""What the command lines of a pipeline share: their arguments, and how they report what is wrong."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from kandinsky5_nabla.configs.errors import UsageError, UserError
from kandinsky5_nabla.pipeline.checks import shortened
from kandinsky5_nabla.pipeline.codecs import CODECS
from kandinsky5_nabla.pipeline.precision import FLOAT_DTYPES, full_dtype_name
from kandinsky5_nabla.scripts._failures import kind_of_failure
from kandinsky5_nabla.scripts._log import is_shown, say, say_error
from kandinsky5_nabla.scripts._stdout import Stdout

OFFLOADS = ("auto", "none", "model", "group", "sequential")


class Unfinished(Exception):
    """A run ended before its video was complete.

    Attributes:
        code: the exit code.
        problem: what ended it, and what was kept.
        command: the command line that goes on from the state it has kept; None where it has kept none.
        ends_all: whether the videos after it would fare no better.
    """

    def __init__(self, code: int, problem: UserError, command: str | None, ends_all: bool) -> None:
        super().__init__(str(problem))
        self.code, self.problem, self.command, self.ends_all = code, problem, command, ends_all


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse's prints its usage and exits, and refuses values that can name nothing.

    A text that may be empty says so with `type=str`. In the help each option has a line of its own.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            **kwargs,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
            exit_on_error=False,  # so that `parse_args` learns which argument an error is about
        )
        self.register("type", None, _named)
        self.register("type", int, _whole)
        self.register("type", float, _number)
        self.register("type", Path, lambda text: Path(_named(text)))

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]  (of several overloads)
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """Return the parsed words, sys.argv's where None are given.

        Raises:
            UsageError: if they cannot be parsed.
        """
        words = sys.argv[1:] if args is None else [*args]
        try:
            return super().parse_args(words, namespace)
        except argparse.ArgumentError as error:
            self.error(f"{error}{self._dash_hint(error.argument_name, words)}")

    def print_help(self, file: Any = None) -> None:
        """Print the help; where that cannot be written argparse's would end as if it had been."""
        if file is not None:
            return super().print_help(file)
        out = Stdout()
        out.print(self.format_help().rstrip("\n"))
        if code := out.exit_code(0):
            self.exit(code)

    def _dash_hint(self, name: str | None, words: list[str]) -> str:
        """Return how to give an option a value that begins with a dash, if one seems to be meant."""
        known = self._option_string_actions
        for word, value in pairwise(words):
            if word == name and known[word].nargs != 0 and value[:1] == "-" and value.partition("=")[0] not in known:
                return f"; {word}={value} gives it a value that begins with a dash"
        return ""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(f"{message} (--help lists the arguments)")


def _named(text: str) -> str:
    """Return the value of an argument, which a shell's empty variable must not turn into a default or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; give a value, or leave the argument out")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} holds a NUL character; leave that out")
    return text


def _whole(text: str) -> int:
    """Return a whole number; the message has the nearest one where the text is a number."""
    try:
        return int(text)
    except ValueError as error:
        remedy = ", such as 5"
        with suppress(ValueError, OverflowError):  # no number, or infinity
            remedy = f"; {round(float(text))} works"
        problem = f"{shortened(text)!r}: a whole number is needed{remedy}"
        raise argparse.ArgumentTypeError(problem) from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r}: a number is needed, such as 1.5") from error


def add_size(group: argparse._ArgumentGroup) -> None:
    """Add what a video should not show, and its size."""
    add = group.add_argument
    add("--negative-prompt", type=str, metavar="TEXT", help="what it should not show (default: the authors' text)")
    add("--height", type=int, metavar="PIXELS", help="a multiple of 16")
    add("--width", type=int, metavar="PIXELS", help="likewise")
    add("--num-frames", type=int, metavar="N", help="4k + 1, such as 121 or 241")
    add("--duration", type=float, metavar="SECONDS", help="in place of --num-frames")


def add_file(group: argparse._ArgumentGroup) -> None:
    """Add how a video is written."""
    add = group.add_argument
    add(
        "--codec",
        choices=tuple(CODECS),
        metavar="NAME",
        help="h264 (default), h265, gif (default for FILE.gif) or frames (PNGs)",
    )
    add("--crf", type=int, metavar="N", help="quality from 0, the best, to 51 (default: 18, with h265 20)")


def add_model(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the preset, with the name of the one that runs where neither is given, and the checkpoint."""
    add = parser.add_argument_group("model").add_argument
    add("--config", metavar="NAME|FILE.yaml", help=f"a preset, such as demo (default: {default})")
    add("--model", metavar="HUB_ID|FOLDER|FILE", help="a checkpoint, or its transformer's .safetensors file")
    add("--revision", metavar="COMMIT", help="of a repository (default: the preset's)")
    add("--vae", type=Path, metavar="FOLDER", help="for a FILE; like the next two it is downloaded if left out")
    add("--text-encoder", type=Path, metavar="FOLDER", help="Qwen2.5-VL with its tokenizer")
    add("--text-encoder-2", type=Path, metavar="FOLDER", help="CLIP with its tokenizer")
    add("--lora", action="append", default=[], metavar="FILE[:SCALE]", help="repeat it for several")
    add("--cache-dir", type=Path, metavar="FOLDER", help="of downloads (default: the Hub's cache)")
    add("--offline", action="store_true", help="open no connection")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of the denoising and the attention."""
    add = parser.add_argument_group("sampling (defaults: the preset's)").add_argument
    add("--steps", type=int, metavar="N", help="Euler steps")
    add("--guidance-scale", type=float, metavar="W", help="1 is no guidance, and half the work")
    add("--shift", type=float, metavar="S", help="shift of the schedule")
    add("--nabla-p", type=float, metavar="P", help="share of attention that NABLA keeps, more than 0, at most 1")
    add("--attention", metavar="NAME", help="NABLA_ATTN, NABLA_REFERENCE or SDPA (default: checkpoint's)")


def add_running(group: argparse._ArgumentGroup) -> None:
    """Add where and how it runs."""
    add = group.add_argument
    add("--device", metavar="cpu|cuda[:N]", help="default: cuda; the demo runs on a CPU where there is no cuda")
    add(
        "--dtype",
        type=full_dtype_name,
        choices=FLOAT_DTYPES,
        metavar="NAME",
        help="float32 (default on a CPU), bfloat16 (default elsewhere), float16",
    )
    add("--dit-dtype", metavar="NAME", help="store the transformer's weights in fp8, or another dtype")
    add("--text-encoder-dtype", metavar="NAME", help="store Qwen's in int8 or nf4 (bitsandbytes), or another")
    add(
        "--offload",
        choices=OFFLOADS,
        default="auto",
        metavar="NAME",
        help="to CPU memory: auto (default), none, model, group, sequential",
    )
    add("--vae-tile", metavar="NAME", help="decode in tiles such as 192x16: less memory, other pixels")


def add_speaking(group: argparse._ArgumentGroup) -> None:
    """Add what is said of the run, and where."""
    add = group.add_argument
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--log", type=Path, metavar="FILE.jsonl", help="append all that is said, and each step, as JSON lines")
    add = group.add_mutually_exclusive_group().add_argument
    add("--quiet", action="store_true", help="show only warnings, errors and the result")
    add("--verbose", action="store_true", help="show more: each step, seconds, versions, libraries' warnings")


def described(problems: Sequence[UserError]) -> dict[str, list[str]]:
    """Return problems as plain values: what they say, in a line each, and their kinds."""
    return {
        "problems": [" ".join(str(problem).split()) for problem in problems],
        "kinds": [type(problem).__name__ for problem in problems],
    }


def fail(
    code: int,
    problems: Sequence[UserError],
    as_json: Stdout | None = None,
    done: Sequence[dict[str, Any]] = (),
    command: str | None = None,
) -> int:
    """Report problems and the command that goes on; return the code.

    `as_json` gets them as JSON, with the videos that were complete before.
    """
    if as_json is not None:
        go_on = {} if command is None else {"go_on": command}
        videos = {"videos": list(done)} if done else {}
        as_json.print(json.dumps({"error": {"exit_code": code, **described(problems), **go_on}, **videos}))
    for problem in problems:
        say_error(problem, str(problem), exit_code=code)
    if command is not None:
        say("go_on", f"go on with: {command}", logging.ERROR, command=command)
    return code


def fail_running(
    error: Exception, debug: bool, as_json: Stdout | None = None, done: Sequence[dict[str, Any]] = ()
) -> int:
    """Report what failed while running, with `debug` its traceback first; return 1, or the code of `Unfinished`."""
    unfinished = isinstance(error, Unfinished)
    code, command, problem = (error.code, error.command, error.problem) if unfinished else (1, None, error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    say("traceback", trace, logging.ERROR if debug else logging.DEBUG)
    shown = debug or is_shown(logging.DEBUG)
    hint = "" if shown or code == 130 else " (--debug shows the traceback)"
    return fail(code, [kind_of_failure(problem)(f"{problem}{hint}")], as_json, done, command)
