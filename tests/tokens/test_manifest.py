from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from relayrun.errors import InputError
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest
from relayrun.tokens.shards.shard import INDEX_HEADER, INDEX_MAGIC, ShardWriter


def shard(prefix: Path, lengths: list[int], dtype: type[np.generic] = np.uint16, first: int = 0) -> str:
    writer = ShardWriter(prefix, dtype)
    writer.add(np.arange(first, first + sum(lengths)), lengths)
    assert writer.finish()
    return str(prefix)


def raw_index(prefix: Path, lengths: list[int], offsets: list[int], code: int = 8) -> None:
    n = len(lengths)
    Path(f"{prefix}.idx").write_bytes(
        INDEX_HEADER.pack(INDEX_MAGIC, 1, code, n, n + 1)
        + struct.pack(f"<{n}i", *lengths)
        + struct.pack(f"<{n}q", *offsets)
        + struct.pack(f"<{n + 1}q", *range(n + 1))
    )


def build(train: list[str], **validation: list[str]) -> Manifest:
    return Manifest.build({"train": train}, validation, vocabulary_size=500, eod=3, tokenizer="some/tokenizer")


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    return [shard(tmp_path / f"s{i}", [5, 7 + i]) for i in range(3)]


def test_keeps_the_given_order_and_what_each_shard_holds(three: list[str]) -> None:
    manifest = build([three[2], three[0]], held_out=[three[1]])
    assert [entry.prefix for entry in manifest.datasets["train"].shards] == [three[2], three[0]]
    entry = manifest.datasets["train"].shards[0]
    assert (entry.dtype, entry.tokens, entry.documents, entry.bin_bytes) == ("uint16", 14, 2, 28)
    assert entry.idx_bytes == os.path.getsize(three[2] + ".idx")
    assert manifest.datasets["train"].tokens == 26
    assert manifest.validation["held_out"].tokens == 13


def test_written_and_read_is_the_same(three: list[str], tmp_path: Path) -> None:
    manifest = build(three[:2], v=three[2:])
    manifest.write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == manifest
    read = Manifest.read(tmp_path / "manifest.json")
    assert read.datasets["train"].fingerprint == manifest.datasets["train"].fingerprint


def test_relative_prefixes_become_absolute(three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert build(["s0"]).datasets["train"].shards[0].prefix == three[0]


def test_names_with_blanks_quotes_and_a_leading_dash(tmp_path: Path) -> None:
    names = ["a b", 'it\'s "x"', "-rf", "ünï ☃", "new\nline"]
    manifest = build([shard(tmp_path / name, [4]) for name in names])
    manifest.write(tmp_path / "manifest.json")
    again = Manifest.read(tmp_path / "manifest.json")
    again.verify()
    assert [Path(entry.prefix).name for entry in again.datasets["train"].shards] == names


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff")
    with pytest.raises(InputError, match="UTF-8"):
        build([shard(tmp_path / name, [4])])


def test_fingerprint_follows_the_data_and_its_order_but_not_its_place(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        shard(tmp_path / folder / "a", [5, 7])
        shard(tmp_path / folder / "b", [6, 6])
    x, y = ([str(tmp_path / folder / name) for name in "ab"] for folder in "xy")
    fingerprint = DatasetManifest.build(x).fingerprint
    assert DatasetManifest.build(y).fingerprint == fingerprint
    assert DatasetManifest.build(x[::-1]).fingerprint != fingerprint
    shard(tmp_path / "y" / "b", [5, 7])
    assert DatasetManifest.build(y).fingerprint != fingerprint


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_training_shard_in_a_validation_set_is_refused_also_through_links(
    link: object, three: list[str], tmp_path: Path
) -> None:
    assert callable(link)
    for suffix in (".bin", ".idx"):
        link(three[0] + suffix, str(tmp_path / "other") + suffix)
    with pytest.raises(InputError, match=r"s0: 1 training shard.*validation 'v'"):
        build(three[:2], v=[str(tmp_path / "other")])
    with pytest.raises(InputError, match=r"other: its text also stands in .*s0"):
        build([three[0], str(tmp_path / "other")])


def test_an_empty_set_is_refused_by_name(three: list[str]) -> None:
    with pytest.raises(InputError, match="data set 'train' has no shard"):
        build([])
    with pytest.raises(InputError, match="validation set 'v' has no shard"):
        build(three, v=[])


def test_a_shard_that_does_not_open_is_refused(three: list[str]) -> None:
    os.truncate(three[1] + ".bin", 10)
    with pytest.raises(InputError, match=r"s1\.bin: token file is torn"):
        build(three)
    os.unlink(three[1] + ".bin")
    with pytest.raises(InputError, match=r"s1\.bin: .*missing"):
        build(three)


def test_token_ids_that_are_no_integers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.bin").write_bytes(bytes(16))
    raw_index(tmp_path / "f", [4], [0], code=7)
    with pytest.raises(InputError, match="float32"):
        build([str(tmp_path / "f")])


@pytest.mark.parametrize(
    ("lengths", "offsets", "at"),
    [
        ([4, 3, 3], [0, 14, 8], 1),  # reordered
        ([3, 3], [8, 14], 0),  # the head is cut
        ([4, 3], [0, 14], 1),  # one is left out
        ([4, -1, 7], [0, 8, 6], 1),
    ],
)
def test_an_index_that_is_not_the_token_file_in_order_is_refused(
    tmp_path: Path, lengths: list[int], offsets: list[int], at: int
) -> None:
    (tmp_path / "s.bin").write_bytes(bytes(20))
    raw_index(tmp_path / "s", lengths, offsets)
    with pytest.raises(InputError, match=rf"s\.idx: .*sequence {at} of the index"):
        build([str(tmp_path / "s")])


def test_an_index_is_checked_across_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayrun.tokens.shards.shard._INDEX_CHUNK", 3)
    assert build([shard(tmp_path / "s", [2, 1, 5, 3, 0, 4, 6])]).datasets["train"].tokens == 21
    raw_index(tmp_path / "s", [2, 1, 5, 3, 0, 4, 5], [0, 4, 6, 16, 22, 22, 32])
    with pytest.raises(InputError, match="sequence 6 of the index"):
        build([str(tmp_path / "s")])


def test_an_index_cut_at_its_end_leaves_the_rest_of_the_token_file_out(tmp_path: Path) -> None:
    (tmp_path / "s.bin").write_bytes(bytes(20))
    raw_index(tmp_path / "s", [4, 3], [0, 8])
    assert build([str(tmp_path / "s")]).datasets["train"].tokens == 7


def test_a_shard_without_documents_is_kept(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    raw_index(tmp_path / "empty", [], [])
    assert build([str(tmp_path / "empty")]).datasets["train"].tokens == 0


def test_verify_names_every_difference(three: list[str]) -> None:
    manifest = build(three[:2], v=three[2:])
    manifest.verify()
    os.truncate(three[0] + ".bin", 10)
    os.unlink(three[1] + ".idx")
    with open(three[2] + ".idx", "ab") as file:
        file.write(b"x")
    with pytest.raises(InputError) as caught:
        manifest.verify()
    text = str(caught.value)
    assert f"train: {three[0]}.bin: 10 bytes, was 24" in text
    assert f"train: {three[1]}.idx: missing" in text
    assert f"validation 'v': {three[2]}.idx:" in text
    assert "in 3 file(s)" in text


@pytest.mark.parametrize("damage", ["cut", "list", "version", "tokens", "field", "binary"])
def test_a_damaged_manifest_is_refused_by_its_path(three: list[str], tmp_path: Path, damage: str) -> None:
    path = tmp_path / "manifest.json"
    build(three).write(path)
    value = json.loads(path.read_text())
    if damage == "cut":
        os.truncate(path, 100)
    elif damage == "binary":
        path.write_bytes(b"\xff\xfe{}")
    elif damage == "list":
        path.write_text("[]")
    else:
        if damage == "version":
            value["version"] = 1
        elif damage == "tokens":
            value["datasets"]["train"]["shards"][0]["tokens"] += 1
        else:
            del value["datasets"]["train"]["shards"][0]["dtype"]
        path.write_text(json.dumps(value))
    with pytest.raises(InputError, match="cannot be read as a manifest") as caught:
        Manifest.read(path)
    assert caught.value.where == str(path)
