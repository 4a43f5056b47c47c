"""Who runs the queue of the local scheduler meets a disk that refuses it: it tries again, and says why at last."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler import local
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import LocalJob, LocalQueue
from relayrun.errors import SchedulerError

from .conftest import MakeRun

pytestmark = pytest.mark.slow


def refuse(monkeypatch: pytest.MonkeyPatch, which: Callable[[LocalJob], bool], *, times: int) -> list[LocalJob]:
    """Let writes of the jobs that `which` chooses fail so often, in this process: not in the job's own."""
    refused: list[LocalJob] = []
    write = LocalQueue.write_job

    def fail(queue: LocalQueue, job: LocalJob) -> None:
        if which(job) and len(refused) < times:
            refused.append(job)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(queue, job)

    monkeypatch.setattr(LocalQueue, "write_job", fail)
    return refused


def run_chain(run: Run, scheduler: LocalScheduler, poll: Callable[[], None] = lambda: None) -> list[str]:
    events: list[str] = []
    scheduler.run_queue(events.append, poll)
    return events


@pytest.mark.parametrize("state", [pytest.param("RUNNING", marks=pytest.mark.long), "COMPLETED"])
def test_a_disk_that_is_full_for_a_while_does_not_end_the_chain(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    run, plan = make_run("--steps=3", total_steps=3)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    refused = refuse(monkeypatch, lambda job: job.state == state, times=3)
    events = run_chain(run, scheduler)
    assert len(refused) == 3
    assert (stop_reason(run) or "").startswith("the last iteration, 3, is saved")
    assert LocalQueue(run.path / "local").read_job("1").start_time is not None
    said = [event for event in events if "No space left" in event]
    assert len(said) == (state == "COMPLETED"), events  # once, and not for what is tried ten times a second


def test_a_disk_that_stays_full_ends_the_chain_with_a_word(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "DISK_RETRY_SECONDS", 1.0)
    run, plan = make_run("--steps=3", "--crash-at=1", total_steps=3, ntasks_per_node=1)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    refuse(monkeypatch, lambda job: job.state == "FAILED", times=10**6)
    with pytest.raises(SchedulerError, match=r"the end of job 1 is not recorded: .* No space left") as raised:
        run_chain(run, scheduler)
    assert "--resume" in (raised.value.hint or "")
    assert "the end of job 1 is not recorded" in (stop_reason(run) or "")


@pytest.mark.long
def test_a_terminal_that_has_gone_does_not_end_the_chain(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=3", total_steps=3)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})

    def gone() -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    run_chain(run, scheduler, gone)
    assert (stop_reason(run) or "").startswith("the last iteration, 3, is saved")


@pytest.mark.parametrize("auto_requeue", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_batch_script_that_is_killed_inside_begin_is_followed(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auto_requeue: bool
) -> None:
    """Nothing is queued then, and the script can do nothing more."""
    monkeypatch.setattr(local, "BEGIN_BACKOFF", 0.2)
    here, python = tmp_path / "here", tmp_path / "python"
    hang = f'[[ " $* " != *" begin "* || -e "{here}" ]] || {{ touch "{here}"; exec sleep 1000; }}'
    python.write_text(f'#!/bin/bash\n{hang}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    run, plan = make_run("--steps=3", total_steps=3, auto_requeue=auto_requeue, host_python=str(python))
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    killed: list[int] = []

    def kill() -> None:
        pid = LocalQueue(run.path / "local").read_job("1").pid
        if here.exists() and not killed and pid is not None:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    events = run_chain(run, scheduler, kill)
    again = [event for event in events if "queued again" in event]
    assert again == ["job 1 ended: FAILED and is queued again"] * auto_requeue
    assert (stop_reason(run) is not None) == auto_requeue
