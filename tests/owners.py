"""Files that seem to be another user's: only root could make some."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from relayrun.trust import write_owned


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


def copy_as_ones_own(source: Path, target: Path) -> None:
    """Copy a folder with run directories and campaigns in it, as if this user had submitted them there."""
    shutil.copytree(source, target, symlinks=True)
    for path in [*target.rglob("plan.json"), *target.rglob("campaign.json")]:
        write_owned(path, json.loads(path.read_text()))
