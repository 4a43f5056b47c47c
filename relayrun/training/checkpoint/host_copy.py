"""Copies of a rank's state in host memory, so that it can be written while training changes the original.

The buffers are pinned where there is CUDA (a copy from the GPU is then fast and runs beside its computing),
made at the first save and used again by every later one: one copy of this rank's part of the checkpoint, as
long as the process lives. torch's own stager copies whole storages, which for parameters in megatron-core's
gradient buffers would be the parts of all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.dist_checkpointing import ShardedTensor

Key = tuple[str, tuple[int, ...]]


class HostCopy:
    """Buffers by the name and the place of a shard in the checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Key, torch.Tensor] = {}

    def follow(self) -> torch.cuda.Stream | None:
        """Called by the thread that computes: a stream for `fill` that starts behind what is queued now."""
        if self._device.type != "cuda":
            return None
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return stream

    @torch.no_grad()
    def fill(self, shards: Iterable[ShardedTensor], stream: torch.cuda.Stream | None) -> None:
        """Copy the data of `shards` and put the copies in their place. On return the originals may change.

        Called by any thread, with what `follow` gave.
        """
        with torch.cuda.stream(stream):  # does nothing with None
            for shard in shards:
                shard.data = self._buffer(shard).copy_(shard.data.detach(), non_blocking=stream is not None)
        if stream is not None:
            stream.synchronize()

    def _buffer(self, shard: ShardedTensor) -> torch.Tensor:
        key = (shard.key, tuple(shard.global_offset))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != shard.data.shape or buffer.dtype != shard.data.dtype:
            pinned = self._device.type == "cuda"
            buffer = torch.empty(shard.data.shape, dtype=shard.data.dtype, device="cpu", pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer
