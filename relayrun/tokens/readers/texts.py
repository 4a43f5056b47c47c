"""Texts as two buffers: UTF-8 bytes and where each text begins. No Python object per text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def large_strings(texts: Sequence[str | bytes | None]) -> pa.Array:
    """Texts as Arrow's large_string; bytes must be UTF-8. `pa.array` would import pandas, which takes half a second.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    encoded = [text.encode() if isinstance(text, str) else text or b"" for text in texts]
    there = np.array([text is not None for text in texts], np.bool_)
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    data = pa.py_buffer(b"".join(encoded))
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(_offsets(encoded)), data, valid)


def _offsets(encoded: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Where each text begins in all of them one behind the other, and where the last one ends; shape [texts + 1]."""
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([*map(len, encoded)], out=offsets[1:])
    return offsets


@dataclass(frozen=True, kw_only=True)
class Texts:
    """`len` texts in UTF-8; text i is `data[offsets[i]:offsets[i + 1]]`. `data` may be longer at both ends."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Shape [texts + 1]."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Raises UnicodeEncodeError for a lone surrogate."""
        encoded = [text.encode() for text in texts]
        return cls(data=np.frombuffer(b"".join(encoded), np.uint8), offsets=_offsets(encoded))

    @classmethod
    def from_arrow(cls, array: pa.Array) -> Texts:
        """The buffers of a string or large_string array without nulls; nothing is copied but the offsets."""
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
        """The bytes of all texts, one behind the other."""
        return self.data[self.offsets[0] : self.offsets[-1]]

    def highest(self) -> npt.NDArray[np.uint8]:
        """The highest byte of each text, 0 for an empty one; shape [texts]."""
        full = self.sizes > 0
        highest = np.zeros(len(self), np.uint8)
        if full.any():  # empty texts take no room: the next full one begins where they do
            highest[full] = np.maximum.reduceat(self.used, self.offsets[:-1][full] - self.offsets[0])
        return highest

    def strings(self) -> list[str]:
        """One Python string per text."""
        return [str(piece, "utf-8") for piece in self.views()]

    def views(self) -> Iterator[memoryview]:
        """The bytes of every text, not copied."""
        view = memoryview(self.data)  # type: ignore[arg-type]
        return (view[begin:end] for begin, end in itertools.pairwise(self.offsets.tolist()))

    def take(self, mask: npt.NDArray[np.bool_]) -> Texts:
        """The texts where `mask`, shape [texts], is set."""
        offsets = np.zeros(int(mask.sum()) + 1, np.int64)
        np.cumsum(self.sizes[mask], out=offsets[1:])
        bounds = zip(self.offsets[:-1][mask].tolist(), self.offsets[1:][mask].tolist(), strict=True)
        pieces = [self.data[begin:end] for begin, end in bounds]
        return Texts(data=np.concatenate(pieces) if pieces else np.empty(0, np.uint8), offsets=offsets)

    def split(self, most_bytes: int, most_texts: int) -> Iterator[Texts]:
        """Pieces within both bounds, a longer text alone; nothing is copied."""
        begin = 0
        while begin < len(self):
            fits = int(np.searchsorted(self.offsets, self.offsets[begin] + most_bytes, side="right")) - 1
            end = min(max(fits, begin + 1), begin + most_texts, len(self))
            yield Texts(data=self.data, offsets=self.offsets[begin : end + 1])
            begin = end

    def any_in(self, marked: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which texts hold one of the positions `marked` (ascending, in `data`), shape [texts]."""
        found = np.searchsorted(marked, self.offsets)
        return np.asarray(found[1:] > found[:-1])
