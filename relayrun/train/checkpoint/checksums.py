"""Checksums of a checkpoint: XXH3-128 of every block and of every file.

| file | writer | content |
|---|---|---|
| `__R.checksums.jsonl` | rank R | the iteration, then a line per block that this rank wrote |
| `checksums.json` | rank 0, last | every other file: its bytes, and its hash or the file with its blocks' hashes |

The hash of checksums.json is the root, which the checkpoint's line in commits.jsonl holds. So each byte of each file is
compared with one hash, from the root on. A block is one tensor, or a rank's part of it, as torch wrote it into a
`.distcp` file: its values, and a frame around them. Values are hashed in host memory before a file is written, the
frame as it is written.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from relayrun.control.rundir import checkpoint_records
from relayrun.errors import InputError
from relayrun.files import open_for_reading, write_atomic
from relayrun.progress import count
from relayrun.tokens.stores.direct_io import open_file_checksum

CHECKSUM_INDEX = "checksums.json"
INDEX_FORMAT = 1
PIECE_SUFFIXES = (".distcp", ".metadata", ".checksums.jsonl")
"""Suffixes of a checkpoint's own files. Other files (a note, leftovers of an editor or NFS) do not affect a load."""


class DamagedCheckpoint(InputError):
    """A checkpoint does not hold the bytes that were saved."""


@dataclass(frozen=True, kw_only=True)
class ChecksumBlock:
    """Part of a `.distcp` file: one tensor of one rank, or an object."""

    key: str
    """Name in the checkpoint."""
    offset: list[int] | None
    """Offset in the whole tensor; None for an object."""
    shape: list[int] | None
    dtype: str | None
    file: str
    at: int
    """First byte in the file."""
    bytes: int
    values_at: int = 0
    """Offset of the values in the block."""
    values_bytes: int = 0
    """0 if there is only a frame: an object, or a tensor without elements."""
    values: str | None = None
    frame: str

    def fault(self, data: memoryview) -> str | None:
        """Return the fault in the bytes read for this block; None if they are those that were saved."""
        name = self.key + (f" at {self.offset}" if self.offset and any(self.offset) else "")
        if len(data) != self.bytes:
            return f"{self.file} ends inside {name}"
        end = self.values_at + self.values_bytes
        if self.values is not None and xxhash.xxh3_128_hexdigest(data[self.values_at : end]) != self.values:
            return f"the values of {name} in {self.file} are not those that were saved"
        frame = xxhash.xxh3_128(data[: self.values_at])
        frame.update(data[end:])
        if frame.hexdigest() != self.frame:
            return f"the frame of {name} in {self.file} is not what was saved"
        return None


@dataclass(frozen=True, kw_only=True)
class FileChecksum:
    """A file of a checkpoint: its hash, or the name of the file with the hashes of its blocks."""

    bytes: int
    xxh3_128: str | None = None
    blocks: str | None = None


def checksum_of_bytes(data: bytes) -> FileChecksum:
    return FileChecksum(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def write_block_checksums(
    folder: Path, rank: int, iteration: int, blocks: Iterable[ChecksumBlock], sizes: Mapping[str, int]
) -> dict[str, FileChecksum]:
    """Write the block checksums of one rank, which wrote `sizes` (bytes of its files, by name). Returns the entries of
    these files and of the record for checksums.json."""
    name = f"__{rank}.checksums.jsonl"
    head = {"format": INDEX_FORMAT, "iteration": iteration, "rank": rank}
    data = "".join(json.dumps(line) + "\n" for line in (head, *map(asdict, blocks))).encode()
    write_atomic(folder / name, data)
    return {file: FileChecksum(bytes=size, blocks=name) for file, size in sizes.items()} | {
        name: checksum_of_bytes(data)
    }


def write_checksum_index(folder: Path, iteration: int, files: Mapping[str, FileChecksum]) -> str:
    """Write checksums.json and return its hash. Other files in the folder besides `files`, which a hook may have
    written, are read and hashed. Raises OSError if one of `files` has another size than was written."""
    known = dict(files)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or name == CHECKSUM_INDEX:
            continue
        if name not in known:
            known[name] = hash_checkpoint_file(path)
        elif (size := path.stat().st_size) != known[name].bytes:
            raise OSError(f"{path} has {size} bytes, not the {known[name].bytes} that were written")
    parts = {name: {k: v for k, v in asdict(known[name]).items() if v is not None} for name in sorted(known)}
    data = json.dumps({"format": INDEX_FORMAT, "iteration": iteration, "files": parts}, indent=1).encode()
    write_atomic(folder / CHECKSUM_INDEX, data)
    return xxhash.xxh3_128_hexdigest(data)


class Checksums:
    """Checksums of one checkpoint, and the comparison with them."""

    def __init__(self, folder: Path, root: str | None) -> None:
        """Read checksums.json, and check the size of every file that it names. `root`: hash from the commit; None for a
        checkpoint without a commit. Raises DamagedCheckpoint."""
        self.folder = folder
        data = self._bytes(CHECKSUM_INDEX)
        if root is not None and xxhash.xxh3_128_hexdigest(data) != root:
            raise DamagedCheckpoint(f"{CHECKSUM_INDEX} is not the one that was saved", where=self.folder)
        try:
            index = json.loads(data)
            self.iteration = int(index["iteration"])
            self.files = {str(name): FileChecksum(**entry) for name, entry in index["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedCheckpoint(f"{CHECKSUM_INDEX} cannot be read", where=self.folder) from None
        self._blocks: dict[str, dict[tuple[str, int], ChecksumBlock]] = {}
        self._look_for_files()

    def read(self, name: str) -> bytes:
        """Read a whole file that has its own hash. Raises DamagedCheckpoint if it differs."""
        known = self.files.get(name)
        if known is None or known.xxh3_128 is None:
            raise DamagedCheckpoint(f"{name} has no hash in {CHECKSUM_INDEX}", where=self.folder)
        data = self._bytes(name)
        if xxhash.xxh3_128_hexdigest(data) != known.xxh3_128:
            raise DamagedCheckpoint(f"{name} is not the one that was saved", where=self.folder)
        return data

    def check_block(self, file: str, at: int, data: bytes | bytearray) -> None:
        """Compare data of a file, from byte `at` on, with its block. Raises DamagedCheckpoint."""
        known = self.files.get(file)
        block = None if known is None or known.blocks is None else self._blocks_in(known.blocks).get((file, at))
        if block is None:
            raise DamagedCheckpoint(f"{file} has no block at byte {at}", where=self.folder)
        if (fault := block.fault(memoryview(data))) is not None:
            raise DamagedCheckpoint(fault, where=self.folder)

    def blocks(self) -> Iterator[ChecksumBlock]:
        """Yield every block, by rank and in the order of their files. Raises DamagedCheckpoint."""
        for name in sorted({known.blocks for known in self.files.values() if known.blocks is not None}):
            yield from self._blocks_in(name).values()

    def _bytes(self, name: str) -> bytes:
        with missing_is_damage(name, self.folder), open_checkpoint_file(self.folder / name) as file:
            return file.read()

    def _blocks_in(self, name: str) -> dict[tuple[str, int], ChecksumBlock]:
        if name not in self._blocks:
            try:
                head, *lines = map(json.loads, self.read(name).splitlines())
                blocks = [ChecksumBlock(**line) for line in lines]
            except (ValueError, TypeError):
                raise DamagedCheckpoint(f"{name} cannot be read", where=self.folder) from None
            if head.get("iteration") != self.iteration:
                raise DamagedCheckpoint(f"{name} is of iteration {head.get('iteration')}", where=self.folder)
            self._blocks[name] = {(block.file, block.at): block for block in blocks}
        return self._blocks[name]

    def _look_for_files(self) -> None:
        for name, known in self.files.items():
            with missing_is_damage(name, self.folder):
                size = os.stat(self.folder / name).st_size
            if size != known.bytes:
                raise DamagedCheckpoint(f"{name} has {size} bytes, not {known.bytes}", where=self.folder)
        for name in os.listdir(self.folder):
            if name.endswith(PIECE_SUFFIXES) and name not in self.files and name != CHECKSUM_INDEX:
                raise DamagedCheckpoint(f"{name} does not belong to it", where=self.folder)


@contextlib.contextmanager
def missing_is_damage(name: str, folder: Path | str) -> Iterator[None]:
    """Raise DamagedCheckpoint if a file is missing, a folder, or a broken link."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL):
            raise
        raise DamagedCheckpoint(f"{name} is missing", where=folder) from None


def committed_checksum(folder: Path | str) -> str | None:
    """Return the checksum in the commit of a checkpoint; None without a commit. Raises RunDirError."""
    commit = checkpoint_records.newest_commit_at(folder)
    return None if commit is None else commit.checksum


def open_checkpoint_file(path: Path) -> BinaryIO:
    return open(open_for_reading(path)[0], "rb")  # a pipe is refused: its reader would wait


def hash_checkpoint_file(path: Path) -> FileChecksum:
    """Return size and hash of a file of a checkpoint, read in pieces. Raises OSError."""
    with open_checkpoint_file(path) as file:
        return FileChecksum(bytes=os.stat(path).st_size, xxh3_128=open_file_checksum(file))


def verify_checkpoint(folder: Path, root: str | None) -> tuple[int, list[str]]:
    """Read back a checkpoint with checksums in full. Returns the bytes read, and a line for each faulty block or file.
    Memory holds one block."""
    try:
        sums = Checksums(folder, root)
        blocks = list(sums.blocks())
    except DamagedCheckpoint as error:
        return 0, [error.message]
    faults: list[str] = []
    read = 0
    for name, known in sums.files.items():
        if known.blocks is None:
            try:
                found = hash_checkpoint_file(folder / name)
            except OSError as error:
                faults.append(f"{name} cannot be read: {error.strerror or error}")
                continue
            read += found.bytes
            if found != known:
                faults.append(f"{name} is not the one that was saved")
    ends: dict[str, int] = {}
    for name, of_file in itertools.groupby(blocks, key=lambda block: block.file):
        read += _verify_blocks(folder, name, list(of_file), ends, faults)
    for name, known in sums.files.items():
        if known.blocks is not None and ends.get(name, 0) != known.bytes:
            faults.append(f"{name} has bytes without a hash behind byte {ends.get(name, 0)}")
    return read, faults


def _verify_blocks(
    folder: Path, name: str, blocks: list[ChecksumBlock], ends: dict[str, int], faults: list[str]
) -> int:
    """Read consecutive blocks of one file; return the bytes read. `ends`: end of the last block by file."""
    read = 0
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        for block in blocks:
            if block.at != ends.get(name, 0):
                faults.append(f"{name} has bytes without a hash before byte {block.at}")
            ends[name] = block.at + block.bytes
            try:
                file = file or stack.enter_context(open_checkpoint_file(folder / name))
                file.seek(block.at)
                data = file.read(block.bytes)
            except OSError as error:
                faults.append(f"{block.key} in {name} cannot be read: {error.strerror or error}")
                continue
            read += len(data)
            count(len(data))
            if (fault := block.fault(memoryview(data))) is not None:
                faults.append(fault)
    return read
