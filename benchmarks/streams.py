#!/usr/bin/env python3
"""Streams: tokens per CPU second beside Grain, time to the first sample of many files, and memory over time.

    benchmarks/streams.py TOKENIZER_JSON [--rows 60000] [--files 20] [--rounds 3] [--memory-seconds 600] [--quick]

The same parquet files of made-up text are read in turns: by relayrun as a rank does, with one process beside it
(`data.num_workers: 1`) and in process; by Grain's pipeline with the same engine, called by its own function for each
row, with its usual tokenizer for each row, and with the engine in a batched map; by bare loops over pyarrow. Grain
gives rows of as many tokens as relayrun (`ConcatThenSplitIterDataset`); once more it gives documents as they are, which
nothing can be trained on yet. Tokens are counted for each CPU second of all processes of a way, so that each has one
CPU. Grain must be installed beside this package. Results: benchmarks/results/streams.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _results
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.config.compose.schema import RunConfig
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture.build_datasets import training_order
from relayrun.tokens.mixture.stream_worker import RankStreamWorker
from relayrun.tokens.order.sampler import ReplicaSampleReader
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.tokenizer import DocumentTokenizer, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions

SEQ_LENGTH = 4096
FIRST_FILES = 1000
SAVED_EVERY = 4096
"""Samples between two checkpoints."""
WORDS = 30_000
"""Different words of the made-up text, the frequent ones much more often than the rare ones, as in a language."""


def write_files(folder: Path, files: int, rows: int, generator: random.Random) -> int:
    """Parquet files with so many rows in all; return the bytes of their texts."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(generator.choices(letters, range(26, 0, -1), k=generator.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / (rank + 3) for rank in range(WORDS)]
    folder.mkdir(parents=True)
    total = 0
    for number in range(files):
        count = rows // files
        texts = [" ".join(generator.choices(words, weights, k=generator.randint(50, 800))) for _ in range(count)]
        total += sum(map(len, texts))
        pq.write_table(pa.table({"text": texts}), folder / f"{number:05}.parquet", row_group_size=max(1, count // 4))
    return total


class Run:
    """A run over a folder of parquet files, as a submit leaves it."""

    def __init__(self, folder: Path, tokenizer: str, **stream: Any) -> None:
        source = {"source": "parquet", "path": str(folder), "weight": 1.0, "stream": stream}
        self.config = RunConfig.model_validate(
            {
                "project": "benchmark",
                "name": "streams",
                "run_dir": str(folder.parent / "run"),
                "data": {"tokenizer": tokenizer, "datasets": [], "mixture": {"web": source}},
                "model": {
                    "num_layers": 2,
                    "hidden_size": 64,
                    "ffn_hidden_size": 128,
                    "num_attention_heads": 4,
                    "num_query_groups": 2,
                },
                "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 64, "seq_length": SEQ_LENGTH},
                "optimizer": {"lr": 1e-3},
                "checkpoint": {"interval": 10},
                "job": {"time": "5", "ntasks_per_node": 1},
                "cluster": {"name": "local", "scheduler": "local"},
            }
        )
        self.manifest = folder.parent / f"{folder.name}.json"
        self._found = build_manifest(self.config)
        self._found.write(self.manifest)

    def reading(self, *, beside: bool) -> ReplicaSampleReader:
        """The samples of one replica, as a rank reads them; `beside`: by a process of its own."""
        order = training_order(self.config, self._found)
        if not beside:
            return order.lane_reader(0, 0, 1)
        worker = RankStreamWorker(self.config, self.manifest, order, consumed=0, replica=0, replicas=1)
        return order.lane_reader(0, 0, 1, openers=worker.openers())

    def tokens(self, *, beside: bool) -> Iterator[int]:
        """Tokens of each sample."""
        with contextlib.closing(self.reading(beside=beside)) as samples:
            for k in samples.numbers(0, 1 << 40):
                yield SEQ_LENGTH - samples.row(k).padding
                if k % SAVED_EVERY == 0:  # as a checkpoint asks; until then the cursor of each sample is kept
                    samples.cursors(k)


def of_loop(folder: Path, encode: Callable[[pa.Array], int], rows: int) -> Iterator[int]:
    """Tokens of each batch of so many rows of a bare loop."""
    while True:
        for path in sorted(folder.iterdir()):
            for table in pq.ParquetFile(path).iter_batches(rows, columns=["text"], use_threads=False):
                yield encode(table["text"])


def of_grain(folder: Path) -> Any:
    """Grain's pipeline for parquet: files shuffled, interleaved, rows shuffled in a window."""
    experimental: Any = importlib.import_module("grain.experimental")
    python: Any = importlib.import_module("grain.python")
    files = python.MapDataset.source(sorted(map(str, folder.iterdir()))).shuffle(seed=1).repeat()
    rows = experimental.InterleaveIterDataset(files.map(experimental.ParquetIterDataset), cycle_length=5)
    return experimental.WindowShuffleIterDataset(rows, window_size=1000, seed=1)


def of_grain_rows(folder: Path, encode: Callable[[str], Any], eod: int) -> Iterator[int]:
    """Tokens of each row of `SEQ_LENGTH` that Grain puts together of its documents."""
    experimental: Any = importlib.import_module("grain.experimental")
    end = np.array([eod], np.uint32)
    made = of_grain(folder).map(lambda row: {"ids": np.concatenate([np.asarray(encode(row["text"]), np.uint32), end])})
    packed = experimental.ConcatThenSplitIterDataset(made, length_struct={"ids": SEQ_LENGTH})
    return (len(row["ids"]) for row in packed)


def of_grain_documents(folder: Path, encode: Callable[[str], Any]) -> Iterator[int]:
    """Tokens of each document of Grain's pipeline."""
    return iter(of_grain(folder).map(lambda row: len(encode(row["text"]))))


def of_grain_batches(folder: Path, encode: Callable[[PackedTexts], Any]) -> Iterator[int]:
    """Tokens of each batch of documents that are encoded together."""
    batches = of_grain(folder).batch(256, batch_fn=list)
    return iter(batches.map(lambda rows: len(encode(PackedTexts.of([row["text"] for row in rows]))[0])))


def rate(samples: Iterator[int], seconds: float) -> float:
    """Tokens for each CPU second, of so many CPU seconds behind the first item and what was read ahead with it."""
    warm = _results.cpu_seconds() + seconds / 4
    while _results.cpu_seconds() < warm:
        next(samples)
    tokens, begin = 0, _results.cpu_seconds()
    while (now := _results.cpu_seconds()) - begin < seconds:  # to look takes half a millisecond
        goal = tokens + 2_000_000
        while tokens < goal:
            tokens += next(samples)
    return tokens / (now - begin)


def first_sample(folder: Path, tokenizer: str, window: int) -> dict[str, float]:
    """Seconds of a submit, which lists the files, and from a rank's start of its process to the first sample."""
    begin, used = time.perf_counter(), _results.cpu_seconds()
    run = Run(folder, tokenizer, fragment_shuffle_window=window)
    ready, used_by_submit = time.perf_counter(), _results.cpu_seconds() - used
    with contextlib.closing(run.reading(beside=True)) as samples:
        samples.row(0)
        used = _results.cpu_seconds() - used - used_by_submit
        seconds = time.perf_counter() - ready
    return {"submit_seconds": ready - begin, "seconds": seconds, "submit_cpu": used_by_submit, "cpu": used}


def megabytes() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def memory(samples: Iterator[int], seconds: float) -> dict[str, float]:
    """Memory after each fifth of so many seconds of CPU time, in process."""
    begin, found = _results.cpu_seconds(), []
    for part in range(1, 6):
        while _results.cpu_seconds() - begin < seconds * part / 5:
            next(samples)
        found.append(megabytes())
    return {"cpu_seconds": seconds, "megabytes": found[0], "last_over_first": found[-1] / found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a tokenizer.json, or a folder that holds one")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds of one measurement")
    parser.add_argument("--memory-seconds", type=float, default=600.0, help="CPU seconds of that of the memory")
    parser.add_argument("--quick", action="store_true", help="small files, one short round; results are only printed")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.files, options.rounds, options.seconds, options.memory_seconds = 2000, 4, 1, 0.5, 1.0
    if importlib.util.find_spec("grain") is None and not options.quick:
        parser.error("Grain is not installed")
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=options.tokenizer))
    with tempfile.TemporaryDirectory() as temporary:
        folder, many = Path(temporary, "text"), Path(temporary, "many")
        size = write_files(folder, options.files, options.rows, random.Random(1))
        write_files(many, FIRST_FILES if not options.quick else 20, max(options.rows, 20_000), random.Random(2))
        # before others have threads that read ahead in this process, and of a tokenizer that is known on this machine
        first_sample(many, options.tokenizer, 40)
        first = {name: first_sample(many, options.tokenizer, window) for name, window in (("window", 40), ("all", -1))}
        ways = ways_of(folder, tokenizer, options.tokenizer)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                rates[name].append(rate(way(), options.seconds))
        figures = {
            "text_bytes": size,
            "seq_length": SEQ_LENGTH,
            "load_average": os.getloadavg()[0],
            "million_tokens_per_cpu_second": {
                name: _results.spread([value / 1e6 for value in values]) for name, values in rates.items()
            },
            "ratio": {
                own: {
                    name: _results.spread([mine / other for mine, other in zip(rates[own], values, strict=True)])
                    for name, values in rates.items()
                    if not name.startswith("relayrun")
                }
                for own in ("relayrun_worker", "relayrun")
            },
            "first_sample": first,
            "memory": memory(Run(folder, options.tokenizer).tokens(beside=False), options.memory_seconds),
        }
    print(figures if options.quick else _results.write("streams", figures))


def ways_of(folder: Path, tokenizer: DocumentTokenizer, name: str) -> dict[str, Callable[[], Iterator[int]]]:
    """The ways to read the files, by their names in the result."""
    run, usual = Run(folder, name), tokenizer.tokenizer
    first = PackedTexts.from_arrow(pq.read_table(next(folder.iterdir()))["text"].chunk(0).slice(0, 50))
    selection = select_engine("auto", usual, first, print, definition=tokenizer.definition)
    engine = selection.build(tokenizer.definition)

    def each_row(texts: pa.Array) -> int:
        return sum(len(usual.encode(text).ids) for text in texts.to_pylist())

    ways: dict[str, Callable[[], Iterator[int]]] = {
        "relayrun_worker": partial(run.tokens, beside=True),
        "relayrun": partial(run.tokens, beside=False),
        "loop_usual_rows": partial(of_loop, folder, each_row, 100),
        "loop_engine_batches": partial(
            of_loop, folder, lambda texts: len(engine.encode(PackedTexts.from_arrow(texts))[0]), 1000
        ),
    }
    if importlib.util.find_spec("grain") is not None:
        eod = tokenizer.eos_id or 0
        ways["grain_usual"] = partial(of_grain_rows, folder, lambda text: usual.encode(text).ids, eod)
        ways["grain_batches"] = partial(of_grain_batches, folder, engine.encode)
        if selection.engine == "gigatoken":
            own: Any = importlib.import_module("gigatoken").Tokenizer.from_json(tokenizer.definition)
            ways["grain_same_engine"] = partial(of_grain_rows, folder, own.encode, eod)
            ways["grain_same_engine_documents"] = partial(of_grain_documents, folder, own.encode)
    return ways


if __name__ == "__main__":
    main()
