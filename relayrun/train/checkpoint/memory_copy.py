"""The bytes of a copy in memory, and whether they are what was written.

The hash of a copy, XXH3-128, is over its bytes and over what its header says of them: whose state it is, of which
iteration, how it is laid out. So neither a changed byte nor a changed header passes for a copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from relayrun.control.agent.memory_copies import HEADER_BYTES, MemorySlot

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
