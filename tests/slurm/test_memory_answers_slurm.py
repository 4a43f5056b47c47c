"""The Slurm in memory (`tests.histories`) answers as the real one does. Where they differ, the real one is right."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest

from tests.histories.clock import Clock
from tests.histories.commands import Commands
from tests.histories.controller import Controller, MemoryJob

from .cluster import TestCluster, parse_fields

pytestmark = pytest.mark.slurm

NODES = ["n0", "n1", "n2", "n3"]
DEAF = "trap '' TERM USR2; for each in {1..600}; do sleep 1; done"
"""A script that ends by SIGKILL alone, such as `end` of a job that Slurm ends."""
SHOWN = ("JobState", "Reason", "Requeue", "Restarts")


class Side(Protocol):
    """A Slurm that is asked."""

    def submit(self, *options: str, body: str) -> str:
        """Queue a script; return its id."""

    def ask(self, *command: str) -> tuple[int, str]:
        """The exit code of a command and what it said."""

    def until(self, job: str, *states: str) -> None:
        """Wait until a job is in one of these states."""


@dataclass
class RealSide:
    """The cluster of the test."""

    cluster: TestCluster
    folder: Path

    def submit(self, *options: str, body: str) -> str:
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{body}\n")
        return self.cluster.sbatch(["--output=/dev/null", "--time=5", *options, script])

    def ask(self, *command: str) -> tuple[int, str]:
        done = self.cluster.run([*command], check=False)
        return done.returncode, done.stdout + done.stderr

    def until(self, job: str, *states: str) -> None:
        self.cluster.wait_until(lambda: self.cluster.job(job)["JobState"] in states, what=f"{job} in {states}")


@dataclass
class ScriptedWork:
    """A batch script of a job in memory: what `body` of the real one does."""

    slurm: Controller
    job: MemoryJob
    body: str
    ended: bool = False

    def __post_init__(self) -> None:
        if self.body.startswith("exit"):
            self.slurm.clock.after(0.5, lambda: self._end(int(self.body.split()[1])))

    def _end(self, code: int) -> None:
        self.ended = True
        self.slurm.script_ended(self.job, code)

    def signal(self, number: signal.Signals, *, batch: bool, steps: bool) -> None:
        if batch and (number == signal.SIGKILL or (number == signal.SIGTERM and self.body != DEAF)):
            self.ended = True

    def gone(self) -> bool:
        return self.ended


@dataclass
class MemorySide:
    """A Slurm in memory with nodes of these names."""

    folder: Path
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.slurm = Controller(self.clock, [*NODES], lambda job: ScriptedWork(self.slurm, job, self.bodies[job.id]))
        self.commands = Commands(self.slurm, user=0)
        self.bodies: dict[int, str] = {}

    def submit(self, *options: str, body: str) -> str:
        script = self.folder / "memory.sh"
        script.write_text(
            "#SBATCH --nodes=1\n#SBATCH --time=00:05:00\n#SBATCH --job-name=memory.sh\n#SBATCH --requeue\n"
        )
        done = self.commands.run(["sbatch", "--parsable", *options, str(script)])
        assert done.returncode == 0, done.stderr
        self.bodies[int(done.stdout)] = body
        return done.stdout.strip()

    def ask(self, *command: str) -> tuple[int, str]:
        done = self.commands.run([*command])
        return done.returncode, done.stdout + done.stderr

    def until(self, job: str, *states: str) -> None:
        for _ in range(1000):
            if self.slurm.jobs[int(job)].state in states:
                return
            self.clock.run(self.clock.now + 0.25)
        raise AssertionError(f"{job} is {self.slurm.jobs[int(job)].state}")


@dataclass
class Story:
    """What a side answered, in order."""

    side: Side
    seen: list[str] = field(default_factory=list)

    def show(self, job: str) -> None:
        code, text = self.side.ask("scontrol", "show", "job", "--oneliner", job)
        fields = parse_fields(text)
        found = {name: fields.get(name, "-") for name in SHOWN} if code == 0 else {}
        self.seen.append(" ".join(f"{name}={value}" for name, value in found.items()) or text.strip())

    def order(self, *command: str) -> None:
        code, text = self.side.ask(*command)
        words = re.sub(r"job \d+", "job N", text.strip()).partition("\n")[0]
        self.seen.append(f"{command[0]} {code and 1}: {words if code else ''}".rstrip())

    def until(self, job: str, *states: str) -> None:
        self.side.until(job, *states)


def requeued(story: Story) -> None:
    job = story.side.submit("--requeue", body=DEAF)
    story.until(job, "RUNNING")
    story.show(job)
    story.order("scontrol", "requeue", job)
    story.show(job)
    story.order("scontrol", "requeue", job)
    story.show(job)
    story.until(job, "PENDING")
    story.order("scontrol", "requeue", job)
    story.order("scancel", job)
    story.until(job, "CANCELLED")
    story.show(job)


def cancelled_while_it_is_requeued(story: Story) -> None:
    job = story.side.submit("--requeue", body=DEAF)
    story.until(job, "RUNNING")
    story.order("scontrol", "requeue", job)
    story.order("scancel", job)
    story.until(job, "CANCELLED", "PENDING")
    story.show(job)
    story.order("scancel", job)


def cancelled(story: Story) -> None:
    job = story.side.submit("--requeue", body=DEAF)
    story.until(job, "RUNNING")
    story.order("scancel", job)
    story.show(job)
    story.order("scontrol", "update", f"JobId={job}", "Comment=late")
    story.until(job, "CANCELLED")
    story.show(job)
    story.order("scontrol", "requeue", job)
    story.order("scontrol", "update", f"JobId={job}", "Comment=late")


def requeued_while_it_is_cancelled(story: Story) -> None:
    job = story.side.submit("--requeue", body=DEAF)
    story.until(job, "RUNNING")
    story.order("scancel", job)
    story.order("scontrol", "requeue", job)
    story.show(job)
    story.until(job, "CANCELLED", "PENDING")
    story.show(job)
    story.order("scancel", job)


def not_to_be_requeued(story: Story) -> None:
    job = story.side.submit("--requeue", body=DEAF)
    story.until(job, "RUNNING")
    story.order("scontrol", "update", f"JobId={job}", "Requeue=0")
    story.order("scontrol", "requeue", job)
    story.order("scontrol", "update", f"JobId={job}", "StartTime=now+60")
    story.order("scontrol", "update", f"JobId={job}", "ExcNodeList=n3")
    story.show(job)
    story.order("scancel", "--signal=KILL", "--batch", job)
    story.order("scancel", job)
    story.until(job, "CANCELLED", "FAILED")


def behind_a_failed_job(story: Story) -> None:
    first = story.side.submit("--hold", body="exit 1")
    behind = story.side.submit(f"--dependency=afternotok:{first}", "--kill-on-invalid-dep=yes", body=DEAF)
    story.show(behind)
    story.order("scontrol", "release", first)
    story.until(first, "FAILED")
    story.show(first)
    story.until(behind, "RUNNING")
    story.show(behind)
    story.order("scancel", behind)


def behind_a_good_job(story: Story) -> None:
    first = story.side.submit("--hold", body="exit 0")
    behind = story.side.submit(f"--dependency=afternotok:{first}", "--kill-on-invalid-dep=yes", body=DEAF)
    story.order("scontrol", "release", first)
    story.until(first, "COMPLETED")
    story.show(first)
    story.until(behind, "CANCELLED")


def behind_a_cancelled_job(story: Story) -> None:
    first = story.side.submit("--hold", body="exit 0")
    behind = story.side.submit(f"--dependency=afternotok:{first}", "--kill-on-invalid-dep=yes", body=DEAF)
    story.order("scancel", first)
    story.until(behind, "RUNNING")
    story.order("scancel", behind)


def singletons(story: Story) -> None:
    first = story.side.submit("--job-name=one", "--dependency=singleton", body=DEAF)
    story.until(first, "RUNNING")
    second = story.side.submit("--job-name=one", "--dependency=singleton", body=DEAF)
    third = story.side.submit("--job-name=one", "--dependency=singleton", body=DEAF)
    story.order("scontrol", "requeue", first)  # it stands before the others
    story.until(first, "PENDING")
    story.until(first, "RUNNING")
    story.show(second)
    story.order("scancel", second)
    story.show(second)
    story.order("scancel", first)
    story.until(third, "RUNNING")
    story.order("scancel", third)


def refused(story: Story) -> None:
    story.order("scontrol", "show", "job", "--oneliner", "987654")
    story.order("scontrol", "requeue", "987654")
    job = story.side.submit("--hold", body="exit 0")
    story.order("scontrol", "update", f"JobId={job}", "ExcNodeList=nowhere")
    story.order("scontrol", "update", f"JobId={job}", "ExcNodeList=n[0-1]")
    story.order("scontrol", "update", f"JobId={job}", "TimeLimit=00:03:00", "Comment=new")
    story.order("scontrol", "requeue", job)
    story.order("scancel", job)
    story.show(job)
    story.order("scontrol", "update", f"JobId={job}", "TimeLimit=00:02:00")


STORIES: list[Callable[[Story], None]] = [
    requeued,
    cancelled_while_it_is_requeued,
    cancelled,
    requeued_while_it_is_cancelled,
    not_to_be_requeued,
    behind_a_failed_job,
    behind_a_good_job,
    behind_a_cancelled_job,
    singletons,
    refused,
]


@pytest.mark.long
@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_the_slurm_in_memory_answers_as_the_real_one(
    tell: Callable[[Story], None], cluster: TestCluster, tmp_path: Path
) -> None:
    real, memory = Story(RealSide(cluster, tmp_path)), Story(MemorySide(tmp_path))
    tell(real)
    tell(memory)
    both = zip(memory.seen, real.seen, strict=True)
    differing = [f"memory: {ours}\nreal:   {theirs}" for ours, theirs in both if ours != theirs]
    assert not differing, "\n".join(differing)
