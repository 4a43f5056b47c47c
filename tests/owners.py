"""Files that seem to be another user's: only root could make some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let the file system say that these files and folders belong to another user."""
    lstat, stat = os.lstat, os.stat

    def look(path: str | os.PathLike[str]) -> os.stat_result:
        found = lstat(path)
        if Path(path) not in paths:
            return found
        fields = list(found[:10])
        fields[4] += 1
        return os.stat_result(fields)

    def look_behind(path: Any, **more: Any) -> os.stat_result:
        real = None if more or isinstance(path, int) else Path(os.path.realpath(path))
        return look(real) if real in paths else stat(path, **more)

    monkeypatch.setattr(os, "lstat", look)
    monkeypatch.setattr(os, "stat", look_behind)
