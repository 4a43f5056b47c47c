"""`pytest tests/publish --table`: what was seen of each command, as a table at the end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.publish.commands import COMMANDS
from tests.publish.test_two_at_once import HERE, SHOWN_BY

COLUMNS = {
    "test_every_signal_at_twenty_moments": {name: name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")},
    "test_a_killed_or_interrupted_command_leaves_nothing_half_and_goes_on": {"": "any signal"},
    "test_of_two_at_once_one_is_whole_and_the_other_names_it": {"the same": "two", "other arguments": "two differ"},
    "test_a_full_disk_is_one_line_about_the_output": {"": "full"},
    "test_a_disk_that_fails_from_some_change_on_is_one_line_about_the_output": {
        name: name for name in ("ENOSPC", "EIO", "EROFS")
    },
    "test_an_output_folder_that_vanishes_is_named": {"": "output vanishes"},
    "test_what_comes_to_stand_at_the_output_meanwhile_stays": {"": "output appears"},
    "test_a_link_at_the_output_stays_and_nothing_behind_it_is_lost": dict.fromkeys(
        ("nothing", "an empty folder", "a thesis"), "link"
    ),
    "test_an_input_that_changes_while_it_is_read_is_named": {
        name: f"input {name}" for name in ("changed", "removed", "replaced")
    },
    "test_an_input_that_changes_once_it_is_read_is_named": {"": "input changed early"},
    "test_a_finished_command_is_done": {"": "again"},
    "test_a_command_shows_its_progress_on_a_terminal_alone": {"": "progress"},
}
"""Columns by test and by the last part of a case's name."""
WORST = ("FAILED", "skipped", "ok")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", action="store_true", help="print what was seen of each command that publishes")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--table", False):
        return
    names = {"passed": "ok", "failed": "FAILED", "error": "FAILED", "skipped": "skipped"}
    seen: dict[tuple[str, str], str] = {}
    for outcome, word in names.items():
        for report in terminalreporter.stats.get(outcome, []):
            test, _, case = report.nodeid.rpartition("::")[2].removesuffix("]").partition("[")
            command, _, rest = case.partition("-")
            column = COLUMNS.get(test, {}).get(rest)
            if column is not None:
                seen[command, column] = min(word, seen.get((command, column), "ok"), key=WORST.index)
    columns = list(dict.fromkeys(column for each in COLUMNS.values() for column in each.values()))
    rows = [["command", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(seen.get((name, column), "") for column in columns)] for name in COMMANDS]
    terminalreporter.write_line("")
    rows += [[], ["other command", "twice at once"], ["---"] * 2]
    rows += [[name, "tests/publish/test_two_at_once.py"] for name in HERE if name not in COMMANDS]
    rows += [[name, reason] for name, reason in SHOWN_BY.items()]
    for row in rows:
        terminalreporter.write_line(f"| {' | '.join(row)} |" if row else "")
