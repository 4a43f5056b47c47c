"""What an earlier start found out: taken where nothing has changed, and never where something has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode import engines, tokenizer_files
from relayrun.tokens.tokenize.encode import tokenizer as loading
from relayrun.tokens.tokenize.encode.engines import EngineSelection, HuggingFaceEngine, select_engine
from relayrun.tokens.tokenize.encode.tokenizer import DocumentTokenizer, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.trust import read_cache
from tests.published import small

EOS = "<|endoftext|>"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAYRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(small("GPT-2")), indent=1), encoding="utf-8")
    return tmp_path / "tokenizer.json"


def load(file: Path, **options: object) -> DocumentTokenizer:
    return load_tokenizer(TokenizeOptions(tokenizer=str(file), eos_token=EOS, **options))  # type: ignore[arg-type]


def chosen(loaded: DocumentTokenizer, texts: PackedTexts) -> tuple[EngineSelection, list[str]]:
    told: list[str] = []
    engines._built.clear()
    return select_engine("auto", lambda: loaded.tokenizer, texts, told.append, definition=loaded.definition), told


def never(*arguments: object, **options: object) -> None:
    raise AssertionError("this was known")


@pytest.mark.slow
def test_the_second_start_loads_no_reference_and_gives_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, sample = load(file), PackedTexts.of(["a text", "don't 12"])
    selection, _ = chosen(first, sample)
    with monkeypatch.context() as patched:
        for module in (engines, loading):
            patched.setattr(module, "Tokenizer", never)
        patched.setattr(engines, "HuggingFaceEngine", never)
        second = load(file)
        assert second == first
        # isinstance needs a class
        patched.setattr(engines, "Tokenizer", Tokenizer)
        assert chosen(second, sample) == (selection, [])
        assert "tokenizer" not in vars(second)
    texts = PackedTexts.of(["a text", "\u180e elsewhere", EOS])
    right = HuggingFaceEngine(first.tokenizer).encode(texts)[0].tolist()
    assert selection.build(second.definition).encode(texts)[0].tolist() == right


def rewritten(file: Path) -> None:
    known = json.loads(file.read_text(encoding="utf-8"))
    known["model"]["merges"].pop()
    file.write_text(json.dumps(known), encoding="utf-8")


def cut_short(file: Path) -> None:
    for kept in (file.parent / "cache" / "tokenizers").iterdir():
        kept.write_bytes(kept.read_bytes()[:-1])


def flipped(file: Path) -> None:
    for kept in (file.parent / "cache" / "tokenizers").iterdir():
        data = bytearray(kept.read_bytes())
        data[-1] ^= 1
        kept.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("change", [rewritten, cut_short, flipped])
def test_another_tokenizer_and_a_damaged_value_are_looked_at_anew(
    file: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = PackedTexts.of(["a text"])
    chosen(load(file), sample)
    change(file)
    proofs: list[str] = []
    monkeypatch.setattr(engines, "edge_cases", lambda tokenizer: proofs.append("edge cases") or ["a"])
    again = load(file)
    assert "tokenizer" in vars(again)
    assert again.definition == Tokenizer.from_file(str(file)).to_str()
    chosen(again, sample)
    assert proofs == ["edge cases"]


@pytest.mark.slow
def test_a_wrong_engine_is_found_by_other_texts_of_the_job(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(file)
    assert chosen(loaded, PackedTexts.of(["a text"]))[0].engine == "gigatoken"
    monkeypatch.setattr(
        engines.RoutedEngine,
        "encode",
        lambda self, texts: HuggingFaceEngine(loaded.tokenizer).encode(PackedTexts.of([])),
    )
    selection, told = chosen(loaded, PackedTexts.of(["another text"]))
    assert selection.engine == "huggingface"
    assert "gives other ids" in told[0]


def test_options_code_libraries_and_processor_are_part_of_the_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(file).eos_id is not None
    assert load(file, append_eod="no").eos_id is None
    assert load(file, special_text=True).fingerprint != load(file).fingerprint
    names = {tokenizer_files.cache_key("proof", (b"a", b"b"), ("tokenizers", "gigatoken"))}
    names |= {tokenizer_files.cache_key(*each) for each in (("proof", (b"ab", b""), ("tokenizers", "gigatoken")),)}
    names |= {
        tokenizer_files.cache_key("proof", (b"a", b"b"), ("tokenizers",)),
        tokenizer_files.cache_key("p", (b"a", b"b"), ()),
    }
    monkeypatch.setattr(tokenizer_files, "_package_record", lambda package: b"another build")
    names |= {tokenizer_files.cache_key("proof", (b"a", b"b"), ("tokenizers", "gigatoken"))}
    monkeypatch.undo()
    monkeypatch.setattr(tokenizer_files, "_code_and_machine", lambda: b"other code")
    names |= {tokenizer_files.cache_key("proof", (b"a", b"b"), ("tokenizers", "gigatoken"))}
    assert len(names) == 6


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "/proc/nowhere"])
def test_where_nothing_can_be_kept_everything_works(file: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYRUN_CACHE", folder)
    assert load(file) == load(file)
    assert "tokenizer" in vars(load(file))
    assert not (file.parent / "cache").exists()


def test_what_others_can_have_written_is_not_believed(file: Path) -> None:
    load(file)
    (kept,) = (file.parent / "cache" / "tokenizers").iterdir()
    assert read_cache("tokenizers", kept.name) is not None
    kept.chmod(0o620)
    assert read_cache("tokenizers", kept.name) is None
    kept.chmod(0o600)
    kept.parent.chmod(0o770)
    assert read_cache("tokenizers", kept.name) is None


def test_what_is_kept_is_for_its_owner_alone(file: Path) -> None:
    load(file)
    (kept,) = (file.parent / "cache" / "tokenizers").iterdir()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
