"""The real training program through the real chain on one machine: cut by its time limit, exact to the last bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.records import AttemptStart
from tests.checkpoints import assert_same_bytes
from tests.workspace import Workspace, ends, steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEPS = 130


def submit(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launchers/submit.py", str(config), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.mark.long
def test_a_run_cut_by_sigusr2_at_its_limit_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    training = {"steps": STEPS}
    whole = submit(workspace.config("whole", training=training))
    assert whole.returncode == 0, whole.stderr
    reference = workspace.run("whole")
    assert [end.cause for end in ends(reference)] == ["done"]
    # An attempt makes 40 steps and then few, so that 130 take at least three, however fast the machine is; a minute is
    # enough for some, however slow it is. The deadline inside comes after the signal, so that the signal is what cuts.
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "slow-after=40:3"}}
    pieces = workspace.config(
        "it's in pieces",
        training=training | {"hooks": [slow]},
        job={"time": "00:01:20"},
        chain={"grace_period": 1, "signal_seconds": 20, "max_failed_attempts": 9},
        checkpoint={"interval": 41},
    )
    cut = submit(pieces)
    assert cut.returncode == 0, cut.stderr
    run = workspace.run("it's in pieces")
    records = [end for end in ends(run) if end.progress]
    assert len(records) >= 3, cut.stderr
    assert [record.cause for record in records] == ["saved"] * (len(records) - 1) + ["done"]
    assert all("SIGUSR2" in record.reason for record in records[:-1])
    assert any(record.durable_iteration % 41 for record in records[:-1])
    assert steps(run) == steps(reference)
    assert sorted(steps(run)) == list(range(1, STEPS + 1))
    assert assert_same_bytes(reference.checkpoint(STEPS), run.checkpoint(STEPS)) > 50
    again = submit(pieces)
    assert again.returncode == 1
    assert f"the chain of this run has ended: the last iteration, {STEPS}, is saved" in again.stderr


@pytest.mark.long
def test_a_slow_save_moves_the_deadline_of_its_own_attempt(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "slow-save=20:20"}}
    config = workspace.config(
        "run",
        training={"steps": 30, "hooks": [slow]},
        checkpoint={"interval": 10},
        job={"time": "6"},
        chain={"min_grace_period": 5},
    )
    done = submit(config)
    assert done.returncode == 0, done.stderr
    run = workspace.run("run")
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    assert begin.grace_period == 90  # nothing was measured: a quarter of the limit
    log = Path(begin.log or "").with_suffix(".out").read_text()
    leads = [(int(old), int(new)) for old, new in re.findall(r"grace period (\d+) s -> (\d+) s", log)]
    assert leads[0][0] == 90, log
    assert leads[0][1] < 20, log
    assert any(new - old >= 15 for old, new in leads), log
