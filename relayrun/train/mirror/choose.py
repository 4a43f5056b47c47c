"""Which kind of second place a policy names."""

from __future__ import annotations

from pathlib import Path

from relayrun.control.rundir.mirror import MirrorPolicy
from relayrun.train.mirror.folder import FolderPlace
from relayrun.train.mirror.pace import Pace
from relayrun.train.mirror.place import Place
from relayrun.train.mirror.store import StorePlace


def place_of(policy: MirrorPolicy, pace: Pace) -> Place:
    """Return the second place that a policy names."""
    return place_at(policy.folder, pace)


def place_at(where: str, pace: Pace) -> Place:
    """Return the second place that is a folder, or a URL."""
    if "://" in where:
        return StorePlace(where, pace)
    return FolderPlace(Path(where))
