"""The command line: every command, option and choice as argparse knows it, and the exit status of a wrong call."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relayrun.cli import main

from .masks import ROOT, masked, write_json

SCRIPTS = ("scripts/tools/*.py", "scripts/tokenization/*.py", "launchers/*.py")

UNKNOWN = "--no-such-option"


class _Seen(Exception):
    """Carries a parser out of the program that made it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


@contextlib.contextmanager
def _no_parsing() -> Iterator[None]:
    """Raise `_Seen` in the place of parsing a command line."""
    kept = argparse.ArgumentParser.parse_known_args

    def show(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Seen(parser)

    argparse.ArgumentParser.parse_known_args = show  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = kept  # type: ignore[method-assign]


def parser_of(program: Callable[[], object]) -> argparse.ArgumentParser | None:
    """Return the parser by which a program reads its command line; None where it has none."""
    with _no_parsing(), contextlib.suppress(SystemExit):
        try:
            program()
        except _Seen as seen:
            return seen.parser
    return None


def described(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Return what a parser takes: an entry for each positional argument and option, in their order."""
    found = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        entry = {
            "names": list(action.option_strings) or [action.dest],
            "dest": action.dest,
            "kind": type(action).__name__.strip("_"),
            "nargs": action.nargs,
            "default": _default(action.default),
            "const": _default(action.const),
            "choices": None if action.choices is None else [str(choice) for choice in action.choices],
            "required": action.required,
            "metavar": action.metavar,
            "type": getattr(action.type, "__name__", None if action.type is None else type(action.type).__name__),
        }
        found.append({key: value for key, value in entry.items() if value not in (None, False)})
    return found


def _default(value: object) -> str | None:
    text = re.sub(r" at 0x[0-9a-f]+", "", masked(repr(value), {"HOME": Path.home()}))
    return None if value is None else text.replace(str(os.cpu_count()), "CPUS") if isinstance(value, int) else text


def below(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a parser and all parsers of its subcommands, each with the words that lead to it."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from below((*words, name), inner)


def exit_status(parser: argparse.ArgumentParser, words: list[str]) -> int | str:
    """Return the exit status with which a parser refuses words; "runs" where it takes them."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            parser.parse_args(words)
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else str(left.code)
    return "runs"


def tree(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return every subcommand below a parser: what it takes, and the exit status of three calls."""
    found: dict[str, Any] = {}
    for words, each in below((), parser):
        calls = {"--help": [*words, "--help"], "no arguments": [*words], UNKNOWN: [*words, UNKNOWN]}
        found[" ".join(words) or "(itself)"] = {
            "takes": described(each),
            "exit status": {name: exit_status(parser, given) for name, given in calls.items()},
        }
    return found


def verbs() -> list[str]:
    """Return the names of all commands."""
    top = parser_of(lambda: main([]))
    assert top is not None
    return next(list(action.choices) for action in top._actions if isinstance(action, argparse._SubParsersAction))


def _of_verb(name: str) -> dict[str, Any]:
    parser = parser_of(lambda: main([name]))
    assert parser is not None
    return {words: entry for words, entry in tree(parser).items() if words.split()[0] == name}


def _of_script(path: Path) -> dict[str, Any] | None:
    kept = sys.argv
    sys.argv = [path.name]
    try:
        parser = parser_of(lambda: runpy.run_path(str(path), run_name="__main__"))
    finally:
        sys.argv = kept
    return None if parser is None else tree(parser)


def record(folder: Path) -> None:
    """Write a file for each command and each Python script, and the status that the whole command ends with."""
    names = verbs()
    write_json(folder / "verbs.json", names)
    for name in names:
        write_json(folder / "verbs" / f"{name}.json", _of_verb(name))
    for pattern in SCRIPTS:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).with_suffix(".json").as_posix()
            write_json(folder / "scripts" / name.replace("/", "."), _of_script(path))
    write_json(folder / "whole.json", {" ".join(words): _whole(words) for words in _calls(names)})


def _calls(names: list[str]) -> Iterator[list[str]]:
    yield from ([], ["--version"], ["--help"], ["no-such-command"], [UNKNOWN])
    for name in names:
        yield from ([name, "--help"], [name, UNKNOWN])


def _whole(words: list[str]) -> int | str | None:
    """The exit status of the command itself, which no parser was taken out of."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return main(words)
        except SystemExit as left:
            return left.code
