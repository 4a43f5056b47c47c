"""A campaign: several runs, and the condition under which each starts. A sweep is one, the stages of a training too.

logs/runs/<project>/<name>/          of the campaign; its runs lie beside it, as <name>-<member>
    campaign.json                      its members in order, and its budget if that was changed; without it no run is
                                       queued
    lock                               held by the process that starts runs
    members/<member>/begun.json        the first job of a run, by the process that queued it
    members/<member>/refused.json      Slurm's refusal of that job, by the process that tried
    STOP                               no further member starts
<run>/membership.json                the campaign of a run

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from relayrun.config.sections.batch_systems import batch_system
from relayrun.config.sections.chain import ChainSection
from relayrun.config.sections.dataclass_section import read_section
from relayrun.control.rundir import checkpoint_records
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run, is_stopped
from relayrun.errors import RunDirError
from relayrun.files import write_atomic
from relayrun.trust import read_owned, refuse_untrusted, write_owned

MEMBERSHIP_NAME = "membership.json"


@dataclass(frozen=True, kw_only=True)
class CampaignMember(Record):
    """A run of a campaign, and the condition for its start."""

    name: str
    """`01` in a sweep, the stage's name among stages."""
    run_dir: str
    settings: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    """The member whose checkpoint it starts from."""
    iteration: int | None = None
    """The iteration of that checkpoint; None: the last one, when `source` is done."""
    after: str | None = None
    """A member that must be done, and whose checkpoint is not used."""
    counts_from_zero: bool = False
    """Its iterations start at 0: it takes only the weights of the checkpoint, or has none."""

    @property
    def run(self) -> Run:
        return Run(Path(self.run_dir))


@dataclass(frozen=True, kw_only=True)
class Campaign(Record):
    """`campaign.json`."""

    kind: Literal["sweep", "stages"]
    name: str
    """For people, as project/name."""
    owner: int | None
    """User id of the owner of its jobs; None: this is a copy."""
    scheduler: str
    """A key of `BATCH_SYSTEMS`."""
    at_once: int | None
    """Maximum number of chains at a time; None: no maximum."""
    members: list[CampaignMember]
    budget: dict[str, Any] = field(default_factory=dict)
    """Settings of `chain` that limit all runs together, as far as its owner has changed them since the submit."""

    @classmethod
    def load(cls, folder: Path) -> Campaign:
        """Read the campaign of a folder. Raises RunDirError if there is none."""
        try:
            entry = read_owned(folder, "campaign.json")
            batch_system(entry["scheduler"])
            read_section(ChainSection, entry.get("budget", {}), "budget")
            return cls.of(entry | {"members": [CampaignMember.of(member) for member in entry["members"]]})
        except FileNotFoundError:
            hint = "submit its config again: nothing of it was queued"
            raise RunDirError("there is no campaign here", where=folder, hint=hint) from None
        except (ValueError, TypeError, KeyError) as error:
            raise RunDirError(f"unreadable record: {error}", where=folder / "campaign.json") from None

    @classmethod
    def load_trusted(cls, folder: Path) -> Campaign:
        """Read a campaign whose members this process starts. Raises UntrustedError too."""
        refuse_untrusted(folder, ["campaign.json", "members"])
        return cls.load(folder)

    def save(self, folder: Path) -> None:
        """Write the record into a folder, which makes the folder a campaign."""
        write_owned(folder / "campaign.json", asdict(self))

    def member(self, name: str) -> CampaignMember:
        """Return the member with this name, which must exist."""
        return next(member for member in self.members if member.name == name)


@dataclass(frozen=True, kw_only=True)
class MemberStarted(Record):
    """`begun.json`: the first job of a member was queued. `time` is seconds since 1970."""

    job_id: str
    time: float


@dataclass(frozen=True, kw_only=True)
class MemberRefused(Record):
    """`refused.json`: Slurm refused the first job of a member `tries` times. `time` is seconds since 1970."""

    reason: str
    time: float
    tries: int


@dataclass(frozen=True, kw_only=True)
class CampaignMembership(Record):
    """`membership.json` of a run."""

    folder: str
    member: str


def is_campaign(folder: Path | str) -> bool:
    """Return whether a folder is a campaign."""
    return os.path.isfile(f"{folder}/campaign.json")


def membership_path(run: Run) -> Path:
    """Return the path of a run's membership.json."""
    return run.path / MEMBERSHIP_NAME


def read_membership(run: Run) -> CampaignMembership | None:
    """Return the membership of a run; None if it belongs to no campaign."""
    return CampaignMembership.read(f"{run.path}/{MEMBERSHIP_NAME}")


def own_campaign(run: Run, *, owner: int | None) -> tuple[Path, Campaign, CampaignMember] | None:
    """Return the directory and record of a run's campaign, and the run in it; None without one that `owner` owns."""
    with contextlib.suppress(RunDirError, OSError, StopIteration):
        if (membership := read_membership(run)) is not None:
            whole = Campaign.load(Path(membership.folder))
            return (Path(membership.folder), whole, whole.member(membership.member)) if whole.owner == owner else None
    return None


def campaign_folders(runs: Iterable[Run]) -> list[Path]:
    """Return the campaigns of these runs, each once; unreadable memberships are left out."""
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
    """Return whether the first job of a member was queued, or has begun: a person may have submitted it by hand."""
    return member_started_path(folder, member.name).exists() or member.run.newest_begun() is not None


def waits_for_campaign(run: Run) -> bool:
    """Return whether a run belongs to a campaign and waits until it may start."""
    membership = read_membership(run)
    if membership is None:
        return False
    return not member_started_path(Path(membership.folder), membership.member).exists() and run.newest_begun() is None


def members_that_need(run: Run) -> list[str]:
    """Return the members that wait for a run, or have no checkpoint of their own yet. Raises RunDirError, OSError."""
    membership = read_membership(run)
    if membership is None or not is_campaign(folder := Path(membership.folder)):
        return []
    others = Campaign.load(folder).members
    waiting = [each for each in others if membership.member in (each.source, each.after) and not is_stopped(each.run)]
    return [
        each.name
        for each in waiting
        if not (_has_checkpoint(each.run) if each.source else has_member_started(folder, each))
    ]


def _has_checkpoint(run: Run) -> bool:
    return checkpoint_records.is_checkpoint_of(run, checkpoint_records.resume_point(run))


def iterations_held_by_campaign(run: Run) -> set[int]:
    """Return iterations whose checkpoints must stay because members, perhaps unreadable ones, will start from them.
    Raises RunDirError if the campaign cannot be read: then nothing may be removed."""
    membership = read_membership(run)
    if membership is None or not is_campaign(folder := Path(membership.folder)):
        return set()
    found = set()
    for member in Campaign.load(folder).members:
        if member.source != membership.member or member.iteration is None:
            continue
        try:
            own = _has_checkpoint(member.run)
        except (RunDirError, OSError):
            own = False
        found |= set() if own else {member.iteration}
    return found


def campaign_stop_path(folder: Path) -> Path:
    """Return the file whose existence keeps members from starting."""
    return folder / "STOP"


def campaign_stop_reason(folder: Path) -> str | None:
    """Return why no further member starts; None if members may start."""
    try:
        return campaign_stop_path(folder).read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        return None


def write_campaign_stop(folder: Path, reason: str) -> None:
    """Keep members from starting."""
    write_atomic(campaign_stop_path(folder), f"{reason}\n")
