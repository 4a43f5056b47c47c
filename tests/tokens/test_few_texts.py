"""The reference with a part of its vocabulary: the ids of the whole one, or the whole one itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode import engines
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.families import BYTE_LEVEL_FAMILIES, plan_engine
from relayrun.tokens.tokenize.encode.libraries import Engine, HuggingFaceEngine
from relayrun.tokens.tokenize.encode.partial_vocabulary import MAX_LETTERS, PartialVocabularyEngine
from tests.fuzz_tokenizers import random_texts
from tests.published import FORMS, added, bpe, byte_letters, byte_level, definition, published, small

BYTE_LEVEL = [
    name
    for name in FORMS
    if (plan := plan_engine(small(name))) and plan.family in BYTE_LEVEL_FAMILIES and not plan.plain
]


def loaded(text: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    return tokenizer


def reference(text: str) -> HuggingFaceEngine:
    return HuggingFaceEngine(loaded(text))


def never() -> Engine:
    raise AssertionError("the whole tokenizer is not needed")


def same(engine: Engine, text: str, texts: list[str]) -> None:
    found, right = engine.encode(PackedTexts.of(texts)), reference(text).encode(PackedTexts.of(texts))
    assert [*map(np.ndarray.tolist, found)] == [*map(np.ndarray.tolist, right)]


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_the_first_texts_get_the_ids_of_the_whole_tokenizer(name: str) -> None:
    whole, texts = small(name), [*random_texts(600, 5)]
    for begin in range(0, len(texts), 60):
        same(PartialVocabularyEngine(whole, (), never), whole, texts[begin : begin + 60])


def test_names_of_entries_that_look_like_json_are_found() -> None:
    letters = byte_letters()
    made = ['],["', '","', "],[", '"]', "\\\\", '\\"', '"},"merges":[', ":0", '["', "\\u0041"]
    merges: list[tuple[str, str]] = []
    for word in made:
        merges += [(word[:at], word[at]) for at in range(1, len(word)) if (word[:at], word[at]) not in merges]
    names = [*letters, *dict.fromkeys(left + right for left, right in merges), "a whole word", "\u0120never"]
    model = bpe({name: id_ for id_, name in enumerate(names)}, merges, ignore_merges=True)
    whole = definition(model, pre_tokenizer=byte_level(), added_tokens=[added("<|end|>", len(names))])
    texts = [*made, *(first + second for first in made for second in made), "".join(made), "<|end|>\u1316", ""]
    same(PartialVocabularyEngine(whole, (), never), whole, texts)


def test_text_of_an_added_token_asks_for_the_whole_tokenizer() -> None:
    model = json.loads(small("Qwen"))["model"]
    size = max(model["vocab"].values())
    tokens = [added("<tool\u00e9>", size + 1, special=False, normalized=True)]
    whole = definition(model, pre_tokenizer=byte_level(), normalizer={"type": "NFC"}, added_tokens=tokens)
    asked: list[str] = []

    def load() -> Engine:
        asked.append("")
        return reference(whole)

    for text in ("a <tool\u00e9> here", "a <toole\u0301> here"):
        few = PartialVocabularyEngine(whole, ["<tool\u00e9>"], load)
        same(few, whole, [text])
        assert asked.pop() == ""
        same(PartialVocabularyEngine(whole, ["<tool\u00e9>"], never), whole, ["a tool here"])


def _repeated(count: int) -> list[str]:
    return [chr(0x4E00 + number) * 20 for number in range(count)]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(["x" * (MAX_LETTERS + 1)], id="one that is long"),
        pytest.param(_repeated(MAX_LETTERS // 60 + 1), id="many that are short", marks=pytest.mark.long),
    ],
)
def test_many_texts_ask_for_the_whole_tokenizer_once(texts: list[str]) -> None:
    whole, asked = small("GPT-2"), []

    def load() -> Engine:
        asked.append("")
        return reference(whole)

    few = PartialVocabularyEngine(whole, (), load)
    for text in texts:
        same(few, whole, [text])
    assert asked == [""]
    same(few, whole, ["a last one"])
    assert asked == [""]


@pytest.mark.parametrize("change", [('":0,', '" :0,'), ('"],["', '"], ["'), ('","', '", "')])
def test_what_is_written_in_another_way_asks_for_the_whole_tokenizer(change: tuple[str, str]) -> None:
    before, _, lists = small("GPT-2").partition('"vocab":')
    other = before + '"vocab":' + lists.replace(*change)
    assert other != small("GPT-2")
    with pytest.raises(AssertionError, match="not needed"):
        PartialVocabularyEngine(other, (), never).encode(PackedTexts.of(["a text"]))


@pytest.mark.parametrize("name", ["Llama 3", "o200k"])
def test_a_worker_that_meets_a_doubtful_character_loads_no_whole_tokenizer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small(name)
    told: list[str] = []
    selection = select_engine("auto", loaded(whole), PackedTexts.of(["a text"]), told.append, definition=whole)
    engines._build_engine.cache_clear()  # another process
    engine = selection.build(whole, never)  # type: ignore[arg-type]
    same(engine, whole, ["a text", "a \u1316 text that \u212a no \u017f table knows", "another"])
    assert engine.routed == 1
    assert not told


def test_where_the_reference_is_loaded_already_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYRUN_CACHE", "")  # so that this start proves the engine
    whole, asked = small("GPT-2"), []

    def load() -> Tokenizer:
        asked.append("")
        return loaded(whole)

    engines._build_engine.cache_clear()
    engine = select_engine("auto", load, PackedTexts.of(["a text"]), print, definition=whole).build(whole)
    monkeypatch.setattr(engines, "PartialVocabularyEngine", never)
    before = engine.routed  # of the proof
    same(engine, whole, ["a \u1316 text"])
    assert engine.routed == before + 1
    assert asked == [""]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_forty_thousand_texts_in_hundreds_get_the_ids_of_the_whole_tokenizer(name: str) -> None:
    whole, texts = published(name).read_text(encoding="utf-8"), [*random_texts(40_000, 11)]
    right = reference(whole)
    for begin in range(0, len(texts), 100):
        made = PackedTexts.of(texts[begin : begin + 100])
        for found, wanted in zip(
            PartialVocabularyEngine(whole, (), never).encode(made), right.encode(made), strict=True
        ):
            assert np.array_equal(found, wanted), begin
