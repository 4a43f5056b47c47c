from __future__ import annotations

import errno
import fcntl
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from relayrun.errors import InputError
from relayrun.tokens.shards import merge as module
from relayrun.tokens.shards.checks import verify_shards
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.shard import INDEX_HEADER, Shard, ShardWriter
from tests.shard_records import write_folder_record

ROOT = Path(__file__).resolve().parents[2]
EOD = 9


def write_shard(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    writer = ShardWriter(prefix, dtype)
    for document in documents:
        writer.add(document, [len(document)])
    writer.finish()
    record = prefix.parent / "tokenization.json"
    shards = json.loads(record.read_text())["shards"] if record.exists() else {}
    write_folder_record(prefix.parent, {**shards, prefix.name: {"xxh3_128": writer.xxh3_128}})
    return str(prefix)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    generator = np.random.default_rng(0)
    return [
        write_shard(
            tmp_path / "in" / f"{number}",
            [[*generator.integers(0, 9, generator.integers(0, 50)).tolist(), EOD] for _ in range(20)] + [[]],
        )
        for number in range(3)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, while megatron-core imports it
def test_a_merge_is_the_bytes_of_megatrons_own(shards: list[str], tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for prefix in shards:
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "theirs.idx"))
    merged = merge_shards(shards, tmp_path / "to" / "ours")
    assert (merged.documents, merged.sequences) == (63, 60)
    for suffix in (".bin", ".idx"):
        assert Path(merged.prefix + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert len(IndexedDataset(merged.prefix)) == 60
    assert sorted(file.name for file in (tmp_path / "to").iterdir()) == ["ours.bin", "ours.idx", "ours.record.json"]
    record = json.loads((tmp_path / "to" / "ours.record.json").read_text())
    assert record["xxh3_128"]["bin"] == xxhash.xxh3_128_hexdigest((tmp_path / "theirs.bin").read_bytes())
    assert record["merged"] == shards


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, while megatron-core imports it
def test_a_multimodal_merge_is_the_bytes_of_megatrons_own(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefixes = []
    for number in range(2):
        prefix = tmp_path / f"part{number}"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16, multimodal=True)
        for document in range(3):
            for mode in range(document + 1):
                builder.add_item(torch.tensor([number, document, mode]), mode=mode)
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
        prefixes.append(str(prefix))
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16, multimodal=True)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "theirs.idx"))
    merged = merge_shards(prefixes, tmp_path / "ours", multimodal=True)
    assert np.asarray(merged.modes()).tolist() == 2 * [0, 0, 1, 0, 1, 2]
    for suffix in (".bin", ".idx"):
        assert Path(merged.prefix + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    with pytest.raises(InputError, match=r"the index has modes of sequences: multimodal(?s:.*)--multimodal"):
        merge_shards(prefixes, tmp_path / "plain")
    with pytest.raises(InputError, match=r"the index has no modes of sequences(?s:.*)without --multimodal"):
        merge_shards([write_shard(tmp_path / "text" / "s", [[1, EOD]])], tmp_path / "other", multimodal=True)


def test_shards_that_do_not_fit_together_are_refused_and_leave_nothing(shards: list[str], tmp_path: Path) -> None:
    wide = write_shard(tmp_path / "wide", [[1, EOD]], np.int32)
    with pytest.raises(InputError, match="wide: token types differ: int32 here, uint16 in"):
        merge_shards([shards[0], wide], tmp_path / "to" / "merged")
    with pytest.raises(InputError, match="exists already"):
        merge_shards(shards, shards[0])
    os.truncate(shards[1] + ".bin", 4)
    with pytest.raises(InputError, match="torn"):
        merge_shards(shards, tmp_path / "to" / "merged")
    assert not (tmp_path / "to").exists()


def test_the_script_merges_folders_in_the_order_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("b", "c", "a")]
    for number, folder in enumerate(folders):
        write_shard(folder / "s", [[number, EOD]])
    monkeypatch.setattr("sys.argv", ["x", "--input", *map(str, folders), "--output-prefix", str(tmp_path / "merged")])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "scripts/tools/merge_datasets.py"), run_name="__main__")
    assert np.asarray(Shard.open(tmp_path / "merged").ids()).tolist() == [0, EOD, 1, EOD, 2, EOD]


def test_a_flipped_bit_in_a_merged_shard_is_found(shards: list[str], tmp_path: Path) -> None:
    merged = merge_shards(shards, tmp_path / "to" / "merged")
    assert verify_shards([merged.prefix])[0].faults == ()
    damage(merged.prefix, "flipped bit")
    assert verify_shards([merged.prefix])[0].faults == ("the .bin is not what its record says (xxh3-128)",)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_an_input_that_is_not_what_its_record_says_is_not_merged(
    shards: list[str], tmp_path: Path, suffix: str
) -> None:
    if suffix == ".bin":
        damage(shards[1], "flipped bit")
    else:
        index = bytearray(Path(shards[1] + ".idx").read_bytes())
        bounds = INDEX_HEADER.size + 12 * Shard.open(shards[1]).sequences
        index[bounds + 8] ^= 3  # the first document gets another end
        Path(shards[1] + ".idx").write_bytes(index)
    with pytest.raises(InputError, match=rf"1\{suffix}: the {suffix} is not what its record says"):
        merge_shards(shards, tmp_path / "to" / "merged")
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
@pytest.mark.parametrize("at", ["beginning", "end"])
def test_of_two_merges_into_one_shard_one_is_whole_and_the_other_is_refused(
    shards: list[str], tmp_path: Path, locks: bool, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They shared a temporary file: the one that was refused or interrupted left zeros in the other's result."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    place, name = (module, "_append_shard") if at == "beginning" else (module, "encode_index")
    real = getattr(place, name)
    refused: list[InputError] = []

    def meanwhile(*given: Any) -> Any:
        monkeypatch.setattr(place, name, real)
        try:
            merge_shards(shards[:2], tmp_path / "to" / "merged")
        except InputError as error:
            refused.append(error)
        return real(*given)

    monkeypatch.setattr(place, name, meanwhile)
    try:
        merge_shards(shards, tmp_path / "to" / "merged")
    except InputError as error:
        refused.append(error)
    (error,) = refused
    assert "another process makes this: " in str(error)
    assert (tmp_path / "to/merged.bin").read_bytes() == b"".join(Path(f"{each}.bin").read_bytes() for each in shards)
    assert verify_shards([str(tmp_path / "to" / "merged")])[0].faults == ()
    assert sorted(os.listdir(tmp_path / "to")) == ["merged.bin", "merged.idx", "merged.record.json"]


def test_a_merge_goes_on_where_one_was_killed_and_removes_what_that_one_left(shards: list[str], tmp_path: Path) -> None:
    program = f"""
import os, signal
from relayrun.tokens.shards import merge
merge.encode_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
merge.merge_shards({shards!r}, {str(tmp_path / "to/merged")!r})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "to/merged.bin").exists()
    merge_shards(shards, tmp_path / "to" / "merged")
    assert sorted(os.listdir(tmp_path / "to")) == ["merged.bin", "merged.idx", "merged.record.json"]


def test_whole_shards_have_no_faults(shards: list[str]) -> None:
    checked = verify_shards(shards, vocabulary_size=10, eod=EOD)
    assert [each.prefix for each in checked] == shards
    assert not any(each.faults for each in checked)
    assert [each.tokens for each in checked] == [Shard.open(prefix).tokens for prefix in shards]


def damage(prefix: str, kind: str) -> None:
    index, tokens = Path(prefix + ".idx"), Path(prefix + ".bin")
    bytes_of_index, ids = bytearray(index.read_bytes()), np.fromfile(tokens, np.uint16)
    sequences = Shard.open(prefix).sequences
    if kind == "torn .bin":
        os.truncate(tokens, tokens.stat().st_size - 2)
    elif kind == "trailing bytes":
        tokens.write_bytes(tokens.read_bytes() + b"\0\0")
    elif kind == "id too large":
        ids[0] = 10
        ids.tofile(tokens)
    elif kind == "no EOD":
        ids[-1] = 3
        ids.tofile(tokens)
    elif kind == "flipped bit":
        ids[1] ^= 1
        ids.tofile(tokens)
    elif kind == "offset":
        struct.pack_into("<q", bytes_of_index, INDEX_HEADER.size + 4 * sequences + 8, 2)
    elif kind == "length":
        struct.pack_into("<i", bytes_of_index, INDEX_HEADER.size, 0)
    elif kind == "bounds":
        struct.pack_into("<q", bytes_of_index, INDEX_HEADER.size + 12 * sequences, 1)
    index.write_bytes(bytes_of_index)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("torn .bin", "token file is torn"),
        ("trailing bytes", "its index ends at"),
        ("id too large", "ids from 0 to 10, but the vocabulary has 10"),
        ("no EOD", "1 documents do not end with 9, the first of them is document 19"),
        ("flipped bit", "the .bin is not what its record says"),
        ("offset", "sequence 1 does not begin where"),
        ("length", "sequence 0 has no tokens"),
        ("bounds", "bounds do not run from the first sequence"),
    ],
)
def test_every_fault_is_named(shards: list[str], kind: str, message: str) -> None:
    damage(shards[1], kind)
    good, bad, other = verify_shards(shards, vocabulary_size=10, eod=EOD)
    assert not good.faults
    assert not other.faults
    assert any(message in fault for fault in bad.faults), bad.faults


@pytest.mark.slow
def test_the_doors_say_what_they_did(shards: list[str], tmp_path: Path) -> None:
    folder = Path(shards[0]).parent

    def door(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/tools" / name), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)

    merged = door("merge_datasets.py", "--input", folder, "--output-prefix", tmp_path / "dump-0-merged")
    assert merged.returncode == 0
    assert "3 shards, 63 documents" in merged.stdout
    assert door("verify_dataset.py", folder, "--vocabulary-size", 10, "--eod", EOD).returncode == 0
    damage(shards[2], "flipped bit")
    failed = door("verify_dataset.py", folder)
    assert failed.returncode == 1
    assert f"{shards[2]}: the .bin is not what its record says" in failed.stdout
    assert "error: 1 of 3 shards have faults" in failed.stderr


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", np.uint16)
    writer.add([1, 2, 3], [3])
    mark = writer.mark()
    for _ in range(2):
        writer.add([4, 5], [1, 1])
        room = writer.reserve(2)
        room[:] = 7
        writer.rollback(mark)
    room = writer.reserve(1)
    room[:] = 6
    writer.add(room, [1])
    writer.finish()
    assert np.fromfile(tmp_path / "x.bin", np.uint16).tolist() == [1, 2, 3, 6]
    for suffix, digest in writer.xxh3_128.items():
        assert xxhash.xxh3_128((tmp_path / f"x.{suffix}").read_bytes()).hexdigest() == digest
