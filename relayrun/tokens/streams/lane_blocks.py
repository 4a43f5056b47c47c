"""What lanes get of the blocks of their group: samples, made for some lanes together.

An engine needs about as long to be called as to encode 50 kB. So when a lane comes to a block, texts of the lanes that
come to it next are encoded with its own, up to some megabytes; only those of lanes that are read here.

Lanes whose texts are long come through a block later than others, and blocks wait for them. A lane for which more than
`MOST_WAITING` would wait reads them again by itself, until it has caught up: else a stream whose long and short texts
take turns would fill the memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.errors import FatalTrainingError
from relayrun.tokens.streams.ahead import Prefetcher
from relayrun.tokens.streams.blocks import RowBlock, RowBlocks
from relayrun.tokens.streams.lane_cursor import BlockPosition, LaneCursor
from relayrun.tokens.streams.rows import FragmentReader
from relayrun.tokens.streams.samples import ENCODE_BATCH_BYTES, EncodeFunction, LaneSamples, SampleShape, encode_texts

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
        """The next block of a lane; None behind the last epoch. Raises as `Blocks.read` and `FragmentReader.texts`."""
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
