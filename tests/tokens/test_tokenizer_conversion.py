"""A tokenizer without a tokenizer.json is converted where that is exact, or refused with what to do."""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from relayrun.errors import InputError
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from tests.tokenization_corpus import EOS, TEXTS, train_tokenizer


def load(place: Path) -> Tokenizer:
    return load_tokenizer(TokenizeOptions(tokenizer=str(place))).tokenizer


def configure(folder: Path, kind: str, eos: str) -> None:
    text = json.dumps({"tokenizer_class": kind, "eos_token": eos, "unk_token": None})
    (folder / "tokenizer_config.json").write_text(text)


def sentencepiece(file: Path) -> Path:
    """A Unigram model as SentencePiece writes it; the package itself is not needed for that."""
    try:  # a process takes the description of the format from one place alone
        from sentencepiece import sentencepiece_model_pb2 as proto
    except ImportError:
        from transformers.utils import sentencepiece_model_pb2_new as proto

    model = proto.ModelProto()
    generator = random.Random(0)
    letters = sorted(set("".join(TEXTS)) - set(" \n\r\t\0"))
    words = {"".join(generator.choices(letters, k=2)) for _ in range(300)}
    control, normal, unknown = 3, 1, 2
    pieces = [("<pad>", control), ("</s>", control), ("<unk>", unknown)]
    for piece, kind in [*pieces, *((piece, normal) for piece in ["\u2581", *letters, "\u2581the", *sorted(words)])]:
        added = model.pieces.add()
        added.piece, added.score, added.type = piece, -generator.random() * 9 if kind == normal else 0.0, kind
    model.trainer_spec.model_type = 1
    model.trainer_spec.unk_id = 2
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = True
    file.write_bytes(model.SerializeToString())
    return file


def tiktoken(file: Path) -> Path:
    file.write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)))
    return file


@pytest.mark.slow
def test_vocabulary_and_merges_with_a_configuration_are_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = json.loads(train_tokenizer(tmp_path / "made" / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(made["vocab"]))
    merges = "".join(" ".join(merge) + "\n" for merge in made["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    configure(folder, "GPT2Tokenizer", EOS)
    found = load_tokenizer(TokenizeOptions(tokenizer=str(folder)))
    whole = load(tmp_path / "made")
    for text in TEXTS:
        ids = found.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == whole.encode(text, add_special_tokens=False).ids
    assert found.eos_token == EOS
    assert f"{folder}: there is no tokenizer.json; transformers converted the tokenizer" in caplog.messages


def test_a_model_of_sentencepiece_is_converted_to_its_own_ids(tmp_path: Path) -> None:
    package = pytest.importorskip("sentencepiece")
    model = sentencepiece(tmp_path / "spiece.model")
    configure(tmp_path, "T5Tokenizer", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>", "extra_ids": 0})
    )
    found, own = load(tmp_path), package.SentencePieceProcessor(model_file=str(model))
    for text in TEXTS[:5]:
        text = " ".join(text.split())
        assert found.encode(text, add_special_tokens=False).ids == own.encode(text)


def test_what_cannot_be_converted_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sentencepiece(tmp_path / "tokenizer.model")
    with pytest.raises(InputError, match=r"(?s)is a model of SentencePiece.*the folder that holds it"):
        load(model)
    with pytest.raises(
        InputError, match=r"(?s)no tokenizer\.json here; tokenizer\.model alone.*tokenizer_config\.json"
    ):
        load(tmp_path)
    configure(tmp_path, "LlamaTokenizer", "</s>")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(InputError, match=r"(?s)takes the package sentencepiece.*pip install.*save_pretrained"):
        load(tmp_path)
    tiktoken(model)
    for place in (model, tmp_path):
        with pytest.raises(InputError, match=r"(?s)is a tiktoken file, which does not say how.*TikTokenConverter"):
            load(place)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"(?s)empty: there is no tokenizer\.json here\n"):
        load(empty)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "vocab.json").write_text("{}")
    text = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(text))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    with pytest.raises(InputError, match="no such tokenizer: "):
        load(tmp_path)
