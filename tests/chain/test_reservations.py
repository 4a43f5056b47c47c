"""The end of a reservation ends the chain with its name, and leaves nothing queued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relayrun.chain import supervisor
from relayrun.rundir.stop import stop_reason

from .exhaustion import run_child
from .test_exhaustion import Stage, fresh_begin, stage  # noqa: F401 - a fixture


def ended(stage: Stage) -> None:  # noqa: F811
    reached = run_child(lambda: supervisor.end(stage.run, 4, 143), stage.run_path, stage.slurm)
    assert reached.code in (0, supervisor.FAILED), reached.output


@pytest.mark.parametrize("held", ["PENDING", "RESV_DEL_HOLD"])
def test_a_job_that_its_reservation_ended_is_the_last_one(stage: Stage, held: str) -> None:  # noqa: F811
    """Slurm has taken the reservation from the job that it ends, and holds those that wait."""
    assert fresh_begin(stage).code == 0
    attempt = stage.run.attempt(4)
    started = attempt.read_begin()
    assert started is not None
    replace(started, options={**started.options, "reservation": "camp"}).write(attempt.begin)
    for job in (*stage.slurm.pending(), *stage.slurm.fallback_jobs()):
        stage.slurm.set(job, state=held, **{"reservation": "camp"} if held == "PENDING" else {})
    ended(stage)
    reason = stop_reason(stage.run) or ""
    assert reason.startswith("reservation camp ended; to go on without it: relayrun resume ")
    assert "cancelled" not in reason
    assert {job["state"] for key, job in stage.slurm.jobs().items() if key != "1"} == {"CANCELLED"}


def test_a_successor_that_a_person_moved_out_of_the_reservation_goes_on(stage: Stage) -> None:  # noqa: F811
    assert fresh_begin(stage).code == 0
    attempt = stage.run.attempt(4)
    started = attempt.read_begin()
    assert started is not None
    replace(started, options={**started.options, "reservation": "camp"}).write(attempt.begin)
    ended(stage)
    assert stop_reason(stage.run) is None
    assert len(stage.slurm.pending()) == 1


def test_a_successor_whose_reservation_ended_is_not_waited_for(stage: Stage) -> None:  # noqa: F811
    assert fresh_begin(stage).code == 0
    (job,) = stage.slurm.pending()
    stage.slurm.set(job, state="RESV_DEL_HOLD")
    ended(stage)
    assert stop_reason(stage.run) == f"the successor, job {job}, never starts: its reservation was deleted"
    assert stage.slurm.jobs()[job]["state"] == "CANCELLED"
