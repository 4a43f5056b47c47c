"""Where a lane of a stream stands: integers alone, so that a checkpoint can hold them and anybody can read them."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a block begins, for one group of lanes."""

    epoch: int
    number: int
    """Number of the block in the epoch."""
    fragment: int
    """Number of the fragment in the group's order of the epoch."""
    row: int
    """Row of the fragment with which the block begins."""


class LaneCursor(NamedTuple):
    """Where a lane stands."""

    epoch: int = 0
    number: int = 0
    fragment: int = 0
    row: int = 0
    taken: int = 0
    """Samples that were taken from the block."""
    rows: int = 0
    """Rows of the lane's blocks before this one, before any filter."""
    left_out: int = 0
    """Rows among them that an option leaves out, or that gave no token."""
    samples: int = 0
    """Samples of the blocks before this one."""

    @property
    def place(self) -> Place:
        return Place(*self[:4])
