"""The scripts and the subcommands of `relayrun dumps` and `relayrun mixture` are one program each."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from relayrun import places
from relayrun.cli.data import dumps, shards

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/tokenization.md").read_text(encoding="utf-8")
PAIRS = re.findall(r"^\| `(\w+\.py)` \| `relayrun (\w+) (\w+)` \|$", PAGE, re.M)


def subcommands() -> dict[tuple[str, str], argparse.ArgumentParser]:
    found = {}
    for command, add in (("dumps", dumps.add_dumps_arguments), ("mixture", shards.add_mixture_arguments)):
        parser = argparse.ArgumentParser()
        add(parser)
        (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        found |= {(command, name): inner for name, inner in action.choices.items()}
    return found


def added_by(script: str) -> Callable[[argparse.ArgumentParser], None]:
    """The function that adds the arguments of a script."""
    called = re.search(r"as_program\((\w+), __doc__\)", script)
    assert called
    imported = re.search(rf"from (relayrun\.cli\.[\w.]+) import {called[1]}\n", script)
    assert imported
    add: Callable[[argparse.ArgumentParser], None] = getattr(importlib.import_module(imported[1]), called[1])
    return add


def test_the_page_names_every_script() -> None:
    scripts = [path for folder in ("scripts", "launchers") for path in places.shared_file(folder).rglob("*.py")]
    doors = {path.name for path in scripts if "as_program(" in path.read_text(encoding="utf-8")}
    assert doors == {program for program, _, _ in PAIRS}
    assert len(doors) == 9


@pytest.mark.parametrize(("program", "command", "name"), PAIRS)
def test_a_script_and_its_command_run_the_same_function(program: str, command: str, name: str) -> None:
    (path,) = (path for folder in ("scripts", "launchers") for path in places.shared_file(folder).rglob(program))
    parser = argparse.ArgumentParser()
    added_by(path.read_text(encoding="utf-8"))(parser)
    assert subcommands()[command, name].get_default("run") is parser.get_default("run")
