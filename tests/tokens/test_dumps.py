from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun.errors import InputError, RelayrunError, SchedulerError
from relayrun.tokens.readers.inputs import DataFile, read_paths_file
from relayrun.tokens.tokenize import dumps as dumps_module
from relayrun.tokens.tokenize.dumps import Dump, DumpsFolder, dump_size, prepare_dumps, print_dumps, split_files
from tests.tokenization_corpus import taken_files

ROOT = Path(__file__).resolve().parents[2]


def write(file: Path, size: int = 1) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * size)


def paths(folder: Path, **filters: list[str]) -> list[str]:
    return [file.path for file in taken_files(folder, **filters)]


def paths_files(metadata: Path) -> dict[str, list[str]]:
    return {file.name: read_paths_file(file) for file in sorted((metadata / "dumps").iterdir())}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for name, size in (("a.parquet", 50), ("b/c.jsonl", 40), ("b/d.jsonl.gz", 30), ("e.jsonl.zst", 20)):
        write(tmp_path / "data" / name, size)
    return tmp_path / "data"


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    return tmp_path / "meta data"


def test_all_kinds_of_files_are_found_in_any_case_and_nothing_else(tmp_path: Path) -> None:
    found = ["A.PARQUET", "a.CSV", "b/c.Jsonl", "b/d.jsonl.GZ", "b/x.csv.gz", "e.jsonl.zst", "f.json", "g.JSON.gz"]
    found += ["h.json.zst", "i.Arrow", "my_state.json"]
    for name in (*found, "g.parquet.tmp", "h.gz", "parquet", "b/dataset_info.json", "STATE.json"):
        write(tmp_path / name)
    for hidden in (".relayrun-made.json", "b/.d.jsonl.swp.jsonl", ".cache/huggingface/x.json"):
        write(tmp_path / hidden)
    (tmp_path / "folder.parquet").mkdir()
    os.mkfifo(tmp_path / "pipe.parquet")
    assert paths(tmp_path) == found


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "x.parquet")
    write(tmp_path / "data" / "sub" / "y.parquet", 2)
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "z.parquet").symlink_to(tmp_path / "elsewhere" / "x.parquet")
    (tmp_path / "data" / "sub" / "up").symlink_to(tmp_path / "data")
    found = taken_files(tmp_path / "data")
    assert [file.path for file in found] == ["linked/x.parquet", "sub/y.parquet", "z.parquet"]
    (dump,) = prepare_dumps(tmp_path / "data", tmp_path / "meta")
    assert [file.path for file in dump.files] == ["sub/y.parquet", "z.parquet"]


def test_a_link_that_leads_nowhere_is_an_error_unless_it_is_filtered_out(tmp_path: Path) -> None:
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nothing")
    write(tmp_path / "there.parquet")
    with pytest.raises(InputError, match=r"gone\.parquet: this link leads nowhere"):
        taken_files(tmp_path)
    assert paths(tmp_path, filter_out=["gone"]) == ["there.parquet"]


def test_filters_look_at_the_path_below_the_folder_case_sensitive_and_links_not_resolved(tmp_path: Path) -> None:
    write(tmp_path / "Real" / "x.parquet")
    for name in ("en/1.parquet", "EN/2.parquet", "de/en-3.parquet", "fr/4.parquet"):
        write(tmp_path / "data" / name)
    (tmp_path / "data" / "english").symlink_to(tmp_path / "Real")
    data = tmp_path / "data"
    assert paths(data, filter_in=["en"]) == ["de/en-3.parquet", "en/1.parquet", "english/x.parquet"]
    assert paths(data, filter_in=["en/", "fr"]) == ["en/1.parquet", "fr/4.parquet"]
    assert paths(data, filter_in=["en"], filter_out=["de", "sh/"]) == ["en/1.parquet"]
    assert paths(data, filter_in=["Real"]) == []
    assert paths(data, filter_in=["data"]) == []


def test_the_largest_file_goes_onto_the_lightest_dump() -> None:
    sizes = {"a": 7, "b": 7, "c": 6, "d": 5, "e": 4, "f": 0, "g": 0}
    files = [DataFile(path=path, size=size) for path, size in sizes.items()]
    assert [[file.path for file in dump.files] for dump in split_files(files, 3)] == [
        ["a", "e"],
        ["b", "f", "g"],
        ["c", "d"],
    ]
    assert [len(dump.files) for dump in split_files(files, 99)] == [1] * 7


@pytest.mark.alone
def test_100_000_files_are_split_in_seconds() -> None:
    files = [DataFile(path=f"{i}.parquet", size=i * 7919 % 1_000_003) for i in range(100_000)]
    start = time.monotonic()
    dumps = split_files(files, 1000)
    assert time.monotonic() - start < 5
    ideal = sum(file.size for file in files) / 1000
    assert max(dump.size for dump in dumps) < 1.01 * ideal


@pytest.mark.alone
@pytest.mark.long
def test_100_000_small_files_are_prepared_in_seconds(tmp_path: Path) -> None:
    for number in range(100_000):
        if number % 1000 == 0:
            (folder := tmp_path / "data" / f"{number // 1000:03d}").mkdir(parents=True)
        text = f"{number}" + "x" * (number * 7919 % 1009)
        (folder / f"{number:06d}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    started, cpu = time.monotonic(), time.process_time()
    dumps = prepare_dumps(tmp_path / "data", tmp_path / "meta", n_dumps=1000)
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    ideal = sum(dump.size for dump in dumps) / 1000
    worst = max(dump.size for dump in dumps) / ideal
    print(f"100,000 files: {seconds:.1f} s, {cpu:.1f} s of CPU; the largest dump is {worst:.5f} of the ideal")
    assert worst < 1.01
    assert cpu < 60


def test_without_a_number_there_is_a_dump_per_150_gb_begun(
    dataset: Path, metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dumps_module.BYTES_PER_DUMP == 150_000_000_000
    assert len(prepare_dumps(dataset, metadata)) == 1
    monkeypatch.setattr(dumps_module, "BYTES_PER_DUMP", 70)  # 140 bytes are floor(140 / 70) + 1 dumps
    assert len(prepare_dumps(dataset, metadata)) == 3


def test_paths_files_and_the_link_to_the_dataset_are_written(dataset: Path, metadata: Path) -> None:
    prepare_dumps(dataset, metadata, n_dumps=2)
    assert os.readlink(metadata / "raw-dataset-link") == str(dataset)
    assert (metadata / "dumps" / "paths_file_0.txt").read_bytes() == b"a.parquet\ne.jsonl.zst\n"
    assert (metadata / "dumps" / "paths_file_1.txt").read_bytes() == b"b/c.jsonl\nb/d.jsonl.gz\n"
    assert dump_size(metadata / "dumps" / "paths_file_0.txt") == 70


def test_a_second_run_leaves_no_stale_dump(dataset: Path, metadata: Path) -> None:
    prepare_dumps(dataset, metadata, n_dumps=4)
    prepare_dumps(dataset, metadata, n_dumps=2, filter_out=["a.parquet"])
    assert paths_files(metadata) == {
        "paths_file_0.txt": ["b/c.jsonl"],
        "paths_file_1.txt": ["b/d.jsonl.gz", "e.jsonl.zst"],
    }
    assert sorted(os.listdir(metadata)) == [".lock", "dump-sizes.json", "dumps", "inventory.jsonl", "raw-dataset-link"]


def test_beside_finished_dumps_only_other_files_are_split_and_numbered_behind(dataset: Path, metadata: Path) -> None:
    prepare_dumps(dataset, metadata, n_dumps=3)
    DumpsFolder(metadata).finish(1)
    write(dataset / "new.parquet", 1)
    dumps = prepare_dumps(dataset, metadata, n_dumps=9)
    assert [dump.index for dump in dumps] == [2, 3, 4, 5]
    assert [file.path for dump in dumps for file in dump.files] == [
        "a.parquet",
        "b/d.jsonl.gz",
        "e.jsonl.zst",
        "new.parquet",
    ]


def test_no_file_left_is_an_error(dataset: Path, metadata: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file fits"):
        prepare_dumps(dataset, metadata, filter_in=["nothing"])
    prepare_dumps(dataset, metadata)
    DumpsFolder(metadata).finish(0)
    with pytest.raises(InputError, match="all 4 files are in finished dumps"):
        prepare_dumps(dataset, metadata)
    with pytest.raises(InputError, match="no such dataset folder"):
        prepare_dumps(tmp_path / "missing", metadata)


def test_finished_dumps_of_another_dataset_are_not_mixed_in(dataset: Path, metadata: Path, tmp_path: Path) -> None:
    prepare_dumps(dataset, metadata)
    DumpsFolder(metadata).finish(0)
    write(tmp_path / "other" / "o.parquet")
    with pytest.raises(InputError, match="one metadata folder per dataset"):
        prepare_dumps(tmp_path / "other", metadata)


def test_a_name_with_a_newline_is_refused_by_name(dataset: Path, metadata: Path) -> None:
    write(dataset / "bad\nname.parquet")
    with pytest.raises(InputError, match=r"'bad\\nname\.parquet'"):
        prepare_dumps(dataset, metadata)
    assert not (metadata / "dumps").exists()
    assert len(prepare_dumps(dataset, metadata, filter_out=["bad"])) == 1


def test_paths_files_are_literal(tmp_path: Path) -> None:
    names = [b" lead", b"trail ", b"'q\"", b"-dash", b"\xff\xfe", "ü\u2028\x0c\x85".encode(), b"cr\r", b"tab\t"]
    file = tmp_path / "paths"
    file.write_bytes(b"\n".join(names) + b"\n\n")
    assert [os.fsencode(name) for name in read_paths_file(file)] == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n/b\n", ":2: a paths file holds paths below the dataset folder"),
        (b"PAR1\0\0\n", ":1: a paths file holds"),
        (b"a\nb\na\n", ":3: this path is listed twice: a"),
        (b"\n\n", "lists no file"),
    ],
)
def test_what_is_no_paths_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "paths").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_paths_file(tmp_path / "paths")


@pytest.mark.parametrize("call", [0, 1])
def test_a_kill_while_dumps_are_replaced_never_leaves_a_mixture_or_none(
    dataset: Path, metadata: Path, call: int
) -> None:
    prepare_dumps(dataset, metadata, n_dumps=4)
    before = paths_files(metadata)
    program = f"""
import os, shutil, signal
from itertools import count
from relayrun import leftovers
from relayrun.tokens.tokenize import dumps
calls = count()
def cut(does):
    def call(*given, **more):
        if next(calls) == {call}:
            os.kill(os.getpid(), signal.SIGKILL)
        return does(*given, **more)
    return call
os.rename, leftovers._rename = cut(os.rename), cut(leftovers._rename)
dumps.prepare_dumps({str(dataset)!r}, {str(metadata)!r}, n_dumps=2)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert killed == (0 if call else -signal.SIGKILL)  # there is one exchange of two names, and no call between
    assert paths_files(metadata) == before or len(paths_files(metadata)) == 2
    prepare_dumps(dataset, metadata, n_dumps=2)
    assert len(paths_files(metadata)) == 2
    assert sorted(os.listdir(metadata)) == [".lock", "dump-sizes.json", "dumps", "inventory.jsonl", "raw-dataset-link"]


def test_nothing_is_prepared_while_a_dump_is_tokenized_here(dataset: Path, metadata: Path) -> None:
    prepare_dumps(dataset, metadata)
    with (
        DumpsFolder(metadata).in_use(),
        DumpsFolder(metadata).in_use(),
        pytest.raises(RelayrunError, match="by another process"),
    ):
        prepare_dumps(dataset, metadata)
    prepare_dumps(dataset, metadata)


def fake_squeue(folder: Path, jobs: list[str]) -> str:
    """A squeue that knows these jobs; returns a PATH with it in front."""
    folder.mkdir()
    (folder / "squeue").write_text("#!/bin/sh\n" + "".join(f"echo {job}\n" for job in jobs))
    (folder / "squeue").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_nothing_is_prepared_while_slurm_jobs_of_the_folder_live(
    dataset: Path, metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_dumps(dataset, metadata, n_dumps=3)
    folder = DumpsFolder(metadata)
    for job, dump in (("11", 0), ("12_0", 1), ("12_1", 2), ("13", 9)):
        folder.record_job(job, dump)
    monkeypatch.setenv("PATH", fake_squeue(tmp_path / "bin", ["12_0", "12_1", "13", "99"]))
    with pytest.raises(RelayrunError, match="Slurm jobs 12_0, 12_1"):
        prepare_dumps(dataset, metadata)
    folder.finish(1)
    folder.finish(2)  # the jobs of finished dumps are not asked for
    assert [dump.index for dump in prepare_dumps(dataset, metadata)] == [3]


def test_if_slurm_cannot_be_asked_nothing_is_prepared(
    dataset: Path, metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_dumps(dataset, metadata)
    DumpsFolder(metadata).record_job("11", 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="not installed"):
        prepare_dumps(dataset, metadata)


def test_a_half_tokenized_dump_keeps_its_files(dataset: Path, metadata: Path, tmp_path: Path) -> None:
    prepare_dumps(dataset, metadata, n_dumps=2)
    before = paths_files(metadata)
    write(tmp_path / "out" / "dump-1" / "00000_tokens.bin")
    (metadata / "tokenized-dir-link").symlink_to(tmp_path / "out")
    assert [dump.index for dump in prepare_dumps(dataset, metadata, n_dumps=2)] == [1, 2, 3]
    assert paths_files(metadata)["paths_file_1.txt"] == before["paths_file_1.txt"]
    with pytest.raises(RelayrunError, match="dump 1 is tokenized in part, and 1 of its files would be left out now"):
        prepare_dumps(dataset, metadata, filter_out=["c.jsonl"])


def test_the_estimate_of_hours(capsys: pytest.CaptureFixture[str]) -> None:
    print_dumps([Dump(index=0, files=(DataFile(path="a", size=180_000_000_000),))], seconds_per_gb=20)
    assert capsys.readouterr().out.splitlines()[1].split() == ["dump", "0", "1", "180.000", "1.00"]


@pytest.mark.slow
def test_the_door_prints_a_table_and_one_clear_error(dataset: Path, metadata: Path) -> None:
    script = ROOT / "scripts/tokenization/prepare_dumps.py"
    door = [sys.executable, script, "--dataset-folder", dataset, "--preprocessing-metadata-folder", metadata]
    done = subprocess.run([*door, "--n-dumps", "2"], capture_output=True, text=True, check=True, timeout=600)
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        ["dump", "0", "2"],
        ["dump", "1", "2"],
        ["total", "4", "0.000"],
    ]
    done = subprocess.run([*door, "--filter-in", "x", "y"], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert f"error: {dataset}: nothing to tokenize" in done.stderr
    assert "Traceback" not in done.stderr
    size = ROOT / "scripts/tokenization/compute_dump_size.py"
    done = subprocess.run(
        [sys.executable, size, metadata / "dumps/paths_file_1.txt"], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "70\n"
