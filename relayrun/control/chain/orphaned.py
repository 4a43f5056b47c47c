"""What an agent becomes when the coordinator is gone: it closes the attempt where nobody else is left to do so.

A job with spare nodes outlives the loss of a node (`--no-kill`). Where that is the batch host, Slurm lets the job run
without a batch script up to its time limit, and nobody would say so. Agents of the other nodes live on. Each asks Slurm
now and then whether it has taken the batch host out of the job: Slurm's word alone counts, so that an agent that is
merely cut off ends nothing. As long as the batch script lives it closes the attempt itself, and ends this with the job.

The first that hears of the loss does what the batch script would have done: `end`. Then it queues the job again under
its id, or cancels it where another job goes on in its place, or none. Nobody is elected: a node asks the later, the
higher its number is, and what two do at the same time is done once.
"""

from __future__ import annotations

import time

from relayrun.control import chain_decide
from relayrun.control.chain import successor, supervisor
from relayrun.control.log import log_line
from relayrun.control.rundir import rounds
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.lineage import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.rounds import FailedRestart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.stop import stop_reason
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.factory import scheduler_for_plan

FIRST_NODE_SECONDS = 5.0
"""Between two questions of the first node."""
LATER_NODE_SECONDS = 10.0
"""By how much longer each node waits than the one before it; so many nodes do not ask Slurm at the same time."""
LONGEST_NODE_SECONDS = 300.0
"""No node waits for longer, however many there are."""
SPREAD_SECONDS = 60
"""Over so many seconds the questions of those are spread that wait for about as long."""
RETRY_SECONDS = 30.0


def close_orphaned_attempt(run: Run, number: int, *, node: int, number_of_round: int) -> int:
    """Until this job is over, or this program has seen to it that it will be. Return the exit code of the agent.

    Whatever fails meanwhile is tried again: nobody else is left. The agent has left it the signals that ask ranks to
    leave as ignored ones.

    `node`: number of this node in the job. `number_of_round`: the newest that its agent knew, 0 before the first.
    """
    log_line(f"attempt {number}: the coordinator is gone; Slurm is asked whether the batch host is")
    told = False
    while True:
        time.sleep(RETRY_SECONDS if told else question_interval(node))
        try:
            plan, attempt = Plan.load(run), run.attempt(number)
            scheduler = scheduler_for_plan(plan, run, patience=0)
            own = scheduler.current_job_id()
            job = scheduler.query(own)
            if job is None or not job.live:
                log_line(f"job {own} is {'gone' if job is None else job.state}; nothing is left to do")
                return 1
            names = scheduler.nodes.expand(job.nodes) if job.nodes and scheduler.nodes else []
            if not (host := lost_batch_host(job, names)):
                continue
            if not told:
                log_line(
                    f"the batch host {host} is lost, and the batch script with it; this agent closes attempt {number}"
                )
            told = True
            _record_lost_batch_host(attempt, host, number_of_round, run)
            supervisor.end_attempt(run, number, chain_decide.UNKNOWN_EXIT_CODE)
            if lost_batch_host(scheduler.query(own), names):  # or a person, or another agent, has ended it meanwhile
                _end_job(run, plan, attempt, own)
            return 1
        except Exception as error:  # of whatever kind: without this program the job would hold its nodes to its limit
            log_line(f"tried again: {getattr(error, 'message', '') or f'{type(error).__name__}: {error}'}")


def question_interval(node: int) -> float:
    """Seconds before each question of this node; those that would wait for longer than the longest are spread."""
    return min(FIRST_NODE_SECONDS + LATER_NODE_SECONDS * node, LONGEST_NODE_SECONDS - node % SPREAD_SECONDS)


def lost_batch_host(job: Job | None, names: list[str]) -> str:
    """The batch host of a job that Slurm lets run without it; empty where it is there. `names`: nodes of the job."""
    if job is None or job.state != "RUNNING" or not names or job.batch_host in names:
        return ""
    return job.batch_host


def _record_lost_batch_host(attempt: Attempt, host: str, number: int, run: Run) -> None:
    """Put on record why the attempt ends, for `end`; once."""
    earlier = rounds.read_failed_restarts(attempt)
    begin = attempt.read_begin()
    if begin is None or attempt.read_end() is not None or any(host in each.lost for each in earlier):
        return
    iteration, durable = rounds.newest_recorded_iteration(attempt), Lineage(run).durable().iteration
    failed = FailedRestart(
        round=max(1, number, *(each.round + 1 for each in earlier)),
        time=time.time(),
        rank=None,
        node=host,
        words="the batch host is lost",
        iteration=iteration,
        base_iteration=earlier[-1].next_iteration if earlier else begin.base_iteration,
        durable_iteration=durable,
        next_iteration=durable,
        again=False,
        reason="the batch script is gone with it",
        steps_lost=max(0, iteration - durable),
        lost={host: ""},
    )
    rounds.record_failed_restart(attempt, failed)


def _end_job(run: Run, plan: Plan, attempt: Attempt, own: str) -> None:
    """Queue this job again, in front of the one that may wait behind it; cancel it where that one goes on, or none."""
    record, scheduler = attempt.read_end(), scheduler_for_plan(plan, run)
    goes_on = ""
    stopped = stop_reason(run) or successor.stop_reason_of_job(scheduler.query(own))
    if record is not None and record.action in ("continue", "retry") and stopped is None:
        goes_on = successor.requeue_job(run, plan, scheduler, attempt, own=own, delay=record.delay)
    if goes_on == own:
        return
    log_line(f"job {own} is cancelled")
    if goes_on:
        successor.cancel_replaced_job(attempt, scheduler, own=own, job_id=goes_on)
    else:
        scheduler.cancel(own)
