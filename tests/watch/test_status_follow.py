"""`relayrun status -f`: one question to Slurm a look, lines where there is no terminal, Ctrl-C without a traceback."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from relayrun.cli.watch import status
from relayrun.control.rundir.run import Run
from relayrun.watch.status import queue, tables
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.status.runs import RunsWatcher
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.plans import plan_with
from tests.waiting import read_line

NOW = 10_000.0


@pytest.fixture
def runs(make_run: MakeRun) -> list[Run]:  # noqa: F811
    """Three chains on Slurm, each with a job name of its own."""
    made = []
    for name in ("a", "b", "c"):
        run, plan = make_run(folder=name, scheduler="slurm")
        plan_with(plan, run=f"tests/{name}", job_name=f"job-{name}").write(run.plan)
        made.append(run)
    return made


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that prints what the file `queue` holds, and notes its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (
        ("squeue", f"echo \"$@\" >> '{tmp_path}/calls'; cat '{tmp_path}/queue'"),
        ("sacct", "exit 1"),
        ("scontrol", "exit 1"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.0)
    return tmp_path


def looked(watcher: RunsWatcher, runs: list[Run]) -> dict[str, RunStatus]:
    return {entry.run: entry for entry in watcher.statuses(runs, now=NOW) if isinstance(entry, RunStatus)}


def test_a_look_asks_once_for_all_chains(runs: list[Run], slurm: Path) -> None:
    (slurm / "queue").write_text("7|RUNNING|None|job-a\n8|PENDING|Resources|job-a\n9|PENDING|Priority|job-b\n")
    runs[2].stop.write_text("done")
    watcher = RunsWatcher()
    for number in (1, 2):
        found = looked(watcher, runs)
        states = {name: entry.state for name, entry in found.items()}
        assert states == {"tests/a": "running", "tests/b": "queued", "tests/c": "stopped"}
        assert found["tests/a"].pending == {"8": "Resources"}
        calls = (slurm / "calls").read_text().splitlines()
        assert len(calls) == number
        assert "--name=job-a,job-b " in calls[-1]  # the third has ended


def test_a_chain_without_jobs_is_asked_about_on_its_own_once(runs: list[Run], slurm: Path) -> None:
    (slurm / "queue").write_text("7|RUNNING|None|job-a\n")
    watcher = RunsWatcher()
    looked(watcher, runs)
    first = len((slurm / "calls").read_text().splitlines())
    looked(watcher, runs)
    assert len((slurm / "calls").read_text().splitlines()) == first + 1


def test_a_scheduler_that_does_not_answer_is_a_fact(runs: list[Run], slurm: Path) -> None:
    (slurm / "bin/squeue").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    assert {entry.state for entry in looked(RunsWatcher(), runs).values()} == {"unknown"}


def test_lines_end_with_the_chain(
    runs: list[Run], slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "queue").write_text("7|RUNNING|None|job-a\n")

    def later(_: float) -> None:
        runs[0].stop.write_text("the last iteration is saved")
        (slurm / "queue").write_text("")

    # its own sleep alone: a call of squeue waits with time.sleep as well
    monkeypatch.setattr(status, "time", SimpleNamespace(**vars(time) | {"sleep": later}))
    assert status.follow(str(runs[0].path), 1.0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1].split(",")[0] for line in lines] == ["tests/a: running", "tests/a: stopped"]


def test_a_terminal_gets_a_table(runs: list[Run], slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "queue").write_text("")
    runs[0].stop.write_text("done")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert status.follow(str(runs[0].path), 1.0) == 0
    assert "tests/a" in screen.getvalue()
    assert "stopped" in screen.getvalue()


def test_ctrl_c_ends_it_without_a_traceback(runs: list[Run], slurm: Path) -> None:
    (slurm / "queue").write_text("7|RUNNING|None|job-a\n")
    command = [sys.executable, "-m", "relayrun", "status", "-f", str(runs[0].path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    ) as process:
        assert "tests/a: running" in read_line(process)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=300)
    assert (process.returncode, rest, errors) == (0, "", "")


def test_a_line_says_where_a_run_stands(runs: list[Run], slurm: Path) -> None:
    (slurm / "queue").write_text("")
    [entry] = RunsWatcher().statuses(runs[:1], now=NOW)
    assert tables.run_log_line(entry).startswith("tests/a: failed, iteration 0 of ")
