"""Asynchronous saves: the copy of the state in host memory, the save thread, and torch's writer with checksums.

The buffers are pinned with CUDA (a copy from the GPU is then fast and runs beside its work), allocated once and reused
by every save: one copy of this rank's part of the checkpoint, in a few large pieces (`host_buffers`). torch's own
stager copies whole storages, which for parameters in megatron-core's gradient buffers are the parts of all
data-parallel ranks.

There is no fork and no server process, which a signal to the whole job would kill. The main thread continues training;
it waits only before it changes uncopied state, and for the result. After the copy the save runs at lower priority.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from relayrun.control.rundir.records import CheckpointCommit
from relayrun.tokens.stores.direct_io import DirectFile, HashingFile
from relayrun.train.checkpoint.checksums import ChecksumBlock, FileChecksum
from relayrun.train.checkpoint.host_buffers import BUFFER_PIECE_BYTES, lay_out_buffers, pinned_bytes
from relayrun.train.checkpoint.reader import file_ends, read_metadata

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import ShardedTensor

BACKGROUND_NICE = 15
"""Niceness of a save beside training: a thirtieth of a contended processor (weights of nice(2), sched(7)). At 19 it
would get a seventieth, and training would wait long for the interpreter's lock in its hands."""


def lower_thread_priority() -> None:
    """Run this thread beside training; on Linux a thread has its own priority, which its child threads inherit."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + BACKGROUND_NICE)


class BackgroundSave:
    """Runs `write` in a thread at once. Its threads communicate: all ranks begin the same saves in the same order."""

    def __init__(
        self, iteration: int, write: Callable[[Callable[[], None]], CheckpointCommit], *, beside: bool
    ) -> None:
        """`write(copied)` calls `copied` when the state is copied, and returns the commit or raises.

        `beside`: training continues meanwhile; else it waits for the result.
        """
        self.iteration = iteration
        self._beside = beside
        self._began = time.monotonic()
        self._copied = threading.Event()
        self._commit: futures.Future[CheckpointCommit] = futures.Future()
        threading.Thread(target=self._run, args=(write,), name=f"save-{iteration}", daemon=True).start()

    def _run(self, write: Callable[[Callable[[], None]], CheckpointCommit]) -> None:
        try:
            self._commit.set_result(write(self._state_is_copied))
        except BaseException as error:
            self._commit.set_exception(error)
        finally:
            self._copied.set()

    def _state_is_copied(self) -> None:
        self._copied.set()
        if self._beside:
            lower_thread_priority()

    @property
    def over(self) -> bool:
        """True if this rank's part has ended, successfully or not."""
        return self._commit.done()

    @property
    def copied(self) -> bool:
        """True if the state may change."""
        return self._copied.is_set()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def wait_for_copy(self) -> None:
        """Wait until the state may change."""
        self._copied.wait()

    def result(self) -> CheckpointCommit:
        """Wait for the end; raise the error of `write`."""
        return self._commit.result()


ShardKey = tuple[str, tuple[int, ...]]

COPY_CHUNK_BYTES = 3 << 16
"""Bytes that are copied, then hashed while they are in the processor's cache: a third of the cost from memory."""


@dataclass(frozen=True)
class HostMemoryStats:
    """Allocated host memory: `size` bytes in `pieces` pieces."""

    size: int
    pieces: int


class HostCopy:
    """Host buffers by key and offset of a shard in the checkpoint."""

    def __init__(self, device: torch.device, *, piece: int = BUFFER_PIECE_BYTES) -> None:
        """`device`: of the originals. `piece`: see BUFFER_PIECE_BYTES."""
        self._device = device
        self._piece = piece
        self._buffers: dict[ShardKey, torch.Tensor] = {}
        self._digests: dict[int, str] = {}
        self._not_hashed: list[torch.Tensor] = []

    def new_stream(self) -> torch.cuda.Stream | None:
        """Return a stream for `fill` that starts after the queued work of the calling thread."""
        if self._device.type != "cuda":
            return None
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return stream

    def reserve(self, shards: Iterable[ShardedTensor]) -> HostMemoryStats:
        """Allocate missing buffers for `shards`; return them. Raises RuntimeError, with no buffer allocated."""
        new = [shard for shard in shards if not self._has(shard)]
        places, lengths = lay_out_buffers([shard.data.nbytes for shard in new], self._piece)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            lengths = pinned_bytes(lengths)
        pieces = [torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=on_gpu).numpy() for length in lengths]
        for shard, (number, start) in zip(new, places, strict=True):
            # by way of numpy it has a storage of its own size: torch's writer would copy a view of a larger storage
            part = torch.from_numpy(pieces[number][start : start + shard.data.nbytes])
            self._buffers[_key(shard)] = part.view(shard.data.dtype).view(shard.data.shape)
        return HostMemoryStats(sum(lengths), len(lengths))

    @torch.no_grad()
    def fill(self, shards: Iterable[ShardedTensor], stream: torch.cuda.Stream | None) -> HostMemoryStats:
        """Copy the data of `shards` and replace it by the copies; on return the originals may change.

        Any thread may call it, with the stream from `new_stream`. Returns the allocations that were not reserved.
        """
        shards = list(shards)
        late = self.reserve(shards)
        self._digests, self._not_hashed = {}, []
        with torch.cuda.stream(stream):  # does nothing with None
            for shard in shards:
                buffer = self._buffers[_key(shard)]
                source, shard.data = shard.data.detach(), buffer
                if not buffer.nbytes:  # it may share the address of another buffer
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
        """Return XXH3-128 of the copies of `fill` by their addresses; call it before they are written.

        Copies from a GPU are hashed here, since the originals may change meanwhile.
        """
        for buffer in self._not_hashed:
            self._digests[buffer.data_ptr()] = tensor_digest(buffer)
        self._not_hashed = []
        return self._digests

    def _has(self, shard: ShardedTensor) -> bool:
        buffer = self._buffers.get(_key(shard))
        return buffer is not None and buffer.shape == shard.data.shape and buffer.dtype == shard.data.dtype


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return XXH3-128 of a contiguous tensor in host memory, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(_bytes(tensor).data)


def _copy_and_digest(source: torch.Tensor, target: torch.Tensor) -> str:
    """Copy a tensor in host memory; return the digest of the original, which the copy must match at a load.

    numpy's loop copies as wide as the processor allows; `np.copyto` is the C library's memcpy, which is slower for so
    few bytes and leaves less in the cache. Both copy and hash release the interpreter's lock.
    """
    found = xxhash.xxh3_128()
    ours, theirs = _bytes(target), _bytes(source)
    for start in range(0, len(ours), COPY_CHUNK_BYTES):
        piece = theirs[start : start + COPY_CHUNK_BYTES]
        np.positive(piece, out=ours[start : start + COPY_CHUNK_BYTES])
        found.update(piece.data)
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _key(shard: ShardedTensor) -> ShardKey:
    return shard.key, tuple(shard.global_offset)


@dataclass(frozen=True, kw_only=True)
class WrittenFiles:
    """Files of a checkpoint that this rank wrote."""

    blocks: list[ChecksumBlock]
    sizes: dict[str, int]
    """Bytes of the files with these blocks, by name."""
    files: dict[str, FileChecksum]
    """Other files: `.metadata`, on the rank that writes it."""


class _Recorder:
    """Records the blocks of one file, while one thread writes it.

    torch's writer requests a block from the planner, then writes it in short pieces; the values are one piece, straight
    from the tensor's memory.
    """

    def __init__(self, planner: SavePlanner, name: str, digests: Mapping[int, str]) -> None:
        self.name = name
        self.size = 0
        self.blocks: list[ChecksumBlock] = []
        self._planner = planner
        self._digests = digests
        self._item: WriteItem | None = None
        self._tensor: torch.Tensor | None = None
        self._frame = xxhash.xxh3_128()
        self._start = self._values_at = 0
        self._values: str | None = None

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the planner's data of the next block; a tensor then is in host memory with a storage of its own."""
        self.finish_block()
        data = self._planner.resolve_data(item)
        self._item, self._tensor, self._values = item, None, None
        self._frame.reset()
        self._start = self._values_at = self.size
        if isinstance(data, torch.Tensor):
            data = data.detach().cpu().contiguous()
            if data.untyped_storage().size() != data.nbytes:
                data = data.clone()
            self._tensor = data
        return data

    def wrote(self, data: Any) -> None:
        """Record bytes that went into the file."""
        view = memoryview(data)
        tensor = self._tensor
        if (
            tensor is not None
            and self._values is None
            and view.nbytes == tensor.nbytes > 0
            and np.frombuffer(view.cast("B"), np.uint8).ctypes.data == tensor.data_ptr()
        ):
            self._values = self._digests.get(tensor.data_ptr()) or tensor_digest(tensor)
            self._values_at = self.size
        elif view.nbytes:
            self._frame.update(view)
        self.size += view.nbytes

    def finish_block(self) -> None:
        """End the block that began with `resolve_data`."""
        if self._item is None:
            return
        tensor, index = self._tensor, self._item.index
        self.blocks.append(
            ChecksumBlock(
                key=index.fqn,
                offset=None if tensor is None else list(index.offset or ()),
                shape=None if tensor is None else list(tensor.shape),
                dtype=None if tensor is None else str(tensor.dtype).removeprefix("torch."),
                file=self.name,
                at=self._start,
                bytes=self.size - self._start,
                values_at=self._values_at - self._start,
                values_bytes=tensor.nbytes if tensor is not None and self._values is not None else 0,
                values=self._values,
                frame=self._frame.hexdigest(),
            )
        )
        self._item = self._tensor = None


class _RecordedFile(DirectFile):
    def __init__(self, path: str | os.PathLike[str], recorder: _Recorder) -> None:
        super().__init__(path)
        self._recorder = recorder

    def write(self, data: Any) -> int:
        self._recorder.wrote(data)
        return super().write(data)


class _RecordedFiles(FileSystem):
    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with _RecordedFile(path, self._recorder) as file:
            yield file


class _HashedFiles(FileSystem):
    """Hashes the files that torch writes beside the blocks; `sums` has them by name."""

    def __init__(self) -> None:
        self.sums: dict[str, FileChecksum] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with open(path, "wb") as file:
            stream = HashingFile(file)
            yield stream  # type: ignore[misc]  # pickle and fsync need no more of a file
        self.sums[os.path.basename(path)] = FileChecksum(bytes=stream.bytes, xxh3_128=stream.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[os.path.basename(new_path)] = self.sums.pop(os.path.basename(path))


class ThreadedWriter(FileSystemWriter):
    """Writer of torch with several threads that report every error, and with hashes of the written data.

    torch 2.13's own prints the error of any thread but the first and omits that thread's file from the checkpoint's
    metadata: the save looks good and cannot be loaded.
    """

    def __init__(self, folder: str | Path, threads: int, digests: Mapping[int, str] | None = None) -> None:
        """`digests`: hashes of tensors in host memory by their addresses; others are hashed here."""
        super().__init__(folder, thread_count=threads)
        self._digests = digests or {}
        self._beside = _HashedFiles()
        self.fs = self._beside
        self._blocks: list[ChecksumBlock] = []
        self._sizes: dict[str, int] = {}

    @property
    def written(self) -> WrittenFiles:
        """Written files, after the end."""
        return WrittenFiles(blocks=self._blocks, sizes=self._sizes, files=self._beside.sums)

    def _write_data(self, planner: SavePlanner, file_queue: Queue[Any]) -> Future[list[WriteResult]]:
        def write(file: Any) -> tuple[list[WriteResult], _Recorder]:
            # half of a writer's work, and torch.load never reads it; the setting is per thread
            torch.serialization.set_crc32_options(False)
            recorder = _Recorder(planner, file[1], self._digests)
            one = FileSystemWriter(self.path, per_thread_copy_ahead=0)
            one.fs = _RecordedFiles(recorder)
            alone: Queue[Any] = Queue()
            alone.put(file)
            results = one._write_data(recorder, alone).wait()  # type: ignore[arg-type]
            recorder.finish_block()
            return results, recorder

        files = [file_queue.get() for _ in range(file_queue.qsize())]
        with futures.ThreadPoolExecutor(self.thread_count, thread_name_prefix="writer") as pool:
            parts = list(pool.map(write, files))
        for _, recorder in parts:
            self._blocks += recorder.blocks
            self._sizes[recorder.name] = recorder.size
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results, _ in parts for result in results])
        return future


def check_complete(folder: Path) -> None:
    """Raise OSError unless every byte range in the checkpoint's metadata is on disk."""
    for name, end in {**file_ends(read_metadata(folder)), "common.pt": 1, "metadata.json": 1}.items():
        size = (folder / name).stat().st_size
        if size < end:
            raise OSError(f"{folder / name} has {size} bytes, its checkpoint names {end}")
