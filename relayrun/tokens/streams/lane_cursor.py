"""Where a lane of a stream stands: integers alone, so that a checkpoint can hold them and anybody can read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class BlockPosition(NamedTuple):
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
    """Rows among them that gave no sample, for whatever reason."""
    samples: int = 0
    """Samples of the blocks before this one."""
    files: int = 0
    """Files that were left out whole, once in each epoch; the first lane of a group counts those of its group."""
    filters: int = 0
    no_text: int = 0
    length: int = 0
    map: int = 0
    no_token: int = 0
    not_utf8: int = 0
    not_json: int = 0
    lone_surrogate: int = 0
    no_object: int = 0
    no_column: int = 0
    not_text: int = 0
    misfit: int = 0

    @property
    def place(self) -> BlockPosition:
        return BlockPosition(*self[:4])

    def counts(self) -> dict[str, int]:
        """The rows that were left out by reason, in the words of `SKIP_REASONS`; those of which there are none, too."""
        return {words: getattr(self, name) for name, words in SKIP_REASONS.items()}

    def with_left_out(self, counts: Mapping[str, int]) -> LaneCursor:
        """The cursor with so many more rows left out, by reason."""
        more = {name: getattr(self, name) + counts[words] for name, words in SKIP_REASONS.items() if words in counts}
        return self._replace(**more)


FORMER_CURSOR_FIELDS = 8
"""Numbers of a cursor that an earlier version wrote: without files and reasons."""

OPTION_REASONS = {
    "filters": "stream.filters",
    "no_text": "no text",
    "length": "min_len, max_len",
    "map": "stream.map",
    "no_token": "no token",
}
"""Rows that an option leaves out, or that gave no token: names of a cursor, with the reason as people read it."""
FAULT_REASONS = {
    "not_utf8": "not UTF-8",
    "not_json": "not JSON",
    "lone_surrogate": "lone surrogate",
    "no_object": "no object",
    "no_column": "no column",
    "not_text": "not text",
    "misfit": "misfit",
}
"""Rows that `stream.on_error` leaves out, in tokenization's words; `misfit`: a value that a filter cannot compare."""
SKIP_REASONS = OPTION_REASONS | FAULT_REASONS


def skipped_rows(lanes: Iterable[LaneCursor]) -> dict[str, int]:
    """Rows of some lanes that gave no sample, by reason; `earlier`: counted by a version that kept no reasons."""
    found: Counter[str] = Counter()
    for lane in lanes:
        counts = lane.counts()
        found.update(counts)
        found["earlier"] += lane.left_out - sum(counts.values())
    return {reason: count for reason, count in found.items() if count}
