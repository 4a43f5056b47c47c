"""Sweeps and stages on one machine: the real command, job script and supervisor around a small program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run, stop_reason
from tests.campaigns import (
    ROOT,
    attempts,
    iterations,
    relayrun,
    write_config,
    write_stages,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

DONE = "the last iteration, 4, is saved"


@pytest.mark.long
def test_a_sweep_runs_each_of_its_runs_once(tmp_path: Path) -> None:
    path = write_config(tmp_path, sweep={"product": {"job.cpus_per_task": [1, 2]}})
    done = relayrun("sweep", "submit", path)
    assert done.returncode == 0, done.stderr
    for member, cpus in (("01", 1), ("02", 2)):
        run = Run(tmp_path / f"tiny-{member}")
        assert stop_reason(run) == DONE
        assert len(attempts(run)) == 1
        assert iterations(run) == [1, 2, 3, 4]
        assert f"cpus_per_task: {cpus}" in run.config_revision(1).read_text()
    shown = json.loads(relayrun("sweep", "status", tmp_path / "tiny", "--json").stdout)
    assert [entry["state"] for entry in shown] == ["done", "done"]
    assert [entry["loss"] for entry in shown] == [0.25, 0.25]
    assert relayrun("sweep", "submit", path).returncode == 0  # there is nothing left to do
    assert len(attempts(Run(tmp_path / "tiny-01"))) == 1


STAGES = ("stable", "branch", "long", "evaluate")


def test_stages_begin_one_behind_the_other_from_each_others_checkpoints(tmp_path: Path) -> None:
    path = write_stages(tmp_path)
    done = relayrun("stages", "submit", path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {name: Run(tmp_path / f"plan-{name}") for name in STAGES}
    begins = {name: attempts(run) for name, run in runs.items()}
    assert {name: len(found) for name, found in begins.items()} == dict.fromkeys(STAGES, 1)
    stable, long = runs["stable"].checkpoints, runs["long"].checkpoints
    bases = {name: (found[0].base_iteration, found[0].base_path) for name, found in begins.items()}
    assert bases == {
        "stable": (0, None),
        "branch": (2, str(stable / "step-2")),
        "long": (4, str(stable / "step-4")),
        "evaluate": (6, str(long / "step-6")),
    }
    assert json.loads((runs["evaluate"].path / "found.json").read_text())["iteration"] == 6
    assert iterations(runs["long"]) == [5, 6]


@pytest.mark.long
def test_a_terminal_that_is_killed_is_followed_by_resume(tmp_path: Path) -> None:
    path = write_config(tmp_path, seconds=0.5, sweep={"product": {"job.cpus_per_task": [1, 2]}})
    first, second = Run(tmp_path / "tiny-01"), Run(tmp_path / "tiny-02")
    command = [sys.executable, "-m", "relayrun.cli", "sweep", "submit", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as terminal:
        wait_for(first.attempt(1).metrics.exists)
        terminal.send_signal(signal.SIGKILL)
    shown = json.loads(relayrun("sweep", "status", tmp_path / "tiny", "--json").stdout)
    assert [entry["state"] for entry in shown][1] == "queued"
    assert shown[1]["words"] == "waits for its turn"
    done = relayrun("sweep", "resume", tmp_path / "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [iterations(run) for run in (first, second)] == [[1, 2, 3, 4]] * 2
    assert len(attempts(second)) == 1


@pytest.mark.long
def test_a_sweep_that_is_stopped_begins_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    path = write_config(tmp_path, sweep={"product": {"job.cpus_per_task": [1, 2]}})
    (tmp_path / "train.py").write_text("raise SystemExit('broken')")
    assert relayrun("sweep", "submit", path, "--set", "chain.max_failed_attempts=1").returncode == 1
    folder = tmp_path / "tiny"
    assert relayrun("sweep", "stop", folder).stdout == "nothing more of tests/tiny begins\n"
    resumed = relayrun("sweep", "resume", folder)
    assert resumed.returncode == 1
    assert f"relayrun resume {tmp_path / 'tiny-01'}" in resumed.stdout
    assert relayrun("status", folder).stderr.splitlines()[0].endswith("these are several runs")
