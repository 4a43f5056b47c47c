"""Nodes that failed are left out by the next jobs as far as others can take their place, and no further."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from relayrun.control.chain import excluded_nodes, job_script, jobs, supervisor
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.scheduler.factory import scheduler_for_plan
from tests.plans import plan_with

from .exhaustion import Reached, run_child
from .fake_slurm import NODES
from .test_exhaustion import Stage, failed, fresh_begin, guarded, no_successor, saved, stage  # noqa: F401 - a fixture
from .test_fallback_job import run_fallback_job


def struck(stage: Stage, *names: str) -> None:  # noqa: F811
    for attempt in (1, 2):
        excluded_nodes.record_node_failures(stage.run, attempt, dict.fromkeys(names, "node failure"), now=time.time())


def waiting_job(stage: Stage) -> dict[str, Any]:  # noqa: F811
    """The one job of the chain that waits."""
    (job_id,) = stage.slurm.pending()
    return stage.slurm.jobs()[job_id]


def ended(stage: Stage, exit_code: int | None = None) -> Reached:  # noqa: F811
    """The end of the attempt, which has failed where nothing else is said."""
    code = failed(stage) if exit_code is None else exit_code
    return run_child(lambda: supervisor.end_attempt(stage.run, 4, code), stage.run_path, stage.slurm)


def next_job(stage: Stage, *, waits: bool) -> tuple[str, str]:  # noqa: F811
    """What the next job leaves out, and what is said; `waits`: it waited already when the attempt ended."""
    assert fresh_begin(stage).code == 0
    reached = ended(stage, None if waits else no_successor(stage))
    return str(waiting_job(stage)["exclude"]), reached.output


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
    excluded_nodes.record_node_failures(stage.run, 3, {"n2": "node failure"}, now=time.time())
    stage.slurm.down = {"n0", "n3"}
    excluded, said = next_job(stage, waits=waits)
    assert excluded == "n2"
    assert "without n1 this job" in said


def loses_a_node(stage: Stage, node: str) -> int:  # noqa: F811
    """The attempt fails as Slurm takes a node to be down, behind whose back the next job was queued already."""
    assert waiting_job(stage)["exclude"] == "n1"
    stage.slurm.down = {node}
    return failed(stage)


@pytest.mark.parametrize(("wished", "left_out"), [({}, ""), ({"exclude": "n1"}, "n1")])
def test_a_waiting_job_may_have_the_node_again_in_whose_place_there_is_none_now(
    stage: Stage,  # noqa: F811
    wished: dict[str, str | None],
    left_out: str,
) -> None:
    """It was left out when there were others. What the config leaves out stays so."""
    replace(Plan.load(stage.run), nodes=3, sbatch_options=wished).write(stage.run.plan)
    stage.run.job_script.write_text(job_script.job_script(Plan.load(stage.run), stage.run))
    stage.slurm.set("1", nodes="3", exclude=left_out)
    struck(stage, "n1")
    assert fresh_begin(stage).code == 0
    exit_code = loses_a_node(stage, "n2")
    reached = ended(stage, exit_code)
    assert waiting_job(stage)["exclude"] == left_out
    assert ("without n1 this job has too few nodes that are up" in reached.output) == (not left_out)


@pytest.mark.parametrize("lines", [False, True], ids=["the job alone", "its failures too"])
@pytest.mark.parametrize("successor", ["the same", "another"])
def test_a_person_takes_a_node_back(stage: Stage, lines: bool, successor: str) -> None:  # noqa: F811
    """As docs/reference/failure-modes.md says: the lines of nodes.jsonl, and the list of the waiting job."""
    struck(stage, "n1", "n2")
    assert fresh_begin(stage).code == 0
    assert waiting_job(stage)["exclude"] != ""
    if lines:
        stage.run.node_failures.write_text("")
    stage.slurm.set(stage.slurm.pending()[0], exclude="")
    ended(stage, saved(stage) if successor == "the same" else no_successor(stage))
    assert (waiting_job(stage)["exclude"] == "") == lines


def test_a_job_that_queues_itself_again_keeps_its_nodes(stage: Stage) -> None:  # noqa: F811
    """As docs/reference/failure-modes.md says of `chain.mode: requeue`."""
    plan_with(Plan.load(stage.run), mode="requeue", fallback_job=False).write(stage.run.plan)
    struck(stage, "n1")
    assert fresh_begin(stage).code == 0
    ended(stage)
    assert waiting_job(stage)["exclude"] == ""


def lost(stage: Stage, **nodes_lost: str) -> None:  # noqa: F811
    """The attempt's last restart has lost these nodes; Slurm has not noticed yet."""
    failed_restart = FailedRestart(
        restart=1,
        time=time.time(),
        rank=None,
        node="n3",
        words="no word from its agent for 20 s",
        iteration=31,
        base_iteration=30,
        durable_iteration=30,
        next_iteration=30,
        again=False,
        reason="no spare node is left",
        steps_lost=1,
        lost=nodes_lost,
    )
    failed_restart.append(stage.run.attempt(4).failed_restarts)


def test_a_lost_node_takes_no_bad_ones_place_though_slurm_takes_it_to_be_up(stage: Stage) -> None:  # noqa: F811
    outliving(stage, nodes=3, spare_nodes=1)
    struck(stage, "n1")
    assert fresh_begin(stage).code == 0
    lost(stage, n3="")
    ended(stage)
    job = waiting_job(stage)
    assert (job["nodes"], job["exclude"]) == ("3-4", "")


def test_a_node_where_begin_failed_is_tried_again_where_no_other_one_is_up(stage: Stage) -> None:  # noqa: F811
    stage.slurm.down = NODES - {"n0"}
    stage.slurm.set("1", state="FAILED")
    reached = run_fallback_job(stage)
    assert reached is not None
    assert reached.code == 0, reached.output
    job = waiting_job(stage)
    assert (job["exclude"], job["comment"]) == ("", "relayrun:begin-failed=1@"), json.dumps(job)


@pytest.mark.parametrize("tests_nothing", [False, True])
def test_a_node_where_begin_failed_has_gone_from_the_cluster(stage: Stage, tests_nothing: bool) -> None:  # noqa: F811
    """Nor need the controller say so."""
    stage.slurm.tests_nothing = tests_nothing
    stage.slurm.set("1", state="FAILED", comment="relayrun:begin-failed=1@x9")
    reached = run_fallback_job(stage)
    assert reached is not None
    assert reached.code == 0, reached.output
    assert len(stage.slurm.pending()) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_bad_node_that_the_config_asks_for_is_not_left_out(stage: Stage, waits: bool) -> None:  # noqa: F811
    plan = replace(Plan.load(stage.run), sbatch_options={"nodelist": "n1"})
    plan.write(stage.run.plan)
    stage.run.job_script.write_text(job_script.job_script(plan, stage.run))
    struck(stage, "n1")
    excluded, said = next_job(stage, waits=waits)
    assert excluded == ""
    assert "without n1 this job has too few nodes that are up" in said


def outliving(stage: Stage, **changes: object) -> None:  # noqa: F811
    """The run has jobs that outlive the loss of nodes."""
    plan = plan_with(Plan.load(stage.run), recovery="node", fork_server=["python"], ntasks_per_node=2, **changes)
    plan.write(stage.run.plan)
    stage.run.job_script.write_text(job_script.job_script(plan, stage.run))
    stage.slurm.set("1", nodes=str(plan.nodes_of_job))


def begun(stage: Stage, mode: str = "requeue") -> None:  # noqa: F811
    """An attempt has begun in a job of two nodes and two spare ones."""
    outliving(stage, nodes=2, spare_nodes=2, mode=mode, fallback_job=mode == "singleton")
    assert fresh_begin(stage).code == 0


def asked_for(stage: Stage) -> str:  # noqa: F811
    """How many nodes the next job is queued with."""
    next_job(stage, waits=False)
    return str(waiting_job(stage)["nodes"])


@pytest.mark.parametrize(("down", "waiting", "queued"), [([], ("4", None), "4"), (["n3"], ("3-4", "6"), "3-4")])
def test_spare_nodes_that_are_not_up_are_not_waited_for(
    stage: Stage,  # noqa: F811
    down: list[str],
    waiting: tuple[str, str | None],
    queued: str,
) -> None:
    outliving(stage, nodes=2, spare_nodes=2)
    stage.keep()
    stage.slurm.down = set(down)
    assert asked_for(stage) == queued
    stage.reset()
    stage.slurm.down = set()  # when it is queued they are up
    assert fresh_begin(stage).code == 0
    stage.slurm.down = set(down)
    ended(stage)
    job = waiting_job(stage)
    assert (job["nodes"], job.get("tasks")) == waiting


def test_a_bad_node_is_left_out_before_a_spare_one_is_waited_for(stage: Stage) -> None:  # noqa: F811
    outliving(stage, nodes=2, spare_nodes=2)
    struck(stage, "n1")
    stage.slurm.down = {"n3"}
    assert asked_for(stage) == "2-4"
    assert waiting_job(stage)["exclude"] == "n1"


@pytest.mark.parametrize("left", ["4", "3", "1"])
def test_a_job_that_queues_itself_again_does_without_the_lost_spare_node(stage: Stage, left: str) -> None:  # noqa: F811
    """Whatever Slurm says that it has left: nodes that have failed, or are done with it already, are gone from it."""
    begun(stage)
    stage.slurm.set("1", nodes=left)
    stage.slurm.down = {"n3"}
    ended(stage)
    job = stage.slurm.jobs()["1"]
    assert (job["nodes"], job["tasks"]) == ("3-4", "6")


def test_a_job_that_queued_itself_again_with_few_nodes_has_all_of_them_the_next_time(stage: Stage) -> None:  # noqa: F811
    outliving(stage, nodes=2, spare_nodes=2, mode="requeue", fallback_job=False)
    stage.slurm.set("1", nodes="3")
    assert fresh_begin(stage).code == 0
    ended(stage)
    job = stage.slurm.jobs()["1"]
    assert (job["nodes"], job["tasks"]) == ("4-4", "8")


def batch_script_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch, *, guard_on: str = "n0") -> None:  # noqa: F811
    monkeypatch.setattr(
        "relayrun.control.scheduler.slurm.Slurm.kill_wait", lambda _self: 30.0 if guard_on == "n0" else 0.1
    )
    monkeypatch.setattr("relayrun.control.chain.watch.is_process_alive", lambda _pid: False)
    monkeypatch.setenv("SLURMD_NODENAME", guard_on)

    guarded(stage)


def test_a_job_whose_batch_script_is_killed_does_without_the_node_that_is_not_up(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun(stage)
    stage.slurm.down = {"n3"}
    batch_script_is_killed(stage, monkeypatch)
    job = stage.slurm.jobs()["1"]
    assert (job["state"], job["nodes"], job.get("tasks")) == ("PENDING", "3-4", "6")


@pytest.mark.parametrize(("cancelled", "state"), [(True, "RUNNING"), (False, "PENDING")])
def test_a_guard_on_another_node_judges_nothing_by_process_ids(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    cancelled: bool,
    state: str,
) -> None:
    """There the batch script has no process: Slurm says whether the job was cancelled, and then it stays so."""
    outliving(stage, nodes=2, spare_nodes=2, mode="requeue", fallback_job=False)
    assert fresh_begin(stage).code == 0
    monkeypatch.setattr("relayrun.control.scheduler.slurm.Slurm.cancelled", lambda _self, _id, *, nodes: cancelled)
    batch_script_is_killed(stage, monkeypatch, guard_on="n2")
    assert stage.slurm.jobs()["1"]["state"] == state


def test_a_spare_node_takes_the_place_of_one_where_begin_failed(stage: Stage) -> None:  # noqa: F811
    outliving(stage, nodes=2, spare_nodes=2)
    struck(stage, "n1")
    stage.slurm.set("1", state="FAILED")
    reached = run_fallback_job(stage)
    assert reached is not None
    assert reached.code == 0, reached.output
    job = waiting_job(stage)
    assert (job["nodes"], job["exclude"], job["comment"]) == ("2-4", "n0,n1", "relayrun:begin-failed=1@n0")


@pytest.mark.parametrize("mode", ["singleton", "requeue"])
def test_a_site_that_lets_nobody_change_the_number_of_nodes(stage: Stage, mode: str) -> None:  # noqa: F811
    """All else is done."""
    outliving(stage, nodes=2, spare_nodes=2, mode=mode, fallback_job=False)
    assert fresh_begin(stage).code == 0
    stage.slurm.down = {"n3"}
    stage.slurm.keeps_nodes = True
    reached = ended(stage)
    (job_id,) = stage.slurm.pending()
    job = stage.slurm.jobs()[job_id]
    assert (job_id == "1", job["nodes"]) == (mode == "requeue", "4")
    assert job["delay"] > 0
    assert "denied" in reached.output
    assert (
        run_child(lambda: supervisor.end_attempt(stage.run, 4, 7), stage.run_path, stage.slurm).code
        == supervisor.EXIT_ATTEMPT_FAILED
    )


@pytest.mark.parametrize(("waited", "waits"), [("3-4", "4-4"), ("3-3", "3-3"), ("4", "4"), ("8", "8")])
def test_a_waiting_job_waits_for_the_nodes_that_are_up_again(stage: Stage, waited: str, waits: str) -> None:  # noqa: F811
    """It was queued while one was down. A number that only a person can have given stays."""
    outliving(stage, nodes=2, spare_nodes=2)
    assert fresh_begin(stage).code == 0
    (job_id,) = stage.slurm.pending()
    stage.slurm.set(job_id, nodes=waited)
    ended(stage)
    assert stage.slurm.jobs()[job_id]["nodes"] == waits


def test_a_node_that_slurm_still_takes_to_be_up_though_it_is_lost(stage: Stage) -> None:  # noqa: F811
    outliving(stage, nodes=2, spare_nodes=2)
    assert fresh_begin(stage).code == 0
    lost(stage, n1="n2", n3="")
    ended(stage)
    job = waiting_job(stage)
    assert (job["nodes"], job["tasks"], job["exclude"]) == ("2-4", "4", "")


def test_a_first_job_with_a_spare_node_that_is_not_up_is_refused_with_what_to_set(stage: Stage) -> None:  # noqa: F811
    outliving(stage, nodes=2, spare_nodes=2)
    stage.slurm.set("1", state="FAILED")
    stage.slurm.down = {"n3"}

    def first() -> int:
        plan = Plan.load(stage.run)
        jobs.queue_first_job(stage.run, plan, scheduler_for_plan(plan, stage.run, patience=0))
        return 0

    reached = run_child(first, stage.run_path, stage.slurm)
    assert "ask for 4 nodes; where so many are not up, set job.spare_nodes to fewer" in reached.output
    assert stage.slurm.pending() == []


@pytest.mark.parametrize(("changes", "queued"), [({}, True), ({"nodes": 5}, False), ({"cpus_per_task": 9}, False)])
def test_a_first_job_waits_for_a_node_that_is_down_only_if_it_fits_the_cluster(
    stage: Stage,  # noqa: F811
    changes: dict[str, Any],
    queued: bool,
) -> None:
    plan = replace(Plan.load(stage.run), **{"nodes": 4, "spare_nodes": 0, "ntasks_per_node": 1} | changes)
    plan.write(stage.run.plan)
    stage.run.job_script.write_text(job_script.job_script(plan, stage.run))
    stage.slurm.set("1", state="FAILED")
    stage.slurm.down = {"n3"}

    def first() -> int:
        jobs.queue_first_job(stage.run, plan, scheduler_for_plan(plan, stage.run, patience=0))
        return 0

    reached = run_child(first, stage.run_path, stage.slurm)
    assert bool(stage.slurm.pending()) is queued, reached.output
    assert ("the job waits for some of n3 (down)" in reached.output) is queued
    assert ("node configuration is not available" in reached.output) is not queued


def test_the_job_behind_one_with_fewer_nodes_asks_for_all_of_them_again() -> None:
    plan = Mock(outlives_nodes=True, nodes=4, nodes_of_job=6)
    asked = {
        given: excluded_nodes._without_reduced_nodes(plan, {"nodes": given, "time": "5"})
        for given in ("5", "2", "5-6", "8")
    }
    assert asked == {given: {"time": "5"} for given in ("5", "2", "5-6")} | {"8": {"nodes": "8", "time": "5"}}


@pytest.mark.parametrize("mode", ["singleton", "requeue"])
def test_a_controller_that_does_not_say_which_nodes_are_up_holds_nobody_up(stage: Stage, mode: str) -> None:  # noqa: F811
    outliving(stage, nodes=2, spare_nodes=1, mode=mode, fallback_job=mode == "singleton")
    struck(stage, "n1")
    stage.slurm.tests_nothing = True
    begun = fresh_begin(stage)
    end = ended(stage, no_successor(stage))
    for reached in (begun, end) if mode == "singleton" else (end,):
        assert reached.code in (0, supervisor.EXIT_ATTEMPT_FAILED), reached.output
        assert "is not known: sbatch: allocation failure: Socket timed out" in reached.output
        assert reached.calls.count("run sbatch --test-only") < 10
    (job_id,) = stage.slurm.pending()
    job = stage.slurm.jobs()[job_id]
    assert (job["nodes"], job["exclude"]) == ("3", "n1" if mode == "singleton" else "")
    assert (job_id == "1") == (mode == "requeue")
