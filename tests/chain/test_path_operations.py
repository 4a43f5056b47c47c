"""How often the processes of each node ask the file system for something in the run directory, counted by strace."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from relayrun.control.rundir import restarts, triggers
from relayrun.control.rundir.run import Run
from tests import random_kills
from tests.waiting import wait_for
from tests.workspace import Workspace, ends

from .test_local_restarts import parent
from .test_local_training import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

SECONDS = 30.0
NODES = 2
STEPS_BEFORE = 30
"""Steps after which a run is steady: limits of sections have been measured."""
CALL = re.compile(r'^\d+ +(\w+)\((?:[\w-]+, )?"([^"]+)"')


class Counted(NamedTuple):
    """What a process did in the run directory."""

    seconds: float
    operations: Counter[str]
    """How often each call was made with each path, as `call path`, relative to the run directory."""

    def __str__(self) -> str:
        total = self.operations.total()
        lines = [f"{total / self.seconds:.3f} a second, {total} in {self.seconds:.1f} s"]
        return "\n".join(lines + [f"    {times:5} {what}" for what, times in self.operations.most_common()])


def watch_of(run: Run) -> int:
    """The process of the supervisor that is there while ranks run."""
    (pid,) = [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if {b"relayrun.control.chain", b"watch", str(run.path).encode()} <= set(words_of(entry))
    ]
    return pid


def words_of(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has gone
        return []


def counted(run: Run) -> dict[str, Counted]:
    """Watch the processes of each node, by place, for SECONDS: `watch`, `agent 0`, `server 0`, `rank 0`, ..."""
    processes = {"watch": watch_of(run)}
    for rank in random_kills.living_ranks(run):
        server = parent(rank.pid)
        of_node = {"agent": parent(server), "server": server, "rank": rank.pid}
        processes |= {f"{what} {rank.rank}": pid for what, pid in of_node.items()}
    tracers = []
    for name, pid in processes.items():
        output = run.path.parent / f"calls of {name}"
        command = ["strace", "--follow-forks", "--quiet=all", "--trace=%file", "--string-limit=4096"]
        tracers.append((name, output, subprocess.Popen([*command, f"--output={output}", f"--attach={pid}"])))
    traced = [Path(f"/proc/{pid}/status") for pid in processes.values()]
    wait_for(lambda: not any("TracerPid:\t0\n" in path.read_text() for path in traced))
    began = {output: (time.monotonic(), output.stat().st_size) for _, output, _ in tracers}
    time.sleep(SECONDS)
    found = {}
    for name, output, tracer in tracers:
        assert tracer.poll() is None, name
        moment, size = began[output]
        seconds, lines = time.monotonic() - moment, output.read_bytes()[size:].decode().splitlines()
        tracer.terminate()
        tracer.wait(300)
        calls = [match for line in lines if (match := CALL.match(line)) is not None]
        inside = [(call[1], call[2].removeprefix(str(run.path))) for call in calls if call[2].startswith(str(run.path))]
        found[name] = Counted(seconds, Counter(f"{call} {re.sub('[.]tmp-.*', '.tmp', path)}" for call, path in inside))
    return found


@pytest.mark.skipif(shutil.which("strace") is None, reason="this machine has no strace")
def test_nodes_leave_the_run_directory_alone_while_they_train(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "step-delay=0.1"}}
    values = {
        "training": {"steps": 100_000, "hooks": [slow]},
        "data": {"max_epochs": 3000},
        "job": {"nodes": NODES, "ntasks_per_node": 1, "time": "30"},
        "checkpoint": {"interval": 100_000, "memory_interval": 1},
        "chain": {"recovery": "node"},
        "cluster": {"python": None},
    }
    run = workspace.run("run")
    command = [sys.executable, "launchers/submit.py", str(workspace.config("run", **values))]
    with open(tmp_path / "log", "wb") as log:
        chain = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def steady() -> bool:
        assert chain.poll() is None, (tmp_path / "log").read_text()
        return restarts.newest_recorded_iteration(run.attempt(1)) >= STEPS_BEFORE

    wait_for(steady, 600, step=0.5)
    before = restarts.newest_recorded_iteration(run.attempt(1))
    found = counted(run)
    steps = restarts.newest_recorded_iteration(run.attempt(1)) - before
    triggers.touch_trigger(run, "exit")
    assert chain.wait(300) == 0, (tmp_path / "log").read_text()
    assert [end.cause for end in ends(run)] == ["exit"]
    told = "\n".join([f"{steps} steps", *(f"{name}: {counts}" for name, counts in found.items())])
    print(told)
    of_nodes = {f"{what} {place}" for what in ("agent", "server", "rank") for place in range(NODES)}
    assert found.keys() == {"watch", *of_nodes}
    assert found["agent 0"].operations["openat /attempts/0001/hang.json"] > SECONDS / 6, told  # it is counted at all
    for what in found["agent 0"].operations:  # the coordinator looks once a second, however many agents talk to it
        assert found["agent 0"].operations[what] <= 1.1 * SECONDS, told
    of_rank_0 = found["rank 0"].operations
    # a line for each step; and it is on disk before the step's copy counts on the other node
    assert of_rank_0.pop("openat /attempts/0001/metrics.jsonl", 0) <= 2 * (steps + 2), told
    assert of_rank_0.total() <= 10, told  # a heartbeat is five operations, and comes once a minute
    other = [counts.operations.total() for name, counts in found.items() if name.endswith("1")]
    assert sum(other) <= 10, told
