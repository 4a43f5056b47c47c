"""A stand-in for the training program in tests of the chain: it keeps its contract and does nothing else.

Counts steps; leaves at the deadline, at a stop file, at SIGUSR2; commits an empty folder as a checkpoint.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from relayrun.control.rundir import triggers
from relayrun.control.rundir.records import (
    AttemptOutcome,
    AttemptStart,
    CheckpointCommit,
    Heartbeat,
    RankFailure,
    StartTimes,
)
from relayrun.control.rundir.run import Run
from relayrun.files import append_line

parser = argparse.ArgumentParser()
parser.add_argument("--run-dir", type=Path)
parser.add_argument("--attempt", type=int)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--step-seconds", type=float, default=0.1)
parser.add_argument("--crash-at", type=int, default=-1, help="exit 7 at this iteration, in every attempt")
parser.add_argument("--die-on", default="", help="SIGKILL oneself after 5 steps on this node, twice")
parser.add_argument("--fatal-at", type=int, default=-1)
parser.add_argument("--repeats-on", type=int, default=-1, help="this rank has an error that would come again")
parser.add_argument("--start-seconds", type=float, default=0.0, help="before the first step; leaves started.json")
parser.add_argument("--killed", type=int, default=-1, help="SIGKILL this rank; the others say that they noticed")
parser.add_argument("--save-seconds", type=float, default=0.0)
parser.add_argument("--save-every", type=int, default=0, help="iterations between checkpoints; 0: only when it leaves")
parser.add_argument("--stop-at", type=int, default=-1, help="SIGSTOP of --stop-rank at this iteration")
parser.add_argument("--stop-rank", type=int, default=-1)
options = parser.parse_args()
began = time.time()

asked: list[str] = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append("SIGUSR2"))
signal.signal(signal.SIGTERM, lambda *_: asked.append("SIGTERM"))
if options.die_on and options.attempt <= 2:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # alone no rank can save
run = Run(options.run_dir)
attempt = run.attempt(options.attempt)
begin = AttemptStart.read(attempt.begin)
assert begin is not None
rank = int(os.environ["RANK"])
iteration = begin.base_iteration
run.stacks(options.attempt).mkdir(parents=True, exist_ok=True)
stacks = open(run.stacks(options.attempt) / f"rank-{rank:04}.txt", "w")  # noqa: SIM115 - open as long as the process
faulthandler.register(signal.SIGUSR1, file=stacks)


def save() -> None:
    path = run.checkpoint(iteration)
    if path.exists() or iteration == begin.base_iteration:
        return
    time.sleep(options.save_seconds)
    path.mkdir(parents=True, exist_ok=True)
    commit = CheckpointCommit(
        iteration=iteration,
        path=str(path),
        consumed_samples=iteration,
        time=time.time(),
        seconds=options.save_seconds,
    )
    attempt.append_commit(commit)


def leave(outcome: str, reason: str) -> None:
    if rank == 0:
        save()
        AttemptOutcome(outcome=outcome, reason=reason, iteration=iteration, time=time.time()).write(attempt.outcome)  # type: ignore[arg-type]
    sys.exit(0)


if options.start_seconds:
    time.sleep(options.start_seconds)
    now = time.time()
    if rank == 0:
        StartTimes(process=began, imported=began, initialised=now, loaded=now).write(attempt.started)

if options.killed >= 0:
    node, started = os.environ.get("SLURMD_NODENAME", "n"), attempt.path / "killed"
    if rank == options.killed:
        started.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not started.exists():
        time.sleep(0.01)
    RankFailure(
        rank=rank, node=node, error="RuntimeError: Connection closed by peer [10.0.0.2]:26077", time=time.time()
    ).write(attempt.failures / f"rank-{rank:04}.json")
    sys.exit(1)

if options.repeats_on >= 0:
    mine = rank == options.repeats_on
    error = "KeyError: 'layout'" if mine else "RuntimeError: Connection closed by peer [127.0.0.1]:26077"
    RankFailure(rank=rank, node="n", error=error, time=time.time(), repeats=mine).write(
        attempt.failures / f"rank-{rank:04}.json"
    )
    while len(list(attempt.failures.glob("rank-*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    sys.exit(1)


while True:
    if asked:
        leave("saved", asked[0])
    if attempt.stop.exists():
        leave("saved", "stop file")
    if rank == 0 and (trigger := triggers.read_trigger(run, "exit")):
        try:
            leave("exit", "exit trigger")
        finally:
            triggers.acknowledge_trigger(run, trigger, iteration=iteration, result="saved")
    if rank and attempt.outcome.exists():  # rank 0 looks, the others follow
        sys.exit(0)
    if (job_end := attempt.job_end_time(begin)) is not None and time.time() > job_end - begin.grace_period:
        leave("saved", "time limit near")
    if iteration >= options.steps:
        leave("done", "last step")
    if iteration == options.stop_at:
        if rank == options.stop_rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)  # as in a collective that one rank never enters
    if options.die_on and options.attempt <= 2 and iteration == 5:
        if options.die_on == os.environ.get("SLURMD_NODENAME"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)  # as in a collective with a rank that is no more
    if iteration == options.crash_at:
        sys.exit(7)
    if iteration == options.fatal_at:
        if rank == 0:
            AttemptOutcome(outcome="fatal", reason="loss is NaN", iteration=iteration, time=time.time()).write(
                attempt.outcome
            )
        while not attempt.outcome.exists():  # rank 0 may be slower, and the first that leaves ends the others
            time.sleep(0.05)
        sys.exit(3)
    time.sleep(options.step_seconds)
    iteration += 1
    if rank == 0:
        line = {"iteration": iteration, "attempt": options.attempt, "step_seconds": options.step_seconds}
        line["time"] = time.time()
        append_line(attempt.metrics, line, durable=False)
        Heartbeat(node="n", iteration=iteration, phase="step", time=time.time(), step_p95=None, save_p95=None).write(
            attempt.heartbeats / "n.json"
        )
        if options.save_every and iteration % options.save_every == 0:
            save()
