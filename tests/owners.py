"""Files that seem to be another user's: only root could make some."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let the file system say that these files and folders belong to another user."""
    lstat = os.lstat

    def look(path: str | os.PathLike[str]) -> os.stat_result:
        found = lstat(path)
        if Path(path) not in paths:
            return found
        fields = list(found[:10])
        fields[4] += 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "lstat", look)
