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

from relayrun.shards.direct_io import DirectFile


class _PassingFiles(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with DirectFile(path) as file:
            yield file


class ThreadedWriter(FileSystemWriter):
    """The writer of torch with several threads, none of which fails unseen.

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
