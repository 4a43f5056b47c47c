"""Campaigns of a small program of a user's own, which imports nothing but a copy of relayrun's client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from relayrun import client
from relayrun.config.compose import yaml_file
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import json, os, sys, time
from client import checkpoint, checkpoint_done, should_leave, should_save, step_done
folder, last, seconds, every = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
start = json.load(open(os.path.join(checkpoint(), "state")))["iteration"] if checkpoint() else 0
for iteration in range(start + 1, last + 1):
    time.sleep(seconds)
    step_done(iteration, loss=1 / iteration, step_seconds=seconds)
    leave = should_leave()
    if iteration == last or iteration % every == 0 or should_save() or leave:
        path = os.path.join(folder, f"step-{iteration}")
        os.makedirs(path + ".new")
        json.dump({"iteration": iteration, "from": checkpoint()}, open(os.path.join(path + ".new", "state"), "w"))
        os.rename(path + ".new", path)
        checkpoint_done(iteration, path)
    if leave:
        break
"""
LOOK = """
import json, os, sys
state = json.load(open(os.path.join(sys.argv[2], "state")))
open(os.path.join(sys.argv[1], "found.json"), "w").write(json.dumps(state))
"""
"""What a stage executes that evaluates: {run_dir} and {checkpoint}."""


def words(folder: Path, last: int, *, seconds: float = 0.05, every: int = 2) -> list[str]:
    """The command of a run of so many iterations."""
    return [sys.executable, str(folder / "train.py"), "{checkpoints}", str(last), str(seconds), str(every)]


def write_stages(folder: Path, *, seconds: float = 0.05, **sections: Any) -> Path:
    """A config of four stages; the last one's program says which checkpoint it was given."""
    look = {"run": [sys.executable, str(folder / "look.py"), "{run_dir}"], "resume": ["{checkpoint}"], "steps": None}
    write_config(folder, "look", command=look | {"leave_signal": "SIGTERM"}, **sections)
    stages = {
        "stable": None,
        "branch": {"from": "stable:2", "command.steps": 3, "command.run": words(folder, 3, seconds=seconds)},
        "long": {"from": "stable", "command.steps": 6, "command.run": words(folder, 6, seconds=seconds)},
        "evaluate": {"from": "long", "config": "look.yaml"},
    }
    return write_config(folder, "plan", stages=stages, seconds=seconds, **sections)


def write_config(folder: Path, name: str = "tiny", *, seconds: float = 0.05, **sections: Any) -> Path:
    """A config whose runs take 4 steps and save every 2; sections are put over it."""
    shutil.copy(client.__file__, folder / "client.py")
    (folder / "train.py").write_text(PROGRAM)
    (folder / "look.py").write_text(LOOK)
    values: dict[str, Any] = {
        "project": "tests",
        "name": name,
        "run_dir": str(folder / name),
        "trainer": "command",
        "command": {"run": words(folder, 4, seconds=seconds), "steps": 4, "leave_signal": None},
        "chain": {"auto_requeue": True},
        "job": {"time": "5", "cpus_per_task": 1},
        "cluster": {"name": "local", "scheduler": "local"},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes if isinstance(changes, dict) else changes
    path = folder / f"{name}.yaml"
    path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    return path


def relayrun(*arguments: str | Path, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    """Call the command."""
    command = [sys.executable, "-m", "relayrun.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)


def attempts(run: Run) -> list[AttemptStart]:
    """The attempts of a run that have begun."""
    found = [run.attempt(number).read_begin() for number in run.attempt_numbers()]
    return [begin for begin in found if begin is not None]


def iterations(run: Run) -> list[int]:
    """The iterations of the merged view, in its order."""
    return [line["iteration"] for line in read_json_lines(run.metrics_view)]


def state_of(run: Run, iteration: int) -> dict[str, Any]:
    """What the program has saved at an iteration."""
    return json.loads((run.checkpoints / f"step-{iteration}/state").read_text())  # type: ignore[no-any-return]
