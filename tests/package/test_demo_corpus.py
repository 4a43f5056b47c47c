"""The demo's corpus: real, learnable, deterministic, nothing held out that is trained on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relayrun.errors import ConfigError, InputError
from relayrun.files import write_json
from relayrun.lab.corpus import TextSet, build_corpus, is_learnable
from relayrun.tokens.tokenize.encode import tokenizer_files as module
from relayrun.tokens.tokenize.encode.tokenizer_files import write_byte_tokenizer
from relayrun.tokens.tokenize.train_tokenizer import BOS_TOKEN, EOS_TOKEN, train_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextSet]:
    return build_corpus(tmp_path_factory.mktemp("demo") / "corpus", megabytes=3)


def rows(folder: Path) -> list[tuple[str, str]]:
    return [
        (row["path"], row["text"])
        for file in sorted(folder.iterdir())
        for row in pq.read_table(file).select(["path", "text"]).to_pylist()
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_sets_have_the_wanted_sizes_and_say_so(corpus: dict[str, TextSet]) -> None:
    for made, least in ((corpus["docs"], 1_800_000), (corpus["code"], 1_200_000), (corpus["heldout"], 200)):
        texts = [text for _, text in rows(made.folder)]
        assert made.documents == len(texts)
        assert made.bytes == sum(len(text.encode()) for text in texts)
        assert made.bytes >= least
    assert corpus["docs"].bytes + corpus["code"].bytes >= 3_000_000
    assert sorted(os.listdir(corpus["docs"].folder)) == [f"part-00{i}.parquet" for i in range(4)]
    record = json.loads((corpus["docs"].folder.parent / "corpus.json").read_text())
    assert record["sets"]["code"] == {"documents": corpus["code"].documents, "bytes": corpus["code"].bytes}


def test_files_are_snappy_of_about_equal_size_and_hold_text_and_path(corpus: dict[str, TextSet]) -> None:
    for made in corpus.values():
        for file in made.folder.iterdir():
            metadata = pq.ParquetFile(file).metadata
            assert metadata.schema.names == ["text", "path"]
            assert metadata.row_group(0).column(0).compression == "SNAPPY"
            assert metadata.num_rows > 0


def test_no_document_stands_twice_or_in_two_sets(corpus: dict[str, TextSet]) -> None:
    texts = [text for made in corpus.values() for _, text in rows(made.folder)]
    assert len({hashlib.sha256(text.encode()).digest() for text in texts}) == len(texts)


def test_the_text_is_learnable_and_paths_are_relative(corpus: dict[str, TextSet]) -> None:
    home = str(Path(sys.prefix))
    for made in corpus.values():
        for path, text in rows(made.folder):
            assert is_learnable(text)
            assert 200 <= len(text.encode()) <= 2_000_000
            assert path.startswith(("python/", "packages/", "packages-platform/"))
            assert home not in path
            assert "relayrun" not in path
    assert all(path.endswith((".py", ".pyi")) for path, _ in rows(corpus["code"].folder))


def test_the_same_installation_gives_the_same_bytes_and_a_former_corpus_is_replaced(
    corpus: dict[str, TextSet], tmp_path: Path
) -> None:
    build_corpus(tmp_path / "c", megabytes=3, seed=5)
    other = contents(tmp_path / "c")
    build_corpus(tmp_path / "c", megabytes=3)
    assert contents(tmp_path / "c") == contents(corpus["docs"].folder.parent)
    assert contents(tmp_path / "c") != other
    assert os.listdir(tmp_path) == ["c"]


def test_an_output_that_is_no_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "mine.parquet").write_text("mine")
    with pytest.raises(InputError, match=r"no part of a corpus: docs/mine\.parquet"):
        build_corpus(tmp_path, megabytes=1)
    with pytest.raises(InputError, match="not a folder"):
        build_corpus(tmp_path / "docs" / "mine.parquet", megabytes=1)
    for megabytes in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="positive size"):
            build_corpus(tmp_path / "new", megabytes=megabytes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Plain words, and a few more of them.\n" * 10, True),
        ("größe 数据 данные\n" * 10, True),
        ("for x in range(10):\n    print(f'{x}')\n" * 10, True),
        ("0.123 4.567 8.901\n" * 30, False),
        ("QUJD" * 200, False),
        ("word " * 500, False),
        ("a\0b" * 100, False),
        ("{}()[];:,.!?<>=+-*/ " * 30, False),
    ],
)
def test_learnable(text: str, expected: bool) -> None:
    assert is_learnable(text) is expected


def test_the_tokenizer_opens_with_transformers_and_gives_the_text_back(
    corpus: dict[str, TextSet], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    output = train_tokenizer([corpus["docs"].folder, corpus["code"].folder], tmp_path / "t", vocabulary_size=1024)
    assert output == tmp_path / "t"
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert len(tokenizer) == 1024
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (BOS_TOKEN, 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (EOS_TOKEN, 1)
    for text in [
        "def f(x):\n\treturn x  # größe 数据 🎉",
        " leading, trailing ",
        *(t for _, t in rows(corpus["heldout"].folder)),
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(EOS_TOKEN)["input_ids"] == [1]


def test_the_tokenizer_is_the_same_whatever_the_threads_and_hash_seed(
    corpus: dict[str, TextSet], tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from relayrun.tokens.tokenize.train_tokenizer import train_tokenizer\n"
        "train_tokenizer([Path(sys.argv[1])], Path(sys.argv[2]))"
    )
    for number in ("1", "2"):
        environment = os.environ | {"RAYON_NUM_THREADS": number, "PYTHONHASHSEED": number}
        subprocess.run(
            [sys.executable, "-c", code, corpus["docs"].folder, tmp_path / number],
            env=environment,
            check=True,
            timeout=600,
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_of_two_tokenizers_in_one_folder_one_is_whole_and_the_other_is_refused(
    corpus: dict[str, TextSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*given: Any) -> None:
        monkeypatch.undo()
        for make in (
            lambda: train_tokenizer([corpus["code"].folder], tmp_path / "t"),
            lambda: write_byte_tokenizer(tmp_path / "t"),
        ):
            with pytest.raises(InputError, match="another process makes this: "):
                make()
        write_json(*given)

    monkeypatch.setattr(module, "write_json", meanwhile)
    train_tokenizer([corpus["docs"].folder], tmp_path / "t", vocabulary_size=300)
    train_tokenizer([corpus["docs"].folder], tmp_path / "alone", vocabulary_size=300)
    assert contents(tmp_path / "t") == contents(tmp_path / "alone")
    assert sorted(os.listdir(tmp_path)) == ["alone", "t"]


def test_a_tokenizer_without_text_or_room_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file with text below this folder"):
        train_tokenizer([tmp_path], tmp_path / "t")
    with pytest.raises(ConfigError, match="258 entries or more, not 256"):
        train_tokenizer([tmp_path], tmp_path / "t", vocabulary_size=256)
    assert not (tmp_path / "t").exists()
