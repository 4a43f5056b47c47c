"""What the supervisor notes of the times of its jobs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from relayrun.control import chain_state
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import LocalJob, LocalQueue
from tests.history import began

from .conftest import MakeRun


@pytest.fixture
def queue(make_run: MakeRun) -> tuple[Run, LocalQueue]:
    """Attempt 1 began in job 1, which ended at 5."""
    run, plan = make_run()
    queue = LocalQueue(run.path / "local")
    job = LocalJob(
        id="", name=plan.job_name, script="s", log_folder="l", time_limit=9, signal_seconds=1, eligible_time=1.0
    )
    before = time.time()
    queue.add(replace(job, state="COMPLETED", start_time=2.0, end_time=5.0))
    assert before <= (queue.read_job("1").submit_time or 0.0) <= time.time()
    began(run, 1, job_id="1")
    return Run(run.path), queue


def test_the_end_of_the_job_before_is_noted(queue: tuple[Run, LocalQueue]) -> None:
    run, jobs = queue
    scheduler = LocalScheduler(run)
    job = scheduler.query("1")
    assert job is not None
    assert (job.submit_time, job.eligible_time, job.start_time) == (jobs.read_job("1").submit_time, 1.0, 2.0)
    assert chain_state.previous_job_end(run.attempt(1), scheduler, own="2") == 5.0
    assert chain_state.previous_job_end(run.attempt(1), scheduler, own="1") is None  # the same job, queued again


def test_what_is_not_known_of_it_stops_nobody(queue: tuple[Run, LocalQueue]) -> None:
    run, jobs = queue
    scheduler = LocalScheduler(run)
    jobs.path("1").write_text("{")
    assert chain_state.previous_job_end(run.attempt(1), scheduler, own="2") is None
    jobs.path("1").unlink()
    assert chain_state.previous_job_end(run.attempt(1), scheduler, own="2") is None


@pytest.mark.parametrize(("said", "found"), [("1763790000.25", 1763790000.25), ("", None), ("12,5", None)])
def test_when_the_script_ran(said: str, found: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chain_state.SCRIPT_TIME_VARIABLE, said)
    assert chain_state.job_script_time() == found
    monkeypatch.delenv(chain_state.SCRIPT_TIME_VARIABLE)
    assert chain_state.job_script_time() is None
