"""Which kind of second place a policy names."""

from __future__ import annotations

from pathlib import Path

from relayrun.control.rundir.mirror import MirrorPolicy
from relayrun.train.mirror.folder import FolderDestination
from relayrun.train.mirror.object_store import ObjectStoreDestination
from relayrun.train.mirror.pace import CopyRateLimit
from relayrun.train.mirror.place import MirrorDestination


def destination_of_policy(policy: MirrorPolicy, pace: CopyRateLimit) -> MirrorDestination:
    """Return the second place that a policy names."""
    return destination_at(policy.folder, pace)


def destination_at(where: str, pace: CopyRateLimit) -> MirrorDestination:
    """Return the second place that is a folder, or a URL."""
    if "://" in where:
        return ObjectStoreDestination(where, pace)
    return FolderDestination(Path(where))
