"""What turns texts into ids: one interface, three libraries, and the proof that they agree.

    huggingface   `tokenizers`, the reference: every other engine must give its ids
    fastokens     byte-identical in all that was tried, and several times faster
    gigatoken     faster again, with Unicode tables of its own: see `Route`

`select` builds the engine of a job. It proves every fast engine against the reference, on texts of the job
and on a fixed set of edge cases, before it is trusted, and goes on with the next slower one where they differ.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from relayrun.errors import InputError
from relayrun.tokenization.encode.edge_cases import edge_cases
from relayrun.tokenization.options import EngineName
from relayrun.tokenization.readers.texts import Texts, not_ascii, unassigned

ENGINES: tuple[EngineName, ...] = get_args(EngineName)
Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
"""Ids of all texts, shape [tokens], and the number of each text's, shape [texts]."""

ODD = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
"""What a BPE model may have, and a plain one has not."""

_HF_BYTES = 500_000
"""`tokenizers` needs about 100 bytes of memory per byte of text."""


class Engine(Protocol):
    """Texts to the ids of `Tokenizer.encode(text, add_special_tokens=False)` with `encode_special_tokens` on."""

    routed: int
    """Texts that another engine took over, so far."""

    def encode(self, texts: Texts) -> Encoded:
        """The ids of all texts, and how many each of them has."""
        ...


class HuggingFace:
    """The reference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.routed = 0
        self._tokenizer = tokenizer

    def encode(self, texts: Texts) -> Encoded:
        parts: list[npt.NDArray[np.uint32]] = [np.empty(0, np.uint32)]
        lengths: list[int] = []
        for batch in texts.split(_HF_BYTES, 1000):
            encodings = self._tokenizer.encode_batch_fast(batch.strings(), add_special_tokens=False)
            parts += [np.array(encoding.ids, np.uint32) for encoding in encodings]
            lengths += map(len, encodings)
        return np.concatenate(parts), np.array(lengths, np.int64)


class Fastokens:
    """Raises what the library raises for a tokenizer that it cannot load."""

    def __init__(self, definition: str) -> None:
        import fastokens

        self.routed = 0
        self._tokenizer: Any = fastokens.Tokenizer.from_json_str(definition)

    def encode(self, texts: Texts) -> Encoded:
        ids, bounds = self._tokenizer.encode_batch_flat(texts.strings(), split_special_tokens=True)
        ends = np.frombuffer(bounds, np.int64)
        return np.frombuffer(ids, np.uint32), ends[1:] - ends[:-1]


class Gigatoken:
    """Raises what the library raises for a tokenizer that it cannot load. Right only behind a `Route`."""

    def __init__(self, definition: str) -> None:
        import gigatoken

        self.routed = 0
        # special text stays text, and texts with other added tokens are routed
        self._backend: Any = gigatoken.Tokenizer.from_json(_without_added_tokens(definition)).backend

    def encode(self, texts: Texts) -> Encoded:
        if not len(texts):
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        import awkward as ak  # what it takes without an object, and a copy, per text

        content = ak.contents.NumpyArray(texts.data, parameters={"__array__": "byte"})
        offsets = ak.index.Index64(texts.offsets)
        array = ak.Array(ak.contents.ListOffsetArray(offsets, content, parameters={"__array__": "bytestring"}))
        # one thread: the workers share the cores already
        layout = self._backend.encode_batch(array, parallel=False).layout
        bounds = layout.offsets.data
        return layout.content.data[bounds[0] : bounds[-1]], bounds[1:] - bounds[:-1]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Which texts gigatoken may have, for one tokenizer.

    Its Unicode tables are of another version than those of `tokenizers`: texts with code points that are not
    assigned in this Python's (older) tables go elsewhere. Where a normaliser stands, all but ASCII does, which
    no Unicode normalisation changes. So do texts that hold the text of an added token that is not special.
    """

    ascii_only: bool
    added: tuple[str, ...]

    @classmethod
    def of(cls, definition: str) -> Route | None:
        """None if gigatoken cannot be trusted with this kind of tokenizer: it is no plain byte-level BPE."""
        known = without_vocabulary(definition)
        model, normalizer, before = known["model"], known.get("normalizer"), known.get("pre_tokenizer") or {}
        steps = before.get("pretokenizers") or [before]
        plain = (
            model.get("type") == "BPE"
            and not any(model.get(name) for name in ODD)
            and all(step.get("type") in ("Split", "Digits", "ByteLevel") for step in steps)
            and steps[-1].get("type") == "ByteLevel"
            and not steps[-1].get("add_prefix_space")
        )
        if not plain or (normalizer and normalizer.get("type") not in ("NFC", "NFD", "NFKC", "NFKD")):
            return None
        added = tuple(token["content"] for token in known.get("added_tokens", []) if not token["special"])
        return cls(ascii_only=normalizer is not None, added=added)

    def elsewhere(self, texts: Texts) -> npt.NDArray[np.bool_]:
        """Which texts gigatoken may not have, shape [texts]."""
        routed = not_ascii(texts) if self.ascii_only else unassigned(texts)
        if self.added:
            pattern = re.compile(b"|".join(re.escape(token.encode()) for token in self.added))
            starts = [match.start() for match in pattern.finditer(texts.used.data)]
            routed |= texts.any_in(np.array(starts, np.int64) + texts.offsets[0])
        return routed


class Routed:
    """A fast engine for most texts, and another for those that it is not trusted with."""

    def __init__(self, fast: Engine, route: Route, other: Callable[[], Engine]) -> None:
        """`other` is called when the first text needs it."""
        self.routed = 0
        self._fast, self._route, self._make_other = fast, route, other
        self._other: Engine | None = None

    def encode(self, texts: Texts) -> Encoded:
        elsewhere = self._route.elsewhere(texts)
        if not elsewhere.any():
            return self._fast.encode(texts)
        self._other = self._other or self._make_other()
        self.routed += int(elsewhere.sum())
        fast_ids, fast_lengths = self._fast.encode(texts.take(~elsewhere))
        other_ids, other_lengths = self._other.encode(texts.take(elsewhere))
        lengths = np.empty(len(texts), np.int64)
        lengths[~elsewhere], lengths[elsewhere] = fast_lengths, other_lengths
        ids = np.empty(int(lengths.sum()), np.uint32)
        from_other = np.repeat(elsewhere, lengths)
        ids[~from_other], ids[from_other] = fast_ids, other_ids
        return ids, lengths


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The engine of a job, as workers build it: small enough to be sent, and written into the record."""

    engine: Literal["huggingface", "fastokens", "gigatoken"]
    version: str
    route: Route | None = None
    other: Literal["huggingface", "fastokens"] | None = None
    """What takes the routed texts."""

    def build(self, definition: str) -> Engine:
        """`definition` is the serialized tokenizer, with truncation and padding off. The last one built is kept."""
        return _built(self, definition)

    def __str__(self) -> str:
        return f"{self.engine} {self.version}" + (
            f", and {self.other} for what it is not sure of" if self.other else ""
        )


@functools.lru_cache(maxsize=1)
def _built(selection: Selection, definition: str) -> Engine:
    """Loading takes seconds: what is proven in a process is what works there, and in its forks."""
    if selection.engine == "huggingface":
        return _reference(definition)
    if selection.engine == "fastokens":
        return Fastokens(definition)
    assert selection.route is not None
    make = Fastokens if selection.other == "fastokens" else _reference
    return Routed(Gigatoken(definition), selection.route, lambda: make(definition))


def select(
    wanted: EngineName,
    tokenizer: Tokenizer,
    sample: Texts,
    report: Callable[[str], None],
    *,
    definition: str | None = None,
) -> Selection:
    """The fastest engine that is proven to be exact, or `wanted` if it is; `report` is told of every fall-back.

    `tokenizer` has `encode_special_tokens` on, truncation and padding off; `definition` is its `to_str()`, where
    the caller has it already. Raises InputError for a wrong name.
    """
    if wanted not in ENGINES:
        raise InputError(f"unknown engine {wanted!r}; there are: {', '.join(ENGINES)}")
    definition = definition or tokenizer.to_str()
    reference = HuggingFace(tokenizer)
    texts = [Texts.of(edge_cases(tokenizer)), sample]
    expected: list[Encoded] = []

    def proven(selection: Selection) -> bool:
        try:
            engine = selection.build(definition)
            if not expected:
                expected.extend(reference.encode(part) for part in texts)
            for part, right in zip(texts, expected, strict=True):
                if (text := _difference(engine.encode(part), right, part)) is not None:
                    report(f"{selection.engine} gives other ids than Hugging Face's tokenizers for {text[:80]!r}")
                    return False
        except Exception as error:  # the libraries raise ValueError, RuntimeError, a Rust panic, ...
            report(f"{selection.engine} cannot take this tokenizer: {str(error).splitlines()[0][:200]}")
            return False
        return True

    route = Route.of(definition)
    candidates: list[Selection] = []
    fastokens = Selection(engine="fastokens", version=_version("fastokens"))
    if wanted == "gigatoken" and route is None:
        report("gigatoken is not trusted with this kind of tokenizer")
    if wanted in ("auto", "gigatoken") and route is not None:
        candidates.append(
            Selection(engine="gigatoken", version=_version("gigatoken"), route=route, other="huggingface")
        )
    if wanted in ("auto", "fastokens", "gigatoken"):
        candidates.append(fastokens)
    for candidate in candidates:
        if proven(candidate):
            return candidate
        report(f"going on without {candidate.engine}; this will be slower")
    return Selection(engine="huggingface", version=_version("tokenizers"))


def without_vocabulary(definition: str) -> dict[str, Any]:
    """A serialized tokenizer; of a BPE model as `Tokenizer.to_str` gives it without vocabulary and merges.

    They are most of it, and stand at its end. In a string of JSON the quotes of the name would be escaped.
    """
    head, found, _ = definition.partition('"vocab":{')
    if found:
        with contextlib.suppress(ValueError):
            known: dict[str, Any] = json.loads(head + '"vocab":{}}}')
            if "pre_tokenizer" in known and known["model"].keys() >= {"type", *ODD}:
                return known
    whole: dict[str, Any] = json.loads(definition)
    return whole


def _without_added_tokens(definition: str) -> str:
    """Without parsing the vocabulary, which is most of it. `definition` is what `Tokenizer.to_str` gives."""
    found = re.search(r'"added_tokens"\s*:\s*', definition)
    if found is None:
        return definition
    _, end = json.JSONDecoder().raw_decode(definition, found.end())
    return f"{definition[: found.end()]}[]{definition[end:]}"


def _reference(definition: str) -> HuggingFace:
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    return HuggingFace(tokenizer)


def _difference(encoded: Encoded, right: Encoded, texts: Texts) -> str | None:
    """The first text whose ids differ."""
    if np.array_equal(encoded[0], right[0]) and np.array_equal(encoded[1], right[1]):
        return None
    ours, theirs = (np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (encoded, right))
    strings = texts.strings()
    return next((s for s, a, b in zip(strings, ours, theirs, strict=True) if not np.array_equal(a, b)), strings[-1])


def _version(package: str) -> str:
    return importlib.metadata.version(package)
