"""How the bytes of a checkpoint are known again: XXH3-128 of every block and of every file.

| file | writer | what |
|---|---|---|
| `__R.checksums.jsonl` | rank R | the iteration, then a line per block that this rank wrote |
| `checksums.json` | rank 0, last | of every other file: bytes, and its hash or who has its blocks' |

The hash of checksums.json is the root: it stands in the checkpoint's line of commits.jsonl. So each byte of each file
has one hash that it is compared with, from the root on. A block is one tensor, or the part of it that a rank holds,
as torch wrote it into a `.distcp` file: its values, and a frame around them. The values are hashed in host memory
before a file is written, the frame as it is written.
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
from typing import BinaryIO, Protocol

import xxhash

from relayrun.errors import InputError
from relayrun.files import sizes, write_atomic
from relayrun.tokens.stores.checksum import checksum_of, checksum_of_open

INDEX = "checksums.json"
FORMAT = 1
PIECES = (".distcp", ".metadata", ".checksums.jsonl")
"""How the names of a checkpoint's own files end. Another file beside them (a note, what an editor or NFS left) changes
nothing of what is loaded."""


class Damaged(InputError):
    """A checkpoint does not hold the bytes that were saved."""


class Files(Protocol):
    """The files of a checkpoint, wherever it lies. One that is missing raises FileNotFoundError."""

    @property
    def where(self) -> Path | str:
        """Its folder, for people."""

    def names(self) -> list[str]:
        """Return the names that stand in the folder itself."""

    def size(self, name: str) -> int:
        """Return how many bytes a file has."""

    def open(self, name: str) -> BinaryIO:
        """Open a file to read its bytes."""


@dataclass(frozen=True)
class LocalFiles:
    """The files of a checkpoint in a folder of this machine; of one that is a single file, that under the name `.`."""

    where: Path

    def names(self) -> list[str]:
        """Return the names that stand in the folder itself."""
        return os.listdir(self.where)

    def size(self, name: str) -> int:
        """Return how many bytes a file has."""
        return os.stat(self.where / name).st_size

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, by its name."""
        return sizes(self.where)

    def open(self, name: str) -> BinaryIO:
        """Open a file to read its bytes."""
        return (self.where / name).open("rb")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a `.distcp` file: one tensor of one rank, or an object."""

    key: str
    """Its name in the checkpoint."""
    offset: list[int] | None
    """Where it begins in the whole tensor; None for an object."""
    shape: list[int] | None
    dtype: str | None
    file: str
    at: int
    """Its first byte in the file."""
    bytes: int
    values_at: int = 0
    """Where the values begin in the block."""
    values_bytes: int = 0
    """0 where the frame is all there is: an object, or a tensor without elements."""
    values: str | None = None
    frame: str

    def fault(self, data: memoryview) -> str | None:
        """Return what is wrong with the bytes that were read for this block; None: they are those that were saved."""
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
class FileSum:
    """A file of a checkpoint: its hash, or the name of the file that has those of its blocks."""

    bytes: int
    xxh3_128: str | None = None
    blocks: str | None = None


def of_bytes(data: bytes) -> FileSum:
    """Return the size and the hash of a file with this content."""
    return FileSum(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def of_file(path: Path) -> FileSum:
    """Read a file, in pieces, for its hash. Raises OSError."""
    return FileSum(bytes=path.stat().st_size, xxh3_128=checksum_of(path))


def write_blocks(
    folder: Path, rank: int, iteration: int, blocks: Iterable[Block], sizes: Mapping[str, int]
) -> dict[str, FileSum]:
    """Write the record of what one rank wrote into `sizes` (bytes of its files, by name).

    Returns these files and the record, as checksums.json names them.
    """
    name = f"__{rank}.checksums.jsonl"
    head = {"format": FORMAT, "iteration": iteration, "rank": rank}
    data = "".join(json.dumps(line) + "\n" for line in (head, *map(asdict, blocks))).encode()
    write_atomic(folder / name, data)
    return {file: FileSum(bytes=size, blocks=name) for file, size in sizes.items()} | {name: of_bytes(data)}


def write_index(folder: Path, iteration: int, files: Mapping[str, FileSum]) -> str:
    """Write checksums.json and return its hash.

    What lies in the folder beside `files` (a hook may have put it there) is read and hashed. Raises OSError if one of
    `files` has not the size that was written.
    """
    known = dict(files)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or name == INDEX:
            continue
        if name not in known:
            known[name] = of_file(path)
        elif (size := path.stat().st_size) != known[name].bytes:
            raise OSError(f"{path} has {size} bytes, not the {known[name].bytes} that were written")
    parts = {name: {k: v for k, v in asdict(known[name]).items() if v is not None} for name in sorted(known)}
    data = json.dumps({"format": FORMAT, "iteration": iteration, "files": parts}, indent=1).encode()
    write_atomic(folder / INDEX, data)
    return xxhash.xxh3_128_hexdigest(data)


class Checksums:
    """The hashes of one checkpoint, and whatever is compared with them."""

    def __init__(self, folder: Path | Files, root: str | None) -> None:
        """Read checksums.json, and look for every file that it names.

        `root`: what its commit says; None for a checkpoint that no run vouches for. Raises Damaged.
        """
        self._in: Files = LocalFiles(folder) if isinstance(folder, Path) else folder
        self.folder = self._in.where
        data = self._bytes(INDEX)
        if root is not None and xxhash.xxh3_128_hexdigest(data) != root:
            raise Damaged(f"{INDEX} is not the one that was saved", where=self.folder)
        try:
            index = json.loads(data)
            self.iteration = int(index["iteration"])
            self.files = {str(name): FileSum(**entry) for name, entry in index["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Damaged(f"{INDEX} cannot be read", where=self.folder) from None
        self._blocks: dict[str, dict[tuple[str, int], Block]] = {}
        self._look_for_files()

    def read(self, name: str) -> bytes:
        """Read a whole file that has a hash of its own. Raises Damaged if it is not the one that was saved."""
        known = self.files.get(name)
        if known is None or known.xxh3_128 is None:
            raise Damaged(f"{name} has no hash in {INDEX}", where=self.folder)
        data = self._bytes(name)
        if xxhash.xxh3_128_hexdigest(data) != known.xxh3_128:
            raise Damaged(f"{name} is not the one that was saved", where=self.folder)
        return data

    def check_block(self, file: str, at: int, data: bytes | bytearray) -> None:
        """Compare what was read of a file from this byte on with its block. Raises Damaged."""
        known = self.files.get(file)
        block = None if known is None or known.blocks is None else self._blocks_in(known.blocks).get((file, at))
        if block is None:
            raise Damaged(f"{file} has no block at byte {at}", where=self.folder)
        if (fault := block.fault(memoryview(data))) is not None:
            raise Damaged(fault, where=self.folder)

    def blocks(self) -> Iterator[Block]:
        """Every block, by rank and in the order of their files. Raises Damaged."""
        for name in sorted({known.blocks for known in self.files.values() if known.blocks is not None}):
            yield from self._blocks_in(name).values()

    def _bytes(self, name: str) -> bytes:
        with _no_file_is_damage(name, self.folder), self._in.open(name) as file:
            return file.read()

    def _blocks_in(self, name: str) -> dict[tuple[str, int], Block]:
        if name not in self._blocks:
            try:
                head, *lines = map(json.loads, self.read(name).splitlines())
                blocks = [Block(**line) for line in lines]
            except (ValueError, TypeError):
                raise Damaged(f"{name} cannot be read", where=self.folder) from None
            if head.get("iteration") != self.iteration:
                raise Damaged(f"{name} is of iteration {head.get('iteration')}", where=self.folder)
            self._blocks[name] = {(block.file, block.at): block for block in blocks}
        return self._blocks[name]

    def _look_for_files(self) -> None:
        for name, known in self.files.items():
            with _no_file_is_damage(name, self.folder):
                size = self._in.size(name)
            if size != known.bytes:
                raise Damaged(f"{name} has {size} bytes, not {known.bytes}", where=self.folder)
        for name in self._in.names():
            if name.endswith(PIECES) and name not in self.files and name != INDEX:
                raise Damaged(f"{name} does not belong to it", where=self.folder)


@contextlib.contextmanager
def _no_file_is_damage(name: str, folder: Path | str) -> Iterator[None]:
    """Raise Damaged where nothing, a folder or a link into nowhere stands in the place of a file of a checkpoint."""
    try:
        yield
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
        if not missing and not isinstance(error, FileNotFoundError):  # a store's own has no number
            raise
        raise Damaged(f"{name} is missing", where=folder) from None


def open_checksums(folder: Path, root: str | None) -> Checksums | None:
    """Return the hashes of a checkpoint; None for one that was saved without. Raises Damaged if they were lost."""
    if root is None and not (folder / INDEX).exists():
        return None
    return Checksums(folder, root)


def sum_of(files: Files, name: str) -> FileSum:
    """Read a file of a checkpoint, in pieces, for its hash. Raises OSError."""
    with files.open(name) as file:
        return FileSum(bytes=files.size(name), xxh3_128=checksum_of_open(file))


def verify(folder: Path | Files, root: str | None) -> tuple[int, list[str]]:
    """Read a checkpoint with checksums back in full.

    Returns how many bytes were read, and what is wrong, one line for each block or file. Memory holds one block.
    """
    files = LocalFiles(folder) if isinstance(folder, Path) else folder
    try:
        sums = Checksums(files, root)
        blocks = list(sums.blocks())
    except Damaged as error:
        return 0, [error.message]
    faults: list[str] = []
    read = 0
    for name, known in sums.files.items():
        if known.blocks is None:
            try:
                found = sum_of(files, name)
            except OSError as error:
                faults.append(f"{name} cannot be read: {error.strerror or error}")
                continue
            read += found.bytes
            if found != known:
                faults.append(f"{name} is not the one that was saved")
    ends: dict[str, int] = {}
    for name, of_file in itertools.groupby(blocks, key=lambda block: block.file):
        read += _verify_blocks(files, name, list(of_file), ends, faults)
    for name, known in sums.files.items():
        if known.blocks is not None and ends.get(name, 0) != known.bytes:
            faults.append(f"{name} has bytes without a hash behind byte {ends.get(name, 0)}")
    return read, faults


def _verify_blocks(files: Files, name: str, blocks: list[Block], ends: dict[str, int], faults: list[str]) -> int:
    """Read blocks that follow each other in one file; return how many bytes were read. `ends`: where the last ended."""
    read = 0
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        for block in blocks:
            if block.at != ends.get(name, 0):
                faults.append(f"{name} has bytes without a hash before byte {block.at}")
            ends[name] = block.at + block.bytes
            try:
                file = file or stack.enter_context(files.open(name))
                file.seek(block.at)
                data = file.read(block.bytes)
            except OSError as error:
                faults.append(f"{block.key} in {name} cannot be read: {error.strerror or error}")
                continue
            read += len(data)
            if (fault := block.fault(memoryview(data))) is not None:
                faults.append(fault)
    return read
