"""Texts as two buffers: UTF-8 bytes and where each text begins. No Python object per text."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_FIRST_UNSURE = 0xCD
"""Lead byte of U+0340: every code point below U+0378 is assigned."""


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
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(data=np.frombuffer(b"".join(encoded), np.uint8), offsets=offsets)

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


def not_ascii(texts: Texts) -> npt.NDArray[np.bool_]:
    """Which texts hold anything but ASCII, shape [texts]."""
    return texts.highest() >= 0x80


def unassigned(texts: Texts) -> npt.NDArray[np.bool_]:
    """Which texts hold a code point that this Python's Unicode tables do not know, shape [texts].

    Only bytes from 0xCD are looked at, which are leads of code points from U+0340: English costs next to nothing.
    """
    suspect = texts.highest() >= _FIRST_UNSURE
    if not suspect.all():  # most of an English corpus; this pass costs a tenth of the next one
        if suspect.any():
            suspect[suspect] = unassigned(texts.take(suspect))
        return suspect
    used = texts.used
    leads = np.flatnonzero(used >= _FIRST_UNSURE)
    first = used[leads].astype(np.uint32)
    last = used.size - 1

    def following(step: int) -> npt.NDArray[np.uint32]:
        return np.asarray(used[np.minimum(leads + step, last)].astype(np.uint32) & np.uint32(0x3F), np.uint32)

    second, third = following(1), following(2)
    points = np.where(first < 0xE0, (first & 0x1F) << 6 | second, (first & 0x0F) << 12 | second << 6 | third)
    long = first >= 0xF0
    if long.any():
        points[long] = ((first & 7) << 18 | second << 12 | third << 6 | following(3))[long]
    return texts.any_in(leads[_unassigned_table()[points]] + texts.offsets[0])


@functools.cache
def _unassigned_table() -> npt.NDArray[np.bool_]:
    """By code point; padded to what four bytes can hold."""
    table = np.ones(1 << 21, np.bool_)
    for begin, end in ((0, 0x34000), (0xE0000, 0xE0200)):  # the planes between hold nothing yet
        table[begin:end] = categories(begin, end) == b"Cn"
    table[0xF0000:0x110000] = False  # private use
    return table


@functools.cache
def categories(begin: int, end: int) -> npt.NDArray[np.bytes_]:
    """The two letters of the Unicode category of these code points, by this Python's tables."""
    return np.frombuffer("".join(map(unicodedata.category, map(chr, range(begin, end)))).encode(), "S2")
