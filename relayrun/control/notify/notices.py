"""Notices: what somebody is to be told of a run, and what became of telling it. Standard library only.

notices/policy.json              who is told of what, by the newest submit
notices/stopped-1f2e3d4c.json    one notice; its name follows from what happened, so that it is written once
notices/stopped-1f2e3d4c.tried   what became of it, target by target, by the process whose turn it is to send
notices/stopped-1f2e3d4c.told    the same, once nothing is left to do
notices/sender-0000017           whose turn it is; the highest number counts
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
from typing import Literal

from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import write_atomic

NOTICE_EVENTS = ("stopped", "failed", "hang", "stalled", "anomaly", "disk", "node", "done", "evaluation")
"""What a notice can be about."""

NOTICE_POLICY_NAME = "notices/policy.json"

QUIET_SECONDS = 3600.0
"""A target is told of one cause at most once in so many seconds; what comes meanwhile is counted."""
KEEP_SECONDS = 7 * 86400.0
"""A notice that could not be sent for so long is given up."""
MAX_NOTICES = 500
"""Notices of a run at most; what comes on top waits until some are told."""
MAX_SENT_NOTICES = 200
"""Notices that stay, the newest, once they are told."""
MAX_WORDS = 3000
"""Characters at most of any text in a notice."""
SENDER_LOCK_SECONDS = 180.0
"""After so long a process that sends has certainly gone."""


@dataclass(frozen=True, kw_only=True)
class NoticeTarget(Record):
    """Who is told."""

    name: str
    url: str | None = None
    """Where to, as apprise writes it; `${VARIABLE}` stands for what the environment says when it is sent."""
    command: list[str] = field(default_factory=list)
    """The user's own program, instead of a URL."""
    events: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class NoticePolicy(Record):
    """`policy.json`: who is told of what, as the newest submit says. Nothing in it is secret."""

    run: str
    """Project and name."""
    cluster: str
    since: float
    """When that was submitted, in seconds since 1970: what happened before is old."""
    targets: list[dict[str, object]]
    """A `NoticeTarget` each."""
    failed_attempts: int
    """Attempts in a row without a new durable iteration of which somebody is told."""
    no_progress: float
    """Seconds without a new durable iteration, while jobs run, of which somebody is told."""
    disk_checkpoints: int
    """Somebody is told when the disk has room for fewer checkpoints than this; 0: never."""
    program: list[str]
    """What sends the notices of the run directory that is named behind it."""

    def every_target(self) -> list[NoticeTarget]:
        """The targets. Raises TypeError where one is none."""
        return [NoticeTarget.of(entry) for entry in self.targets]

    def wants(self, event: str) -> bool:
        """Whether anybody is told of such an event."""
        return any(event in target.events for target in self.every_target())


@dataclass(frozen=True, kw_only=True)
class Notice(Record):
    """What somebody is to be told."""

    id: str
    """Follows from what happened: who sees the same thing writes the same notice."""
    event: str
    cause: str
    """Notices of one cause are told once an hour."""
    time: float
    """When it was seen, in seconds since 1970."""
    reason: str
    """What happened, in one line."""
    words: str = ""
    """More of it: the last lines of a log."""
    attempt: int | None = None
    job_id: str | None = None
    nodes: str | None = None
    iteration: int | None = None
    total_steps: int | None = None
    durable_iteration: int | None = None
    log: str | None = None
    """The job's log."""
    go_on: str | None = None
    """The command that goes on."""
    count: int = 1
    """How often it happened."""


DeliveryState = Literal["waits", "sent", "counted", "old"]
"""What became of a notice at one target: not yet sent; sent; told as a number in a later one; given up."""


@dataclass(frozen=True, kw_only=True)
class NoticeDelivery(Record):
    """`ID.tried` and `ID.told`: what became of a notice."""

    cause: str
    targets: dict[str, dict[str, object]] = field(default_factory=dict)
    """By target: state (`DeliveryState`), time of the last try, number of tries, and why it failed."""

    def state(self, target: str) -> DeliveryState:
        return self.targets.get(target, {}).get("state", "waits")  # type: ignore[return-value]

    def last(self, target: str) -> float:
        """When it was last tried, in seconds since 1970; 0: never."""
        return float(str(self.targets.get(target, {}).get("time", 0.0)))

    def tries(self, target: str) -> int:
        return int(str(self.targets.get(target, {}).get("tries", 0)))

    def reason(self, target: str) -> str:
        """Why the last try failed; empty where it did not, or there was none."""
        return str(self.targets.get(target, {}).get("reason", ""))

    def note(self, target: str, state: DeliveryState, *, now: float, reason: str = "", tried: bool = False) -> None:
        """Change what became of it at one target. `tried`: this begins another try."""
        tries = self.tries(target) + tried
        self.targets[target] = {"state": state, "time": now, "tries": tries, "reason": reason[:MAX_WORDS]}


@dataclass(frozen=True, kw_only=True)
class NoticeMessage:
    """What one target is to be told now."""

    target: NoticeTarget
    notice: Notice
    """The newest one of its cause."""
    settles: list[str]
    """Ids of the notices that are told with it, its own included."""
    count: int
    """How often it happened, with all that was not told yet."""
    since: float
    """When it happened first, of these."""


def notices_folder(run: Run) -> Path:
    return run.path / "notices"


def read_notice_policy(run: Run) -> NoticePolicy | None:
    """Who is told of what; None where nobody is. Raises RunDirError where the record is damaged."""
    return NoticePolicy.read(f"{run.path}/{NOTICE_POLICY_NAME}")


def read_trusted_notice_policy(run: Run) -> NoticePolicy | None:
    """Read the policy in order to send by it. Raises RunDirError where it is damaged or another user's file."""
    return NoticePolicy.read_own(notice_policy_path(run))


def notice_policy_path(run: Run) -> Path:
    return run.path / NOTICE_POLICY_NAME


def write_notice_policy(run: Run, policy: NoticePolicy) -> None:
    """Say who is told of what from now on."""
    notices_folder(run).mkdir(exist_ok=True)
    policy.write(notice_policy_path(run))


def known_notices(run: Run) -> dict[str, set[str]]:
    """Suffixes of the files that there are (`json`, `tried`, `told`) by the id of their notice."""
    found: dict[str, set[str]] = {}
    try:
        names = os.listdir(notices_folder(run))
    except FileNotFoundError:
        return {}
    for name in names:
        stem, dot, suffix = name.rpartition(".")
        if dot and stem.partition("-")[0] in NOTICE_EVENTS and suffix in ("json", "tried", "told"):
            found.setdefault(stem, set()).add(suffix)
    return found


def add_notice(run: Run, notice: Notice, there: Mapping[str, set[str]]) -> bool:
    """Write a notice, unless it is there already or there are too many; return whether it was. `there`: see
    `known_notices`.

    Raises OSError where it cannot be written.
    """
    if notice.id in there or len(there) >= MAX_NOTICES:
        return False
    short = {
        name: value if len(value) <= MAX_WORDS else value[: MAX_WORDS - 3] + "..."
        for name, value in vars(notice).items()
        if isinstance(value, str) and name != "id"
    }
    Notice(**{**vars(notice), **short}).write(notices_folder(run) / f"{notice.id}.json")
    return True


def pending_notices(run: Run) -> list[tuple[Notice, NoticeDelivery]]:
    """What is not told yet, oldest first, and what became of it up to now. A damaged notice is left out."""
    found = []
    for name, suffixes in known_notices(run).items():
        if "json" not in suffixes or "told" in suffixes:
            continue
        with contextlib.suppress(RunDirError):
            notice = Notice.read(notices_folder(run) / f"{name}.json")
            if notice is not None:
                found.append((notice, _delivery(run, notice)))
    return sorted(found, key=lambda entry: (entry[0].time, entry[0].id))


def _delivery(run: Run, notice: Notice) -> NoticeDelivery:
    try:
        found = NoticeDelivery.read(notices_folder(run) / f"{notice.id}.tried")
    except RunDirError:
        found = None
    return found or NoticeDelivery(cause=notice.cause)


def last_sent_times(
    run: Run, waiting: Iterable[tuple[Notice, NoticeDelivery]], *, now: float
) -> dict[tuple[str, str], float]:
    """When each target was last told of each cause, where that was lately; by (target, cause)."""
    deliveries = [delivery for _, delivery in waiting]
    for name, suffixes in known_notices(run).items():
        path = notices_folder(run) / f"{name}.told"
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
    """What each target is to be told now, in order of time: one message a cause, and none in its quiet hour."""
    messages = []
    for target in targets:
        causes: dict[str, list[Notice]] = {}
        for notice, delivery in waiting:
            wanted = notice.event in target.events and delivery.state(target.name) == "waits"
            if wanted and now - notice.time <= KEEP_SECONDS:
                causes.setdefault(notice.cause, []).append(notice)
        for cause, notices in causes.items():
            if now - told.get((target.name, cause), -math.inf) < QUIET_SECONDS:
                continue
            newest = max(notices, key=lambda notice: notice.time)
            messages.append(
                NoticeMessage(
                    target=target,
                    notice=newest,
                    settles=[notice.id for notice in notices],
                    count=sum(notice.count for notice in notices),
                    since=min(notice.time for notice in notices),
                )
            )
    return sorted(messages, key=lambda message: message.notice.time)


def must_wait_for_retry(
    message: NoticeMessage, waiting: Sequence[tuple[Notice, NoticeDelivery]], *, now: float
) -> bool:
    """Whether a job leaves a message alone for now: each failed try doubles the pause from a minute up to an hour."""
    delivery = next(delivery for notice, delivery in waiting if notice.id == message.notice.id)
    tries = delivery.tries(message.target.name)
    pause = min(60.0 * 2 ** (tries - 1), QUIET_SECONDS) if tries else 0.0
    return now - delivery.last(message.target.name) < pause


def record_delivery(run: Run, notice: Notice, delivery: NoticeDelivery, targets: Sequence[NoticeTarget]) -> None:
    """Write what became of a notice; it is settled where no target waits for it. Raises OSError."""
    path = notices_folder(run) / f"{notice.id}.tried"
    delivery.write(path)
    waits = [t for t in targets if notice.event in t.events and delivery.state(t.name) == "waits"]
    if not waits:
        os.replace(path, path.with_suffix(".told"))


def remove_old_notices(run: Run) -> None:
    """Remove the oldest notices that are told, and keep the newest ones. By the process whose turn it is."""
    told = [name for name, suffixes in known_notices(run).items() if "told" in suffixes]
    age = {name: (notices_folder(run) / f"{name}.told").stat().st_mtime for name in told}
    for name in sorted(told, key=lambda name: age[name])[: max(0, len(told) - MAX_SENT_NOTICES)]:
        for suffix in ("json", "told"):  # a notice without .told would be told again
            (notices_folder(run) / f"{name}.{suffix}").unlink(missing_ok=True)


def take_sender_lock(run: Run, *, now: float) -> Path | None:
    """Make this process the only one that sends; None where another one is. Give it back with `release_sender_lock`.

    A turn is a file that one process alone can make, with a number above all others; one that was killed loses its turn
    after TURN_SECONDS. No lock of the file system is needed, which sites mount in different ways.
    """
    turns = _sender_locks(run)
    newest = turns[-1] if turns else None
    if newest is not None and not _is_sender_lock_free(newest, now):
        return None
    number = int(newest.name.rpartition("-")[2]) + 1 if newest is not None else 1
    own = notices_folder(run) / f"sender-{number:07}"
    try:
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return None
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump({"time": now, "host": os.uname().nodename, "pid": os.getpid()}, file)
    if _sender_locks(run)[-1] != own:  # what was read above was old already
        own.unlink(missing_ok=True)
        return None
    for older in turns:
        older.unlink(missing_ok=True)
    return own


def release_sender_lock(own: Path) -> None:
    """Let others send. The file stays, so that the next number is a higher one."""
    with contextlib.suppress(OSError):
        write_atomic(own, "{}\n", durable=False)


def is_time_to_send(run: Run, policy: NoticePolicy, *, now: float, again_and_again: bool = False) -> bool:
    """Whether something is due, and no other process sends now.

    `again_and_again`: who asks does so every few minutes, so that what failed a moment ago is left alone for longer and
    longer. Raises OSError, and RunDirError for a damaged record.
    """
    waiting = pending_notices(run)
    if not waiting or is_being_sent(run):
        return False
    messages = due_messages(policy.every_target(), waiting, last_sent_times(run, waiting, now=now), now=now)
    return any(not (again_and_again and must_wait_for_retry(message, waiting, now=now)) for message in messages)


def is_being_sent(run: Run) -> bool:
    """Whether a process sends now."""
    turns = _sender_locks(run)
    return bool(turns) and not _is_sender_lock_free(turns[-1], time.time())


def _sender_locks(run: Run) -> list[Path]:
    return sorted(notices_folder(run).glob("sender-*"), key=lambda path: (len(path.name), path.name))


def _is_sender_lock_free(turn: Path, now: float) -> bool:
    """Whether the process whose turn it was has given it back, or has certainly gone."""
    try:
        text = turn.read_text(encoding="utf-8")
        value = json.loads(text)
        return "time" not in value or now - float(value["time"]) > SENDER_LOCK_SECONDS
    except FileNotFoundError:
        return True
    except (ValueError, TypeError):  # it was killed, or the disk full, before it could say when
        with contextlib.suppress(FileNotFoundError):
            return now - turn.stat().st_mtime > SENDER_LOCK_SECONDS
        return True
