"""Storage limits: when a file system or a quota is full, and when the site purges unused files.

`quota.json` holds the measurements of the last week, by jobs of the run and by the cron check. Growth is everything
that any program wrote in that time, less the checkpoints that the rules of the run remove again, and less one
checkpoint: a measurement may fall into a save.

`cluster.purge_days` says after how many days without access or modification a site removes a file, per folder. A folder
is as old as its oldest file. Standard library only.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.files import read_json

DAY_SECONDS = 86400.0
PURGE_SOON_DAYS = 7.0
"""Days before a purge at which people are told."""
MAX_FILES_CHECKED = 1000
"""Maximum number of files checked; of more files every n-th, so that a data set of many shards costs no more."""


@dataclass(frozen=True, kw_only=True)
class PurgeForecast:
    """A file that a site would remove by its rule `days` for `folder`, and when."""

    what: str
    """`checkpoint` or `data`."""
    name: str
    """For people: `the checkpoint of iteration 500`."""
    path: str
    folder: str
    days: float
    time: float
    """Time of the purge in seconds since 1970; in the past: at any moment."""

    def words(self, now: float) -> str:
        """One line for people."""
        left = (self.time - now) / DAY_SECONDS
        day = time.strftime("%Y-%m-%d", time.localtime(self.time))
        when = f"in {left:.1f} days, on {day}" if left > 0 else f"at any moment, since {day}"
        rule = f"{self.folder}: {self.days:g} days without use"
        return f"{self.name} may be purged {when} ({rule}; first {self.path})"

    def is_soon(self, now: float) -> bool:
        """Return whether a person should act now."""
        return self.time - now < PURGE_SOON_DAYS * DAY_SECONDS


def first_purge(name: str, what: str, paths: Sequence[str], purge_days: Mapping[str, float]) -> PurgeForecast | None:
    """Return the file that would be purged first; None if no file would, or none exists. `name` and `what`: as in
    `PurgeForecast`. `purge_days`: days by folder; the innermost folder of a file counts."""
    step = -(-len(paths) // MAX_FILES_CHECKED) or 1
    found = []
    for path in paths[::step]:
        rule = _purge_rule(os.path.realpath(path), purge_days)
        if rule is None:
            continue
        try:
            used = os.stat(path)
        except OSError:  # another check reports missing files
            continue
        folder, days = rule
        when = max(used.st_atime, used.st_mtime) + days * DAY_SECONDS
        found.append(PurgeForecast(what=what, name=name, path=path, folder=folder, days=days, time=when))
    return min(found, key=lambda purge: purge.time, default=None)


def _purge_rule(path: str, purge_days: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the innermost folder that holds a path, and its days."""
    holding = [
        (folder, days)
        for folder, days in purge_days.items()
        if Path(path).is_relative_to(folder) or Path(path).is_relative_to(os.path.realpath(folder))
    ]
    return max(holding, key=lambda rule: len(rule[0]), default=None)


def checkpoint_purge(iteration: int, folder: str | None, purge_days: Mapping[str, float]) -> PurgeForecast | None:
    """Return when a checkpoint would be purged; None if it would not."""
    if not purge_days or folder is None:
        return None
    paths = sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())
    return first_purge(f"the checkpoint of iteration {iteration}", "checkpoint", paths, purge_days)


def data_purge(run: Run, purge_days: Mapping[str, float]) -> PurgeForecast | None:
    """Return when data in the manifest of a run would be purged; None if they would not, or the manifest is damaged."""
    if not purge_days:
        return None
    try:
        value = read_json(run.manifest)
        sets = [*value["datasets"].values(), *value.get("validation", {}).values()]
        paths = [path for each in sets for path in _data_set_paths(each)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return first_purge("training data", "data", paths, purge_days)


def _data_set_paths(dataset: Mapping[str, Iterable[Mapping[str, str]]]) -> list[str]:
    shards = [f"{shard['prefix']}.bin" for shard in dataset.get("shards", ())]
    return shards + [file["path"] for file in dataset.get("files", ()) if "://" not in file["path"]]


FULL_SOON_DAYS = 7.0
"""Days before a limit is reached at which people are told."""
FULL_SHOWN_DAYS = 30.0
"""Days before a shared file system is full at which `status` shows it."""
USAGE_WINDOW_SECONDS = 7 * DAY_SECONDS
"""Maximum time over which growth is measured."""
USAGE_MIN_SPAN_SECONDS = 6 * 3600.0
"""Minimum time over which growth is measured."""
MAX_SAMPLES = 60
"""Maximum number of measurements kept per limit."""
FREED_SHARE = 0.01
"""If this share of a limit (and more than a checkpoint) was freed, earlier measurements no longer count."""
FILE_SYSTEM = "file system"
"""Source of the figures of `df`, which concern all users."""

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
class QuotaSample(QuotaLimit, Record):
    """One limit at one time (seconds since 1970). Numbers are bytes, or files."""

    time: float
    own: int = 0
    """Usage by checkpoints of this run."""
    rolling: int = 0
    """Usage by checkpoints that its rules remove again."""
    to_come: int = 0
    """Future usage by checkpoints that its rules keep."""
    one: int = 0
    """Usage by its newest checkpoint."""
    saves: int = 0
    """Number of checkpoints saved so far."""

    @property
    def lasting(self) -> int:
        """Usage that no rule removes."""
        return self.used - self.rolling


@dataclass(frozen=True, kw_only=True)
class UsageRecord(Record):
    """`quota.json`."""

    points: list[dict[str, object]] = field(default_factory=list)
    """Oldest first, see `QuotaSample`."""
    complaint: str | None = None
    """The reason if the newest measurement is incomplete."""


@dataclass(frozen=True, kw_only=True)
class QuotaForecast(QuotaLimit):
    """Usage of one limit at `time`, of which `own` by checkpoints of this run, and when the limit is reached."""

    own: int
    time: float
    a_day: float | None
    """Growth per day; None: not measured for long enough."""
    a_checkpoint: float | None
    """Growth between two checkpoints of this run."""
    full: float | None
    """Time at which the limit is reached, in seconds since 1970; None: no growth, or unknown."""

    def words(self, now: float) -> str:
        """One line for people."""
        text = f"{self.source}: {format_amount(self.used, self.kind)} of {format_amount(self.limit, self.kind)} used"
        text += f", {format_amount(self.own, self.kind)} in checkpoints of this run" if self.own else ""
        if self.a_day is not None and self.a_day > 0:
            each = "" if self.a_checkpoint is None else f"{format_amount(self.a_checkpoint, self.kind)} a checkpoint, "
            text += f"; grows by {each}{format_amount(self.a_day, self.kind)} a day"
        if self.full is not None:
            day = time.strftime("%Y-%m-%d", time.localtime(max(self.full, now)))
            left = (self.full - now) / DAY_SECONDS
            text += f": full in about {left:.1f} days, on {day}" if left > 0 else ": full at any moment"
        return text

    def is_soon(self, now: float) -> bool:
        """Return whether a person should act now."""
        return self.full is not None and self.full - now < FULL_SOON_DAYS * DAY_SECONDS

    def is_told(self, now: float) -> bool:
        """Return whether `status` shows it: quotas of bytes always, other limits only if they get scarce."""
        if self.source != FILE_SYSTEM and self.kind == "bytes":
            return True
        return self.full is not None and self.full - now < FULL_SHOWN_DAYS * DAY_SECONDS

    @property
    def name(self) -> str:
        """Unique name for notices."""
        return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', self.source)}-{self.kind}"


def usage_path(run: Run) -> Path:
    """Return the path of quota.json."""
    return run.path / "quota.json"


def read_usage(run: Run) -> UsageRecord:
    """Return the measurements; empty before the first. Raises RunDirError if the record is damaged."""
    return UsageRecord.read(usage_path(run)) or UsageRecord()


def record_usage(run: Run, found: Iterable[QuotaSample], *, complaint: str | None, now: float) -> None:
    """Record measurements, and drop those older than a week. Raises OSError, RunDirError."""
    points = [each for each in _usage_samples(read_usage(run)) if now - USAGE_WINDOW_SECONDS <= each.time <= now]
    kept = [each for row in _samples_by_limit([*points, *found]) for each in _thinned_samples(row)]
    kept.sort(key=lambda point: point.time)
    UsageRecord(points=[asdict(each) for each in kept], complaint=complaint).write(usage_path(run))


def quota_forecasts(measures: UsageRecord, *, now: float) -> list[QuotaForecast]:
    """Return the last measurement of each limit, with the time at which it is reached."""
    samples = (each for each in _usage_samples(measures) if each.time <= now)
    return [_quota_forecast(row) for row in _samples_by_limit(samples)]


def format_amount(value: float, kind: QuotaKind) -> str:
    """Format a number of bytes or files for people: `1.2 TB`, `12,345 files`."""
    if kind == "files":
        return f"{value:,.0f} files"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(value) >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value / 1e3:,.1f} kB"


def _usage_samples(measures: UsageRecord) -> list[QuotaSample]:
    return [QuotaSample.of(each) for each in measures.points]


def _samples_by_limit(points: Iterable[QuotaSample]) -> list[list[QuotaSample]]:
    rows: dict[tuple[str, str], list[QuotaSample]] = {}
    for point in points:
        rows.setdefault((point.source, point.kind), []).append(point)
    return list(rows.values())


def _thinned_samples(row: Sequence[QuotaSample]) -> list[QuotaSample]:
    """Return at most MAX_SAMPLES of the samples, including the first and the last."""
    kept = list(row)
    while len(kept) > MAX_SAMPLES:
        kept = [*kept[:-1:2], kept[-1]]
    return kept


def _quota_forecast(row: Sequence[QuotaSample]) -> QuotaForecast:
    newest = row[-1]
    since = _oldest_sample_since_drop(row)
    span = newest.time - since.time
    a_day = a_checkpoint = full = None
    left = newest.limit - newest.used - newest.to_come
    if span >= USAGE_MIN_SPAN_SECONDS:
        growth = max(0, newest.lasting - since.lasting - newest.one)
        a_day = growth / span * DAY_SECONDS
        saves = newest.saves - since.saves
        a_checkpoint = growth / saves if saves > 0 else None
        full = newest.time + left / growth * span if growth else None
    if left <= 0:
        full = newest.time
    return QuotaForecast(
        source=newest.source,
        kind=newest.kind,
        used=newest.used,
        limit=newest.limit,
        own=newest.own,
        time=newest.time,
        a_day=a_day,
        a_checkpoint=a_checkpoint,
        full=full,
    )


def _oldest_sample_since_drop(row: Sequence[QuotaSample]) -> QuotaSample:
    """Return the oldest sample since the limit changed or much was freed."""
    for number in range(len(row) - 1, 0, -1):
        before, after = row[number - 1], row[number]
        freed = before.lasting - after.lasting
        if before.limit != after.limit or freed > max(FREED_SHARE * after.limit, before.one):
            return after
    return row[0]
