"""Measures the quotas on the files of a run, by `lfs quota`, `quota` or a site's command.

The commands run in a thread: one that hangs blocks nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import QuotaLimit, QuotaUsage, UsageRecord
from relayrun.errors import RelayrunError
from relayrun.files import stat_of

QUOTA_QUESTION_SECONDS = 10.0
"""Time limit of a quota command."""
MEASURE_SECONDS = 3600.0
"""Interval between two measurements."""
MEASURE_AFTER_SAVE_SECONDS = 600.0
"""Interval between two measurements with a save between them."""


class QuotaMonitor:
    """Measures from time to time while a job runs."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self._run = run
        self._plan = plan
        self._thread: threading.Thread | None = None
        self._saved: int | None = None
        self._time = float("-inf")
        self._error: Exception | None = None

    def look(self, saved: int) -> None:
        """Measure if it is due. `saved` changes with each save. Raises the error of the last measurement, once."""
        if self._thread is not None and self._thread.is_alive():
            return
        if (error := self._error) is not None:
            self._error = None
            raise error
        since = time.monotonic() - self._time
        if since < (MEASURE_SECONDS if saved == self._saved else MEASURE_AFTER_SAVE_SECONDS):
            return
        self._saved, self._time = saved, time.monotonic()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self._thread.start()

    def _measure(self) -> None:
        try:
            measure_quotas(self._run, self._plan, now=time.time())
        except Exception as error:
            self._error = error


def is_measurement_due(run: Run, *, now: float) -> bool:
    """Return whether the last measurement is older than the interval of a running job."""
    found = stat_of(run.quota)
    return found is None or now - found.st_mtime > 1.5 * MEASURE_SECONDS


def measure_quotas(run: Run, plan: Plan, *, now: float) -> None:
    """Measure and record all quotas. Raises OSError, and RunDirError for damaged records."""
    place = run.checkpoints if run.checkpoints.is_dir() else run.path
    complaint = None
    try:
        found = read_quotas(place, plan.quota_command)
    except RelayrunError as error:
        found, complaint = [], str(error)
    there = {entry.name for entry in os.scandir(run.checkpoints)} if run.checkpoints.is_dir() else set()
    line = [counted.commit for counted in Lineage(run).backwards() if counted.published]
    own = [commit for commit in line if os.path.basename(commit.path) in there]
    kept = plan.checkpoints_kept or 0
    usages = []
    for each in found:
        sizes = [sum(commit.files.values()) if each.kind == "bytes" else len(commit.files) for commit in own]
        one = sizes[0] if sizes else 0
        to_come = max(0, kept - len(sizes)) * one
        usages.append(QuotaUsage(**vars(each), time=now, own=sum(sizes), to_come=to_come, one=one))
    UsageRecord(quotas=[vars(each) for each in usages], complaint=complaint).write(run.quota)


def read_quotas(place: Path, command: Sequence[str] = ()) -> list[QuotaLimit]:
    """Return the quotas on this user's files at a path: the user's, a group's and a project's.

    `command`: the site's command instead of `lfs quota` and `quota`, with `{path}` and `{user}` filled in; only its
    errors raise RelayrunError.
    """
    user = str(os.getuid())  # it may have no name here
    if command:
        return _site_quotas([word.replace("{path}", str(place)).replace("{user}", user) for word in command])
    found: list[QuotaLimit] = []
    if shutil.which("lfs") is not None:
        asked = [
            ("", "-u", user),
            (" of group ", "-g", _group_of_folder(place)),
            (" of project ", "-p", _project_of_folder(place)),
        ]
        for of, option, who in asked:
            if who:
                source = f"lfs quota{of}{who}" if of else "lfs quota"
                answer = _program_answer(["lfs", "quota", "-q", option, who, str(place)])
                found += parse_quota_output(source, answer) or []
    if shutil.which("quota") is not None:
        real = Path(os.path.realpath(place))
        mount = next(folder for folder in (real, *real.parents) if os.path.ismount(folder))  # it accepts no other path
        command = ["quota", "--no-wrap", "--raw-grace", "--nfs-all", "-f", str(mount)]
        found += parse_quota_output("quota", _program_answer(command)) or []
    return found


def _group_of_folder(place: Path) -> str:
    with contextlib.suppress(OSError):
        info = place.stat()
        if info.st_mode & stat.S_ISGID:
            return str(info.st_gid)
    return str(os.getgid())


def _project_of_folder(place: Path) -> str:
    """Return the project of files made at a path, from Lustre's `1042 P /lustre/ada`; empty if there is none."""
    found = re.match(r"\s*(\d+)", _program_answer(["lfs", "project", "-d", str(place)]))
    return "" if found is None or int(found[1]) == 0 else found[1]


def _site_quotas(command: list[str]) -> list[QuotaLimit]:
    source = os.path.basename(command[0])
    hint = 'cluster.quota_command prints {"used": BYTES, "limit": BYTES} or a table as `quota` does'
    try:
        text = _program_output(command)
    except subprocess.TimeoutExpired:
        words = f"it did not answer within {QUOTA_QUESTION_SECONDS:.0f} s"
        raise RelayrunError(words, where=command[0], hint=hint) from None
    except OSError as error:
        raise RelayrunError(f"it cannot be run: {error.strerror}", where=command[0], hint=hint) from None
    found = parse_quota_output(source, text)
    if found is None:
        line = (text.splitlines() or ["nothing"])[0]
        raise RelayrunError(f"it says no quota: {line}", where=command[0], hint=hint)
    return found


def _program_answer(command: list[str]) -> str:
    try:
        return _program_output(command)
    except (subprocess.TimeoutExpired, OSError):
        return ""


def _program_output(command: list[str]) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=QUOTA_QUESTION_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"LC_ALL": "C"},
    ).stdout


def file_system_limit(place: Path) -> list[QuotaLimit]:
    """Return the limits of `df` for this user: blocks reserved for root do not count."""
    found = os.statvfs(place)
    used, files = (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree
    most_files = files + found.f_favail if found.f_files else 0
    return make_limits("file system", used, used + found.f_bavail * found.f_frsize, files, most_files)


BLOCK = 1024
"""Bytes per block in the output of `quota` and `lfs quota`."""
BLOCK_UNITS = {"": BLOCK, **{unit: 1024**power for power, unit in enumerate("KMGTPE", 1)}}
FILE_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("KMGTPE", 1)}}
_NUMBER = r"\[?\d+(?:\.\d+)?[kKMGTPE]?\]?\*?"
_GRACE = r"[^\s\[\]*]+"
_THREE_NUMBERS = rf"({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})"
_ROW = re.compile(rf"(?P<name>.*?)(?:^|\s)\s*{_THREE_NUMBERS}(?:\s+{_GRACE})?\s+{_THREE_NUMBERS}(?:\s+{_GRACE})?\s*")
_QUOTA_OWNER = re.compile(r"\s*Disk quotas for (?P<kind>usr|user|grp|group|prj|project) (?P<name>\S+)")
_KINDS = {"usr": "", "user": "", "grp": "group", "group": "group", "prj": "project", "project": "project"}


class QuotaTableRow(NamedTuple):
    """A table's row of one file system (`name`) and one user, group or project, in bytes and files; 0 is no limit."""

    of: str
    """` of group staff`; empty: a user."""
    name: str
    used: int
    limit: int
    files: int
    most_files: int


def parse_quota_output(source: str, text: str) -> list[QuotaLimit] | None:
    """Parse `{"used": BYTES, "limit": BYTES, "used_files": N, "limit_files": N}` or a table; None if it is neither. A
    limit of 0 is no limit. `source`: name of the program, to which owner and file system are appended."""
    try:
        value = json.loads(text)
        used, limit = int(value["used"]), int(value["limit"])
        return make_limits(source, used, limit, int(value.get("used_files", 0)), int(value.get("limit_files", 0)))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    rows = list(_table_rows(text))
    if not rows and not _QUOTA_OWNER.search(text):
        return None
    times = Counter(row.of for row in rows)
    found = []
    for row in rows:
        where = f" on {row.name}" if times[row.of] > 1 else ""
        found += make_limits(f"{source}{row.of}{where}", row.used, row.limit, row.files, row.most_files)
    return found


def make_limits(source: str, used: int, limit: int, files: int, most_files: int) -> list[QuotaLimit]:
    """Return the limits that are not 0."""
    found = [QuotaLimit(source=source, kind="bytes", used=used, limit=limit)] if limit else []
    return found + ([QuotaLimit(source=source, kind="files", used=files, limit=most_files)] if most_files else [])


def _table_rows(text: str) -> Iterator[QuotaTableRow]:
    of, before = "", ""
    for line in text.splitlines():
        if (owner := _QUOTA_OWNER.match(line)) is not None:
            kind = _KINDS[owner["kind"]]
            of = f" of {kind} {owner['name']}" if kind else ""
        elif (row := _ROW.fullmatch(line)) is not None:
            _, *numbers = row.groups()
            used, soft, hard = (_parse_number(number, BLOCK_UNITS) for number in numbers[:3])
            files, soft_files, hard_files = (_parse_number(number, FILE_UNITS) for number in numbers[3:])
            name = row["name"].strip() or before
            yield QuotaTableRow(of, name, used, hard or soft, files, hard_files or soft_files)
        before = line.strip()


def _parse_number(text: str, units: dict[str, int]) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([A-Z]?)", text.strip("[]*").upper()).groups()  # type: ignore[union-attr]
    return round(float(number) * units[unit]) if "." in number else int(number) * units[unit]
