"""Limits of storage: how much of each quota on a run's files is used, and for how many checkpoints there is room.

`quota.json` holds the newest measurement, by a job of the run or by the cron check. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run

QuotaKind = Literal["bytes", "files"]


@dataclass(frozen=True, kw_only=True)
class QuotaLimit:
    """Limit and usage of a user, a group or everybody on a file system."""

    source: str
    """Source: `lfs quota`, `quota`, the site's command, or `file system`."""
    kind: QuotaKind
    used: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class QuotaUsage(QuotaLimit, Record):
    """One quota at one time (seconds since 1970), and what checkpoints of this run take of it, in bytes or files."""

    time: float
    own: int = 0
    """Usage by checkpoints of this run."""
    to_come: int = 0
    """Future usage by checkpoints that its rules keep."""
    one: int = 0
    """Usage by its newest checkpoint."""

    def words(self) -> str:
        """One line for people."""
        text = f"{self.source}: {format_amount(self.used, self.kind)} of {format_amount(self.limit, self.kind)} used"
        if self.one:
            text += f", {format_amount(self.own, self.kind)} in checkpoints of this run"
            text += f": room for {max(0, self.left) // self.one} more than are kept"
        return text

    @property
    def left(self) -> int:
        """Room that is left when all checkpoints that the rules keep are there."""
        return self.limit - self.used - self.to_come

    def is_scarce(self, checkpoints: int) -> bool:
        """Return whether there is room for fewer than so many more checkpoints than are kept; 0: never."""
        return checkpoints > 0 and self.left < checkpoints * max(1, self.one)

    @property
    def name(self) -> str:
        """Unique name for notices."""
        return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', self.source)}-{self.kind}"


@dataclass(frozen=True, kw_only=True)
class UsageRecord(Record):
    """`quota.json`."""

    quotas: list[dict[str, object]] = field(default_factory=list)
    """See `QuotaUsage`."""
    complaint: str | None = None
    """The reason if the measurement is incomplete."""


def read_usage(run: Run) -> tuple[list[QuotaUsage], str | None]:
    """Return the newest measurement, and why it is incomplete. Raises RunDirError if the record is damaged."""
    record = UsageRecord.read(run.quota) or UsageRecord()
    return [QuotaUsage.of(each) for each in record.quotas], record.complaint


def format_amount(value: float, kind: QuotaKind) -> str:
    """Format a number of bytes or files for people: `1.23 TB`, `12,345 files`."""
    return f"{value:,.0f} files" if kind == "files" else format_bytes(value)


def format_bytes(size: float) -> str:
    """Return a number of bytes for people, in powers of ten."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= factor:
            return f"{size / factor:.3g} {unit}" if abs(size) < 999.5 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} bytes"
