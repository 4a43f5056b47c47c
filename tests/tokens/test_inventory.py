"""What `dumps prepare`, streams and readers take of the files that crawls, hubs, Spark and notebooks leave."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from relayrun.cli import main
from relayrun.config.sections.data import DataSource, StreamSection
from relayrun.errors import InputError
from relayrun.tokens.readers import inventory
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.contents import content_fault
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.readers.inputs import read_paths_file, stat_inputs, take_inventory
from relayrun.tokens.streams.files import find_text_files
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps

LINE = b'{"text": "one"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>503</title></head></html>\n"
ZSTD = b"\x28\xb5\x2f\xfd" + bytes(9)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def prepared(data: Path, **options: Any) -> list[str]:
    (dump,) = prepare_dumps(data, data.parent / "meta", n_dumps=1, **options)
    return sorted(read_paths_file(data.parent / f"meta/dumps/paths_file_{dump.index}.txt"))


def lines(data: Path) -> dict[str, dict[str, Any]]:
    text = (data.parent / "meta/inventory.jsonl").read_text()
    return {line["path"]: line for line in map(json.loads, text.splitlines())}


def test_files_that_every_reader_leaves_out_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hidden = ["_temporary/0/part-0.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "._a.jsonl", "_SUCCESS"]
    kept = {"a.jsonl": LINE, "_lang=en/a.jsonl": LINE * 2}
    others = {"README.md": b"# x", "empty.jsonl": b"", "state.json": b"{}"}
    data = write(tmp_path / "data", dict.fromkeys(hidden, LINE * 3) | kept | others)
    assert prepared(data) == sorted(kept)
    found = lines(data)
    assert len(found) == len(hidden) + len(kept) + len(others)
    assert {name for name, line in found.items() if line["taken"]} == set(kept)
    assert {found[name]["why"] for name in hidden} == {"hidden or temporary"}
    assert [found[name]["why"] for name in others] == ["ending not read", "empty", "metadata"]
    assert found["a.jsonl"] == {"path": "a.jsonl", "bytes": 16, "taken": True}
    said = [record.getMessage() for record in caplog.records]
    assert "left out, empty: 1 file (0 bytes): empty.jsonl" in said
    assert "left out, ending not read: 1 file (3 bytes): README.md" in said
    assert any(line.startswith("left out, hidden or temporary: 4 files (192 bytes): ._a.jsonl, ") for line in said)
    assert len(said) <= 20


REFUSED = [
    ("a.jsonl", gzip.compress(LINE, mtime=0), "its content is gzip, not text as its name says"),
    ("a.jsonl", ZSTD, "its content is zstd, not text"),
    ("a.jsonl", b"PAR1" + bytes(20), "its content is parquet, not text"),
    ("a.csv", b"BZh91AY&SY" + bytes(20), "its content is bz2, not text"),
    ("a.jsonl", POINTER, "a pointer of Git LFS in place of the file"),
    ("a.parquet", POINTER, "a pointer of Git LFS"),
    ("a.jsonl", b"/annex/objects/SHA256E-s9--ab.jsonl\n", "a pointer of git-annex in place of the file"),
    ("a.jsonl", bytes(999), "bytes of zero, not text"),
    ("a.jsonl.gz", POINTER, "a pointer of Git LFS"),
    ("a.jsonl", PAGE, "a page of HTML, often an error's, not text"),
    ("a.parquet", b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code>', "a page of HTML"),
    ("a.jsonl", b"<head><title>503</title>", "a page of HTML"),
    ("a.jsonl", b"<!-- proxy -->\n<!-- 2 --><HTML>", "a page of HTML"),
    ("a.jsonl", b"Obj\x01\x04\x14avro.codec", "its content is Avro, ORC, SQLite or HDF5, not text"),
    ("a.csv", b"SQLite format 3\0" + bytes(20), "its content is Avro, ORC, SQLite or HDF5, not text"),
    ("a.jsonl", b"]\0\0\x80\0" + bytes(20), "its content is lzma or a pickle, not text"),
    ("a.jsonl", b"\x80\x04\x95\x0b" + bytes(20), "its content is lzma or a pickle, not text"),
    ("a.jsonl.gz", LINE, "its content is JSON, not gzip as its name says"),
    ("a.json.zst", gzip.compress(LINE, mtime=0), "its content is gzip, not zstd"),
    ("a.jsonl.gz", b"", "cannot be read, it may be torn: 0 bytes are no gzip"),
    ("a.parquet", b"", "cannot be read, it may be torn: 0 bytes are no parquet"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_of_another_content_is_refused_whole_by_prepare_and_by_the_reader(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    data = write(tmp_path / "data", {name: content, "good.jsonl": LINE})
    with pytest.raises(InputError, match=rf"data/{name}: {message}") as caught:
        prepared(data)
    assert "--filter-out" in (caught.value.hint or "")
    assert lines(data)[name] | {"bytes": 0} == {"path": name, "bytes": 0, "taken": False} | {
        "why": "other content than its name",
        "refused": caught.value.message,
    }
    assert not (tmp_path / "meta/dumps").exists()
    assert prepared(data, filter_out=[name]) == ["good.jsonl"]
    faults = LineFaults(skip=True)
    with pytest.raises(InputError, match=message):
        list(read_column(str(data / name), "text", batch_bytes=1000, faults=faults))
    assert not faults.counts


def test_texts_that_look_odd_are_no_faults() -> None:
    for name, content in (
        ("a.jsonl", b"\xef\xbb\xbf" + LINE),
        ("a.csv", b"text\n<html>\n"),
        ("a.jsonl", b" \n"),
        ("a.csv", b"ORCID,text\n1,a\n"),
        ("a.txt", b"<header>" + b"<!-- -->" * 60),
        ("a.arrow", b"\xff\xff\xff\xff\x10\0\0\0"),
        ("a.parquet", b"PAR1"),
    ):
        expected = "parquet" if name.endswith(".parquet") else None
        assert content_fault(name, content, expected) is None


def test_the_command_ends_with_1_and_says_the_way_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data", {f"{n}.jsonl": POINTER for n in range(30)} | {"x.jsonl": LINE})
    command = ["dumps", "prepare", "--dataset-folder", str(data), "--preprocessing-metadata-folder"]
    assert main([*command, str(tmp_path / "meta")]) == 1
    error = capfd.readouterr().err
    assert "30 files are refused" in error
    assert "git lfs pull" in error
    assert len(error.splitlines()) <= 20
    assert main([*command, str(tmp_path / "meta"), "--filter-in", "x"]) == 0


def test_common_endings_are_read(tmp_path: Path) -> None:
    table = pa.table({"text": ["one"]})
    names = ["a.ndjson", "b.jsonlines", "c.ndjson.gz", "d.jsonl.zstd", "e.pq", "f.feather", "g.csv.zst"]
    data = tmp_path / "data"
    write(data, {"a.ndjson": LINE, "b.jsonlines": LINE, "c.ndjson.gz": gzip.compress(LINE)})
    for name, content in (("d.jsonl.zstd", LINE), ("g.csv.zst", b"text\none\n")):
        with pa.CompressedOutputStream(str(data / name), "zstd") as out:
            out.write(content)
    pq.write_table(table, data / "e.pq")
    pa.feather.write_feather(table, str(data / "f.feather"))
    assert {file.path for file in take_inventory(data).taken} == set(names)
    for name in names:
        (array,) = read_column(str(data / name), "text", batch_bytes=1000)
        assert array.to_pylist() == ["one"], name


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00002.parquet", None),
        ("data/validation-00000-of-00001-6ef3991c06080e14.parquet", "validation"),
        ("c4-validation.00000-of-00008.json.gz", "validation"),
        ("wiki.valid.jsonl", "validation"),
        ("test/0.parquet", "test"),
        ("split=dev/0.parquet", "validation"),
        ("eval_set/0.jsonl", "test"),
        ("validation_set/0.jsonl", "validation"),
        ("dev2/0.jsonl", "validation"),
        ("devtest/0.jsonl", "validation"),
        ("testsplit/0.jsonl", "test"),
        ("subset=test/0.parquet", "test"),
        ("testset.jsonl", "test"),
        ("test1.jsonl", "test"),
        ("web_test_v2.jsonl", "test"),
        ("webTestSet.jsonl", "test"),
        ("x.val.shuf.jsonl", "validation"),
        ("the-test-of-time-3.jsonl", "test"),  # any word of a file of many documents
        ("the-test-of-time-3.txt", None),  # a title
        ("latest.jsonl", None),
        ("contest/0.jsonl", None),
        ("attested/unittest.jsonl", None),
        ("validated/devices-valley.jsonl", None),
    ],
)
def test_the_split_of_a_file_is_seen_in_its_folder_or_name(path: str, split: str | None) -> None:
    assert inventory.held_out_split(path) == split


def test_a_held_out_split_beside_training_data_is_refused_unless_it_is_chosen(tmp_path: Path) -> None:
    names = ["test.jsonl", "train-0.jsonl", "train-1.jsonl", "validation/0.jsonl"]
    data = write(tmp_path / "data", {name: LINE * n for n, name in enumerate(names, start=1)})
    with pytest.raises(
        InputError, match=r"(?s)2 files are refused.*test set.*: test\.jsonl.*validation set.*n/0\.json"
    ):
        prepared(data)
    assert [line["why"] for line in lines(data).values() if not line["taken"]] == ["another split"] * 2
    assert prepared(data, all_splits=True) == names
    assert prepared(data, filter_out=["test", "valid"]) == names[1:3]
    assert prepared(data, filter_in=["train", "test"]) == names[:3]
    assert prepared(write(tmp_path / "one/data", {"test/a.jsonl": LINE, "test/b.jsonl": LINE * 2})) == [
        "test/a.jsonl",
        "test/b.jsonl",
    ]


def test_sets_of_numbered_files_are_not_mixed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path / "data", {f"en-{n:05d}-of-00003.jsonl": LINE * n for n in range(1, 3)})
    assert len(prepared(data)) == 2
    assert "en-*.jsonl: 1 of the 3 files of this set are missing" in caplog.text
    write(data, {"en-00000-of-00002.jsonl": LINE * 9, "de-00000-of-00001.jsonl": LINE * 8})
    with pytest.raises(InputError, match=r"en-\*\.jsonl: files of several sets are mixed: 1 -of-2, 2 -of-3"):
        prepared(data)
    assert len(prepared(data, filter_out=["of-00002"])) == 3
    write(tmp_path / "hub/data", {f"t-{n:05d}-of-00002-{n}ef3991c06080e14.jsonl": LINE * n for n in range(1, 3)})
    assert len(prepared(tmp_path / "hub/data")) == 2
    write(tmp_path / "hub/data", {"t-00001-of-00002-ffffffffffffffff.jsonl": LINE * 7})
    with pytest.raises(InputError, match="files of several sets are mixed"):
        prepared(tmp_path / "hub/data")


def test_a_file_of_the_same_content_as_another_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    text = b"".join(b'{"text": "%d"}\n' % n for n in range(3000))
    other = text[:10000] + b"9" + text[10001:]  # between the blocks that are sampled
    data = tmp_path / "data"
    write(data, {"a.jsonl": text, "a (1).jsonl": text, "a.jsonl.gz": gzip.compress(text), "b.jsonl": other[::-1]})
    write(data, {"c.jsonl": other, "b.jsonl.gz": gzip.compress(LINE)})
    (data / "link.jsonl").symlink_to("b.jsonl")
    assert prepared(data) == ["a.jsonl", "b.jsonl", "b.jsonl.gz", "c.jsonl"]
    assert "left out, same content as another file: 3 files (" in caplog.text
    assert "bytes): a (1).jsonl = a.jsonl, a.jsonl.gz = a.jsonl, link.jsonl = b.jsonl" in caplog.text
    assert "1 files may hold the text of others (names or samples are alike): b.jsonl.gz = b.jsonl" in caplog.text
    found = lines(data)
    same = {name: (line["same_as"], line["taken"]) for name, line in found.items() if "same_as" in line}
    assert same == {
        "a (1).jsonl": ("a.jsonl", False),
        "a.jsonl.gz": ("a.jsonl", False),
        "b.jsonl.gz": ("b.jsonl", True),
        "link.jsonl": ("b.jsonl", False),
    }
    source = DataSource(source="jsonl", path=str(data), weight=1)
    assert sorted(os.path.basename(file.path) for file in find_text_files(source, "web")) == prepared(data)


def test_the_same_text_in_another_compression_under_another_name_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    texts = {name: b"".join(b'{"text": "%s %04d"}\n' % (name, n) for n in range(900)) for name in (b"a", b"b", b"c")}
    one, two, three = texts.values()  # of one length
    zstd = zstandard.ZstdCompressor()
    data = write(tmp_path / "data", {"one.jsonl": one, "second.jsonl.gz": gzip.compress(one), "b/x.jsonl": two})
    write(data, {"c/third.jsonl.zst": zstd.compress(one), "other.jsonl.gz": gzip.compress(three)})
    write(data, {"d/fast.jsonl.gz": gzip.compress(two, 1), "d/packed.jsonl.gz": gzip.compress(three, 1)})
    write(data, {"torn.jsonl.gz": gzip.compress(three)[:-9] + gzip.compress(three)[-8:]})
    source = DataSource(source="jsonl", path=str(data), weight=1)
    kept = ["b/x.jsonl", "one.jsonl", "other.jsonl.gz", "torn.jsonl.gz"]
    assert sorted(os.path.relpath(file.path, data) for file in find_text_files(source, "web")) == kept
    assert prepared(data) == kept
    assert {name: line["same_as"] for name, line in lines(data).items() if "same_as" in line} == {
        "second.jsonl.gz": "one.jsonl",
        "c/third.jsonl.zst": "one.jsonl",
        "d/fast.jsonl.gz": "b/x.jsonl",
        "d/packed.jsonl.gz": "other.jsonl.gz",
    }
    assert "left out, same content as another file: 4 files" in caplog.text


def test_a_file_that_its_name_calls_a_copy_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = ["a (1).jsonl", "Copy of a.jsonl", "a - Copy (2).jsonl", "a.bak.jsonl", "a.parquet", "a_old/a.jsonl"]
    others = ["a.jsonl", "b (1).jsonl", "gold.jsonl", "a/a.jsonl", "copy.jsonl", "old/b.jsonl", "thermocopy.jsonl"]
    data = write(tmp_path / "data", {name: LINE * n for n, name in enumerate(copies + others, 1) if ".p" not in name})
    pq.write_table(pa.table({"text": ["one"]}), data / "a.parquet")
    assert prepared(data) == sorted(copies + others)
    same = {name: line["same_as"] for name, line in lines(data).items() if "same_as" in line}
    assert same == dict.fromkeys(copies, "a.jsonl") | {"a_old/a.jsonl": "a/a.jsonl"}
    assert "6 files may hold the text of others (names or samples are alike)" in caplog.text


def test_a_copy_of_a_file_of_a_finished_dump_is_left_out(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a long name.jsonl": LINE})
    prepared(data)
    DumpsFolder(tmp_path / "meta").finish(0)
    write(data, {"a.jsonl": LINE, "b.jsonl": LINE * 2})
    assert prepared(data) == ["b.jsonl"]
    assert lines(data)["a.jsonl"]["same_as"] == "a long name.jsonl"


def arrow(rows: int) -> bytes:
    """A stream of Arrow in batches of ten rows."""
    table = pa.table({"text": [f"text {row}" for row in range(rows)]})
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(10):
            writer.write_batch(batch)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (arrow(30), None),
        (arrow(30) + bytes(8), None),
        (arrow(30)[:-8], "its stream of Arrow has no end mark"),
        (arrow(30) + arrow(10), "bytes behind the end mark"),
    ],
    ids=["whole", "padded", "cut behind a batch", "two streams"],
)
def test_a_stream_of_arrow_ends_with_its_mark(tmp_path: Path, content: bytes, fault: str | None) -> None:
    write(tmp_path, {"a.arrow": content})
    with contextlib.nullcontext() if fault is None else pytest.raises(InputError, match=fault):
        assert sum(map(len, read_column(str(tmp_path / "a.arrow"), "text", batch_bytes=1))) == 30


def test_a_saved_data_set_is_what_its_state_file_lists(tmp_path: Path) -> None:
    state = {"_data_files": [{"filename": f"data-0000{n}-of-00002.arrow"} for n in range(2)], "_split": "train"}
    files = {f"web/{file['filename']}": arrow(10 + n) for n, file in enumerate(state["_data_files"])}
    files |= {"web/state.json": json.dumps(state).encode(), "web/cache-0123456789abcdef.arrow": arrow(7)}
    data = write(tmp_path / "data", files | {"other/x.arrow": arrow(8), "web/data-00000-of-00001.arrow": arrow(9)})
    write(data, {"foreign/state.json": b"[]", "foreign/y.arrow": arrow(6)})
    taken = ["foreign/y.arrow", "other/x.arrow", "web/data-00000-of-00002.arrow", "web/data-00001-of-00002.arrow"]
    assert prepared(data) == taken
    assert lines(data)["web/cache-0123456789abcdef.arrow"]["why"] == "hidden or temporary"
    assert lines(data)["web/data-00000-of-00001.arrow"]["why"] == "not in the list of live files"
    (data / taken[2]).unlink()
    with pytest.raises(InputError, match=r"00000-of-00002.arrow: a list beside it names this file, which is missing"):
        prepared(data)


def test_a_stream_refuses_and_names_as_prepare_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = write(
        tmp_path / "data", {"a.jsonl": LINE, "_temporary/0.jsonl": LINE, "notes.txt": b"x", "b.jsonl": POINTER}
    )

    def found(on_error: Any = "fail") -> list[str]:
        source = DataSource(source="jsonl", path=str(data), weight=1, stream=StreamSection(on_error=on_error))
        return [os.path.basename(file.path) for file in find_text_files(source, "web")]

    with pytest.raises(InputError, match=r"b\.jsonl: a pointer of Git LFS"):
        found()
    assert found("skip-file") == ["a.jsonl"]
    assert "web: left out, hidden or temporary: 1 file (16 bytes): _temporary/0.jsonl" in caplog.text
    assert "web: left out, other content than its name: 1 file" in caplog.text
    write(data, {"test-0.jsonl": LINE[::-1]})
    with pytest.raises(InputError, match=r"1 file \(16 bytes\) of a test set beside other text: test-0\.jsonl") as bad:
        found("skip-file")
    assert "a pattern" in str(bad.value.hint)
    assert len(inventory.find_data_files(str(data), dead_links_only=True)) == 3
    assert "1 file (16 bytes) of a test set beside other text: test-0.jsonl" in caplog.text  # other commands name it


def test_a_pattern_of_a_stream_finds_what_a_folder_would(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    files = {"a.jsonl": LINE, "b.jsonl": LINE * 2, "copy.jsonl": LINE, "_tmp/c.jsonl": LINE * 3, "empty.jsonl": b""}
    data = write(tmp_path / "_mine" / "data", files)

    def found(pattern: str) -> list[str]:
        source = DataSource(source="jsonl", path=pattern, weight=1)
        return [os.path.relpath(file.path, data) for file in find_text_files(source, "web")]

    assert found(f"{data}/*.jsonl") == found(f"{data}/**/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert found(str(data)) == ["a.jsonl", "b.jsonl"]
    assert "web: left out, same content as another file: 1 file (16 bytes): copy.jsonl = a.jsonl" in caplog.text
    assert "web: left out, hidden or temporary: 1 file (48 bytes): _tmp/c.jsonl" in caplog.text
    assert found(f"{data}/_*/*.jsonl") == ["_tmp/c.jsonl"]  # spelled out
    write(data, {"test-0.jsonl": LINE * 4})
    assert "test-0.jsonl" in found(f"{data}/*.jsonl")
    assert "of a test set beside other text" in caplog.text
    write(data, {"page.jsonl": PAGE})
    with pytest.raises(InputError, match=r"page\.jsonl: a page of HTML"):
        found(f"{data}/*.jsonl")


def test_own_files_and_files_in_place_of_folders(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a.jsonl": LINE})
    for _ in range(2):
        prepare_dumps(data, data / "meta")
    assert read_paths_file(data / "meta/dumps/paths_file_0.txt") == ["a.jsonl"]
    with pytest.raises(InputError, match="this is a file, not a dataset folder"):
        take_inventory(data / "a.jsonl")


@pytest.mark.alone
@pytest.mark.long
def test_the_inventory_of_100_000_files_costs_less_than_60_cpu_seconds(tmp_path: Path) -> None:
    for number in range(100_000):
        if number % 1000 == 0:
            (folder := tmp_path / "data" / f"{number // 1000:03d}").mkdir(parents=True)
        with open(folder / f"{number:06d}.jsonl", "wb", buffering=0) as file:
            file.write(b'{"text": "%08d"}\n' % number)  # all of one size: every file is sampled
    begun = time.process_time()
    prepare_dumps(tmp_path / "data", tmp_path / "meta", n_dumps=10)
    seconds = time.process_time() - begun
    print(f"100,000 files: {seconds:.1f} s of CPU")
    assert seconds < 60


def test_a_file_in_place_of_the_folder_is_no_misspelled_path(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": LINE})
    with pytest.raises(InputError, match="this is a file, not a dataset folder") as bad:
        stat_inputs(tmp_path / "a.jsonl", ["a.jsonl"])
    assert "did you mean" not in str(bad.value)
