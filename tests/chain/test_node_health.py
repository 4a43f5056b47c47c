"""Nodes that are sick before or between restarts: real agents and fork servers, and a stand-in for the ranks.

`test_losses_are_those_of_an_undisturbed_run` has the real ones.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.control.chain import excluded_nodes
from relayrun.control.rundir import merged_metrics, node_health, restarts
from relayrun.control.rundir.records import AttemptOutcome
from relayrun.files import read_json_lines
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.submission import prepared_run
from relayrun.watch.status import queue, run_status
from tests.checkpoints import assert_same_bytes
from tests.plans import plan_with
from tests.workspace import Workspace, steps

from .conftest import MakeRun
from .test_agents import Steps
from .test_local_chain import ends, logs, run_chain
from .test_local_recovery import SETTINGS, STEPS
from .test_local_restarts import make, starts
from .test_local_training import ROOT, submit

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
    (tmp_path / "sick-nodes").write_text(" ".join(sick))
    (check := tmp_path / "check_node.py").write_text(SICK_NODE)
    command = [sys.executable, str(check), str(tmp_path / "sick-nodes")]
    own = {"node_health": "warn", "node_health_command": command}
    return {"environment": HERE} | own | changes


def test_a_sick_node_is_left_out_and_the_spare_one_takes_its_place(make_run: MakeRun, tmp_path: Path) -> None:
    steps = Steps(make_run, "1:1:7:SIGKILL", **looked_for(tmp_path, "n0"))
    assert steps.starter.wait(300) == 0, steps.log()
    outcome = AttemptOutcome.read(steps.attempt.outcome)
    assert outcome is not None
    assert (outcome.outcome, outcome.iteration) == ("done", 20)
    assert steps.started(0) == steps.started(1) == [(1, 0), (2, 5)]
    (found,) = node_health.read_findings(steps.attempt)
    assert (found.node, found.check, found.value, found.limit, found.hard) == ("n0", "command", 3, 0, True)
    assert found.told.endswith("disk /scratch has gone (exit status 3); left out")
    assert found.told in steps.log()
    assert [failed.culprit for failed in restarts.read_failed_restarts(steps.attempt)] == [
        "rank 1 on n2: killed by SIGKILL"
    ]


def test_a_node_that_falls_ill_is_left_out_of_the_next_restart(make_run: MakeRun, tmp_path: Path) -> None:
    """Its limit of open files is lowered while it trains."""
    steps = Steps(make_run, "1:0:7:told", **looked_for(tmp_path, node_health="exclude", open_files=500))
    steps.wait_for(1, 7)
    resource.prlimit(steps.agent(1), resource.RLIMIT_NOFILE, (200, 200))
    os.kill(next(read_json_lines(steps.attempt.path / "starts-0.jsonl"))["pid"], signal.SIGKILL)
    assert steps.starter.wait(300) == 0, steps.log()
    assert steps.started(0) == steps.started(1) == [(1, 0), (2, 5)]
    (failed,) = restarts.read_failed_restarts(steps.attempt)
    assert (failed.culprit, failed.lost) == ("rank 0 on n0: killed by SIGKILL", {"n1": "n2"})
    (found,) = node_health.read_findings(steps.attempt)
    assert (found.node, found.check, found.value, found.limit, found.restart) == ("n1", "open_files", 200, 500, 1)
    assert found.action == "left out"


def test_a_sick_node_that_nobody_replaces_ends_its_job_and_the_next_one_leaves_it_out(
    make_run: MakeRun, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import sys; print('no scratch'); sys.exit(1)"]
    run, plan = make(make_run, node_health="warn", node_health_command=command)
    run_chain(run, plan)
    (record,) = ends(run)
    assert (record.cause, record.durable_iteration) == ("failed", 0), logs(run)
    words = f"the site's own check ({sys.executable}): no scratch (exit status 1)"
    assert words in record.reason
    assert starts(run, 0) == []
    (strike,) = excluded_nodes.read_node_failures(run)
    assert (strike.sick, strike.reason) == (True, words[:200])
    assert excluded_nodes.worst_nodes([strike], nodes=1, now=strike.time) == [strike.node]
    status = run_status.read_run_status(run, queue.query_queue(run), now=strike.time)
    assert status.sick_nodes == [f"{strike.node}: {words}; ends the attempt, no other node takes its place"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["warn", "exclude"])
def test_what_is_less_is_told_and_ends_nothing_where_nobody_takes_the_place(make_run: MakeRun, mode: str) -> None:
    run, plan = make(make_run, "1:1:7:SIGKILL", node_health=mode, tmp_gb=1e9)
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    found = node_health.read_findings(run.attempt(1))
    assert [(each.check, each.action, each.restart) for each in found] == [("tmp", "warned", 0), ("tmp", "warned", 1)]
    assert excluded_nodes.read_node_failures(run) == []


@pytest.mark.long
def test_losses_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """The real training program on three pretended nodes, of which the first is sick and the third spare."""
    workspace = Workspace.make(tmp_path)
    whole = submit(workspace.config("whole", **SETTINGS))
    assert whole.returncode == 0, whole.stderr
    reference = workspace.run("whole")
    environment = {"PYTHONPATH": str(ROOT)} | HERE
    config = workspace.config(
        "sick", **SETTINGS, chain={"recovery": "node"}, cluster={"environment": environment}, job={"ntasks_per_node": 2}
    )
    with prepared_run(
        resolve.load_run_config(config), SubmitIntent(resume=False, accept_data_change=False, take_over=False)
    ) as (run, plan):
        three = {"nodes": 2, "spare_nodes": 1, "ntasks_per_node": 1}
        plan = plan_with(plan, **three, **looked_for(tmp_path, "n0") | {"environment": plan.environment})
        plan.write(run.plan)
    agents = Steps.of(run, plan)
    assert agents.starter.wait(600) == 0, agents.log()
    merged_metrics.MergedViews(run).update()
    assert sorted(steps(run)) == list(range(1, STEPS + 1))
    assert steps(run) == steps(reference)
    assert assert_same_bytes(reference.checkpoint(STEPS), run.checkpoint(STEPS)) > 50
    found = [each for each in node_health.read_findings(run.attempt(1)) if each.node == "n0"]
    assert [(each.check, each.action) for each in found] == [("command", "left out")]


@pytest.mark.long
def test_without_agents_the_first_rank_of_a_node_looks(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    check = [sys.executable, "-c", "import sys; print('no scratch'); sys.exit(1)"]
    submit(workspace.config("sick", **SETTINGS, chain={"node_health_command": check, "auto_requeue": False}))
    run = workspace.run("sick")
    (record,) = ends(run)
    assert record.cause == "failed"
    words = f"the site's own check ({sys.executable}): no scratch (exit status 1)"
    assert words in record.reason
    assert [(each.check, each.action) for each in node_health.read_findings(run.attempt(1))] == [("command", "ended")]
    (strike,) = excluded_nodes.read_node_failures(run)
    assert strike.sick
    assert not list(read_json_lines(run.attempt(1).metrics))
    limits = {"tmp_gb": 1e9, "open_files": 10**9}
    submit(workspace.config("less", **SETTINGS, chain={"node_health_limits": limits}))
    run = workspace.run("less")
    assert [record.cause for record in ends(run)] == ["done"]
    found = [(each.check, each.action) for each in node_health.read_findings(run.attempt(1))]
    assert found == [("tmp", "warned"), ("open_files", "warned")]
