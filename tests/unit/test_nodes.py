from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.chain.nodes import Strike, blamed, excluded, read_strikes, strike
from relayrun.rundir.records import Failure
from relayrun.rundir.run import Run


def failure(rank: int, node: str, error: str = "CUDA error", time: float = 1.0) -> Failure:
    return Failure(rank=rank, node=node, error=error, time=time)


def test_the_node_of_a_rank_that_srun_names_first_is_blamed() -> None:
    log = "srun: error: n1: task 3: Killed\nsrun: Terminating StepId=5.0\nsrun: error: n0: tasks 0-2: Terminated\n"
    assert blamed(log, [], ntasks=4) == {"n1": "Killed"}


def test_a_node_failure_counts_whatever_else_was_said() -> None:
    log = "srun: error: Node failure on n1\nsrun: error: n0: task 0: Killed\n"
    assert blamed(log, [], ntasks=2) == {"n1": "node failure"}


def test_the_same_error_on_all_ranks_blames_nobody() -> None:
    log = "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Exited with exit code 1\n"
    assert blamed(log, [failure(0, "n0"), failure(1, "n1")], ntasks=2) == {}


def test_of_several_that_failed_the_one_whose_words_came_first_is_blamed() -> None:
    log = "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Exited with exit code 1\n"
    found = blamed(log, [failure(1, "n1", "ECC", 1.0), failure(0, "n0", "connection closed", 2.0)], ntasks=2)
    assert found == {"n1": "ECC"}


def test_without_evidence_nobody_is_blamed() -> None:
    assert blamed("", [], ntasks=2) == {}
    assert blamed("Traceback ...", [failure(0, "n0"), failure(3, "n1", "other")], ntasks=4) == {}


def test_two_strikes_within_a_day_exclude_and_strikes_expire(tmp_path: Path) -> None:
    run = Run(tmp_path)
    strike(run, 1, {"n1": "Killed", "n2": "Killed"}, now=1000.0)
    assert excluded(read_strikes(run), nodes=2, now=1001.0) == []
    strike(run, 2, {"n1": "Killed"}, now=2000.0)
    assert excluded(read_strikes(run), nodes=2, now=2001.0) == ["n1"]
    assert excluded(read_strikes(run), nodes=2, now=1000.0 + 24 * 3600) == []


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (16, 1), (40, 2), (1000, 50)])
def test_at_most_a_twentieth_of_the_nodes_or_one_is_excluded(nodes: int, most: int) -> None:
    strikes = [Strike(node=f"n{n}", attempt=a, reason="", time=float(a)) for n in range(100) for a in (1, 2)]
    assert len(excluded(strikes, nodes=nodes, now=3.0)) == most
