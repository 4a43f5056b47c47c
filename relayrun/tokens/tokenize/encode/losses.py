"""What a tokenizer loses: ids for unknown text, letters that get no id, documents of which nothing is left."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.libraries import Encoded, parse_without_vocabulary

_MOST_UNKNOWN = 0.001
"""Share of the ids that may be the unknown token without a warning."""


@dataclass(kw_only=True)
class TextLosses:
    """Counts over some texts."""

    unknown_ids: int = 0
    lost_letters: int = 0
    """Letters, digits and signs without an id."""
    lost_documents: int = 0
    """Texts, not of blanks alone, without an id."""

    def warning(self, tokens: int) -> str | None:
        """Describe losses that are no accident, of texts with this many ids; None for fewer."""
        found = []
        if self.unknown_ids > _MOST_UNKNOWN * tokens:
            found.append(f"{self.unknown_ids:,} of {tokens:,} ids are its unknown token")
        if self.lost_letters:
            found.append(f"{self.lost_letters:,} letters have no id and are dropped")
        if self.lost_documents:
            found.append(f"{self.lost_documents:,} documents lose all of their text")
        return f"the tokenizer does not know this text: {', '.join(found)}" if found else None


class LossCounter:
    """Counts the losses of one tokenizer."""

    def __init__(self, definition: str) -> None:
        known = parse_without_vocabulary(definition)
        model, self._definition = known["model"], definition
        name, kind = model.get("unk_token"), model.get("type")
        entry = re.search(re.escape(json.dumps(name, ensure_ascii=False)) + r":(\d+)", definition) if name else None
        self._unknown = model.get("unk_id") if kind == "Unigram" else int(entry[1]) if entry else None
        covers_all = model.get("byte_fallback") or '"type":"ByteLevel"' in json.dumps(known, separators=(",", ":"))
        self._lost: dict[str, bool] = {}
        self._drops = kind == "BPE" and self._unknown is None and not covers_all

    def count(self, texts: PackedTexts, encoded: Encoded) -> TextLosses:
        """Return the losses of `texts`, of which `encoded` are the ids."""
        ids, lengths = encoded
        found = TextLosses(unknown_ids=0 if self._unknown is None else int(np.count_nonzero(ids == self._unknown)))
        if not lengths.all():
            without = texts.take((lengths == 0) & (texts.sizes > 0))
            found.lost_documents = sum(bool(text.strip()) for text in without.strings())
        if self._drops:
            letters = Counter("".join(texts.strings()))
            found.lost_letters = sum(count for letter, count in letters.items() if self._is_lost(letter))
        return found

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self._definition)

    def _is_lost(self, letter: str) -> bool:
        if letter not in self._lost:
            seen = unicodedata.category(letter)[0] in "LNPS"
            self._lost[letter] = seen and not self._tokenizer.encode(letter, add_special_tokens=False).ids
        return self._lost[letter]
