"""Which rank reads which blocks of a checkpoint, where several ranks want the same ones.

A block is read whole, since it has one hash. What several ranks want, one of them reads for all. The largest block goes
first, each to the rank that has least to read: with the n ranks of a group, each reads at most the n-th part of what
they want, and the largest block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
