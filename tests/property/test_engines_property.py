"""Every engine gives the ids of Hugging Face's tokenizers, whatever the text: routed, proven, or both."""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode import engines, libraries
from relayrun.tokens.tokenize.encode.engines import HuggingFaceEngine, select_engine
from relayrun.tokens.tokenize.encode.libraries import parse_without_vocabulary
from relayrun.tokens.tokenize.encode.routing import (
    FIRST_UNASSIGNED_LEAD,
    doubtful_table,
    texts_holding,
    texts_holding_bytes,
)
from relayrun.tokens.tokenize.options import EngineName
from relayrun.tokens.tokenize.shard_task import cut_unit, split_points

from ..tokenization_corpus import TEXTS

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
CUTTABLE = ("gpt2", "llama3", "qwen2 with NFC", "o200k")
KINDS = ("gpt2", "llama3", "qwen2 with NFC", "llama3 with added tokens", "metaspace with byte fallback", "words")


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """Small ones of the kinds that there are, trained on a few languages."""
    special = ["<|endoftext|>", "<s>", "</s>"]
    if kind == "words":
        made = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "a": 2}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    elif kind.startswith("metaspace"):
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        special = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        made = Tokenizer(models.BPE(ignore_merges=kind.startswith("llama3")))
        if kind == "gpt2":
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            pattern = {"qwen2": QWEN2, "o200k": O200K}.get(kind.split()[0], LLAMA3)
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
            made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        if "NFC" in kind:
            made.normalizer = normalizers.NFC()
    if kind != "words":
        alphabet = [] if kind.startswith("metaspace") else pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(TEXTS * 3, trainer)
    if "added" in kind:
        made.add_tokens([AddedToken("fox", single_word=True), AddedToken("<tool>", lstrip=True, rstrip=True)])
    made.encode_special_tokens = True
    return made


@functools.cache
def engine(kind: str, wanted: EngineName) -> tuple[engines.Engine, str]:
    selection = select_engine(wanted, tokenizer(kind), PackedTexts.of(list(TEXTS)), lambda line: None)
    return selection.build(tokenizer(kind).to_str()), selection.engine


def same(kind: str, wanted: EngineName, texts: list[str]) -> None:
    right, lengths = HuggingFaceEngine(tokenizer(kind)).encode(PackedTexts.of(texts))
    ids, ours = engine(kind, wanted)[0].encode(PackedTexts.of(texts))
    if ids.tolist() != right.tolist() or ours.tolist() != lengths.tolist():
        ends, our_ends = np.cumsum(lengths)[:-1], np.cumsum(ours)[:-1]
        pairs = zip(texts, np.split(right, ends), np.split(ids, our_ends), strict=True)
        wrong = [ascii(text[:60]) for text, theirs, mine in pairs if theirs.tolist() != mine.tolist()]
        raise AssertionError(f"{kind}, {engine(kind, wanted)[1]}: {len(wrong)} texts differ: {wrong[:5]}")


pieces = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [*TEXTS, "<|endoftext|>", "<s>", " fox", "foxy", " <tool> ", "\n\n", "'LL", "e\u0301", "\U00011de0"]
    ),
    st.builds(lambda text, count: text * count, st.text(min_size=1, max_size=3), st.integers(1, 300)),
)
documents = st.lists(pieces, max_size=6).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(documents, max_size=12))
def test_auto_gives_the_ids_of_hugging_face(kind: str, texts: list[str]) -> None:
    same(kind, "auto", texts)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_forty_thousand_random_texts_give_the_ids_of_hugging_face(kind: str) -> None:
    generator = random.Random(7)
    points = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    marks = [
        point for point in points if unicodedata.category(point)[0] in "MZC" and unicodedata.category(point) != "Co"
    ]
    plain = [*"abc 1'\n.<|>"]

    def text() -> str:
        pool = generator.choice([points, points[:0x3000], points[:0x800], marks, plain])
        return "".join(
            generator.choice(pool if generator.random() < 0.6 else plain) for _ in range(generator.randrange(60))
        )

    for _ in range(40):
        same(kind, "auto", [text() for _ in range(1000)])


lines = st.lists(
    st.one_of(documents, st.sampled_from(["don't", "x ", " y", "/", "\r", "", "漢字", "1", "'s", "Ab\u0301", "각"])),
    max_size=12,
).map("\n".join)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUTTABLE)
@settings(max_examples=60, deadline=None)
@given(text=lines, size=st.integers(1, 60))
def test_the_ids_of_a_document_are_those_of_its_pieces(kind: str, text: str, size: int) -> None:
    data = np.frombuffer(text.encode(), np.uint8)
    ends = list(split_points(data, size))
    assert ends == sorted(set(ends))
    assert (ends or [0])[-1] == data.size
    assert all(end - begin >= size for begin, end in itertools.pairwise([0, *ends[:-1]]))
    pieces = PackedTexts(data=data, offsets=np.array([0, *ends], np.int64))
    reference = HuggingFaceEngine(tokenizer(kind))
    assert reference.encode(pieces)[0].tolist() == reference.encode(PackedTexts.of([text]))[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_is_known_without_its_vocabulary(kind: str) -> None:
    made = Tokenizer.from_str(tokenizer(kind).to_str())
    made.add_tokens([AddedToken('"vocab":{', normalized=False)])
    whole = json.loads(made.to_str())
    known = parse_without_vocabulary(made.to_str())
    assert parse_without_vocabulary(json.dumps(whole, indent=1)) == whole
    assert known["model"]["type"] == whole["model"]["type"]
    if whole["model"]["type"] == "BPE":
        assert not known["model"].pop("vocab")
        assert known["model"].pop("merges", None) is None
        del whole["model"]["vocab"], whole["model"]["merges"]
    assert known == whole


def test_documents_are_cut_for_known_tokenizers_alone_and_at_known_places_alone() -> None:
    found = {kind: cut_unit(json.loads(tokenizer(kind).to_str()), merges=True) for kind in (*KINDS, "o200k")}
    assert {kind for kind, where in found.items() if where == "lines"} == set(CUTTABLE)
    assert set(found.values()) == {"lines", None}
    for text, right in (
        ("a\nb", [2]),
        ("a\n\nb", []),
        ("a \nb", []),
        ("a\n b", []),
        ("é\n漢", [3]),
        ("1\nb", []),
        ("a\n1", []),
        ("a\r\nb", []),
    ):
        data = np.frombuffer(text.encode(), np.uint8)
        assert list(split_points(data, 0))[:-1] == right, text


@pytest.mark.slow
@given(text=documents, size=st.integers(1, 20))
def test_a_tokenizer_without_merges_is_cut_between_any_characters(text: str, size: int) -> None:
    data = np.frombuffer(text.encode(), np.uint8)
    made = Tokenizer(models.BPE({letter: id_ for id_, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert cut_unit(json.loads(made.to_str()), merges=False) == "characters"
    assert cut_unit(json.loads(made.to_str()) | {"normalizer": {"type": "NFC"}}, merges=False) == "lines"
    ends = list(split_points(data, size, "characters"))
    assert ends == sorted(set(ends))
    assert (ends or [0])[-1] == data.size
    assert all(size <= end - begin < size + 4 for begin, end in itertools.pairwise([0, *ends[:-1]]))
    pieces = PackedTexts(data=data, offsets=np.array([0, *ends], np.int64))
    pieces.strings()  # no character is cut
    assert (
        HuggingFaceEngine(made).encode(pieces)[0].tolist()
        == HuggingFaceEngine(made).encode(PackedTexts.of([text]))[0].tolist()
    )


def test_a_place_to_cut_is_found_across_windows() -> None:
    for shift in range(40):
        data = np.frombuffer(("漢" * 21_830 + "x" * shift + "é\n漢" + "." * 100).encode(), np.uint8)
        assert next(split_points(data, 10)) == 3 * 21_830 + shift + 3


@given(texts=st.lists(st.text(max_size=20), max_size=8))
def test_texts_keep_their_strings_and_know_their_code_points(texts: list[str]) -> None:
    made = PackedTexts.of(texts)
    assert made.strings() == texts
    found = texts_holding(made, doubtful_table(), FIRST_UNASSIGNED_LEAD)
    assert found.tolist() == [any(unicodedata.category(c) == "Cn" or c == "\u180e" for c in text) for text in texts]
    mask = np.array([len(text) % 2 == 0 for text in texts], np.bool_)
    assert made.take(mask).strings() == [text for text in texts if len(text) % 2 == 0]


@given(texts=st.lists(st.text(max_size=20), max_size=12), size=st.integers(1, 50), count=st.integers(1, 5))
def test_pieces_stay_within_their_bounds_and_lose_nothing(texts: list[str], size: int, count: int) -> None:
    found = list(PackedTexts.of(texts).split(size, count))
    assert [text for piece in found for text in piece.strings()] == texts
    assert all(len(piece) <= count and (len(piece) == 1 or len(piece.used) <= size) for piece in found)


@pytest.mark.slow
def test_a_fast_engine_runs_where_the_form_of_the_tokenizer_is_known_alone() -> None:
    assert {kind: engine(kind, "auto")[1] for kind in KINDS} == {
        "gpt2": "gigatoken",
        "llama3": "gigatoken",
        "qwen2 with NFC": "gigatoken",
        "llama3 with added tokens": "gigatoken",
        "metaspace with byte fallback": "gigatoken",
        "words": "huggingface",
    }


def test_routed_texts_are_counted_and_come_back_in_their_place() -> None:
    routed, name = engine("llama3", "auto")
    before = routed.routed
    same("llama3", "auto", ["a", "new digit \U00011de1\U00011de2 1", "b", "", "x \u0378", "c"])
    assert name == "gigatoken"
    assert routed.routed - before == 2


class Lying(HuggingFaceEngine):
    """Gives every text one id too many."""

    def __init__(self, definition: str) -> None:
        super().__init__(Tokenizer.from_str(definition))

    def encode(self, texts: PackedTexts) -> engines.Encoded:
        return np.zeros(len(texts), np.uint32), np.ones(len(texts), np.int64)


@pytest.mark.slow
def test_an_engine_that_differs_or_fails_is_left_out_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    engines._built.clear()  # or the engine of the test before is taken, where it had the same tokenizer
    monkeypatch.setitem(libraries.FAST_ENGINES, "gigatoken", Lying)
    told: list[str] = []
    selection = select_engine("auto", tokenizer("gpt2"), PackedTexts.of(["x"]), told.append)
    assert selection.engine == "huggingface"
    assert "gigatoken gives other ids than Hugging Face's tokenizers for" in told[0]
    assert "going on without gigatoken" in told[1]
    told.clear()
    assert select_engine("bytes", tokenizer("gpt2"), PackedTexts.of(["x"]), told.append).engine == "huggingface"
    assert "bytes is not known to be exact for this kind of tokenizer" in told[0]


def test_pieces_of_text_are_found_in_the_text_that_holds_them_alone() -> None:
    texts = PackedTexts.of(["", "ab", "", "c", "abab", "a", "b", "xab"])
    assert texts_holding_bytes(texts, (b"ab",)).tolist() == [False, True, False, False, True, False, False, True]
    assert texts_holding_bytes(texts, ()).any() is np.False_
    assert (
        texts_holding_bytes(texts.take(np.array([0, 0, 0, 0, 0, 1, 1, 0], np.bool_)), (b"ab",)).tolist() == [False] * 2
    )
