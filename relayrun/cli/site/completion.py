"""Completion of the `relayrun` command in a shell, by argcomplete (the extra `completion`).

In: the line that is being typed, from the functions of `register-python-argcomplete`. Out: words that can stand there.
"""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Callable, Iterable
from typing import Any

import argcomplete


def complete(commands: Iterable[str], parser_of: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """Write the possible words for the shell, and exit. `parser_of` makes the parser with the options of a command."""
    typed = os.environ.get("COMP_LINE", "").split()
    asked = next((word for word in typed[1:] if word in commands), None)
    try:
        parser = parser_of(asked)
    except ModuleNotFoundError:  # the command needs an extra that is not installed
        parser = parser_of(None)
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=_values)


def _values(prefix: str, action: argparse.Action, **_: Any) -> list[str]:
    """Values of an argument: runs, configs or settings; for other arguments none, and the shell completes files."""
    metavar = str(action.metavar or action.dest)
    if metavar == "NAME=VALUE" and action.dest == "overrides":
        return [f"{name}=" for name in _settings()]
    if metavar == "NAME" and not action.option_strings:
        return _settings()
    found = []
    is_config = metavar.upper().startswith("CONFIG")
    if is_config:
        paths = sorted(glob.glob(f"{glob.escape(prefix)}*"))
        found = [f"{path}/" if os.path.isdir(path) else path for path in paths]
        found = [path for path in found if path.endswith(("/", ".yaml", ".yml"))]
    if "RUN" in metavar or (is_config and "RUN" in (action.help or "")):
        found += _runs()
    return found


def _settings() -> list[str]:
    from relayrun.config.compose import describe

    return [setting.name for setting in describe.describe_settings() if not setting.is_section]


def _runs() -> list[str]:
    from relayrun.control.rundir.find_runs import all_run_folders

    return [f"{run.path.parent.name}/{run.path.name}" for run in all_run_folders()]
