"""Copies of a rank's state in the memory of the next node: a ring over the nodes, and the format of a copy.

Rank r of a node sends each of its copies to the rank with the same place on the next node, beside the steps that
follow, and takes that of the node before. It goes by messages of the group that all ranks are in, with a tag of their
own (see `train.messages`): no port is opened, and nobody else can send. A copy counts when its last byte has come
and all bytes have the hash that the sender wrote.

The hash of a copy, XXH3-128, is over its bytes and over what its header says of them: whose state it is, of which
iteration, how it is laid out. So neither a changed byte nor a changed header passes for a copy.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from relayrun.control.agent.memory_copies import HEADER_BYTES, SLOTS_PER_RANK, MemorySlot, NodeMemoryFullError
from relayrun.train.checkpoint.async_writer import BACKGROUND_NICE
from relayrun.train.distributed import Ranks

ByteArray = npt.NDArray[np.uint8]
COPY_FIELDS = ("rank", "ranks", "iteration", "size", "plain", "layout")
"""What a header says besides the hash: the rank and the number of all ranks; bytes in all, and of the plain values
before the parts; a hash of the names, shapes and types of the parts."""


@dataclass(frozen=True)
class MemoryCopy:
    """A copy that holds what was written."""

    header: dict[str, Any]
    body: ByteArray


def copy_hash(content: xxhash.xxh3_128, header: Mapping[str, Any]) -> str:
    """The hash of a copy, whose bytes `content` has seen."""
    content.update(json.dumps([header.get(name) for name in COPY_FIELDS]).encode())
    return content.hexdigest()


def whole_copy(slot: MemorySlot, *, rank: int, ranks: int, iteration: int) -> MemoryCopy | None:
    """The copy in this slot; None where it is of something else, or not what was written."""
    header = slot.header() or {}
    if [header.get(name) for name in ("rank", "ranks", "iteration")] != [rank, ranks, iteration]:
        return None
    try:
        body = copy_body(slot, int(header["size"]))
        if len(body) == header["size"] and copy_hash(xxhash.xxh3_128(body.data), header) == header["hash"]:
            return MemoryCopy(header, body)
    except (OSError, KeyError, TypeError, ValueError):
        pass
    return None


def copy_body(slot: MemorySlot, size: int) -> ByteArray:
    """The bytes behind the header of a slot, as they lie in memory. Raises OSError and ValueError."""
    return np.frombuffer(slot.open(), dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + size]


def write_copy(slot: MemorySlot, pieces: Sequence[torch.Tensor | bytes], **header: Any) -> MemoryCopy:
    """Lay the pieces one behind the other into a slot that has room for them, and let it count."""
    slot.void()
    target, found, at = copy_body(slot, header["size"]), xxhash.xxh3_128(), 0
    for piece in pieces:
        if isinstance(piece, bytes):
            part = target[at : at + len(piece)]
            part[:] = np.frombuffer(piece, dtype=np.uint8)
        else:
            part = target[at : at + piece.nbytes]
            if len(part):
                torch.from_numpy(part).copy_(piece.contiguous().reshape(-1).view(torch.uint8))
        found.update(part.data)
        at += len(part)
    header["hash"] = copy_hash(found, header)
    slot.commit(**header)
    return MemoryCopy(header, target)


log = logging.getLogger(__name__)

COPIES_KEPT = 2
"""Tag of the messages; those of saves have another."""
CHUNK_BYTES = 1 << 22
"""Bytes of a message: what others have to say to that rank waits for one at most."""
SPARE_BYTES = 1 << 20
"""Bytes of room besides a copy, so that the next one, which may be a little larger, finds it too."""


class NeighbourReplica:
    """This rank's place in the ring. All ranks call `begin` and `bring` at the same copies."""

    def __init__(self, folder: Path, ranks: Ranks, *, per_node: int) -> None:
        """`folder`: of the agent of this node. `per_node`: ranks of each node; there are two nodes at least."""
        self._ranks = ranks
        self._next = (ranks.rank + per_node) % ranks.world_size
        self._before = (ranks.rank - per_node) % ranks.world_size
        self._slots = [MemorySlot(folder, self._before, number, kept=True) for number in range(SLOTS_PER_RANK)]
        self._thread: threading.Thread | None = None
        self._complained = False
        self.seconds = 0.0
        """What the last exchange took."""

    def begin(self, copy: MemoryCopy) -> None:
        """Send this rank's copy to the next node, and keep that of the node before. `wait` says when that is over."""
        self._thread = threading.Thread(target=self._run, args=(copy,), name="neighbour", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether a copy still is."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when nothing is under way: the copy that is being sent may change."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def void(self, *, after: int = -1) -> None:
        """Let no copy count that is later than iteration `after`."""
        self.wait()
        discard_later_copies(self._slots, after=after)

    def bring(self, iteration: int, lost: Sequence[bool], own: MemorySlot) -> MemoryCopy | None:
        """Bring back copies that were lost, from the nodes that keep them; return this rank's, which is then in `own`.

        `lost`: for each rank, whether it has no copy of this iteration. None for a rank whose copy is not lost, and for
        one whose copy nobody has.
        """
        kept = None
        if lost[self._before]:
            found = (whole_copy(slot, rank=self._before, ranks=len(lost), iteration=iteration) for slot in self._slots)
            kept = next((copy for copy in found if copy is not None), None)
        taken = self._swap(
            to=self._before if lost[self._before] else None,
            copy=kept,
            source=self._next if lost[self._ranks.rank] else None,
            slots=[own],
            of=self._ranks.rank,
        )
        if not taken:
            return None
        return whole_copy(own, rank=self._ranks.rank, ranks=len(lost), iteration=iteration)

    def _run(self, copy: MemoryCopy) -> None:
        thread = threading.get_native_id()  # on Linux a priority is of a thread
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + BACKGROUND_NICE)
        started = time.perf_counter()
        try:
            self._swap(to=self._next, copy=copy, source=self._before, slots=self._slots, of=self._before)
        except (RuntimeError, OSError, ValueError) as error:  # a rank is gone, and this one is ended soon
            self._complain(f"{type(error).__name__}: {error}")
        self.seconds = time.perf_counter() - started

    def _swap(
        self, *, to: int | None, copy: MemoryCopy | None, source: int | None, slots: Sequence[MemorySlot], of: int
    ) -> bool:
        """Send a copy to one rank while that of rank `of` comes from another into the older of `slots`.

        Both sides of a transfer call this at the same time. A copy of None is sent as a header without one. Returns
        whether a copy has come, and counts.
        """
        header = b"" if copy is None else json.dumps(copy.header).encode()
        words = np.zeros(HEADER_BYTES, dtype=np.uint8)
        words[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        theirs = np.zeros(HEADER_BYTES, dtype=np.uint8)
        self._pass(to, words, source, theirs)
        text = theirs.tobytes().rstrip(b"\0")
        coming = json.loads(text) if text else {"size": 0}
        size = int(coming["size"])
        slot = min(slots, key=lambda slot: (slot.header() or {"iteration": -1})["iteration"])
        into = self._room(slots, slot, size) if size else None
        content, going = xxhash.xxh3_128(), copy.body if copy is not None and to is not None else words[:0]
        for at in range(0, max(len(going), size), CHUNK_BYTES):
            until = min(at + CHUNK_BYTES, size)
            part = np.empty(max(0, until - at), dtype=np.uint8) if into is None else into[at:until]
            self._pass(to, going[at : at + CHUNK_BYTES], source, part)
            content.update(part.data)
        if into is None:
            return False
        if coming.get("rank") != of or copy_hash(content, coming) != coming["hash"]:
            self._complain(f"the copy of rank {of} did not arrive as it was sent")
            return False
        slot.commit(**coming)
        return True

    def _pass(self, to: int | None, out: ByteArray, source: int | None, into: ByteArray) -> None:
        works = []
        if to is not None and len(out):
            works.append(dist.isend(torch.from_numpy(out), to, self._ranks.cpu_group, COPIES_KEPT))
        if source is not None and len(into):
            works.append(dist.irecv(torch.from_numpy(into), source, self._ranks.cpu_group, COPIES_KEPT))
        for work in works:
            assert work is not None
            work.wait()

    def _room(self, slots: Sequence[MemorySlot], slot: MemorySlot, size: int) -> ByteArray | None:
        """The bytes of a slot that is void, with room; None where this node has none, and nothing is kept."""
        try:
            for each in slots:
                each.reserve(size, spare=SPARE_BYTES)
        except (NodeMemoryFullError, OSError, ValueError) as error:
            self._complain(f"no copies of rank {self._before} are kept here: {error}")
            return None
        slot.void()
        return copy_body(slot, size)

    def _complain(self, words: str) -> None:
        if not self._complained:
            log.warning("rank %s: neighbour's copies in memory: %s", self._ranks.rank, words)
        self._complained = True


def discard_later_copies(slots: Sequence[MemorySlot], *, after: int) -> None:
    """Let no copy count that is later than iteration `after`."""
    for slot in slots:
        if after < 0 or (slot.header() or {"iteration": -1})["iteration"] > after:
            slot.void()
