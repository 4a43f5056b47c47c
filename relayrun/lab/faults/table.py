"""The table of faults: for each fault its action on a chain, and the required end of the chain.

`resumed`: the run finishes, and every loss and every tensor equals that of the undisturbed run. `stopped`: the chain
ends, states the reason in STOP, and leaves no job in the queue. Tests and `relayrun drill` read the same table,
`faults.yaml` beside this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

from relayrun.config.compose import yaml_file
from relayrun.errors import SchedulerError
from relayrun.lab.faults.target import ClusterUnderTest


def kill_rank(target: ClusterUnderTest) -> None:
    """Send SIGKILL to rank 1 after iteration 15, when there is a checkpoint to resume from."""
    target.wait_iteration(15)
    target.signal("rank", signal.SIGKILL, 1)


def kill_batch_script(target: ClusterUnderTest) -> None:
    """Send SIGKILL to the batch script after iteration 15; the ranks stay alive."""
    target.wait_iteration(15)
    target.signal("batch", signal.SIGKILL)


def kill_batch_script_under_guard(target: ClusterUnderTest) -> None:
    """Send SIGKILL to the batch script once the guard of the first attempt watches it."""
    guard = target.run.attempt(1).guard_log
    target.wait(lambda: guard.exists() and guard.stat().st_size)
    kill_batch_script(target)


def stop_rank(target: ClusterUnderTest) -> None:
    """Send SIGSTOP to rank 1 after iteration 15, so that the others hang in their next collective."""
    target.wait_iteration(15)
    target.signal("rank", signal.SIGSTOP, 1)


def kill_while_staging(target: ClusterUnderTest) -> None:
    """Send SIGKILL to all ranks between the last byte of the checkpoint of iteration 20 and its publication."""
    staged = target.run.staging(1) / "iter_0000020"
    target.wait(lambda: (staged / "metadata.json").exists())
    target.signal("rank", signal.SIGKILL)


start_next_job_now = ClusterUnderTest.start_successor_now


def cancel(target: ClusterUnderTest) -> None:
    """Cancel the running job by its id after iteration 15, as its owner would."""
    target.wait_iteration(15)
    target.order("scancel", target.job_id())


def cancel_after_killing_the_batch_script(target: ClusterUnderTest) -> None:
    """Cancel the running job and kill its batch script, which never sees the cancel."""
    target.wait_iteration(15)
    job = target.job_id()
    target.signal("batch", signal.SIGSTOP)  # so it does not see the cancel
    target.order("scancel", job)
    with contextlib.suppress(SchedulerError):  # since Slurm 24.11 a cancelled job takes no step
        target.signal("batch", signal.SIGKILL)


def tear_latest(target: ClusterUnderTest) -> None:
    """Truncate the newest checkpoint while the job dies, so that the next job finds it damaged."""
    target.wait(lambda: target.run.checkpoint(20).is_dir())
    victim = max(target.run.checkpoint(20).glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    target.signal("rank", signal.SIGKILL)
    target.require(not target.run.checkpoint(30).exists(), "a newer checkpoint than the torn one was saved meanwhile")
    target.start_successor_now()


def lose_tracker(target: ClusterUnderTest) -> None:
    """Remove latest_checkpointed_iteration.txt after the first save, and kill rank 0."""
    target.wait(target.run.tracker.exists)
    target.run.tracker.unlink()
    target.signal("rank", signal.SIGKILL, 0)


def signal_save_and_exit(target: ClusterUnderTest) -> None:
    """Ask the job to save and exit after iteration 15, as Slurm does before the time limit."""
    target.wait_iteration(15)
    target.order("scancel", "--signal=USR2", "--batch", target.job_id())


def kill_watch(target: ClusterUnderTest) -> None:
    """Kill the watch, and stop a rank."""
    target.wait_iteration(15)
    target.signal("watch", signal.SIGKILL)
    stop_rank(target)


def cancel_successor(target: ClusterUnderTest) -> None:
    """Cancel the waiting job, then ask the running job to exit."""
    target.wait(target.run.attempt(1).successor.exists)
    target.order("scancel", target.waiting_job())
    signal_save_and_exit(target)


def hold_successor(target: ClusterUnderTest) -> None:
    """Hold the waiting job; release it when the attempt has failed and the job is still held."""
    target.wait(target.run.attempt(1).successor.exists)
    waiting = target.waiting_job()
    target.order("scontrol", "hold", waiting)
    target.wait(target.run.attempt(1).end.exists)
    target.wait(lambda: list(target.jobs()) == [waiting])
    target.require("Reason=JobHeld" in target.ask("scontrol", "show", "job", waiting), "the waiting job is not held")
    target.order("scontrol", "release", waiting)
    target.start_successor_now()


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    what: str
    causes: Sequence[str]
    """Required causes of the attempts' ends, in order; see `AttemptEnd.cause`. `a|b`: either."""
    act: Callable[[ClusterUnderTest], None] = lambda target: None
    """Called when the first attempt has begun."""
    _: KW_ONLY
    inject: str = ""
    """Faults for `relayrun.lab.faults.injection.FaultInjectionHook`, in every rank."""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Changes of the run config, by section."""
    says: str = ""
    """Required text in STOP, or in the reasons of the attempts' ends."""
    logged: str = ""
    """Required text in the jobs' logs."""
    long: bool = True
    """The test waits for Slurm's own timers."""

    @property
    def expect(self) -> Literal["resumed", "stopped"]:
        """The required end of the chain, which follows from the last cause."""
        return "resumed" if self.causes[-1] == "done" else "stopped"


TABLE = Path(__file__).with_name("faults.yaml")
UNDISTURBED = Fault("undisturbed", "nothing: what the others are compared with", ("done",))
"""The run without a fault."""


def read_faults(path: Path, actions: Mapping[str, Any], *, kind: type[Fault] = Fault) -> tuple[Fault, ...]:
    """Return the faults of a table, whose `act` names one of `actions`. Raises ConfigError, KeyError."""

    def fault(name: str, what: str, causes: Sequence[str], **others: Any) -> Fault:
        own = {"act": actions[others["act"]]} if "act" in others else {}
        return kind(name, what, tuple(causes), **others | own)

    return tuple(fault(name, **values) for name, values in yaml_file.read_yaml(path).values.items())


FAULTS = read_faults(TABLE, globals())
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
