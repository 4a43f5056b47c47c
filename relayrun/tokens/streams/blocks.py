"""Rows of a stream, block by block: what one group of lanes reads.

The rows of a group's fragments, as they lie in the files, are cut into blocks of equal size; an epoch's last block is
shorter, and no block goes on into the next epoch. Filters come later, so a block's place does not depend on them.
A permutation shuffles each block by itself, and its rows are dealt to the lanes of the group in turn. So where a lane
stands is told by the place of its block and a number inside of it; nothing that was read before is needed to go on.

Rejected: a buffer from which random rows are drawn (its content would be the state); rows dealt by fragments alone
(lanes would get unequal shares wherever fragments are few).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.config.sections.streams import StreamSection
from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.streams.fragments import Fragment, FragmentOrder
from relayrun.tokens.streams.lane_cursor import BlockPosition
from relayrun.tokens.streams.rows import FragmentReader, arrow_integers

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
