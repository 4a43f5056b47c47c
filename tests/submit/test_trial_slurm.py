"""`relayrun trial` under Slurm: the program runs in the trial's job alone, never where the command is given."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from relayrun import places
from relayrun.config.compose.yaml_file import dump_yaml
from relayrun.lab import trial

SLURM = """#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
case "${0##*/} $*" in
*--test-only*) exit 0 ;;
sbatch*) cat >>"$CALLS"; echo 7 ;;
"scontrol --version") echo slurm 24.05.4 ;;
"scontrol show job "*) echo "JobId=7 JobName=tried UserId=a(1) JobState=PENDING NumNodes=1 TimeLimit=1:00" ;;
esac
"""


def test_a_trial_starts_no_program_on_the_login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, ran, calls = tmp_path / "bin", tmp_path / "ran", tmp_path / "calls"
    tools.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "sinfo", "sacct", "scancel", "srun", "sacctmgr"):
        (tools / name).write_text(SLURM)
        (tools / name).chmod(0o755)
    values = {
        "project": "tests",
        "name": "tried",
        "trainer": "command",
        "command": {
            "run": ["/usr/bin/touch", str(ran)],
            "resume": ["{checkpoint}"],
            "checkpoint": {"pattern": "step-{iteration}"},
            "progress": r"step (?P<iteration>\d+)",
        },
        "job": {"time": "30", "ntasks_per_node": 1},
        "cluster": {"name": "stubs", "scheduler": "slurm", "python": sys.executable},
    }
    config = tmp_path / "run.yaml"
    config.write_text(dump_yaml(values), encoding="utf-8")
    (tmp_path / places.PROJECT_MARKER).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    clock = SimpleNamespace(monotonic=lambda: 30 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(trial, "time", clock)  # nothing begins: the waits end in seconds
    found = trial.run_trial(config, [], minutes=1)
    assert [each.good for each in found] == [False] * 4
    said = calls.read_text()
    submitted = [line for line in said.splitlines() if line.startswith("sbatch ") and "--test-only" not in line]
    assert submitted
    assert not any(line.startswith("srun ") for line in said.splitlines())
    assert not ran.exists()
