"""`relayrun completion`: a script that completes commands, options, runs, configs and settings in Bash.

The script contains the commands and options of this installation, so relayrun does not start while a user types: a
completion takes milliseconds.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayrun import places
from relayrun.config.compose import describe

ENGINE_SCRIPT = Path(__file__).with_name("completion.sh")

_BASH = """\
# Completion of relayrun for Bash: `source <(relayrun completion bash)` in ~/.bashrc.
{engine}
_relayrun() {{
  local word
  local -a words=("${{COMP_WORDS[@]:1:COMP_CWORD}}")
  COMPREPLY=()
  while IFS= read -r word; do
    COMPREPLY+=("${{word}}")
  done < <(relayrun_candidates "${{words[@]}}")
  if ((${{#COMPREPLY[@]}} == 1)) && [[ ${{COMPREPLY[0]}} == *[=/] ]]; then
    compopt -o nospace
  fi
}}
complete -o default -F _relayrun relayrun
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun completion`."""
    parser.add_argument("shell", choices=("bash",))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    engine = f"{completion_tables()}\n{ENGINE_SCRIPT.read_text(encoding='utf-8')}"
    print(_BASH.format(engine=engine), end="")
    return 0


def completion_tables() -> str:
    """Return Bash functions with the words of each command, the kinds of its values, and the names of settings."""
    words, kinds = [], []
    for path, parser in _commands():
        known, own = _words_and_kinds(parser)
        words.append((" ".join(path), known))
        kinds += [(f"{' '.join(path)} {name}", kind) for name, kind in own]
    settings = [setting.name for setting in describe.describe_settings() if not setting.is_section]
    checkout = shlex.quote(str(places.CODE_ROOT)) if places.is_checkout() else ""
    return "\n".join(
        [
            f"relayrun_checkout={checkout}",
            *_function("relayrun_words", [(name, "\n".join(known)) for name, known in words]),
            *_function("relayrun_kind", kinds),
            *_function("relayrun_settings", [(None, "\n".join(settings))]),
        ]
    )


def _function(name: str, cases: Sequence[tuple[str | None, str]]) -> list[str]:
    """A Bash function that prints one text per first argument."""
    lines = [
        f"  {'*' if key is None else shlex.quote(key)}) printf '%s\\n' {shlex.quote(text)} ;;" for key, text in cases
    ]
    return [f'{name}() {{ case "${{1-}}" in', *lines, "  esac; }"]


def _commands() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with its parser; a command whose packages are not installed has no options."""
    from relayrun.cli import COMMANDS, adder

    top = argparse.ArgumentParser(prog="relayrun")
    top.add_argument("--version", action="store_true")
    parsers = top.add_subparsers()
    for name in COMMANDS:
        command = parsers.add_parser(name)
        try:
            adder(name)(command)
        except ModuleNotFoundError:
            continue
    yield from _subcommands((), top)


def _subcommands(
    path: tuple[str, ...], parser: argparse.ArgumentParser
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield path, parser
    for action in parser._actions:  # argparse has no public way to list options
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _subcommands((*path, name), inner)


def _words_and_kinds(parser: argparse.ArgumentParser) -> tuple[list[str], list[tuple[str, str]]]:
    """Words of a command, and the kind of the value after each option and at each position."""
    words: list[str] = []
    kinds: list[tuple[str, str]] = []
    place = 0
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            continue
        words += [flag for flag in action.option_strings if flag.startswith("--") or len(action.option_strings) == 1]
        if action.nargs == 0:
            continue
        kind = _value_kind(action)
        kinds += [(flag, kind) for flag in action.option_strings]
        if not action.option_strings:
            places_of_it = action.nargs if isinstance(action.nargs, int) else 1
            kinds += [(str(place + number), kind) for number in range(places_of_it)]
            place += places_of_it
    return words, kinds


def _value_kind(action: argparse.Action) -> str:
    metavar = str(action.metavar or action.dest)
    if action.choices:
        return "word:" + " ".join(map(str, action.choices))
    if metavar == "NAME=VALUE":
        return "override"
    if metavar.startswith("RUN"):
        return "run"
    if metavar.lower() == "config":
        return "config-or-run" if "RUN" in (action.help or "") else "config"
    return "setting" if metavar == "NAME" and not action.option_strings else "file"
