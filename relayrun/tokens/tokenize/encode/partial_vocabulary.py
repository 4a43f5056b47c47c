"""The reference for a few texts: `tokenizers` with the part of a large vocabulary that these texts can use.

`tokenizers` takes a second to load a vocabulary of 200,000 entries, in every worker that meets a text which a fast
engine may not have: one text of 40,000, because of a single character. Hashes find the entries that such a text can
use, in the serialized tokenizer as it stands, in a sixth of that time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.families import BYTE_LETTERS
from relayrun.tokens.tokenize.encode.libraries import (
    Encoded,
    Engine,
    HuggingFaceEngine,
    parse_without_vocabulary,
    vocabulary_and_merges,
)

MAX_LETTERS = 30_000
"""Letters of words that a process looks up before it loads the whole tokenizer, which takes about as long."""

Hashes = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]
_BACKSLASH, _QUOTE = "\0\0", "\1\1"
"""Replace the two escapes of `ByteLevel`'s letters in JSON, at equal length: then every quote is a border."""
_AT_ONCE = 1 << 16
"""Letters hashed at a time: the arrays stay in the processor's cache."""
_BASE = 0x9E3779B97F4A7C15


class PartialVocabularyEngine:
    """The reference of a listed byte-level BPE; for the first texts with a part of its vocabulary.

    A merge is used if its product stands in a word as `ByteLevel` writes it; an entry of the vocabulary, if it is a
    byte, such a product, or a word. Without the others, the ids are the same. The whole tokenizer encodes texts with
    the text of an added token that is not special.
    """

    def __init__(self, definition: str, plain: Iterable[str], whole: Callable[[], Engine]) -> None:
        """`plain`: texts that only the whole tokenizer may encode, which `whole` loads."""
        self.routed = 0
        self._definition, self._plain, self._make = definition, tuple(plain), whole
        self._left = MAX_LETTERS
        self._whole: Engine | None = None
        self._items: tuple[_Items, _Items] | None = None

    def encode(self, texts: PackedTexts) -> Encoded:
        engine = self._whole or self._part(texts)
        if engine is None:
            engine = self._whole = self._make()
            self._items = None
        return engine.encode(texts)

    def _part(self, texts: PackedTexts) -> Engine | None:
        """Return the reference with the entries that these texts can use; None if they need the whole one."""
        if len(texts.used) > self._left:
            return None
        head = parse_without_vocabulary(self._definition) | {"added_tokens": []}
        words = self._words(_load_part(head, "", ""), texts)
        if words is None:
            return None
        self._left -= sum(map(len, words))
        if self._left < 0:
            return None
        try:
            self._items = self._items or _items_of(self._definition)
            entries, merges = self._items
            wanted = _parts_of_words(words, max(entries.longest, merges.longest))
            return HuggingFaceEngine(_load_part(head, entries.find(wanted), merges.find(wanted)))
        except Exception:  # not written as by `tokenizers`; or a collision of hashes leaves a merge without its parts
            return None

    def _words(self, cut: Tokenizer, texts: PackedTexts) -> set[str] | None:
        """Return the words of the texts, escaped, as the reference's normalizer and pre-tokenizer write them."""

        def normal(text: str) -> str:
            return text if cut.normalizer is None else str(cut.normalizer.normalize_str(text))

        words: set[str] = set()
        plain = {*self._plain, *map(normal, self._plain)}
        for text in texts.strings():
            normalized = normal(text)
            if any(token in text or token in normalized for token in plain):
                return None
            words |= {_escaped(word) for word, _ in cut.pre_tokenizer.pre_tokenize_str(normalized)}
        return words


def _load_part(head: dict[str, Any], entries: str, merges: str) -> Tokenizer:
    model = head["model"] | {"vocab": json.loads(f"{{{entries}}}"), "merges": json.loads(f"[{merges}]")}
    tokenizer = Tokenizer.from_str(json.dumps(head | {"model": model}))
    tokenizer.encode_special_tokens = True
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class _Items:
    """Items of a list or an object in a text of JSON, by the hash of a string in each."""

    text: str
    hashes: Hashes
    """Shape [items]."""
    begins: _Places
    ends: _Places
    longest: int
    """Letters of the longest string."""

    def find(self, wanted: Hashes) -> str:
        """Return the items whose hash is in `wanted` (ascending), in the order of the text, separated by commas."""
        near = wanted[np.minimum(np.searchsorted(wanted, self.hashes), wanted.size - 1)]
        found = np.flatnonzero(near == self.hashes)
        bounds = zip(self.begins[found].tolist(), self.ends[found].tolist(), strict=True)
        return ",".join(self.text[begin:end] for begin, end in bounds)


def _items_of(definition: str) -> tuple[_Items, _Items]:
    """Index the entries of the vocabulary by their names, and the merges by their products. Raises ValueError if either
    is not written as `tokenizers` writes it."""
    entries, merges = vocabulary_and_merges(definition)
    letters, quotes = _quotes(entries)
    opened, closed = quotes[::2], quotes[1::2]
    if not closed.size or opened.size != closed.size or (letters[closed + 1] != ord(":")).any():
        raise ValueError("the vocabulary is written in another way")
    names = _Items(
        text=entries,
        hashes=np.concatenate([*_hashed(letters, opened, closed, opened + 1, closed)]),
        begins=opened,
        ends=np.append(opened[1:] - 1, len(entries)),
        longest=int((closed - opened - 1).max()),
    )
    letters, quotes = _quotes(merges)
    first, first_end, second, second_end = (quotes[at::4] for at in range(4))
    if (
        quotes.size % 4
        or (second - first_end != len('",')).any()
        or (first[1:] - second_end[:-1] != len('"],[')).any()
        or (first[:1] != 1).any()
    ):
        raise ValueError("the merges are written in another way")
    left = np.concatenate([np.empty(0, np.uint64), *_hashed(letters, first, second_end, first + 1, first_end)])
    right = np.concatenate([np.empty(0, np.uint64), *_hashed(letters, first, second_end, second + 1, second_end)])
    sizes = first_end - first - 1
    products = _Items(
        text=merges,
        hashes=left + right * _POWERS[sizes],
        begins=first - 1,
        ends=second_end + 2,
        longest=int((sizes + second_end - second - 1).max(initial=0)),
    )
    return names, products


def _quotes(text: str) -> tuple[npt.NDArray[np.uint32], _Places]:
    """Return the letters of a text of JSON, escapes replaced, and the positions of its quotes."""
    escaped = text.replace(r"\\", _BACKSLASH).replace(r"\"", _QUOTE)
    letters = np.frombuffer(escaped.encode("utf-32-le"), np.uint32)
    return letters, np.flatnonzero(letters == ord('"'))


def _hashed(
    letters: npt.NDArray[np.uint32], item_begins: _Places, item_ends: _Places, begins: _Places, ends: _Places
) -> Iterator[Hashes]:
    """Yield hashes of the strings from `begins` to `ends`, each inside its item. Raises ValueError for a huge item."""
    at = 0
    while at < begins.size:
        start = int(item_begins[at])
        until = int(np.searchsorted(item_ends, start + _AT_ONCE, side="right"))
        if until == at:
            raise ValueError("an item is too long")
        sums = _sums(letters[start : item_ends[until - 1]])
        yield _span_hashes(sums, begins[at:until] - start, ends[at:until] - start)
        at = until


def _parts_of_words(words: Iterable[str], longest: int) -> Hashes:
    """Return hashes of the words, of their parts of up to `longest` letters, and of all bytes; ascending, unique."""
    every = [*words, *map(_escaped, BYTE_LETTERS)]
    sizes = np.array([*map(len, every)], np.int64)
    ends = np.cumsum(sizes)
    sums = _sums(np.frombuffer("".join(every).encode("utf-32-le"), np.uint32))
    begins, end_of = np.arange(ends[-1]), np.repeat(ends, sizes)
    found = [_span_hashes(sums, ends - sizes, ends)]
    for size in range(1, min(longest, int(sizes.max())) + 1):
        begins = begins[begins + size <= end_of[begins]]
        found.append(_span_hashes(sums, begins, begins + size))
    return np.unique(np.concatenate(found))


def _sums(letters: npt.NDArray[np.uint32]) -> Hashes:
    sums = np.zeros(letters.size + 1, np.uint64)
    np.cumsum((letters + np.uint64(1)) * _POWERS[: letters.size], out=sums[1:])
    return sums


def _span_hashes(sums: Hashes, begins: _Places, ends: _Places) -> Hashes:
    """Return a polynomial of the letters in each span, modulo 2**64: independent of its position."""
    return np.asarray((sums[ends] - sums[begins]) * _INVERSES[begins], np.uint64)


def _powers(base: int) -> Hashes:
    powers = np.full(_AT_ONCE + 1, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, out=powers)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 1 << 64))


def _escaped(letters: str) -> str:
    return letters.replace("\\", _BACKSLASH).replace('"', _QUOTE)
