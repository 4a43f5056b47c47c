#!/usr/bin/env python3
"""Streams: tokens a second, time to the first sample of many files, and memory over time.

    benchmarks/streams.py TOKENIZER_JSON [--rows 60000] [--files 20] [--rounds 3] [--memory-seconds 600] [--quick]

The same parquet files of made-up text are read, in turns, by relayrun's stream (shuffled, cut into rows, with the
engine that it chooses); by a bare loop over pyarrow with Hugging Face's library, called for each row or for each batch;
and, where the package is installed, by Grain's pipeline with either engine in its map, called for each row. All run in
one process.
Results: benchmarks/results/streams.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
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

from relayrun.config.data import DataSource
from relayrun.config.streams import Stream
from relayrun.data.order.lanes import LaneReading
from relayrun.data.order.sampler import MixtureSampler, Part
from relayrun.data.streams.encoder import Encoder
from relayrun.data.streams.files import freeze
from relayrun.data.streams.samples import Shape
from relayrun.data.streams.stream import TextStream
from relayrun.shards.manifest import Manifest
from relayrun.tokenization.encode.tokenizer import DocumentTokenizer, load_tokenizer
from relayrun.tokenization.options import TokenizeOptions
from relayrun.tokenization.readers.texts import Texts

SEQ_LENGTH = 4096
FIRST_FILES = 1000
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


def reading(folder: Path, tokenizer: DocumentTokenizer, name: str, **options: Any) -> LaneReading:
    """The samples of one replica, as a rank reads them."""
    source = DataSource.model_validate(
        {"path": str(folder), "weight": 1.0, "source": "parquet", "stream": Stream(**options)}
    )
    files = freeze("web", source, 64).files
    manifest = Manifest(
        datasets={},
        validation={},
        vocabulary_size=tokenizer.size,
        eod=tokenizer.eos_id,
        tokenizer=name,
        tokenizer_ids=tokenizer.ids_fingerprint,
    )
    shape = Shape.of(
        None, seq_length=SEQ_LENGTH, eod=tokenizer.eos_id, vocabulary_size=tokenizer.size, where="the benchmark"
    )
    encode = Encoder(name, manifest, files, "text")
    stream = TextStream(files, Stream(**options), shape, encode, name="web", seed=1, lanes=64)
    order = MixtureSampler({"web": Part(dataset=stream, weight=1.0, record={})}, {})
    return order.reading(0, 0, 1)


def of_stream(folder: Path, tokenizer: DocumentTokenizer, name: str) -> Iterator[int]:
    """Tokens of each sample."""
    samples = reading(folder, tokenizer, name)
    try:
        for k in samples.numbers(0, 1 << 40):
            yield SEQ_LENGTH - samples.row(k).padding
    finally:
        samples.close()


def of_loop(folder: Path, tokenizer: DocumentTokenizer, *, batch: bool) -> Iterator[int]:
    """Tokens of each row of a bare loop, or of each batch of rows."""
    inner = tokenizer.tokenizer
    while True:
        for path in sorted(folder.iterdir()):
            for table in pq.ParquetFile(path).iter_batches(1000, columns=["text"], use_threads=False):
                texts = table["text"].to_pylist()
                if batch:
                    encoded = inner.encode_batch_fast(texts, add_special_tokens=False)
                    yield sum(len(each.ids) for each in encoded)
                else:
                    for text in texts:
                        yield len(np.array(inner.encode(text, add_special_tokens=False).ids))


def of_grain(folder: Path, encode: Callable[[str], int]) -> Iterator[int]:
    """Tokens of each row of Grain's pipeline for parquet: files shuffled, interleaved, rows shuffled in a window."""
    experimental: Any = importlib.import_module("grain.experimental")
    python: Any = importlib.import_module("grain.python")

    files = python.MapDataset.source(sorted(map(str, folder.iterdir()))).shuffle(seed=1).repeat()
    rows = experimental.InterleaveIterDataset(files.map(experimental.ParquetIterDataset), cycle_length=5)
    shuffled = experimental.WindowShuffleIterDataset(rows, window_size=1000, seed=1)
    yield from shuffled.map(lambda row: encode(row["text"]))


def rate(samples: Iterator[int], seconds: float) -> float:
    """Tokens a second, after the first item."""
    next(samples)
    tokens, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        tokens += next(samples)
    return tokens / (now - begin)


def first_sample(folder: Path, tokenizer: DocumentTokenizer, name: str, window: int) -> float:
    """Seconds until the first sample is there, the list of files and the engine's proof included."""
    begin = time.perf_counter()
    samples = reading(folder, tokenizer, name, fragment_shuffle_window=window)
    samples.row(0)
    samples.close()
    return time.perf_counter() - begin


def megabytes() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def memory(folder: Path, tokenizer: DocumentTokenizer, name: str, seconds: float) -> dict[str, float]:
    """Memory after a tenth of the time, and at the end."""
    samples, begin, early = of_stream(folder, tokenizer, name), time.perf_counter(), 0.0
    while (now := time.perf_counter() - begin) < seconds:
        next(samples)
        if not early and now > seconds / 10:
            early = megabytes()
    return {"seconds": seconds, "megabytes_early": early, "megabytes_at_the_end": megabytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a tokenizer.json, or a folder that holds one")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one measurement")
    parser.add_argument("--memory-seconds", type=float, default=600.0)
    parser.add_argument("--quick", action="store_true", help="small files, one short round; results are only printed")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.files, options.rounds, options.seconds, options.memory_seconds = 2000, 4, 1, 1.0, 2.0
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=options.tokenizer))
    tokenizer.tokenizer.encode("loaded before anything is measured")
    with tempfile.TemporaryDirectory() as temporary:
        folder, many = Path(temporary, "text"), Path(temporary, "many")
        size = write_files(folder, options.files, options.rows, random.Random(1))
        write_files(many, FIRST_FILES if not options.quick else 20, options.rows, random.Random(2))
        ways: dict[str, Callable[[], Iterator[int]]] = {
            "relayrun": partial(of_stream, folder, tokenizer, options.tokenizer),
            "loop_each_row": partial(of_loop, folder, tokenizer, batch=False),
            "loop_batches": partial(of_loop, folder, tokenizer, batch=True),
        }
        if importlib.util.find_spec("grain") is not None:
            files = reading(folder, tokenizer, options.tokenizer)
            engine = files._open["web"]._stream.encode  # type: ignore[attr-defined]
            ways["grain_same_engine"] = partial(of_grain, folder, lambda text: len(engine(Texts.of([text]))[0]))
            inner = tokenizer.tokenizer
            ways["grain_usual"] = partial(of_grain, folder, lambda text: len(inner.encode(text).ids))
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                rates[name].append(rate(way(), options.seconds))
        figures = {
            "text_bytes": size,
            "seq_length": SEQ_LENGTH,
            "tokens_per_second": {name: _results.spread(values) for name, values in rates.items()},
            "ratio": {
                name: _results.spread([own / other for own, other in zip(rates["relayrun"], values, strict=True)])
                for name, values in rates.items()
                if name != "relayrun"
            },
            "first_sample_seconds": {
                str(window): first_sample(many, tokenizer, options.tokenizer, window) for window in (40, -1)
            },
            "memory": memory(folder, tokenizer, options.tokenizer, options.memory_seconds),
        }
    print(figures if options.quick else _results.write("streams", figures))


if __name__ == "__main__":
    main()
