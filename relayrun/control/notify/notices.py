"""Notices: messages to people about a run, and the state of their delivery. Standard library only.

notices/policy.json              recipients and their events, by the newest submit
notices/stopped-1f2e3d4c.json    one notice; its name follows from its event, so that it is written once
notices/stopped-1f2e3d4c.tried   its delivery by target, written by the process that sends
notices/stopped-1f2e3d4c.told    the same, once nothing is left to do
notices/sender-0000017           the process that sends; the highest number counts
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import names_in, write_atomic

NOTICE_EVENTS = ("stopped", "failed", "hang", "stalled", "anomaly", "disk", "node", "done", "evaluation")
"""Subjects of notices."""

NOTICE_POLICY_NAME = "notices/policy.json"

QUIET_SECONDS = 3600.0
"""A target gets one message per cause in this time; further notices are counted."""
KEEP_SECONDS = 7 * 86400.0
"""A notice that could not be sent for this time is given up."""
MAX_NOTICES = 500
"""Maximum number of notices of a run; further ones wait until some are sent."""
MAX_SENT_NOTICES = 200
"""Number of newest sent notices that are kept."""
MAX_WORDS = 3000
"""Maximum characters of any text in a notice."""
SENDER_LOCK_SECONDS = 180.0
"""Seconds after which a process that sends has certainly gone."""


@dataclass(frozen=True, kw_only=True)
class NoticeTarget(Record):
    """A recipient of notices."""

    name: str
    url: str | None = None
    """Address in apprise's form; `${VARIABLE}` is filled in from the environment of the sender."""
    command: list[str] = field(default_factory=list)
    """The user's own program, instead of a URL."""
    events: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class NoticePolicy(Record):
    """`policy.json`: recipients and their events, by the newest submit. It holds no secret."""

    run: str
    """Project and name."""
    cluster: str
    since: float
    """Time of that submit in seconds since 1970; earlier events are old."""
    targets: list[dict[str, object]]
    """A `NoticeTarget` each."""
    failed_attempts: int
    """Attempts in a row without a new checkpoint that are an event."""
    no_progress: float
    """Seconds of jobs without a new checkpoint that are an event."""
    disk_checkpoints: int
    """Room for fewer checkpoints than this on the disk is an event; 0: never."""
    program: list[str]
    """Command of the sender; the run directory is appended."""

    def every_target(self) -> list[NoticeTarget]:
        """Return the targets. Raises TypeError if one is invalid."""
        return [NoticeTarget.of(entry) for entry in self.targets]

    def wants(self, event: str) -> bool:
        """Return whether any target gets this event."""
        return any(event in target.events for target in self.every_target())


@dataclass(frozen=True, kw_only=True)
class Notice(Record):
    """A message to people about one event."""

    id: str
    """Follows from the event: whoever sees it writes the same notice."""
    event: str
    cause: str
    """Notices of one cause are sent once an hour."""
    time: float
    """Time of its observation in seconds since 1970."""
    reason: str
    """The event in one line."""
    words: str = ""
    """Further lines: the end of a log."""
    attempt: int | None = None
    job_id: str | None = None
    nodes: str | None = None
    iteration: int | None = None
    total_steps: int | None = None
    durable_iteration: int | None = None
    log: str | None = None
    """The job's log."""
    go_on: str | None = None
    """The command that continues the run."""
    count: int = 1
    """Number of occurrences."""


DeliveryState = Literal["waits", "sent", "counted", "old"]
"""State of a notice at one target: not yet sent; sent; counted in a later message; given up."""


@dataclass(frozen=True, kw_only=True)
class NoticeDelivery(Record):
    """`ID.tried` and `ID.told`: the delivery of a notice."""

    cause: str
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By target: state (`DeliveryState`), time of the last try, number of tries, and the last error."""

    def state(self, target: str) -> DeliveryState:
        return cast(DeliveryState, self.targets.get(target, {}).get("state", "waits"))

    def last(self, target: str) -> float:
        """Return the time of the last try, in seconds since 1970; 0 before the first."""
        return float(self.targets.get(target, {}).get("time", 0.0))

    def tries(self, target: str) -> int:
        return int(self.targets.get(target, {}).get("tries", 0))

    def reason(self, target: str) -> str:
        """Return the error of the last try; empty without one."""
        return str(self.targets.get(target, {}).get("reason", ""))

    def note(self, target: str, state: DeliveryState, *, now: float, reason: str = "", tried: bool = False) -> None:
        """Set the state at one target. `tried`: this begins another try."""
        tries = self.tries(target) + tried
        self.targets[target] = {"state": state, "time": now, "tries": tries, "reason": reason[:MAX_WORDS]}


@dataclass(frozen=True, kw_only=True)
class NoticeMessage:
    """One message to one target."""

    target: NoticeTarget
    notice: Notice
    """The newest notice of its cause."""
    settles: list[str]
    """Ids of all notices that it reports."""
    count: int
    """Number of occurrences in all of them."""
    since: float
    """Time of the first of them."""


def read_trusted_notice_policy(run: Run) -> NoticePolicy | None:
    """Return the policy for sending. Raises RunDirError if it is damaged or not trusted."""
    return NoticePolicy.read_trusted(run.path, NOTICE_POLICY_NAME)


def write_notice_policy(run: Run, policy: NoticePolicy) -> None:
    """Set the recipients from now on."""
    run.notices.mkdir(exist_ok=True)
    policy.write(run.notice_policy)


def known_notices(run: Run) -> dict[str, set[str]]:
    """Return, by notice id, the suffixes of its files (`json`, `tried`, `told`)."""
    found: dict[str, set[str]] = {}
    for name in names_in(run.notices):
        stem, dot, suffix = name.rpartition(".")
        if dot and stem.partition("-")[0] in NOTICE_EVENTS and suffix in ("json", "tried", "told"):
            found.setdefault(stem, set()).add(suffix)
    return found


def add_notice(run: Run, notice: Notice, there: Mapping[str, set[str]]) -> bool:
    """Write a notice unless it exists or there are too many; return whether it was written. Raises OSError. `there`:
    result of `known_notices`."""
    if notice.id in there or len(there) >= MAX_NOTICES:
        return False
    short = {
        name: value if len(value) <= MAX_WORDS else value[: MAX_WORDS - 3] + "..."
        for name, value in vars(notice).items()
        if isinstance(value, str) and name != "id"
    }
    Notice(**{**vars(notice), **short}).write(run.notices / f"{notice.id}.json")
    return True


def pending_notices(run: Run) -> list[tuple[Notice, NoticeDelivery]]:
    """Return the notices that are not settled, oldest first, with their delivery; damaged ones are left out."""
    found = []
    for name, suffixes in known_notices(run).items():
        if "json" not in suffixes or "told" in suffixes:
            continue
        with contextlib.suppress(RunDirError):
            notice = Notice.read(run.notices / f"{name}.json")
            delivery = None
            with contextlib.suppress(RunDirError):
                delivery = NoticeDelivery.read(run.notices / f"{name}.tried")
            if notice is not None:
                found.append((notice, delivery or NoticeDelivery(cause=notice.cause)))
    return sorted(found, key=lambda entry: (entry[0].time, entry[0].id))


def last_sent_times(
    run: Run, waiting: Iterable[tuple[Notice, NoticeDelivery]], *, now: float
) -> dict[tuple[str, str], float]:
    """Return the recent times at which each target was last told of each cause, by (target, cause)."""
    deliveries = [delivery for _, delivery in waiting]
    for name, suffixes in known_notices(run).items():
        path = run.notices / f"{name}.told"
        with contextlib.suppress(FileNotFoundError, RunDirError):
            if "told" in suffixes and now - path.stat().st_mtime < 2 * QUIET_SECONDS:
                deliveries += filter(None, [NoticeDelivery.read(path)])
    found: dict[tuple[str, str], float] = {}
    for delivery in deliveries:
        for target in delivery.targets:
            if delivery.state(target) == "sent":
                key = (target, delivery.cause)
                found[key] = max(found.get(key, 0.0), delivery.last(target))
    return found


def due_messages(
    targets: Sequence[NoticeTarget],
    waiting: Sequence[tuple[Notice, NoticeDelivery]],
    told: Mapping[tuple[str, str], float],
    *,
    now: float,
) -> list[NoticeMessage]:
    """Return the due messages, oldest first: one per cause and target, none in the target's quiet hour."""
    messages = []
    for target in targets:
        causes: dict[str, list[Notice]] = {}
        for notice, delivery in waiting:
            wanted = notice.event in target.events and delivery.state(target.name) == "waits"
            if wanted and now - notice.time <= KEEP_SECONDS:
                causes.setdefault(notice.cause, []).append(notice)
        for cause, same in causes.items():
            if now - told.get((target.name, cause), -math.inf) >= QUIET_SECONDS:
                newest, times = max(same, key=lambda notice: notice.time), [notice.time for notice in same]
                ids, count = [notice.id for notice in same], sum(notice.count for notice in same)
                message = NoticeMessage(target=target, notice=newest, settles=ids, count=count, since=min(times))
                messages.append(message)
    return sorted(messages, key=lambda message: message.notice.time)


def must_wait_for_retry(
    message: NoticeMessage, waiting: Sequence[tuple[Notice, NoticeDelivery]], *, now: float
) -> bool:
    """Return whether a job must not retry yet: each failed try doubles the pause, from a minute up to an hour."""
    delivery = next(delivery for notice, delivery in waiting if notice.id == message.notice.id)
    tries = delivery.tries(message.target.name)
    pause = min(60.0 * 2 ** (tries - 1), QUIET_SECONDS) if tries else 0.0
    return now - delivery.last(message.target.name) < pause


def record_delivery(run: Run, notice: Notice, delivery: NoticeDelivery, targets: Sequence[NoticeTarget]) -> None:
    """Write the delivery of a notice; it is settled if no target waits for it. Raises OSError."""
    path = run.notices / f"{notice.id}.tried"
    delivery.write(path)
    waits = [t for t in targets if notice.event in t.events and delivery.state(t.name) == "waits"]
    if not waits:
        os.replace(path, path.with_suffix(".told"))


def remove_old_notices(run: Run) -> None:
    """Remove the oldest sent notices. Only the process that sends calls it."""
    told = [name for name, suffixes in known_notices(run).items() if "told" in suffixes]
    age = {name: (run.notices / f"{name}.told").stat().st_mtime for name in told}
    for name in sorted(told, key=lambda name: age[name])[: max(0, len(told) - MAX_SENT_NOTICES)]:
        for suffix in ("json", "told"):  # a notice without .told would be told again
            (run.notices / f"{name}.{suffix}").unlink(missing_ok=True)


def take_sender_lock(run: Run, *, now: float) -> Path | None:
    """Make this process the only sender; return None if another one sends. `release_sender_lock` releases it.

    The lock is a file with the highest number, which only one process can make; a killed process loses it after
    SENDER_LOCK_SECONDS. File systems differ in their own locks.
    """
    turns = _sender_locks(run)
    newest = turns[-1] if turns else None
    if newest is not None and not _is_sender_lock_free(newest, now):
        return None
    number = int(newest.name.rpartition("-")[2]) + 1 if newest is not None else 1
    own = run.notices / f"sender-{number:07}"
    try:
        with open(own, "x", encoding="utf-8") as file:
            json.dump({"time": now, "host": os.uname().nodename, "pid": os.getpid()}, file)
    except FileExistsError:
        return None
    if _sender_locks(run)[-1] != own:  # what was read above was old already
        own.unlink(missing_ok=True)
        return None
    for older in turns:
        older.unlink(missing_ok=True)
    return own


def release_sender_lock(own: Path) -> None:
    """Let other processes send. The file stays, so that the next number is higher."""
    with contextlib.suppress(OSError):
        write_atomic(own, "{}\n", durable=False)


def is_time_to_send(run: Run, policy: NoticePolicy, *, now: float, again_and_again: bool = False) -> bool:
    """Return whether a message is due, and no other process sends now. Raises OSError, RunDirError. `again_and_again`:
    the caller asks every few minutes, so that failed messages wait longer each time."""
    waiting = pending_notices(run)
    if not waiting or not all(_is_sender_lock_free(turn, time.time()) for turn in _sender_locks(run)[-1:]):
        return False
    messages = due_messages(policy.every_target(), waiting, last_sent_times(run, waiting, now=now), now=now)
    return any(not (again_and_again and must_wait_for_retry(message, waiting, now=now)) for message in messages)


def _sender_locks(run: Run) -> list[Path]:
    return sorted(run.notices.glob("sender-*"), key=lambda path: (len(path.name), path.name))


def _is_sender_lock_free(turn: Path, now: float) -> bool:
    """Return whether the process has released the lock, or has certainly gone."""
    try:
        value = json.loads(turn.read_text(encoding="utf-8"))
        return "time" not in value or now - float(value["time"]) > SENDER_LOCK_SECONDS
    except FileNotFoundError:
        return True
    except (ValueError, TypeError):  # it was killed, or the disk full, before it could say when
        with contextlib.suppress(FileNotFoundError):
            return now - turn.stat().st_mtime > SENDER_LOCK_SECONDS
        return True
