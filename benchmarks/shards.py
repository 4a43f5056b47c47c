#!/usr/bin/env python3
"""verify_dataset.py against reading, merge_datasets.py against cat, reshard.py against DuckDB; memory of reshard.

CPU seconds, one after the other, `--rounds` times, on the same files, which lie in the page cache. Reading is a loop
over the bytes of the same shards; `cat` is followed by the same sync as a merge; DuckDB orders the same rows by a hash
with one thread and writes files of the same size, compression and row groups. Memory is that of the whole process
tree, looked at every 20 ms, for a dataset of eight times `--memory-limit`, with one thread and with four.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from _results import spread, write

from relayrun.tokens.shards.checks import verify_shards
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.shard import FOLDER_RECORD, ShardWriter
from relayrun.tokens.tokenize.shard_folder import RECORD_FORMAT

ROOT = Path(__file__).resolve().parents[1]
SHARDS, SHARD_TOKENS, VOCABULARY = 4, 25_000_000, 128_256
ROWS, ROW_GROUP, FILES = 500_000, 4096, 4
MEMORY_GB, THREADS = 0.4, (1, 4)

DUCKDB = """
import sys, duckdb
source, out, rows = sys.argv[1:]
connection = duckdb.connect(config={"threads": 1})
connection.execute("SET preserve_insertion_order = true")
connection.execute(f\"\"\"COPY (SELECT text, id FROM read_parquet('{source}/*.parquet') ORDER BY hash(id))
    TO '{out}' (FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE {rows}, FILE_SIZE_BYTES '500MB')\"\"\")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relayrun-shards-") as folder:
        place = Path(folder)
        prefixes, rows = make_shards(place / "shards"), make_rows(place / "rows")
        seconds: dict[str, list[float]] = {}

        def take(name: str, work: Callable[[], float]) -> None:
            seconds.setdefault(name, []).append(work())

        for _ in range(options.rounds):
            take("read", lambda: timed(lambda: read(prefixes)))
            take("verify", lambda: timed(lambda: check(prefixes)))
            take("cat", lambda: timed(lambda: cat(prefixes, place / "cat")))
            take("merge", lambda: timed(lambda: merge_again(prefixes, place / "merged")))
            take("duckdb", lambda: duckdb(rows, place / "duckdb"))
            take("reshard", lambda: reshard(rows, place / "reshard", memory_gb=4)[0])
        assert (place / "cat").read_bytes() == (place / "merged.bin").read_bytes()
        assert sorted_ids(place / "duckdb") == sorted_ids(place / "reshard") == list(range(ROWS))
        for name in ("cat", "merged.bin", "merged.idx"):
            (place / name).unlink()
        shutil.rmtree(place / "duckdb")
        large = eight_times(rows, place / "large")
        memory = []
        for threads in THREADS:
            cpu, peak = reshard(large, place / "reshard", memory_gb=MEMORY_GB, threads=threads)
            memory.append(
                {
                    "threads": threads,
                    "peak_of_the_process_tree_mb": peak / 1e6,
                    "peak_over_memory_limit": peak / (MEMORY_GB * 1e9),
                    "cpu_s": cpu,
                }
            )
        shard_bytes = sum(os.path.getsize(prefix + ".bin") for prefix in prefixes)
        write(
            "shards",
            {
                "shard_bytes": shard_bytes,
                "verify_share_of_reading": ratio(seconds["read"], seconds["verify"]),
                "merge_share_of_cat": ratio(seconds["cat"], seconds["merge"]),
                "reshard_share_of_duckdb": ratio(seconds["duckdb"], seconds["reshard"]),
                "reshard_rows": ROWS,
                "reshard_memory": {
                    "memory_limit_mb": MEMORY_GB * 1000,
                    "data_mb": bytes_of(large) / 1e6,
                    "runs": memory,
                },
                "load_average": os.getloadavg()[0],
                "seconds": seconds,
            },
        )
    print((ROOT / "benchmarks/results/shards.json").read_text())


def make_shards(folder: Path) -> list[str]:
    """Shards with documents of 500 tokens on average, and their record."""
    generator = np.random.default_rng(0)
    record = {}
    for number in range(SHARDS):
        writer = ShardWriter(folder / f"{number:05d}_tokens", np.int32)
        lengths = generator.integers(1, 1000, SHARD_TOKENS // 500)
        ids = generator.integers(0, VOCABULARY - 1, int(lengths.sum()), np.int32)
        ids[np.cumsum(lengths) - 1] = VOCABULARY - 1
        writer.add(ids, lengths)
        writer.finish()
        record[f"{number:05d}_tokens"] = {"xxh3_128": writer.xxh3_128}
    (folder / FOLDER_RECORD).write_text(json.dumps({"format": RECORD_FORMAT, "shards": record}))
    return [str(folder / name) for name in record]


def make_rows(folder: Path) -> Path:
    """About 1 GB of text of many lengths, sorted by length."""
    generator = np.random.default_rng(1)
    words = np.array([f"{number:x}" for number in generator.integers(0, 1 << 28, 20_000)])
    lengths = np.sort(np.exp(generator.normal(5.0, 1.1, ROWS)).astype(np.int64) + 1)
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.arange(ROWS), FILES)):
        texts = [" ".join(words[generator.integers(0, words.size, lengths[row])]) for row in part]
        pq.write_table(pa.table({"text": texts, "id": part}), folder / f"{number}.parquet", row_group_size=ROW_GROUP)
    return folder


def eight_times(rows: Path, folder: Path) -> Path:
    """Links to the same files, until the dataset unpacked is eight times the limit."""
    folder.mkdir()
    for copy in range(int(8 * MEMORY_GB * 1e9 / bytes_of(rows)) + 1):
        for file in rows.iterdir():
            (folder / f"{copy:03d}-{file.name}").symlink_to(file)
    return folder


def bytes_of(folder: Path) -> int:
    metadata = [pq.read_metadata(file) for file in folder.iterdir()]
    return sum(each.row_group(group).total_byte_size for each in metadata for group in range(each.num_row_groups))


def timed(work: Callable[[], object]) -> float:
    """CPU seconds, in the kernel too, of this process and its children: the disk is the same for both sides."""
    before = cpu()
    work()
    return cpu() - before


def cpu() -> float:
    whom = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, whom))


def read(prefixes: list[str]) -> None:
    buffer = bytearray(1 << 20)
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            with open(prefix + suffix, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def check(prefixes: list[str]) -> None:
    found = verify_shards(prefixes, vocabulary_size=VOCABULARY, eod=VOCABULARY - 1, threads=1)
    assert not any(each.faults for each in found)


def cat(prefixes: list[str], out: Path) -> None:
    out.unlink(missing_ok=True)
    with open(out, "wb") as file:
        subprocess.run(["cat", *(prefix + ".bin" for prefix in prefixes)], stdout=file, check=True)
        os.fsync(file.fileno())


def merge_again(prefixes: list[str], out: Path) -> None:
    for suffix in (".bin", ".idx"):
        Path(f"{out}{suffix}").unlink(missing_ok=True)
    merge_shards(prefixes, out)


def duckdb(rows: Path, out: Path) -> float:
    shutil.rmtree(out, ignore_errors=True)
    return watched([sys.executable, "-c", DUCKDB, str(rows), str(out), str(ROW_GROUP)])[0]


def reshard(rows: Path, out: Path, *, memory_gb: float, threads: int = 1) -> tuple[float, int]:
    shutil.rmtree(out, ignore_errors=True)
    program = ROOT / "scripts/tokenization/reshard.py"
    return watched(
        [
            sys.executable,
            str(program),
            "--dataset-folder",
            str(rows),
            "--output-folder",
            str(out),
            "--memory-limit",
            str(memory_gb),
            "--threads",
            str(threads),
            "--temp-dir",
            str(rows.parent),
        ]
    )


def watched(command: list[str]) -> tuple[float, int]:
    """CPU seconds of a command and its children, and the most memory (RSS) that they had together, in bytes."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak, seen = 0, psutil.Process(process.pid)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            break
        total = 0
        for each in (seen, *_children(seen)):
            try:
                total += each.memory_info().rss
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.returncode)
    return usage.ru_utime + usage.ru_stime, peak


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def sorted_ids(folder: Path) -> list[int]:
    return sorted(number for file in folder.glob("*.parquet") for number in pq.read_table(file)["id"].to_pylist())


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    return spread([one / other for one, other in zip(above, below, strict=True)])


if __name__ == "__main__":
    main()
