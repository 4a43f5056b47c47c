"""What publishers and programs write beside data: `dumps prepare` reads it before the first token."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from relayrun.cli.data.dumps import run_submit_dumps
from relayrun.errors import InputError
from relayrun.tokens.readers import inventory
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from tests.tokenization_corpus import dump_settings, train_tokenizer
from tests.tokens.test_inventory import arrow, lines, prepared, write


def text(number: int) -> bytes:
    return b'{"text": "%d and more words"}\n' % number


def numbered(*names: str) -> dict[str, bytes]:
    return {name: text(number) for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("path", "split"),
    [("held-out/a.jsonl", "held-out"), ("web_holdout.jsonl", "held-out"), ("uphold/out.jsonl", None)],
)
def test_the_words_for_what_is_held_out(path: str, split: str | None) -> None:
    assert inventory.held_out_split(path) == split


CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: "x/*"
  - split: test
    path: ["x/1.jsonl", "y/*"]
---
# Web
"""


@pytest.mark.parametrize(
    ("note", "content"),
    [
        ("README.md", CARD),
        ("splits.json", json.dumps({"train": ["x/0.jsonl"], "test": ["x/1.jsonl", "y/2.jsonl"]})),
        ("split_of_files.json", json.dumps({"x/0.jsonl": "train", "x/1.jsonl": "test", "y/2.jsonl": "test"})),
        ("heldout_files.txt", "# do not train on\n./x/1.jsonl\ny/2.jsonl\n"),
        ("x/test.lst", "1.jsonl\ny/2.jsonl\n"),
    ],
)
def test_files_that_a_list_holds_out_are_refused(tmp_path: Path, note: str, content: str) -> None:
    data = write(tmp_path / "data", numbered("x/0.jsonl", "x/1.jsonl", "y/2.jsonl") | {note: content.encode()})
    with pytest.raises(InputError, match=rf"of a .* set beside other text: x/1.jsonl, y/2.jsonl; {note} says so"):
        prepared(data)
    assert not lines(data)[note]["taken"]
    assert prepared(data, filter_out=["x/1", "y/2"]) == ["x/0.jsonl"]
    assert len(prepared(data, all_splits=True)) == 3
    if not note.endswith(".json"):  # whose text would be taken
        assert len(prepared(data, filter_out=[note])) == 3


def test_files_of_models_logs_and_lists_are_no_text(tmp_path: Path) -> None:
    kept = ["config.json", "data/a.jsonl", "stats/0.json", "lists/files.json"]
    others = [
        "ckpt/config.json",
        "ckpt/model.safetensors",
        "tok/tokenizer.json",
        "tok/vocab.json",
        "logs/executor.json",
    ]
    data = write(tmp_path / "data", numbered(*kept, *others, "logs/stats/0.json", "logs/stats.json"))
    assert prepared(data) == sorted(kept)
    assert lines(data)["tok/vocab.json"]["why"] == "metadata"
    assert "ckpt/config.json" in prepared(data, filter_out=["safetensors"])


def test_files_of_ranks_of_datatrove_that_have_not_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"out/{rank:05d}.jsonl" for rank in range(4)] + ["other/00001.jsonl"]
    logs = {f"out/logs/completions/{rank:05d}": b"" for rank in (0, 2)}
    logs["out/logs/executor.json"] = json.dumps({"world_size": 5}).encode()
    data = write(tmp_path / "data", numbered(*names) | logs)
    with pytest.raises(InputError, match=r"out/logs/completions lacks this rank of datatrove"):
        prepared(data)
    assert {path for path, line in lines(data).items() if line.get("why") == "not whole"} == {names[1], names[3]}
    assert "out/logs: 3 ranks of datatrove have not ended: 00001, 00003, 00004" in caplog.text
    assert prepared(data, filter_out=["out/00001", "out/00003"]) == ["other/00001.jsonl", names[0], names[2]]
    assert len(prepared(data, filter_out=["logs/"])) == 5
    for rank in (1, 3, 4):
        (data / f"out/logs/completions/{rank:05d}").touch()
    assert len(prepared(data)) == 5


def parquet(**columns: list[str]) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return bytes(out.getvalue())


def feather() -> bytes:
    out = pa.BufferOutputStream()
    pyarrow.feather.write_feather(pa.table({"text": ["one"]}), out)
    return bytes(out.getvalue())


PACKED = gzip.compress(b"".join(map(text, range(500))))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", parquet(text=["one"])[:-9]),
        ("a.feather", feather()[:-8]),
        ("a.jsonl", text(1) + text(2)[:9]),
        ("a.jsonl", text(1) + bytes(99)),
        ("a.arrow", arrow(30)[:-8]),
    ],
    ids=range(5),
)
def test_a_torn_end_is_refused_before_the_first_token_and_by_the_reader(
    tmp_path: Path, name: str, content: bytes
) -> None:
    data = write(tmp_path / "data", {name: content, "good.jsonl": text(0)})
    with pytest.raises(InputError, match=rf"data/{name}: .*it may be torn"):
        prepared(data)
    assert lines(data)[name]["why"] == "not whole"
    assert prepared(data, filter_out=[name]) == ["good.jsonl"]
    with pytest.raises(InputError):
        list(read_column(str(data / name), "text", batch_bytes=1000))


def test_whole_ends_of_all_kinds(tmp_path: Path) -> None:
    names = {
        "a.parquet": parquet(text=["one"]),
        "b.feather": feather(),
        "c.arrow": arrow(30) + bytes(24),
        "d.jsonl.gz": PACKED + gzip.compress(text(9999)),
        "e.jsonl": text(1)[:-1],
        "f.json": b'{\n "text": "one"\n}',
        "g.jsonl": text(5) + b'{"text": "' + bytes(b"x" * 70_000) + b'"}',
        "h.jsonl": b"\n\n",
    }
    assert prepared(write(tmp_path / "data", names)) == list(names)


def test_a_download_that_has_not_ended_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "data", numbered("a.jsonl", "b.jsonl") | {"b.jsonl.aria2": b""})
    with pytest.raises(InputError, match=r"b\.jsonl\.aria2 says that this download has not ended"):
        prepared(data)
    assert lines(data)["a.jsonl"]["taken"]
    assert not lines(data)["b.jsonl"]["taken"]
    assert prepared(data, filter_out=["aria2"]) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("mark", ["_delta_log/0.json", ".hoodie/hoodie.properties", "metadata/snap-1.avro"])
def test_a_table_that_may_keep_removed_rows_is_refused(tmp_path: Path, mark: str) -> None:
    data = write(tmp_path / "data", numbered("t/a.jsonl", "t/lang=de/b.jsonl", "c.jsonl") | {f"t/{mark}": b"{}"})
    with pytest.raises(InputError, match=r"(?s)t/a\.jsonl: part of a table.*t/lang=de/b\.jsonl: part of a table"):
        prepared(data)
    assert len(prepared(data, filter_out=[mark.split("/")[0]])) == 3


def test_a_part_that_a_job_of_databricks_did_not_commit_is_left_out(tmp_path: Path) -> None:
    data = write(tmp_path / "data", numbered("x/a.json", "x/b.json", "x/c.json", "x/d.jsonl", "e.json"))
    commits = [{"added": ["a.json", "b.json"], "removed": []}, {"added": [], "removed": ["b.json"]}]
    write(data, {f"x/_committed_{n}": json.dumps(commit).encode() for n, commit in enumerate(reversed(commits))})
    assert prepared(data) == ["e.json", "x/a.json", "x/d.jsonl"]
    (data / "x" / "a.json").unlink()
    with pytest.raises(InputError, match=r"x/a\.json: a list beside it names this file, which is missing"):
        prepared(data)


def test_parts_of_spark_without_the_mark_of_its_end_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = "part-00000-c0ffee00-1111-2222-3333-444455556666-c000.json"
    data = write(tmp_path / "data", numbered(f"x/lang=de/{part}", f"y/{part}", "a.jsonl") | {"x/_SUCCESS": b""})
    assert len(prepared(data)) == 3
    assert "y/part-*: Spark's job may not have ended, as no _SUCCESS is there" in caplog.text
    assert "x/lang" not in caplog.text


def test_records_of_warc_have_a_way_and_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    record = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 5\r\n\r\nwords\r\n\r\n"
    data = write(tmp_path / "data", numbered("a.jsonl") | {"b.warc": record * 2, "c.warc.gz": PACKED})
    assert prepared(data) == ["a.jsonl"]
    assert "ending not read; `reader: warc` with --ending reads it: 2 files" in caplog.text
    assert prepared(data, endings=[".warc"]) == ["b.warc"]
    write(data, {"b.warc": record * 2 + record[:-6]})
    with pytest.raises(InputError, match=r"b\.warc: it may be torn"):
        prepared(data, endings=[".warc"])


def settings_of(tmp_path: Path) -> TokenizationSettings:
    return dump_settings(tmp_path, train_tokenizer(tmp_path / "tok" / "tokenizer.json"), workers=1)


def test_files_without_text_are_named_before_a_job_is_submitted(tmp_path: Path) -> None:
    data = write(tmp_path / "data", numbered("documents/0.jsonl", "documents/1.jsonl"))
    write(data, {"scores/0.jsonl.gz": gzip.compress(b'{"id": 1}\n'), "scores/vectors.parquet": parquet(id=["1"])})
    settings = settings_of(tmp_path)
    prepare_dumps(data, settings.metadata_folder)
    with pytest.raises(InputError, match=r"(?s)vectors.parquet.*no column 'text'; there are: id"):
        prepare_submission(settings)
    prepare_dumps(data, settings.metadata_folder, filter_out=["scores"])
    assert prepare_submission(settings) == [0]


def checksum(kind: str, content: bytes) -> str:
    return hashlib.new(kind, content).hexdigest()


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ("SHA256SUMS", "# of the release\n{sha256}  x/a.jsonl\n"),
        ("x/checksums.txt", "{md5} *a.jsonl\n"),
        ("x/a.jsonl.md5", "{md5}\n"),
        ("x/a.jsonl.sha512", "{sha512} *a.jsonl\n"),
    ],
)
@pytest.mark.parametrize("name", ["x/a.jsonl", "x/a.jsonl/bytes=0-5"])
def test_the_lists_of_checksums_are_read(tmp_path: Path, note: str, words: str, name: str) -> None:
    good, bad = ({kind: checksum(kind, text(n)) for kind in ("md5", "sha256", "sha512")} for n in (0, 1))
    data = write(tmp_path / "data", {"x/a.jsonl": text(0), note: words.format(**good).encode()})
    written = data.parent / "meta" / "inventory.jsonl"
    assert prepared(data) == ["x/a.jsonl"]
    inventory.refuse_wrong_checksums(written, str(data), [name])
    write(data, {note: words.format(**bad).encode()})
    with pytest.raises(InputError, match=rf"x/a.jsonl: its checksum is not the one that {note} lists"):
        inventory.refuse_wrong_checksums(written, str(data), [name])
    (data / note).rename(tmp_path / "gone")
    inventory.refuse_wrong_checksums(written, str(data), [name])
    write(data, {note: words.format(**bad).encode()})
    prepared(data, filter_out=[note])
    inventory.refuse_wrong_checksums(written, str(data), [name])


def test_the_checksums_of_hadoop_are_compared(tmp_path: Path) -> None:
    content = text(0) * 50
    sums = [zlib.crc32(content[begin : begin + 512]).to_bytes(4) for begin in range(0, len(content), 512)]
    crc = b"crc\0" + (512).to_bytes(4) + b"".join(sums)
    data = write(tmp_path / "data", {"x/a.json": content, "x/.a.json.crc": crc, "x/.gone.json.crc": crc})
    written = data.parent / "meta" / "inventory.jsonl"
    assert prepared(data) == ["x/a.json"]
    inventory.refuse_wrong_checksums(written, str(data), ["x/a.json"])
    for bad in (content + b"\n", content[:-600], content[:700] + b"#" + content[701:], b""):
        write(data, {"x/a.json": bad})
        with pytest.raises(InputError, match=r"x/a\.json: its checksum is not the one that x/\.a\.json\.crc lists"):
            inventory.refuse_wrong_checksums(written, str(data), ["x/a.json"])


def test_checksums_are_compared_before_a_dump_is_done(tmp_path: Path) -> None:
    sums = f"{checksum('md5', text(0))}  a.jsonl\n{checksum('md5', text(7))}  b.jsonl\n{'0' * 32}  gone.jsonl\n"
    data = write(tmp_path / "data", numbered("a.jsonl", "b.jsonl") | {"MD5SUMS": sums.encode()})
    settings = settings_of(tmp_path)
    prepare_dumps(data, settings.metadata_folder)
    (index,) = prepare_submission(settings)
    with pytest.raises(InputError, match=r"b\.jsonl: its checksum is not the one that MD5SUMS lists"):
        tokenize_dump(settings, index)
    assert DumpsFolder(settings.metadata_folder).finished() == []
    (data / "b.jsonl").write_bytes(text(7))
    prepare_dumps(data, settings.metadata_folder)
    tokenize_dump(settings, index)
    assert DumpsFolder(settings.metadata_folder).finished() == [index]


def test_tabs_separate_the_columns_of_tsv(tmp_path: Path) -> None:
    data = write(
        tmp_path / "data", {"a.tsv": b"id\ttext\n1\tone, two\n", "b.TSV.gz": gzip.compress(b"text\tid\nx\t2\n")}
    )
    assert prepared(data) == ["a.tsv", "b.TSV.gz"]
    found = [next(read_column(str(data / name), "text", batch_bytes=100)).to_pylist() for name in prepared(data)]
    assert found == [["one, two"], ["x"]]


COUNTED = "---\ndataset_info:\n  splits:\n  - name: train\n    num_examples: %d\n---\n# Web\n"
TWO = """---
dataset_info:
- config_name: en
  splits: [{name: train, num_examples: 2}, {name: test, num_examples: 9}]
- config_name: de
  splits: [{name: train, num_examples: 2}]
---
"""


def _counts(splits: dict[str, int]) -> dict[str, object]:
    return {"splits": {name: {"name": name, "num_examples": number} for name, number in splits.items()}}


@pytest.mark.parametrize(
    ("files", "note", "content", "options", "found"),
    [
        (["data/train-0.jsonl", "data/train-1.jsonl"], "README.md", COUNTED % 2, {}, {"train": (2, 2)}),
        (["data/train-0.jsonl"], "README.md", COUNTED % 2, {}, {"train": (1, 2)}),
        (["data/train-0.jsonl"], "README.md", COUNTED % 2, {"filter_out": ["README"]}, {}),
        (["web/train.jsonl", "web2/train.jsonl"], "web/README.md", COUNTED % 2, {}, {"train": (1, 2)}),
        (["one.jsonl", "two.jsonl"], "dataset_info.json", _counts({"train": 3}), {}, {"train": (2, 3)}),
        (["train.jsonl", "more.jsonl"], "dataset_info.json", _counts({"train": 1}), {}, {"train": (1, 1)}),
        (
            ["web/x-train-0.jsonl"],
            "web/dataset_info.json",
            _counts({"train": 2, "test": 1}),
            {},
            {"train": (1, 2), "test": (None, 1)},
        ),
        (["a.jsonl", "b.jsonl"], "dataset_infos.json", {"default": _counts({"train": 3})}, {}, {"train": (2, 3)}),
        (
            ["a/train-0.jsonl", "b/train-0.jsonl", "b/train-1.jsonl"],
            "dataset_infos.json",
            {"a": _counts({"train": 1}), "b": _counts({"train": 3})},
            {},
            {"a/train": (1, 1), "b/train": (2, 3)},
        ),
        (
            ["train-0.jsonl", "train-1.jsonl"],
            "README.md",
            COUNTED % 2,
            {"filter_out": ["train-0"]},
            {"train": (None, 2)},
        ),
        (
            ["en/train-0.jsonl", "en/x/train/0.jsonl", "de/a/b.jsonl", "en/test.jsonl"],
            "README.md",
            TWO,
            {"filter_out": ["test"]},
            {"en/train": (2, 2), "en/test": (None, 9), "de/train": (1, 2)},
        ),
        (["a.jsonl"], "README.md", "---\ndataset_info: {splits: [{name: [], num_examples: x}]}\n---\n", {}, {}),
        (["train.txt"], "README.md", COUNTED % 2, {}, {"train": (None, 2)}),
        (["a.jsonl"], "dataset_infos.json", "[1, {", {}, {}),
    ],
)
def test_the_rows_that_a_publisher_counted_are_compared(
    tmp_path: Path,
    files: list[str],
    note: str,
    content: str | dict[str, object],
    options: dict[str, Any],
    found: dict[str, tuple[int | None, int]],
) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    plain = content if isinstance(content, str) else json.dumps(content)
    data = write(tmp_path / "data", numbered(*files) | {note: plain.encode()})
    prepare_dumps(data, tmp_path / "meta", n_dumps=min(2, len(files)), **options)
    settings = dump_settings(tmp_path, tmp_path / "tokenizer.json", tasks=1)
    for index in prepare_submission(settings):
        tokenize_dump(settings, index)
    splits = lines(data)[note].get("splits", {})
    assert {name: (split.get("rows"), split["expected_rows"]) for name, split in splits.items()} == found
    assert all("not compared" in split["why"] for split in splits.values() if "rows" not in split)
    wrong = {name: rows for name, rows in found.items() if None not in rows and rows[0] != rows[1]}
    (tmp_path / "t.yaml").write_text(json.dumps(settings.model_dump(mode="json") | {"executor": "local"}))
    words = [
        f"{note}: {rows} rows of {name} were tokenized, and {listed} are" for name, (rows, listed) in wrong.items()
    ]
    with pytest.raises(InputError, match=words[0]) if wrong else contextlib.nullcontext():
        arguments = argparse.Namespace(config=str(tmp_path / "t.yaml"), executor=None, wait=True)
        assert run_submit_dumps(arguments) == 0
    assert len(inventory.other_rows(tmp_path / "meta/inventory.jsonl")) == len(wrong)
