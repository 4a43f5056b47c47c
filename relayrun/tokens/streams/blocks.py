"""Blocks of rows of a stream, read ahead, and the samples that lanes get of them.

The rows of a group's fragments are cut into blocks of equal size; the last block of an epoch is shorter. Filters come
later, so the position of a block does not depend on them. A permutation shuffles each block by itself, and its rows are
dealt to the lanes of the group in turn: a lane needs the position of its block and a number inside it to go on.

A call of an engine takes as long as encoding 50 kB, so texts of several lanes are encoded together. A lane for which
more than `MAX_WAITING_BLOCKS` wait reads them again by itself until it has caught up. `Prefetcher` reads ahead in a
thread.

Rejected: a buffer from which random rows are drawn (its content would be the state); rows dealt by fragments alone
(lanes would get unequal shares if fragments are few).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Empty, Full, Queue
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.config.sections.data import StreamSection
from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.streams.fragments import Fragment, FragmentOrder, FragmentReader, arrow_integers
from relayrun.tokens.streams.lane_cursor import BlockPosition, LaneCursor
from relayrun.tokens.streams.samples import ENCODE_BATCH_BYTES, EncodeFunction, LaneSamples, SampleShape, encode_texts

T = TypeVar("T")
_POLL_SECONDS = 1.0
"""How often a thread that waits for room looks whether it is still wanted."""
_EXIT_SECONDS = 5.0
"""How long a program that ends waits for what its threads are reading."""


class _EndOfItems:
    """What comes behind the last item: the error that ended the iterator, or none."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Up to `depth` items of an iterator before they are asked for; with 0 there is no thread.

    What the iterator raises, `next` raises behind the items that came before. The thread is a daemon: a process that
    ends waits some seconds for one that hangs in the file system, and no longer.
    """

    def __init__(self, items: Iterator[T], depth: int, *, name: str) -> None:
        self._items = items
        self._closing = threading.Event()
        self._end: _EndOfItems | None = None
        self._queue: Queue[T | _EndOfItems] = Queue(max(1, depth))
        self._thread = threading.Thread(target=self._read, daemon=True, name=name) if depth else None
        if self._thread is not None:
            _started_prefetchers.add(self)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            item = self._next()
            if not isinstance(item, _EndOfItems):
                return item
            self._end = item
        raise self._end.error or StopIteration

    def close(self) -> None:
        """Let the thread end when it has read what it is reading."""
        self._closing.set()
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            pass

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, so long at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _next(self) -> T | _EndOfItems:
        if self._thread is not None:
            return self._queue.get()
        try:
            return next(self._items)
        except StopIteration:
            return _EndOfItems(None)
        except BaseException as met:  # an iterator that has raised only says that it is at its end
            return _EndOfItems(met)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._put(item)
                if self._closing.is_set():
                    return
        except BaseException as met:
            error = met
        self._put(_EndOfItems(error))

    def _put(self, item: T | _EndOfItems) -> None:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return
            except Full:
                continue


_started_prefetchers: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()


@atexit.register
def _close_prefetchers() -> None:
    """A thread that Arrow lets call Python, to read below a URL, hangs or kills an interpreter that is ending."""
    end = time.monotonic() + _EXIT_SECONDS
    found = [*_started_prefetchers]
    for ahead in found:
        ahead.close()
    for ahead in found:
        ahead.join(max(0.0, end - time.monotonic()))


MIN_ROWS_PER_LANE = 256
"""Rows of a block for each lane, at least: the last sample of a lane's block is padded, which must stay rare. Part of
the order."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Some rows of a group, before any filter."""

    place: BlockPosition
    rows: pa.Table
    """As `FragmentReader` gives them, in the order of the files."""
    origins: npt.NDArray[np.int64]
    """File in the manifest, row group (-1: none) and row in it of every row; int64 [rows, 3]."""
    order: npt.NDArray[np.int64]
    """Which row comes first, second, ... after the shuffle; int64 [rows]."""
    files_left_out: int
    """Files that were met on the way and left out."""


class RowBlocks:
    """The blocks of all groups of lanes of a stream."""

    def __init__(
        self, order: FragmentOrder, reader: FragmentReader, stream: StreamSection, *, name: str, seed: int, lanes: int
    ) -> None:
        self.groups = order.groups
        self.lanes_of_a_group = lanes // order.groups
        self.rows = self.lanes_of_a_group * max(MIN_ROWS_PER_LANE, -(-stream.shuffle_buffer // lanes))
        """Rows of a block."""
        self._order = order
        self._reader = reader
        self._stream = stream
        self._name, self._seed = name, seed

    def read(self, group: int, place: BlockPosition) -> Iterator[RowBlock]:
        """The blocks of a group from a place on, epoch after epoch; they end behind the last epoch, if there is one.

        Raises InputError as `FragmentReader.read`, and FatalTrainingError where an epoch has no row.
        """
        epochs = self._stream.nb_epochs
        while epochs is None or place.epoch < epochs:
            some = place.number > 0
            for block in self._of_epoch(group, place):
                some = some or len(block.rows) > 0
                yield block
            if not some:
                raise FatalTrainingError(
                    f"data set {self._name!r}: the files of a group of lanes have no row",
                    hint="leave out empty files, or those that stream.on_error leaves out, or add others",
                )
            place = BlockPosition(place.epoch + 1, 0, 0, 0)

    def _of_epoch(self, group: int, begin: BlockPosition) -> Iterator[RowBlock]:
        parts: list[pa.RecordBatch] = []
        origins: list[npt.NDArray[np.int64]] = []
        missing, place, left_out = self.rows, begin, 0
        skipped = islice(self._order.of_epoch(begin.epoch, group), begin.fragment, None)
        for number, fragment in enumerate(skipped, start=begin.fragment):
            row = begin.row if number == begin.fragment else 0
            if self._reader.why_left_out(fragment.file) is not None:
                left_out += fragment.group in (None, 0)
                continue
            for batch in self._reader.read(fragment, row):
                while len(batch):
                    part = batch.slice(0, missing)
                    parts.append(part)
                    origins.append(_row_origins(fragment, row, len(part)))
                    row, missing, batch = row + len(part), missing - len(part), batch.slice(len(part))
                    if not missing:
                        yield self._block(group, place, parts, origins, left_out)
                        parts, origins, missing, left_out = [], [], self.rows, 0
                        place = BlockPosition(begin.epoch, place.number + 1, number, row)
        if parts or left_out:
            yield self._block(group, place, parts, origins, left_out)

    def _block(
        self,
        group: int,
        place: BlockPosition,
        parts: Sequence[pa.RecordBatch],
        origins: Sequence[npt.NDArray[np.int64]],
        files_left_out: int,
    ) -> RowBlock:
        rows = _joined_batches(parts, self._name).combine_chunks() if parts else self._reader.no_rows
        order = np.arange(len(rows))
        if self._stream.shuffle_buffer:
            key = permutation_key(self._seed, f"{self._name}/{group}/rows/{place.number}", place.epoch)
            order = Permutation(len(rows), key).map(order)
        where = np.concatenate([np.zeros((0, 3), np.int64), *origins])
        return RowBlock(place=place, rows=rows, origins=where, order=order, files_left_out=files_left_out)

    def of_lane(self, block: RowBlock, lane: int) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """The rows of a block that a lane gets, in its order, and their origins."""
        chosen = block.order[lane // self.groups :: self.lanes_of_a_group]
        return block.rows.take(arrow_integers(chosen)), block.origins[chosen]

    def group_of(self, lane: int) -> int:
        """The group that a lane belongs to."""
        return lane % self.groups


def _joined_batches(parts: Sequence[pa.RecordBatch], name: str) -> pa.Table:
    """The rows of all parts. Raises InputError for columns of other kinds; `name`: of the data set."""
    if all(part.schema.equals(parts[0].schema) for part in parts):
        return pa.Table.from_batches(parts)
    try:
        # imports pandas
        return pa.concat_tables([pa.Table.from_batches([part]) for part in parts], promote_options="permissive")
    except pa.ArrowException as error:
        raise InputError(
            f"data set {name!r}: files hold a column of filters or extra_columns in kinds that do not fit together: "
            f"{str(error).splitlines()[0]}",
            hint="write the column alike in all files, or give them as two data sets",
        ) from None


def _row_origins(fragment: Fragment, row: int, count: int) -> npt.NDArray[np.int64]:
    group = -1 if fragment.group is None else fragment.group
    column = partial(np.full, count, dtype=np.int64)
    return np.stack([column(fragment.file), column(group), np.arange(row, row + count)], axis=1)


MAX_WAITING_BLOCKS = 4
"""Blocks that are kept for a lane, at most."""


@dataclass(frozen=True, kw_only=True)
class LaneBlock:
    """What one lane gets of a block."""

    place: BlockPosition
    rows: int
    """Its rows, before any filter."""
    left_out: Counter[str]
    """Rows that became no text, or gave no token, by reason."""
    files_left_out: int
    """Files that were left out on the way to the block."""
    origins: npt.NDArray[np.int64]
    """File in the manifest, row group (-1: none) and row in it of every text; int64 [texts, 3]."""
    samples: LaneSamples


@dataclass(frozen=True, kw_only=True)
class _LaneTexts:
    """What one lane gets of a block, before its texts are encoded."""

    texts: pa.Array
    """Texts as Arrow's large_string, without nulls."""
    rows: int
    left_out: Counter[str]
    origins: npt.NDArray[np.int64]


class LaneGroup:
    """A group of lanes that share files, and the lanes of it that are read here."""

    def __init__(
        self,
        group: int,
        lanes: Mapping[int, LaneCursor],
        blocks: RowBlocks,
        reader: FragmentReader,
        shape: SampleShape,
        encode: EncodeFunction,
        *,
        nb_prefetch: int,
        name: str,
    ) -> None:
        self._group = group
        self._from = {lane: cursor.place for lane, cursor in lanes.items()}
        self._blocks, self._reader = blocks, reader
        self._shape, self._encode = shape, encode
        self._nb_prefetch, self._name = nb_prefetch, name
        self._ahead: Prefetcher[RowBlock] | None = None
        self._waiting: dict[int, deque[RowBlock]] = {lane: deque() for lane in lanes}
        self._made: dict[int, LaneBlock] = {}
        """For lanes that come to the block later, of the first that they wait for."""
        self._newest: BlockPosition | None = None
        """Where the block begins that was read last for all."""
        self._behind: dict[int, Prefetcher[RowBlock]] = {}
        """What lanes read by themselves that are too far behind."""

    def next_block(self, lane: int) -> LaneBlock | None:
        """The next block of a lane; None behind the last epoch. Raises as `RowBlocks.read` and
        `FragmentReader.texts`."""
        if lane in self._behind:
            return self._next_behind(lane)
        while not self._waiting[lane]:
            if self._ahead is None:
                blocks = self._blocks.read(self._group, min(self._from.values()))
                self._ahead = Prefetcher(blocks, self._nb_prefetch, name=f"{self._name}-{self._group}")
            block = next(self._ahead, None)
            if block is None:
                return None
            self._newest = block.place
            for other, waiting in self._waiting.items():
                # lanes of a group are not all in one block
                if other in self._behind or block.place < self._from[other]:
                    continue
                waiting.append(block)
                if len(waiting) > MAX_WAITING_BLOCKS:
                    self._leave_behind(other)
        if lane not in self._made:
            self._make(lane, self._waiting[lane][0])
        self._waiting[lane].popleft()
        return self._made.pop(lane)

    def _leave_behind(self, lane: int) -> None:
        """Let a lane read by itself what waits for it; but what was made for it is kept."""
        waiting = self._waiting[lane]
        if lane in self._made:
            waiting.popleft()
        blocks = self._blocks.read(self._group, waiting[0].place)
        self._behind[lane] = Prefetcher(blocks, 0, name=f"{self._name}-{self._group}-{lane}")
        waiting.clear()

    def _next_behind(self, lane: int) -> LaneBlock | None:
        if lane not in self._made:
            block = next(self._behind[lane], None)
            if block is None:
                return None
            if block.place == self._newest:
                del self._behind[lane]
            self._make(lane, block)
        return self._made.pop(lane)

    def close(self) -> None:
        """Let go of threads and files."""
        if self._ahead is not None:
            self._ahead.close()

    def _make(self, lane: int, block: RowBlock) -> None:
        """Make the samples of a lane, and some of the lanes behind it that wait for the same block."""
        found = {lane: self._texts(block, lane)}
        size = found[lane].texts.nbytes
        order = [*self._waiting]
        at = order.index(lane) + 1
        for other in (*order[at:], *order[: at - 1]):
            if size >= ENCODE_BATCH_BYTES:
                break
            if other in self._made or not self._waiting[other] or self._waiting[other][0] is not block:
                continue
            with contextlib.suppress(FatalTrainingError):  # it is raised when that lane comes to the block, if it does
                found[other] = self._texts(block, other)
                size += found[other].texts.nbytes
        ids = encode_texts([part.texts for part in found.values()], self._encode)
        for (other, part), (tokens, lengths) in zip(found.items(), ids, strict=True):
            samples = LaneSamples(tokens, lengths, self._shape)
            part.left_out["no token"] = samples.empty
            self._made[other] = LaneBlock(
                place=block.place,
                rows=part.rows,
                left_out=part.left_out,
                files_left_out=block.files_left_out if other == self._group else 0,  # its first lane counts them
                origins=part.origins,
                samples=samples,
            )

    def _texts(self, block: RowBlock, lane: int) -> _LaneTexts:
        rows, origins = self._blocks.of_lane(block, lane)
        texts, chosen, left_out = self._reader.texts(rows)
        return _LaneTexts(texts=texts, rows=len(rows), left_out=left_out, origins=origins[chosen])
