"""One shard: PREFIX.bin (token ids), PREFIX.idx (the index), and the record of its tokenizer and checksums.

Layout of the .idx, little-endian, as `megatron/core/datasets/indexed_dataset.py` (megatron-core 0.16.1) reads it: 9
bytes magic, u64 version = 1, u8 dtype code, u64 sequences S, u64 entries of the document index D, then S int32 lengths
(tokens), S int64 offsets (bytes into the .bin), D int64 document bounds (indices of sequences, the first is 0, the last
is S); a multimodal index ends with S int8 modes. A document is one sequence, so D = S + 1; as in Megatron-LM's
`preprocess_data.py` a document without tokens has no sequence, and makes D greater.

The shards of a dump share `tokenization.json` in their folder. A shard of a merge or of the datatrove step has
`PREFIX.record.json`: tasks and jobs that write into one folder at once need no lock for it. If a shard has both, its
own record is newer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from relayrun.errors import InputError
from relayrun.files import RealPathCache, fsync_directory, read_json, write_json
from relayrun.tokens.stores.direct_io import MAX_RESERVE_BYTES, DirectFile
from relayrun.tokens.stores.urls import hash_file_ends

FOLDER_RECORD = "tokenization.json"
"""Name of the record of a folder of shards."""
RECORD_SUFFIX = ".record.json"
"""A shard's own record is PREFIX with this suffix."""
SHARD_RECORD_FORMAT = "relayrun shard, version 1"


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer of a shard, as its record states it."""

    fingerprint: str
    """SHA-256 of the serialized tokenizer."""
    ids: str
    """Fingerprint of the data that decides ids (`encode.tokenizer.ids_fingerprint`)."""
    size: int
    """Entries of the vocabulary."""
    eos: int | None
    """Id that ends every document; None: no id does."""
    bos: int | None = None
    """Id that begins every document; None: no id does."""


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The record of one shard."""

    made: TokenizerRecord | None
    """Its tokenizer; None if unknown."""
    xxh3_128: dict[str, str]
    """Checksums, 32 hexadecimal digits, of the .bin and the .idx; empty if unknown."""
    largest_id: int | None = None
    """The largest id in the .bin; None if the .bin is empty or the id is unknown."""
    inputs: tuple[tuple[str, int, str], ...] = ()
    """Path, bytes and fingerprint (`tokenize.shard_folder`) of each raw file of the shard, as far as known."""
    texts: frozenset[str] = frozenset()
    """Text names (`ShardRecords.texts`) of the shards that were merged into it."""
    repeats: bool = False
    """Two of the shards that were merged into it have the same text."""


def write_shard_record(prefix: str, shard: ShardRecord, *, merged: Sequence[str] | None = None) -> None:
    """Write the record of the shard `prefix`, before its files get their names. `merged`: the shards merged into it."""
    record: dict[str, Any] = {
        "format": SHARD_RECORD_FORMAT,
        "tokenizer": None if shard.made is None else asdict(shard.made),
        "xxh3_128": shard.xxh3_128,
        "largest_id": shard.largest_id,
    }
    if merged is not None:
        record |= {"merged": list(merged), "texts": sorted(shard.texts), "repeats": shard.repeats}
    write_json(prefix + RECORD_SUFFIX, record)


class ShardRecords:
    """Records of shards; reads each folder once."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[dict[str, ShardRecord], set[str]]] = {}
        self._cuts: dict[str, set[int]] = {}
        """Begin and end of each range of a raw file that `texts` has found, by file."""
        self._real_path = RealPathCache()

    def of(self, prefix: str) -> ShardRecord | None:
        """Return the record of the shard `prefix`, beside its real .bin; None if there is no record."""
        real_prefix = self._real_path(prefix + ".bin").removesuffix(".bin")
        folder, name = os.path.split(real_prefix)
        if folder not in self._folders:
            self._folders[folder] = _read_folder_record(folder), _list_shard_records(folder)
        shared, own = self._folders[folder]
        return (_read_shard_record(real_prefix) if name + RECORD_SUFFIX in own else None) or shared.get(name)

    def texts(self, prefixes: Iterable[str]) -> dict[str, set[str]]:
        """Name the text of each shard: shards with the same text share a name, whatever their paths. Names are the
        checksums on record: of the .bin, of the merged shards, of the raw files. If any of several shards with .bin
        files of equal size has no checksum, all of them are compared by the ends of the .bin: a mixture cuts a shard by
        its .idx. Empty shards, missing shards and shards below URLs have no name."""
        found: dict[str, set[str]] = {}
        sizes: dict[int, dict[str, list[str]]] = {}
        without = set()
        for prefix in prefixes:
            found[prefix] = set()
            try:
                size = os.path.getsize(prefix + ".bin")
            except OSError:
                continue
            if size:
                real = self._real_path(prefix + ".bin").removesuffix(".bin")
                sizes.setdefault(size, {}).setdefault(real, []).append(prefix)
                record = self.of(real) or ShardRecord(made=None, xxh3_128={})
                found[prefix] = {record.xxh3_128.get("bin", real), *record.texts}
                for path, length, fingerprint in record.inputs:
                    found[prefix] |= self.texts_of_file(path, length, fingerprint)
                if real in found[prefix]:
                    without.add(size)
        for text in {text for texts in found.values() for text in texts}:
            file, _, bounds = text.partition("/bytes=")
            if bounds:
                self._cuts.setdefault(file, set()).update(_parse_bounds(bounds))
        found = {prefix: self._in_pieces(texts) for prefix, texts in found.items()}
        for alike in (sizes[size] for size in without if len(sizes[size]) > 1):
            for real, several in alike.items():
                for prefix in several:
                    found[prefix].add(hash_file_ends(real + ".bin"))
        return found

    def texts_of_file(self, path: str, size: int, *fingerprints: str) -> set[str]:
        """Name the text of a raw file, or of a range of it, in the same way; an empty file has no name."""
        file, mark, bounds = path.removeprefix("file://").partition("/bytes=")
        place = file if "://" in file else self._real_path(file)
        found = {f"{each} {size}" for each in (*fingerprints, *([] if bounds else [place])) if each and size}
        return found | {place + mark + bounds} if bounds else self._in_pieces(found)

    def _in_pieces(self, texts: set[str]) -> set[str]:
        """Return the names with pieces in place of each range of a file, so that ranges that overlap share a piece. A
        whole file has the pieces of its ranges, too."""
        named = {text for text in texts if "/bytes=" not in text}
        for text in texts if self._cuts else ():
            file, _, bounds = text.partition("/bytes=")
            file = file if bounds else text.rpartition(" ")[0]
            if file in self._cuts:
                first, last = _parse_bounds(bounds or "0-")
                cuts = sorted(cut for cut in {*self._cuts[file], first, last} if first <= cut <= last)
                named |= {f"{file}/bytes={begin}-{end}" for begin, end in itertools.pairwise(cuts)}
        return named


def _parse_bounds(bounds: str) -> tuple[int, int]:
    first, last = bounds.split("-")
    return int(first), int(last or 1 << 62)


def _read_folder_record(folder: str) -> dict[str, ShardRecord]:
    """Read the record of a folder, by name of the shard. Empty if the record is missing or invalid."""
    try:
        record: Any = read_json(os.path.join(folder, FOLDER_RECORD))
        settings, known, dataset = record["settings"], record["tokenizer"], record["source"]["dataset"]
        ends = {"eos": settings["eos"], "bos": settings.get("bos")}
        made = TokenizerRecord(fingerprint=settings["tokenizer"], ids=known["ids"], size=known["size"], **ends)
        return {
            name: ShardRecord(
                made=made,
                xxh3_128=task["xxh3_128"],
                largest_id=task["largest_id"],
                inputs=tuple(
                    (os.path.join(dataset, path), size, fingerprint)
                    for (path, size, _), fingerprint, documents in zip(
                        task["inputs"], task["fingerprints"], task["file_documents"], strict=True
                    )
                    if fingerprint and documents  # else the file was skipped, or is empty, as many files of Spark
                ),
            )
            for name, task in record["shards"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _list_shard_records(folder: str) -> set[str]:
    try:
        return {name for name in os.listdir(folder) if name.endswith(RECORD_SUFFIX)}
    except OSError:
        return set()


def _read_shard_record(real_prefix: str) -> ShardRecord | None:
    try:
        record: Any = read_json(real_prefix + RECORD_SUFFIX)
        made = record["tokenizer"]
        return ShardRecord(
            made=None if made is None else TokenizerRecord(**made),
            xxh3_128=dict(record["xxh3_128"]),
            largest_id=record["largest_id"],
            texts=frozenset(record.get("texts", ())),
            repeats=record.get("repeats", False),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}

_TOKENIZE_AGAIN = "tokenize it again, or leave this prefix out"
_INDEX_CHUNK = 1 << 20
"""Sequences of an index that are compared at a time."""


def token_dtype(vocabulary_size: int) -> type[np.generic]:
    """Return the token type by Megatron's rule: uint16 below 65,500 vocabulary entries, else int32."""
    return np.uint16 if vocabulary_size < 65_500 else np.int32


def first_foreign_id(ids: npt.NDArray[np.integer[Any]], vocabulary_size: int) -> int | None:
    """Return the first id that is beyond the vocabulary; None if there is none."""
    if not len(ids) or ids.view(f"u{ids.itemsize}").max() < vocabulary_size:  # a negative one is too large then
        return None
    return int(ids[(ids >= vocabulary_size) | (ids < 0)][0])


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One .bin/.idx pair with its header read and its sizes checked. `prefix` is the path without suffix."""

    prefix: str
    dtype: np.dtype[np.generic]
    sequences: int
    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    multimodal: bool = False
    """True if the index holds the mode of each sequence."""

    @classmethod
    def open(cls, prefix: str | os.PathLike[str], *, multimodal: bool = False) -> Shard:
        """Read the header of PREFIX.idx (34 bytes) and the sizes of both files. `multimodal`: the index ends with the
        mode of each sequence, as Megatron writes it with that option. Raises InputError if a file is missing, is not an
        index, or is shorter than its header says."""
        prefix = os.fspath(prefix)
        try:
            with open(prefix + ".idx", "rb", buffering=0) as file:
                header = file.read(INDEX_HEADER.size)
                idx_bytes = os.fstat(file.fileno()).st_size
                last = _last_sequence(file.fileno(), header, idx_bytes)
            bin_bytes = os.stat(prefix + ".bin").st_size
        except FileNotFoundError as error:
            missing = "a shard needs both its .bin and its .idx file; this one is missing"
            raise InputError(missing, where=error.filename, hint=_TOKENIZE_AGAIN) from None
        dtype, sequences, bounds = _check_header(prefix + ".idx", header, idx_bytes, multimodal)
        tokens = 0
        if sequences:  # the last sequence must end inside the .bin; a cut shard may have bytes after it
            length, offset = last
            end = offset + length * dtype.itemsize
            if end > bin_bytes:
                torn = f"token file is torn: {bin_bytes} bytes, its index asks for {end}"
                raise InputError(torn, where=prefix + ".bin", hint=_TOKENIZE_AGAIN)
            tokens = end // dtype.itemsize
        return cls(
            prefix=prefix,
            dtype=dtype,
            sequences=sequences,
            documents=bounds - 1,
            tokens=tokens,
            bin_bytes=bin_bytes,
            idx_bytes=idx_bytes,
            multimodal=multimodal,
        )

    @property
    def cut(self) -> bool:
        """True if the .bin extends beyond the last sequence: a mixture cut this shard by a shorter .idx."""
        return self.bin_bytes > self.tokens * self.dtype.itemsize

    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence, shape [sequences], memory-mapped."""
        return self._mapped("<i4", 0, self.sequences)

    def offsets(self) -> npt.NDArray[np.int64]:
        """Byte offset of each sequence in the .bin, shape [sequences], memory-mapped."""
        return self._mapped("<i8", 4 * self.sequences, self.sequences)

    def bounds(self) -> npt.NDArray[np.int64]:
        """First sequence of each document, then the number of sequences; shape [documents + 1], memory-mapped."""
        return self._mapped("<i8", 12 * self.sequences, self.documents + 1)

    def document_ends(self) -> npt.NDArray[np.int64]:
        """Tokens before the end of each document, after a leading 0; shape [documents + 1]."""
        return np.append(np.int64(0), np.cumsum(self.lengths(), dtype=np.int64))[self.bounds()]

    def first_gap(self) -> int | None:
        """Return the first sequence that does not begin in the .bin where the one before ends; None for no gap."""
        lengths, offsets, end = self.lengths(), self.offsets(), 0
        for start in range(0, self.sequences, _INDEX_CHUNK):
            sizes = lengths[start : start + _INDEX_CHUNK].astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            wrong = np.flatnonzero((offsets[start : start + _INDEX_CHUNK] != ends - sizes) | (sizes < 0))
            if len(wrong):
                return start + int(wrong[0])
            end = int(ends[-1])
        return None

    def modes(self) -> npt.NDArray[np.int8]:
        """Mode of each sequence of a multimodal shard, shape [sequences], memory-mapped."""
        return self._mapped("i1", 12 * self.sequences + 8 * (self.documents + 1), self.sequences)

    def _mapped(self, kind: str, place: int, count: int) -> npt.NDArray[Any]:
        """Return an array of the index, which begins so many bytes behind the header."""
        return np.memmap(self.prefix + ".idx", np.dtype(kind), "r", INDEX_HEADER.size + place, (count,))

    def ids(self) -> npt.NDArray[np.generic]:
        """All token ids, shape [tokens], memory-mapped."""
        return np.memmap(self.prefix + ".bin", self.dtype, "r", 0, (self.tokens,))


def _check_header(index: str, header: bytes, idx_bytes: int, multimodal: bool) -> tuple[np.dtype[np.generic], int, int]:
    """Return token type, sequences and entries of the document index. Raises InputError for a wrong header or size."""
    if len(header) < INDEX_HEADER.size or header[:9] != INDEX_MAGIC:
        raise InputError("not a Megatron index", where=index, hint=_TOKENIZE_AGAIN)
    _, version, code, sequences, bounds = INDEX_HEADER.unpack(header)
    if version != 1 or code not in DTYPE_CODES:
        raise InputError(f"unknown index version {version} or token type {code}", where=index, hint=_TOKENIZE_AGAIN)
    wanted = INDEX_HEADER.size + (13 if multimodal else 12) * sequences + 8 * bounds
    if idx_bytes != wanted and bounds and idx_bytes == wanted + (-sequences if multimodal else sequences):
        words = "the index has no modes of sequences" if multimodal else "the index has modes of sequences: multimodal"
        hint = "merge without --multimodal" if multimodal else "only merge_datasets.py --multimodal takes it"
        raise InputError(words, where=index, hint=hint)
    if idx_bytes != wanted or bounds == 0:
        torn = f"index is torn: {idx_bytes} bytes, its header asks for {wanted}"
        raise InputError(torn, where=index, hint=_TOKENIZE_AGAIN)
    return np.dtype(DTYPE_CODES[code]), sequences, bounds


def _last_sequence(idx: int, header: bytes, idx_bytes: int) -> tuple[int, int]:
    """Return tokens and offset (bytes) of the last sequence of the open index; zeros for an empty index."""
    sequences = INDEX_HEADER.unpack(header)[3] if len(header) == INDEX_HEADER.size else 0
    place = INDEX_HEADER.size + 4 * sequences
    if not sequences or place + 8 * sequences > idx_bytes:
        return 0, 0
    (length,) = struct.unpack("<i", os.pread(idx, 4, place - 4))
    (offset,) = struct.unpack("<q", os.pread(idx, 8, place + 8 * (sequences - 1)))
    return length, offset


class ShardWriter:
    """Writes one shard; its final names appear with `finish`. Temporary names end in `.tmp`, so that no tool takes them
    for a shard. `finish` syncs both files and renames the .bin first: an .idx under its final name always has its whole
    .bin."""

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: type[np.generic], *, own_record: TokenizerRecord | None = None
    ) -> None:
        """Begin the shard `prefix`. `own_record`: write a record beside the shard that names this tokenizer."""
        self.prefix = os.fspath(prefix)
        self._made = own_record
        self.dtype = np.dtype(dtype)
        self.tokens = 0
        self.largest_id = -1
        """The largest id so far, or -1."""
        self.xxh3_128: dict[str, str] = {}
        """Checksums of the .bin and the .idx after `finish`, 32 hexadecimal digits."""
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._open = 0
        """Tokens of the document that `append` has begun."""
        self._hash = xxhash.xxh3_128()
        self._reserved: npt.NDArray[np.generic] | None = None
        """Reserved memory of the file that is not filled yet."""
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._bin = DirectFile(self.prefix + ".bin.tmp")  # closed by finish or abort

    @property
    def documents(self) -> int:
        return sum(len(lengths) for lengths in self._lengths)

    def add(self, ids: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append documents: `ids` is their concatenation, `lengths` the tokens of each, shape [documents]."""
        array = np.ascontiguousarray(ids, dtype=self.dtype)  # keeps the identity of a reserved array
        counts = np.array(lengths, dtype=np.int32)  # a copy: the caller may reuse its buffer
        if int(counts.sum(dtype=np.int64)) != array.size:
            raise ValueError(f"lengths sum to {counts.sum(dtype=np.int64)}, but there are {array.size} ids")
        self._write(array)
        self._lengths.append(counts)

    def append(self, ids: npt.ArrayLike) -> None:
        """Append tokens of the open document, which `end_document` ends."""
        array = np.ascontiguousarray(ids, dtype=self.dtype)
        self._write(array)
        self._open += array.size

    def end_document(self) -> None:
        """End the open document."""
        self._lengths.append(np.array([self._open], np.int32))
        self._open = 0

    def reserve(self, tokens: int) -> npt.NDArray[np.generic]:
        """Return an array for `add`, shape [tokens], in the memory that the file is written from: saves a copy."""
        size = tokens * self.dtype.itemsize
        if size > MAX_RESERVE_BYTES:
            return np.empty(tokens, self.dtype)
        self._reserved = self._bin.reserve(size).view(self.dtype)
        return self._reserved

    def _write(self, array: npt.NDArray[np.generic]) -> None:
        if array is self._reserved:
            self._bin.commit(array.nbytes)
        else:
            self._bin.write(array.data)
        self._reserved = None
        self._hash.update(array.data)
        self.tokens += array.size
        if array.size:
            self.largest_id = max(self.largest_id, int(array.max()))

    def mark(self) -> object:
        return self.tokens, len(self._lengths), self._hash.copy(), self.largest_id

    def rollback(self, mark: object) -> None:
        """Drop everything added since `mark`."""
        assert isinstance(mark, tuple)
        self.tokens, count, digest, self.largest_id = mark
        self._hash, self._reserved, self._open = digest.copy(), None, 0
        del self._lengths[count:]
        self._bin.truncate(self.tokens * self.dtype.itemsize)

    def finish(self) -> bool:
        """Publish the shard. Returns False, without files, if no document was added."""
        if not self.documents:
            self.abort()
            return False
        try:
            documents = np.concatenate(self._lengths)
            bounds = np.zeros(len(documents) + 1, np.int64)
            np.cumsum(documents > 0, out=bounds[1:])
            idx_bytes = encode_index(documents[documents > 0], bounds, self.dtype)
            with open(self.prefix + ".idx.tmp", "wb") as idx:
                idx.write(idx_bytes)
                idx.flush()
                os.fsync(idx.fileno())
            self.xxh3_128 = {"bin": self._hash.hexdigest(), "idx": xxhash.xxh3_128_hexdigest(idx_bytes)}
            os.fsync(self._bin.fileno())
            self._bin.close()
            if self._made is not None:
                largest = self.largest_id if self.tokens else None
                record = ShardRecord(made=self._made, xxh3_128=self.xxh3_128, largest_id=largest)
                write_shard_record(self.prefix, record)
            else:
                Path(self.prefix + RECORD_SUFFIX).unlink(missing_ok=True)  # of a former shard
        except BaseException:
            self.abort()
            raise
        os.replace(self.prefix + ".bin.tmp", self.prefix + ".bin")
        os.replace(self.prefix + ".idx.tmp", self.prefix + ".idx")
        fsync_directory(Path(self.prefix).parent)
        return True

    def abort(self) -> None:
        """Drop the shard and its temporary files."""
        try:
            with contextlib.suppress(OSError):  # a full disk may be reported at close
                self._bin.close()
        finally:
            for name in (".bin.tmp", ".idx.tmp"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.prefix + name)


def encode_index(lengths: npt.NDArray[np.int32], bounds: npt.NDArray[np.int64], dtype: np.dtype[np.generic]) -> bytes:
    """Return the .idx of contiguous sequences of these `lengths`; documents as in the layout above."""
    offsets = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1].astype("<i8") * dtype.itemsize, out=offsets[1:])
    code = next(code for code, kind in DTYPE_CODES.items() if np.dtype(kind) == dtype)
    header = INDEX_HEADER.pack(INDEX_MAGIC, 1, code, len(lengths), len(bounds))
    return b"".join((header, lengths.astype("<i4").tobytes(), offsets.tobytes(), bounds.astype("<i8").tobytes()))
