"""Texts of many small files are encoded together, and the shard is that of files that are encoded one by one."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.errors import InputError
from relayrun.tokens.tokenize import pipeline, shard_task
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from relayrun.tokens.tokenize.shard_folder import FolderRecord, TaskRecord
from tests.tokenization_corpus import TEXTS, train_tokenizer


def write_files(folder: Path) -> list[str]:
    """Files of all formats, with nulls, empty texts and no text at all; one is large."""
    rows: list[list[str | None]] = [[f"{n}", *TEXTS[: n % 5], None, ""][n % 3 :] for n in range(30)]
    rows[7], rows[8], rows[20] = [], [None, ""], [f"{n} {TEXTS[7]}" for n in range(100)]
    names = []
    for number, texts in enumerate(rows):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        name = f"{number:02d}" + [".jsonl", ".jsonl.gz", ".parquet"][number % 3]
        if name.endswith(".parquet"):
            kind = pa.large_string() if number % 2 else pa.string()
            pq.write_table(pa.table({"text": pa.array(texts, kind)}), folder / name, row_group_size=2)
        else:
            (folder / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines or b"\n")
        names.append(name)
    return names


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    train_tokenizer(tmp_path / "tokenizer.json")
    return write_files(tmp_path)


def tokenize(folder: Path, names: list[str], output: str, **options: Any) -> TaskRecord:
    (folder / "paths").write_text("\n".join(names))
    given = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"), tasks=1, workers=1, **options)
    tokenize_paths_file(given, output_folder=folder / output, dataset=folder, paths_file=folder / "paths")
    (task,) = FolderRecord.read(folder / output).tasks.values()
    return task


def facts(task: TaskRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(task).items() if name not in ("started", "seconds")}


@pytest.mark.parametrize("options", [{}, {"keep_empty": True}, {"batch_documents": 2}, {"batch_bytes": 3000}])
def test_the_shard_and_its_record_are_those_of_files_one_by_one(
    tmp_path: Path, names: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = tokenize(tmp_path, names, "together", **options)
    monkeypatch.setattr(shard_task, "_SMALL_BYTES", -1)
    assert facts(tokenize(tmp_path, names, "alone", **options)) == facts(together)


def test_a_small_file_is_opened_once(tmp_path: Path, names: list[str]) -> None:
    opened, listening = Counter[str](), True

    def listen(event: str, given: tuple[Any, ...]) -> None:  # stays for ever
        if listening and event == "open":
            opened[str(given[0])] += 1

    sys.addaudithook(listen)
    tokenize(tmp_path, names, "out")
    listening = False
    large, looked_at = 1, 8  # read for its text, and for its checksum; files that prove the engine
    assert sum(opened[str(tmp_path / name)] for name in names) <= len(names) + large + looked_at


def test_a_small_file_that_changed_since_it_was_listed_is_an_error(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pipeline.select_engine

    def change_a_file(*given: Any, **how: Any) -> Any:
        file, text = tmp_path / names[3], (tmp_path / names[3]).read_bytes()
        file.write_bytes(text.replace(b"3", b"4"))
        os.utime(file, ns=(0, 1))
        return plain(*given, **how)

    monkeypatch.setattr(pipeline, "select_engine", change_a_file)
    with pytest.raises(InputError, match=f"{names[3]}.*this file was changed while it was read"):
        tokenize(tmp_path, names, "out")


def test_few_calls_of_the_engine(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(shard_task, "_encode", lambda *given: calls.append(given))  # of files that are alone
    tokenize(tmp_path, names[:20], "out")
    assert not calls


def test_a_bad_file_among_small_ones_is_named_or_left_out(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / names[3]).write_bytes(b'{"text": "good"}\n{broken\n{"text": "good, too"}\n')
    (tmp_path / names[4]).write_bytes(gzip.compress(b'{"text": "torn"}\n')[:-6])
    with pytest.raises(InputError) as caught:
        tokenize(tmp_path, names, "out")
    assert f"{names[3]}:2: this line is not JSON" in str(caught.value)
    task = tokenize(tmp_path, names, "lines", on_error="skip-line")
    assert (task.bad_lines, task.file_documents[3], task.file_rows[3]) == ({"not JSON": 1}, 2, 3)
    assert [each.file for each in task.skipped] == [names[4]]
    task = tokenize(tmp_path, names, "files", on_error="skip-file")
    assert [each.file for each in task.skipped] == names[3:5]


def test_bad_files_are_not_looked_at_again_and_again(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names[:15]:
        (tmp_path / name).write_bytes(b"{broken")
    looks = []
    plain = shard_task.texts_of_content
    monkeypatch.setattr(shard_task, "texts_of_content", lambda *a, **k: looks.append(a) or plain(*a, **k))
    tokenize(tmp_path, names, "out", on_error="skip-file")
    assert len(looks) <= 30
