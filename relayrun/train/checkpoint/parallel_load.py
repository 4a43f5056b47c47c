"""Parallel load: one rank reads a block that several ranks need, and sends it to the others.

A block is read whole, since it has one hash. Shared blocks are assigned by descending size, each to the rank with the
least to read: of n ranks in a group, each reads at most an n-th of the needed bytes plus the largest block.

In each batch every rank reads some blocks and verifies their hashes, the ranks agree that all succeeded, then every
rank sends its blocks to the whole group while it reads the next batch. An error on one rank is raised on the whole
group at the end of the batch, so no rank waits for a failed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heapreplace
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
BATCH_BYTES = 1 << 28
"""Largest number of bytes that a rank reads in a batch, apart from a larger block. Two batches are in memory."""
MESSAGE_BYTES = 1 << 26
"""Bytes of a message, and of its buffer on the device."""


class BlockLocation(NamedTuple):
    """Location of a block."""

    file: str
    at: int
    """First byte in the file."""
    bytes: int


@dataclass(frozen=True)
class BlockExchange:
    """Ranks that need the same blocks, such as data-parallel replicas."""

    group: dist.ProcessGroup
    device: torch.device
    """Device from which `group` sends."""
    batch_bytes: int = BATCH_BYTES
    message_bytes: int = MESSAGE_BYTES

    def blocks(
        self,
        wanted: Sequence[BlockLocation],
        read: Callable[[BlockLocation], bytearray],
        put: Callable[[BlockLocation, bytearray], None],
        *,
        met: Exception | None = None,
    ) -> None:
        """Pass each of the `wanted` blocks to `put`, in any order; all ranks of the group together.

        `read` reads the blocks of this rank, also in another thread. An error of `read` or `put` is raised on every
        rank, from the first rank that has one; an error in a block that no other rank needs is raised here only. `met`:
        an error that kept this rank from knowing its blocks; it is raised on all ranks, too.
        """
        try:
            piece = torch.empty(self.message_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # the device lacks memory
            met = met or error
        self._agree(met)
        everywhere: list[list[BlockLocation]] = [[]] * self.group.size()
        dist.all_gather_object(everywhere, list(wanted), group=self.group)
        division, own = assign_reads(everywhere), self.group.rank()
        by_rank = (size_batches(places, self.batch_bytes, lambda place: place.bytes) for places in division.shared)
        if batches := list(zip_longest(*by_rank, fillvalue=())):
            self._exchange(batches, set(wanted), read, put, piece)
        for place in division.alone[own]:
            put(place, read(place))

    def _exchange(
        self,
        batches: Sequence[Sequence[Sequence[BlockLocation]]],
        wanted: set[BlockLocation],
        read: Callable[[BlockLocation], bytearray],
        put: Callable[[BlockLocation, bytearray], None],
        piece: torch.Tensor,
    ) -> None:
        """Read and send batches. `batches`: the blocks of every rank in each batch."""
        own = self.group.rank()
        met: Exception | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
            ahead = reader.submit(_all, read, batches[0][own])
            for number, batch in enumerate(batches, 1):
                found: list[bytearray] = []
                try:
                    found = ahead.result()
                except Exception as error:
                    met = met or error
                self._agree(met)
                ahead = reader.submit(_all, read, batches[number][own] if number < len(batches) else ())
                for rank, places in enumerate(batch):
                    for index, place in enumerate(places):
                        data = self._send(rank, place, found[index] if rank == own else None, place in wanted, piece)
                        if data is not None and met is None:
                            try:
                                put(place, data)
                            except Exception as error:
                                met = error
            self._agree(met)

    def _send(
        self, sender: int, place: BlockLocation, data: bytearray | None, wanted: bool, piece: torch.Tensor
    ) -> bytearray | None:
        """Send a block from one rank to all; return it if it is wanted. `data`: the block, on the sender."""
        sending = data is not None
        if data is None and wanted:
            data = bytearray(place.bytes)
        whole = None if data is None else torch.frombuffer(data, dtype=torch.uint8)
        for start in range(0, place.bytes, self.message_bytes):
            part = piece[: min(self.message_bytes, place.bytes - start)]
            here = None if whole is None else whole[start : start + len(part)]
            if sending and here is not None:
                part.copy_(here)
            dist.broadcast(part, group=self.group, group_src=sender)
            if not sending and here is not None:
                here.copy_(part)
        return data if wanted else None

    def _agree(self, met: Exception | None) -> None:
        """Return if no rank of the group met an error; else raise the first rank's error on all."""
        failed = torch.full((1,), int(met is not None), dtype=torch.int32, device=self.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
        if int(failed.item()):
            errors: list[Exception | None] = [None] * self.group.size()
            dist.all_gather_object(errors, met, group=self.group)
            raise next(error for error in errors if error is not None)


def _all(read: Callable[[BlockLocation], bytearray], places: Sequence[BlockLocation]) -> list[bytearray]:
    return [read(place) for place in places]


@dataclass(frozen=True, kw_only=True)
class ReadAssignment:
    """Assignment of reads; the lists are by rank of the group, each in reading order."""

    shared: list[list[BlockLocation]]
    """Blocks that several ranks need; the reader may be none of them."""
    alone: list[list[BlockLocation]]
    """Blocks that no other rank needs."""


def assign_reads(wanted: Sequence[Sequence[BlockLocation]]) -> ReadAssignment:
    """Divide the blocks that each rank wants among the ranks, each block once; equal on every rank."""
    takers: dict[BlockLocation, list[int]] = {}
    for rank, places in enumerate(wanted):
        for place in places:
            takers.setdefault(place, []).append(rank)
    alone: list[list[BlockLocation]] = [[] for _ in wanted]
    shared: list[list[BlockLocation]] = [[] for _ in wanted]
    for place, ranks in takers.items():
        if len(ranks) == 1:
            alone[ranks[0]].append(place)
    least = sorted((sum(place.bytes for place in places), rank) for rank, places in enumerate(alone))
    common = (place for place, ranks in takers.items() if len(ranks) > 1)
    for place in sorted(common, key=lambda place: (-place.bytes, place)):
        load, rank = least[0]
        heapreplace(least, (load + place.bytes, rank))
        shared[rank].append(place)
    return ReadAssignment(shared=[sorted(places) for places in shared], alone=[sorted(places) for places in alone])


def size_batches(items: Iterable[T], limit: int, size: Callable[[T], int]) -> list[list[T]]:
    """Split items, in order, into batches of at most `limit` bytes, or of one larger item. `size`: bytes of an item."""
    found: list[list[T]] = []
    room = 0
    for item in items:
        if not found or size(item) > room:
            found.append([])
            room = limit
        found[-1].append(item)
        room -= size(item)
    return found
