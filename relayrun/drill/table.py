"""The faults: what is done to a training chain, and how it must end.

`resumed`: the run finishes, and every loss and every tensor is that of the undisturbed run.
`stopped`: the chain ends, says why in STOP, and leaves nothing queued.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from relayrun.rundir.run import Run


class Stage(Protocol):
    """What a fault can reach: a running chain and the machine it runs on."""

    run: Run

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

    def kill_node(self) -> None:
        """End the daemon of the node that rank 1 runs on."""

    def stop_controller(self, seconds: float) -> None:
        """Take the controller away for a while; returns when it is back."""

    def hurry(self) -> None:
        """Let a queued successor that waits for its time start now."""


def nothing(_stage: Stage) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table."""

    name: str
    what: str
    expect: Literal["resumed", "stopped"]
    causes: Sequence[str]
    """How the attempts must end, in order; see `End.cause`. `a|b`: either."""
    act: Callable[[Stage], None] = nothing
    inject: str = ""
    """For `relayrun.drill.inject.Faults`, in every rank."""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Changes of the run config, by section."""
    says: str = ""
    """Must stand in STOP, or in the reasons of the attempts' ends."""
    long: bool = False


def kill_rank(stage: Stage) -> None:
    """Send SIGKILL to rank 1 after iteration 15, when there is a checkpoint to resume from."""
    stage.wait_iteration(15)
    os.kill(stage.rank_pids()[1], signal.SIGKILL)


def kill_batch_script(stage: Stage) -> None:
    """Send SIGKILL to the batch script after iteration 15; the ranks live on."""
    stage.wait_iteration(15)
    os.kill(stage.batch_pid(), signal.SIGKILL)


def kill_guarded_batch_script(stage: Stage) -> None:
    """Send SIGKILL to the batch script once the guard of the first attempt watches over it."""
    guard = stage.run.attempt(1).guard_log
    stage.wait(lambda: guard.exists() and guard.stat().st_size)
    kill_batch_script(stage)


def stop_rank(stage: Stage) -> None:
    """Send SIGSTOP to rank 1 after iteration 15, so that the others hang in their next collective."""
    stage.wait_iteration(15)
    os.kill(stage.rank_pids()[1], signal.SIGSTOP)


def kill_while_staging(stage: Stage) -> None:
    """Send SIGKILL to all ranks between the last byte of the checkpoint of iteration 20 and its publication."""
    staged = stage.run.staging(1) / "iter_0000020"
    stage.wait(lambda: (staged / "metadata.json").exists())
    for pid in stage.rank_pids().values():
        os.kill(pid, signal.SIGKILL)


def cancel(stage: Stage) -> None:
    """Cancel the running job by its id after iteration 15, as its owner would."""
    stage.wait_iteration(15)
    stage.command("scancel", stage.job_id())


def cancel_after_killing_the_batch_script(stage: Stage) -> None:
    """Cancel the running job and kill its batch script, which never sees the cancel."""
    stage.wait_iteration(15)
    job = stage.job_id()
    os.kill(stage.batch_pid(), signal.SIGSTOP)  # it will not see the cancel
    stage.command("scancel", job)
    os.kill(stage.batch_pid(), signal.SIGKILL)


def tear_latest(stage: Stage) -> None:
    """Cut the newest checkpoint short while the job dies, so that the next one finds it torn."""
    stage.wait(lambda: stage.run.checkpoint(20).is_dir())
    victim = max(stage.run.checkpoint(20).glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    for pid in stage.rank_pids().values():
        os.kill(pid, signal.SIGKILL)
    stage.hurry()


def lose_tracker(stage: Stage) -> None:
    """Remove latest_checkpointed_iteration.txt after the first save, and kill rank 0."""
    stage.wait(stage.run.tracker.exists)
    stage.run.tracker.unlink()
    os.kill(stage.rank_pids()[0], signal.SIGKILL)


def overtake(stage: Stage) -> None:
    """Stop the first attempt inside its save, out of Slurm's reach; let it go on beside its successor."""
    staged = stage.run.staging(1) / "iter_0000020"
    stage.wait(lambda: (staged / "metadata.json").exists())
    daemons, zombies = stage.step_daemons(), stage.rank_pids()
    for pid in (*daemons, *zombies.values()):
        os.kill(pid, signal.SIGSTOP)
    os.kill(stage.batch_pid(), signal.SIGKILL)
    stage.wait_iteration(15, attempt=2)
    for pid in (*zombies.values(), *daemons):
        os.kill(pid, signal.SIGCONT)


def fill_disk(stage: Stage) -> None:
    """Leave no room on the disk for the checkpoint of iteration 10; make room again before the end."""
    filler = stage.run.checkpoints / "filler"
    free = shutil.disk_usage(stage.run.checkpoints).free
    filler.write_bytes(b"\0" * max(0, free - 4096))
    stage.wait_iteration(25)
    filler.unlink()


def kill_node(stage: Stage) -> None:
    """End the daemon of a node after iteration 15, as a crash of the whole node does."""
    stage.wait_iteration(15)
    stage.kill_node()


def controller_down_at_submission(stage: Stage) -> None:
    """Take the controller away for 60 s, from before the first successor is queued."""
    stage.stop_controller(60)


def controller_down_at_exit(stage: Stage) -> None:
    """Tell the job to leave after iteration 15, and take the controller away for 60 s meanwhile."""
    stage.wait_iteration(15)
    job = stage.job_id()
    stage.command("scancel", "--signal=USR2", "--batch", job)
    stage.stop_controller(60)


def preempt(stage: Stage) -> None:
    """Submit a job to a partition of higher priority that needs all nodes; return when the second attempt has begun."""
    stage.wait_iteration(15)
    stage.command("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 5", "--output=/dev/null")
    stage.wait(stage.run.attempt(2).begin.exists, 120)


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="rank-killed",
        what="SIGKILL of a rank after a checkpoint",
        expect="resumed",
        causes=("failed", "done"),
        act=kill_rank,
    ),
    Fault(
        name="batch-script-killed",
        what="SIGKILL of the batch script",
        expect="resumed",
        causes=("saved|unknown", "done"),
        act=kill_batch_script,
    ),
    Fault(
        name="batch-script-killed-requeue",
        what="the same in requeue mode",
        expect="resumed",
        causes=("saved|unknown", "done"),
        act=kill_guarded_batch_script,
        config={"chain": {"mode": "requeue"}},
    ),
    Fault(
        name="crash-loop",
        what="an exception before the first step, every time",
        expect="stopped",
        causes=("failed", "failed"),
        inject="crash-at-once",
        config={"chain": {"max_failed_attempts": 2}},
        act=lambda stage: stage.hurry(),
        says="2 attempts in a row without a new durable iteration",
    ),
    Fault(
        name="crash-after-progress",
        what="an exception on all ranks after a checkpoint",
        expect="resumed",
        causes=("failed", "done"),
        inject="crash-at=15",
    ),
    Fault(
        name="loss-nan",
        what="the loss becomes NaN on one rank, training.on_nan: stop",
        expect="stopped",
        causes=("fatal",),
        inject="nan-sample=100",
        says="loss nan, gradient norm nan",
    ),
    Fault(
        name="rank-stopped",
        what="SIGSTOP of a rank",
        expect="resumed",
        causes=("hang", "done"),
        act=stop_rank,
        config={"chain": {"hang_timeout": 5}},
        says="ranks 1 did not answer",
    ),
    Fault(
        name="rank-asleep",
        what="one rank sleeps, the others wait in a collective",
        expect="resumed",
        causes=("hang", "done"),
        inject="sleep-at=15:1",
        config={"chain": {"hang_timeout": 5}},
        says="all ranks answered",
    ),
    Fault(
        name="killed-while-staging",
        what="SIGKILL while .staging holds bytes and no commit",
        expect="resumed",
        causes=("failed", "done"),
        inject="publish-delay=2",
        act=kill_while_staging,
    ),
    Fault(
        name="latest-torn",
        what="the newest checkpoint is torn",
        expect="resumed",
        causes=("failed", "done"),
        act=tear_latest,
    ),
    Fault(
        name="tracker-missing",
        what="latest_checkpointed_iteration.txt is gone",
        expect="resumed",
        causes=("failed", "done"),
        act=lose_tracker,
    ),
    Fault(
        name="module-missing",
        what="a module that no node has",
        expect="stopped",
        causes=("failed", "failed"),
        config={"chain": {"max_failed_attempts": 2}, "cluster": {"modules": ["no/such"]}},
        act=lambda stage: stage.hurry(),
        says="module load no/such failed",
    ),
    Fault(
        name="python-missing",
        what="a Python that no node has",
        expect="stopped",
        causes=("fatal",),
        config={"cluster": {"python": "/no/such/python"}},
        says="/no/such/python is not found on any rank",
    ),
    Fault(
        name="disk-full",
        what="no space during a save, space again later",
        expect="resumed",
        causes=("done",),
        act=fill_disk,
        long=True,
    ),
    Fault(
        name="overtaken",
        what="an attempt stopped inside its save goes on beside its successor",
        expect="resumed",
        causes=("unknown", "done"),
        inject="publish-delay=2",
        act=overtake,
        long=True,
    ),
    Fault(
        name="cancelled",
        what="scancel of the running job",
        expect="stopped",
        causes=("cancelled",),
        act=cancel,
        says="cancelled",
    ),
    Fault(
        name="cancelled-unseen",
        what="scancel while the batch script cannot see it",
        expect="stopped",
        causes=("cancelled",),
        act=cancel_after_killing_the_batch_script,
        says="cancelled",
    ),
    Fault(
        name="preempted",
        what="a job of a higher partition takes the nodes",
        expect="resumed",
        causes=("saved", "done"),
        act=preempt,
        config={"job": {"partition": "low"}},
        long=True,
    ),
    Fault(
        name="preempted-requeue",
        what="the same in requeue mode",
        expect="resumed",
        causes=("saved", "done"),
        act=preempt,
        config={"job": {"partition": "low"}, "chain": {"mode": "requeue"}},
        long=True,
    ),
    Fault(
        name="node-lost",
        what="slurmd of a node killed",
        expect="resumed",
        causes=("saved|failed|unknown", "done"),
        act=kill_node,
        inject="step-delay=1.5",
        long=True,
    ),
    Fault(
        name="controller-down-at-submission",
        what="slurmctld away for 60 s when the successor is queued",
        expect="resumed",
        causes=("done",),
        act=controller_down_at_submission,
        long=True,
    ),
    Fault(
        name="controller-down-at-exit",
        what="slurmctld away for 60 s when the job ends",
        expect="resumed",
        causes=("saved", "done"),
        act=controller_down_at_exit,
        long=True,
    ),
)
"""Long rows wait for Slurm's own clocks."""
