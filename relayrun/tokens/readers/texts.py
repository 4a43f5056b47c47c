"""Texts in memory: the text column of Arrow tables, and texts as two buffers.

`PackedTexts` holds UTF-8 bytes and the offset of each text, without a Python object per text. `LongText` collects one
text piece by piece and keeps a very long one in a temporary file. The other functions find the text column in an Arrow
schema and check that its texts are UTF-8.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.stores.urls import printable


def large_strings(texts: Sequence[str | bytes | None]) -> pa.Array:
    """Return texts as large_string without the import of pandas. Raises UnicodeEncodeError for a lone surrogate."""
    encoded = [text.encode() if isinstance(text, str) else text or b"" for text in texts]
    there = np.array([text is not None for text in texts], np.bool_)
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    data = pa.py_buffer(b"".join(encoded))
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(_offsets(encoded)), data, valid)


def _offsets(encoded: Sequence[bytes | memoryview]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([*map(len, encoded)], out=offsets[1:])
    return offsets


@dataclass(frozen=True, kw_only=True)
class PackedTexts:
    """UTF-8 texts: text i is `data[offsets[i]:offsets[i + 1]]`. `data` may extend beyond them at both ends."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Shape [texts + 1]."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> PackedTexts:
        """Encode strings. Raises UnicodeEncodeError for a lone surrogate."""
        return cls.join([text.encode() for text in texts])

    @classmethod
    def join(cls, encoded: Sequence[bytes | memoryview]) -> PackedTexts:
        """Join texts in UTF-8."""
        return cls(data=np.frombuffer(b"".join(encoded), np.uint8), offsets=_offsets(encoded))

    @classmethod
    def from_arrow(cls, array: pa.Array) -> PackedTexts:
        """Wrap the buffers of a string or large_string array without nulls; only the offsets are copied."""
        _, offsets, data = array.buffers()
        kind = np.int64 if pa.types.is_large_string(array.type) else np.int32
        if not len(array):
            return cls(data=np.empty(0, np.uint8), offsets=np.zeros(1, np.int64))
        starts = np.frombuffer(offsets, kind)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        return cls(data=np.frombuffer(data or b"", np.uint8), offsets=starts)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each text."""
        return np.diff(self.offsets)

    @property
    def used(self) -> npt.NDArray[np.uint8]:
        """Bytes of all texts, concatenated."""
        return self.data[self.offsets[0] : self.offsets[-1]]

    def highest(self) -> npt.NDArray[np.uint8]:
        """Return the highest byte of each text, 0 for an empty one; shape [texts]."""
        full = self.sizes > 0
        highest = np.zeros(len(self), np.uint8)
        if full.any():  # empty texts occupy no bytes: the next full text begins at their offset
            highest[full] = np.maximum.reduceat(self.used, self.offsets[:-1][full] - self.offsets[0])
        return highest

    def strings(self) -> list[str]:
        return [str(piece, "utf-8") for piece in self.views()]

    def views(self) -> Iterator[memoryview]:
        """Yield the bytes of every text, not copied."""
        view = memoryview(self.data)  # type: ignore[arg-type]
        return (view[begin:end] for begin, end in itertools.pairwise(self.offsets.tolist()))

    def take(self, mask: npt.NDArray[np.bool_]) -> PackedTexts:
        """Return the texts where `mask`, shape [texts], is set."""
        bounds = zip(self.offsets[:-1][mask].tolist(), self.offsets[1:][mask].tolist(), strict=True)
        return PackedTexts.join([self.data[begin:end].data for begin, end in bounds])

    def split(self, most_bytes: int, most_texts: int) -> Iterator[PackedTexts]:
        """Yield slices within both bounds, without copying; a text longer than `most_bytes` is alone."""
        begin = 0
        while begin < len(self):
            fits = int(np.searchsorted(self.offsets, self.offsets[begin] + most_bytes, side="right")) - 1
            end = min(max(fits, begin + 1), begin + most_texts, len(self))
            yield PackedTexts(data=self.data, offsets=self.offsets[begin : end + 1])
            begin = end

    def any_in(self, marked: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which texts hold one of the positions `marked` (ascending, in `data`), shape [texts]."""
        found = np.searchsorted(marked, self.offsets)
        return np.asarray(found[1:] > found[:-1])


MAX_BYTES_IN_MEMORY = 16 << 20
"""Longer texts move into a file."""

_mapped: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Texts in files, by their address."""

MAX_ROWS = 1024
"""Rows of an array of texts, at most."""

TEXT_TYPES = (pa.string(), pa.large_string())
"""Types of columns of texts, with 32-bit or 64-bit offsets."""
_BYTE_TYPES = (pa.binary(), pa.large_binary())
"""Types of columns of bytes, in which Spark, Hive and Impala write texts."""


class LongText:
    """The bytes of one text; above `MAX_BYTES_IN_MEMORY` in an unnamed temporary file."""

    def __init__(self, folder: str | None) -> None:
        """`folder` gets the file; None: the text stays in memory at any length."""
        self._folder = folder
        self._memory = bytearray()
        self._file: IO[bytes] | None = None

    def add(self, data: bytes) -> None:
        """Append bytes. Raises RelayrunError when the disk is full."""
        self._memory += data
        if self._folder is not None and (self._file is not None or len(self._memory) > MAX_BYTES_IN_MEMORY):
            with _explain_full_disk(self._folder):
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self._folder, prefix=".text-")  # noqa: SIM115
                    weakref.finalize(self, self._file.close)  # also if `text` is never called
                self._file.write(self._memory)
                self._file.flush()
            self._memory = bytearray()

    def text(self) -> pa.Array:
        """Return the text as a large_string array of length 1, not copied; call `add` no more. Raises as `add` does."""
        data: bytearray | mmap.mmap = self._memory
        if self._file is not None:
            with _explain_full_disk(self._folder), self._file:
                data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            _mapped[_address(np.frombuffer(data, np.uint8))] = data
        offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
        return pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data))


@contextlib.contextmanager
def _explain_full_disk(folder: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RelayrunError(f"no room for a long text: {error.strerror}", where=folder) from None


def release_pages(data: npt.NDArray[np.uint8]) -> None:
    """Tell the kernel that a text is read up to the end of `data`: its file pages need not stay in memory."""
    begin = _address(data)
    for place, mapped in _mapped.items():
        if place <= begin < place + len(mapped):
            # from the beginning: the kernel reads pages around each access, and so loads released pages again
            mapped.madvise(mmap.MADV_DONTNEED, 0, begin - place + data.size)


def _address(data: npt.NDArray[np.uint8]) -> int:
    return int(data.__array_interface__["data"][0])


def find_field(schema: pa.Schema, path: str, column: str) -> list[str]:
    """Return the names that lead to the text column. Raises InputError that names `path`."""
    names = [column] if column in schema.names else column.split(".")
    if schema.names.count(names[0]) != 1:
        raise missing_column_error(path, column, schema.names)
    kind = schema.field(names[0]).type
    for name in names[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            nested = [f"{top.name}.{leaf.name}" for top in schema if pa.types.is_struct(top.type) for leaf in top.type]
            raise missing_column_error(path, column, [*schema.names, *nested])
        kind = kind.field(name).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if inner not in (*TEXT_TYPES, *_BYTE_TYPES, pa.string_view(), pa.null()):
        raise InputError(f"column {column!r} holds {inner}, not text", where=printable(path))
    return names


def missing_column_error(
    where: str, column: str, columns: Sequence[str], hint: str | None = "name the column of the text with --column"
) -> InputError:
    """Return the error for a column that is not there once."""
    words = f"no column {column!r}"
    if doubled := columns.count(column):
        words, hint = f"{doubled} columns are named {column!r}", "write the file again, and rename all but one"
    return InputError(f"{words}; there are: {', '.join(columns)}", where=printable(where), hint=hint)


def text_column(table: pa.Table, column: str) -> pa.ChunkedArray:
    """Return the text column, which may be nested."""
    first, *others = find_field(table.schema, "", column)
    return _nested(table[first], others)


def text_array(batch: pa.RecordBatch, fields: Sequence[str]) -> pa.Array:
    """Return the texts of a batch as a string or large_string array; `fields` as returned by `find_field`."""
    array = _nested(batch.column(fields[0]), fields[1:])
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type in _BYTE_TYPES:  # as Spark, Hive and Impala write texts; `keep_utf8` looks at the bytes
        array = array.view(pa.string() if pa.types.is_binary(array.type) else pa.large_string())
    return array if array.type in TEXT_TYPES else array.cast(pa.large_string())


def _nested(array: pa.Array | pa.ChunkedArray, names: Sequence[str]) -> Any:
    for name in names:
        import pyarrow.compute as pc  # its import takes as long as that of Arrow

        array = pc.struct_field(array, name)
    return array


def as_large_strings(array: pa.Array) -> pa.Array:
    """Return a string or large_string array as large_string; `cast` would import pyarrow.compute."""
    if pa.types.is_large_string(array.type) or not len(array):
        return array if len(array) else pa.array([], pa.large_string())
    valid, offsets, data = array.buffers()
    starts = np.frombuffer(offsets, np.int32)[: array.offset + len(array) + 1].astype(np.int64)
    return pa.Array.from_buffers(pa.large_string(), len(array), [valid, pa.py_buffer(starts), data], -1, array.offset)


def keep_utf8(array: pa.Array, faults: LineFaults, where: Callable[[int], str]) -> pa.Array:
    """Return the UTF-8 texts of a string or large_string array; Arrow's readers do not check the encoding.

    `where` names row i of the array; `faults` may keep a null in place of a bad row. Raises InputError for the first
    bad row unless `faults` skips it, and pa.ArrowInvalid for an array that is broken in another way.
    """
    good = _utf8_mask(array, faults, where)
    if good is None:
        return array
    import pyarrow.compute as pc

    return pc.if_else(good, array, pa.scalar(None, array.type)) if faults.keep else array.filter(good)


def keep_utf8_rows(
    batch: pa.RecordBatch, fields: Sequence[str], faults: LineFaults, where: Callable[[int], str]
) -> pa.RecordBatch:
    """Return the rows of a batch whose texts are UTF-8, with all columns. Raises as `keep_utf8` does."""
    good = _utf8_mask(text_array(batch, fields), faults, where)
    return batch if good is None else batch.filter(good)


def _utf8_mask(array: pa.Array, faults: LineFaults, where: Callable[[int], str]) -> pa.Array | None:
    """Return the mask of the rows that are UTF-8; None if all are, which is cheap to find out."""
    try:
        array.validate(full=True)
        return None
    except pa.ArrowInvalid:
        array.validate()  # raises for offsets outside the buffers: then no row can be read
    good = np.ones(len(array), np.bool_)
    for row, text in enumerate(PackedTexts.from_arrow(array).views()):
        if array[row].is_valid:
            try:
                str(text, "utf-8")
            except UnicodeDecodeError as error:
                good[row] = False
                found = f"byte 0x{text[error.start]:02x} at {error.start} of its {len(text):,} bytes"
                bad = BadLine("not UTF-8", f"the text is not UTF-8 ({found})")
                faults.add(bad, where(row))
                if faults.keep:
                    faults.marks[row] = bad.reason
    mask = pa.array(good)
    array.filter(mask).validate(full=True)
    return mask


def row_namer(path: str, group: int, first: int, *, what: str = "row group") -> Callable[[int], str]:
    """Return a function that names row i of an array that begins at row `first` of a row group or record batch."""
    return lambda row: f"{path}: {what} {group}, row {first + row} of it (both counted from 0)"
