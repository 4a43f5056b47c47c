"""The engine of a job is proven by its own texts, and options decide what a tokenizer is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode import engines
from relayrun.tokens.tokenize.encode.engines import EngineSelection, HuggingFaceEngine, select_engine
from relayrun.tokens.tokenize.encode.tokenizer import DocumentTokenizer, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from tests.published import small

EOS = "<|endoftext|>"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(small("GPT-2")), indent=1), encoding="utf-8")
    return tmp_path / "tokenizer.json"


def load(file: Path, **options: object) -> DocumentTokenizer:
    return load_tokenizer(TokenizeOptions(tokenizer=str(file), eos_token=EOS, **options))  # type: ignore[arg-type]


def chosen(loaded: DocumentTokenizer, texts: PackedTexts) -> tuple[EngineSelection, list[str]]:
    told: list[str] = []
    engines._build_engine.cache_clear()
    return select_engine("auto", lambda: loaded.tokenizer, texts, told.append, definition=loaded.definition), told


@pytest.mark.slow
def test_a_wrong_engine_is_found_by_other_texts_of_the_job(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(file)
    assert chosen(loaded, PackedTexts.of(["a text"]))[0].engine == "gigatoken"

    def misread(self: object, texts: PackedTexts) -> object:
        words = [text.replace("another", "any other") for text in texts.strings()]
        return HuggingFaceEngine(loaded.tokenizer).encode(PackedTexts.of(words))

    monkeypatch.setattr(engines.RoutedEngine, "encode", misread)
    selection, told = chosen(loaded, PackedTexts.of(["another text"]))
    assert selection.engine == "huggingface"
    assert "gives other ids" in told[0]


def test_options_decide_the_end_and_the_special_tokens(file: Path) -> None:
    assert load(file).eos_id is not None
    assert load(file, append_eod="no").eos_id is None
    assert load(file, special_text=True).fingerprint != load(file).fingerprint
