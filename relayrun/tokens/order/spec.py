"""What a callable that makes a data set is given: `order: megatron`, the made-up data, and a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relayrun.tokens.shards.manifest import DatasetManifest


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """What a callable that makes a data set is given."""

    name: str
    """Identity of the data set."""
    seed: int
    seq_length: int
    manifest: DatasetManifest
    """Shards of the data set; none if the mixture gives it no path."""
    split: float = 0.0
    """Share of the data set's windows, at its end, that is held out."""
    cache_dir: str | None = None
    opening: str | None = None
    """Shared by the ranks of an attempt, which open the data set together; None for who opens it alone."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set's entry in the mixture."""
