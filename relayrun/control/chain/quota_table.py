"""Reads what programs say of quotas: a table as `lfs quota` and `quota` print it, or JSON. Standard library only.

    Disk quotas for grp staff (gid 50):
         Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
    /lustre/scratch/projects
                    300*    200     400   6d23h      50       0       0       -

A file system with a long name has a line of its own. Behind a number stands `*` where it is over its quota, around it
`[]` where a server did not answer. Grace may be missing, a duration, a time or a word.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from relayrun.control.rundir.quota import QuotaLimit

BLOCK = 1024
"""Bytes of a block, as `quota` and `lfs quota` count."""
BLOCK_UNITS = {"": BLOCK, **{unit: 1024**power for power, unit in enumerate("KMGTPE", 1)}}
FILE_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("KMGTPE", 1)}}

_NUMBER = r"\[?\d+(?:\.\d+)?[kKMGTPE]?\]?\*?"
_GRACE = r"[^\s\[\]*]+"
_THREE_NUMBERS = rf"({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})"
_ROW = re.compile(rf"(?P<name>.*?)(?:^|\s)\s*{_THREE_NUMBERS}(?:\s+{_GRACE})?\s+{_THREE_NUMBERS}(?:\s+{_GRACE})?\s*")
_QUOTA_OWNER = re.compile(r"\s*Disk quotas for (?P<kind>usr|user|grp|group|prj|project) (?P<name>\S+)")
_KINDS = {"usr": "", "user": "", "grp": "group", "group": "group", "prj": "project", "project": "project"}


@dataclass(frozen=True, kw_only=True)
class QuotaTableRow:
    """What a table says of one file system and one user, group or project. Bytes and files; 0 is no limit."""

    of: str
    """` of group staff`; empty: a user."""
    name: str
    """The file system."""
    used: int
    limit: int
    files: int
    most_files: int


def parse_quota_output(source: str, text: str) -> list[QuotaLimit] | None:
    """Read `{"used": BYTES, "limit": BYTES, "used_files": N, "limit_files": N}` or a table; None: it is neither.

    A limit of 0 is none. `source`: who says it; whose quota it is stands behind that, and where the table has several
    file systems, which of them.
    """
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
    """Make limits of numbers; those that are 0 are none."""
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
            yield QuotaTableRow(
                of=of,
                name=row["name"].strip() or before,
                used=used,
                limit=hard or soft,
                files=files,
                most_files=hard_files or soft_files,
            )
        before = line.strip()


def _parse_number(text: str, units: dict[str, int]) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([A-Z]?)", text.strip("[]*").upper()).groups()  # type: ignore[union-attr]
    return round(float(number) * units[unit]) if "." in number else int(number) * units[unit]
