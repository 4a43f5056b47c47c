"""Texts whose digits are apart: what the pre-tokenizer `Digits` cuts out before a pattern sees the rest.

A step of a pre-tokenizer sees each piece of the step before alone. So a text may be cut where `Digits` cuts it, and
each piece is encoded as a text of its own. Where every digit is a piece, an ASCII one is a byte, whose id is looked
up: they are taken out, and their ids filled in, because a hundred thousand texts of one byte cost more than the rest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayrun.tokenization.encode.characters import numeric_table, places_of
from relayrun.tokenization.encode.libraries import Encoded, Engine
from relayrun.tokenization.readers.texts import Texts

_FIRST_NUMERIC_LEAD = 0xC2
"""Lead byte of U+00B2, the first numeric character that is not ASCII."""


class DigitsApart:
    """Encodes what stands between digits by `engine`, and the digits one by one, or by runs."""

    def __init__(self, engine: Engine, *, each: bool) -> None:
        self.routed = 0
        self._engine, self._each = engine, each
        self._ids = engine.encode(Texts.of([*"0123456789"]))[0]
        assert self._ids.size == 10

    def encode(self, texts: Texts) -> Encoded:
        used, documents = texts.used, texts.offsets - texts.offsets[0]
        ascii_digits = (used - np.uint8(0x30)) < 10
        others, ends = _numeric(texts)
        if self._each:
            taken = np.flatnonzero(ascii_digits)
            cuts = [documents, taken, others, ends]
        else:
            inside = ascii_digits.copy()
            for step in range(4):  # the bytes of a character
                inside[(others + step)[others + step < ends]] = True
            borders = np.flatnonzero(inside[1:] != inside[:-1]) + 1
            taken = np.empty(0, np.int64)
            cuts = [documents, borders]
        if not taken.size:
            return self._pieces(used, np.unique(np.concatenate(cuts)), documents)
        kept = used[~ascii_digits]
        before = np.zeros(used.size + 1, np.int64)  # digits that are taken out, before each byte
        np.cumsum(ascii_digits, out=before[1:])
        starts = np.unique(np.concatenate([cut - before[cut] for cut in cuts]))
        places = documents - before[documents]
        ids, bounds = self._encoded(kept, starts)
        at = _tokens_before(starts, bounds, taken - before[taken])
        of_documents = _tokens_before(starts, bounds, places) + before[documents]
        out = np.empty(ids.size + taken.size, np.uint32)
        filled = np.zeros(out.size, np.bool_)
        filled[at + np.arange(taken.size)] = True
        out[filled], out[~filled] = self._ids[used[taken] - 0x30], ids
        return out, np.diff(of_documents)

    def _pieces(
        self, data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], documents: npt.NDArray[np.int64]
    ) -> Encoded:
        ids, bounds = self._encoded(data, starts)
        return ids, np.diff(_tokens_before(starts, bounds, documents))

    def _encoded(self, data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> Encoded:
        """Ids of the pieces that begin at `starts`, and where the ids of each begin."""
        ids, lengths = self._engine.encode(Texts(data=data, offsets=starts))
        bounds = np.zeros(len(starts), np.int64)
        np.cumsum(lengths, out=bounds[1:])
        return ids, bounds


def _tokens_before(
    starts: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """How many ids stand before each of `places`, which are among `starts`."""
    return np.asarray(bounds[np.searchsorted(starts, places)])


def _numeric(texts: Texts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where numeric characters that are not ASCII begin and end, in the bytes used."""
    begins = places_of(texts, numeric_table(), _FIRST_NUMERIC_LEAD) - texts.offsets[0]
    lead = texts.used[begins]
    return begins, begins + 2 + (lead >= 0xE0) + (lead >= 0xF0)
