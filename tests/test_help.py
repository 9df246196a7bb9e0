"""What a user reads of the command line: its help, and the README's tables, which are made from it."""

import pytest

from kandinsky5_nabla.scripts.generate import build_parser
from kandinsky5_nabla.scripts.readme_tables import README, options_table, with_tables

SCREEN = 40, 100
"""Rows and columns."""


def test_the_readmes_tables_are_those_of_the_program():
    text = README.read_text("utf-8")
    assert with_tables(text) == text, "python scripts/readme_tables.py --write"


def test_a_table_that_has_no_place_in_the_readme_is_missed():
    with pytest.raises(ValueError, match="the README has 0 places for the table options"):
        with_tables("# nothing")


def test_every_option_is_in_the_table():
    options = [word for action in build_parser()._actions for word in action.option_strings if word.startswith("--")]
    table = options_table()
    assert len(options) > 40
    assert [option for option in options if f"`{option} " not in table and f"`{option}`" not in table] == ["--help"]


def test_the_help_fits_on_two_screens_each_option_of_a_group_in_its_line(monkeypatch):
    rows, columns = SCREEN
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = build_parser()
    lines = parser.format_help().splitlines()
    assert len(lines) <= 2 * rows
    assert max(map(len, lines)) <= columns
    for group in parser._action_groups:
        assert not group._group_actions or f"{group.title}:" in lines
        assert len(group._group_actions) <= 12, group.title  # more are no longer seen at a glance
        for action in group._group_actions:
            [line] = [line for line in lines if line.lstrip().startswith(f"{', '.join(action.option_strings)} ")]
            assert action.help.replace("%%", "%") in line
