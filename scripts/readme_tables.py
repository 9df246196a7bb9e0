"""Print the tables of the README that the program itself knows, or write them into it between their markers."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kandinsky5_nabla.configs.errors import catalogue
from kandinsky5_nabla.scripts.generate import build_parser

README = Path(__file__).resolve().parent.parent / "README.md"


def options_table() -> str:
    """Return the options of generate.py, group by group, as its parser has them."""
    rows = ["| option | meaning |", "|---|---|"]
    for group in build_parser()._action_groups:
        shown = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if shown:
            rows.append(f"| **{group.title}** | |")
        for action in shown:
            rows.append(f"| `{_escaped(_spelled(action))}` | {_escaped(action.help or '')} |")
    return "\n".join(rows)


def errors_table() -> str:
    """Return the catalogue of errors: each kind, what happened, what to do about it, and the exit codes."""
    rows = ["| kind | what happened | what to do | exit code |", "|---|---|---|---|"]
    for kind in catalogue():
        what_happened, codes = (kind.__doc__ or "").partition("\n")[0], " or ".join(map(str, kind.exit_codes))
        rows.append(f"| `{kind.__name__}` | {what_happened} | {kind.remedy} | {codes} |")
    return "\n".join(rows)


TABLES: Mapping[str, Callable[[], str]] = {"options": options_table, "errors": errors_table}
"""The tables, by the name that their markers have in the README: `<!-- NAME -->` and `<!-- /NAME -->`."""


def with_tables(text: str) -> str:
    """Return the README's text with each table as it is now.

    Raises:
        ValueError: if a table has no markers in it.
    """
    for name, table in TABLES.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        content = table()
        text, count = between.subn(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"the README has {count} places for the table {name}: one is needed")
    return text


def _spelled(action: argparse.Action) -> str:
    """Return an option as a command line has it."""
    if action.nargs == 0:
        return action.option_strings[-1]
    value = action.metavar or "|".join(map(str, action.choices or ()))
    return f"{action.option_strings[-1]} {f'[{value}]' if action.nargs == '?' else value}"


def _escaped(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them into README.md")
    if parser.parse_args(argv).write:
        README.write_text(with_tables(README.read_text("utf-8")), encoding="utf-8")
        return 0
    print("\n\n".join(table() for table in TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
