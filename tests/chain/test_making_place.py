"""A job that has lost a node and would wait for it makes place for another one, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from relayrun.control.chain import failover, jobs, supervisor
from relayrun.control.chain.jobs import pending_jobs
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import SuccessorJob
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.base import Job, Scheduler
from relayrun.control.scheduler.slurm import Slurm

from .exhaustion import Reached, run_child
from .fake_slurm import NODES
from .test_exhaustion import Stage, fresh_begin, stage  # noqa: F401 - a fixture
from .test_fallback_job import run_fallback_job
from .test_next_nodes import batch_script_is_killed, begun, ended, lost, waiting_job

Patch = pytest.MonkeyPatch
MODES = pytest.mark.parametrize("mode", ["singleton", "requeue"])


def loses_for_good(stage: Stage, node: str) -> None:  # noqa: F811
    """The job goes on without the node, of which there is no other one; Slurm changes nothing of it any more."""
    lost(stage, **{node: ""})
    stage.slurm.down = {node}
    stage.slurm.set("1", lost=",".join(sorted(NODES - {node})))


def loses_its_batch_host(stage: Stage, monkeypatch: Patch, mode: str = "requeue") -> None:  # noqa: F811
    """An attempt has begun, and the job runs on without a batch script."""
    begun(stage, mode)
    stage.slurm.down = {"n0"}
    stage.slurm.set("1", lost="n1,n2,n3")
    monkeypatch.setattr(failover, "FIRST_NODE_SECONDS", 0.0)
    monkeypatch.setattr("relayrun.control.scheduler.slurm.Slurm._node_is_down", lambda *_: True)


def agent(stage: Stage, *, attempt: int = 4, job: str = "1") -> Reached:  # noqa: F811
    """What an agent of another node does, to its end."""

    def closes() -> int:
        return failover.close_orphaned_attempt(stage.run, attempt, node=0, restart_number=0)

    reached = run_child(closes, stage.run_path, stage.slurm, job=job)
    assert reached.code == 1, reached.output
    return reached


def behind_end(monkeypatch: Patch, then: Callable[[], None]) -> None:
    """What happens when an agent has done what `end` does, the first time."""
    end, done = supervisor.end_attempt, list[int]()

    def ended_and_then(run: Run, number: int, exit_code: int) -> int:
        code = end(run, number, exit_code)
        if not done:
            then()
        done.append(number)
        return code

    monkeypatch.setattr(supervisor, "end_attempt", ended_and_then)


def cancel_successor(stage: Stage) -> None:  # noqa: F811
    for job_id in stage.slurm.pending(but="1"):
        stage.slurm.set(job_id, state="CANCELLED")


def next_begins(stage: Stage) -> Reached:  # noqa: F811
    (job_id,) = stage.slurm.pending()
    stage.slurm.set(job_id, state="RUNNING")
    return fresh_begin(stage, job_id)


def another_goes_on(stage: Stage, *, cancelled: bool) -> None:  # noqa: F811
    """In the place of the first job, which asks for more nodes than are up; it begins when that one is over."""
    assert waiting_job(stage)["nodes"] == "3-4"
    assert stage.slurm.jobs()["1"]["state"] == ("CANCELLED" if cancelled else "RUNNING")
    if not cancelled:
        stage.slurm.set("1", state="FAILED")
    following = next_begins(stage)
    assert following.code == 0, following.output
    assert stop_reason(stage.run) is None


def test_another_job_goes_on_where_this_one_would_wait_for_the_node_that_it_has_lost(stage: Stage) -> None:  # noqa: F811
    begun(stage)
    loses_for_good(stage, "n3")
    ended(stage)
    another_goes_on(stage, cancelled=False)


@MODES
def test_another_job_goes_on_where_this_one_would_wait_for_its_batch_host(
    stage: Stage,  # noqa: F811
    monkeypatch: Patch,
    mode: str,
) -> None:
    loses_its_batch_host(stage, monkeypatch, mode)
    agent(stage)
    another_goes_on(stage, cancelled=True)


def test_another_job_goes_on_where_the_batch_script_of_one_that_has_lost_a_node_is_killed(
    stage: Stage,  # noqa: F811
    monkeypatch: Patch,
) -> None:
    begun(stage)
    loses_for_good(stage, "n3")
    batch_script_is_killed(stage, monkeypatch)
    another_goes_on(stage, cancelled=True)


@MODES
def test_a_job_that_a_person_cancels_meanwhile_is_not_replaced(
    stage: Stage,  # noqa: F811
    monkeypatch: Patch,
    mode: str,
) -> None:
    loses_its_batch_host(stage, monkeypatch, mode)
    behind_end(monkeypatch, lambda: cancel_successor(stage))
    agent(stage)
    assert stage.slurm.pending() == []
    assert stop_reason(stage.run) == "the successor, job 3, was cancelled"
    assert stage.slurm.jobs()["1"]["state"] == "CANCELLED"


def test_nor_is_it_by_an_end_that_is_tried_again(stage: Stage) -> None:  # noqa: F811
    begun(stage)
    loses_for_good(stage, "n3")
    ended(stage)
    cancel_successor(stage)
    assert ended(stage).code == supervisor.EXIT_ATTEMPT_FAILED
    assert stage.slurm.pending() == []
    assert "was cancelled" in (stop_reason(stage.run) or "")


def test_a_person_cancels_the_job_that_ends_by_itself(stage: Stage) -> None:  # noqa: F811
    """Another one waits already; the chain itself does not cancel this one."""
    begun(stage)
    loses_for_good(stage, "n3")
    ended(stage)
    stage.slurm.set("1", state="CANCELLED")
    assert next_begins(stage).code == supervisor.EXIT_CHAIN_ENDS
    assert stop_reason(stage.run) == "the job before this one was cancelled"


@MODES
def test_a_person_cancels_the_job_that_an_agent_closes(
    stage: Stage,  # noqa: F811
    monkeypatch: Patch,
    mode: str,
) -> None:
    loses_its_batch_host(stage, monkeypatch, mode)
    behind_end(monkeypatch, lambda: stage.slurm.set("1", state="CANCELLED"))
    agent(stage)
    assert next_begins(stage).code == supervisor.EXIT_CHAIN_ENDS
    assert stop_reason(stage.run) == "the job before this one was cancelled"


def test_an_agent_that_slurm_does_not_answer_the_second_time(stage: Stage, monkeypatch: Patch) -> None:  # noqa: F811
    """In front of the other job this one would wait for the lost node, and hold it up."""
    loses_its_batch_host(stage, monkeypatch)
    behind_end(monkeypatch, lambda: setattr(stage.slurm, "tests_nothing", True))
    agent(stage)
    assert stage.slurm.jobs()["1"]["state"] == "CANCELLED"
    assert next_begins(stage).code == 0


def test_an_end_that_slurm_does_not_answer_the_second_time(stage: Stage) -> None:  # noqa: F811
    begun(stage)
    loses_for_good(stage, "n3")
    ended(stage)
    stage.slurm.tests_nothing = True
    assert ended(stage).code == supervisor.EXIT_ATTEMPT_FAILED
    assert stage.slurm.jobs()["1"]["state"] == "RUNNING"
    assert len(stage.slurm.pending()) == 1


def test_a_job_that_waits_already_is_given_the_nodes_that_are_up_the_second_time(
    stage: Stage,  # noqa: F811
    monkeypatch: Patch,
) -> None:
    """Slurm did not answer when the attempt was closed."""
    loses_its_batch_host(stage, monkeypatch, "singleton")
    stage.slurm.tests_nothing = True
    behind_end(monkeypatch, lambda: setattr(stage.slurm, "tests_nothing", False))
    agent(stage)
    (job_id,) = stage.slurm.pending()
    assert stage.slurm.jobs()[job_id]["nodes"] == "3-4"
    assert stage.slurm.jobs()["1"]["state"] == "CANCELLED"


@MODES
def test_the_job_that_took_the_place_loses_a_node_in_its_turn(
    stage: Stage,  # noqa: F811
    monkeypatch: Patch,
    mode: str,
) -> None:
    """It began with three nodes of four."""
    loses_its_batch_host(stage, monkeypatch, mode)
    agent(stage)
    (job_id,) = stage.slurm.pending()
    stage.slurm.set(job_id, state="RUNNING", nodes="3", lost="n1,n2")
    assert fresh_begin(stage, job_id).code == 0
    stage.slurm.down = {"n0", "n3"}
    agent(stage, attempt=5, job=job_id)
    (next_id,) = stage.slurm.pending()
    assert stage.slurm.jobs()[next_id]["nodes"] == "2-4"
    assert stage.slurm.jobs()[job_id]["state"] == "CANCELLED"
    assert next_begins(stage).code == 0


def another_agent_acts(monkeypatch: Patch, act: Callable[[], None]) -> None:
    """Just when this one has asked whether a job waits, for the last time before it queues one."""
    asked: list[str] = []

    def found(plan: Plan, scheduler: Scheduler, *, own: str) -> list[Job]:
        jobs = pending_jobs(plan, scheduler, own=own)
        asked.append(own)
        if len(asked) == 3:
            act()
        return jobs

    monkeypatch.setattr(jobs, "pending_jobs", found)


def test_another_agent_has_queued_the_one_job_that_may_be_queued(stage: Stage, monkeypatch: Patch) -> None:  # noqa: F811
    loses_its_batch_host(stage, monkeypatch)
    stage.slurm.limit = 3  # with the fallback job of the stage
    another_agent_acts(monkeypatch, lambda: stage.slurm.set(stage.slurm.add(), nodes="3-4"))
    agent(stage)
    assert stage.slurm.jobs()["1"]["state"] == "CANCELLED"
    assert next_begins(stage).code == 0


def makes_place(stage: Stage, job_id: str) -> None:  # noqa: F811
    """What another agent does at last."""
    cancels = Mock(cancel=lambda own: stage.slurm.set(own, state="CANCELLED"))
    jobs.cancel_replaced_job(stage.run.attempt(4), cancels, own="1", job_id=job_id)


def test_two_agents_queue_a_job_each(stage: Stage, monkeypatch: Patch) -> None:  # noqa: F811
    """The first has cancelled this job by the time at which the second writes down its own."""
    loses_its_batch_host(stage, monkeypatch)
    write = SuccessorJob.write

    def written(record: SuccessorJob, path: Path) -> None:
        monkeypatch.setattr(SuccessorJob, "write", write)
        makes_place(stage, stage.slurm.add(nodes="3-4"))
        write(record, path)

    monkeypatch.setattr(SuccessorJob, "write", written)
    agent(stage)
    first, second = stage.slurm.pending()
    stage.slurm.set(first, state="RUNNING")
    assert fresh_begin(stage, first).code == 0
    assert stage.slurm.pending() == [second]


@MODES
def test_the_chains_cancelling_is_no_persons_for_an_agent_that_closes_the_attempt_at_the_same_time(
    stage: Stage,  # noqa: F811
    monkeypatch: Patch,
    mode: str,
) -> None:
    loses_its_batch_host(stage, monkeypatch, mode)
    cancelled = Slurm.cancelled

    def asked(slurm: Slurm, job_id: str, *, nodes: str) -> bool:
        makes_place(stage, next(iter(stage.slurm.pending()), "") or stage.slurm.add(nodes="3-4"))
        return cancelled(slurm, job_id, nodes=nodes)

    monkeypatch.setattr(Slurm, "cancelled", asked)
    agent(stage)
    monkeypatch.setattr(Slurm, "cancelled", cancelled)
    assert stop_reason(stage.run) is None
    assert next_begins(stage).code == 0


def test_the_fallback_job_takes_no_cancelling_of_the_chain_for_a_persons(stage: Stage, monkeypatch: Patch) -> None:  # noqa: F811
    """Slurm did not answer when it was to be moved behind the job that took the place; and that one could not begin."""
    loses_its_batch_host(stage, monkeypatch, "singleton")
    agent(stage)
    for fallback_job in stage.slurm.fallback_jobs():
        stage.slurm.set(fallback_job, after="1", comment="relayrun:starts-only-if-job=1-fails,failed-begins=0")
    (job_id,) = stage.slurm.pending()
    stage.slurm.set(job_id, state="FAILED")
    reached = run_fallback_job(stage)
    assert reached is not None
    assert reached.code == 0, reached.output
    assert stop_reason(stage.run) is None
    assert len(stage.slurm.pending()) == 1
