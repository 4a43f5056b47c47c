"""Ranges of large files: each row once and in order wherever a file is cut, and the bytes of one worker when merged."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from relayrun.errors import InputError
from relayrun.tokens.readers import deal_files, file_ranges
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.deal_files import cut_offsets
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.readers.file_ranges import cut_path, file_of_range, split_range
from relayrun.tokens.readers.inputs import read_paths_file
from relayrun.tokens.shards.manifest import TextFileEntry, check_held_out, doubled_texts
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import TokenizeResult, tokenize_paths_file
from relayrun.tokens.tokenize.shard_folder import FolderRecord, stale_inputs
from relayrun.tokens.tokenize.verify import compare_with_source
from tests.tokenization_corpus import train_tokenizer

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.compress(data),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write_jsonl(folder: Path, ending: str, rng: random.Random, lines: int = 60) -> Path:
    """Lines of all lengths and ends, in members that end anywhere."""
    sizes = [rng.randrange(rng.choice([5, 60, 400])) for _ in range(rng.randrange(1, lines))]
    rows = [json.dumps({"text": "x" * n + f" {i}"}) + rng.choice(["\n", "\r\n", "\n\n"]) for i, n in enumerate(sizes)]
    data = "".join(rows)[: -1 if rng.random() < 0.5 else None].encode()
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6))) if ending else []
    path = folder / f"a.jsonl{ending}"
    bounds = zip([0, *cuts], [*cuts, len(data)], strict=True)
    path.write_bytes(b"".join(COMPRESS[ending](data[begin:end]) for begin, end in bounds))
    return path


def write_parquet(folder: Path, rng: random.Random) -> Path:
    rows = rng.randrange(1, 60)
    table = pa.table({"number": list(range(rows)), "text": [f"{i}" * 5 for i in range(rows)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=rng.randrange(1, 20))
    return folder / "a.parquet"


def texts(path: str, faults: LineFaults | None = None) -> list[Any]:
    return [text for array in read_column(path, "text", batch_bytes=1000, faults=faults) for text in array.to_pylist()]


@pytest.mark.parametrize("ending", [*COMPRESS, ".parquet"])
def test_each_row_is_in_one_range_wherever_a_file_is_cut(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(15 if ending == ".parquet" else 40):
        rng = random.Random(seed)
        monkeypatch.setattr(file_ranges, "_BLOCK", rng.choice([7, 50, 1 << 20]))
        file = write_parquet(tmp_path, rng) if ending == ".parquet" else write_jsonl(tmp_path, ending, rng)
        path, size = str(file), file.stat().st_size
        for pieces in (2, 3, 7):
            anywhere = sorted({rng.randrange(1, size) for _ in range(pieces)})
            for offsets in (anywhere, cut_offsets(path, size, pieces)):
                ranges = cut_path(path, offsets)
                ends = [end or size for _, _, end in map(split_range, ranges)]
                again = [
                    piece
                    for each, end in zip(ranges, ends, strict=True)
                    for piece in cut_path(each, cut_offsets(each, end - split_range(each)[1], 3))
                ]
                for parts in (ranges, again):
                    assert [text for part in parts for text in texts(part)] == texts(path), (seed, parts)


def tokenize(folder: Path, name: str, output: str, tasks: int, **options: Any) -> TokenizeResult:
    (folder / "paths").write_text(name + "\n")
    given = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"), tasks=tasks, workers=2, **options)
    return tokenize_paths_file(given, output_folder=folder / output, dataset=folder, paths_file=folder / "paths")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(deal_files, "SMALLEST_RANGE", 500)
    train_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def write_large(folder: Path, ending: str) -> str:
    rng = random.Random(1)
    rows = [f"the words of row {i} and {rng.randbytes(80).hex()} {'more ' * (i % 7)}" for i in range(400)]
    if ending == ".parquet":
        pq.write_table(pa.table({"text": rows}), folder / "a.parquet", row_group_size=17)
        return "a.parquet"
    lines = [json.dumps({"text": row}) + "\n" for row in rows]
    members = ["".join(lines[i : i + 20]).encode() for i in range(0, len(lines), 20)]
    (folder / f"a.jsonl{ending}").write_bytes(b"".join(map(COMPRESS[ending], members)))
    return f"a.jsonl{ending}"


@pytest.mark.slow
@pytest.mark.parametrize("ending", [*COMPRESS, ".parquet"])
def test_workers_share_one_file_and_their_merged_shard_is_that_of_one_worker(folder: Path, ending: str) -> None:
    name = write_large(folder, ending)
    tokenize(folder, name, "one", tasks=1)
    result = tokenize(folder, name, "four", tasks=4)
    record = FolderRecord.read(folder / "four")
    assert len(record.tasks) == 4
    assert min(task.documents for task in record.tasks.values()) >= 50
    assert (result.files, result.documents, result.rows) == (1, 400, {name: 400})
    assert result.input_bytes == (folder / name).stat().st_size
    assert result.input_bytes == sum(file[1] for task in record.tasks.values() for file in task.inputs)
    merge_shards(find_prefixes([folder / "four"]), folder / "merged")
    for suffix in ("bin", "idx"):
        assert file_checksum(folder / f"merged.{suffix}") == file_checksum(folder / "one" / f"00000_tokens.{suffix}")
    compared = compare_with_source(find_prefixes([folder / "four"]), workers=1, full=True)
    assert [(each.fault, each.note) for each in compared] == [(None, None)] * 4
    (folder / "four" / "00002_tokens.bin").unlink()
    assert tokenize(folder, name, "four", tasks=4).tasks_run == 1


def test_a_file_of_one_member_or_one_row_group_is_not_cut(folder: Path) -> None:
    lines = "".join(json.dumps({"text": f"row {i} {os.urandom(20).hex()}"}) + "\n" for i in range(400))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": lines.splitlines()}), folder / "b.parquet")
    for name in ("a.jsonl.gz", "b.parquet"):
        tokenize(folder, name, f"out-{name}", tasks=4)
        assert list(FolderRecord.read(folder / f"out-{name}").parts.values()) == [[name]]


@pytest.mark.slow
def test_small_files_beside_a_large_one_are_dealt_in_order_and_others_as_before(folder: Path) -> None:
    name = write_large(folder, "")
    names = [f"{i}.jsonl" for i in range(6)]
    for each in names:
        (folder / each).write_text('{"text": "few words"}\n' * 5)
    tokenize(folder, "\n".join([name, *names]), "mixed", tasks=3)
    first, second, third = FolderRecord.read(folder / "mixed").parts.values()
    assert [*map(len, (first, second))] == [1, 1]
    assert third[1:] == names
    tokenize(folder, "\n".join(names), "small", tasks=2)
    assert [*FolderRecord.read(folder / "small").parts.values()] == [names[0::2], names[1::2]]


@pytest.mark.slow
def test_ranges_of_one_file_that_come_into_one_part_are_one_range(folder: Path) -> None:
    data = folder / "ranges"
    data.mkdir()
    for name, rows in (("a", 600), ("b", 2600), ("c", 900), ("d", 900)):
        (data / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n' * rows)
    dumps = prepare_dumps(data, folder / "ranges-meta", n_dumps=5)
    files = [folder / f"ranges-meta/dumps/paths_file_{dump.index}.txt" for dump in dumps]
    read = [name for file in files for name in read_paths_file(file)]
    assert [*map(file_of_range, read)].count("b.jsonl") == 2
    assert sum(len(texts(f"{data}/{name}")) for name in read) == 5000


def test_a_file_that_changed_or_grew_is_made_again(folder: Path) -> None:
    name = write_large(folder, "")
    tokenize(folder, name, "out", tasks=4)
    with open(folder / name, "a") as file:
        file.write('{"text": "one more"}\n')
    assert stale_inputs(folder / "out", str(folder), {}) == ([name], [])
    result = tokenize(folder, name, "out", tasks=4)
    assert (result.documents, result.tasks_run) == (401, 4)
    (folder / name).unlink()
    assert stale_inputs(folder / "out", str(folder), {}) == ([], [name])


def test_a_bad_line_is_named_by_its_range(folder: Path) -> None:
    name = write_large(folder, "")
    lines = (folder / name).read_bytes().splitlines(keepends=True)
    lines[390] = b"{broken\n"
    (folder / name).write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"a.jsonl/bytes=\d+-:\d+: this line is not JSON") as caught:
        tokenize(folder, name, "out", tasks=4)
    place, number = str(caught.value).split(": ")[0].rsplit(":", 1)
    assert lines[390] in (folder / name).read_bytes()[split_range(place)[1] :].splitlines(keepends=True)[int(number)]
    result = tokenize(folder, name, "out", tasks=4, on_error="skip-line")
    assert (result.documents, result.bad_lines) == (399, {"not JSON": 1})


@pytest.mark.slow
def test_held_out_ranges_are_text_of_their_file(folder: Path) -> None:
    name = write_large(folder, "")
    tokenize(folder, name, "out", tasks=4)
    prefixes = find_prefixes([folder / "out"])
    assert doubled_texts(prefixes) is None
    raw = TextFileEntry(path=str(folder / name), size=(folder / name).stat().st_size, fingerprint="")
    merge_shards(prefixes[2:], folder / "merged")
    for held_out in (prefixes[2], str(folder / "merged")):
        with pytest.raises(InputError, match="also stand in validation"):
            check_held_out({}, {"v": [held_out]}, files=[raw])
    tokenize(folder, name, "whole", tasks=1)
    with pytest.raises(InputError, match="also stand in validation"):
        check_held_out({"t": find_prefixes([folder / "whole"])}, {"v": prefixes[3:]})


def settings_of(folder: Path) -> TokenizationSettings:
    return TokenizationSettings(
        tokenizer=str(folder / "tokenizer.json"),
        tokenizer_name="t",
        dataset_name="d",
        metadata_folder=str(folder / "meta"),
        output_folder=str(folder / "tokens"),
        logs=str(folder / "logs"),
        workers=1,
        tasks=2,
    )


@pytest.mark.slow
def test_dumps_share_one_file_and_a_second_prepare_keeps_their_ranges(folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    name, settings = write_large(data, ""), settings_of(folder)
    assert [len(dump.files) for dump in prepare_dumps(data, folder / "meta", n_dumps=2)] == [1, 1]
    dumps = prepare_dumps(data, folder / "meta", n_dumps=3)  # none is begun
    assert sum(dump.size for dump in dumps) == (data / name).stat().st_size
    prepare_submission(settings)
    tokenize_dump(settings, 1)
    (data / "new.jsonl").write_text('{"text": "came later"}\n')
    again = prepare_dumps(data, folder / "meta")
    assert [dump.files for dump in again[:2]] == [dumps[0].files, dumps[2].files]
    assert [(dump.index, [file.path for file in dump.files]) for dump in again[2:]] == [(3, ["new.jsonl"])]
    for index in prepare_submission(settings):
        tokenize_dump(settings, index)
    found = [Shard.open(prefix).documents for prefix in find_prefixes([folder / "tokens"])]
    assert sum(found) == 401
    lines = [json.loads(line) for line in (folder / "meta" / "inventory.jsonl").read_text().splitlines()]
    assert {line["path"]: line["rows"] for line in lines} == {name: 400, "new.jsonl": 1}
    merge_shards(find_prefixes([folder / "tokens" / "t" / "d" / f"dump-{i}" for i in range(3)]), folder / "merged")
    tokenize(folder, f"data/{name}", "one", tasks=1)
    assert file_checksum(folder / "merged.bin") == file_checksum(folder / "one" / "00000_tokens.bin")
    (data / name).unlink()
    with pytest.raises(InputError, match="nothing to tokenize"):
        prepare_dumps(data, folder / "meta")
