"""A data set of text that is tokenized while it is read, in place of numbered samples.

files → fragments → blocks of rows, shuffled → lanes → filters → tokens → windows → rows of a lane, in order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relayrun.config.sections.data import StreamSection as StreamSettings
from relayrun.errors import FatalTrainingError
from relayrun.tokens.order.datasets import SampleSegment
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.order.sampler import Cursor
from relayrun.tokens.shards.manifest import TextFileEntry
from relayrun.tokens.streams.blocks import LaneBlock, LaneGroup, RowBlocks
from relayrun.tokens.streams.fragments import FragmentOrder, FragmentReader, group_count
from relayrun.tokens.streams.lane_cursor import LaneCursor
from relayrun.tokens.streams.samples import EncodeFunction, SampleShape

_TAKEN = LaneCursor._fields.index("taken")


class TextStream:
    """One data set of text; implements `relayrun.tokens.order.sampler.Stream`."""

    def __init__(
        self,
        files: Sequence[TextFileEntry],
        settings: StreamSettings,
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


class _Lane:
    """A lane that is being read."""

    def __init__(self, cursor: LaneCursor) -> None:
        self.cursor = cursor
        """The cursor at the start of the current block."""
        self.taken = cursor.taken
        """Samples that were taken from the block."""
        self.block: LaneBlock | None = None
        """The current block; None before the first."""
        self.empty_since: int | None = None
        """The epoch of the first block without samples since the last sample."""


class OpenTextLanes:
    """Some lanes of a stream, read by one thread."""

    def __init__(self, stream: TextStream, cursors: Mapping[int, LaneCursor]) -> None:
        self._stream = stream
        self._lanes = {lane: _Lane(cursor) for lane, cursor in cursors.items()}
        groups: dict[int, dict[int, LaneCursor]] = {}
        for lane, cursor in cursors.items():
            groups.setdefault(stream.blocks.group_of(lane), {})[lane] = cursor
        self._groups = {
            group: LaneGroup(group, members, stream.blocks, stream.shape, stream.encode)
            for group, members in groups.items()
        }

    def take(self, lane: int) -> SampleRow:
        """Return the next sample of a lane. Raises FatalTrainingError behind the last epoch and for a lane without
        samples in a whole epoch; InputError for an unreadable file."""
        now = self._lanes[lane]
        while now.block is None or now.taken >= len(now.block.samples):
            self._next_block(lane, now)
        row = now.block.samples.row(now.taken)
        now.taken += 1
        now.empty_since = None
        return row

    def origins(self, lane: int) -> list[SampleSegment]:
        """Return the origins of the text of a lane's latest sample."""
        now = self._lanes[lane]
        assert now.block is not None
        found = []
        for text, offset, tokens in now.block.samples.origins(now.taken - 1):
            file, group, row = now.block.origins[text].tolist()
            path = self._stream.files[file].path
            prefix = path if group < 0 else f"{path}, row group {group}"
            found.append(SampleSegment(prefix=prefix, document=row, offset=offset, tokens=tokens))
        return found

    def cursor(self, lane: int) -> Cursor:
        """Return the cursor of a lane behind its latest sample."""
        now = self._lanes[lane]
        return (*now.cursor[:_TAKEN], now.taken, *now.cursor[_TAKEN + 1 :])

    def close(self) -> None:
        """Stop threads and close files."""
        for group in self._groups.values():
            group.close()

    def _next_block(self, lane: int, now: _Lane) -> None:
        stream = self._stream
        block = self._groups[stream.blocks.group_of(lane)].next_block(lane)
        if block is None:
            raise FatalTrainingError(
                f"data set {stream.name!r} is read to the end of its epoch {stream.settings.nb_epochs}, and the run "
                "asks for more",
                hint="take stream.nb_epochs away, give a lower training.steps, or more data",
            )
        if now.block is not None:
            now.cursor, now.taken = _cursor_after(now.cursor, now.block)._replace(**block.position._asdict()), 0
        elif block.position != now.cursor.position:
            words = f"data set {stream.name!r}: lane {lane} stood at {now.cursor.position}, where no block begins"
            raise FatalTrainingError(words, hint="the files are not those of the checkpoint; put them back")
        now.block = block
        if len(block.samples):
            return
        if now.empty_since is None:
            now.empty_since = block.position.epoch
        elif block.position.epoch > now.empty_since + 1:
            raise FatalTrainingError(
                f"data set {stream.name!r}: lane {lane} of {stream.lanes} got no sample in the whole epoch "
                f"{block.position.epoch - 1}",
                hint="give more rows, filter fewer, or begin a run with fewer data.lanes",
            )


def _cursor_after(cursor: LaneCursor, block: LaneBlock) -> LaneCursor:
    return cursor._replace(
        taken=0,
        rows=cursor.rows + block.rows,
        left_out=cursor.left_out + block.rows - len(block.origins) + block.samples.empty,
        samples=cursor.samples + len(block.samples),
        files=cursor.files + block.files_left_out,
    ).with_left_out(block.left_out)
