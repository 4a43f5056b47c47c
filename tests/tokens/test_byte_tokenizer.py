"""The tokenizer of bytes, and the loss mask by characters that genomes are trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from relayrun.cli import main
from relayrun.config.sections.data import DataSection
from relayrun.errors import ConfigError
from relayrun.tokens.order import sample_rows
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.streams.run_tokenizer import character_token_ids
from relayrun.tokens.tokenize.encode.engines import EngineSelection, select_engine
from relayrun.tokens.tokenize.encode.families import plan_engine
from relayrun.tokens.tokenize.encode.libraries import HuggingFaceEngine
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.encode.tokenizer_files import byte_letters, write_byte_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
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
    assert main(["dumps", "tokenizer", "--bytes", "--output-folder", str(tmp_path / "t")]) == 0
    assert "this is done already" in capsys.readouterr().err
    (tmp_path / "t" / "tokenizer.json").write_text("another")
    assert main(["dumps", "tokenizer", "--bytes", "--output-folder", str(tmp_path / "t")]) == 1
    assert "there is a tokenizer" in capsys.readouterr().err


TOKENIZERS: dict[str, dict[str, Any]] = {
    "as it is made": {},
    "every byte, other ids": {"whole": True, "shift": 7},
    "an unknown token, few letters": {"letters": "ACGTN", "shift": 300},
    "cuts by GPT-2's pattern": {"whole": True, "use_regex": True},
    "names that nothing makes": {"whole": True, "names": ["the", "<EOS>", " a"]},
    "added tokens": {"added": ["<s>", "AC", "\n"]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "a merge": {"whole": True, "merges": [("A", "C")], "names": ["AC"]},
    "unknown ones become one": {"fuse_unk": True},
    "whole words": {"whole": True, "ignore_merges": True, "names": ["the"]},
    "a letter is missing": {"letters": "ACGTN", "unk_token": None},
    "a normalizer": {"normalizer": normalizers.Lowercase()},
    "a space before": {"whole": True, "add_prefix_space": True},
}


def made(
    *,
    whole: bool = False,
    letters: str = "",
    shift: int = 0,
    names: Sequence[str] = (),
    added: Sequence[str] = (),
    merges: Sequence[tuple[str, str]] = (),
    normalizer: Any = None,
    use_regex: bool = False,
    add_prefix_space: bool = False,
    **model: Any,
) -> Tokenizer:
    """A byte-level BPE; without `letters` and `whole` all bytes but the first four have tokens."""
    every = byte_letters()
    known = letters or every[0 if whole else 4 :]
    ids = {letter: number + shift for number, letter in enumerate(known)}
    ids |= {name: len(ids) + shift + number for number, name in enumerate(names)}
    unknown = None if whole else "<UNK>"
    if unknown:
        ids[unknown] = 0 if shift else len(ids)
    tokenizer = Tokenizer(models.BPE(ids, [*merges], **{"unk_token": unknown} | model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([*added])
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("options", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.text(max_size=60) | st.text("ACGTN\n", max_size=60) | st.sampled_from(["<EOS>", "<s>"]), max_size=6
    )
)
@example(texts=[])
@example(texts=["", "ACGT", "", "the <EOS> a\0\x03", "é漢🧬"])
def test_a_table_gives_the_ids_of_the_reference(options: dict[str, Any], texts: list[str]) -> None:
    tokenizer = made(**options)
    plan = plan_engine(tokenizer.to_str())
    assert plan is not None
    assert plan.engine == "bytes"
    selection = EngineSelection(engine="bytes", version="1", plan=plan)
    some = PackedTexts.of(["before", *texts, "behind"])
    given_ = PackedTexts(data=some.data, offsets=some.offsets[1:-1])
    ids, lengths = selection.build(tokenizer.to_str()).encode(given_)
    right, of_each = HuggingFaceEngine(tokenizer).encode(given_)
    assert ids.dtype == np.uint32
    assert ids.tolist() == right.tolist()
    assert lengths.tolist() == of_each.tolist()


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_a_tokenizer_that_is_almost_one_of_bytes_gets_no_table(options: dict[str, Any]) -> None:
    plan = plan_engine(made(**options).to_str())
    assert plan is None or plan.engine != "bytes"


@pytest.mark.slow
def test_the_table_proves_itself_and_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYRUN_CACHE", "")
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(write_byte_tokenizer(tmp_path / "t"))))
    said: list[str] = []
    for wanted in ("auto", "bytes"):
        assert select_engine(wanted, loaded.tokenizer, PackedTexts.of(["ACGT"]), said.append).engine == "bytes"
    assert said == []
    assert select_engine("gigatoken", loaded.tokenizer, PackedTexts.of(["ACGT"]), said.append).engine == "huggingface"
    assert said


@pytest.mark.slow
def test_transformers_opens_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(write_byte_tokenizer(tmp_path))
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
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(write_byte_tokenizer(tmp_path / "t"))))
    assert sorted(character_token_ids("ACGTacgtA", loaded)) == BASES
    with pytest.raises(ConfigError, match=r"'\u00e9' is no token of this tokenizer"):
        character_token_ids("A\u00e9", loaded)


def test_a_target_counts_where_it_is_one_of_the_tokens() -> None:
    data = DataSection.model_validate({"tokenizer": "none", "mock_data": True, "mask_tokens_except": "ACGTacgt"})
    data = data.model_copy(update={"mask_tokens_except": "ACGTacgt"})  # without effect on made-up data
    masks = sample_rows.RowMasks(data, eod=None, counted=np.array(BASES), vocabulary_size=256)
    rows = np.array([[2, *b"ACNgR@t", 0], [2, *b"NNNNNNN", 0]])
    expected = [[target in BASES for target in row] for row in rows[:, 1:].tolist()]
    found = masks.loss(sample_rows.RowBatch(tokens=rows))
    assert found is not None
    assert found.dtype == np.float32
    assert found.tolist() == expected


def test_a_submit_refuses_characters_that_are_no_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Workspace.make(tmp_path).config("run")
    assert main(["submit", str(config), "--set", "data.mask_tokens_except=ACGT"]) == 1
    error = capsys.readouterr().err
    assert "the character 'A' is no token" in error
    assert "data.mask_tokens_except" in error
    assert not (tmp_path / "run").exists()
