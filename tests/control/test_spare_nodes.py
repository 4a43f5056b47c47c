"""Nodes that are lost and spare ones in their place: what the coordinator decides, without processes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from relayrun.control.agent import coordinator as module
from relayrun.control.agent import hang_detection, job_nodes, requests
from relayrun.control.agent.coordinator import Coordinator
from relayrun.control.agent.hang_detection import RankActivity
from relayrun.control.agent.job_nodes import SILENT_BEATS
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.chain.failover import lost_batch_host
from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.slurm import Slurm
from relayrun.control.scheduler.slurm_commands import parse_job
from relayrun.files import append_line
from tests.history import began
from tests.plans import node_checks, plan_with

NAMES = ("n0", "n1", "n2", "n3", "n4")


class Link:
    """What the coordinator has of an agent: keeps what it sends."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, kind: str, **values: Any) -> None:
        self.sent.append({"kind": kind, **values})

    @property
    def last(self) -> dict[str, Any]:
        """The last message but for those that come each second, and questions for the time."""
        return [sent for sent in self.sent if sent["kind"] not in ("requests", "clock")][-1]


class Nodes:
    """A coordinator, and agents that answer as real ones do: two nodes train with two ranks each, others are spare."""

    def __init__(self, folder: Path, *, spare: int, max_failed_restarts: int = 5, health: Plan | None = None) -> None:
        """`health`: a plan with checks of nodes; None: there are none."""
        self.run = Run(folder / "run")
        began(self.run, 1)
        self.attempt = self.run.attempt(1)
        self.attempt.failures.mkdir()
        self.said: list[str] = []
        self.links: dict[int, Link] = {}
        plan = plan_with(
            health or node_checks(mode="off"),
            nodes=2,
            spare_nodes=spare,
            ntasks_per_node=2,
            max_failed_restarts=max_failed_restarts,
        )
        links = cast("dict[int, MessageSocket]", self.links)
        names = NAMES[: 2 + spare]
        self.coordinator = Coordinator(
            self.run, plan, self.attempt, nodes=len(names), names=names, links=links, say=self.said.append
        )
        self.facts: dict[str, Any] = {}
        """What nodes say of themselves at the end of a restart."""
        self.all = {node: Link() for node in range(2 + spare)}

    def hello(self, *nodes: int) -> None:
        for node in nodes:
            assert self.coordinator.expects(node)
            self.links[node] = self.all[node]
            self.coordinator.hear(node, {"kind": "hello", "name": NAMES[node], "port": 1000 + node})

    def lose(self, node: int, why: str = "its agent is gone") -> None:
        self.coordinator.lose(node, why)

    def dead(self, node: int, rank: int, code: int = 1, error: str = "") -> None:
        number = self.all[node].last["restart"]
        message = {"kind": "dead", "restart": number, "rank": rank, "code": code, "error": error, "told": False}
        self.coordinator.hear(node, message)

    def end(self, *nodes: int, memory: list[tuple[int, int, str, bool]] | None = None) -> None:
        """These agents answer the order to end."""
        for node in nodes:
            assert self.all[node].last["kind"] == "end", self.all[node].sent
            number = self.all[node].last["restart"]
            message = {
                "kind": "ended",
                "restart": number,
                "memory": memory or [],
                "port": 2000 + node,
                "facts": self.facts,
            }
            self.coordinator.hear(node, message)

    def places(self) -> list[int | None]:
        """The place of each node, in the newest order to start."""
        assert all(link.last["kind"] == "start" for link in self.links.values()), self.said
        return [self.links[node].last["place"] if node in self.links else None for node in self.all]

    def reached(self, iteration: int) -> None:
        append_line(self.attempt.metrics, {"iteration": iteration})


@pytest.fixture
def one(tmp_path: Path) -> Nodes:
    nodes = Nodes(tmp_path, spare=1)
    nodes.hello(2, 0, 1)
    assert nodes.places() == [0, 1, None]
    assert (nodes.all[1].last["address"], nodes.all[1].last["port"]) == ("n0", 1000)
    nodes.reached(7)
    return nodes


def test_a_hang_is_a_round_that_names_the_late_rank_and_its_node(one: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detection, "STACKS_SECONDS", 0.0)
    monkeypatch.setattr(requests, "LOOK_SECONDS", 0.0)

    def stand(node: int, ranks: Sequence[int], **changes: Any) -> None:
        usual = {"entered": 9, "section": "forward", "iteration": 7, "seconds": 61.0, "limit": 60.0, "state": ""}
        standing = [RankActivity(rank=rank, **(usual | changes)) for rank in ranks]
        one.coordinator.hear(node, json.loads(json.dumps({"kind": "beat", "restart": 1, "standing": standing})))

    stand(0, [0, 1])
    one.coordinator.look()
    assert one.all[0].last["kind"] == "start", "of the other node nothing is known"
    stand(1, [2], seconds=3.0)
    stand(1, [2, 3], seconds=3.0)
    one.coordinator.look()
    assert one.all[0].last["kind"] == "start", "they have come further"
    stand(1, [2, 3], entered=8, section="data")
    one.coordinator.hear(1, {"kind": "beat", "restart": 0, "standing": None})  # of a restart that is over
    one.coordinator.look()
    assert [link.last["kind"] for link in one.links.values()] == ["stacks"] * 3
    time.sleep(0.01)
    stand(1, [2], entered=9)
    standing = [RankActivity(rank, entered, "data", 7, 62.0, 60.0, "") for rank, entered in ((2, 9), (3, 8))]
    one.coordinator.hear(1, {"kind": "beat", "restart": 1, "standing": standing})
    one.coordinator.look()
    one.end(0, 1, 2)
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.rank, failed.node, failed.again) == (3, "n1", True)
    assert failed.words.startswith("hang: no progress for 61 s in data after iteration 7; ")
    assert failed.words.endswith("others wait for rank 3 in data")
    assert one.places() == [0, 1, None]
    assert not one.attempt.hang.exists(), "it is put aside with the restart"


def test_the_ranks_of_a_lost_node_begin_with_the_copies_that_the_next_node_keeps(one: Nodes) -> None:
    one.lose(1, "its agent is gone")
    own = [(rank, 7, f"hash {rank}", False) for rank in (0, 1)]
    one.end(0, memory=[*own, *((rank, 7, f"hash {rank}", True) for rank in (2, 3))])
    one.end(2)
    assert one.places() == [0, None, 1]
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.source, failed.next_iteration, failed.steps_lost) == ("neighbour", 7, 0)
    assert failed.told.endswith("n2 takes the place of n1; again from iteration 7 (memory of a neighbour)")
    assert one.all[2].last["memory"] == 7


def test_a_spare_node_takes_the_place_of_one_that_is_lost(one: Nodes) -> None:
    one.lose(1, "no word from its agent for 20 s")
    one.end(0, memory=[(0, 7, "a", False), (1, 7, "b", False)])  # its own ranks' alone
    assert one.coordinator.code is None
    one.end(2)
    assert one.places() == [0, None, 1]
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.rank, failed.node, failed.lost, failed.again, failed.source) == (
        None,
        "n1",
        {"n1": "n2"},
        True,
        "disk",
    )
    assert failed.told == (
        "restart 1: n1: no word from its agent for 20 s, at iteration 7; n2 takes the place of n1; "
        "again from iteration 0"
    )
    assert one.said[-1] == failed.told


def test_rank_0_moves_with_its_place(one: Nodes) -> None:
    one.lose(0)
    one.end(1, 2)
    assert one.places() == [None, 1, 0]
    assert (one.all[1].last["address"], one.all[1].last["port"]) == ("n2", 2002)


def test_a_lost_node_is_the_cause_of_what_its_neighbours_say(one: Nodes) -> None:
    one.dead(0, 1, error="RuntimeError: connection closed by peer")
    one.end(0, 2)  # node 1 does not answer any more
    assert not restarts.read_failed_restarts(one.attempt)
    one.lose(1)
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.culprit, failed.again) == ("n1: its agent is gone", True)


def test_the_same_words_at_the_same_iteration_do_not_end_the_attempt(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, spare=3)
    nodes.hello(*range(5))
    nodes.lose(1)
    nodes.end(0, 2, 3, 4)
    nodes.lose(2)
    nodes.end(0, 3, 4)
    assert nodes.places() == [0, None, None, 1, None]


def test_two_nodes_are_lost_at_once_and_one_more_in_the_round_between(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, spare=3)
    nodes.hello(*range(5))
    nodes.lose(0)
    nodes.lose(2)  # a spare one
    nodes.end(3, 4)
    nodes.lose(1)  # before it says that its ranks have ended
    assert nodes.places() == [None, None, None, 0, 1]
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert failed.lost == {"n0": "n3", "n1": "n4"}
    assert nodes.said[0] == "the spare node n2 is gone: its agent is gone"


def test_without_a_spare_node_left_the_attempt_ends(one: Nodes) -> None:
    one.lose(2)
    assert one.all[0].last["kind"] == "start"  # nobody is disturbed
    one.lose(1)
    one.end(0)
    assert (one.coordinator.code, one.all[0].last) == (1, {"kind": "leave", "code": 1})
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.again, failed.reason, failed.lost) == (False, "no spare node is left", {"n1": ""})


def test_restarts_without_a_later_state_end_the_attempt_though_spare_nodes_are_left(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, spare=3, max_failed_restarts=2)
    nodes.hello(*range(5))
    nodes.lose(1)
    nodes.end(0, 2, 3, 4)
    nodes.lose(2)
    nodes.end(0, 3, 4)
    assert nodes.coordinator.code == 1
    assert "2 restarts in a row" in restarts.read_failed_restarts(nodes.attempt)[-1].reason


def test_a_later_checkpoint_is_where_the_spare_node_begins(one: Nodes) -> None:
    folder = one.run.checkpoint(5)
    folder.mkdir(parents=True)
    one.attempt.append_commit(
        CheckpointCommit(iteration=5, path=str(folder), consumed_samples=5, time=1.0, seconds=0.0)
    )
    one.lose(1)
    one.end(0, 2)
    start = one.all[2].last
    assert (start["base_iteration"], start["base_path"], start["memory"]) == (5, str(folder), None)
    assert restarts.read_failed_restarts(one.attempt)[0].steps_lost == 2


def test_an_agent_without_a_word_is_given_up_and_not_heard_again(one: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_nodes, "AGENT_BEAT_SECONDS", 0.0)
    for _ in range(SILENT_BEATS):
        one.coordinator.hear(0, {"kind": "beat"})
        one.coordinator.hear(2, {"kind": "beat"})
        assert one.coordinator.silent() == []
    one.coordinator.hear(0, {"kind": "beat"})
    one.coordinator.hear(2, {"kind": "beat"})
    ((node, _),) = one.coordinator.silent()
    assert node == 1
    one.lose(1, "no word from its agent for 20 s")
    assert not one.coordinator.expects(1)
    assert one.said[-1] == "n1 was given up, and is not taken in again: no word from its agent for 20 s"


def test_the_first_round_waits_for_spare_nodes_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, spare=2)
    nodes.hello(3, 1)
    nodes.coordinator.look()
    assert nodes.all[1].sent == []
    monkeypatch.setattr(module, "GATHER_SECONDS", -1.0)
    nodes.coordinator.look()
    assert nodes.places() == [None, 0, None, 1]


def test_nodes_that_are_lost_before_the_first_start(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, spare=1)
    nodes.hello(0, 2)
    nodes.lose(1, "the step of its agent ended with exit code 1")
    assert nodes.places() == [0, None, 1]
    few = Nodes(tmp_path / "few", spare=1)
    few.hello(0)
    few.lose(1)
    few.lose(2)
    assert few.coordinator.code == 1
    assert few.said[-1] == "2 nodes are to train, and 1 are left"


LOST = "JobId=7 JobName=x UserId=a(1) JobState=RUNNING NodeList=n[1-3] BatchHost=n0 NumNodes=3 Network=(null) Command=c"


def test_the_word_of_slurm_on_the_batch_host() -> None:
    job = parse_job(LOST)
    assert (job.batch_host, job.nodes) == ("n0", "n[1-3]")
    assert lost_batch_host(job, ["n1", "n2", "n3"]) == "n0"
    assert not lost_batch_host(job, ["n0", "n1", "n2"])
    assert not lost_batch_host(job, [])
    assert not lost_batch_host(None, ["n1"])
    assert not lost_batch_host(parse_job(LOST.replace("RUNNING", "PENDING")), ["n1"])
    assert not lost_batch_host(Job(id="7", name="x", state="COMPLETING", batch_host="n0"), ["n1"])


@pytest.mark.parametrize(("allowed", "first"), [("1", []), ("0", ["scontrol update JobId=7 Requeue=1"])])
def test_a_job_that_may_come_back_is_not_changed_before(
    monkeypatch: pytest.MonkeyPatch, allowed: str, first: list[str]
) -> None:
    """Slurm without accounting takes no change of a job that has lost a node, and lets one wait for its refusal."""
    said: list[str] = []

    def once(_self: Slurm, command: Sequence[str], lines: Sequence[str] = (), **_: object) -> str:
        said.append(" ".join([*command, *lines]))
        return LOST.replace("NumNodes=3", f"NumNodes=3 Requeue={allowed}")

    monkeypatch.setattr(Slurm, "_once", once)
    Slurm(patience=0).requeue("7")
    assert said == ["scontrol show job --oneliner 7", *first, "scontrol requeue 7"]
