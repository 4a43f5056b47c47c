"""The libraries that turn texts into ids, behind one interface: the reference, and those that are faster.

    huggingface   `tokenizers`, the reference: every other one must give its ids
    gigatoken     BPE, byte-level and SentencePiece's
    nanotoken     WordPiece
    splintr       Unigram
    bytes         a token for each byte, by numpy

A faster one is right for some tokenizers and some texts alone: see `families`. Each raises what its library raises
for a tokenizer that it cannot load, and ImportError where it is not installed. None of them may start threads: workers
are forks of a process that has used it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.tokenize.encode.byte_tokenizer import byte_letters

Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
"""Ids of all texts, shape [tokens], and the number of each text's, shape [texts]."""

FastEngineName = Literal["gigatoken", "nanotoken", "splintr", "bytes"]
ENGINE_PACKAGES = {
    "huggingface": "tokenizers",
    "gigatoken": "gigatoken",
    "nanotoken": "nanotoken",
    "splintr": "splintr-rs",
    "bytes": "numpy",
}
"""The name of the package, by engine."""

_HF_BYTES = 500_000
"""`tokenizers` needs about 100 bytes of memory per byte of text."""


class Engine(Protocol):
    """Texts to the ids of `Tokenizer.encode(text, add_special_tokens=False)` with `encode_special_tokens` on."""

    routed: int
    """Texts that another engine took over, so far."""

    def encode(self, texts: Texts) -> Encoded:
        """The ids of all texts, and how many each of them has."""
        ...


class HuggingFaceEngine:
    """The reference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.routed = 0
        self._tokenizer = tokenizer

    def encode(self, texts: Texts) -> Encoded:
        parts: list[npt.NDArray[np.uint32]] = []
        for batch in texts.split(_HF_BYTES, 1000):
            encodings = self._tokenizer.encode_batch_fast(batch.strings(), add_special_tokens=False)
            parts += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return _concatenate(parts)


class GigatokenEngine:
    """BPE in numbers of bytes and spaces, with a cache of words. Its Unicode tables are its own."""

    def __init__(self, definition: str) -> None:
        import gigatoken

        self.routed = 0
        self._backend: Any = gigatoken.Tokenizer.from_json(definition).backend

    def encode(self, texts: Texts) -> Encoded:
        if not len(texts):
            return _concatenate([])
        import awkward as ak  # what it takes without an object, and a copy, per text

        content = ak.contents.NumpyArray(texts.data, parameters={"__array__": "byte"})
        offsets = ak.index.Index64(texts.offsets)
        array = ak.Array(ak.contents.ListOffsetArray(offsets, content, parameters={"__array__": "bytestring"}))
        # one thread: the workers share the cores already
        layout = self._backend.encode_batch(array, parallel=False).layout
        bounds = layout.offsets.data
        return layout.content.data[bounds[0] : bounds[-1]], bounds[1:] - bounds[:-1]


class NanotokenEngine:
    """WordPiece."""

    def __init__(self, definition: str) -> None:
        import nanotoken

        self.routed = 0
        self._backend: Any = nanotoken.Tokenizer.from_json(definition).backend

    def encode(self, texts: Texts) -> Encoded:
        if not len(texts):
            return _concatenate([])
        pieces = [*map(bytes, texts.views())]
        ids, bounds = self._backend.encode_batch(pieces, add_special_tokens=False, parallel=False)
        ends = np.asarray(bounds, np.int64)
        return np.asarray(ids, np.uint32), ends[1:] - ends[:-1]


class SplintrEngine:
    """Unigram. Its function for batches uses threads, and would wait for ever in a fork."""

    def __init__(self, definition: str) -> None:
        import splintr

        self.routed = 0
        self._tokenizer: Any = splintr.from_json_bytes(definition.encode())

    def encode(self, texts: Texts) -> Encoded:
        return _concatenate(
            [np.frombuffer(flat, np.uint32) for flat in map(self._tokenizer.encode_flat, texts.strings())]
        )


class ByteEngine:
    """Byte-level BPE without merges: the id of each byte, whatever stands around it."""

    def __init__(self, definition: str) -> None:
        self.routed = 0
        model = json.loads(definition)["model"]
        unknown = model["vocab"].get(model["unk_token"])
        ids = [model["vocab"].get(letter, unknown) for letter in byte_letters()]
        self._ids = np.array([0 if id_ is None else id_ for id_ in ids], np.uint32)  # None: of bytes that no text has

    def encode(self, texts: Texts) -> Encoded:
        return self._ids[texts.used], texts.sizes


FAST_ENGINES: dict[FastEngineName, Callable[[str], Engine]] = {
    "gigatoken": GigatokenEngine,
    "nanotoken": NanotokenEngine,
    "splintr": SplintrEngine,
    "bytes": ByteEngine,
}
"""What loads a serialized tokenizer, by engine."""


def _concatenate(parts: Iterable[npt.NDArray[np.uint32]]) -> Encoded:
    found = [*parts]
    lengths = np.array([*map(len, found)], np.int64)
    return np.concatenate([np.empty(0, np.uint32), *found]), lengths
