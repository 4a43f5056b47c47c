from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from relayrun import leftovers
from relayrun.errors import RelayrunError
from relayrun.tokens.shuffle import buckets
from relayrun.tokens.shuffle import reshard as module
from relayrun.tokens.shuffle.buckets import row_keys
from relayrun.tokens.shuffle.reshard import ReshardOptions

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        texts = [f"{number}-{row}-" + "x" * (row % 50) for row in range(1000)]
        pq.write_table(pa.table({"text": texts, "id": list(range(1000))}), folder / f"{number}.parquet")
    return folder


def reshard(dataset_folder: Path | str, output: Path, **options: Any) -> int:
    return module.reshard(ReshardOptions(dataset_folder=str(dataset_folder), output=output, **options))


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit counts the rows alone, so that small data does not fit."""
    for name, value in (("_BASE", 0), ("_THREAD", 0), ("_PAGES", 0), ("_LEAST", 4), ("_GROUP_COPIES", 0)):
        monkeypatch.setattr(module, name, value)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.parquet")}


def rows(folder: Path) -> list[tuple[str, int]]:
    files = sorted(folder.glob("data_*.parquet"), key=lambda file: int(file.stem[5:]))
    return [(row["text"], row["id"]) for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.slow
def test_every_row_comes_once_in_another_order_and_with_its_columns(data: Path, tmp_path: Path) -> None:
    assert reshard(data, tmp_path / "out", row_group_size=100) == ROWS
    shuffled = rows(tmp_path / "out")
    original = [row for file in sorted(data.iterdir()) for row in pq.read_table(file).to_pylist()]
    in_order = [(row["text"], row["id"]) for row in original]
    assert sorted(shuffled) == sorted(in_order)
    assert sum(a == b for a, b in zip(shuffled, in_order, strict=True)) < 10
    places = np.array([int(text[0]) for text, _ in shuffled])
    assert abs(places[:1500].mean() - places[1500:].mean()) < 0.15  # files are mixed over the whole


def in_order(data: Path, seed: int, mask: np.uint64) -> list[tuple[str, int]]:
    """The rows sorted by their keys, in the plain way."""
    found = []
    for number, file in enumerate(sorted(data.iterdir())):
        table = pq.read_table(file)
        of_file = row_keys(seed, number, np.arange(len(table), dtype=np.uint64)) & mask
        found += [(key, row["text"], row["id"]) for key, row in zip(of_file.tolist(), table.to_pylist(), strict=True)]
    return [(text, number) for _, text, number in sorted(found, key=lambda row: row[0])]


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    memory=st.integers(20_000, 3_000_000),
    threads=st.integers(1, 4),
    row_group_size=st.integers(20, 700),
    file_size=st.integers(20_000, 200_000),
    few_keys=st.booleans(),
)
def test_the_bytes_depend_on_the_seed_alone_and_the_order_is_that_of_the_keys(
    data: Path, small_memory: None, memory: int, threads: int, row_group_size: int, file_size: int, few_keys: bool
) -> None:
    options = {"row_group_size": row_group_size, "file_size": file_size, "seed": 1}
    mask = np.uint64(0xF000000000000000 if few_keys else 0xFFFFFFFFFFFFFFFF)  # few: many rows share a key
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "row_keys", lambda *args: row_keys(*args) & mask)
        one, two = Path(folder, "one"), Path(folder, "two")
        reshard(data, one, **options, memory_limit=1 << 40)
        reshard(data, two, **options, memory_limit=memory, threads=threads)
        plan = module.make_shuffle_plan(
            ReshardOptions(dataset_folder=str(data), output=Path(folder, "x"), memory_limit=memory, threads=threads)
        )
        event(f"buckets {min(plan.buckets, 20)}, parts {len(plan.parts)}")
        assert digests(one) == digests(two)
        assert rows(one) == in_order(data, 1, mask)


def test_a_file_that_changes_once_its_rows_are_counted_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = module.inspect_files

    def inspected(*arguments: Any) -> Any:
        found = inspect(*arguments)
        os.utime(data / "1.parquet", (1, 1))
        return found

    monkeypatch.setattr(module, "inspect_files", inspected)
    with pytest.raises(RelayrunError, match=r"1\.parquet: this file changed while it was read"):
        reshard(data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_seed_gives_other_bytes(data: Path, tmp_path: Path) -> None:
    reshard(data, tmp_path / "one", seed=1)
    reshard(data, tmp_path / "other", seed=2)
    assert digests(tmp_path / "one") != digests(tmp_path / "other")


@pytest.mark.slow
def test_row_groups_and_files_have_the_sizes_asked_for(data: Path, tmp_path: Path) -> None:
    reshard(data, tmp_path / "out", row_group_size=70, file_size=20_000)
    files = sorted((tmp_path / "out").glob("*.parquet"), key=lambda file: int(file.stem[5:]))
    found = [pq.read_metadata(file) for file in files]
    groups = [[each.row_group(group).num_rows for group in range(each.num_row_groups)] for each in found]
    assert [rows for each in groups for rows in each] == [70] * (ROWS // 70) + [ROWS % 70]
    assert len({len(each) for each in groups[:-1]}) == 1
    sizes = [file.stat().st_size for file in files]
    assert 20_000 <= sizes[0] < 30_000
    assert all(0.9 < size / sizes[0] < 1.1 for size in sizes[:-1])


def test_the_order_is_that_of_the_keys() -> None:
    one, two = row_keys(0, 0, np.arange(100_000, dtype=np.uint64)), row_keys(0, 1, np.arange(100_000, dtype=np.uint64))
    assert len({*one.tolist(), *two.tolist()}) == 200_000
    counts = np.histogram(one >> np.uint64(60), bins=16)[0]
    assert abs(counts - 6250).max() < 400


@pytest.mark.slow
def test_jsonl_is_read_beside_parquet_and_a_nested_column_has_its_dots_in_the_name(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.jsonl").write_text("".join(json.dumps({"text": f"{row}", "more": 1}) + "\n" for row in range(50)))
    pq.write_table(
        pa.table({"text": pa.array([f"{row}" for row in range(50, 80)], pa.large_string())}), lines / "b.parquet"
    )
    assert reshard(lines, tmp_path / "out") == 80
    written = pq.read_table(tmp_path / "out/data_0.parquet")
    assert written.schema == pa.schema([("text", pa.string())])
    assert sorted(written["text"].to_pylist(), key=int) == [str(row) for row in range(80)]
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "a.jsonl").write_text('{"a": {"b": "x"}}\n{"a": {"b": null}}\n')
    reshard(nested, tmp_path / "out2", column="a.b")
    assert sorted(pq.read_table(tmp_path / "out2/data_0.parquet")["a.b"].to_pylist(), key=str) == [None, "x"]


@pytest.mark.slow
def test_columns_of_all_types_come_through(tmp_path: Path, small_memory: None) -> None:
    data, count = tmp_path / "data", 400
    data.mkdir()
    table = pa.table(
        {
            "doc": pa.array([{"text": f"{row}", "tags": ["a", None]} if row % 7 else None for row in range(count)]),
            "language": pa.array([f"l{row % 3}" if row % 5 else None for row in range(count)]).dictionary_encode(),
            "lists": pa.array([[{"x": row}] * (row % 4) for row in range(count)]),
            "kinds": pa.array(
                [[f"k{row % 2}"] for row in range(count)], pa.list_(pa.dictionary(pa.int32(), pa.string()))
            ),
            "pairs": pa.array([[("a", row)] for row in range(count)], pa.map_(pa.string(), pa.int32())),
            "bytes": pa.array([bytes([row % 256]) for row in range(count)]),
            "none": pa.nulls(count),
            "json": pa.array(["{}"] * count).cast(pa.json_()),
            "large": pa.array(["y"] * count, pa.large_string()),
        }
    )
    pq.write_table(table, data / "a.parquet", row_group_size=37)
    for name, memory in (("one", 1 << 40), ("two", 30_000)):
        reshard(data, tmp_path / name, column="doc.text", memory_limit=memory, row_group_size=50)
    written = pq.read_table(tmp_path / "one/data_0.parquet")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert [(field.name, field.type) for field in written.schema if field.name in ("doc", "large", "json")] == [
        (field.name, field.type) for field in table.schema if field.name in ("doc", "large", "json")
    ]
    assert written["language"].type == pa.string()
    order = np.argsort(row_keys(0, 0, np.arange(count, dtype=np.uint64)))
    assert written.to_pylist() == table.take(order).to_pylist()


@pytest.mark.slow
def test_a_bucket_that_is_larger_than_expected_is_read_in_pieces(tmp_path: Path, small_memory: None) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(4):  # a dictionary holds the text once: on disk the files are small
        pq.write_table(pa.table({"text": [str(number) * 5000] * 2000, "id": range(2000)}), data / f"{number}.parquet")
    largest: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        load = buckets.Buckets.load
        patch.setattr(buckets.Buckets, "load", lambda *args: largest.append(len(rows := load(*args))) or rows)
        reshard(data, tmp_path / "small", memory_limit=4_000_000, row_group_size=10)
    assert sum(largest) == 8000
    assert max(largest) * 5000 < 4_000_000 // 2
    reshard(data, tmp_path / "large", memory_limit=1 << 40, row_group_size=10)
    assert digests(tmp_path / "small") == digests(tmp_path / "large")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_url_gives_the_bytes_of_the_folder(data: Path, tmp_path: Path, scheme: str) -> None:
    url = f"file://{data}"
    if scheme == "memory":
        url = f"memory://{tmp_path.name}"
        for file in data.iterdir():
            fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{file.name}", file.read_bytes())
    assert reshard(url, tmp_path / "there") == reshard(data, tmp_path / "here") == ROWS
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@pytest.mark.slow
def test_names_of_all_kinds_are_read(data: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    names = (b"a '\n;*?.parquet", b"b\xff/::.parquet", "c\u00e9.parquet".encode())
    for name, file in zip(names, sorted(data.iterdir()), strict=True):
        target = Path(os.fsdecode(os.fsencode(odd) + b"/" + name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    assert reshard(odd, tmp_path / "one") == reshard(data, tmp_path / "two")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def refuse(data: Path, tmp_path: Path, match: str, **options: Any) -> None:
    """The error is raised, and nothing is left behind by it."""
    (tmp_path / "temp").mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RelayrunError, match=match):
        reshard(data, tmp_path / "refused", **{"temp_dir": tmp_path / "temp"} | options)
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_input_is_one_error_and_nothing_is_left(data: Path, tmp_path: Path, small_memory: None) -> None:
    refuse(data, tmp_path, r"0\.parquet: no column 'nope'; there are: text, id", column="nope")
    refuse(data, tmp_path, "holds int64, not text", column="id")
    refuse(data, tmp_path, "--row-group-size: must be at least 1", row_group_size=0)
    refuse(tmp_path / "nowhere", tmp_path, "there is no such dataset folder")
    with pytest.raises(RelayrunError, match="the output would lie in the dataset folder"):
        reshard(data, data / "out")
    (data / "z.jsonl").write_text('{"text": "x"}\n')
    refuse(data, tmp_path, r"z\.jsonl: its columns are others than those of .*0\.parquet: it lacks id: int64")
    (data / "z.jsonl").unlink()
    torn = bytearray((data / "1.parquet").read_bytes())
    (data / "z.parquet").write_bytes(torn[:-100])
    refuse(data, tmp_path, r"z\.parquet: cannot be read, it may be torn")
    torn[4:400] = b"x" * 396
    (data / "z.parquet").write_bytes(torn)  # found while rows are read
    for memory in (1 << 40, 50_000):
        refuse(data, tmp_path, r"z\.parquet: cannot be read, it may be torn", memory_limit=memory, threads=2)
    (data / "z.parquet").unlink()
    (tmp_path / "refused").mkdir()
    refuse(data, tmp_path, "refused: the output exists")


def test_files_without_rows_are_refused_unless_others_have_some(data: Path, tmp_path: Path, small_memory: None) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(empty, tmp_path, r"no file below this folder ends in \.parquet, .*\.jsonl")
    pq.write_table(pq.read_table(data / "0.parquet").slice(0, 0), empty / "a.parquet")
    for memory in (1 << 40, 1000):
        refuse(empty, tmp_path, "the files hold no row", memory_limit=memory)
    shutil.copy(empty / "a.parquet", data / "00.parquet")
    assert reshard(data, tmp_path / "out") == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("exclusive", [True, False], ids=["renameat2", "rename"])
def test_what_comes_to_stand_at_the_output_meanwhile_is_kept(
    data: Path, tmp_path: Path, exclusive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shuffle takes hours: the folder was deleted at its end."""
    if not exclusive:
        monkeypatch.setattr(leftovers, "_rename", lambda *_: False)

    def meanwhile(*_: object) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("two weeks of work")

    monkeypatch.setattr(module, "write_files", meanwhile)
    with pytest.raises(RelayrunError, match="out: another process has put something here meanwhile"):
        reshard(data, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "two weeks of work"
    assert sorted(os.listdir(tmp_path)) == ["data", "out"]


def test_of_two_shuffles_into_one_folder_the_second_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both said that they were done, and the first one's files were gone."""

    def meanwhile(*given: Any) -> None:
        monkeypatch.setattr(module, "write_files", write)
        write(*given)
        with pytest.raises(RelayrunError, match=r"out: another process makes this: .*, since 2"):
            reshard(data, tmp_path / "out", seed=1)

    write = module.write_files
    monkeypatch.setattr(module, "write_files", meanwhile)
    assert reshard(data, tmp_path / "out") == ROWS
    assert sorted(os.listdir(tmp_path)) == ["data", "out"]


def test_too_little_memory_is_said_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    refuse(
        data, tmp_path, r"--memory-limit: a thread that shuffles these rows takes at least 0\.26 GB", memory_limit=10**8
    )
    pq.write_table(
        pa.table({"text": ["x" * 100_000 + str(row) for row in range(1000)], "id": range(1000)}),
        data / "long.parquet",
        use_dictionary=False,
    )
    refuse(data, tmp_path, "make --row-group-size smaller", memory_limit=300_000_000)


@pytest.mark.slow
def test_a_temp_dir_without_space_or_rights_is_one_error(data: Path, tmp_path: Path) -> None:
    """By a limit on the size of files, which root is held to as well."""
    (tmp_path / "temp").mkdir()
    code = f"""if True:
        import resource
        from pathlib import Path
        from relayrun.errors import run_main
        from relayrun.tokens.shuffle import reshard
        reshard._BASE = reshard._THREAD = reshard._PAGES = reshard._GROUP_COPIES = 0
        reshard._LEAST = 4
        begin = reshard.PASS
        def limited(*arguments):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            return begin(*arguments)
        reshard.PASS = limited
        options = reshard.ReshardOptions(dataset_folder={str(data)!r}, output=Path({str(tmp_path / "out")!r}),
                                         memory_limit=50_000, temp_dir=Path(TEMP))
        raise SystemExit(run_main(lambda: reshard.reshard(options)))
    """

    def run(limited: str, temp: Path) -> str:
        program = code.replace("PASS", limited).replace("TEMP", repr(str(temp)))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
        assert done.returncode == 1
        assert sorted(tmp_path.iterdir()) == [data, tmp_path / "temp"]
        assert not list((tmp_path / "temp").iterdir())
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert re.fullmatch(
        r"error: .*/temp: a temporary file cannot be written: File too large\n",
        run("scatter_parts", tmp_path / "temp"),
    )
    assert re.fullmatch(
        r"error: .*/out: cannot be written: File too large\n", run("write_first_file", tmp_path / "temp")
    )
    assert re.fullmatch(r"error: .*/nowhere: No such file or directory\n", run("scatter_parts", tmp_path / "nowhere"))


@pytest.mark.slow
def test_the_door(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/tokenization/reshard.py"), "--dataset-folder", str(data)]
    done = subprocess.run(
        [*command, "--output-folder", str(tmp_path / "out")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3,000 rows")
    assert len(list(data.iterdir())) == 3
    for column, code in (("text", 0), ("nope", 1)):
        options = ["--output-folder", str(tmp_path / "checked"), "--column", column, "--check"]
        checked = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600)
        assert checked.returncode == code, checked.stderr
        assert code == ("no column 'nope'" in checked.stderr)
    assert not (tmp_path / "checked").exists()
