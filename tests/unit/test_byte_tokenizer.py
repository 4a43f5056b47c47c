"""The tokenizer of bytes, and the loss mask by characters that genomes are trained with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relayrun.cli import main
from relayrun.data import documents
from relayrun.data.run_tokenizer import ids_of_characters
from relayrun.errors import ConfigError
from relayrun.tokenization.byte_tokenizer import byte_tokenizer
from relayrun.tokenization.encode.tokenizer import load_tokenizer
from relayrun.tokenization.options import TokenizeOptions
from tests.workspace import Workspace

BASES = [65, 67, 71, 84, 97, 99, 103, 116]


def test_a_byte_is_a_token_and_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ids of the published nucleotide tokenizer: ASCII, EOS 0, PAD 1, BOS 2, UNK 3."""
    assert main(["dumps", "tokenizer", "--bytes", "--output-folder", str(tmp_path / "t")]) == 0
    assert "<EOS>, <PAD>, <BOS>, <UNK> are the tokens 0 to 3" in capsys.readouterr().out
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(tmp_path / "t")))
    assert (loaded.size, loaded.eos_token, loaded.eos_id, loaded.dtype) == (256, "<EOS>", 0, np.uint16)
    encode = loaded.tokenizer.encode
    for text in ("ACGTNRYacgt", "@x#<EOS> \n\u00e9\U0001f9ec", "".join(map(chr, range(4, 128)))):
        assert encode(text, add_special_tokens=False).ids == [*text.encode()]
        assert loaded.tokenizer.decode([*text.encode()], skip_special_tokens=False) == text
    assert encode("a\0\x03b", add_special_tokens=False).ids == [97, 3, 3, 98]
    assert main(["dumps", "tokenizer", "--bytes", "--output-folder", str(tmp_path / "t")]) == 1
    assert "there is a tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_transformers_opens_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path))
    assert (opened.eos_token_id, opened.pad_token_id, opened.bos_token_id, opened.unk_token_id) == (0, 1, 2, 3)
    assert opened("ACGTN")["input_ids"] == [65, 67, 71, 84, 78]


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--bytes", "--dataset-folder", "x"], "--bytes reads no text"), ([], "a tokenizer is trained on text")],
)
def test_one_of_the_two_makes_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["dumps", "tokenizer", "--output-folder", str(tmp_path / "t"), *options]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_characters_are_tokens_or_refused(tmp_path: Path) -> None:
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(byte_tokenizer(tmp_path / "t"))))
    assert sorted(ids_of_characters("ACGTacgtA", loaded)) == BASES
    with pytest.raises(ConfigError, match=r"'\u00e9' is no token of this tokenizer"):
        ids_of_characters("A\u00e9", loaded)


def test_a_target_counts_where_it_is_one_of_the_tokens() -> None:
    counted = np.isin(np.arange(256), BASES)
    rows = np.array([[2, *b"ACNgR@t", 0], [2, *b"NNNNNNN", 0]])
    expected = [[target in BASES for target in row] for row in rows[:, 1:].tolist()]
    found = documents.counted_targets(rows[:, 1:], counted)
    assert found.dtype == np.float32
    assert found.tolist() == expected


def test_a_submit_refuses_characters_that_are_no_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Workspace.make(tmp_path).config("run")
    assert main(["submit", str(config), "--set", "data.mask_tokens_except=ACGT"]) == 1
    error = capsys.readouterr().err
    assert "the character 'A' is no token" in error
    assert "data.mask_tokens_except" in error
    assert not (tmp_path / "run").exists()
