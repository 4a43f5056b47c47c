"""The pages of docs/reference that follow from the code are those of the code of today."""

from __future__ import annotations

import argparse
import re

import pytest

from relayrun import cli, errors
from relayrun.config.compose.describe import describe_settings
from scripts.tools import write_reference


@pytest.mark.parametrize("name", write_reference.PAGES)
def test_a_page_is_that_of_the_code(name: str) -> None:
    page = (write_reference.FOLDER / name).read_text(encoding="utf-8")
    assert page == write_reference.PAGES[name]().rstrip("\n") + "\n", "run scripts/tools/write_reference.py"


def test_every_setting_and_command_is_there() -> None:
    page = write_reference.settings()
    for setting in describe_settings():
        assert f"`{setting.name}`" in page or f"## {setting.name}\n" in page, setting.name
    commands = write_reference.commands()
    assert "%(" not in commands  # defaults are filled in
    assert sorted(re.findall(r"^### relayrun (\S+)$", commands, re.M)) == sorted(cli.COMMANDS)
    for name in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        cli.adder(name)(parser)
        for action in parser._actions[1:]:
            for flag in action.option_strings if action.help != argparse.SUPPRESS else ():
                assert f"`{flag}" in commands, (name, flag)


def test_every_class_of_errors_is_there() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")}
    own = {name for name in classes if issubclass(getattr(errors, name), errors.RelayrunError)}
    assert own == set(write_reference.ERRORS)
