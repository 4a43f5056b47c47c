"""A data set of text that is tokenized while it is read, in place of numbered samples.

files → fragments → blocks of rows, shuffled → lanes → filters → tokens → windows → rows of a lane, in order

The rows of a group's fragments are cut into blocks of equal size; the last block of an epoch is shorter. Filters run
later, so the position of a block does not depend on them. A permutation shuffles each block, and its rows are dealt to
the lanes of the group so that each gets as many bytes: a cursor needs the position of the block and a sample number
inside it. Shares that differ by chance would move the lanes apart by several blocks, each of which is kept in memory or
read again. A call of an engine costs as much as encoding 50 kB, so texts of several lanes are encoded together.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.config.sections.data import StreamSection
from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.order.datasets import SampleSegment
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.order.prefetcher import Prefetcher
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.order.sampler import Cursor
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shards.manifest import TextFileEntry
from relayrun.tokens.streams.fragments import (
    TEXT_COLUMN,
    Fragment,
    FragmentOrder,
    FragmentReader,
    group_count,
    integers_to_arrow,
)
from relayrun.tokens.streams.lane_cursor import BlockStart, LaneCursor
from relayrun.tokens.streams.samples import ENCODE_BATCH_BYTES, EncodeFunction, LaneSamples, SampleShape, encode_texts
from relayrun.tokens.tokenize.encode.libraries import Encoded

MIN_ROWS_PER_LANE = 256
"""Minimum rows of a block for each lane, whose last sample is padded, which must stay rare. Part of the order."""
_LONGEST_ROWS = 64
"""Rows of each lane that are dealt by their bytes; the others are short, and each costs time. Part of the order."""
_LONG_ROW_BYTES = 2000
"""A block of longer rows is not copied into one piece: it costs less to collect the rows of a lane one by one."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Consecutive rows of a group, before any filter."""

    position: BlockStart
    rows: pa.Table
    """Columns as in `FragmentReader.read`, in the order of the files."""
    origins: npt.NDArray[np.int64]
    """File in the manifest, row group (-1: none) and row in it of every row; int64 [rows, 3]."""
    shares: Sequence[npt.NDArray[np.int64]]
    """The rows of each lane of the group, shuffled; int64 [rows of the lane]."""
    files_left_out: int
    """Files that were skipped before this block."""

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of a row on average, at least 1."""
        return max(1.0, int(self.rows.nbytes) / max(1, len(self.rows)))

    def take(self, wanted: npt.NDArray[np.int64]) -> pa.Table:
        """Return some rows; of a block in parts each is a part, not copied."""
        parts = self.rows.to_batches()
        if len(parts) < 2:
            return self.rows.take(integers_to_arrow(wanted))
        starts = np.cumsum([0, *map(len, parts)])
        found = np.searchsorted(starts, wanted, side="right") - 1
        places = zip(found.tolist(), (wanted - starts[found]).tolist(), strict=True)
        return pa.Table.from_batches([parts[part].slice(row, 1) for part, row in places])


class RowBlocks:
    """The blocks of all groups of lanes of a stream."""

    def __init__(
        self, order: FragmentOrder, reader: FragmentReader, stream: StreamSection, *, name: str, seed: int, lanes: int
    ) -> None:
        self.groups = order.groups
        self.lanes_per_group = lanes // order.groups
        self.rows = self.lanes_per_group * max(MIN_ROWS_PER_LANE, -(-stream.shuffle_buffer // lanes))
        """Rows of a block."""
        self._order = order
        self.depth = stream.nb_prefetch
        """Blocks that a thread reads ahead; 0: no thread."""
        self.reader = reader
        self._stream = stream
        self._name, self._seed = name, seed

    def prefetcher(self, group: int, position: BlockStart) -> Prefetcher[RowBlock]:
        """Return the reader of a group's blocks, whose thread is not started yet."""
        items, name = self.read(group, position), f"{self._name}-{group}"
        return Prefetcher(items, self.depth, name=name, starts=False)

    def read(self, group: int, position: BlockStart) -> Iterator[RowBlock]:
        """Yield the blocks of a group from `position` on, up to the end of the last epoch. Raises InputError like
        `FragmentReader.read`, and FatalTrainingError for an epoch without rows."""
        epochs = self._stream.nb_epochs
        while epochs is None or position.epoch < epochs:
            some = position.number > 0
            for block in self._epoch_blocks(group, position):
                some = some or len(block.rows) > 0
                yield block
            if not some:
                raise FatalTrainingError(
                    f"data set {self._name!r}: the files of a group of lanes have no row",
                    hint="leave out empty files, or those that stream.on_error leaves out, or add others",
                )
            position = BlockStart(position.epoch + 1, 0, 0, 0)

    def _epoch_blocks(self, group: int, begin: BlockStart) -> Iterator[RowBlock]:
        parts: list[pa.RecordBatch] = []
        origins: list[npt.NDArray[np.int64]] = []
        missing, position, left_out = self.rows, begin, 0
        fragments = islice(self._order.epoch_fragments(begin.epoch, group), begin.fragment, None)
        for number, fragment in enumerate(fragments, start=begin.fragment):
            row = begin.row if number == begin.fragment else 0
            if self.reader.why_left_out(fragment.file) is not None:
                left_out += fragment.group in (None, 0)
                continue
            for batch in self.reader.read(fragment, row):
                while len(batch):
                    part = batch.slice(0, missing)
                    # an exact copy: behind the texts of a reader there may be as much room again
                    halves = pa.Table.from_batches([part.slice(0, 1), part.slice(1)])
                    parts += halves.combine_chunks().to_batches()
                    origins.append(_row_origins(fragment, row, len(part)))
                    row, missing, batch = row + len(part), missing - len(part), batch.slice(len(part))
                    if not missing:
                        yield self._block(group, position, parts, origins, left_out)
                        parts, origins, missing, left_out = [], [], self.rows, 0
                        position = BlockStart(begin.epoch, position.number + 1, number, row)
        if parts or left_out:
            yield self._block(group, position, parts, origins, left_out)

    def _block(
        self,
        group: int,
        position: BlockStart,
        parts: Sequence[pa.RecordBatch],
        origins: Sequence[npt.NDArray[np.int64]],
        files_left_out: int,
    ) -> RowBlock:
        rows = _joined_batches(parts, self._name)
        pa.default_memory_pool().release_unused()
        if rows.nbytes < max(ENCODE_BATCH_BYTES, _LONG_ROW_BYTES * len(rows)):
            rows = rows.combine_chunks()
        order = np.arange(len(rows))
        if self._stream.shuffle_buffer:
            key = permutation_key(self._seed, f"{self._name}/{group}/rows/{position.number}", position.epoch)
            order = Permutation(len(rows), key).map(order)
        all_origins = np.concatenate([np.zeros((0, 3), np.int64), *origins])
        texts = rows[TEXT_COLUMN].chunks if len(rows) else ()
        sizes = np.concatenate([np.zeros(0, np.int64), *(PackedTexts.from_arrow(each).sizes for each in texts)])
        shares = share_rows(order, sizes, self.lanes_per_group, position.number + position.epoch)
        return RowBlock(position=position, rows=rows, origins=all_origins, shares=shares, files_left_out=files_left_out)


def share_rows(
    order: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], lanes: int, turn: int
) -> list[npt.NDArray[np.int64]]:
    """Deal the rows of a block, int64 [rows], to lanes, in `order` inside of each. `sizes`: bytes of each row. Each of
    the longest rows goes to the lane with the fewest bytes (Graham's LPT rule), the longest to lane `turn` modulo
    `lanes`; the other rows go round."""
    falling = order[np.argsort(-sizes[order], kind="stable")]
    lane = np.empty(len(order), np.int64)
    lane[falling] = np.arange(len(order)) % lanes
    loads = [(0, number) for number in range(lanes)]
    for row in falling[: lanes * _LONGEST_ROWS].tolist():
        load, lane[row] = loads[0]
        heapq.heapreplace(loads, (load + int(sizes[row]), int(lane[row])))
    return [order[lane[order] == (number - turn) % lanes] for number in range(lanes)]


def _joined_batches(parts: Sequence[pa.RecordBatch], name: str) -> pa.Table:
    if all(part.schema.equals(parts[0].schema) for part in parts):
        return pa.Table.from_batches(parts, parts[0].schema if parts else pa.schema([]))
    try:
        # this call imports pandas
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
"""Maximum blocks that wait for a lane. A lane with more reads them again by itself until it has caught up."""
_FEWEST_ROWS = 32
"""Minimum rows of a lane that are encoded at a time."""
_FEW_SAMPLES = 8
"""A lane with fewer samples left is encoded together with another."""


@dataclass(kw_only=True)
class LaneBlock:
    """The share of one lane in a block, which is encoded as its samples are asked for."""

    block: RowBlock | None
    """The texts; None once all are encoded."""
    position: BlockStart
    rows: npt.NDArray[np.int64]
    """Rows of the block, before any filter."""
    files_left_out: int
    """Files that were skipped before the block, counted by the first lane of a group alone."""
    samples: LaneSamples
    origins: npt.NDArray[np.int64]
    """As in `RowBlock`, of the rows here."""
    encoded: int
    """The first rows, whose texts were encoded, or are before the place where the lane resumed."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows without a text or token, by reason."""

    def add(self, rows: int, texts: npt.NDArray[np.int64], left_out: Counter[str], encoded: Encoded) -> None:
        """Add the next rows: which of them have a text, and the tokens of the texts."""
        numbers = self.encoded + texts
        self.encoded += rows
        self.samples.add(*encoded, numbers, last=self.encoded == len(self.rows))
        self.left_out.update(left_out)
        self.left_out["no token"] = self.samples.empty
        if self.encoded == len(self.rows):
            self.block = None


class LaneGroup:
    """The lanes of a group that this process reads."""

    def __init__(
        self, group: int, lanes: Mapping[int, LaneCursor], blocks: RowBlocks, shape: SampleShape, encode: EncodeFunction
    ) -> None:
        self._group = group
        self._from = lanes
        self._blocks, self._shape, self._encode = blocks, shape, encode
        self._ahead: Prefetcher[RowBlock] | None = None
        self._waiting: dict[int, deque[LaneBlock]] = {lane: deque() for lane in lanes}
        self._open: dict[int, LaneBlock] = {}
        """The latest block that each lane asked for."""
        self._newest: BlockStart | None = None
        """Position of the newest block that was read for the whole group."""
        self._catching_up: dict[int, Prefetcher[RowBlock]] = {}
        """Readers of lanes that are too far behind the others, by lane."""

    def next_block(self, lane: int) -> LaneBlock | None:
        """Return the next block of a lane; None behind the last epoch. Raises as `RowBlocks.read`."""
        waiting = self._waiting[lane]
        while not waiting:
            block = next(self._catching_up.get(lane) or self._prefetcher(), None)
            if block is None:
                return None
            if lane not in self._catching_up:
                self._deal(block)
                continue
            waiting.append(self._begin(lane, block))
            if block.position == self._newest:
                del self._catching_up[lane]
        self._open[lane] = waiting.popleft()
        return self._open[lane]

    def _prefetcher(self) -> Prefetcher[RowBlock]:
        """Return the reader of all lanes. The texts of their blocks are encoded before those of another are there."""
        if self._ahead is None:
            self._ahead = self._blocks.prefetcher(self._group, min(each.position for each in self._from.values()))
        else:
            self._ahead.start()
        for lane, block in self._open.items():
            with contextlib.suppress(FatalTrainingError):  # raised again when that lane reaches the texts
                while block.block is not None:
                    self.encode_more(lane)
        return self._ahead

    def _deal(self, block: RowBlock) -> None:
        self._newest = block.position
        for lane, waiting in self._waiting.items():
            # lanes of a group may resume in different blocks
            if lane in self._catching_up or block.position < self._from[lane].position:
                continue
            waiting.append(self._begin(lane, block))
            if len(waiting) > MAX_WAITING_BLOCKS:
                own = self._blocks.read(self._group, waiting[0].position)
                self._catching_up[lane] = Prefetcher(own, 0, name=f"lane-{lane}")
                waiting.clear()

    def read_ahead(self) -> None:
        """Start the reading thread: not before the first samples, which come sooner so."""
        if self._ahead is not None:
            self._ahead.start()

    def close(self) -> None:
        """Stop the reading thread."""
        if self._ahead is not None:
            self._ahead.close()

    def encode_more(self, lane: int) -> None:
        """Encode the next texts of a lane's block, together with those of other lanes that have few samples left."""
        first = self._next_texts(self._open[lane])
        found, size = [first], first[0].nbytes
        for other in sorted({*self._waiting} - {lane}, key=lambda other: (other < lane, other)):
            if size < ENCODE_BATCH_BYTES and (block := self._short_block(other)) is not None:
                with contextlib.suppress(FatalTrainingError):  # raised again when that lane reaches the texts
                    found.append(self._next_texts(block))
                    size += found[-1][0].nbytes
        for (_, add), encoded in zip(found, encode_texts([texts for texts, _ in found], self._encode), strict=True):
            add(encoded)

    def _short_block(self, lane: int) -> LaneBlock | None:
        """Return the block whose texts a lane needs soon, its latest or the next one."""
        blocks = [block for block in (self._open.get(lane), *self._waiting[lane]) if block is not None][:2]
        few = sum(block.samples.left for block in blocks) < _FEW_SAMPLES
        return next((block for block in blocks if few and block.block is not None), None)

    def _begin(self, lane: int, block: RowBlock) -> LaneBlock:
        rows = block.shares[lane // self._blocks.groups]
        start = self._from[lane]
        place = start[4:8] if start.position == block.position else (0, 0, 0, 0)
        return LaneBlock(
            block=block if len(rows) else None,
            position=block.position,
            rows=rows,
            files_left_out=block.files_left_out if lane == self._group else 0,  # counted by the first lane
            samples=LaneSamples(self._shape, place),
            origins=block.origins[rows],
            encoded=place[1],
        )

    def _next_texts(self, block: LaneBlock) -> tuple[pa.Array, Callable[..., None]]:
        """Return the next texts of a block (large_string, without nulls), and what adds their tokens to it."""
        assert block.block is not None
        count = len(block.rows)
        if self._shape.cut is None:
            count = max(_FEWEST_ROWS, int(ENCODE_BATCH_BYTES / len(self._waiting) / block.block.row_bytes))
        wanted = block.rows[block.encoded : block.encoded + count]
        texts, chosen, left_out = self._blocks.reader.texts(block.block.take(wanted))
        if (before := block.samples.start[1]) and block.encoded + len(wanted) == len(block.rows):
            # last: a resume does not wait for the filters of the rows that it passes over
            left_out += self._blocks.reader.texts(block.block.take(block.rows[:before]))[2]
        return texts, partial(block.add, len(wanted), chosen, left_out)


class TextStream:
    """One data set of text; implements `relayrun.tokens.order.sampler.Stream`."""

    def __init__(
        self,
        files: Sequence[TextFileEntry],
        settings: StreamSection,
        shape: SampleShape,
        encode: EncodeFunction,
        *,
        name: str,
        seed: int,
        lanes: int,
    ) -> None:
        """The first sample calls `encode`. `seed` applies if the settings have none."""
        self.name = name
        self.lanes = lanes
        self.files = files
        self.settings = settings
        own = seed if settings.seed is None else settings.seed
        self.reader = FragmentReader(files, settings)
        order = FragmentOrder(files, settings, name=name, seed=own, groups=group_count(len(files), lanes))
        self.blocks = RowBlocks(order, self.reader, settings, name=name, seed=own, lanes=lanes)
        self.shape = shape
        self.encode = encode

    def first_cursors(self) -> list[Cursor]:
        return [LaneCursor()] * self.lanes

    def record(self) -> dict[str, Any]:
        """Return the values besides settings and files that determine the samples."""
        return {"stream.groups": self.blocks.groups, "stream.block_rows": self.blocks.rows}

    def check_cursors(self, cursors: Sequence[Cursor]) -> None:
        """Raise ValueError for cursors that do not fit this stream."""
        if len(cursors) != self.lanes:
            raise ValueError(f"it has {len(cursors)} lanes, and data.lanes is {self.lanes}")
        length = len(LaneCursor._fields)
        if any(len(cursor) != length or min(cursor) < 0 for cursor in cursors):
            raise ValueError(f"a cursor is no list of {length} numbers")

    def open_lanes(self, cursors: Mapping[int, Cursor]) -> OpenTextLanes:
        return OpenTextLanes(self, {lane: LaneCursor(*cursor) for lane, cursor in cursors.items()})


_SAMPLES_FIRST = 3
"""Samples of a lane before the next block is read: a reader of batches takes two before anybody has the first."""


@dataclass
class _Lane:
    """A lane that is being read."""

    cursor: LaneCursor
    """The cursor at the start of the current block."""
    taken: int
    """Samples that were taken from the block."""
    block: LaneBlock | None = None
    """The current block; None before the first."""
    empty_since: int | None = None
    """The epoch of the first block without samples since the last sample."""


class OpenTextLanes:
    """Some lanes of a stream, read by one thread."""

    def __init__(self, stream: TextStream, cursors: Mapping[int, LaneCursor]) -> None:
        self._stream = stream
        self._lanes = {lane: _Lane(cursor, cursor.taken) for lane, cursor in cursors.items()}
        groups: dict[int, dict[int, LaneCursor]] = {}
        for lane, cursor in cursors.items():
            groups.setdefault(lane % stream.blocks.groups, {})[lane] = cursor
        self._groups = {
            group: LaneGroup(group, members, stream.blocks, stream.shape, stream.encode)
            for group, members in groups.items()
        }

    def take(self, lane: int) -> SampleRow:
        """Return the next sample of a lane. Raises FatalTrainingError behind the last epoch and for a lane without
        samples in a whole epoch; InputError for an unreadable file."""
        now = self._lanes[lane]
        while now.block is None or now.taken >= len(now.block.samples):
            if now.block is not None and now.block.block is not None:
                self._groups[lane % self._stream.blocks.groups].encode_more(lane)
            else:
                self._next_block(lane, now)
        row = now.block.samples.row(now.taken)
        if now.taken == now.cursor.taken + _SAMPLES_FIRST:
            self._groups[lane % self._stream.blocks.groups].read_ahead()
        now.taken += 1
        now.empty_since = None
        return row

    def origins(self, lane: int) -> list[SampleSegment]:
        """Return the origins of the text of a lane's latest sample."""
        now = self._lanes[lane]
        assert now.block is not None
        found = []
        for number, offset, tokens in now.block.samples.origins(now.taken - 1):
            file, group, row = now.block.origins[number].tolist()
            path = self._stream.files[file].path
            prefix = path if group < 0 else f"{path}, row group {group}"
            found.append(SampleSegment(prefix=prefix, document=row, offset=offset, tokens=tokens))
        return found

    def cursor(self, lane: int) -> Cursor:
        """Return the cursor of a lane behind its latest sample."""
        now = self._lanes[lane]
        place = now.cursor[4:8] if now.block is None else now.block.samples.places[now.taken]
        return (*now.cursor[:4], *place, *now.cursor[8:])

    def close(self) -> None:
        """Stop threads and close files."""
        for group in self._groups.values():
            group.close()

    def _next_block(self, lane: int, now: _Lane) -> None:
        stream = self._stream
        if now.block is not None and not len(now.block.samples):
            epoch = now.block.position.epoch
            if now.empty_since is None:
                now.empty_since = epoch
            elif epoch > now.empty_since + 1:
                raise FatalTrainingError(
                    f"data set {stream.name!r}: lane {lane} of {stream.lanes} got no sample in the whole epoch "
                    f"{epoch - 1}",
                    hint="give more rows, filter fewer, or begin a run with fewer data.lanes",
                )
        block = self._groups[lane % stream.blocks.groups].next_block(lane)
        if block is None:
            raise FatalTrainingError(
                f"data set {stream.name!r} is read to the end of its epoch {stream.settings.nb_epochs}, and the run "
                "asks for more",
                hint="take stream.nb_epochs away, give a lower training.steps, or more data",
            )
        if now.block is not None:
            now.cursor, now.taken = _cursor_after(now.cursor, now.block)._replace(**block.position._asdict()), 0
        elif block.position != now.cursor.position or now.cursor.rows_before >= max(1, len(block.rows)):
            words = f"data set {stream.name!r}: lane {lane} stood at {now.cursor.position}, where no block begins"
            raise FatalTrainingError(words, hint="the files are not those of the checkpoint; put them back")
        now.block = block


def _cursor_after(cursor: LaneCursor, block: LaneBlock) -> LaneCursor:
    return cursor._replace(
        taken=0,
        rows_before=0,
        tokens_before=0,
        empty_before=0,
        rows=cursor.rows + len(block.rows),
        left_out=cursor.left_out + block.left_out.total(),
        samples=cursor.samples + len(block.samples),
        files=cursor.files + block.files_left_out,
    ).with_left_out(block.left_out)
