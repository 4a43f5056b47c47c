"""Serialized tokenizers, as `Tokenizer.to_str` writes them: what stands beside the vocabulary, read and changed.

The vocabulary and the merges are most of a definition, and stand at its end: they are passed over, not parsed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

_VOCABULARY = '"vocab":{'


def parse_without_vocabulary(definition: str) -> dict[str, Any]:
    """A serialized tokenizer; without vocabulary and merges where they can be left out."""
    return _parse_definition(definition)[0]


def vocabulary_and_merges(definition: str) -> tuple[str, str]:
    """The JSON of the vocabulary's entries and of the merges of a BPE, without the brackets around the entries.

    In a string of JSON the quotes of both names would be escaped.
    """
    entries, _, merges = definition.partition(_VOCABULARY)[2].partition('},"merges":[')
    return entries, merges


def change_definition(definition: str, changes: tuple[tuple[str, str], ...]) -> str:
    """The same tokenizer with other parts: `changes` are names of parts and their JSON."""
    known, rest = _parse_definition(definition)
    known |= {name: json.loads(value) for name, value in changes}
    known["model"] = known.pop("model")  # at its end
    head = json.dumps(known, ensure_ascii=False, separators=(",", ":"))
    return head if rest is None else head.removesuffix("}}}") + rest


def load_normalizer(definition: str) -> Callable[[str], str]:
    """The normalizer of a serialized tokenizer, as `tokenizers` runs it; the vocabulary is not loaded for it."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    known = {"version": "1.0", "normalizer": parse_without_vocabulary(definition).get("normalizer"), "model": model}
    tokenizer = Tokenizer.from_str(json.dumps(known))
    return lambda text: str(tokenizer.normalizer.normalize_str(text))


def _parse_definition(definition: str) -> tuple[dict[str, Any], str | None]:
    """Without the vocabulary, and then the text from its first entry; or the whole of it, and None.

    In a string of JSON the quotes of the name would be escaped.
    """
    head, found, rest = definition.partition(_VOCABULARY)
    if found:
        with contextlib.suppress(ValueError, KeyError):
            known: dict[str, Any] = json.loads(head + _VOCABULARY + "}}}")
            model = known["model"]
            if "pre_tokenizer" in known and model["type"] in ("BPE", "WordPiece") and "unk_token" in model:
                return known, rest
    whole: dict[str, Any] = json.loads(definition)
    return whole, None
