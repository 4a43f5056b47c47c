"""The libraries that turn texts into ids, behind one interface, and the tokenizer.json that they load.

    huggingface   `tokenizers`, the reference: every other engine must give its ids
    gigatoken     BPE, byte-level and SentencePiece's
    bytes         a token for each byte, by numpy

A fast engine is right for some tokenizers and some texts only: see `families`. Each raises its library's error for a
tokenizer that it cannot load, and ImportError if it is not installed. Engines must not start threads: workers are forks
of a process that has used them.

A definition is a serialized tokenizer, as `Tokenizer.to_str` writes it. The vocabulary and the merges are most of it,
at its end: they are skipped, not parsed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.tokenizer_files import byte_letters

_VOCABULARY = '"vocab":{'


def parse_without_vocabulary(definition: str) -> dict[str, Any]:
    """Parse a serialized tokenizer, without vocabulary and merges if they can be skipped."""
    return _parse_definition(definition)[0]


def vocabulary_and_merges(definition: str) -> tuple[str, str]:
    """Return the JSON of the vocabulary's entries and of the merges of a BPE, without the brackets around the entries.
    In a JSON string the quotes of both names would be escaped."""
    entries, _, merges = definition.partition(_VOCABULARY)[2].partition('},"merges":[')
    return entries, merges


def change_definition(definition: str, changes: tuple[tuple[str, str], ...]) -> str:
    """Return the tokenizer with changed parts: `changes` are names of parts and their JSON."""
    known, rest = _parse_definition(definition)
    known |= {name: json.loads(value) for name, value in changes}
    known["model"] = known.pop("model")  # last
    head = json.dumps(known, ensure_ascii=False, separators=(",", ":"))
    return head if rest is None else head.removesuffix("}}}") + rest


def load_normalizer(definition: str) -> Callable[[str], str]:
    """Return the normalizer of a serialized tokenizer, as `tokenizers` runs it, without loading the vocabulary."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    known = {"version": "1.0", "normalizer": parse_without_vocabulary(definition).get("normalizer"), "model": model}
    tokenizer = Tokenizer.from_str(json.dumps(known))
    return lambda text: str(tokenizer.normalizer.normalize_str(text))


def _parse_definition(definition: str) -> tuple[dict[str, Any], str | None]:
    """Parse without the vocabulary, and return the text from its first entry; or parse everything, and return None."""
    head, found, rest = definition.partition(_VOCABULARY)
    if found:
        with contextlib.suppress(ValueError, KeyError):
            known: dict[str, Any] = json.loads(head + _VOCABULARY + "}}}")
            model = known["model"]
            if "pre_tokenizer" in known and model["type"] == "BPE" and "unk_token" in model:
                return known, rest
    whole: dict[str, Any] = json.loads(definition)
    return whole, None


Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
"""Ids of all texts, shape [tokens], and the number of ids of each text, shape [texts]."""

FastEngineName = Literal["gigatoken", "bytes"]
ENGINE_PACKAGES = {"huggingface": "tokenizers", "gigatoken": "gigatoken", "bytes": "numpy"}
"""Name of the package, by engine."""

_HF_BYTES = 500_000
"""`tokenizers` needs about 100 bytes of memory per byte of text."""
_LONG_TEXT_BYTES = 2000
"""Texts that are longer on average are encoded one by one as fast as together."""
_MAX_BYTES_ALONE = 1_000_000
"""A text alone is encoded under the interpreter's lock."""


class Engine(Protocol):
    """Encodes texts to ids of `Tokenizer.encode(text, add_special_tokens=False)` with `encode_special_tokens` on."""

    routed: int
    """Texts that the reference has encoded so far."""

    def encode(self, texts: PackedTexts) -> Encoded:
        """Return the ids of all texts, and the number of ids of each."""
        ...


class HuggingFaceEngine:
    """The reference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.routed = 0
        self._tokenizer = tokenizer

    def encode(self, texts: PackedTexts) -> Encoded:
        parts: list[npt.NDArray[np.uint32]] = []
        for batch in texts.split(_HF_BYTES, 1000):
            encodings = self._tokenizer.encode_batch_fast(batch.strings(), add_special_tokens=False)
            parts += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return _concatenate(parts)


class GigatokenEngine:
    """BPE with a cache of words. Its Unicode tables are its own."""

    def __init__(self, definition: str) -> None:
        import gigatoken

        self.routed = 0
        self._backend: Any = gigatoken.Tokenizer.from_json(definition).backend

    def encode(self, texts: PackedTexts) -> Encoded:
        sizes = texts.sizes
        if not len(texts) or (sizes.mean() >= _LONG_TEXT_BYTES and sizes.max() < _MAX_BYTES_ALONE):
            return _concatenate(self._backend.encode(bytes(text)) for text in texts.views())
        import awkward as ak  # avoids an object and a copy per text, and takes 0.1 s of CPU time

        content = ak.contents.NumpyArray(texts.data, parameters={"__array__": "byte"})
        offsets = ak.index.Index64(texts.offsets)
        array = ak.Array(ak.contents.ListOffsetArray(offsets, content, parameters={"__array__": "bytestring"}))
        # one thread: the workers share the cores already
        layout = self._backend.encode_batch(array, parallel=False).layout
        bounds = layout.offsets.data
        return layout.content.data[bounds[0] : bounds[-1]], bounds[1:] - bounds[:-1]


class ByteEngine:
    """Byte-level BPE without merges: a fixed id per byte."""

    def __init__(self, definition: str) -> None:
        self.routed = 0
        model = json.loads(definition)["model"]
        unknown = model["vocab"].get(model["unk_token"], 0)  # 0: bytes that never occur in UTF-8
        self._ids = np.array([model["vocab"].get(letter, unknown) for letter in byte_letters()], np.uint32)

    def encode(self, texts: PackedTexts) -> Encoded:
        return self._ids[texts.used], texts.sizes


FAST_ENGINES: dict[FastEngineName, Callable[[str], Engine]] = {"gigatoken": GigatokenEngine, "bytes": ByteEngine}
"""Constructors that load a serialized tokenizer, by engine."""


def _concatenate(parts: Iterable[npt.NDArray[np.uint32]]) -> Encoded:
    found = [*parts]
    lengths = np.array([*map(len, found)], np.int64)
    return np.concatenate([np.empty(0, np.uint32), *found]), lengths
