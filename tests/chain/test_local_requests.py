"""What people ask of ranks beside agents, with the real training program: answered once, whatever restart there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir import restarts, triggers
from relayrun.control.rundir.records import AttemptOutcome
from relayrun.control.rundir.run import Run
from tests import random_kills
from tests.waiting import wait_for
from tests.workspace import Workspace, ends

from .test_local_recovery import with_kills
from .test_local_training import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATIENCE = 300.0


class Chain:
    """A run on two nodes with a rank each, both of them this machine, with steps of a tenth of a second."""

    def __init__(self, folder: Path) -> None:
        workspace = Workspace.make(folder)
        slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "step-delay=0.1"}}
        values = with_kills() | {
            "training": {"steps": 100_000, "hooks": [slow]},
            "data": {"max_epochs": 3000},
            "job": {"nodes": 2, "ntasks_per_node": 1, "time": "30"},
            "checkpoint": {"interval": 100_000, "memory_interval": 1},
            "chain": {"recovery": "node", "auto_requeue": False},
        }
        self.run = workspace.run("run")
        self._log = folder / "log"
        command = [sys.executable, "launchers/submit.py", str(workspace.config("run", **values))]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def wait_for(self, what: Any) -> Any:
        """Until this is true, and return it."""

        def found() -> Any:
            there = what()
            assert there or self.process.poll() is None, self._log.read_text()
            return there

        return wait_for(found, PATIENCE, words=self._log.read_text)

    def answer(self, name: str, *, touched: float) -> dict[str, Any]:
        """The answer to a trigger that was touched then."""

        def read() -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = json.loads((self.run.triggers / f"{name}.done").read_text())
            except FileNotFoundError:
                return None
            return found if found["touched"] == touched else None

        found: dict[str, Any] = self.wait_for(read)
        self.wait_for(lambda: not (self.run.triggers / name).exists())
        return found

    def kill(self, rank: int) -> None:
        (pid,) = [one.pid for one in random_kills.living_ranks(self.run) if one.rank == rank]
        os.kill(pid, signal.SIGKILL)

    def newest(self) -> int:
        """The newest iteration on record since the newest restart began."""
        return restarts.newest_recorded_iteration(self.run.attempt(1))


def touch(run: Run, name: triggers.TriggerName) -> float:
    triggers.touch_trigger(run, name)
    found = triggers.read_trigger(run, name)
    assert found is not None
    return found.time


def test_triggers_are_answered_once_in_whichever_round_they_are_touched(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    run = chain.run
    chain.wait_for(run.triggers.exists)
    first = chain.answer("save", touched=touch(run, "save"))  # before there are ranks
    assert (first["iteration"], first["result"]) == (1, "saved")
    at = chain.newest()
    chain.wait_for(lambda: chain.newest() > at + 20)  # the agent has long said that nothing is asked
    asked = time.time()
    second = chain.answer("save", touched=touch(run, "save"))
    assert (second["result"], second["iteration"] > at) == ("saved", True)
    print(f"answered {second['time'] - asked:.2f} s after it was touched")
    assert second["time"] - asked < 120
    for rank in (0, 1):  # while nobody lives who could look
        at = chain.newest()
        chain.wait_for(lambda at=at: chain.newest() > at + 5)
        chain.kill(rank)
        answer = chain.answer("save", touched=touch(run, "save"))
        assert answer["result"] == "saved"
    saved = [commit.iteration for commit in run.attempt(1).read_commits()]
    assert len(saved) == len(set(saved)) == 4
    assert saved[:2] == [first["iteration"], second["iteration"]]
    chain.kill(1)
    touched = touch(run, "exit")
    answer = chain.answer("exit", touched=touched)
    assert chain.process.wait(PATIENCE) == 0
    assert [(end.cause, end.durable_iteration) for end in ends(run)] == [("exit", answer["iteration"])]
    assert [(failed.rank, failed.again) for failed in restarts.read_failed_restarts(run.attempt(1))] == [
        (0, True),
        (1, True),
        (1, True),
    ]


def test_a_stop_file_is_heard_of_while_no_trigger_is_touched(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.wait_for(lambda: chain.newest() > 20)
    asked = time.time()
    chain.run.attempt(1).stop.write_text("time for something else\n")
    outcome = chain.wait_for(lambda: AttemptOutcome.read(chain.run.attempt(1).outcome))
    print(f"left {outcome.time - asked:.2f} s after it was asked")
    assert (outcome.outcome, outcome.reason) == ("saved", "stop file: time for something else")
    assert outcome.time - asked < 120
    assert chain.process.wait(PATIENCE) == 0
    assert [end.cause for end in ends(chain.run)] == ["saved"]
