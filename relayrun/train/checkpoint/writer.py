"""The files of a torch_dist checkpoint, written by threads of this process, and whether they are all there."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from relayrun.tokens.stores.checksum import HashingFile
from relayrun.tokens.stores.direct_io import DirectFile
from relayrun.train.checkpoint.checksums import ChecksumBlock, FileChecksum
from relayrun.train.checkpoint.host_copy import tensor_digest
from relayrun.train.checkpoint.metadata import file_ends, read_metadata


@dataclass(frozen=True, kw_only=True)
class WrittenFiles:
    """What this rank wrote of a checkpoint."""

    blocks: list[ChecksumBlock]
    sizes: dict[str, int]
    """Bytes of the files with these blocks, by name."""
    files: dict[str, FileChecksum]
    """Other files: `.metadata`, on the rank that writes it."""


class _Recorder:
    """Notes the blocks of one file, while one thread writes it.

    torch's writer asks the planner for a block, then writes it: some short pieces, and among them the values in one
    piece, straight from the tensor's memory.
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
        """As the planner's: the data of the block that is written next, a tensor in host memory of its own."""
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
        """Bytes went into the file."""
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
        """What was written since `resolve_data` is a block."""
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
    """A file whose blocks are noted."""

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
    """What torch writes beside the blocks; `sums` has it by name."""

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
    """The writer of torch with several threads, none of which fails unseen, and with hashes of what they write.

    torch 2.13's own prints the error of any thread but the first and leaves that thread's file out of the
    checkpoint's metadata: a save that looks good and cannot be loaded.
    """

    def __init__(self, folder: str | Path, threads: int, digests: Mapping[int, str] | None = None) -> None:
        """`digests`: hashes of tensors that lie in host memory, by their addresses; others are hashed here."""
        super().__init__(folder, thread_count=threads)
        self._digests = digests or {}
        self._beside = _HashedFiles()
        self.fs = self._beside
        self._blocks: list[ChecksumBlock] = []
        self._sizes: dict[str, int] = {}

    @property
    def written(self) -> WrittenFiles:
        """What it has written, when it is through."""
        return WrittenFiles(blocks=self._blocks, sizes=self._sizes, files=self._beside.sums)

    def _write_data(self, planner: SavePlanner, file_queue: Queue[Any]) -> Future[list[WriteResult]]:
        def write(file: Any) -> tuple[list[WriteResult], _Recorder]:
            # half of a writer's work, and torch.load never looks at it; the setting holds for one thread
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
        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="writer") as pool:
            parts = list(pool.map(write, files))
        for _, recorder in parts:
            self._blocks += recorder.blocks
            self._sizes[recorder.name] = recorder.size
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results, _ in parts for result in results])
        return future


def check_complete(folder: Path) -> None:
    """Raise OSError unless every byte range that the checkpoint's metadata names is on disk."""
    for name, end in {**file_ends(read_metadata(folder)), "common.pt": 1, "metadata.json": 1}.items():
        size = (folder / name).stat().st_size
        if size < end:
            raise OSError(f"{folder / name} has {size} bytes, its checkpoint names {end}")
