"""Bad text costs what it must and no more: a line, a row or a file, named or counted, and never wrong tokens."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datatrove.data import Document

from relayrun.errors import InputError
from relayrun.tokens.readers import json_csv
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.shuffle.reshard import ReshardOptions, reshard
from relayrun.tokens.tokenize import MegatronTokenWriter
from relayrun.tokens.tokenize.dump_jobs import tokenize_dump
from relayrun.tokens.tokenize.dump_status import read_status, status_table
from tests.tokenization_corpus import TEXTS, expected_ids, shard_documents
from tests.tokens.test_dumps_status import settings
from tests.tokens.test_preprocess import Run, data, out, run, shards, tokenizer, write_jsonl

__all__ = ["data", "out", "run", "settings", "tokenizer"]

NOT_UTF8 = {
    "stray": b"good until \x80 here",
    "latin-1": "café".encode("latin-1"),
    "CESU-8": b"\xed\xa0\xbd\xed\xb8\x80",
    "overlong": b"\xc0\xaf",
    "cut off": "漢".encode()[:2],
}


def string_array(rows: Sequence[bytes | None]) -> pa.Array:
    """A string array of bytes as they are, which no writer of Arrow checks."""
    binary = pa.array(rows, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(rows), binary.buffers())


def write_bytes(file: Path, rows: Sequence[bytes | None]) -> None:
    table = pa.table({"n": range(len(rows)), "text": string_array(rows)})
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=3)
        return
    new = pa.ipc.new_file if file.stem == "file" else pa.ipc.new_stream
    with new(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def read(path: Path, faults: LineFaults | None = None, *, batch_bytes: int = 1000) -> list[str | None]:
    arrays = read_column(str(path), "text", batch_bytes=batch_bytes, faults=faults)
    return [text for array in arrays for text in array.to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [("a.parquet", "auto"), ("a.parquet", "huggingface"), ("file.arrow", "auto"), ("stream.arrow", "auto")],
)
def test_rows_that_are_no_utf8_are_named_or_left_out(
    run: Run, data: Path, out: Path, tokenizer: Path, name: str, engine: str
) -> None:
    rows = [text.encode() for text in TEXTS]
    write_bytes(data / name, [*rows[:4], None, *NOT_UTF8.values(), *rows[4:]])
    with pytest.raises(InputError) as caught:
        run([name], engine=engine)
    what = "record batch" if name.endswith("arrow") else "row group"
    assert f"{name}: {what} 1, row 2 of it" in str(caught.value)
    assert "the text is not UTF-8 (byte 0x80 at 11 of its 17 bytes)" in str(caught.value)
    assert shards(out) == []
    result = run([name], on_error="skip-line", engine=engine)
    assert shard_documents(out / "00000_tokens") == expected_ids(tokenizer, TEXTS)
    assert (result.bad_lines, result.null_documents) == ({"not UTF-8": len(NOT_UTF8)}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_UTF8)
def test_every_kind_of_bad_bytes_is_found(tmp_path: Path, kind: str) -> None:
    write_bytes(tmp_path / "a.parquet", [b"good", NOT_UTF8[kind]])
    with pytest.raises(InputError, match=r"a\.parquet: row group 0, row 1 of it"):
        read(tmp_path / "a.parquet")


def test_a_character_that_is_cut_between_two_rows_is_found(tmp_path: Path) -> None:
    first, second = "漢".encode()[:1], "漢".encode()[1:]
    write_bytes(tmp_path / "a.parquet", [b"a", first, second, b"b"])
    faults = LineFaults(skip=True)
    assert read(tmp_path / "a.parquet", faults) == ["a", "b"]
    assert faults.counts == {"not UTF-8": 2}


GOOD = [f"line {number}" for number in range(20)]

BAD_LINES = {
    "torn": (b'{"text": "ha', "not JSON", "this line is not JSON"),
    "no JSON": (b"what?\n", "not JSON", "this line is not JSON"),
    "lone surrogate": (b'{"text": "a \\ud83d b"}\n', "lone surrogate", r"'text' holds a lone surrogate \(\\ud83d\)"),
    "byte": (b'{"text": "caf\xe9"}\n', "not UTF-8", "'text' holds a byte that is not UTF-8"),
    "array": (b"[1]\n", "no object", "this line is no JSON object"),
    "column": (b'{"txt": 1}\n', "no column", "no column 'text'; there are: txt"),
    "name of a column": (b'{"caf\xe9": NaN}\n', "no column", r"no column 'text'; there are: caf\\udce9"),
    "number": (b'{"text": 7}\n', "not text", "'text' holds int, not text"),
    "control": (b'{"text": "a\tb"}\n', "not JSON", "this line is not JSON"),
    "nested": (b'{"text": "a", "x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}\n", "not JSON", "this line is not JSON"),
    "zeros": (b"\0" * 3000 + b"\n", "not JSON", "this line is not JSON"),
}


def lines(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("long", [False, True], ids=["", "in blocks"])
@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, long: bool) -> None:
    if long:
        monkeypatch.setattr(json_csv, "_LONG_BYTES", 40)
    bad, reason, message = BAD_LINES[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(GOOD) + bad)
    with pytest.raises(InputError, match=rf"a\.jsonl:21: {message}"):
        read(path)
    if bad.endswith(b"\n"):
        path.write_bytes(path.read_bytes() + lines(["end"]))
    faults = LineFaults(skip=True)
    assert read(path, faults) == [*GOOD, "end"][: 21 if bad.endswith(b"\n") else 20]
    assert faults.counts == {reason: 1}
    assert faults.examples[0].startswith(f"{path}:21: ")


@pytest.mark.slow
def test_lines_that_are_left_out_stand_in_the_record(run: Run, data: Path, out: Path, tokenizer: Path) -> None:
    (data / "a.jsonl").write_bytes(lines(GOOD) + b'{"text": "ha')
    (data / "b.jsonl").write_bytes(b'{"text": 7}\n' + lines(["next"]) + b"what?")
    result = run(["a.jsonl", "b.jsonl"], on_error="skip-line", tasks=1)
    assert shard_documents(out / "00000_tokens") == expected_ids(tokenizer, [*GOOD, "next"])
    assert "left out: 3 lines (2 not JSON, 1 not text)" in result.summary()
    task = json.loads((out / "tokenization.json").read_text())["shards"]["00000_tokens"]
    assert task["bad_lines"] == {"not JSON": 2, "not text": 1}
    assert [example.split(": ")[0] for example in task["bad_line_examples"]] == [
        str(data / place) for place in ("a.jsonl:21", "b.jsonl:1", "b.jsonl:3")
    ]
    again = run(["a.jsonl", "b.jsonl"], on_error="skip-line", tasks=1)
    assert (again.tasks_run, again.bad_lines) == (0, result.bad_lines)


FINE = {
    "mark": b'\xef\xbb\xbf{"text": "x"}\n',
    "mark of a file behind another": b'{"text": "x"}\n\xef\xbb\xbf{"text": "x"}\n',
    "NaN elsewhere": b'{"score": NaN, "text": "x", "y": [-Infinity]}\n',
    "lone surrogate elsewhere": b'{"title": "\\ud800", "text": "x"}\n',
    "byte elsewhere": b'{"title": "caf\xe9", "text": "x"}\n',
    "long integer elsewhere": b'{"n": ' + b"9" * 5000 + b', "text": "x"}\n',
    "all of it": b'\xef\xbb\xbf{"title": "caf\xe9 \\udc00", "text": "x", "score": NaN}',
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.json.gz", "a.json.zst"])
@pytest.mark.parametrize("long", [False, True], ids=["", "in blocks"])
@pytest.mark.parametrize("kind", FINE)
def test_what_is_wrong_elsewhere_costs_no_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, long: bool, name: str
) -> None:
    if long:
        monkeypatch.setattr(json_csv, "_LONG_BYTES", 40)
    squeeze: Callable[[bytes], bytes] = {".gz": gzip.compress, ".zst": zstandard.compress}.get(
        Path(name).suffix, lambda content: content
    )
    (tmp_path / name).write_bytes(squeeze(FINE[kind]))
    assert read(tmp_path / name) == ["x"] * FINE[kind].count(b'"x"')


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "x"}]', "is one JSON array"),
        ("a.json", b'[\n{"text": "x"}]\n', "is one JSON array"),
        ("a.jsonl", b'[\n{"text": "x"}]\n', "is one JSON array"),
        ("a.jsonl", b'[{"text": "x"},\n{"text": "x"}]\n', "is one JSON array"),
        ("a.json", b'{\n  "text": "x"\n}\n', "holds JSON over several lines"),
        ("a.json", '{"text": "x"}\n'.encode("utf-16"), "is UTF-16"),
        ("a.csv", b'"text"x\n1\n', r"a\.csv:1: its first row is not CSV"),
        ("a.csv", b"text,text\n1,2\n", "2 columns are named 'text'"),
        ("a.csv", b"id,txt\n1,2\n", "no column 'text'; there are: id, txt"),
        ("a.arrow", b"ARROW1 and no more", "cannot be read, it may be torn"),
        ("a.arrow", b"nothing of the kind", "cannot be read, it may be torn"),
        ("a.arrow", b"", "cannot be read, it may be torn"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_whole(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for skip in (False, True):
        with pytest.raises(InputError, match=message):
            read(tmp_path / name, LineFaults(skip=skip))


CSV = ["plain", "with, comma", 'with "quotes"', "over\nlines\r\nof it", "ünï", "", "\0 zero", "end"]


def csv_bytes(texts: Sequence[str]) -> bytes:
    sink = io.StringIO(newline="")
    csv.writer(sink).writerows([("id", "text"), *enumerate(texts)])
    return sink.getvalue().encode()


@pytest.mark.parametrize("name", ["a.csv", "a.CSV.gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_rows_of_csv_are_texts(tmp_path: Path, name: str, mark: bytes) -> None:
    content = mark + csv_bytes(CSV)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for size in (1, 1000):
        assert read(tmp_path / name, batch_bytes=size) == CSV


@pytest.mark.parametrize(
    ("bad", "reason", "message"),
    [
        (b"7,caf\xe9\n", "not UTF-8", "'text' holds a byte that is not UTF-8"),
        (b"7\n", "not CSV", "this row has 1 fields, the first row has 2"),
        (b'7,"a"b\n', "not CSV", "this row is not CSV"),
        (b'7,"torn', "not CSV", "this row is not CSV: unexpected end of data"),
        (b'7,"torn\nand\nlong', "not CSV", "this row of 3 lines is not CSV: unexpected end of data"),
    ],
)
def test_a_bad_row_of_csv_costs_one_row(tmp_path: Path, bad: bytes, reason: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n0,"two\nlines"\n' + bad)
    with pytest.raises(InputError, match=rf"a\.csv:4: {message}"):
        read(path)
    if bad.endswith(b"\n"):
        path.write_bytes(path.read_bytes() + b"8,end\n")
    faults = LineFaults(skip=True)
    assert read(path, faults, batch_bytes=9) == ["two\nlines", "end"][: 2 if bad.endswith(b"\n") else 1]
    assert faults.counts == {reason: 1}


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["skip-file", "skip-line"])
def test_a_missing_file_costs_one_file_and_is_tokenized_when_it_is_there(
    run: Run, data: Path, out: Path, tokenizer: Path, on_error: str
) -> None:
    write_jsonl(data / "a.jsonl", ["x"])
    names = ["a.jsonl", "gone.jsonl"]
    with pytest.raises(InputError, match=r"gone\.jsonl: this file of the paths file is missing"):
        run(names)
    assert run(names, on_error=on_error).skipped_files == 1
    task = json.loads((out / "tokenization.json").read_text())["shards"]["00001_tokens"]
    assert [(each["file"], each["reason"]) for each in task["skipped"]] == [("gone.jsonl", "missing")]
    assert run(names, on_error=on_error).tasks_run == 0
    write_jsonl(data / "gone.jsonl", ["y"])
    assert run(names, on_error=on_error).tasks_run == 1
    assert shard_documents(out / "00001_tokens") == expected_ids(tokenizer, ["y"])


def test_a_file_that_is_left_out_takes_its_bad_lines_with_it(run: Run, data: Path) -> None:
    write_jsonl(data / "a.jsonl", ["x"])
    (data / "b.jsonl.gz").write_bytes(gzip.compress(b"bad\n" + os.urandom(5000).hex().encode() + b"\n")[:-50])
    result = run(["a.jsonl", "b.jsonl.gz"], tasks=1, on_error="skip-line")
    assert (result.documents, result.skipped_files, result.bad_lines) == (1, 1, {})


def test_status_counts_lines_by_reason(settings: Any) -> None:
    dataset = Path(settings.metadata_folder) / "raw-dataset-link"
    rows = [b"good", b"\x80", b"\x81"]
    write_bytes(dataset / "a.parquet", rows)
    tokenize_dump(settings.model_copy(update={"on_error": "skip-line"}), 0)
    shown = status_table(read_status(settings.metadata_folder))
    assert "0 files, 2 lines" in shown
    assert "dump 0 left out: 2 lines (2 not UTF-8), for example " in shown
    assert "a.parquet: row group 0, row 1 of it" in shown


def test_datatroves_step_says_which_document_or_leaves_it_out(tmp_path: Path, tokenizer: Path) -> None:
    documents = [Document(text=text, id=str(row)) for row, text in enumerate(["a", "b \ud800", None, "c"])]
    with pytest.raises(InputError, match=r"document 1: 'text' holds a lone surrogate \(\\ud800\)"):
        MegatronTokenWriter(tmp_path / "out", str(tokenizer)).run(documents)
    with pytest.raises(InputError, match="the reader of a pipeline decides about files"):
        MegatronTokenWriter(tmp_path / "out", str(tokenizer), on_error="skip-file")
    writer = MegatronTokenWriter(tmp_path / "out", str(tokenizer), on_error="skip-line")
    writer.run(documents)
    assert shard_documents(tmp_path / "out" / "00000_tokens") == expected_ids(tokenizer, ["a", "c"])
    assert writer.stats["left out: lone surrogate"].total == 1
    assert writer.stats["left out: not text"].total == 1


def test_a_shuffle_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_bytes(tmp_path / "in" / "b.parquet", [b"a", b"b", b"c", b"d", b"\xc0\xaf"])
    with pytest.raises(InputError, match=r"b\.parquet: row group 1, row 1 of it .*: the text is not UTF-8"):
        reshard(ReshardOptions(dataset_folder=str(tmp_path / "in"), output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("memory_limit", [4_000_000_000, 300_000_000])
def test_a_shuffle_leaves_bad_lines_out_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, memory_limit: int
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(GOOD) + b'{"text": "ha')
    (folder / "b.jsonl").write_bytes(b"what?\n" + lines(["end"]))
    options = ReshardOptions(
        dataset_folder=str(folder), output=tmp_path / "out", on_error="skip-line", memory_limit=memory_limit
    )
    assert reshard(options) == len(GOOD) + 1
    assert sorted(pq.read_table(tmp_path / "out" / "data_0.parquet")["text"].to_pylist()) == sorted([*GOOD, "end"])
    said = " ".join(caplog.messages)
    assert "left out: 2 lines (2 not JSON), the first is " in said
    assert "a.jsonl:21: this line is not JSON" in said


@pytest.mark.slow
def test_a_shuffle_reads_all_kinds_of_lines(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_bytes(folder / "file.arrow", [b"arrow"])
    (folder / "a.csv").write_bytes(csv_bytes(["csv"]))
    (folder / "b.json.gz").write_bytes(gzip.compress(lines(["json"])))
    (folder / "dataset_info.json").write_text("{\n}\n")
    assert reshard(ReshardOptions(dataset_folder=str(folder), output=tmp_path / "out")) == 3
    found = pq.read_table(tmp_path / "out" / "data_0.parquet")["text"].to_pylist()
    assert sorted(found) == ["arrow", "csv", "json"]
