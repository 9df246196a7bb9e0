"""Make a video of a prompt with Kandinsky 5 and NABLA attention.

Exit codes: 0 done; 2 bad input, found before any weight is read; 1 something failed while running; 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kandinsky5_nabla.configs.errors import InterruptedRun, UsageError
from kandinsky5_nabla.scripts._arguments import (
    Parser,
    add_file,
    add_model,
    add_running,
    add_sampling,
    add_size,
    add_speaking,
    fail,
    fail_running,
)
from kandinsky5_nabla.scripts._interrupt import Interrupts, caught_interrupts
from kandinsky5_nabla.scripts._log import say, say_error, speaking
from kandinsky5_nabla.scripts._stdout import Stdout

if TYPE_CHECKING:
    from kandinsky5_nabla.scripts._batch import Failure


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        description="Make a video of a prompt with Kandinsky 5 and NABLA attention.",
        usage="%(prog)s --prompt TEXT [options]",
        epilog='Try it without a download: %(prog)s --config demo --prompt "a red square moving left"',
        allow_abbrev=False,
    )
    group = parser.add_argument_group("what to make")
    add = group.add_argument
    add("--prompt", action="append", type=str, metavar="TEXT", help="what the video shows; repeat for several videos")
    add("--prompts", type=Path, metavar="FILE", help="a .txt, .csv or .jsonl: a video a row, in --output")
    add("--expand-prompt", action="store_true", help="let the loaded Qwen rewrite short prompts in detail first")
    add_size(group)
    add("--num-videos", type=int, default=1, metavar="N", help="videos a prompt, of the seeds SEED, SEED + 1, ...")
    add("--seed", type=int, metavar="N", help="of the noise (default: drawn, printed and recorded)")
    group = parser.add_argument_group("files")
    add = group.add_argument
    add("--output", type=Path, metavar="FILE", help="default: a free name made of prompt and seed, here")
    add("--overwrite", action="store_true", help="replace existing files")
    add_file(group)
    pictures = "draw NAME.k5/preview.png on the way, a contact sheet NAME.png"
    add("--preview", nargs="?", const=True, type=Path, metavar="MAP.json", help=pictures)
    add("--from", type=Path, dest="repeat", metavar="FILE", help="repeat a video's run, from it or its NAME.json")
    add("--report", type=Path, metavar="FILE.json", help="what NABLA kept, in each layer and step")
    add("--save-embeds", type=Path, metavar="FILE", help="write the encoded prompts to a .safetensors, too")
    add("--embeds", type=Path, metavar="FILE", help="such a file, in place of the text encoders")
    add_model(parser, "lite-t2v-10s-sft")
    add_sampling(parser)
    add = parser.add_argument_group("state: NAME.k5 beside NAME.mp4, until that is complete").add_argument
    add("--resume", type=Path, metavar="NAME.k5", help="go on with a run that did not finish")
    add("--decode-only", type=Path, metavar="NAME.k5", help="decode its last latents again; NAME.k5 is kept")
    add("--checkpoint-every", type=int, metavar="N", help="steps from save to save (default: a minute of work)")
    add("--keep-state", action="store_true", help="keep NAME.k5 when the video is complete")
    add_running(parser.add_argument_group("where and how it runs"))
    group = parser.add_argument_group("what it says")
    add = group.add_argument
    add("--dry-run", action="store_true", help="check everything, print what would run, read no weights")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    add_speaking(group)
    add("--list", action="store_true", help="print the presets")
    add("--version", action="store_true", help="print the versions of this package and of torch")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: no name of a file ends a run that is complete
    argv, out = sys.argv[1:] if argv is None else argv, Stdout()
    as_json = out if "--json" in argv else None
    try:
        with caught_interrupts() as interrupts:
            code = _main(argv, build_parser(), interrupts, out)
    except UsageError as error:
        code = fail(2, [error], as_json)
    except KeyboardInterrupt:
        code = fail(130, [InterruptedRun("interrupted")], as_json)
    return out.exit_code(code)


def _main(argv: list[str], parser: Parser, interrupts: Interrupts, out: Stdout) -> int:
    args = parser.parse_args(argv)
    if args.version:
        from kandinsky5_nabla.scripts._record import versions

        out.print(json.dumps(versions()) if args.json else ", ".join(" ".join(each) for each in versions().items()))
        return 0
    if args.list:
        from kandinsky5_nabla.configs import load_preset, preset_names
        from kandinsky5_nabla.scripts.list_presets import table

        presets = [load_preset(name) for name in preset_names()]
        out.print(json.dumps({each.name: asdict(each) for each in presets}) if args.json else table(presets))
        return 0
    with speaking(args.quiet, args.verbose, None if args.dry_run else args.log):
        return _make(args, argv, parser, interrupts, out)


def _make(args: argparse.Namespace, argv: list[str], parser: Parser, interrupts: Interrupts, out: Stdout) -> int:
    from kandinsky5_nabla.scripts._plan import make_plan  # here: --help answers at once
    from kandinsky5_nabla.scripts._repeat import complete
    from kandinsky5_nabla.scripts._setup import BadInput

    as_json, done = out if args.json else None, list[dict[str, Any]]()
    try:
        plan = make_plan(*complete(args, parser), argv)
        for caution in plan.cautions():
            say("warning", caution, logging.WARNING)
        if args.dry_run:
            result: dict[str, Any] = {"dry_run": True, **plan.describe()}
        else:
            from kandinsky5_nabla.scripts._run import run

            def on_video(video: dict[str, Any]) -> None:
                done.append(video)
                say("video", f"{video['file']} is complete", logging.DEBUG, video=video)
                if not args.json:
                    out.print(_line(video))

            def on_failure(failure: Failure) -> None:
                for problem, sentence in zip(failure.problems, failure.sentences(args.prompts), strict=True):
                    say_error(problem, sentence, line=failure.line)

            result = run(plan, on_video, on_failure, interrupts)
    except BadInput as error:
        return fail(2, error.problems, as_json)
    except Exception as error:
        return fail_running(error, args.debug, as_json, done)
    except KeyboardInterrupt:
        return fail(130, [InterruptedRun("interrupted")], as_json, done)
    if args.json:
        out.print(json.dumps(result))
    elif args.dry_run:
        lines = ("\n".join(value) if name == "memory" else f"{name}: {value}" for name, value in result.items())
        out.print("\n".join(lines))
    code = out.exit_code(1 if result.get("failed") or result.get("bad") else 0)
    say("done", "done", logging.DEBUG, exit_code=code)
    return code


def _line(video: dict[str, Any]) -> str:
    """Return what a person wants to know of a finished video."""
    seconds = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in video["seconds"].items())
    frames = f"{video['num_frames']} frame{'' if video['num_frames'] == 1 else 's'}"
    sheet = f"; sheet {video['sheet']}" if "sheet" in video else ""
    return (
        f"{video['file']}: {video['width']}x{video['height']}, {frames} at {video['fps']:g} fps, "
        f"seed {video['seed']}; {seconds}{sheet}"
    )


if __name__ == "__main__":
    sys.exit(main())
