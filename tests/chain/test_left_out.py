"""Nodes that failed are left out by the next jobs as far as others can take their place, and no further."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from relayrun.chain import nodes, supervisor
from relayrun.rundir.plan import Plan

from .exhaustion import run_child
from .fake_slurm import NODES
from .test_exhaustion import Stage, failed, fresh_begin, no_successor, stage  # noqa: F401 - a fixture
from .test_fallback_job import run_fallback_job


def struck(stage: Stage, *names: str) -> None:  # noqa: F811
    for attempt in (1, 2):
        nodes.strike(stage.run, attempt, dict.fromkeys(names, "node failure"), now=time.time())


def next_job(stage: Stage, *, waits: bool) -> tuple[str, str]:  # noqa: F811
    """What the next job leaves out, and what is said; `waits`: it waited already when the attempt ended."""
    assert fresh_begin(stage).code == 0
    exit_code = failed(stage) if waits else no_successor(stage)
    reached = run_child(lambda: supervisor.end(stage.run, 4, exit_code), stage.run_path, stage.slurm)
    (job_id,) = stage.slurm.pending()
    return str(stage.slurm.jobs()[job_id]["exclude"]), reached.output


@pytest.mark.parametrize("waits", [False, True])
def test_a_node_that_nobody_can_replace_is_not_left_out(stage: Stage, waits: bool) -> None:  # noqa: F811
    struck(stage, "n1")
    stage.slurm.down = NODES - {"n1"}  # they may come back, or not: a job without n1 would wait
    excluded, said = next_job(stage, waits=waits)
    assert excluded == ""
    assert "without n1 this job has too few nodes that are up" in said


@pytest.mark.parametrize("waits", [False, True])
def test_one_that_can_be_replaced_is(stage: Stage, waits: bool) -> None:  # noqa: F811
    struck(stage, "n1")
    stage.slurm.down = {"n0", "n2"}
    excluded, said = next_job(stage, waits=waits)
    assert excluded == "n1"
    assert "too few nodes" not in said


@pytest.mark.parametrize("waits", [False, True])
def test_of_several_the_worst_are_left_out(stage: Stage, waits: bool) -> None:  # noqa: F811
    replace(Plan.load(stage.run), nodes=40).write(stage.run.plan)  # a twentieth of which are two
    struck(stage, "n1", "n2")
    nodes.strike(stage.run, 3, {"n2": "node failure"}, now=time.time())
    stage.slurm.down = {"n0", "n3"}
    excluded, said = next_job(stage, waits=waits)
    assert excluded == "n2"
    assert "without n1 this job" in said


def test_a_node_where_begin_failed_is_tried_again_where_no_other_one_is_up(stage: Stage) -> None:  # noqa: F811
    stage.slurm.down = NODES - {"n0"}
    stage.slurm.set("1", state="FAILED")
    reached = run_fallback_job(stage)
    assert reached is not None
    assert reached.code == 0, reached.output
    (job_id,) = stage.slurm.pending()
    job = stage.slurm.jobs()[job_id]
    assert (job["exclude"], job["comment"]) == ("", "relayrun:begin-failed=1@"), json.dumps(job)
