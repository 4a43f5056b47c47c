"""Nodes that are sick before or between rounds: real agents, with the real fork server and a stand-in for the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.files import read_lines
from relayrun.rundir import node_health, rounds
from relayrun.rundir.records import Outcome

from .conftest import MakeRun
from .test_agents import Steps

pytestmark = pytest.mark.slow  # they wait for processes

HERE = {"MASTER_ADDR": "127.0.0.1"}
SICK_NODE = """
import os, pathlib, sys
sick = pathlib.Path(sys.argv[1]).read_text().split()
print("disk /scratch has gone")
sys.exit(3 if os.environ["SLURMD_NODENAME"] in sick else 0)
"""


def looked_for(tmp_path: Path, *sick: str, **changes: object) -> dict[str, object]:
    """Settings of a plan by which these nodes are sick, as a site's own check says."""
    (tmp_path / "sick").write_text(" ".join(sick))
    command = [sys.executable, "-c", SICK_NODE, str(tmp_path / "sick")]
    return {"environment": HERE, "node_health": {"mode": "warn", "command": command, "slower": 1000.0} | changes}


def test_a_sick_node_is_left_out_and_the_spare_one_takes_its_place(make_run: MakeRun, tmp_path: Path) -> None:
    steps = Steps(make_run, "1:1:7:SIGKILL", **looked_for(tmp_path, "n0"))
    assert steps.starter.wait(300) == 0, steps.log()
    outcome = Outcome.read(steps.attempt.outcome)
    assert outcome is not None
    assert (outcome.outcome, outcome.iteration) == ("done", 20)
    assert steps.started(0) == steps.started(1) == [(1, 0), (2, 5)]
    (found,) = node_health.read(steps.attempt)
    assert (found.node, found.check, found.value, found.limit, found.hard) == ("n0", "command", 3, 0, True)
    assert found.told.endswith("disk /scratch has gone (exit status 3); left out")
    assert found.told in steps.log()
    assert [failed.culprit for failed in rounds.read(steps.attempt)] == ["rank 1 on n2: killed by SIGKILL"]
    measured = [line["node"] for line in read_lines(steps.run.node_health) if "matmul" in line]
    assert sorted(measured) == ["n1", "n2"]
