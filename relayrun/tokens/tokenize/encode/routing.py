"""Route the texts of a tokenizer by its `EnginePlan`: most to a fast engine, the others to the reference.

Sets of characters find the texts for the reference, without a Python object per text. Digits and added tokens that the
engine would encode differently are cut out, the pieces between them are encoded as texts of their own, and the known
ids are filled in. A step of a pre-tokenizer sees each piece of the step before alone, so a text may be cut where
`Digits` cuts it. `tokenizers` searches the original text for added tokens that are not normalized, the longest first; a
special token that is found stays text, but protects its bytes.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.families import EnginePlan, UnicodeForm
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine

Positions = npt.NDArray[np.int64]


def encode_pieces(
    engine: Engine,
    texts: PackedTexts,
    begins: Positions,
    ends: Positions,
    ids: npt.NDArray[np.uint32],
    cuts: Sequence[Positions],
) -> Encoded:
    """Return the ids of all texts, where the bytes from `begins[i]` to `ends[i]` have the single id `ids[i]`.

    `engine` encodes the pieces between them, and between `cuts`, as texts of their own. Positions count from the first
    byte used; the spans ascend, and neither overlap nor cross the end of a text.
    """
    used, documents = texts.used, texts.offsets - texts.offsets[0]
    borders = np.zeros(used.size + 1, np.int8)
    borders[begins] += 1
    borders[ends] -= 1
    inside = np.cumsum(borders[:-1], dtype=np.int8).astype(np.bool_)
    before = np.zeros(used.size + 1, np.int64)  # removed bytes before each byte
    np.cumsum(inside, out=before[1:])
    starts = np.unique(np.concatenate([cut - before[cut] for cut in (documents, begins, *cuts)]))
    others, lengths = engine.encode(PackedTexts(data=used[~inside], offsets=starts))
    bounds = np.zeros(len(starts), np.int64)
    np.cumsum(lengths, out=bounds[1:])

    def tokens_before(places: Positions) -> Positions:
        return np.asarray(bounds[np.searchsorted(starts, places - before[places])])

    out = np.empty(others.size + ids.size, np.uint32)
    filled = np.zeros(out.size, np.bool_)
    filled[tokens_before(begins) + np.arange(ids.size)] = True
    out[filled], out[~filled] = ids, others
    return out, np.diff(tokens_before(documents) + np.searchsorted(begins, documents))


@dataclass(frozen=True, eq=False)
class CharacterSet:
    """A set of characters."""

    points: npt.NDArray[np.bool_]
    """By code point, shape [2**21]: padded to the range of four bytes of UTF-8."""

    @functools.cached_property
    def beginnings(self) -> npt.NDArray[np.bool_]:
        """True if a character of the set begins with these two bytes, the first times 256; shape [2**16]."""
        found = np.zeros(1 << 16, np.bool_)
        for lead, inside, bits in ((0xC0, 0, 5), (0xE0, 6, 4), (0xF0, 12, 3)):
            block = np.flatnonzero(np.any(self.points.reshape(-1, 1 << inside), axis=1))
            block = block[block < 64 << bits]
            found[(lead | block >> 6) << 8 | 0x80 | block & 0x3F] = True
        return found


def find_characters(texts: PackedTexts, table: CharacterSet, first_lead: int) -> npt.NDArray[np.int64]:
    """Return the positions where characters of `table` begin, ascending, in `texts.data`. `first_lead`, at least 0xC2,
    is the lowest first byte of any of them: other bytes are skipped."""
    used = np.append(texts.used, np.zeros(3, np.uint8))  # the bytes after the last character may be read
    leads = np.flatnonzero(used >= first_lead)
    pairs = used[leads].astype(np.int64)
    pairs <<= 8
    pairs |= used[leads + 1]
    leads = leads[table.beginnings[pairs]]  # few remain: most blocks of Unicode are wholly inside or outside
    first, second, third, fourth = (used[leads + step].astype(np.int64) & 0x3F for step in range(4))
    points = np.where(used[leads] < 0xE0, first << 6 | second, (first & 0x0F) << 12 | second << 6 | third)
    long = used[leads] >= 0xF0
    points[long] = ((first & 7) << 18 | second << 12 | third << 6 | fourth)[long]
    return np.asarray(leads[table.points[points]] + texts.offsets[0], np.int64)


def texts_holding(texts: PackedTexts, table: CharacterSet, first_lead: int) -> npt.NDArray[np.bool_]:
    """Return which texts hold a character of `table`, shape [texts]; `first_lead`: see `find_characters`."""
    suspect = texts.highest() >= first_lead
    if suspect.all():
        return texts.any_in(find_characters(texts, table, first_lead))
    if suspect.any():  # few in an English corpus; this pass costs a tenth of the next one
        suspect[suspect] = texts_holding(texts.take(suspect), table, first_lead)
    return suspect


def texts_holding_bytes(texts: PackedTexts, needles: tuple[bytes, ...]) -> npt.NDArray[np.bool_]:
    """Return which texts hold one of these pieces of UTF-8, shape [texts]. Pieces must not be empty."""
    found = np.zeros(len(texts), np.bool_)
    highest = texts.used.max(initial=0)
    needles = tuple(needle for needle in needles if max(needle) <= highest)  # no text holds the others
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


FIRST_UNASSIGNED_LEAD = 0xCD
"""Lead byte of U+0340: every code point below U+0378 is assigned."""


@functools.cache
def doubtful_table() -> CharacterSet:
    """Return the code points that this Python's Unicode tables do not know, and U+180E: a space in some versions."""
    table = np.ones(1 << 21, np.bool_)
    for begin, end in ((0, 0x34000), (0xE0000, 0xE0200)):  # the planes between are empty
        table[begin:end] = unicode_categories(begin, end) == b"Cn"
    table[0xF0000:0x110000] = False  # private use
    table[0x180E] = True
    return CharacterSet(table)


@functools.cache
def numeric_table() -> CharacterSet:
    """Return the characters of the categories Nd, Nl and No, which the pre-tokenizer `Digits` calls digits."""
    table = np.zeros(1 << 21, np.bool_)
    table[:0x34000] = np.isin(unicode_categories(0, 0x34000), (b"Nd", b"Nl", b"No"))
    return CharacterSet(table)


@functools.cache
def unicode_categories(begin: int, end: int) -> npt.NDArray[np.bytes_]:
    """Return the two letters of the Unicode category of these code points, by this Python's tables."""
    return np.frombuffer("".join(map(unicodedata.category, map(chr, range(begin, end)))).encode(), "S2")


class AddedTokenEngine:
    """Encodes the pieces between added tokens by `engine`. `tokens`: text and id of each; `special`: texts."""

    def __init__(self, engine: Engine, tokens: Iterable[tuple[str, int]], special: Iterable[str]) -> None:
        self.routed = 0
        self._engine = engine
        self._ids = {content.encode(): id_ for content, id_ in tokens}
        self._pattern = re.compile(longest_match_pattern({*self._ids, *(content.encode() for content in special)}))

    def encode(self, texts: PackedTexts) -> Encoded:
        data, documents = texts.used.tobytes(), (texts.offsets - texts.offsets[0]).tolist()
        found: list[tuple[int, int, int]] = []
        for begin, end in itertools.pairwise(documents):
            found += [
                (match.start(), match.end(), self._ids[match[0]])
                for match in self._pattern.finditer(data, begin, end)
                if match[0] in self._ids
            ]
        begins, ends, ids = np.array(found, np.int64).reshape(-1, 3).T
        return encode_pieces(self._engine, texts, begins, ends, ids.astype(np.uint32), ())


def longest_match_pattern(words: Iterable[bytes]) -> bytes:
    """Return a pattern that matches the longest of `words`, none empty, deciding byte by byte."""
    tree: dict[int, set[bytes]] = {}
    for word in words:
        tree.setdefault(word[0], set()).add(word[1:])
    parts = []
    for first, rests in sorted(tree.items()):
        tails = {tail for tail in rests if tail}
        inside = longest_match_pattern(tails) if tails else b""
        parts.append(re.escape(bytes([first])) + (inside + b"?" if tails and b"" in rests else inside))
    return b"(?:" + b"|".join(parts) + b")"


_FIRST_NUMERIC_LEAD = 0xC2
"""Lead byte of U+00B2, the first numeric character beyond ASCII."""
_NO_POSITIONS = np.empty(0, np.int64)


class DigitEngine:
    """Encodes the pieces between digits by `engine`, and the digits one by one, or by runs."""

    def __init__(self, engine: Engine, *, each: bool) -> None:
        self.routed = 0
        self._engine, self._each = engine, each
        self._ids = engine.encode(PackedTexts.of([*"0123456789"]))[0]
        assert self._ids.size == 10

    def encode(self, texts: PackedTexts) -> Encoded:
        ascii_digits = (texts.used - np.uint8(0x30)) < 10
        others = find_characters(texts, numeric_table(), _FIRST_NUMERIC_LEAD) - texts.offsets[0]
        lead = texts.used[others]
        ends = others + 2 + (lead >= 0xE0) + (lead >= 0xF0)
        if self._each:
            taken = np.flatnonzero(ascii_digits)
            ids = self._ids[texts.used[taken] - 0x30]
            return encode_pieces(self._engine, texts, taken, taken + 1, ids, (others, ends))
        for step in range(4):  # the bytes of a character
            ascii_digits[(others + step)[others + step < ends]] = True
        borders = np.flatnonzero(ascii_digits[1:] != ascii_digits[:-1]) + 1
        return encode_pieces(self._engine, texts, _NO_POSITIONS, _NO_POSITIONS, np.empty(0, np.uint32), (borders,))


_FIRST_CHANGED_LEAD: dict[UnicodeForm, int] = {"NFC": 0xCC, "NFD": 0xC3, "NFKC": 0xC2, "NFKD": 0xC2}
"""Lead byte of the first character that the form changes, alone or after another."""


class RoutedEngine:
    """A fast engine for most texts, and the reference for the others."""

    def __init__(
        self,
        fast: Engine,
        plan: EnginePlan,
        normalizer: Callable[[], Callable[[str], str]],
        other: Callable[[], Engine],
    ) -> None:
        """`normalizer`, which loads the tokenizer's own, and `other` are called when the first text needs them."""
        self.routed = 0
        self._fast = fast
        if plan.digits:
            self._fast = DigitEngine(fast, each=plan.digits == "each")
        elif plan.cut:
            self._fast = AddedTokenEngine(fast, plan.cut, plan.special)
        self._table = doubtful_table()
        plain = {*plan.plain}
        if plan.normalize is not None:
            plain |= {unicodedata.normalize(plan.normalize, token) for token in plan.plain}
        self._needles = tuple(word.encode() for word in sorted(plain) if word)
        self._form = plan.normalize
        self._make_normalizer, self._make_other = normalizer, other
        self._normalizer: Callable[[str], str] | None = None
        self._other: Engine | None = None

    def encode(self, texts: PackedTexts) -> Encoded:
        elsewhere = self._doubtful(texts)
        kept = texts.take(~elsewhere) if elsewhere.any() else texts
        if self._form is not None:
            kept, unsure = self._normalized(kept, self._form)
            if unsure.any():
                elsewhere[np.flatnonzero(~elsewhere)[unsure]] = True
                kept = kept.take(~unsure)
        if not elsewhere.any():
            return self._fast.encode(kept)
        self._other = self._other or self._make_other()
        self.routed += int(elsewhere.sum())
        fast_ids, fast_lengths = self._fast.encode(kept)
        other_ids, other_lengths = self._other.encode(texts.take(elsewhere))
        lengths = np.empty(len(texts), np.int64)
        lengths[~elsewhere], lengths[elsewhere] = fast_lengths, other_lengths
        ids = np.empty(int(lengths.sum()), np.uint32)
        from_other = np.repeat(elsewhere, lengths)
        ids[~from_other], ids[from_other] = fast_ids, other_ids
        return ids, lengths

    def _doubtful(self, texts: PackedTexts) -> npt.NDArray[np.bool_]:
        """Return which texts the fast engine must not encode, shape [texts]."""
        return texts_holding(texts, self._table, FIRST_UNASSIGNED_LEAD) | texts_holding_bytes(texts, self._needles)

    def _normalized(self, texts: PackedTexts, form: UnicodeForm) -> tuple[PackedTexts, npt.NDArray[np.bool_]]:
        """Return the texts after the tokenizer's own normalizer, and which of them the engine must not encode then.

        The normalizer does not change a text that Python finds in the form: both know all its characters, and Unicode
        never changes the normal form of an assigned character.
        """
        suspect = np.flatnonzero(texts.highest() >= _FIRST_CHANGED_LEAD[form])
        new: dict[int, bytes] = {}
        for index in suspect.tolist():
            begin, end = texts.offsets[index : index + 2]
            text = str(texts.data[begin:end].data, "utf-8")
            if not unicodedata.is_normalized(form, text):
                self._normalizer = self._normalizer or self._make_normalizer()
                new[index] = self._normalizer(text).encode()
        unsure = np.zeros(len(texts), np.bool_)
        if not new:
            return texts, unsure
        made = PackedTexts.join([new.get(index, view) for index, view in enumerate(texts.views())])
        unsure[[*new]] = True
        unsure[unsure] = self._doubtful(made.take(unsure))
        return made, unsure
