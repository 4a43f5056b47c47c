"""`order: document-window`: packs windows of documents into rows, and shuffles the rows.

    epoch, i = divmod(position, rows)
    row      = Permutation(rows, key(seed, name, epoch))(i)
    row      → pieces of windows → tokens, lengths, loss mask

Blocks of `WINDOWS_PER_BLOCK` windows are packed separately. The number of rows before each block is kept (8 bytes),
and a block is packed again when one of its rows is read. Rows are shuffled anew in every epoch; their content is
equal in all epochs and does not depend on the seed. The last token of a window has no target. `relayrun help
data-order` lists the packings; greedy, first_fit and best_fit cost below 1, about 3 and about 1 µs a window.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.config.sections.data import DocumentWindowSection, Packing
from relayrun.errors import ConfigError
from relayrun.files import atomic_file, read_json, write_json
from relayrun.tokens.order.datasets import SampleSegment
from relayrun.tokens.order.document_windows import DocumentCut, DocumentWindows
from relayrun.tokens.order.permutation import epoch_permutations
from relayrun.tokens.order.remote_shards import BlockCache
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.stores.direct_io import HashingFile, file_checksum

log = logging.getLogger(__name__)

WINDOWS_PER_BLOCK = 512
"""Windows of a block. Part of the order: another number is another order."""
PACKING_VERSION = 1
"""Version of the packing: counts of another version are not reused."""
CACHED_BLOCKS = 256
"""Packed blocks that are kept in memory, most recent first."""
KEPT_OPENINGS = 8
"""Number of most recent openings on record: several runs may share a folder of counts."""

RowPieces = list[tuple[int, int, int]]
"""Windows of a row in order: number, first token, and the token behind the last one."""


def assign_rows(sizes: npt.NDArray[np.int64], room: int, packing: Packing) -> npt.NDArray[np.int64]:
    """Return the row of each window, int64 [windows], numbered from 0 without gaps. Sizes are at most `room`. Not for
    `split`, which may put a window into several rows."""
    if packing in ("none", "pad"):
        return np.arange(len(sizes))
    if packing == "greedy":
        return _pack_greedy(sizes, room)
    return _pack_first_fit(sizes, room) if packing == "first_fit" else _pack_best_fit(sizes, room)


def count_rows(sizes: npt.NDArray[np.int64], room: int, packing: Packing) -> int:
    """Return the number of rows of windows of these sizes, packed as one block."""
    if packing == "split":
        return -(-int(sizes.sum()) // room)
    return int(assign_rows(sizes, room, packing).max()) + 1


def _pack_greedy(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    rows, row, left = [], -1, 0
    for size in sizes.tolist():
        if size > left:
            row, left = row + 1, room
        left -= size
        rows.append(row)
    return np.array(rows, np.int64)


def _pack_first_fit(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    left = np.full(len(sizes), room)
    rows, count = np.zeros(len(sizes), np.int64), 0
    for window, size in enumerate(sizes.tolist()):
        row = count if size == room else int((left[: count + 1] >= size).argmax())
        left[row] -= size
        rows[window] = row
        count = max(count, row + 1)
    return rows


def _pack_best_fit(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    order = np.argsort(-sizes, kind="stable")
    full = int(np.count_nonzero(sizes == room))  # each fills a row
    found, count = [*range(full)], full
    open_rows: list[tuple[int, int]] = []  # (room left, row), ascending
    for size in sizes[order[full:]].tolist():
        at = bisect_left(open_rows, (size, -1))
        if at < len(open_rows):
            left, row = open_rows.pop(at)
        else:
            left, row = room, count
            count += 1
        if left > size:
            insort(open_rows, (left - size, row))
        found.append(row)
    rows = np.empty(len(sizes), np.int64)
    rows[order] = found
    return rows


def pack_rows(sizes: npt.NDArray[np.int64], room: int, packing: Packing) -> list[RowPieces]:
    """Return the rows of windows with these sizes (int64 [windows]), packed as one block."""
    if packing != "split":
        rows = assign_rows(sizes, room, packing)
        found: list[RowPieces] = [[] for _ in range(int(rows.max()) + 1 if len(rows) else 0)]
        for window, (row, size) in enumerate(zip(rows.tolist(), sizes.tolist(), strict=True)):
            found[row].append((window, 0, size))
        return found
    found, left = [], 0
    for window, size in enumerate(sizes.tolist()):
        start = 0
        while start < size:
            if not left:
                found.append([])
                left = room
            stop = min(size, start + left)
            found[-1].append((window, start, stop))
            left -= stop - start
            start = stop
    return found


class PackedRows:
    """The rows of a data set, by number. Thread-safe."""

    def __init__(
        self,
        windows: DocumentWindows,
        room: int,
        packing: Packing,
        *,
        cache: Path | None = None,
        opening: str | None = None,
    ) -> None:
        """Count the rows of every block, or take the counts from `cache`. `room`: tokens of a row."""
        self.windows = windows
        self.packing = packing
        self._room = room
        self._alone = packing in ("none", "pad")
        self._starts = np.zeros(1, np.int64) if self._alone else self._kept(cache, opening)
        self._block = lru_cache(CACHED_BLOCKS)(self._packed)

    def __len__(self) -> int:
        return len(self.windows) if self._alone else int(self._starts[-1])

    def pieces(self, i: int) -> RowPieces:
        """Return the pieces of row i. Raises IndexError outside of 0..len-1, and like `DocumentWindows.read`."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} is outside of range({len(self)})")
        if self._alone:
            return [(i, 0, int(self.windows.sizes(i, i + 1)[0]))]
        block = int(np.searchsorted(self._starts, i, side="right")) - 1
        row, first = i - int(self._starts[block]), block * WINDOWS_PER_BLOCK
        sizes, order, bounds = self._block(block)
        if self.packing != "split":
            inside = order[bounds[row] : bounds[row + 1]].tolist()
            return [(first + window, 0, int(sizes[window])) for window in inside]
        found, at, end = [], row * self._room, min((row + 1) * self._room, int(bounds[-1]))
        window = int(np.searchsorted(bounds, at, side="right")) - 1
        while at < end:
            start = at - int(bounds[window])
            stop = min(int(sizes[window]), start + end - at)
            found.append((first + window, start, stop))
            at, window = at + stop - start, window + 1
        return found

    def _kept(self, cache: Path | None, opening: str | None) -> npt.NDArray[np.int64]:
        """Return the rows before each block, and in all; int64 [blocks + 1]. An unusable cache is only logged."""
        if cache is None:
            return self._counted()
        try:
            return RowCountCache(cache, self._identity(), opening=opening).read_or_build(self._counted)
        except OSError as error:
            log.warning("the rows of a data set are counted at every start, and not kept in %s: %s", cache, error)
            return self._counted()

    def _counted(self) -> npt.NDArray[np.int64]:
        blocks = self.windows.all_sizes(WINDOWS_PER_BLOCK)
        return np.cumsum([0, *(count_rows(sizes, self._room, self.packing) for sizes in blocks)], dtype=np.int64)

    def _identity(self) -> str:
        """Return the hash of everything that the rows depend on."""
        cut = self.windows.cut
        sizes = [cut.window, cut.overlap, cut.specials, cut.drop_end is not None]
        identity = [
            PACKING_VERSION,
            WINDOWS_PER_BLOCK,
            self._room,
            self.packing,
            *sizes,
            self.windows.manifest.fingerprint,
        ]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _packed(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the sizes of the block's windows, the windows sorted by row, and the first of each row among these.
        With `split` the second is empty, and the third is the first token of each window in the block."""
        first = block * WINDOWS_PER_BLOCK
        sizes = self.windows.sizes(first, min(first + WINDOWS_PER_BLOCK, len(self.windows)))
        if self.packing == "split":
            return sizes, sizes[:0], np.cumsum([0, *sizes.tolist()], dtype=np.int64)
        rows = assign_rows(sizes, self._room, self.packing)
        return sizes, np.argsort(rows, kind="stable"), np.cumsum([0, *np.bincount(rows).tolist()], dtype=np.int64)


class RowCountCache:
    """The rows before each block of a data set, counted once and kept in a folder, for all ranks and attempts.

        HASH-rows.npy          the counts; synced, then renamed
        HASH-checksums.json    bytes and XXH3-128 of them, written last
        HASH-checked.json      openings that verified the file, with size and time
        HASH.lock              shared for reading, exclusive to verify and build

    Wrong counts give wrong samples without an error, so the file is compared with its checksum on opening; a mismatch
    rebuilds it, which gives the same bytes. The ranks of an attempt share an opening: the first rank compares and
    records it in HASH-checked.json; the others verify on their own only if size or time differ.
    """

    def __init__(self, folder: Path, name: str, *, opening: str | None = None) -> None:
        """`name`: the hash of everything that the counts depend on. `opening`: the identity of the ranks that open the
        cache together; None for a single process."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = folder / f"{name}.lock"
        self._path = folder / f"{name}-rows.npy"
        self._record = folder / f"{name}-checksums.json"
        self._checked = folder / f"{name}-checked.json"
        self._opening = opening

    def read_or_build(self, build: Callable[[], npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Return the counts, mapped into memory. The first process builds it while the others wait."""
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not self._is_verified() and (self._opening is not None or self._fault() is not None):
                # the upgrade releases the lock in between: another process may build first
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self._is_verified():
                    if (fault := self._fault()) is not None:
                        if self._path.exists():
                            log.warning("the kept counts of rows are built anew: %s", fault)
                        self._build(build)
                    if self._opening is not None:
                        openings = {**self._openings(), self._opening: self._stamps()}
                        with contextlib.suppress(OSError):  # on a full disk each process verifies for itself
                            write_json(self._checked, dict([*openings.items()][-KEPT_OPENINGS:]), durable=False)
            return np.asarray(np.load(self._path, mmap_mode="r", allow_pickle=False), np.int64)

    def _is_verified(self) -> bool:
        """True if a process of this opening has verified the present file."""
        if self._opening is None:
            return False
        stamps = self._stamps()
        return stamps is not None and self._openings().get(self._opening) == stamps

    def _openings(self) -> dict[str, Any]:
        """Return size and time of change (ns) of the verified files by opening, oldest first."""
        try:
            found = read_json(self._checked)
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _stamps(self) -> list[list[int]] | None:
        """Return size and time of change (ns) of the present files; None if a file is missing."""
        try:
            return [[found.st_size, found.st_mtime_ns] for found in map(os.stat, (self._path, self._record))]
        except FileNotFoundError:
            return None

    def _fault(self) -> str | None:
        """Return the defect of the file; None: it equals what was built."""
        try:
            record = read_json(self._record)
            if {"bytes": self._path.stat().st_size, "xxh3_128": file_checksum(self._path)} != record[self._path.name]:
                return f"{self._path} is not what was built"
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
        except (ValueError, KeyError, TypeError):
            return f"{self._record} does not fit its file"
        return None

    def _build(self, build: Callable[[], npt.NDArray[np.int64]]) -> None:
        self._record.unlink(missing_ok=True)  # it would vouch for an old file
        with atomic_file(self._path) as temporary, temporary.open("wb") as file:
            hashed = HashingFile(file)
            np.save(hashed, build(), allow_pickle=False)
        write_json(self._record, {self._path.name: {"bytes": hashed.bytes, "xxh3_128": hashed.hexdigest()}})


def document_cut(
    settings: DocumentWindowSection, *, seq_length: int, eod: int | None, vocabulary_size: int | None, where: str
) -> DocumentCut:
    """Return the cut of `settings`; `eod` is the tokenizer's end of document. Raises ConfigError if `eod` is needed and
    missing, or if bos or eos is not below `vocabulary_size`."""
    if eod is None and (settings.eos is True or settings.drop_eod):
        words = "document_window.eos: true and drop_eod need an end-of-document token, and this tokenizer has none"
        raise ConfigError(words, where=where, hint="give eos as the id of a token")
    cut = DocumentCut(
        window=settings.window or seq_length,
        overlap=settings.overlap,
        bos=settings.bos,
        eos=eod if settings.eos is True else None if settings.eos is False else settings.eos,
        drop_end=eod if settings.drop_eod else None,
    )
    for what, token in (("bos", cut.bos), ("eos", cut.eos)):
        if token is not None and vocabulary_size is not None and token >= vocabulary_size:
            words = f"document_window.{what} {token} is beyond the vocabulary of {vocabulary_size}"
            raise ConfigError(words, where=where, hint="give the id of a token of data.tokenizer")
    return cut


class DocumentWindowOrder:
    """A `relayrun.tokens.order.datasets.Dataset` whose samples are rows of windows."""

    def __init__(
        self,
        manifest: DatasetManifest,
        settings: DocumentWindowSection,
        *,
        seq_length: int,
        seed: int,
        name: str,
        eod: int | None = None,
        padding: int = 0,
        vocabulary_size: int | None = None,
        cache: Path | None = None,
        opening: str | None = None,
        blocks: BlockCache | None = None,
    ) -> None:
        """`padding`: id that fills rows. `cache`, `opening`: see `PackedRows`; `blocks`: see `WindowDataset`. Raises
        ConfigError like `document_cut`, and if there is no window."""
        where = f"data set {name!r}"
        self.cut = document_cut(settings, seq_length=seq_length, eod=eod, vocabulary_size=vocabulary_size, where=where)
        self.seq_length = seq_length
        windows = DocumentWindows(manifest, self.cut, blocks=blocks)
        self.rows = PackedRows(windows, seq_length, settings.packing, cache=cache, opening=opening)
        if not len(self.rows):
            raise ConfigError("there is no document, so no window", where=where, hint="give more data")
        self._lengths = settings.packs
        self._mask_end = settings.mask_special and self.cut.eos is not None
        self._padding = padding
        self._permutation = epoch_permutations(len(self.rows), seed, name)

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self.rows)

    def number(self, epoch: int, i: int) -> int:
        """Return the row of `PackedRows` that is number i of an epoch."""
        if epoch < 0 or not 0 <= i < len(self):
            raise IndexError(f"epoch {epoch}, row {i}: outside of range({len(self)})")
        return self._permutation(epoch)(i)

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Return the token ids, int64 [seq_length + 1], of number i of an epoch."""
        return self.row(epoch, i).tokens

    def row(self, epoch: int, i: int) -> SampleRow:
        """Return number i of an epoch. Raises like `DocumentWindows.read`."""
        pieces = self.rows.pieces(self.number(epoch, i))
        return fill_row(
            ((self.rows.windows.read(window), start, stop) for window, start, stop in pieces),
            seq_length=self.seq_length,
            padding=self._padding,
            with_lengths=self._lengths,
            mask_end=self._mask_end,
        )

    def origins(self, epoch: int, i: int) -> list[SampleSegment]:
        """Return the origins of the text of a row: a piece of a document for each window, without BOS and EOS."""
        found, before = [], int(self.cut.bos is not None)
        for window, start, stop in self.rows.pieces(self.number(epoch, i)):
            _, whole, _ = self.rows.windows.locate(window)
            first, end = max(start - before, 0), min(stop - before, whole.tokens)
            if end > first:
                found.append(replace(whole, offset=whole.offset + first, tokens=end - first))
        return found


def fill_row(
    pieces: Iterable[tuple[npt.NDArray[np.integer[Any]], int, int]],
    *,
    seq_length: int,
    padding: int,
    with_lengths: bool,
    mask_end: bool,
) -> SampleRow:
    """Return a row made of pieces of windows.

    `pieces`: the tokens of each window, the first token that the row takes, and the one behind the last. `padding`: id
    that fills the row. `with_lengths`: a token sees its own piece alone. `mask_end`: the loss of a window's last token
    does not count.
    """
    tokens = np.full(seq_length + 1, padding, np.int64)
    mask = np.zeros(seq_length, np.float32)
    at, lengths = 0, []
    for text, start, stop in pieces:
        end = at + stop - start
        tokens[at:end] = text[start:stop]
        # the target of a piece's last token is in the window's next piece, which begins the next row, or does not exist
        targets = min(stop, len(text) - 1) - start
        if stop < len(text) and end <= seq_length:
            tokens[end] = text[stop]
        mask[at : at + targets] = 1
        if mask_end and stop >= len(text) - 1 and targets:
            mask[at + targets - 1] = 0
        lengths.append(stop - start)
        at = end
    windows = len(lengths)
    if at < seq_length:
        lengths.append(seq_length - at)
    return SampleRow(
        tokens=tokens,
        lengths=lengths if with_lengths else None,
        loss_mask=mask,
        padding=seq_length - at,
        windows=windows,
    )
