"""Where faults happen: a running chain and the machine that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from relayrun.rundir.run import Run


class Stage(Protocol):
    """What a fault can reach: a running chain and the machine it runs on."""

    run: Run
    commands: Path
    """Folder with the commands of `Fault.commands`, and what they leave there."""

    def wait_iteration(self, iteration: int, *, attempt: int = 1) -> None:
        """Until the attempt has done this iteration."""

    def wait(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Until the condition holds."""

    def rank_pids(self) -> dict[int, int]:
        """Process ids of the ranks by rank."""

    def step_daemons(self) -> list[int]:
        """Process ids of the scheduler's own processes above the ranks."""

    def batch_pid(self) -> int:
        """Process id of the batch script."""

    def job_id(self) -> str:
        """Id of the running job."""

    def command(self, *words: str) -> str:
        """Run a command of the scheduler."""

    def watch_pid(self) -> int:
        """Process id of the supervisor's `watch` beside the ranks."""

    def waiting_jobs(self) -> list[str]:
        """Ids of the chain's pending jobs."""

    def kill_node(self) -> None:
        """End the daemon of the node that rank 1 runs on."""

    def lose_node(self) -> None:
        """End the daemon of the node that the batch script runs on, the batch script, and all that it started."""

    def slow_epilogs(self) -> AbstractContextManager[None]:
        """Inside, a job that has ended stays COMPLETING."""

    def remount(self, option: str) -> None:
        """Mount the file system of `Fault.small_disk` anew, `ro` or `rw`."""

    def stop_controller(self, seconds: float) -> None:
        """Take the controller away for a while; returns when it is back."""

    def hurry(self) -> None:
        """Let a queued successor that waits for its time start now."""
