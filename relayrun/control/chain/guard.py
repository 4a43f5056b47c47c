"""Sees to it that a job without a successor comes back although its batch script was killed.

A job of `chain.mode: requeue` has none in the queue, nor one behind which none may be queued, and it is the batch
script that queues it again. The guard is a step of
its own in the job: when the batch script is gone, or the time limit is reached, Slurm ends the steps with SIGTERM
and gives them KillWait. In that time the guard queues the job again, unless the attempt has been closed or the
job was cancelled; where it has lost a node, and would wait for as many as before, another one takes its place. The next
`begin` judges, as ever; where the chain was stopped it ends there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from relayrun.control.chain import next_nodes, successor
from relayrun.control.log import log_line
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import SchedulerError

KILL_WAIT_SHARE = 2 / 3
"""The part of KillWait in which the batch script may still close the attempt itself."""


def run_guard(run: Run, number: int, *, batch_pid: int) -> int:
    """Until SIGTERM, then as above. `batch_pid`: the batch script's process, on the batch host."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return _guard_job(run, number, batch_pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _guard_job(run: Run, number: int, batch_pid: int) -> int:
    plan = Plan.load(run)  # refuses the directory of a version that this one does not know
    scheduler = Slurm()
    attempt = run.attempt(number)
    own = scheduler.current_job_id()
    patience = KILL_WAIT_SHARE * scheduler.kill_wait()
    here, job = os.environ.get("SLURMD_NODENAME"), scheduler.query(own)
    beside = job is not None and job.batch_host == here  # elsewhere the number is another process's, or nobody's
    log_line(f"guarding attempt {number}, job {own}{'' if beside else f', from {here}: this is not the batch host'}")
    signal.sigwait({signal.SIGTERM})
    killed = beside and not is_process_alive(batch_pid)  # a job that is cancelled, or at its limit, still has it
    deadline = time.monotonic() + patience
    while not attempt.end.exists() and not (beside and not is_process_alive(batch_pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if attempt.end.exists() or (plan.mode == "singleton" and not attempt.retry_successor.exists()):
        return 0  # seen to by the batch script, or by the successor, which could be queued after all
    begin = attempt.read_begin()
    if not killed and scheduler.cancelled(own, nodes=begin.nodes if begin else ""):
        return 0
    with contextlib.suppress(SchedulerError):  # asked once: there may be seconds left
        if stopped := successor.stop_reason_of_job(Slurm(patience=0).query(own)):
            log_line(f"the chain ends: {stopped}")
            return 0
    log_line(
        f"the batch script of attempt {number} {'was killed' if killed else 'does not end'}; job {own} is queued again"
    )
    scheduler.requeue(own)  # first: there may be seconds left
    try:
        if (few := next_nodes.requeue_node_count(run, plan, scheduler, own)) is None:
            return 0
        if next_nodes.would_wait_for_nodes(run, few):
            job_id = successor.ensure_replacement(run, plan, scheduler, attempt, own=own, delay=0)
            successor.cancel_replaced_job(attempt, scheduler, own=own, job_id=job_id)
        else:
            scheduler.nodes.do_with(own, few)
    except (SchedulerError, OSError) as error:
        log_line(f"job {own} asks for as many nodes as before: {getattr(error, 'message', error)}")
    return 0


def is_process_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
