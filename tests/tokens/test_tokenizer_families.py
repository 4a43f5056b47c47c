"""Tokenizers that a fast engine may not have, texts that it may not have, and machines without one."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode import engines, families, libraries
from relayrun.tokens.tokenize.encode.engines import HuggingFaceEngine, select_engine
from relayrun.tokens.tokenize.encode.families import normalize_pattern, plan_engine
from relayrun.tokens.tokenize.encode.libraries import GigatokenEngine
from relayrun.tokens.tokenize.encode.routing import (
    FIRST_UNASSIGNED_LEAD,
    DigitEngine,
    doubtful_table,
    find_characters,
    longest_match_pattern,
    numeric_table,
)
from tests import published
from tests.fuzz_tokenizers import compare, random_texts
from tests.published import (
    DEEPSEEK,
    GPT2,
    KIMI,
    LLAMA3,
    RIGHT_TO_LEFT,
    SUPERBPE,
    by_patterns,
    small,
    split,
    steps,
)

ESCAPED = (
    DEEPSEEK[0],
    r"[\x{4e00}-\x{9fa5}\u3040-\u309f\x{30a0}-\x{30ff}]+",
    DEEPSEEK[2].replace("\r", r"\r").replace("\n", r"\n"),
)
PATTERNS = {
    "DeepSeek in escapes": ESCAPED,
    "right-to-left digits": (RIGHT_TO_LEFT, LLAMA3),
    "GPT-2 as Split": (GPT2,),
    "words": (r"\w+|[^\w\s]+|\s+",),
    "SuperBPE-like": (SUPERBPE,),
    "Kimi-like": (KIMI,),
}
KNOWN = {"DeepSeek in escapes": "DeepSeek", "GPT-2 as Split": "GPT-2"}
TROUBLE = [
    f"{before}{point}{behind} it{point}'s a{point}\n'{point}s don'{point}\u202f1{point}"
    for point in ("\u180e", "\u017f", "\u212a", "\u202f", "\u00ad", "\ufeff", "\u200b", "\u2028")
    for before in (" ", "'", "a", "x '", "\u202f", "1")
    for behind in (" ", "'", "s", "\n", "\u180e")
]


def with_patterns(*patterns: str) -> Tokenizer:
    """One whose tokens are what the patterns make of those texts, so that a proof by other texts finds nothing."""
    made = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TROUBLE * 3, trainer)
    made.encode_special_tokens = True
    return made


@pytest.mark.parametrize("kind", PATTERNS)
def test_texts_that_engines_disagree_about_get_the_ids_of_hugging_face(kind: str) -> None:
    tokenizer = with_patterns(*PATTERNS[kind])
    selection = select_engine("auto", tokenizer, PackedTexts.of(["a text"]), lambda line: None)
    texts = PackedTexts.of(TROUBLE)
    ids, lengths = selection.build(tokenizer.to_str()).encode(texts)
    right, right_lengths = HuggingFaceEngine(tokenizer).encode(texts)
    assert (ids.tolist(), lengths.tolist()) == (right.tolist(), right_lengths.tolist())
    assert (selection.plan.family if selection.plan else None) == KNOWN.get(kind)


@pytest.mark.parametrize("name", ["GPT-2", "Llama 3", "o200k", "Mistral", "Llama 2"])
def test_long_texts_one_by_one_get_the_same_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = small(name)
    engine = GigatokenEngine(definition)
    texts = PackedTexts.of(["".join(TROUBLE) * 40, "", "a", " ", "".join(TROUBLE[::-1]) * 20])
    monkeypatch.setitem(sys.modules, "awkward", None)  # its import costs a loader's first sample 0.1 s
    alone = engine.encode(texts)
    monkeypatch.undo()
    monkeypatch.setattr(libraries, "_LONG_TEXT_BYTES", 10**9)
    together = engine.encode(texts)
    assert [each.tolist() for each in alone] == [each.tolist() for each in together]


@pytest.mark.slow
def test_a_form_that_is_a_little_different_is_not_known() -> None:
    def of(name: str, **parts: object) -> families.EnginePlan | None:
        known = json.loads(small(name))
        model = parts.pop("model", {})
        assert isinstance(model, dict)
        known |= parts
        known["model"] = {"type": known["model"]["type"]} | known["model"] | model
        return plan_engine(Tokenizer.from_str(json.dumps(known)).to_str())

    assert of("Llama 3") is not None
    assert of("Llama 3", pre_tokenizer=by_patterns(LLAMA3.replace("{1,3}", "{1,2}"))) is None
    assert of("Llama 3", pre_tokenizer=steps(split(LLAMA3, "Removed"), published.byte_level(False))) is None
    assert of("Llama 3", pre_tokenizer=steps(split(LLAMA3), published.byte_level(True))) is None
    assert (
        of("Llama 3", pre_tokenizer=steps(split(LLAMA3), published.byte_level(False) | {"add_prefix_space": True}))
        is None
    )
    assert of("Llama 3", pre_tokenizer=None) is None
    assert of("Llama 3", normalizer={"type": "Lowercase"}) is None
    assert of("Llama 3", model={"dropout": 0.1}) is None
    assert of("GPT-2", pre_tokenizer=steps(split(GPT2), split(GPT2), published.byte_level(False))) is None
    assert of("Llama 2", model={"fuse_unk": False}) is None
    assert of("Llama 2", normalizer=None) is None
    assert of("Mistral", pre_tokenizer=published.metaspace("never", splits=False)) is None
    assert of("BERT") is None
    assert of("T5") is None
    without = json.loads(small("GPT-2"))
    letter = published.byte_letters()[0x0A]
    without["model"]["merges"] = []
    without["model"]["vocab"] = {token: id_ for token, id_ in without["model"]["vocab"].items() if token != letter}
    assert plan_engine(Tokenizer.from_str(json.dumps(without)).to_str()) is None


def test_patterns_are_known_in_every_spelling() -> None:
    assert tuple(map(normalize_pattern, ESCAPED)) == tuple(map(normalize_pattern, DEEPSEEK)) == families.DEEPSEEK
    assert normalize_pattern(LLAMA3.replace(r"\r\n", "\r\n")) == normalize_pattern(LLAMA3) == families.CL100K
    assert normalize_pattern(r"a\\x41\x41\x5d\u00e9") == r"a\\x41A\x5dé"


@pytest.mark.parametrize("name", ["GPT-2", "Llama 2"])
def test_without_its_engine_everything_works_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_str(small(name))
    tokenizer.encode_special_tokens = True
    plan = plan_engine(tokenizer.to_str())
    assert plan is not None
    monkeypatch.setitem(sys.modules, plan.engine, None)
    engines._built.clear()
    told: list[str] = []
    selection = select_engine("auto", tokenizer, PackedTexts.of(["a text"]), told.append)
    assert selection.engine == "huggingface"
    assert told == [
        f"{plan.engine} is not installed: huggingface encodes, which is slower; "
        f"pip install {engines.ENGINE_PACKAGES[plan.engine]}"
    ]
    texts = PackedTexts.of(TROUBLE)
    right = HuggingFaceEngine(tokenizer).encode(texts)[0]
    assert selection.build(tokenizer.to_str()).encode(texts)[0].tolist() == right.tolist()


class Bytes:
    """Every byte has an id of its own."""

    routed = 0

    def encode(self, texts: PackedTexts) -> engines.Encoded:
        return HuggingFaceEngine(_one_a_byte()).encode(texts)


def _one_a_byte() -> Tokenizer:
    return Tokenizer.from_str(small("one token a byte"))


@pytest.mark.slow
@pytest.mark.parametrize("each", [True, False])
@given(texts=st.lists(st.text(st.sampled_from("ab 019²½٣Ⅷ漢é"), max_size=12), max_size=5))
def test_digits_that_are_apart_come_back_in_their_place(each: bool, texts: list[str]) -> None:
    made = PackedTexts.of(["before", *texts])
    made = PackedTexts(data=made.data, offsets=made.offsets[1:])  # that begins inside its data
    right = Bytes().encode(made)
    ids, lengths = DigitEngine(Bytes(), each=each).encode(made)
    assert (ids.tolist(), lengths.tolist()) == (right[0].tolist(), right[1].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_text_of_every_normal_form_gets_the_ids_of_hugging_face(form: str) -> None:
    known = json.loads(small("Qwen")) | {"normalizer": {"type": form}}
    found = compare(form, Tokenizer.from_str(json.dumps(known)), random_texts(2000, 3))
    assert found.engine == "gigatoken"
    assert not found.differing, found
    assert found.routed < found.texts / 3


def test_normalized_text_that_holds_an_added_token_goes_elsewhere() -> None:
    known = json.loads(small("Qwen"))
    known["added_tokens"] += [
        published.added("é!", 901, special=False, normalized=True),
        published.added("e\u0301?", 902, special=False, normalized=False),
    ]
    tokenizer = Tokenizer.from_str(json.dumps(known))
    tokenizer.encode_special_tokens = True
    selection = select_engine("auto", tokenizer, PackedTexts.of(["a text"]), lambda line: None)
    assert selection.engine == "gigatoken"
    texts = PackedTexts.of(["e\u0301!", "é!", "e\u0301?", "é?", "e\u0301", "plain", "e\u0301 \u1100\u1161\u11a8"])
    engine = selection.build(tokenizer.to_str())
    before = engine.routed
    assert engine.encode(texts)[0].tolist() == HuggingFaceEngine(tokenizer).encode(texts)[0].tolist()
    assert engine.routed - before == 4


words = st.text(st.sampled_from("ab"), min_size=1, max_size=4)


@pytest.mark.slow
@given(words=st.sets(words, min_size=1), text=st.text(st.sampled_from("abc"), max_size=20))
def test_the_longest_of_many_words_is_found(words: set[str], text: str) -> None:
    found = re.compile(longest_match_pattern(word.encode() for word in words)).match(text.encode())
    right = max((word for word in words if text.startswith(word)), key=len, default=None)
    assert (found[0].decode() if found else None) == right


@pytest.mark.slow
def test_added_tokens_are_cut_out_where_nothing_around_them_belongs_to_them() -> None:
    def found(name: str, **rules: bool) -> families.EnginePlan | None:
        known = json.loads(small(name))
        known["added_tokens"] = [*published._SPECIAL_PIECES, published.added("\n\n", 900, special=False, **rules)]
        return plan_engine(Tokenizer.from_str(json.dumps(known)).to_str())

    def of(name: str, **rules: bool) -> families.EnginePlan:
        plan = found(name, **rules)
        assert plan is not None
        return plan

    for plan in (of("Gemma"), of("Llama 2")):
        assert ([content for content, _ in plan.cut], plan.plain) == (["\n\n"], ())
        assert plan.special == ("<unk>", "<s>", "</s>")
    for plan in (of("Gemma", lstrip=True), of("Mistral"), of("GPT-2")):
        assert (plan.cut, plan.plain) == ((), ("\n\n",))
    assert found("Gemma", normalized=True) is None  # it is searched in the normalized text: decision 0029


def test_the_page_lists_the_families_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference/tokenization-details.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\w+) \|$", page.partition("| form, as")[2], re.M)
    assert dict(rows) == families.FAMILIES


def test_every_character_of_a_set_is_found_in_its_place_and_no_other() -> None:
    """Also where bytes that are not the text's stand before and behind it."""
    letters = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    text = "a".join(letters).encode()
    begins = np.cumsum([0, *(len(letter.encode()) + 1 for letter in letters)])
    cut = PackedTexts(data=np.frombuffer(b"\xf0" + text + b"\xbf\xbf", np.uint8), offsets=np.array([1, len(text) + 1]))
    kinds = [*map(unicodedata.category, letters)]
    kinds = [kind if letter < "\U000f0000" else "Co" for kind, letter in zip(kinds, letters, strict=True)]
    unknown = [kind == "Cn" or letter == "\u180e" for kind, letter in zip(kinds, letters, strict=True)]
    numeric = [kind[0] == "N" and letter > "\x7f" for kind, letter in zip(kinds, letters, strict=True)]
    for wanted, table, first in (
        (unknown, doubtful_table(), FIRST_UNASSIGNED_LEAD),
        (numeric, numeric_table(), 0xC2),
    ):
        assert np.array_equal(find_characters(cut, table, first) - 1, begins[:-1][wanted])
