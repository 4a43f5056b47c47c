"""Texts that only the reference may encode: it is loaded when the first of them comes, or taken if it is there."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode import engines
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.libraries import Engine, HuggingFaceEngine
from tests.published import small


def loaded(text: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    return tokenizer


def same(engine: Engine, text: str, texts: list[str]) -> None:
    found, right = engine.encode(PackedTexts.of(texts)), HuggingFaceEngine(loaded(text)).encode(PackedTexts.of(texts))
    assert [*map(np.ndarray.tolist, found)] == [*map(np.ndarray.tolist, right)]


@pytest.mark.parametrize("name", ["Llama 3", "o200k"])
def test_a_worker_loads_the_reference_when_a_doubtful_character_comes(name: str) -> None:
    whole, asked = small(name), []
    told: list[str] = []
    selection = select_engine("auto", loaded(whole), PackedTexts.of(["a text"]), told.append, definition=whole)

    def load() -> Tokenizer:
        asked.append("")
        return loaded(whole)

    engines._built.clear()  # another process
    engine = selection.build(whole, load)
    same(engine, whole, ["a text", "a long \u017f, as in old print, and '\u017f", "5 \u212a, 'k"])
    assert not asked
    same(engine, whole, ["a text", "a \u1316 text that no table knows", "another"])
    same(engine, whole, ["a \u1316 text"])
    assert engine.routed == 2
    assert asked == [""]
    assert not told


def test_where_the_reference_is_loaded_already_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYRUN_CACHE", "")  # so that this start proves the engine
    whole, asked = small("GPT-2"), []

    def load() -> Tokenizer:
        asked.append("")
        return loaded(whole)

    engines._built.clear()
    engine = select_engine("auto", load, PackedTexts.of(["a text"]), print, definition=whole).build(whole)
    before = engine.routed  # of the proof
    same(engine, whole, ["a \u1316 text"])
    assert engine.routed == before + 1
    assert asked == [""]
