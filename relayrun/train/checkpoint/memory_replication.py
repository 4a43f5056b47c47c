"""Copies of a rank's state in the memory of the next node: a ring over the nodes, and the format of a copy.

A rank sends its copies to the rank with the same local rank on the next node, beside later steps, and receives those of
the node before. The messages use the group of all ranks with a tag of their own (`train.messages`): no port is opened,
and no other process can send. A copy counts when its last byte has arrived and the hash of the sender matches.

The hash, XXH3-128 of the hashes of pieces, covers the bytes and the fields of the header: rank, iteration, layout. So
neither a changed byte nor a changed header passes as a copy. A message to another node also carries HMAC-SHA256 under
the attempt's secret, which covers the restart and the number of the transfer: the header before memory is taken for its
bytes, and these before the copy counts.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from relayrun.control.agent.memory_copies import HEADER_BYTES, SLOTS_PER_RANK, MemorySlot, NodeMemoryFullError
from relayrun.control.rundir.restarts import RESTART_VARIABLE
from relayrun.train.checkpoint.async_writer import lower_thread_priority
from relayrun.train.distributed import Ranks

log = logging.getLogger(__name__)
ByteArray = npt.NDArray[np.uint8]
COPY_FIELDS = ("rank", "ranks", "iteration", "size", "plain", "layout")
"""Header fields besides the hash: rank and number of ranks; bytes in total, and of the plain values before the parts; a
hash of the names, shapes and types of the parts."""
COPY_TAG = 2
"""Tag of the messages; saves have another tag."""
CHUNK_BYTES = 1 << 22
"""Bytes of a message: other messages to that rank wait for one at most."""
HMAC_BYTES = 32
HASH_BYTES, HASH_THREADS = 1 << 26, 8
"""Bytes of a piece that one thread hashes, and most threads: one hashes 8 GB/s."""
SPARE_BYTES = 1 << 20
"""Spare room of a slot, so that a slightly larger next copy fits."""


class NeighbourReplica:
    """Position of this rank in the ring. All ranks call `send` and `fetch` at the same copies."""

    def __init__(self, folder: Path, ranks: Ranks, *, per_node: int, secret: bytes) -> None:
        """`folder`: of this node's agent. `per_node`: ranks per node; there are at least two nodes. `secret`: of the
        attempt."""
        self._secret, self._restart, self._transfers = secret, os.environ.get(RESTART_VARIABLE, "1"), 0
        self._ranks = ranks
        self._next = (ranks.rank + per_node) % ranks.world_size
        self._before = (ranks.rank - per_node) % ranks.world_size
        self._slots = [MemorySlot(folder, self._before, number, kept=True) for number in range(SLOTS_PER_RANK)]
        self._thread: threading.Thread | None = None
        self._complained = False

    def send(self, copy: MemoryCopy) -> None:
        """Start to send this rank's copy to the next node and to receive that of the node before; see `wait`."""
        self._thread = threading.Thread(target=self._run, args=(copy,), name="neighbour", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the transfer: then the sent copy may change."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def discard(self, *, after: int = -1) -> None:
        """Discard copies later than iteration `after`."""
        self.wait()
        discard_later_copies(self._slots, after=after)

    def fetch(self, iteration: int, lost: Sequence[bool], own: MemorySlot) -> MemoryCopy | None:
        """Fetch lost copies from the nodes that keep them; return this rank's, now in `own`.

        `lost`: for each rank, True if it has no copy of this iteration. None if this rank's copy is not lost or no node
        has it.
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
        lower_thread_priority()
        try:
            self._swap(to=self._next, copy=copy, source=self._before, slots=self._slots, of=self._before)
        except (RuntimeError, OSError, ValueError) as error:  # a rank is lost, and this one will be ended soon
            self._complain(f"{type(error).__name__}: {error}")

    def _swap(
        self, *, to: int | None, copy: MemoryCopy | None, source: int | None, slots: Sequence[MemorySlot], of: int
    ) -> bool:
        """Send a copy (None: an empty header) to one rank while the copy of rank `of` arrives from another into the
        older of `slots`. Both sides of a transfer call this at once. Returns True if an intact copy has arrived."""
        self._transfers += 1
        header = b"" if copy is None else json.dumps(copy.header).encode()
        words = np.zeros(HEADER_BYTES, dtype=np.uint8)
        words[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        mine, seal = self._hmac(self._ranks.rank, to), self._hmac(source, self._ranks.rank)
        text = self._pass(to, words, mine, source, np.zeros_like(words), seal).tobytes().rstrip(b"\0")
        coming = json.loads(text) if text else {"size": 0}
        size = int(coming["size"])
        slot = min(slots, key=lambda slot: (slot.header() or {"iteration": -1})["iteration"])
        into = self._room(slots, slot, size) if size else None
        going = copy.body if copy is not None and to is not None else words[:0]
        for at in range(0, max(len(going), size), CHUNK_BYTES):
            until = min(at + CHUNK_BYTES, size)
            part = np.empty(max(0, until - at), dtype=np.uint8) if into is None else into[at:until]
            self._pass(to, going[at : at + CHUNK_BYTES], mine, source, part, seal)
        if into is None:
            return False
        if coming.get("rank") != of or copy_hash(into[:size], coming) != coming["hash"]:
            self._complain(f"the copy of rank {of} did not arrive as it was sent")
            return False
        slot.commit(**coming)
        return True

    def _hmac(self, sender: int | None, receiver: int | None) -> hmac.HMAC:
        words = json.dumps(["copy", self._restart, self._transfers, sender, receiver])
        return hmac.new(self._secret, words.encode(), "sha256")

    def _pass(
        self, to: int | None, out: ByteArray, mine: hmac.HMAC, source: int | None, into: ByteArray, seal: hmac.HMAC
    ) -> ByteArray:
        """Send `out` and receive `into`, each with the HMAC of all bytes so far. Raises ValueError if that is wrong."""
        works, given = [], np.zeros(HMAC_BYTES, dtype=np.uint8)
        if source is not None and len(into):
            works += [
                dist.irecv(torch.from_numpy(part), source, self._ranks.cpu_group, COPY_TAG) for part in (into, given)
            ]
        if to is not None and len(out):
            works.append(dist.isend(torch.from_numpy(out), to, self._ranks.cpu_group, COPY_TAG))
            mine.update(out.data)
            sent = torch.frombuffer(bytearray(mine.digest()), dtype=torch.uint8)
            works.append(dist.isend(sent, to, self._ranks.cpu_group, COPY_TAG))
        for work in works:
            assert work is not None
            work.wait()
        if source is not None and len(into):
            seal.update(into.data)
            if not hmac.compare_digest(given.tobytes(), seal.digest()):
                raise ValueError("bytes without the HMAC of this attempt")
        return into

    def _room(self, slots: Sequence[MemorySlot], slot: MemorySlot, size: int) -> ByteArray | None:
        """Return the bytes of a voided slot with enough room; None if this node lacks memory, and nothing is kept."""
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
    """Discard copies later than iteration `after`."""
    for slot in slots:
        if after < 0 or (slot.header() or {"iteration": -1})["iteration"] > after:
            slot.void()


@dataclass(frozen=True)
class MemoryCopy:
    """An intact copy."""

    header: dict[str, Any]
    body: ByteArray


def write_copy(slot: MemorySlot, pieces: Sequence[torch.Tensor | bytes], **header: Any) -> MemoryCopy:
    """Write the pieces one after the other into a slot with enough room, and commit it."""
    slot.void()
    target, at = copy_body(slot, header["size"]), 0
    devices = {piece.device for piece in pieces if isinstance(piece, torch.Tensor) and piece.device.type == "cuda"}
    pinned = bool(devices) and pin_slot(slot)
    for piece in pieces:
        if isinstance(piece, bytes):
            part = target[at : at + len(piece)]
            part[:] = np.frombuffer(piece, dtype=np.uint8)
        else:
            part = target[at : at + piece.nbytes]
            if len(part):
                source = piece.contiguous().reshape(-1).view(torch.uint8)
                torch.from_numpy(part).copy_(source, non_blocking=pinned)
        at += len(part)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    header["hash"] = copy_hash(target, header)
    slot.commit(**header)
    return MemoryCopy(header, target)


_PINNED: dict[int, tuple[mmap.mmap, bool]] = {}
"""Mappings of slots by address, and whether CUDA accepted them: kept, since an unmapped range must not stay pinned."""


def pin_slot(slot: MemorySlot) -> bool:
    """Let the GPU write into a slot without a copy by the host: 55 GB/s on an H200 instead of 16. Returns False where
    CUDA refuses."""
    content = slot.open()
    address = int(np.frombuffer(content, dtype=np.uint8).ctypes.data)
    if address not in _PINNED:
        error = torch.cuda.cudart().cudaHostRegister(address, len(content), 0)  # type: ignore[no-untyped-call]
        _PINNED[address] = content, int(error) == 0
        if int(error):
            log.warning("copies in memory are not pinned, and take longer: cudaHostRegister: %s", error)
            with contextlib.suppress(RuntimeError):  # else the next kernel would report it
                torch.zeros(1, device="cuda")
    return _PINNED[address][1]


def whole_copy(slot: MemorySlot, *, rank: int, ranks: int, iteration: int) -> MemoryCopy | None:
    """Return the copy in this slot; None if it is of another rank or iteration, or not intact."""
    header = slot.header() or {}
    if [header.get(name) for name in ("rank", "ranks", "iteration")] != [rank, ranks, iteration]:
        return None
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
        body = copy_body(slot, int(header["size"]))
        if len(body) == header["size"] and copy_hash(body, header) == header["hash"]:
            return MemoryCopy(header, body)
    return None


def copy_body(slot: MemorySlot, size: int) -> ByteArray:
    """Return the bytes after the header of a slot, without a copy. Raises OSError and ValueError."""
    return np.frombuffer(slot.open(), dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + size]


def copy_hash(body: ByteArray, header: Mapping[str, Any]) -> str:
    """Return the hash of a copy: of the hashes of its pieces, which threads compute, and of its header's fields."""
    pieces = [body[at : at + HASH_BYTES].data for at in range(0, len(body), HASH_BYTES)]
    with ThreadPoolExecutor(max(1, min(HASH_THREADS, torch.get_num_threads(), len(pieces)))) as pool:
        found = xxhash.xxh3_128(b"".join(pool.map(xxhash.xxh3_128_digest, pieces)))
    found.update(json.dumps([header.get(name) for name in COPY_FIELDS]).encode())
    return found.hexdigest()
