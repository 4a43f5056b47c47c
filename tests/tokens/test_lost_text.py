"""What a tokenizer does not know is counted and named: no traceback, and no text that silently vanishes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from relayrun.errors import InputError
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dump_status import read_status, status_table
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.encode.libraries import HuggingFaceEngine
from relayrun.tokens.tokenize.encode.losses import LossCounter, describe_losses
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import TokenizeResult, tokenize_paths_file
from relayrun.tokens.tokenize.shard_folder import FolderRecord
from relayrun.tokens.tokenize.verify import verify_dumps
from tests.tokenization_corpus import dump_settings, train_tokenizer

WORDS = {"the": 0, "cat": 1, "sat": 2, "<eos>": 3}
LETTERS = {letter: number for number, letter in enumerate("acehst")} | {"<eos>": 6}
MODELS = {
    "wordlevel": lambda: models.WordLevel(WORDS),
    "wordlevel with unk": lambda: models.WordLevel(WORDS | {"<unk>": 4}, unk_token="<unk>"),
    "unigram": lambda: models.Unigram([(letter, -1.0) for letter in LETTERS], None),
    "bpe": lambda: models.BPE(LETTERS, []),
}


def tokenize(folder: Path, model: str, texts: list[str], **options: Any) -> TokenizeResult:
    tokenizer = Tokenizer(MODELS[model]())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "paths").write_text("a.jsonl\n")
    given = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"), eos_token="<eos>", workers=1, **options)
    return tokenize_paths_file(given, output_folder=folder / "out", dataset=folder, paths_file=folder / "paths")


@pytest.mark.parametrize("model", ["wordlevel", "unigram"])
def test_a_text_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path, model: str) -> None:
    texts = ["the cat", "sat", "the dog", "cat"]
    with pytest.raises(InputError, match="the tokenizer does not know this text") as caught:
        tokenize(tmp_path, model, texts)
    assert f"{tmp_path}/a.jsonl, text 3" in str(caught.value)
    result = tokenize(tmp_path, model, texts, on_error="skip-line")
    assert (result.documents, result.bad_lines) == (3, {"not known to the tokenizer": 1})


def test_letters_and_documents_that_are_dropped_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    result = tokenize(tmp_path, "bpe", ["the cat", "", "ωδή", "a dog", " "])
    assert result.losses == {"lost letters": 6, "lost documents": 1}
    assert (result.documents, result.empty_documents) == (2, 2)
    words = "6 letters have no id and are dropped, 1 documents lose all of their text"
    assert f"{tmp_path}/out: the tokenizer does not know this text: {words}" in caplog.text
    (task,) = FolderRecord.read(tmp_path / "out").tasks.values()
    assert (task.losses, task.file_rows) == (result.losses, [5])


def test_ids_of_the_unknown_token_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = tokenize(tmp_path, "wordlevel with unk", ["the dog sat", "a cat"])
    assert result.losses == {"unknown ids": 2}
    assert "2 of 7 ids are its unknown token" in caplog.text


def test_a_text_of_which_nothing_is_known_is_not_called_empty(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no document with text") as caught:
        tokenize(tmp_path, "bpe", ["ωδή"])
    assert "1 documents lose all of their text" in str(caught.value)


def test_a_tokenizer_of_bytes_loses_nothing(tmp_path: Path) -> None:
    definition = Tokenizer.from_file(str(train_tokenizer(tmp_path / "tokenizer.json"))).to_str()
    texts = PackedTexts.of(["ωδή 🐈", "", "the cat"])
    encoded = HuggingFaceEngine(Tokenizer.from_str(definition)).encode(texts)
    losses = LossCounter(definition).count(texts, encoded)
    assert describe_losses(losses, 10) is None
    assert not losses


def losses_of(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    texts = PackedTexts.of([text])
    return dict(LossCounter(tokenizer.to_str()).count(texts, HuggingFaceEngine(tokenizer).encode(texts)))


@pytest.mark.parametrize("spaces", ["as letters", "in front", "as a normalizer"])
def test_bytes_that_the_vocabulary_lacks_are_counted(spaces: str) -> None:
    """`tokenizers` trains a byte-level BPE on the bytes that it sees, unless the alphabet is given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaces == "in front")
    if spaces == "as a normalizer":
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.ByteLevel(), pre_tokenizers.Split(" ", "isolated")
    tokenizer.train_from_iterator(["hello cafã nave " * 5], trainers.BpeTrainer())
    assert losses_of(tokenizer, "hello cafã nave") == {}
    # one of the two bytes of each accented letter is known, and decodes to none
    assert losses_of(tokenizer, "café naïve hello QUX 123") == {"lost letters": 8}
    tokenizer.add_tokens([AddedToken("é", normalized=False)])
    assert losses_of(tokenizer, "café") == {}


@pytest.mark.parametrize("front", [False, True])
def test_pieces_of_bytes_that_the_vocabulary_lacks_are_counted(front: bool) -> None:
    letters = {letter: number for number, letter in enumerate(["\u2581", *"acfehlo", "<0xC3>", "<0xA9>"])}
    tokenizer = Tokenizer(models.BPE(letters, [], byte_fallback=True))
    if front:  # of every letter alone, too: the sign in front has an id
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert losses_of(tokenizer, "café hello QUXï 123") == {"lost letters": 7}
    more = [f"<0x{byte:02X}>" for byte in range(256)]
    whole = letters | {piece: 10 + number for number, piece in enumerate(more)}
    assert losses_of(Tokenizer(models.BPE(whole, [], byte_fallback=True)), "QUXï 123") == {}


def test_status_and_verify_tell_what_a_tokenizer_loses(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    tokenizer = Tokenizer(MODELS["bpe"]())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (data / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["the cat", "a dog", "hat"]))
    settings = dump_settings(tmp_path, tmp_path / "tokenizer.json", eos_token="<eos>", workers=1)
    prepare_dumps(data, settings.metadata_folder)
    for index in prepare_submission(settings):
        tokenize_dump(settings, index)
    lines = status_table(read_status(settings.metadata_folder)).splitlines()
    size = (data / "a.jsonl").stat().st_size
    assert f"{13 / size:.3f} tokens a byte of the files" in lines
    assert "dump 0: the tokenizer does not know this text: 3 letters have no id and are dropped" in lines
    (verified,) = verify_dumps(settings.metadata_folder, workers=1)
    assert not verified.faults
    assert "3 documents tokenized again (3 do not decode to their text)" in verified.summary()  # without a decoder
