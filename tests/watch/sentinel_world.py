"""A run on a cluster whose time and whose answers a test of `relayrun sentinel` decides."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from relayrun.control.notify import notices
from relayrun.control.notify.notices import NOTICE_EVENTS, NoticePolicy, NoticeTarget
from relayrun.control.rundir.records import AttemptEnd, CheckpointCommit, Heartbeat, StartTimes
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.job_history import JobEnd
from relayrun.errors import user_name
from relayrun.watch import cron_check
from relayrun.watch.status import run_status
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.run_status import RunStatus
from tests.chain.conftest import MakeRun
from tests.history import began

EVERY = 120.0
"""Seconds between two looks."""

HOUR = 3600.0

ME = user_name(os.geteuid())


class World:
    """A run on a cluster whose time and whose answers the test decides."""

    def __init__(self, make: MakeRun, folder: Path, *, told: bool = True) -> None:
        self.run, self.plan = make(
            folder="runs/mine/run", scheduler="slurm", total_steps=100_000, save_interval=100, start_timeout=900
        )
        self.folder = folder / "runs"
        self.start = self.now = float(int(time.time()))
        self.jobs: list[Job] = []
        self.error: Exception | None = None
        self.asked = 0
        if told:
            tell(self)
        os.utime(self.run.plan, (self.start, self.start))

    def jobs_of(self, names: list[str], *, patience: float) -> dict[str, list[Job]]:
        """Answer for Slurm what the jobs of all chains are."""
        if self.error is not None:
            raise self.error
        return {name: self.jobs if name == self.plan.job_name else [] for name in names}

    def ask(self, *_: object, brief: bool = False) -> QueueStatus:
        """Answer for Slurm how the last job of a chain without jobs ended."""
        self.asked += 1
        return QueueStatus(last_job=JobEnd(id="7", state="NODE_FAIL", nodes="n1", source="sacct"))

    def queue(self, *jobs: tuple[str, str, str]) -> None:
        """Let the chain have these jobs: id, state, and why it waits."""
        self.jobs = [
            Job(id=number, name=self.plan.job_name, state=state, reason=reason) for number, state, reason in jobs
        ]

    def begin(self, number: int, job: str, *, base: int = 0) -> None:
        until = self.now + 6 * HOUR
        began(self.run, number, base=base, job_id=job, nodes="n[0-1]", start_time=self.now, job_end_time=until)

    def beat(self, number: int, phase: str = "step", iteration: int = 0) -> None:
        """Let a node of the attempt give a sign of life; a step takes two seconds."""
        attempt = self.run.attempt(number)
        attempt.heartbeats.mkdir(exist_ok=True)
        step = None if phase == "start" else 2.0
        beat = Heartbeat(node="n0", iteration=iteration, phase=phase, time=self.now, step_p95=step, save_p95=30.0)
        (attempt.heartbeats / "n0.json").write_text(json.dumps(vars(beat)))
        if phase != "start" and not attempt.started.exists():
            StartTimes(process=self.now, imported=self.now, initialised=self.now, loaded=self.now).write(
                attempt.started
            )

    def commit(self, number: int, iteration: int) -> None:
        folder = self.run.checkpoint(iteration)
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"12345")
        self.run.attempt(number).append_commit(
            CheckpointCommit(
                iteration=iteration,
                path=str(folder),
                consumed_samples=1,
                time=self.now,
                seconds=30.0,
                files={"data": 5},
            )
        )

    def end(self, number: int, iteration: int) -> None:
        record = AttemptEnd(
            attempt=number,
            cause="saved",
            reason="time limit near",
            exit_code=0,
            durable_iteration=iteration,
            progress=True,
            end_time=self.now,
            action="continue",
        )
        record.write(self.run.attempt(number).end)

    def look(self, *, after: float = EVERY) -> list[str]:
        """Let time pass, then look; the lines that are printed."""
        self.now += after
        return cron_check.check_folder(self.folder, now=self.now)

    def notices(self) -> list[str]:
        return sorted(notices.known_notices(self.run))


def tell(world: World, *events: str) -> None:
    """Let somebody be told."""
    target = NoticeTarget(name="t", command=["true"], events=list(events or NOTICE_EVENTS))
    policy = NoticePolicy(
        run="mine/run",
        cluster="c",
        since=world.now,
        targets=[vars(target)],
        failed_attempts=2,
        no_progress=6 * HOUR,
        disk_checkpoints=2,
        program=["true"],
    )
    notices.write_notice_policy(world.run, policy)


MakeWorld = Callable[..., World]


def train(world: World) -> None:
    """Attempt 1 of job 7 runs, and saved iteration 100 now; job 8 waits behind it."""
    world.queue(("7", "RUNNING", ""), ("8", "PENDING", "Dependency"))
    assert world.look() == []
    world.begin(1, "7")
    world.beat(1)
    world.commit(1, 100)
    assert world.look() == []


def no_job(world: World) -> None:
    world.queue()


# its own life


def state(world: World) -> RunStatus:
    return run_status.read_run_status(world.run, QueueStatus(), now=world.now)
