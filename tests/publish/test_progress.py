"""The line of a long command on a terminal: its words, who sees it, and what comes after it."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relayrun import progress
from relayrun.cli import main
from relayrun.errors import log_to_stderr
from relayrun.terminal import inert_output
from tests.history import make_history
from tests.mirrored import Mirrored
from tests.tokenization_corpus import TEXTS, train_tokenizer, write_parquet
from tests.train.test_mirror import make_run, mirrored  # noqa: F401 - fixtures

LINE = re.compile(r"\r\x1b\[K([^\r\n]*)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard output and error a terminal; no fixture: pytest sets both between the phases of a test."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    return shown


def test_share_rate_and_time_are_shown_and_the_line_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = make_terminal(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with inert_output(), progress.Progress("copying", 4_000_000_000):
        now[0] = 10.0
        progress.count(1_000_000_000)
        now[0] = 20.0
        progress.count(9_000_000_000)  # more than was expected
    first, second, last = LINE.findall(terminal.getvalue())
    assert first == "copying: 25% of 4G bytes, 100M per second, 0:00:30 left"
    assert second == "copying: 100% of 4G bytes, 500M per second, 0:00:00 left"
    assert last == ""


def test_the_innermost_work_counts_and_text_of_others_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = make_terminal(monkeypatch)
    with progress.Progress("outer", 10), progress.Progress("inner\x1b[2J", 10):
        threads = [threading.Thread(target=progress.count, args=(1,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = [line for line in LINE.findall(terminal.getvalue()) if line]
    assert all(line.startswith(r"inner\u001b[2J: ") for line in lines)
    assert "50% of 10 bytes" in lines[-1]


def test_a_warning_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = make_terminal(monkeypatch)
    log_to_stderr()
    with progress.Progress("copying", 10):
        progress.count(1)
        logging.getLogger("relayrun.test").warning("no room")
    assert re.search(r"\r\x1b\[Kwarning: no room\n", terminal.getvalue())


@pytest.mark.parametrize("which", ["stdout", "stderr"])
def test_nothing_is_shown_unless_a_person_looks(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    terminal = make_terminal(monkeypatch)
    monkeypatch.setattr(sys, which, other := io.StringIO())
    with progress.Progress("copying", 10):
        progress.count(5)
        progress.clear_line()
    assert terminal.getvalue() + other.getvalue() == ""


def test_a_command_shows_it_on_a_terminal() -> None:
    """Through the streams of `run_main`, which escape control characters of all others."""
    program = """
from relayrun import progress
from relayrun.cli import main
from relayrun.errors import run_main
progress._INTERVAL = 0.0
def main():
    with progress.Progress("merging", 10):
        progress.count(5)
    print("done")
run_main(main)
"""
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    said = os.read(ours, 4096)
    os.close(ours)
    assert b"\r\x1b[Kmerging: 50% of 10 bytes" in said
    assert said.endswith(b"\r\x1b[Kdone\r\n")


def test_copies_of_checkpoints_and_their_verification_are_shown(
    mirrored: Mirrored,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = make_terminal(monkeypatch)
    mirrored.sync()
    assert main(["checkpoint", "verify", str(mirrored.run.checkpoint(30))]) == 0
    lines = [line for line in LINE.findall(terminal.getvalue()) if line]
    for what in ("copying iteration 30", "verifying iteration 30", "verifying"):
        own = [line for line in lines if line.startswith(f"{what}: ")]
        assert re.search(r": (9\d|100)% of ", own[-1]), what


def test_a_dump_and_a_list_of_runs_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for name in "ab":
        write_parquet(tmp_path / "data" / f"{name}.parquet", list(TEXTS))
    (tmp_path / "paths").write_text("a.parquet\nb.parquet\n")
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    terminal = make_terminal(monkeypatch)
    given = [
        "--dataset",
        f"{tmp_path}/data",
        "--paths-file",
        f"{tmp_path}/paths",
        "--tokenizer-name-or-path",
        str(tokenizer),
    ]
    assert main(["dumps", "tokenize", "--output-folder", f"{tmp_path}/out", *given, "--n-tasks", "2"]) == 0
    make_history(tmp_path / "runs/p/a", lines=3, attempts=1)
    assert main(["runs", "list", str(tmp_path / "runs")]) == 0
    lines = [line for line in LINE.findall(terminal.getvalue()) if line]
    assert [line for line in lines if line.startswith("tokenizing: 50% of ")]
    assert [line for line in lines if line.startswith("tokenizing: 100% of ")]
    assert lines[-1].startswith("looking at runs: 100% of 1 runs")
