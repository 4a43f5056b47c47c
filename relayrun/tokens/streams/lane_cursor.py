"""The position of a lane in a stream: integers alone, so that a checkpoint can hold them and people can read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class BlockStart(NamedTuple):
    """The start of a block, for one group of lanes."""

    epoch: int
    number: int
    """Number of the block in the epoch."""
    fragment: int
    """Number of the fragment in the group's order of the epoch."""
    row: int
    """First row of the block in the fragment."""


class LaneCursor(NamedTuple):
    """The position of a lane. The first four fields are a `BlockStart`."""

    epoch: int = 0
    number: int = 0
    fragment: int = 0
    row: int = 0
    taken: int = 0
    """Samples that were taken from the block."""
    rows_before: int = 0
    """Rows of the lane in the block before the one with the first token of the next sample."""
    tokens_before: int = 0
    """Tokens of the first `rows_before` rows."""
    empty_before: int = 0
    """Texts without a token among the first `rows_before` rows."""
    rows: int = 0
    """Rows of the lane's earlier blocks, before any filter."""
    left_out: int = 0
    """Rows of the earlier blocks that gave no sample, for any reason."""
    samples: int = 0
    """Samples of the earlier blocks."""
    files: int = 0
    """Files that were left out whole, counted once in each epoch by the first lane of a group."""
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
    def position(self) -> BlockStart:
        return BlockStart(*self[:4])

    def counts(self) -> dict[str, int]:
        """Return the skipped rows for each reason of `SKIP_REASONS`."""
        return {words: getattr(self, name) for name, words in SKIP_REASONS.items()}

    def with_left_out(self, counts: Mapping[str, int]) -> LaneCursor:
        """Return the cursor with these skipped rows added, by reason."""
        more = {name: getattr(self, name) + counts[words] for name, words in SKIP_REASONS.items() if words in counts}
        return self._replace(**more)


OPTION_REASONS = {
    "filters": "stream.filters",
    "no_text": "no text",
    "length": "min_len, max_len",
    "map": "stream.map",
    "no_token": "no token",
}
"""Rows that an option skips or that gave no token: cursor field to displayed reason."""
FAULT_REASONS = {
    "not_utf8": "not UTF-8",
    "not_json": "not JSON",
    "lone_surrogate": "lone surrogate",
    "no_object": "no object",
    "no_column": "no column",
    "not_text": "not text",
    "misfit": "misfit",
}
"""Rows that `stream.on_error` skips, in the words of tokenization; `misfit`: the filter cannot compare a value."""
SKIP_REASONS = OPTION_REASONS | FAULT_REASONS


def skipped_rows(lanes: Iterable[LaneCursor]) -> dict[str, int]:
    """Return the non-zero numbers of skipped rows of some lanes by reason."""
    found: Counter[str] = Counter()
    for lane in lanes:
        found.update(lane.counts())
    return {reason: count for reason, count in found.items() if count}
