"""Slurm jobs that start only if another job fails: `--dependency=afternotok`.

Measured on Slurm 22.05: such a job starts about a second after the other job has ended with an error, was killed, or
was cancelled, even if it was still queued. It keeps waiting while Slurm requeues the other job after the loss of its
node. Slurm cancels it when the other job ends with exit code 0. It can be moved behind another job until it starts. Its
comment holds the job that it waits for, since Slurm forgets the dependency at its start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from relayrun.control.scheduler.base import FallbackOrder, Job
from relayrun.control.scheduler.slurm_commands import BEGIN_FAILED_COMMENT, COMMENT_PREFIX, NoAnswerError
from relayrun.errors import SchedulerError
from relayrun.slurmtime import format_time

FALLBACK_OPTIONS = ("partition", "account", "qos", "reservation", "constraint", "exclude")
"""Options of the chain's jobs that its fallback job always gets: where it may run, and who pays."""

TIME_OPTIONS = ("time", "time-min", "begin", "deadline")
"""Options of the chain's jobs that the fallback job never gets."""


class FallbackCommands(Protocol):
    """The commands of `relayrun.control.scheduler.slurm.Slurm` that fallback jobs use."""

    def ask(self, command: Sequence[str], *, answer: str = "") -> str:
        """Run a command that changes nothing and return its output."""

    def order(self, command: Sequence[str], lines: Sequence[str] = ()) -> str:
        """Run a command that changes something, and may safely run twice; return its output."""

    def jobs_named(self, name: str, *, anyone: bool = False) -> list[Job]:
        """Return the queued and running jobs with this name: this user's, or with `anyone` every user's."""

    def submit_once(self, arguments: Sequence[str], *, name: str, comment: str | None = None) -> str:
        """Queue one job exactly once; return its id."""


class SlurmFallbackJobs:
    """The fallback jobs of a Slurm cluster."""

    def __init__(self, slurm: FallbackCommands) -> None:
        self._slurm = slurm

    def live(self, name: str, *, anyone: bool = False) -> list[Job]:
        return self._slurm.jobs_named(name, anyone=anyone)

    def queue(
        self, script: Path, *, name: str, order: FallbackOrder, options: Mapping[str, str | None], limit: int
    ) -> str:
        time = f"--time={format_time(limit)}"
        first = [f"--job-name={name}", f"--dependency=afternotok:{order.job_id}", "--kill-on-invalid-dep=yes", time]
        small = _option_words({option: options[option] for option in FALLBACK_OPTIONS if options.get(option)})
        whole = _option_words({option: value for option, value in options.items() if option not in TIME_OPTIONS})
        try:  # a partition may require several nodes; without a test, sbatch queues a job that waits for ever
            self._slurm.order(["sbatch", "--test-only", time, *small, str(script)])
            return self._slurm.submit_once([*first, *small, str(script)], name=name, comment=_order_comment(order))
        except NoAnswerError:
            raise
        except SchedulerError:  # a site may require GPUs or several nodes for every job
            return self._slurm.submit_once([*first, *whole, str(script)], name=name, comment=_order_comment(order))

    def move(self, job_id: str, order: FallbackOrder) -> None:
        changes = [f"Dependency=afternotok:{order.job_id}", f"Comment={_order_comment(order)}"]
        self._slurm.order(["scontrol", "update", f"JobId={job_id}", *changes])

    def order(self, job_id: str) -> FallbackOrder:
        text = self._slurm.ask(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%k"]).strip()
        found = _ORDER_COMMENT.fullmatch(text)
        if found is None:
            raise SchedulerError(f"the comment of job {job_id} does not say which job it stands behind: {text!r}")
        return FallbackOrder(job_id=found[1], failed_begins=int(found[2]))

    def count_failed_begins(self, job_id: str, count: int, nodes: str) -> None:
        self._slurm.order(["scontrol", "update", f"JobId={job_id}", f"Comment={BEGIN_FAILED_COMMENT}{count}@{nodes}"])


def _option_words(options: Mapping[str, str | None]) -> list[str]:
    return [f"--{option}" if value is None else f"--{option}={value}" for option, value in options.items()]


_ORDER_COMMENT = re.compile(rf"{COMMENT_PREFIX}starts-only-if-job=(\d+)-fails,failed-begins=(\d+)")


def _order_comment(order: FallbackOrder) -> str:
    return f"{COMMENT_PREFIX}starts-only-if-job={order.job_id}-fails,failed-begins={order.failed_begins}"
