"""Select the engine of a job: the fastest that is known to be exact for its tokenizer, and proven at the start.

`families` lists the forms of tokenizers that an engine may encode, and the texts that it must not have. Such an engine
is trusted after it gave the reference's ids on texts of the job and on a fixed set of edge cases; otherwise, or if it
is not installed, `tokenizers` encodes everything.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
from tokenizers import Tokenizer

from relayrun.errors import InputError
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode import tokenizer_files
from relayrun.tokens.tokenize.encode.families import EnginePlan, plan_engine
from relayrun.tokens.tokenize.encode.libraries import (
    ENGINE_PACKAGES,
    FAST_ENGINES,
    Encoded,
    Engine,
    HuggingFaceEngine,
    change_definition,
    load_normalizer,
)
from relayrun.tokens.tokenize.encode.routing import RoutedEngine, unicode_categories
from relayrun.tokens.tokenize.encode.tokenizer import load_definition
from relayrun.tokens.tokenize.options import EngineName
from relayrun.trust import read_cache, write_cache

_SPACES = " \t\n\r\v\f\x1c\x85\u00a0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff"
_JOINERS = "\u200d\u0301\u0327\u20dd\ufe0f\u093f\u0e33\u1160\U000e0061\U0001f3fd"
_WORDS = (
    "don't I'LL we'Ve 'S can’t",
    "'\u017f '\u017ft x'\u017fa A'\u017f'\u017f ''\u017f1 '\u017f\n\u212a'\u212a a\u212a's",  # what `(?i:)` folds
    "x1234567890y ٠١٢٣٤ ½²³ⅷ 12.5e-3",
    "ǅungla İstanbul ŉ ß ẞ ﬁ Å Å é é",
    "한국어 각 漢字かな交じり文 ไทย हिन्दी தமிழ்",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "a\0b\x7f\x80\x9f",
    "<|im_start|> [INST] </s> <s>",
    "snake_case CamelCase HTTPServer2XX __init__ ===>>> \\n ''' \"\"\"",
    "\u0300leading \u0e31 mark",
)


def edge_cases(tokenizer: Tokenizer) -> list[str]:
    """Return texts with white space in every order, marks, digits, long runs, special tokens, and many characters."""
    texts = ["", *_WORDS]
    texts += [f"{first}{second}a{second}{first}\n{first}." for first in _SPACES for second in _SPACES]
    texts += [f"a{mark} {mark}b{mark}{mark}1{mark}\n{mark}'s" for mark in _JOINERS]
    texts += [
        piece * count
        for piece in ("a", " ", "\n", "\r\n", "0", "é", "漢", "\u0301", "ab ", "--")
        for count in (2, 3, 5000)
    ]
    for token in list(tokenizer.get_added_tokens_decoder().values())[:40]:
        content = token.content
        texts += [content, f"a{content}b", f" {content} {content}\n", content[:-1], content + content[1:]]
    return texts + _character_texts()


@functools.cache
def _character_texts() -> list[str]:
    """Return texts of 32 characters each in a few contexts: all assigned ones, but of letters only some."""
    category, point = unicode_categories(0, 0x34000), np.arange(0x34000)
    letters = np.isin(category, (b"Lo", b"Ll", b"Lu"))
    every = np.select([point < 0x530, point < 0x3000], [1, 4], 64)
    wanted = ~np.isin(category, (b"Cs", b"Co", b"Cn")) & (~letters | (point % every == 0))
    kept = [*map(chr, np.flatnonzero(wanted).tolist())]
    return ["".join(f"{mark}a{mark} {mark}1" for mark in kept[start : start + 32]) for start in range(0, len(kept), 32)]


TokenizerLoader = Callable[[], Tokenizer]
"""Returns a loaded tokenizer on demand."""


@dataclass(frozen=True, kw_only=True)
class EngineSelection:
    """The engine of a job, as workers build it: small enough to send, and recorded."""

    engine: Literal["huggingface", "gigatoken", "bytes"]
    version: str
    plan: EnginePlan | None = None
    """Its plan; None for the reference."""

    def build(self, definition: str, tokenizer: TokenizerLoader | None = None) -> Engine:
        """Return the engine for a serialized tokenizer without truncation and padding. Loading takes seconds: the last
        one built serves this process and its forks. `tokenizer` returns the loaded tokenizer, if the caller has it."""
        if (self, definition) not in _built:
            _built.clear()
            _built[self, definition] = self._new(definition, tokenizer or partial(load_definition, definition))
        return _built[self, definition]

    def _new(self, definition: str, load: TokenizerLoader) -> Engine:
        if self.plan is None:
            return HuggingFaceEngine(load())
        fast = FAST_ENGINES[self.plan.engine](change_definition(definition, self.plan.changes))
        normalizer = partial(load_normalizer, definition)
        return RoutedEngine(fast, self.plan, normalizer, lambda: HuggingFaceEngine(load()))

    def __str__(self) -> str:
        return f"{self.engine} {self.version}" + (", and huggingface for what it is not sure of" if self.plan else "")


_built: dict[tuple[EngineSelection, str], Engine] = {}
"""The engine that was built last."""


def select_engine(
    wanted: EngineName,
    tokenizer: Tokenizer | TokenizerLoader,
    sample: PackedTexts,
    report: Callable[[str], None],
    *,
    definition: str | None = None,
) -> EngineSelection:
    """Return the fastest engine that is known and proven to be exact, or `wanted` if it is; `report` gets fall-backs.

    `tokenizer` has `encode_special_tokens` on, truncation and padding off; `definition` is its `to_str()`, if the
    caller has it. Proofs are cached on this machine (`tokenizer_files`): a repeated proof does not even load the
    tokenizer. Raises InputError for an unknown name.
    """
    if wanted not in get_args(EngineName):
        raise InputError(f"unknown engine {wanted!r}; there are: {', '.join(get_args(EngineName))}")

    @functools.cache
    def load() -> Tokenizer:
        return tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer()

    definition = definition or load().to_str()
    selection = None if wanted == "huggingface" else _prove_engine(wanted, load, sample, report, definition)
    selection = selection or EngineSelection(engine="huggingface", version=_package_version("huggingface"))
    selection.build(definition, load)  # forks of this process inherit it
    return selection


def _prove_engine(
    wanted: EngineName, load: TokenizerLoader, sample: PackedTexts, report: Callable[[str], None], definition: str
) -> EngineSelection | None:
    """Return the fast engine, or None after `report` got the reason."""
    plan = plan_engine(definition)
    if plan is None or wanted not in ("auto", plan.engine):
        what = "no fast engine is" if wanted == "auto" else f"{wanted} is not"
        report(f"{what} known to be exact for this kind of tokenizer: huggingface encodes, which is slower")
        return None
    try:
        selection = EngineSelection(engine=plan.engine, version=_package_version(plan.engine), plan=plan)
        wrong = _first_wrong_text(selection, load, sample, definition)
    except ImportError:
        package = ENGINE_PACKAGES[plan.engine]
        report(f"{plan.engine} is not installed: huggingface encodes, which is slower; pip install {package}")
    except BaseException as error:  # ValueError, RuntimeError, and a Rust panic, which does not derive from Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        report(f"{plan.engine} cannot take this tokenizer: {(str(error).splitlines() or [repr(error)])[0][:200]}")
        report(f"going on without {plan.engine}; this will be slower")
    else:
        if wrong is None:
            return selection
        report(f"{plan.engine} gives other ids than Hugging Face's tokenizers for {wrong[:80]!r}")
        report(f"going on without {plan.engine}; this will be slower")
    return None


def _first_wrong_text(
    selection: EngineSelection, load: TokenizerLoader, sample: PackedTexts, definition: str
) -> str | None:
    engine = selection.build(definition, load)
    packages = (ENGINE_PACKAGES["huggingface"], ENGINE_PACKAGES[selection.engine])
    both = (definition.encode(), repr(selection).encode())
    of_sample = (sample.used.tobytes(), (sample.offsets - sample.offsets[0]).tobytes())
    proofs: dict[str, Callable[[], PackedTexts]] = {
        tokenizer_files.cache_key("edge cases", both, packages): lambda: PackedTexts.of(edge_cases(load())),
        tokenizer_files.cache_key("sample", (*both, *of_sample), packages): lambda: sample,
    }
    for name, make in proofs.items():
        if read_cache("tokenizers", name) is None:
            texts = make()
            right = HuggingFaceEngine(load()).encode(texts)
            if (text := _first_difference(engine.encode(texts), right, texts)) is not None:
                return text
            write_cache("tokenizers", name, b"proven")
    return None


def _first_difference(encoded: Encoded, right: Encoded, texts: PackedTexts) -> str | None:
    if np.array_equal(encoded[0], right[0]) and np.array_equal(encoded[1], right[1]):
        return None
    ours, theirs = (np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (encoded, right))
    strings = texts.strings()
    return next((s for s, a, b in zip(strings, ours, theirs, strict=True) if not np.array_equal(a, b)), strings[-1])


def _package_version(engine: str) -> str:
    return importlib.metadata.version(ENGINE_PACKAGES[engine])
