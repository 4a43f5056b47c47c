from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from relayrun.errors import InputError
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.engines import HuggingFaceEngine
from relayrun.tokens.tokenize.encode.tokenizer import DocumentFraming, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from tests.tokenization_corpus import EOS, TEXTS, expected_ids, train_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return train_tokenizer(tmp_path / "tok" / "tokenizer.json")


def encode(file: Path, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(file)))
    return loaded.framing(keep_empty=False).apply(*HuggingFaceEngine(loaded.tokenizer).encode(PackedTexts.of(texts)))


def word_tokenizer(folder: Path, words: dict[str, int], special: tuple[str, ...]) -> Path:
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.slow
def test_ids_are_those_of_hugging_face_with_the_eos_behind_each_text(file: Path) -> None:
    texts = [*TEXTS, "x" * 100_000, "word " * 200_000, "漢" * 50_000]
    ids, lengths = encode(file, texts)
    expected = expected_ids(file, texts)
    assert lengths.tolist() == [len(document) for document in expected]
    assert ids.tolist() == [token for document in expected for token in document]


def test_neither_template_nor_truncation_nor_special_text_gives_special_ids(file: Path) -> None:
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=str(file)))
    ids, lengths = encode(file, [f"a{EOS}b<s>" * 20])
    assert lengths[0] > 16
    assert tokenizer.tokenizer.token_to_id("<s>") not in ids
    assert np.flatnonzero(ids == tokenizer.eos_id).tolist() == [len(ids) - 1]


def test_a_folder_and_its_file_are_the_same_tokenizer(file: Path) -> None:
    by_file, by_folder = (
        load_tokenizer(TokenizeOptions(tokenizer=str(file))),
        load_tokenizer(TokenizeOptions(tokenizer=str(file.parent))),
    )
    assert by_file.fingerprint == by_folder.fingerprint
    assert by_file.eos_token == by_folder.eos_token == EOS


@pytest.mark.parametrize("value", ["<s>", {"content": "<s>", "special": True}])
def test_the_configuration_beside_the_tokenizer_names_the_eos(file: Path, value: object) -> None:
    (file.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    assert load_tokenizer(TokenizeOptions(tokenizer=str(file))).eos_token == "<s>"
    assert load_tokenizer(TokenizeOptions(tokenizer=str(file), eos_token=EOS)).eos_token == EOS


def test_an_eos_that_the_tokenizer_does_not_have_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"has no token '</end>'.*\n.*--eos-token"):
        load_tokenizer(TokenizeOptions(tokenizer=str(file), eos_token="</end>"))


def test_without_any_or_with_several_usual_eos_tokens_the_option_is_asked_for(tmp_path: Path) -> None:
    nothing = word_tokenizer(tmp_path / "a", {"unk": 0, "x": 1}, ())
    with pytest.raises(InputError, match=r"names none\n.*--eos-token"):
        load_tokenizer(TokenizeOptions(tokenizer=str(nothing)))
    several = word_tokenizer(tmp_path / "b", {"unk": 0}, ("</s>", "<eos>"))
    with pytest.raises(InputError, match=r"several that could be it: </s>, <eos>\n.*--eos-token"):
        load_tokenizer(TokenizeOptions(tokenizer=str(several)))


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_the_token_type_counts_added_tokens(tmp_path: Path, entries: int, dtype: type[np.generic]) -> None:
    words = {"unk": 0} | {f"w{i}": i for i in range(1, entries - 1)}
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(word_tokenizer(tmp_path / "t", words, ("</s>",)))))
    assert loaded.size == entries
    assert loaded.dtype is dtype


def test_ids_above_the_number_of_entries_fit_into_the_token_type(tmp_path: Path) -> None:
    file = word_tokenizer(tmp_path / "t", {"unk": 0, "far": 70_000}, ("</s>",))
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(file)))
    assert loaded.dtype is np.int32
    assert encode(file, ["far"])[0].tolist() == [70_000, loaded.eos_id]


def test_unknown_and_broken_tokenizers_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such tokenizer file"):
        load_tokenizer(TokenizeOptions(tokenizer=str(tmp_path / "missing")))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(TokenizeOptions(tokenizer=str(tmp_path)))


@pytest.mark.parametrize("place", ["file", "folder"])
def test_dropout_of_merges_is_switched_off_with_a_warning(
    file: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load_tokenizer(TokenizeOptions(tokenizer=str(file)))
    expected = [part.tolist() for part in encode(file, TEXTS)]
    assert not caplog.messages
    known = json.loads(file.read_text())
    known["model"]["dropout"] = 0.3
    file.write_text(json.dumps(known))
    options = TokenizeOptions(tokenizer=str(file if place == "file" else file.parent))
    for _ in range(2):  # the second time it is remembered, and said all the same
        caplog.clear()
        loaded = load_tokenizer(options)
        assert ["dropout 0.3" in message and "switched off" in message for message in caplog.messages] == [True]
        assert (loaded.fingerprint, loaded.ids_fingerprint) == (plain.fingerprint, plain.ids_fingerprint)
        ids, lengths = loaded.framing(keep_empty=False).apply(
            *HuggingFaceEngine(loaded.tokenizer).encode(PackedTexts.of(TEXTS))
        )
        assert [ids.tolist(), lengths.tolist()] == expected


@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize(("bos", "eod"), [(None, None), (1, None), (None, 2), (1, 2), (2, 2)])
def test_long_and_short_texts_are_framed_alike(bos: int | None, eod: int | None, keep_empty: bool) -> None:
    """Long texts are copied one by one, short ones through a mask."""
    framing = DocumentFraming(bos_id=bos, eod_id=eod, dtype="int32", keep_empty=keep_empty)
    generator = np.random.default_rng(1)
    for sizes in ([], [0], [0, 0, 0], [9000, 0, 7000], [3, 0, 1], [0, 12_000, 1, 0], [1999], [2000], [2001, 2000]):
        texts = [generator.integers(5, 99, size, dtype=np.uint32) for size in sizes]
        ids, lengths = framing.apply(np.concatenate([np.empty(0, np.uint32), *texts]), np.array(sizes, np.int64))
        begin, end = [bos] * (bos is not None), [eod] * (eod is not None)
        expected = [[*begin, *text.tolist(), *end] if len(text) else [] for text in texts if keep_empty or len(text)]
        assert [ids.tolist(), lengths.tolist()] == [[id_ for text in expected for id_ in text], [*map(len, expected)]]
        assert ids.dtype == np.int32
