"""Copies of a rank's state in host memory, so that it can be written while training changes the original.

The buffers are pinned where there is CUDA (a copy from the GPU is then fast and runs beside its computing), made
once and used again by every save: one copy of this rank's part of the checkpoint, as long as the process lives.
They are parts of a few large pieces, see `pieces`. torch's own stager copies whole storages, which for parameters in
megatron-core's gradient buffers would be the parts of all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from relayrun.train.checkpoint.host_buffers import BUFFER_PIECE_BYTES, lay_out_buffers, pinned_bytes

if TYPE_CHECKING:  # it takes seconds to import
    from megatron.core.dist_checkpointing import ShardedTensor

ShardKey = tuple[str, tuple[int, ...]]

COPY_CHUNK_BYTES = 3 << 16
"""Bytes that are copied, then hashed while the processor's own cache still has them: a third of what memory costs."""


@dataclass(frozen=True)
class HostAllocation:
    """Host memory that was allocated: `size` bytes in so many `pieces`."""

    size: int
    pieces: int


class HostCopy:
    """Buffers by the name and the place of a shard in the checkpoint."""

    def __init__(self, device: torch.device, *, piece: int = BUFFER_PIECE_BYTES) -> None:
        """`device`: where the originals lie. `piece`: see PIECE."""
        self._device = device
        self._piece = piece
        self._buffers: dict[ShardKey, torch.Tensor] = {}
        self._digests: dict[int, str] = {}
        self._not_hashed: list[torch.Tensor] = []

    def follow(self) -> torch.cuda.Stream | None:
        """Called by the thread that computes: a stream for `fill` that starts behind what is queued now."""
        if self._device.type != "cuda":
            return None
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return stream

    def reserve(self, shards: Iterable[ShardedTensor]) -> HostAllocation:
        """Allocate buffers for those of `shards` that have none; return what that took.

        Raises RuntimeError if there is not so much memory; then no buffer was made.
        """
        new = [shard for shard in shards if not self._has(shard)]
        places, lengths = lay_out_buffers([shard.data.nbytes for shard in new], self._piece)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            lengths = pinned_bytes(lengths)
        pieces = [torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=on_gpu).numpy() for length in lengths]
        for shard, (number, start) in zip(new, places, strict=True):
            # by way of numpy it has a storage of its own size: torch's writer would copy a view of a larger one
            part = torch.from_numpy(pieces[number][start : start + shard.data.nbytes])
            self._buffers[_key(shard)] = part.view(shard.data.dtype).view(shard.data.shape)
        return HostAllocation(sum(lengths), len(lengths))

    @torch.no_grad()
    def fill(self, shards: Iterable[ShardedTensor], stream: torch.cuda.Stream | None) -> HostAllocation:
        """Copy the data of `shards` and put the copies in their place. On return the originals may change.

        Called by any thread, with what `follow` gave. Returns what had to be allocated, because it was not reserved.
        """
        shards = list(shards)
        late = self.reserve(shards)
        self._digests, self._not_hashed = {}, []
        with torch.cuda.stream(stream):  # does nothing with None
            for shard in shards:
                buffer = self._buffers[_key(shard)]
                source, shard.data = shard.data.detach(), buffer
                if not buffer.nbytes:  # it may have the address of another one
                    continue
                if source.device.type == "cpu" and source.is_contiguous():
                    self._digests[buffer.data_ptr()] = _copy_and_digest(source, buffer)
                else:
                    buffer.copy_(source, non_blocking=stream is not None)
                    self._not_hashed.append(buffer)
        if stream is not None:
            stream.synchronize()
        return late

    def digests(self) -> dict[int, str]:
        """XXH3-128 of what `fill` copied, by the address of each copy.

        Called before the copies are written. From a GPU they are hashed here: the originals may change meanwhile.
        """
        for buffer in self._not_hashed:
            self._digests[buffer.data_ptr()] = tensor_digest(buffer)
        self._not_hashed = []
        return self._digests

    def _has(self, shard: ShardedTensor) -> bool:
        """Whether there is a buffer of this shard's shape and type."""
        buffer = self._buffers.get(_key(shard))
        return buffer is not None and buffer.shape == shard.data.shape and buffer.dtype == shard.data.dtype


def tensor_digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of the values of a contiguous tensor in host memory, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(_bytes(tensor).data)


def _copy_and_digest(source: torch.Tensor, target: torch.Tensor) -> str:
    """Copy a tensor in host memory and return the digest of the original, which the copy has to match at a load.

    The copy is a loop of numpy's, as wide as the processor allows; `np.copyto` is the C library's memcpy, which for so
    few bytes is slower here and leaves less in the cache. As the hash, it lets other threads run.
    """
    found = xxhash.xxh3_128()
    ours, theirs = _bytes(target), _bytes(source)
    for start in range(0, len(ours), COPY_CHUNK_BYTES):
        piece = theirs[start : start + COPY_CHUNK_BYTES]
        np.positive(piece, out=ours[start : start + COPY_CHUNK_BYTES])
        found.update(piece.data)
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _key(shard: ShardedTensor) -> ShardKey:
    return shard.key, tuple(shard.global_offset)
