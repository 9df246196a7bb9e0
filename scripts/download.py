"""Fetch checkpoints of the Hugging Face Hub ahead of time, and check them.

Exit codes: 0 done; 2 bad input, found before the Hub is asked; 1 something failed while running; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kandinsky5_nabla.configs.errors import InterruptedRun, UsageError, UserError
from kandinsky5_nabla.scripts._arguments import Parser, fail, fail_running


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        description="Fetch checkpoints of the Hugging Face Hub ahead of time, and check them.",
        epilog="HF_TOKEN is used where a repository wants a token. What was fetched before is not fetched again.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="a preset, such as lite-t2v-10s-sft, or a Hub id, owner/name")
    add("--revision", metavar="R", help="branch, tag or commit (default: the preset's, or the default branch)")
    add("--cache-dir", type=Path, metavar="FOLDER", help="default: the cache of huggingface_hub")
    add("--offline", action="store_true", help="open no connection, only check that the cache has everything")
    add("--verify", action="store_true", help="compare the hash of every file with the Hub's record")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    try:
        return _main(build_parser().parse_args(argv))
    except UsageError as error:
        return fail(2, [error])
    except KeyboardInterrupt:
        return fail(130, [InterruptedRun("interrupted; a new run continues with the files that are not finished")])


def _main(args: argparse.Namespace) -> int:
    targets, problems = _targets(args)
    if problems:
        return fail(2, problems)
    code = 0
    for repo_id, revision in targets:
        try:
            _fetch(args, repo_id, revision)
        except Exception as error:  # the other repositories are fetched all the same
            code = fail_running(error, args.debug)
    return code


def _targets(args: argparse.Namespace) -> tuple[list[tuple[str, str | None]], list[UserError]]:
    """Return each repository with its revision, once; and all that is wrong with the command line."""
    from huggingface_hub import is_offline_mode

    from kandinsky5_nabla.scripts._checkpoint import cache_problems

    targets, problems = [], cache_problems(args.cache_dir)
    if args.verify and (args.offline or is_offline_mode()):
        sentence = "--verify asks the Hub for its record of every file: leave --offline and HF_HUB_OFFLINE out"
        problems.append(UsageError(sentence))
    for name in args.names:
        try:
            repo_id, revision = _target(name)
        except UserError as error:
            problems.append(error)
        else:
            if repo_id is None:
                print(f"{name}: comes with the package, nothing to fetch")
            else:
                targets.append((repo_id, args.revision or revision))
    return list(dict.fromkeys(targets)), problems


def _target(name: str) -> tuple[str | None, str | None]:
    """Return repository and revision of a name; None for a checkpoint that needs no download."""
    from kandinsky5_nabla.configs import find_preset, load_preset
    from kandinsky5_nabla.pipeline.hub_files import check_repo_id

    if os.path.isdir(name):
        raise UsageError(f"{name}: is a folder, nothing to fetch; generate.py --model {name} checks and runs it")
    if "/" in name:
        check_repo_id(name)
        preset = find_preset(name)
        return name, preset.revision if preset else None
    preset = load_preset(name)
    return (None, None) if preset.local_folder else (preset.model, preset.revision)


def _fetch(args: argparse.Namespace, repo_id: str, revision: str | None) -> None:
    from kandinsky5_nabla.pipeline.hub import fetch

    snapshot = fetch(
        repo_id,
        revision=revision,
        cache_dir=args.cache_dir,
        offline=args.offline,
        verify=args.verify,
        on_progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    size = f"{len(snapshot.files)} files, {snapshot.nbytes / 1e9:.2f} GB"
    checked = ", each as the Hub records it" if args.verify else ""
    print(f"{repo_id}: {snapshot.folder}, commit {snapshot.commit}, {size}{checked}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
