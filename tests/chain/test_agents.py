"""Agents of two nodes agree on restarts, with the real fork server and a stand-in for the ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.chain import job_script
from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptOutcome
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests.history import began
from tests.waiting import wait_for

from .conftest import ROOT, MakeRun
from .test_local_restarts import lives, make

pytestmark = pytest.mark.slow  # they wait for processes


class Nodes:
    """Agents of an attempt, as srun starts them."""

    def __init__(self, make_run: MakeRun, *faults: str, nodes: int = 2) -> None:
        self.run, _ = make(make_run, *faults, nodes=nodes, ntasks_per_node=1)
        began(self.run, 1)
        self.attempt = self.run.attempt(1)
        for path in (self.attempt.heartbeats, self.attempt.failures, self.run.stacks(1)):
            path.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.agents = [self._start(node, nodes) for node in range(nodes)]

    def _start(self, node: int, nodes: int) -> subprocess.Popen[bytes]:
        variables = {"RANK": str(node), "WORLD_SIZE": str(nodes), "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": str(self.port), "SLURMD_NODENAME": f"n{node}", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "relayrun.control.agent", f"--run-dir={self.run.path}", "--attempt=1"]
        with open(self.run.path / f"log{node}", "wb") as log:
            return subprocess.Popen(command, env=os.environ | variables, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> list[int]:
        return [agent.wait(300) for agent in self.agents]

    def log(self, node: int = 0) -> str:
        return (self.run.path / f"log{node}").read_text()


def test_two_nodes_start_all_ranks_again_when_one_of_them_dies(make_run: MakeRun) -> None:
    nodes = Nodes(make_run, "1:1:7:SIGKILL", "2:0:12:OSError: away")
    assert nodes.wait() == [0, 0], nodes.log()
    outcome = AttemptOutcome.read(nodes.attempt.outcome)
    assert outcome is not None
    assert (outcome.outcome, outcome.iteration) == ("done", 20)
    for rank in (0, 1):
        lines = list(read_json_lines(nodes.attempt.path / f"starts-{rank}.jsonl"))
        assert [(line["restart"], line["base"]) for line in lines] == [(1, 0), (2, 5), (3, 10)]
        assert len({line["pid"] for line in lines}) == 3
    found = restarts.read_failed_restarts(nodes.attempt)
    assert [(failed.culprit, failed.steps_lost) for failed in found] == [
        ("rank 1 on n1: killed by SIGKILL", 2),
        ("rank 0 on n0: OSError: away", 2),
    ]
    assert "restart 1: rank 1 on n1: killed by SIGKILL, at iteration 7; again from iteration 5" in nodes.log()


@pytest.mark.long
def test_a_node_that_is_lost_ends_the_attempt_on_all_nodes(make_run: MakeRun) -> None:
    nodes = Nodes(make_run, "0:0:7:told")

    def stands() -> bool:
        assert nodes.agents[0].poll() is None, nodes.log()
        return len(list(nodes.attempt.path.glob("at-1-7-*"))) == 2

    wait_for(stands, words=nodes.log)
    nodes.agents[1].kill()
    assert nodes.wait() == [1, -signal.SIGKILL]
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert (failed.again, failed.reason, failed.rank) == (False, "the agent of n1 is gone", None)
    pids = [next(read_json_lines(nodes.attempt.path / f"starts-{rank}.jsonl"))["pid"] for rank in (0, 1)]
    wait_for(lambda: not any(lives(pid) for pid in pids), words="one dies with the other")


class Steps:
    """The starter of agents and, by a stand-in for srun, an agent on each of three pretended nodes; one is spare."""

    def __init__(self, make_run: MakeRun, *faults: str, nodes: int = 2, spare: int = 1, **plan_values: object) -> None:
        values = {"nodes": nodes, "spare_nodes": spare, "ntasks_per_node": 1} | plan_values
        self._start(*make(make_run, *faults, **values))

    @classmethod
    def of(cls, run: Run, plan: Plan) -> Steps:
        """The same, of a run that has been prepared."""
        steps = cls.__new__(cls)
        steps._start(run, plan)
        return steps

    def _start(self, run: Run, plan: Plan) -> None:
        self.run = run
        began(self.run, 1)
        self.attempt = self.run.attempt(1)
        for path in (self.attempt.heartbeats, self.attempt.failures, self.run.stacks(1)):
            path.mkdir(parents=True)
        self.orphans = self.run.path / "orphans"
        self.orphans.mkdir()
        program = [
            *job_script.rank_program(
                plan, [*plan.program, "--attempt=1"], where=[f"--run-dir={self.run.path}", "--attempt=1"]
            )
        ]
        orphaned = [
            sys.executable,
            "-c",
            ORPHANED,
            str(self.orphans),
        ]  # in the place of `relayrun.control.chain orphaned`
        program[program.index("--") + 1 :] = orphaned
        names = [f"n{node}" for node in range(plan.nodes_of_job)]
        setup = self.attempt.setup
        whole = job_script.task_command(plan, [str(SRUN)], program, setup=setup, nodes=names)
        rank = whole.index("bash")
        command = [*whole[:rank], *whole[rank + 2 :]]  # without rank.sh, which wants Slurm's own numbers
        variables = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | plan.environment
        with open(self.run.path / "log", "wb") as log:
            self.starter = subprocess.Popen(
                command, env=os.environ | variables, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def log(self) -> str:
        return (self.run.path / "log").read_text()

    def wait_for(self, number: int, iteration: int, *, ranks: int = 2) -> None:
        """Until all ranks of this restart stand at this iteration."""

        def stand() -> bool:
            assert self.starter.poll() is None, self.log()
            return len(list(self.attempt.path.glob(f"at-{number}-{iteration}-*"))) >= ranks

        wait_for(stand, words=self.log)

    def agent(self, node: int) -> int:
        """The process of a node's agent."""
        for entry in Path("/proc").iterdir():
            ours = entry.name.isdecimal() and str(self.starter.pid) == _parent(entry)
            if ours and f"RELAYRUN_NODE={node}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        raise AssertionError(self.log())

    def started(self, rank: int) -> list[tuple[int, int]]:
        lines = read_json_lines(self.attempt.path / f"starts-{rank}.jsonl")
        return [(line["restart"], line["base"]) for line in lines]


SRUN = Path(__file__).with_name("stand_in_srun.sh")
ORPHANED = "import sys, pathlib; pathlib.Path(sys.argv[1], ' '.join(sys.argv[2:])).touch()"


def _parent(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def test_a_spare_node_goes_on_where_another_one_was_lost(make_run: MakeRun) -> None:
    steps = Steps(make_run, "1:0:7:told", "2:1:12:SIGKILL")
    steps.wait_for(1, 7)
    os.kill(steps.agent(0), signal.SIGKILL)  # rank 0's
    assert steps.starter.wait(300) == 0, steps.log()
    outcome = AttemptOutcome.read(steps.attempt.outcome)
    assert outcome is not None
    assert (outcome.outcome, outcome.iteration) == ("done", 20)
    assert steps.started(0) == steps.started(1) == [(1, 0), (2, 5), (3, 10)]
    first, second = restarts.read_failed_restarts(steps.attempt)
    assert (first.node, first.lost, first.rank) == ("n0", {"n0": "n2"}, None)
    assert (second.culprit, second.lost) == ("rank 1 on n1: killed by SIGKILL", {})
    assert "n2 takes the place of n0" in steps.log()
    assert sorted(path.name for path in steps.attempt.agents.iterdir()) == ["n0.log", "n1.log", "n2.log"]
    assert not list(steps.orphans.iterdir())


@pytest.mark.long
def test_agents_whose_coordinator_is_gone_end_their_ranks_and_look_after_the_job(make_run: MakeRun) -> None:
    steps = Steps(make_run, "0:0:7:told")
    steps.wait_for(1, 7)
    pids = [next(read_json_lines(steps.attempt.path / f"starts-{rank}.jsonl"))["pid"] for rank in (0, 1)]
    steps.starter.kill()
    steps.starter.wait(300)
    wanted = [f"--node={node} --restart=1" for node in range(3)]
    wait_for(lambda: sorted(path.name for path in steps.orphans.iterdir()) == wanted, words=steps.log)
    assert not any(lives(pid) for pid in pids)
    assert "the coordinator is gone" in (steps.attempt.agents / "n1.log").read_text()
