#!/usr/bin/env python3
"""Tokenization of many small files against datatrove's reader and Megatron writer: CPU time, same bytes.

    python benchmarks/small_files.py                             about 7 minutes on a quiet machine of two cores
    python benchmarks/small_files.py --files 60 --megabytes 1 --rounds 1    a trial; writes no result

Files of 4 kB of JSON lines, plain and in gzip, with 1 and with 2 workers; then three families of tokenizers on large
files of parquet, so that both shares stand in one result. Programs take turns in each round, and a ratio is of one
round. Each of ours runs on a machine that has met the tokenizer. Ratios below 10 are marked.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenization
from _results import spread, write
from tokenization import _SET_CHILD_SUBREAPER, BASELINE, TASKS, digests, ours, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.published import published

CACHE = tokenization.CACHE = tokenization.CACHE.with_name("small-files")
FULL = {"files": 20_000, "megabytes": 10.0, "rounds": 2}
FAMILIES = {"Llama 3": "<|endoftext|>", "GPT-2": "<|endoftext|>", "Llama 2": "</s>"}
FILE_BYTES, WANTED = 4096, 10
OF_JSON_LINES = BASELINE.replace("ParquetReader", "JsonlReader")
"""The reader takes gzip by the ending of a name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    CACHE.mkdir(parents=True, exist_ok=True)
    began, texts = time.monotonic(), _texts()
    figures: dict[str, Any] = {"cpu": _cpu_name(), "files": options.files, "megabytes": options.megabytes}
    for ending in ("jsonl", "jsonl.gz"):
        data = _small_files(texts, options.files, ending)
        for workers in (1, 2):
            name = f"{'gzip' if ending.endswith('gz') else 'plain'}, {workers} worker{'s' * (workers > 1)}"
            figures[name] = _compare(name, OF_JSON_LINES, data, "Llama 3", workers, options.rounds)
    data = _large_files(texts, options.megabytes)
    for name in FAMILIES:
        figures[name] = _compare(name, BASELINE, data, name, 2, options.rounds)
    figures["seconds"] = round(time.monotonic() - began)
    print(f"{figures['seconds']} s on {figures['cpu']}, load {os.getloadavg()[0]:.1f}")
    if vars(options) == FULL:
        print(write("small_files", figures))


def _compare(name: str, baseline: str, data: Path, tokenizer: str, workers: int, rounds: int) -> dict[str, Any]:
    """Return CPU seconds of both sides and their ratio. Raises SystemExit where the bytes differ."""
    file, eos = published(tokenizer), FAMILIES[tokenizer]
    ours(data, file, CACHE / "ours", workers, eos=eos)  # meets the tokenizer
    theirs, mine = [], []
    for _ in range(rounds):
        for folder in (CACHE / "theirs", CACHE / "theirs-logs"):
            shutil.rmtree(folder, ignore_errors=True)
        theirs.append(run(baseline, data, file, eos, CACHE / "theirs", TASKS, workers)["cpu_s"])
        mine.append(ours(data, file, CACHE / "ours", workers, eos=eos, met=True)["cpu_s"])
        if not digests(CACHE / "ours") or digests(CACHE / "ours") != digests(CACHE / "theirs"):
            raise SystemExit(f"{name}: other bytes than datatrove's")
    ratio = spread([above / below for above, below in zip(theirs, mine, strict=True)])
    mark = "" if ratio["median"] >= WANTED else f"  below {WANTED}"
    print(f"{name:22} datatrove {min(theirs):7.2f} s, ours {min(mine):6.2f} s: {ratio['median']:5.1f} times{mark}")
    return {"cpu_speed_up": ratio, "cpu_s": spread(mine), "cpu_s_of_datatrove": spread(theirs)}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown CPU")


def _texts() -> list[str]:
    """The Python sources of this installation, without special tokens."""
    folders = [Path(os.__file__).parent, Path(pa.__file__).parent]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    texts = [file.read_text("utf-8", "ignore") for file in files[:3000]]
    return [text for text in texts if text.strip() and not any(mark in text for mark in ("<|", "</s>", "<s>", "<unk>"))]


def _small_files(texts: list[str], count: int, ending: str) -> Path:
    folder = CACHE / f"{count}-{ending}"
    if not folder.is_dir():
        source, rng = "\n".join(texts), random.Random(0)
        (building := CACHE / "building").mkdir()
        for number in range(count):
            lines, size = [], 0
            while size < FILE_BYTES:
                begin = rng.randrange(len(source) - 2000)
                lines.append(json.dumps({"text": source[begin : begin + rng.randrange(200, 2000)]}) + "\n")
                size += len(lines[-1])
            content = "".join(lines).encode()
            content = gzip.compress(content) if ending.endswith("gz") else content
            (building / f"{number:06d}.{ending}").write_bytes(content)
        building.rename(folder)
    return folder


def _large_files(texts: list[str], megabytes: float) -> Path:
    folder = CACHE / f"{megabytes:g}MB"
    if not folder.is_dir():
        source, left, rows = random.Random(0), megabytes * 1e6, list[str]()
        while left > 0:
            rows.append(source.choice(texts))
            left -= len(rows[-1].encode())
        (building := CACHE / "building").mkdir()
        for number in range(tokenization.FILES):
            pq.write_table(pa.table({"text": rows[number :: tokenization.FILES]}), building / f"{number:02d}.parquet")
        building.rename(folder)
    return folder


if __name__ == "__main__":
    main()
