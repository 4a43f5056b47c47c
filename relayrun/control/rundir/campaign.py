"""A campaign: several runs and when each of them begins. A sweep is one, the stages of a training are one.

logs/runs/<project>/<name>/          of the campaign; its runs lie beside it, as <name>-<member>
    campaign.json                      its members in order, written once; without it nothing was queued
    lock                               held by whoever begins runs
    members/<member>/begun.json        the first job of a run, by who queued it
    members/<member>/refused.json      that Slurm refused that job, by who tried
    STOP                               nothing more of it begins
<run>/membership.json                to which campaign a run belongs

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from relayrun.control.rundir import checkpoint_records
from relayrun.control.rundir import run as rundir_run
from relayrun.control.rundir.records import Record, foreign_owner
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import read_json, write_atomic, write_json

MEMBERSHIP_NAME = "membership.json"


@dataclass(frozen=True, kw_only=True)
class CampaignMember(Record):
    """A run of a campaign, and what it waits for."""

    name: str
    """`01` in a sweep, the stage's name among stages."""
    run_dir: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What it has of its own, by the names of settings."""
    source: str | None = None
    """The member whose checkpoint it begins with."""
    iteration: int | None = None
    """The iteration of that checkpoint; None: the last one, when `source` is done."""
    after: str | None = None
    """A member that must be done, and hands nothing on."""
    evaluated: bool = False
    """Whether it waits for an evaluation of the checkpoint of `source` too."""
    counts_from_zero: bool = False
    """Whether its iterations are its own: it takes no more than the weights, or has none."""

    @property
    def run(self) -> Run:
        return Run(Path(self.run_dir))


@dataclass(frozen=True, kw_only=True)
class Campaign(Record):
    """`campaign.json`."""

    kind: Literal["sweep", "stages"]
    name: str
    """For people, as project/name."""
    owner: int
    """Number of the user whose jobs they are."""
    scheduler: Literal["slurm", "local"]
    at_once: int | None
    """How many chains there may be at a time; None: as many as there are runs."""
    members: list[CampaignMember]

    @classmethod
    def load(cls, folder: Path) -> Campaign:
        """Read the campaign of a folder. Raises RunDirError where there is none."""
        try:
            entry = read_json(path := folder / "campaign.json")
            others = {owner for each in (folder, path) if (owner := foreign_owner(each)) is not None}
            entry["owner"] = max(others, default=entry["owner"])  # whatever the file says
            return cls.of(entry | {"members": [CampaignMember.of(member) for member in entry["members"]]})
        except FileNotFoundError:
            hint = "submit its config again: nothing of it was queued"
            raise RunDirError("there is no campaign here", where=folder, hint=hint) from None
        except (ValueError, TypeError, KeyError) as error:
            raise RunDirError(f"unreadable record: {error}", where=folder / "campaign.json") from None

    def save(self, folder: Path) -> None:
        """Write it into a folder; from here on it is one."""
        write_json(folder / "campaign.json", asdict(self))

    def member(self, name: str) -> CampaignMember:
        """The member of this name, which there is."""
        return next(member for member in self.members if member.name == name)


@dataclass(frozen=True, kw_only=True)
class MemberStarted(Record):
    """`begun.json`: the first job of a member was queued."""

    job_id: str
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class MemberRefused(Record):
    """`refused.json`: Slurm would not have the first job of a member."""

    reason: str
    time: float
    """Seconds since 1970."""
    tries: int
    """How often it was refused."""


@dataclass(frozen=True, kw_only=True)
class CampaignMembership(Record):
    """`membership.json` of a run."""

    folder: str
    """Directory of the campaign."""
    member: str


def is_campaign(folder: Path) -> bool:
    """Whether a campaign lies in a folder."""
    return os.path.isfile(f"{folder}/campaign.json")


def membership_path(run: Run) -> Path:
    """Where a run says to which campaign it belongs."""
    return run.path / MEMBERSHIP_NAME


def read_membership(run: Run) -> CampaignMembership | None:
    """To which campaign a run belongs; None where to none."""
    return CampaignMembership.read(f"{run.path}/{MEMBERSHIP_NAME}")


def campaign_folders(runs: Iterable[Run]) -> list[Path]:
    """The campaigns that runs belong to, each once; what cannot be read is left out."""
    found: dict[Path, None] = {}
    for run in runs:
        with contextlib.suppress(RunDirError, OSError):
            if (membership := read_membership(run)) is not None:
                found[Path(membership.folder)] = None
    return list(found)


def member_started_path(folder: Path, member: str) -> Path:
    return folder / "members" / member / "begun.json"


def member_refused_path(folder: Path, member: str) -> Path:
    return folder / "members" / member / "refused.json"


def has_member_started(folder: Path, member: CampaignMember) -> bool:
    """Whether the first job of a member was queued, or has begun: a person may have submitted it by hand."""
    return member_started_path(folder, member.name).exists() or member.run.newest_begun() is not None


def waits_for_campaign(run: Run) -> bool:
    """Whether a run belongs to a campaign and waits until it may begin."""
    membership = read_membership(run)
    if membership is None:
        return False
    return not member_started_path(Path(membership.folder), membership.member).exists() and run.newest_begun() is None


def members_that_need(run: Run) -> list[str]:
    """Names of the members that need a run where it lies: they wait for it, or have no checkpoint of their own yet.

    Raises RunDirError and OSError where that cannot be read.
    """
    membership = read_membership(run)
    if membership is None or not is_campaign(folder := Path(membership.folder)):
        return []
    found = []
    for member in Campaign.load(folder).members:
        if membership.member not in (member.source, member.after) or rundir_run.is_stopped(member.run):
            continue
        own = (
            checkpoint_records.is_checkpoint_of(member.run, checkpoint_records.resume_point(member.run))
            if member.source
            else has_member_started(folder, member)
        )
        found += [] if own else [member.name]
    return found


def iterations_held_by_campaign(run: Run) -> set[int]:
    """Iterations whose checkpoints must stay, since members have yet to begin with them.

    One of a member that cannot be read stays. Raises RunDirError where the campaign cannot be read: then nothing is
    removed.
    """
    membership = read_membership(run)
    if membership is None or not is_campaign(folder := Path(membership.folder)):
        return set()
    found = set()
    for member in Campaign.load(folder).members:
        if member.source != membership.member or member.iteration is None:
            continue
        try:
            own = checkpoint_records.is_checkpoint_of(member.run, checkpoint_records.resume_point(member.run))
        except (RunDirError, OSError):
            own = False
        found |= set() if own else {member.iteration}
    return found


def campaign_stop_path(folder: Path) -> Path:
    """The file whose existence keeps members from beginning."""
    return folder / "STOP"


def campaign_stop_reason(folder: Path) -> str | None:
    """Why nothing more begins; None where something may."""
    try:
        return campaign_stop_path(folder).read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        return None


def write_campaign_stop(folder: Path, reason: str) -> None:
    """Keep members from beginning."""
    write_atomic(campaign_stop_path(folder), f"{reason}\n")


@contextlib.contextmanager
def campaign_lock(folder: Path, *, patience: float = 20.0) -> Iterator[bool]:
    """Hold the lock of a campaign, and yield whether it was to be had within `patience` seconds. Raises OSError."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.1)
        yield True
    finally:
        os.close(fd)
