"""Losses of a tokenizer: ids for unknown text, letters that get no id, documents of which nothing is left."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

import numpy as np
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.families import has_every_byte
from relayrun.tokens.tokenize.encode.libraries import Encoded, parse_without_vocabulary, vocabulary_and_merges

UNKNOWN_IDS, LOST_LETTERS, LOST_DOCUMENTS = "unknown ids", "lost letters", "lost documents"
"""Counts of losses: a letter is a digit or a sign, too; texts of blanks alone do not count."""

_MOST_UNKNOWN = 0.001
"""Share of the ids that may be the unknown token without a warning."""


def describe_losses(losses: Mapping[str, int], tokens: int) -> str | None:
    """Describe the losses of texts with this many ids; None for none, or for unknown ids that are an accident."""
    unknown, letters, documents = (losses.get(name, 0) for name in (UNKNOWN_IDS, LOST_LETTERS, LOST_DOCUMENTS))
    found = [f"{unknown:,} of {tokens:,} ids are its unknown token"] if unknown > _MOST_UNKNOWN * tokens else []
    found += [f"{letters:,} letters have no id and are dropped"] if letters else []
    found += [f"{documents:,} documents lose all of their text"] if documents else []
    return f"the tokenizer does not know this text: {', '.join(found)}" if found else None


class LossCounter:
    """Counts the losses of one tokenizer."""

    def __init__(self, definition: str) -> None:
        known = parse_without_vocabulary(definition)
        model, self._definition = known["model"], definition
        name, kind = model.get("unk_token"), model.get("type")
        entry = re.search(re.escape(json.dumps(name, ensure_ascii=False)) + r":(\d+)", definition) if name else None
        self._unknown = model.get("unk_id") if kind == "Unigram" else int(entry[1]) if entry else None
        entries, steps = vocabulary_and_merges(definition)[0], [known.get("normalizer"), known.get("pre_tokenizer")]
        in_letters = '"ByteLevel"' in json.dumps(steps) and has_every_byte(entries, in_pieces=False)
        covers_all = in_letters or (model.get("byte_fallback") and has_every_byte(entries, in_pieces=True))
        self._is_lost = functools.cache(self._loses)
        self._drops = kind == "BPE" and self._unknown is None and not covers_all

    def count(self, texts: PackedTexts, encoded: Encoded) -> Counter[str]:
        """Return the losses of `texts`, of which `encoded` are the ids."""
        (ids, lengths), found = encoded, Counter[str]()
        if self._unknown is not None:
            found[UNKNOWN_IDS] = int(np.count_nonzero(ids == self._unknown))
        if not lengths.all():
            without = texts.take((lengths == 0) & (texts.sizes > 0))
            found[LOST_DOCUMENTS] = sum(bool(text.strip()) for text in without.strings())
        if self._drops:
            letters = Counter("".join(texts.strings()))
            found[LOST_LETTERS] = sum(count for letter, count in letters.items() if self._is_lost(letter))
        return +found

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self._definition)

    def _loses(self, letter: str) -> bool:
        """Return whether a letter, or one of its bytes, has no token; a sign of a space before it does not count."""
        if unicodedata.category(letter)[0] not in "LNPS":
            return False
        first, then = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        tokens = self._tokenizer.encode(letter, add_special_tokens=False).tokens
        text = letter if first is None else first.normalize_str(letter)
        pieces = [text] if then is None else [piece for piece, _ in then.pre_tokenize_str(text)]
        found, wanted = (len("".join(parts).strip("\u0120\u2581")) for parts in (tokens, pieces))
        return not tokens or (letter not in tokens and found < wanted)
