"""Slurm's job states and reasons, up to version 26.05: whether a job with them waits, runs, has ended, or is blocked.

A blocked job never starts unless a person changes something. A word that Slurm may add later is unknown: such a job
counts as one that waits for Slurm or runs, and people see Slurm's word.
"""

from __future__ import annotations

import re
import shlex
from typing import Literal, NamedTuple

ENDED_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT"}
)
RESERVATION_GONE = "RESV_DEL_HOLD"
"""State of a queued job whose reservation ended before the job started: it never starts."""
HELD_STATES = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", RESERVATION_GONE})
"""States of a queued job that Slurm or a person holds."""
WAITING_STATES = HELD_STATES | {"PENDING"}
RUNNING_STATES = frozenset(
    {"COMPLETING", "CONFIGURING", "EXPEDITING", "REQUEUED", "REQUEUE_FED", "RESIZING", "RUNNING", "SIGNALING"}
    | {"STAGE_OUT", "STOPPED", "SUSPENDED"}
)
"""States of a job that has its nodes, receives them, or gives them back."""

ReasonKind = Literal["waits", "budget", "blocked", "ended", "unknown"]
"""Kinds of reasons. `waits`: Slurm starts the job by itself; `budget`: when its account has time again. `blocked`: a
person must change something. `ended`: Slurm itself ended the job for this reason."""


class Reason(NamedTuple):
    """The meaning of one of Slurm's reasons."""

    kind: ReasonKind
    setting: str = ""
    """The setting that the job's request violates."""


_RELEASE, _CHAIN = "release", "dependency"
_TABLE: tuple[tuple[str, Reason], ...] = (
    (
        r"JobHeld(User|Admin)|JobHoldMaxRequeue"
        r"|(launch failed|launch failure limit exceeded|user env retrieval failed|job) requeued (in )?held( state)?",
        Reason("blocked", _RELEASE),
    ),
    (r"Reservation(Deleted|Invalid)|Reservation .* (was deleted|is invalid)", Reason("blocked", "job.reservation")),
    (r"DependencyNeverSatisfied", Reason("blocked", _CHAIN)),
    (r"PartitionTimeLimit|(QOS|Assoc)MaxWallDurationPerJobLimit", Reason("blocked", "job.time")),
    (r"PartitionNodeLimit|(QOS|Assoc)MaxNodePerJob(Limit)?|QOSMinNode", Reason("blocked", "job.nodes")),
    (r"InvalidAccount|AccountNotAllowed", Reason("blocked", "job.account")),
    (r"InvalidQOS|QOSNotAllowed|QOSMin\w+", Reason("blocked", "job.qos")),
    (r"(QOS|Assoc)Max\w+Per(Job|Node)(Limit)?|MaxMemPerLimit|BadConstraints", Reason("blocked", "job.sbatch")),
    (
        r"(QOS|Assoc)Grp(?!\w*Run)\w+Minutes(Limit)?|QOSUsageThreshold|(QOS|Association)TimeLimit|(QOS|Assoc)GrpWallLimit",
        Reason("budget"),
    ),
    (
        r"BootFailure|NodeDown|SystemFailure|JobLaunchFailure|NonZeroExitCode|RaisedSignal|TimeLimit|InactiveLimit|DeadLine"
        r"|OutOfMemory|Reservation .* has ended",
        Reason("ended"),
    ),
    (
        r"Prolog|Priority|Dependency|Resources|Partition(Down|Inactive)|NvidiaImexChannels|BeginTime|Licenses|Reservation"
        r"|(Association|QOS)(Job|Resource)Limit|SchedDefer|Cleaning|JobArrayTaskLimit|BurstBuffer\w+|FedJobLock|Constraints"
        r"|(QOS|Assoc)Grp\w+|(QOS|Assoc)Max\w+|Max\w+PerAccount|Max\w+PerUser|MaxPoweredUpNodes|MpiPortsBusy|FrontEndDown"
        r"|AccountingPolicy|PartitionConfig"
        r"|Block(FreeAction|MaxError)|Power(NotAvail|Reserved)|ReqNodeNotAvail\b.*|Nodes required for job are .*",
        Reason("waits"),
    ),
)


def reason_of(word: str | None) -> Reason:
    """Return the meaning of a job's reason (Slurm's word; spaces may be underscores); no word: the job waits."""
    if not word or word in ("None", "(null)"):
        return Reason("waits")
    text = word.replace("_", " ")
    return next((found for pattern, found in _TABLE if re.fullmatch(pattern, text)), Reason("unknown"))


def never_starts(reason: str | None) -> bool:
    """True if a job with this pending reason never starts unless a person changes something."""
    return reason_of(reason).kind == "blocked"


def is_unknown_state(state: str) -> bool:
    """True if Slurm's word for a job's state is not known."""
    return state.partition(" ")[0] not in ENDED_STATES | WAITING_STATES | RUNNING_STATES


def is_blocked(state: str, reason: str | None) -> bool:
    """True if a job in this state, with this pending reason, never starts unless a person changes something."""
    return state in HELD_STATES or (state == "PENDING" and never_starts(reason))


def is_held_after_launch(state: str, reason: str | None) -> bool:
    """True if Slurm holds a job since its launch failed on a node, as with a failed prolog, which drains the node."""
    return is_blocked(state, reason) and (reason or "").replace("_", " ").startswith("launch failed requeued")


def mending_command(job_id: str, state: str, reason: str | None, *, run: str) -> str:
    """Return the command that lets a blocked job, or another one in its place, start. `run`: the run directory."""
    setting = "job.reservation" if state == RESERVATION_GONE else reason_of(reason).setting
    if setting in ("", _RELEASE):
        return f"scontrol release {job_id}"
    if setting == _CHAIN:
        return f"scontrol update JobId={job_id} Dependency=singleton"
    value = "null" if setting == "job.reservation" else "..."
    again = shlex.join(["relayrun", "resume", run, "--set"])
    return f"{shlex.join(['relayrun', 'cancel', run])} && {again} {setting}={value}"
