"""Two records, compared file by file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path


def files(folder: Path) -> dict[str, Path]:
    """Return the files of a record by their names below it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def differences(before: Path, now: Path, parts: list[str] | None = None) -> Iterator[str]:
    """Yield lines that say what differs between two records, in the form of `diff -u`.

    `parts`: the folders to compare; default: all that either record has.
    """
    old, new = files(before), files(now)
    for name in sorted(old.keys() | new.keys()):
        if parts is not None and name.partition("/")[0] not in parts:
            continue
        was, is_now = (
            path.read_text(encoding="utf-8").splitlines() if path else [] for path in (old.get(name), new.get(name))
        )
        if name not in old or name not in new:
            yield f"{'gone' if name in old else 'new'}: {name}"
        elif was != is_now:
            yield from difflib.unified_diff(was, is_now, f"before/{name}", f"now/{name}", n=2, lineterm="")
