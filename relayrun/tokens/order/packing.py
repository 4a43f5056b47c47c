"""Which windows share a row: a pure function of their lengths, block by block.

The windows of a data set, in their order, are taken `BLOCK` at a time, and each block is packed by itself. So a row is
found by its number alone: the rows before each block are kept (8 bytes), and the block is packed again when one of its
rows is asked for. The windows of a row are neighbours in the shards; the rows are shuffled, anew in every epoch. What a
row holds is the same in every epoch, and does not depend on the seed.

| packing | row of a window | cost of a window |
|---|---|---|
| none, pad | one of its own | |
| split | the rows are cut from the windows one behind the other; the last row of a block is not full | |
| greedy | the row before, if it fits; else a new one | below 1 µs |
| first_fit | the first with room | about 3 µs |
| best_fit | the longest first: the fullest with room, and of several the first | about 1 µs |

Rejected: a packing over a whole epoch (a row would depend on all before it, so a resume would pack them again; memory
grows with the rows that have room); shuffling windows before they are packed (every window of a block would be read
from another place, and the number of rows would differ from epoch to epoch).
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, insort
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relayrun.config.sections.document_window import Packing
from relayrun.tokens.order.document_windows import DocumentWindows
from relayrun.tokens.order.index_cache import IndexCache

log = logging.getLogger(__name__)

WINDOWS_PER_BLOCK = 512
"""Windows that are packed together. Part of the order: another number is another order."""
PACKING_VERSION = 1
"""The way in which windows are packed: what another version of it has counted is not taken."""
CACHED_BLOCKS = 256
"""Blocks whose rows are kept in memory, the newest."""

RowPieces = list[tuple[int, int, int]]
"""Windows of a row in order: number, first token, and the token behind the last one."""


def assign_rows(sizes: npt.NDArray[np.int64], room: int, packing: Packing) -> npt.NDArray[np.int64]:
    """The row of each window, int64 [windows], numbered from 0 without a gap; no window is longer than `room`.

    Not for `split`, which may put a window into several rows.
    """
    if packing in ("none", "pad"):
        return np.arange(len(sizes))
    if packing == "greedy":
        return _pack_greedy(sizes, room)
    return _pack_first_fit(sizes, room) if packing == "first_fit" else _pack_best_fit(sizes, room)


def _pack_greedy(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    rows, row, left = [], -1, 0
    for size in sizes.tolist():
        if size > left:
            row, left = row + 1, room
        left -= size
        rows.append(row)
    return np.array(rows, np.int64)


def _pack_first_fit(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    left = np.full(len(sizes), room)
    rows, count = np.zeros(len(sizes), np.int64), 0
    for window, size in enumerate(sizes.tolist()):
        row = count if size == room else int((left[: count + 1] >= size).argmax())
        left[row] -= size
        rows[window] = row
        count = max(count, row + 1)
    return rows


def _pack_best_fit(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    order = np.argsort(-sizes, kind="stable")
    full = int(np.count_nonzero(sizes == room))  # each fills a row
    found, count = [*range(full)], full
    open_rows: list[tuple[int, int]] = []  # (room that is left, row), rising
    for size in sizes[order[full:]].tolist():
        at = bisect_left(open_rows, (size, -1))
        if at < len(open_rows):
            left, row = open_rows.pop(at)
        else:
            left, row = room, count
            count += 1
        if left > size:
            insort(open_rows, (left - size, row))
        found.append(row)
    rows = np.empty(len(sizes), np.int64)
    rows[order] = found
    return rows


def pack_rows(sizes: npt.NDArray[np.int64], room: int, packing: Packing) -> list[RowPieces]:
    """The rows that windows of these sizes give, int64 [windows], packed as one block."""
    if packing != "split":
        rows = assign_rows(sizes, room, packing)
        found: list[RowPieces] = [[] for _ in range(int(rows.max()) + 1 if len(rows) else 0)]
        for window, (row, size) in enumerate(zip(rows.tolist(), sizes.tolist(), strict=True)):
            found[row].append((window, 0, size))
        return found
    found, left = [], 0
    for window, size in enumerate(sizes.tolist()):
        start = 0
        while start < size:
            if not left:
                found.append([])
                left = room
            stop = min(size, start + left)
            found[-1].append((window, start, stop))
            left -= stop - start
            start = stop
    return found


class PackedRows:
    """The rows of a data set, by number. Thread-safe."""

    def __init__(
        self,
        windows: DocumentWindows,
        room: int,
        packing: Packing,
        *,
        cache: Path | None = None,
        opening: str | None = None,
    ) -> None:
        """Pack every block once, for the number of its rows; or take them from `cache`, where they are kept.

        `room`: tokens of a row. `opening`: see `DatasetSpec`.
        """
        self.windows = windows
        self.packing = packing
        self._room = room
        self._alone = packing in ("none", "pad")
        self._starts = np.zeros(1, np.int64) if self._alone else self._kept(cache, opening)
        self._block = lru_cache(CACHED_BLOCKS)(self._packed)

    def __len__(self) -> int:
        return len(self.windows) if self._alone else int(self._starts[-1])

    def pieces(self, i: int) -> RowPieces:
        """What row i holds. Raises IndexError outside of 0..len-1, and as `DocumentWindows.read`."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} is outside of range({len(self)})")
        if self._alone:
            return [(i, 0, int(self.windows.sizes(i, i + 1)[0]))]
        block = int(np.searchsorted(self._starts, i, side="right")) - 1
        row, first = i - int(self._starts[block]), block * WINDOWS_PER_BLOCK
        sizes, order, bounds = self._block(block)
        if self.packing != "split":
            inside = order[bounds[row] : bounds[row + 1]].tolist()
            return [(first + window, 0, int(sizes[window])) for window in inside]
        found, at, end = [], row * self._room, min((row + 1) * self._room, int(bounds[-1]))
        window = int(np.searchsorted(bounds, at, side="right")) - 1
        while at < end:
            start = at - int(bounds[window])
            stop = min(int(sizes[window]), start + end - at)
            found.append((first + window, start, stop))
            at, window = at + stop - start, window + 1
        return found

    def _kept(self, cache: Path | None, opening: str | None) -> npt.NDArray[np.int64]:
        """The rows before each block, and in all; int64 [blocks + 1]. What cannot be kept is counted."""
        if cache is None:
            return self._counted()
        try:
            kept = IndexCache(cache, self._identity(), opening=opening, parts=("rows",))
            return kept.read_or_build(lambda: [self._counted()])[0]
        except OSError as error:
            log.warning("the rows of a data set are counted at every start, and not kept in %s: %s", cache, error)
            return self._counted()

    def _counted(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *map(self._count, self.windows.all_sizes(WINDOWS_PER_BLOCK))], dtype=np.int64)

    def _identity(self) -> str:
        """The hash of all that the rows depend on."""
        cut = self.windows.cut
        sizes = [cut.window, cut.overlap, cut.specials, cut.drop_end is not None]
        identity = [
            PACKING_VERSION,
            WINDOWS_PER_BLOCK,
            self._room,
            self.packing,
            *sizes,
            self.windows.manifest.fingerprint,
        ]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _count(self, sizes: npt.NDArray[np.int64]) -> int:
        if self.packing == "split":
            return -(-int(sizes.sum()) // self._room)
        return int(assign_rows(sizes, self._room, self.packing).max()) + 1

    def _packed(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sizes of the block's windows; windows by row; where the windows of each row begin in that.

        With `split` the last is where each window begins in the block, and the second is nothing.
        """
        first = block * WINDOWS_PER_BLOCK
        sizes = self.windows.sizes(first, min(first + WINDOWS_PER_BLOCK, len(self.windows)))
        if self.packing == "split":
            return sizes, sizes[:0], np.cumsum([0, *sizes.tolist()], dtype=np.int64)
        rows = assign_rows(sizes, self._room, self.packing)
        return sizes, np.argsort(rows, kind="stable"), np.cumsum([0, *np.bincount(rows).tolist()], dtype=np.int64)
