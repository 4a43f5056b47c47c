#!/usr/bin/env python3
"""Write the pages of docs/reference that follow from the code: settings, commands and exit codes.

Run it after a setting, a command or an option was added or changed. `--check` writes nothing and ends with 1 if a page
is not that of the code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from relayrun import cli
from relayrun.config.compose.describe import CAMPAIGN_SETTINGS, Setting, describe_settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- scripts/tools/write_reference.py wrote this -->\n"
GROUPS = {
    "run": "Run",
    "data": "Data",
    "model": "Model",
    "watch": "Watch",
    "site": "Site",
}
EXIT_CODES = (
    ("0", "done; also: what was asked for was done already"),
    (
        "1",
        "an error that a person can mend, in words on standard error; `check`, `verify` or `diff` found something",
    ),
    ("2", "the command line is wrong: an unknown option; a submit [got no yes](../how-to/budget.md#before-a-submit)"),
    (
        "130",
        "Ctrl-C (128 and the signal's number): temporary files are removed, one line says what is kept",
    ),
)
ERRORS = ("RelayrunError", "ConfigError", "InputError", "RunDirError", "SchedulerError", "FatalTrainingError")


def settings() -> str:
    """Return the page of all settings."""
    lines = [
        "# All settings",
        "",
        NOTE,
        "Units stand in the names or in the words. `relayrun explain NAME` shows one setting,",
        "[settings](../how-to/settings.md) says how they are given.",
    ]
    for setting in [*describe_settings(), *CAMPAIGN_SETTINGS]:
        lines += _setting(setting)
    return "\n".join(lines) + "\n"


def _setting(setting: Setting) -> Iterator[str]:
    if setting.is_section and "." not in setting.name:
        yield from ("", f"## {setting.name}", "", _cell(setting.words))
        yield from ("", "| setting | type | default | meaning |", "|---|---|---|---|")
        return
    default = "" if setting.is_section else "must be given" if setting.default is None else f"`{setting.default}`"
    if "." not in setting.name:
        yield from ("", f"## {setting.name}", "", f"{_cell(setting.type)}, {default}. {_cell(setting.words)}")
        return
    yield f"| `{setting.name}` | {_cell(setting.type)} | {_cell(default)} | {_cell(setting.words)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def commands() -> str:
    """Return the page of all commands with their options and an example."""
    lines = ["# Commands", "", NOTE]
    for group, title in GROUPS.items():
        lines += [f"## {title}", ""]
        for name, (module, words) in cli.COMMANDS.items():
            if module.startswith(f"{group}."):
                parser = argparse.ArgumentParser(prog=f"relayrun {name}")
                cli.adder(name)(parser)
                lines += [f"### relayrun {name}", "", f"{words[0].upper()}{words[1:]}.", ""]
                lines += [*_parser(parser), f"Example: `relayrun {name} {cli.EXAMPLES[name]}`", ""]
    return "\n".join(lines)


def _parser(parser: argparse.ArgumentParser, words: str = "") -> Iterator[str]:
    """Yield the arguments of a command as a list, and those of its subcommands."""
    rows = []
    for action in parser._actions:  # argparse has no public way to list options
        if isinstance(action, argparse._SubParsersAction):
            helped = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                yield from _parser(inner, f"`{parser.prog} {name}`: {helped.get(name, '')}")
        elif not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            said = argparse.HelpFormatter(parser.prog)._expand_help(action) if action.help else ""
            must = "; must be given" if action.required and action.option_strings else ""
            rows.append(f"- {_argument(action)}: {_cell(said)}{must}")
    if rows or words:
        yield from ([words, ""] if words else [])
        yield from ([*rows, ""] if rows else [])


def _argument(action: argparse.Action) -> str:
    value = action.metavar if action.metavar is not None else action.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return f"`{value}`"
    takes = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{flag}{takes}`" for flag in action.option_strings)


def exit_codes() -> str:
    """Return the page of exit codes and of the classes of errors."""
    from relayrun import errors

    rows = [f"| {code} | {words} |" for code, words in EXIT_CODES]
    kinds = [f"| `{name}` | {' '.join((getattr(errors, name).__doc__ or '').split())} |" for name in ERRORS]
    head = ["# Exit codes and messages", "", NOTE, "| code | meaning |", "|---|---|", *rows, ""]
    form = [
        "An error has the form `error: WHERE: WHAT`, and below it `-> HINT`. WHERE is a file and line, or a setting.",
        "Output goes to standard output, messages to standard error. Programs in Python get the same errors:",
        "",
        "| class in `relayrun.errors` | raised when |",
        "|---|---|",
        *kinds,
    ]
    return "\n".join([*head, *form]) + "\n"


PAGES = {"settings-list.md": settings, "commands.md": commands, "exit-codes.md": exit_codes}


def main() -> int:
    """Write the pages, or with --check name those that are not up to date."""
    stale = []
    for name, text in PAGES.items():
        path, made = FOLDER / name, text().rstrip("\n") + "\n"
        if path.is_file() and path.read_text(encoding="utf-8") == made:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(made, encoding="utf-8")
    print("\n".join(stale) or "up to date")
    return int("--check" in sys.argv[1:] and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
