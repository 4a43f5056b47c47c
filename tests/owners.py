"""Files that seem to be another user's: only root could make some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let the file system say that these files and folders belong to another user, by name and by descriptor."""
    lstat = os.lstat

    def is_theirs(found: os.stat_result) -> bool:
        for path in paths:
            try:
                if os.path.samestat(found, lstat(path)):
                    return True
            except FileNotFoundError:
                continue
        return False

    def changed(look: Any) -> Any:
        def looked(*given: Any, **more: Any) -> os.stat_result:
            found: os.stat_result = look(*given, **more)
            if not is_theirs(found):
                return found
            fields = list(found[:10])
            fields[4] += 1
            return os.stat_result(fields)

        return looked

    for name in ("lstat", "stat", "fstat"):
        monkeypatch.setattr(os, name, changed(getattr(os, name)))
