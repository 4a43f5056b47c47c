"""Sets of characters, and which texts hold one of a set, without a Python object per text."""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relayrun.tokens.readers.texts import Texts


@dataclass(frozen=True, eq=False)
class CharacterSet:
    """A set of characters."""

    points: npt.NDArray[np.bool_]
    """By code point, shape [2**21]: padded to what four bytes of UTF-8 can hold."""

    @functools.cached_property
    def beginnings(self) -> npt.NDArray[np.bool_]:
        """Whether a character of the set begins with these two bytes, the first times 256; shape [2**16]."""
        found = np.zeros(1 << 16, np.bool_)
        for lead, inside, bits in ((0xC0, 0, 5), (0xE0, 6, 4), (0xF0, 12, 3)):
            block = np.flatnonzero(np.any(self.points.reshape(-1, 1 << inside), axis=1))
            block = block[block < 64 << bits]
            found[(lead | block >> 6) << 8 | 0x80 | block & 0x3F] = True
        return found


def find_characters(texts: Texts, table: CharacterSet, first_lead: int) -> npt.NDArray[np.int64]:
    """Where the characters of `table` begin, ascending, in `texts.data`.

    `first_lead`, not below 0xC2, is the lowest first byte of any of them: no other byte is looked at.
    """
    used = np.append(texts.used, np.zeros(3, np.uint8))  # what is behind the last character may be looked at
    leads = np.flatnonzero(used >= first_lead)
    pairs = used[leads].astype(np.int64)
    pairs <<= 8
    pairs |= used[leads + 1]
    leads = leads[table.beginnings[pairs]]  # few are left: most blocks of Unicode are as a whole in or out
    first, second, third, fourth = (used[leads + step].astype(np.int64) & 0x3F for step in range(4))
    points = np.where(used[leads] < 0xE0, first << 6 | second, (first & 0x0F) << 12 | second << 6 | third)
    long = used[leads] >= 0xF0
    points[long] = ((first & 7) << 18 | second << 12 | third << 6 | fourth)[long]
    places: npt.NDArray[np.int64] = leads[table.points[points]] + texts.offsets[0]
    return places


def texts_holding(texts: Texts, table: CharacterSet, first_lead: int) -> npt.NDArray[np.bool_]:
    """Which texts hold a character of `table`, shape [texts]; `first_lead`: see `places_of`."""
    suspect = texts.highest() >= first_lead
    if suspect.all():
        return texts.any_in(find_characters(texts, table, first_lead))
    if suspect.any():  # few of an English corpus; this pass costs a tenth of the next one
        suspect[suspect] = texts_holding(texts.take(suspect), table, first_lead)
    return suspect


def texts_holding_bytes(texts: Texts, needles: tuple[bytes, ...]) -> npt.NDArray[np.bool_]:
    """Which texts hold one of these pieces of UTF-8, shape [texts]. None of them may be empty."""
    found = np.zeros(len(texts), np.bool_)
    highest = texts.used.max(initial=0)
    needles = tuple(needle for needle in needles if max(needle) <= highest)  # the others are nowhere
    data = texts.used.tobytes() if needles else b""
    for needle in needles:
        place = data.find(needle)
        while place >= 0:
            text = int(np.searchsorted(texts.offsets, place + texts.offsets[0], side="right")) - 1
            end = int(texts.offsets[text + 1] - texts.offsets[0])
            if place + len(needle) <= end:  # not over the border to the next text
                found[text] = True
                place = data.find(needle, end)
            else:
                place = data.find(needle, place + 1)
    return found


def not_ascii(texts: Texts) -> npt.NDArray[np.bool_]:
    """Which texts hold anything but ASCII, shape [texts]."""
    return texts.highest() >= 0x80


FIRST_UNASSIGNED_LEAD = 0xCD
"""Lead byte of U+0340: every code point below U+0378 is assigned."""


def unassigned(texts: Texts) -> npt.NDArray[np.bool_]:
    """Which texts hold a code point that this Python's Unicode tables do not know, shape [texts].

    Only bytes from 0xCD are looked at, which are leads of code points from U+0340: English costs next to nothing.
    """
    return texts_holding(texts, unassigned_table(), FIRST_UNASSIGNED_LEAD)


@functools.cache
def unassigned_table(more: str = "") -> CharacterSet:
    """The code points that this Python's Unicode tables do not know, and those of `more`."""
    table = np.ones(1 << 21, np.bool_)
    for begin, end in ((0, 0x34000), (0xE0000, 0xE0200)):  # the planes between hold nothing yet
        table[begin:end] = unicode_categories(begin, end) == b"Cn"
    table[0xF0000:0x110000] = False  # private use
    table[[*map(ord, more)]] = True
    return CharacterSet(table)


@functools.cache
def numeric_table() -> CharacterSet:
    """The characters of the categories Nd, Nl and No: what the pre-tokenizer `Digits` calls a digit."""
    table = np.zeros(1 << 21, np.bool_)
    table[:0x34000] = np.isin(unicode_categories(0, 0x34000), (b"Nd", b"Nl", b"No"))
    return CharacterSet(table)


@functools.cache
def unicode_categories(begin: int, end: int) -> npt.NDArray[np.bytes_]:
    """The two letters of the Unicode category of these code points, by this Python's tables."""
    return np.frombuffer("".join(map(unicodedata.category, map(chr, range(begin, end)))).encode(), "S2")
