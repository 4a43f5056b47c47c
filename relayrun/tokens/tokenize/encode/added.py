"""Texts with added tokens that are not special: they are cut out before anything else sees the text.

`tokenizers` looks for added tokens that are not to be normalized in the text as it is, the longest of the first,
and treats what stands between them as pieces. A special one that is found is text, but covers what it covers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import numpy as np

from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.tokenize.encode.apart import encode_pieces
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine


class AddedTokenEngine:
    """Encodes what stands between added tokens by `engine`.

    `tokens` are the text and the id of each, `special` the texts of special ones.
    """

    def __init__(self, engine: Engine, tokens: Iterable[tuple[str, int]], special: Iterable[str]) -> None:
        self.routed = 0
        self._engine = engine
        self._ids = {content.encode(): id_ for content, id_ in tokens}
        self._pattern = re.compile(longest_match_pattern({*self._ids, *(content.encode() for content in special)}))

    def encode(self, texts: Texts) -> Encoded:
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
    """A pattern that matches the longest of `words`, none empty: it decides byte by byte, however many there are."""
    tree: dict[int, set[bytes]] = {}
    for word in words:
        tree.setdefault(word[0], set()).add(word[1:])
    parts = []
    for first, rests in sorted(tree.items()):
        tails = {tail for tail in rests if tail}
        inside = longest_match_pattern(tails) if tails else b""
        parts.append(re.escape(bytes([first])) + (inside + b"?" if tails and b"" in rests else inside))
    return b"(?:" + b"|".join(parts) + b")"
