"""Parallel load: a block that several ranks want is read by one of them and sent to the others.

A block is read whole, since it has one hash. What several ranks want, one of them reads for all. The largest block goes
first, each to the rank that has least to read: with the n ranks of a group, each reads at most the n-th part of what
they want, and the largest block.

In rounds: each rank reads some blocks and compares them with their hashes, the ranks agree that all went well, and then
every rank sends to the whole group what it has read, while it reads what the next round sends. What fails on one rank
is raised on all of the group, at the end of the round: none waits for a rank that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from relayrun.train.messages import portable_error


class BlockLocation(NamedTuple):
    """Where a block lies."""

    file: str
    at: int
    """Its first byte in the file."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ReadAssignment:
    """Who reads what; each list is that of a rank of the group, in the order in which it reads."""

    shared: list[list[BlockLocation]]
    """For itself, where it wants them, and for others."""
    alone: list[list[BlockLocation]]
    """What no other rank wants."""


def assign_reads(wanted: Sequence[Sequence[BlockLocation]]) -> ReadAssignment:
    """Divide what the ranks of a group want among them; the same on each of them.

    `wanted`: by rank, each block once.
    """
    takers: dict[BlockLocation, list[int]] = {}
    for rank, places in enumerate(wanted):
        for place in places:
            takers.setdefault(place, []).append(rank)
    alone: list[list[BlockLocation]] = [[] for _ in wanted]
    shared: list[list[BlockLocation]] = [[] for _ in wanted]
    for place, ranks in takers.items():
        if len(ranks) == 1:
            alone[ranks[0]].append(place)
    load = [sum(place.bytes for place in places) for places in alone]
    common = (place for place, ranks in takers.items() if len(ranks) > 1)
    for place in sorted(common, key=lambda place: (-place.bytes, place)):
        rank = min(range(len(load)), key=lambda rank: (load[rank], rank))
        load[rank] += place.bytes
        shared[rank].append(place)
    return ReadAssignment(shared=[sorted(places) for places in shared], alone=[sorted(places) for places in alone])


def read_batches(places: Sequence[BlockLocation], size: int) -> list[list[BlockLocation]]:
    """Split what a rank reads, in order, into parts of at most `size` bytes, or of one block that is larger."""
    found: list[list[BlockLocation]] = []
    room = 0
    for place in places:
        if not found or place.bytes > room:
            found.append([])
            room = size
        found[-1].append(place)
        room -= place.bytes
    return found


BATCH_BYTES = 1 << 28
"""Bytes that a rank reads in a round, at most; a larger block is a round of its own. Two rounds are in memory."""
MESSAGE_BYTES = 1 << 26
"""Bytes that are sent at a time: so much memory it takes on the device."""


class BlockExchange:
    """The ranks that want the same blocks, as data-parallel replicas do."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        round_size: int = BATCH_BYTES,
        piece: int = MESSAGE_BYTES,
    ) -> None:
        """`device`: from where `group` sends. `round_size`, `piece`: see ROUND and PIECE."""
        self._group = group
        self._device = device
        self._round = round_size
        self._piece = piece

    def blocks(
        self,
        wanted: Sequence[BlockLocation],
        read: Callable[[BlockLocation], bytearray],
        put: Callable[[BlockLocation, bytearray], None],
        *,
        met: Exception | None = None,
    ) -> None:
        """Give each of the `wanted` blocks to `put`, in any order; all ranks of the group together.

        `read` is called for the blocks that this rank reads, in another thread as well. Raises on every rank what
        either of them raised on the first rank where one did; but an error with a block that no other rank wants is
        raised here alone. `met`: why this rank does not even know what it wants; it is raised on all as well.
        """
        try:
            piece = torch.empty(self._piece, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # the device has no room
            met = met or error
        self._agree(met)
        everywhere: list[list[BlockLocation]] = [[]] * self._group.size()
        dist.all_gather_object(everywhere, list(wanted), group=self._group)
        division, own = assign_reads(everywhere), self._group.rank()
        parts = [read_batches(places, self._round) for places in division.shared]
        if last := max(map(len, parts)):
            self._exchange(parts, last, set(wanted), read, put, piece)
        for place in division.alone[own]:
            put(place, read(place))

    def _exchange(
        self,
        parts: list[list[list[BlockLocation]]],
        last: int,
        wanted: set[BlockLocation],
        read: Callable[[BlockLocation], bytearray],
        put: Callable[[BlockLocation, bytearray], None],
        piece: torch.Tensor,
    ) -> None:
        own = self._group.rank()
        mine: list[list[BlockLocation]] = parts[own] + [[]] * (last - len(parts[own]))
        met: Exception | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
            ahead = reader.submit(_all, read, mine[0])
            for number in range(last):
                found: list[bytearray] = []
                try:
                    found = ahead.result()
                except Exception as error:
                    met = met or error
                self._agree(met)
                following = mine[number + 1] if number + 1 < last else []
                ahead = reader.submit(_all, read, following)
                for rank, each in enumerate(parts):
                    for index, place in enumerate(each[number] if number < len(each) else ()):
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
        """Send a block from one rank to all; return it where it is wanted. `data`: there, on the sender."""
        sending = data is not None
        if data is None and wanted:
            data = bytearray(place.bytes)
        whole = None if data is None else torch.frombuffer(data, dtype=torch.uint8)
        for start in range(0, place.bytes, self._piece):
            part = piece[: min(self._piece, place.bytes - start)]
            here = None if whole is None else whole[start : start + len(part)]
            if sending and here is not None:
                part.copy_(here)
            dist.broadcast(part, group=self._group, group_src=sender)
            if not sending and here is not None:
                here.copy_(part)
        return data if wanted else None

    def _agree(self, met: Exception | None) -> None:
        """Go on where no rank of the group met an error; raise that of the first rank that did on all of them."""
        failed = torch.full((1,), int(met is not None), dtype=torch.int32, device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if int(failed.item()):
            errors: list[Exception | None] = [None] * self._group.size()
            dist.all_gather_object(errors, None if met is None else portable_error(met), group=self._group)
            raise next(error for error in errors if error is not None)


def _all(read: Callable[[BlockLocation], bytearray], places: Sequence[BlockLocation]) -> list[bytearray]:
    return [read(place) for place in places]
