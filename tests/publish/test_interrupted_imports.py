"""A signal while a command imports its modules: one line that names the command, and says that nothing was changed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
number, module, *arguments = sys.argv[1:]
def look(event, found):
    if event == "import" and found[0] == module:
        os.kill(os.getpid(), int(number))
sys.addaudithook(look)
sys.argv = ["relayrun", *arguments]
from relayrun.cli import main
sys.exit(main())
"""
SHUFFLE = "dumps shuffle --dataset-folder {text} --output-folder {text}/new"
TOKENIZE = "dumps tokenize --output-folder {text}/new --dataset x --paths-file paths --tokenizer-name-or-path gpt2"


@pytest.mark.parametrize(
    ("number", "module", "arguments", "said"),
    [
        (signal.SIGINT, "relayrun.train.export", "export hf x --output y", "`relayrun export hf` has changed nothing"),
        (signal.SIGTERM, "relayrun.submit", "submit x", "`relayrun submit x` has changed nothing"),
        (signal.SIGHUP, "relayrun.tokens.shuffle.reshard", SHUFFLE, "`relayrun dumps shuffle` has changed nothing"),
        pytest.param(
            *(signal.SIGINT, "relayrun.tokens.tokenize.pipeline", TOKENIZE, "`relayrun dumps tokenize`"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["before its arguments are read", "of a submit", "before its work", "of a command that may have begun"],
)
def test_the_command_is_named(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals, module: str, arguments: str, said: str
) -> None:
    text = tmp_path_factory.mktemp("text")
    words = [sys.executable, "-c", PROGRAM, str(int(number)), module, *arguments.format(text=text).split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=text)
    by = "" if number == signal.SIGINT else f" by {number.name}"
    assert done.stderr == f"interrupted{by}: {said}\n"
    assert done.returncode == 128 + number
    assert not list(text.iterdir())
