"""The files of a torch_dist checkpoint, written by threads of this process, and whether they are all there."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

WINDOW = 32 << 20
"""Bytes of a file that wait in memory to be written, about; as many are on their way to the disk."""


class PassingFile(io.FileIO):
    """A file for writing that does not pile up in the page cache.

    The kernel is told early to write and to forget what was written. So a checkpoint does not push the data set
    out of memory, the disk has no burst at the sync, and the same few pages serve the whole file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._done = self._under_way = 0
        """Ends of the window that should be on disk and of the one behind it."""

    def write(self, data: Any) -> int:
        """All of `data`, bytes or a buffer of them."""
        with memoryview(data).cast("B") as view:
            for begin in range(0, len(view), WINDOW):
                piece = view[begin : begin + WINDOW]
                while piece:
                    piece = piece[super().write(piece) :]
                at = self.tell()
                if at - self._under_way >= WINDOW:
                    self._forget(self._done, at)
                    self._done, self._under_way = self._under_way, at
            return len(view)

    def close(self) -> None:
        if not self.closed:
            self._forget(self._done, self.tell())
        super().close()

    def _forget(self, begin: int, end: int) -> None:
        """Begins to write what is not on disk yet, and drops the rest (Linux, mm/fadvise.c)."""
        with contextlib.suppress(OSError):  # advice alone
            os.posix_fadvise(self.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


class _PassingFiles(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with PassingFile(path) as file:
            yield file


class ThreadedWriter(FileSystemWriter):
    """torch's writer with several threads, of which none fails unseen.

    torch 2.13's own prints the error of any thread but the first and leaves that thread's file out of the
    checkpoint's metadata: a save that looks good and cannot be loaded.
    """

    def __init__(self, folder: str | Path, threads: int) -> None:
        super().__init__(folder, thread_count=threads)
        self._one = FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._one.fs = _PassingFiles()

    def _write_data(self, planner: SavePlanner, file_queue: Queue[Any]) -> Future[list[WriteResult]]:
        def write(file: Any) -> list[WriteResult]:
            # half of a writer's work, and torch.load never looks at it; the setting holds for one thread
            torch.serialization.set_crc32_options(False)
            alone: Queue[Any] = Queue()
            alone.put(file)
            return self._one._write_data(planner, alone).wait()

        files = [file_queue.get() for _ in range(file_queue.qsize())]
        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="writer") as pool:
            results = [result for part in pool.map(write, files) for result in part]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def check_complete(folder: Path) -> None:
    """Raise OSError unless every byte range that the checkpoint's metadata names is on disk."""
    ends: dict[str, int] = {}
    for item in FileSystemReader(folder).read_metadata().storage_data.values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for name, end in {**ends, "common.pt": 1, "metadata.json": 1}.items():
        size = (folder / name).stat().st_size
        if size < end:
            raise OSError(f"{folder / name} has {size} bytes, its checkpoint names {end}")


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by relative name."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
