"""A data set of text that is tokenized as it is read: what a mixture has in place of numbered samples.

    files → fragments → blocks of rows, shuffled → lanes → filters → tokens → windows → rows of a lane, in order

A lane's cursor is some integers: epoch, number, fragment and row of its block (`cursor.Place`), samples that were
taken from the block, and, of the blocks before it in all epochs, rows that were read, rows that were left out, samples,
and how many rows were left out for which reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.config.streams import Stream as StreamSettings
from relayrun.data.order.lanes import Cursor
from relayrun.data.order.windows import Origin
from relayrun.data.rows import Row
from relayrun.data.streams.ahead import Ahead
from relayrun.data.streams.blocks import Block, Blocks
from relayrun.data.streams.cursor import LEAST_FIELDS, LaneCursor, Place
from relayrun.data.streams.fragments import FragmentOrder, groups_of
from relayrun.data.streams.rows import FragmentReader
from relayrun.data.streams.samples import Encode, LaneSamples, Shape, origin_of
from relayrun.errors import FatalTrainingError
from relayrun.shards.manifest import FileEntry


class TextStream:
    """One data set of text (`relayrun.data.order.lanes.Stream`)."""

    def __init__(
        self,
        files: Sequence[FileEntry],
        settings: StreamSettings,
        shape: Shape,
        encode: Encode,
        *,
        name: str,
        seed: int,
        lanes: int,
    ) -> None:
        """`encode` is asked when the first sample is; `seed` holds where the settings have none."""
        self.name = name
        self.lanes = lanes
        self.files = files
        self.settings = settings
        own = seed if settings.seed is None else settings.seed
        self.reader = FragmentReader(files, settings)
        order = FragmentOrder(files, settings, name=name, seed=own, groups=groups_of(len(files), lanes))
        self.blocks = Blocks(order, self.reader, settings, name=name, seed=own, lanes=lanes)
        self.shape = shape
        self.encode = encode

    def first_cursors(self) -> list[Cursor]:
        """Where all lanes begin."""
        return [[*LaneCursor()] for _ in range(self.lanes)]

    def record(self) -> dict[str, Any]:
        """What decides the samples beside settings and files."""
        return {"stream.groups": self.blocks.groups, "stream.block_rows": self.blocks.rows}

    def check_cursors(self, cursors: Sequence[Cursor]) -> None:
        """Raise ValueError if these can be no cursors of this stream."""
        if len(cursors) != self.lanes:
            raise ValueError(f"it has {len(cursors)} lanes, and data.lanes is {self.lanes}")
        lengths = LEAST_FIELDS, len(LaneCursor._fields)
        if any(len(cursor) not in lengths or min(cursor) < 0 for cursor in cursors):
            raise ValueError(f"a cursor is no list of {lengths[0]} or {lengths[1]} numbers")

    def open_lanes(self, cursors: Mapping[int, Cursor]) -> OpenTextLanes:
        """Go on in some lanes at these cursors, by lane."""
        return OpenTextLanes(self, {lane: LaneCursor(*cursor) for lane, cursor in cursors.items()})


@dataclass
class _Share:
    """What one lane gets of a block."""

    place: Place
    rows: pa.Table
    origins: npt.NDArray[np.int64]
    files_left_out: int


class _Group:
    """A group of lanes that share files, and the lanes of it that are read here."""

    def __init__(self, stream: TextStream, group: int, lanes: Mapping[int, LaneCursor]) -> None:
        self._stream = stream
        self._group = group
        self._from = {lane: cursor.place for lane, cursor in lanes.items()}
        self._waiting: dict[int, deque[_Share]] = {lane: deque() for lane in lanes}
        self._blocks: Ahead[Block] | None = None

    def next_share(self, lane: int) -> _Share | None:
        """The next block of a lane; None behind the last epoch."""
        while not self._waiting[lane]:
            if self._blocks is None:
                blocks = self._stream.blocks.read(self._group, min(self._from.values()))
                depth = self._stream.settings.nb_prefetch
                self._blocks = Ahead(blocks, depth, name=f"{self._stream.name}-{self._group}")
            block = next(self._blocks, None)
            if block is None:
                return None
            for other, waiting in self._waiting.items():
                if block.place >= self._from[other]:  # lanes of a group are not all in one block
                    left_out = block.files_left_out if other == self._group else 0  # its first lane counts them
                    waiting.append(_Share(block.place, *self._stream.blocks.of_lane(block, other), left_out))
        return self._waiting[lane].popleft()

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()


class _Lane:
    """One lane that is being read."""

    def __init__(self, cursor: LaneCursor) -> None:
        self.cursor = cursor
        self.samples: LaneSamples | None = None
        """Those of its block; None before the first one is there."""
        self.origins: npt.NDArray[np.int64] = np.zeros((0, 3), np.int64)
        """Where all rows of the block come from, as in `Block`."""
        self.chosen: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Rows of the block that became texts."""
        self.left_out: Counter[str] = Counter()
        """The other rows of the block, by reason."""
        self.files = 0
        """Files that were left out on the way to the block."""
        self.without: int | None = None
        """The epoch since which the lane has had no sample."""


class OpenTextLanes:
    """Some lanes of a stream that are being read, by one thread."""

    def __init__(self, stream: TextStream, cursors: Mapping[int, LaneCursor]) -> None:
        self._stream = stream
        self._lanes = {lane: _Lane(cursor) for lane, cursor in cursors.items()}
        self._groups: dict[int, _Group] = {}
        groups: dict[int, dict[int, LaneCursor]] = {}
        for lane, cursor in cursors.items():
            groups.setdefault(stream.blocks.group_of(lane), {})[lane] = cursor
        for group, members in groups.items():
            self._groups[group] = _Group(stream, group, members)

    def take(self, lane: int) -> Row:
        """Return the next sample of a lane.

        Raises FatalTrainingError behind the last epoch, and where a lane gets no sample in a whole epoch; InputError
        for what cannot be read.
        """
        now = self._lanes[lane]
        while now.samples is None or now.cursor.taken >= len(now.samples):
            self._next_block(lane, now)
        assert now.samples is not None
        row = now.samples.row(now.cursor.taken)
        now.cursor = now.cursor._replace(taken=now.cursor.taken + 1)
        now.without = None
        return row

    def origins(self, lane: int) -> list[Origin]:
        """Where the text of the sample that was taken last from a lane comes from."""
        now = self._lanes[lane]
        assert now.samples is not None
        found = []
        for text, offset, tokens in now.samples.origins(now.cursor.taken - 1):
            file, group, row = now.origins[now.chosen[text]].tolist()
            found.append(origin_of(self._stream.files[file].path, group, row, offset, tokens))
        return found

    def cursor(self, lane: int) -> Cursor:
        """Return where a lane stands behind the sample that was taken last."""
        return [*self._lanes[lane].cursor]

    def close(self) -> None:
        """Let go of threads and files."""
        for group in self._groups.values():
            group.close()

    def _next_block(self, lane: int, now: _Lane) -> None:
        stream = self._stream
        share = self._groups[stream.blocks.group_of(lane)].next_share(lane)
        if share is None:
            raise FatalTrainingError(
                f"data set {stream.name!r} is read to the end of its epoch {stream.settings.nb_epochs}, and the run "
                "asks for more",
                hint="take stream.nb_epochs away, give a lower training.steps, or more data",
            )
        if now.samples is not None:
            now.cursor = _behind(now, now.samples)._replace(**share.place._asdict())
        elif share.place != now.cursor.place:
            raise FatalTrainingError(
                f"data set {stream.name!r}: lane {lane} stood at {now.cursor.place}, where no block begins",
                hint="the files are not those of the checkpoint; put them back",
            )
        now.origins = share.origins
        now.files = share.files_left_out
        texts, now.chosen, now.left_out = stream.reader.texts(share.rows)
        now.samples = LaneSamples(texts, stream.shape, stream.encode)
        now.left_out["no token"] = now.samples.empty
        if len(now.samples):
            return
        if now.without is None:
            now.without = share.place.epoch
        elif share.place.epoch > now.without + 1:
            raise FatalTrainingError(
                f"data set {stream.name!r}: lane {lane} of {stream.lanes} got no sample in the whole epoch "
                f"{share.place.epoch - 1}",
                hint="give more rows, filter fewer, or begin a run with fewer data.lanes",
            )


def _behind(lane: _Lane, samples: LaneSamples) -> LaneCursor:
    """The cursor of a lane, behind the block that it is in."""
    cursor, rows = lane.cursor, len(lane.origins)
    return cursor._replace(
        taken=0,
        rows=cursor.rows + rows,
        left_out=cursor.left_out + rows - len(lane.chosen) + samples.empty,
        samples=cursor.samples + len(samples),
        files=cursor.files + lane.files,
    ).with_left_out(lane.left_out)
