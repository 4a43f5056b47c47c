"""Whether two tokenizers give the same ids the same meaning: a hash of what decides it.

The model (vocabulary, merges or scores), the normalizer, the pre-tokenizer and the added tokens of a tokenizer.json
decide it. Truncation, padding, templates and the decoder do not, nor whether an added token is special: a dump that was
made with `--special-text` has the same vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Iterator
from typing import Any


def ids_fingerprint(definition: str) -> str:
    """Return the SHA-256, hexadecimal, of what decides ids in a serialized tokenizer (`Tokenizer.to_str()`)."""
    with _garbage_collection_off():
        return _hash_definition(definition)


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Without looks for cycles among half a million new lists, which take as long as to make these."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _hash_definition(definition: str) -> str:
    tokenizer = json.loads(definition)
    parts = {name: tokenizer.get(name) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    for token in parts["added_tokens"] or ():
        token.pop("special", None)
    model = parts["model"] or {}
    # half a million lists and names, which hold neither null nor false: to look through them takes a second
    large = {name: model.pop(name) for name in ("vocab", "merges") if name in model}
    if any(isinstance(pair, str) for pair in large.get("merges", ())[:1]):  # files of older versions of the library
        large["merges"] = [pair.split(" ", 1) for pair in large["merges"]]  # which reads no list of both kinds
    if isinstance(vocabulary := large.get("vocab"), dict):  # by names alone: `dumps` would compare pairs
        large["vocab"] = {name: vocabulary[name] for name in sorted(vocabulary)}
    said = _without_nulls(parts)
    if large:
        said["model"] |= large
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _without_nulls(value: Any) -> Any:
    """Without what is null or false: newer versions of the library write more of it."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None and part is not False}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
