"""The coordinator with hundreds of nodes: no step of a start or of a restart compares all nodes with all."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any, cast

import pytest

from relayrun.control.agent import coordinator as module
from relayrun.control.agent import hang_detection
from relayrun.control.agent.coordinator import Coordinator
from relayrun.control.agent.health import JobHealth
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, raise_open_file_limit
from tests.history import began, history_plan
from tests.plans import plan_with

from .test_spare_nodes import Link

NODES, SPARES = 600, 4
FACTS: dict[str, Any] = {"shm": 1 << 38, "unwritable": {}}


class Counted(Coordinator):
    """A coordinator that counts its looks at all nodes."""

    looks = 0

    def _there(self) -> list[int]:
        self.looks += 1
        return super()._there()


def test_a_start_and_a_restart_look_at_all_nodes_a_few_times(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    began(run, 1)
    run.attempt(1).failures.mkdir()
    plan = plan_with(
        history_plan(run, total_steps=100), nodes=NODES, spare_nodes=SPARES, recovery="node", node_health="warn"
    )
    links: dict[int, Link] = {}
    coordinator = Counted(
        run,
        plan,
        run.attempt(1),
        nodes=NODES + SPARES,
        names=[f"n{node}" for node in range(NODES + SPARES)],
        links=cast("dict[int, MessageSocket]", links),
        say=lambda _: None,
    )
    for node in range(NODES + SPARES):
        assert coordinator.expects(node)
        links[node] = Link()
        assert not coordinator.expects(node)
        coordinator.hear(node, {"kind": "hello", "name": f"n{node}", "port": 1})
    for node in links:
        coordinator.hear(node, {"kind": "health", "facts": FACTS})
    assert not coordinator.expects(NODES + SPARES)
    assert [link.last["place"] for link in links.values()] == [*range(NODES), *[None] * SPARES]
    assert coordinator.looks < 10
    append_line(run.attempt(1).metrics, {"iteration": 7})
    coordinator.hear(5, {"kind": "dead", "restart": 1, "rank": 5, "code": -9, "error": "", "told": False})
    for link in links.values():
        kinds = [sent["kind"] for sent in link.sent]
        assert kinds[kinds.index("end") :] == ["end", *["clock"] * 5], "nobody waits for questions to the others"
    for node in links:
        copies = [(node, 7, "h", False)] if node < NODES else []
        coordinator.hear(node, {"kind": "ended", "restart": 1, "port": 1, "memory": copies, "facts": FACTS})
    assert {link.last["restart"] for link in links.values()} == {2}
    assert coordinator.looks < 15


def test_heartbeats_between_two_seconds_judge_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = 0

    def judge(*_: object, **__: object) -> None:
        nonlocal judged
        judged += 1

    monkeypatch.setattr(hang_detection.HangDetector, "judge", judge)
    run = Run(tmp_path / "run")
    began(run, 1)
    link = Link()
    links = cast("dict[int, MessageSocket]", {0: link})
    plan = plan_with(history_plan(run, total_steps=100), recovery="node")
    coordinator = module.Coordinator(run, plan, run.attempt(1), nodes=1, links=links, say=lambda _: None)
    coordinator.hear(0, {"kind": "hello", "name": "n0", "port": 1})
    assert link.last["kind"] == "start"
    began_at = time.monotonic()
    for _ in range(500):
        coordinator.look()
    assert judged <= 2 + time.monotonic() - began_at


def test_health_names_the_nodes_that_reported(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    began(run, 1)
    health = JobHealth(run.attempt(1), history_plan(run, total_steps=1), say=lambda _: None)
    for node in (3, 3, 5):
        health.hear(node, {"kind": "health", "facts": FACTS})
    assert sorted(health.reported) == [3, 5]


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
        assert raise_open_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
