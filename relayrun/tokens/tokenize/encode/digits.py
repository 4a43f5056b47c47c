"""Texts whose digits are apart: what the pre-tokenizer `Digits` cuts out before a pattern sees the rest.

A step of a pre-tokenizer sees each piece of the step before alone. So a text may be cut where `Digits` cuts it, and
each piece is encoded as a text of its own. Where every digit is a piece, an ASCII one is a byte, whose id is looked
up: they are taken out, and their ids filled in, because a hundred thousand texts of one byte cost more than the rest.
"""

from __future__ import annotations

import numpy as np

from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.tokenize.encode.apart import Positions, encode_pieces
from relayrun.tokens.tokenize.encode.characters import find_characters, numeric_table
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine

_FIRST_NUMERIC_LEAD = 0xC2
"""Lead byte of U+00B2, the first numeric character that is not ASCII."""
_NO_POSITIONS = np.empty(0, np.int64)


class DigitEngine:
    """Encodes what stands between digits by `engine`, and the digits one by one, or by runs."""

    def __init__(self, engine: Engine, *, each: bool) -> None:
        self.routed = 0
        self._engine, self._each = engine, each
        self._ids = engine.encode(Texts.of([*"0123456789"]))[0]
        assert self._ids.size == 10

    def encode(self, texts: Texts) -> Encoded:
        ascii_digits = (texts.used - np.uint8(0x30)) < 10
        others, ends = _other_digits(texts)
        if self._each:
            taken = np.flatnonzero(ascii_digits)
            ids = self._ids[texts.used[taken] - 0x30]
            return encode_pieces(self._engine, texts, taken, taken + 1, ids, (others, ends))
        for step in range(4):  # the bytes of a character
            ascii_digits[(others + step)[others + step < ends]] = True
        borders = np.flatnonzero(ascii_digits[1:] != ascii_digits[:-1]) + 1
        return encode_pieces(self._engine, texts, _NO_POSITIONS, _NO_POSITIONS, np.empty(0, np.uint32), (borders,))


def _other_digits(texts: Texts) -> tuple[Positions, Positions]:
    """Where numeric characters that are not ASCII begin and end, in the bytes used."""
    begins = find_characters(texts, numeric_table(), _FIRST_NUMERIC_LEAD) - texts.offsets[0]
    lead = texts.used[begins]
    return begins, begins + 2 + (lead >= 0xE0) + (lead >= 0xF0)
