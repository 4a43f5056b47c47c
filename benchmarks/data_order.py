#!/usr/bin/env python3
"""The data order's claims: what opening costs, batches per second beside Megatron's loader, how well it shuffles.

Both sides read the same files. Sparse files stand for large data sets: their indices are real, their tokens
are holes. Every opening is measured in a process of its own. About three minutes; --quick is a smoke test.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _results
import numpy as np

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.tokens.order import sample_rows
from relayrun.tokens.order.batches import BatchReader
from relayrun.tokens.order.datasets import Dataset, DatasetSpec, WindowOrder
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.order.sampler import MixturePart, MixtureSampler
from relayrun.tokens.order.schedule import Interleave, integer_weights
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest
from relayrun.tokens.shards.shard import DTYPE_CODES, INDEX_HEADER, INDEX_MAGIC, ShardWriter

SHARDS = 1000
SEQ_LENGTH = 4096
EOD = 0


def sparse_shard(prefix: Path, documents_: int, tokens: int) -> str:
    """A shard whose .bin is one hole."""
    lengths = np.full(documents_, tokens // documents_, dtype="<i4")
    offsets = np.arange(documents_, dtype="<i8") * (tokens // documents_ * 2)
    code = next(code for code, dtype in DTYPE_CODES.items() if dtype is np.uint16)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, documents_, documents_ + 1))
        for part in (lengths, offsets, np.arange(documents_ + 1, dtype="<i8")):
            file.write(part.data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(documents_ * (tokens // documents_) * 2)
    return str(prefix)


def in_a_process(what: str, **arguments: Any) -> dict[str, Any]:
    """Run one of MEASURED in a fresh interpreter; its figures, with the memory that it took on top of imports."""
    command = [sys.executable, __file__, "--measure", what, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else str(done.returncode)}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_freeze(folder: str, manifest: str) -> None:
    """What the first submit does: read every index, write the manifest."""
    prefixes = sorted(str(path)[:-4] for path in Path(folder).glob("*.idx"))
    Manifest.build({"train": prefixes}, {}, vocabulary_size=60_000, eod=0, tokenizer="none").write(manifest)


def measure_open(manifest: str) -> None:
    """What every attempt does: read the manifest, verify sizes, find and read a sample in every twentieth of it."""
    read = Manifest.read(manifest)
    read.verify()
    order = WindowOrder(read.datasets["train"], seq_length=SEQ_LENGTH, seed=1)
    for k in range(0, len(order), len(order) // 20):
        order.read(0, k)


def measure_megatron(prefix: str) -> None:
    """Megatron's IndexedDataset and one epoch's indices, then as many samples."""
    dataset = megatron_dataset(prefix, SEQ_LENGTH)
    for k in range(0, len(dataset), len(dataset) // 20):
        dataset[k]


def megatron_dataset(prefix: str, seq_length: int, **flags: bool) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    settings = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **flags}
    tokenizer = SimpleNamespace(eod=EOD, vocab_size=None, unique_identifiers="none")
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        split="1",
        create_attention_mask=False,
        tokenizer=tokenizer,
        **settings,
    )
    indexed = IndexedDataset(prefix)
    return GPTDataset(indexed, prefix, np.arange(len(indexed), dtype=np.int32), None, Split.train, config)


MEASURED = {"freeze": measure_freeze, "open": measure_open, "megatron": measure_megatron}


def measured(what: str, arguments: dict[str, Any]) -> None:
    """In the child: run it and print seconds and memory."""
    if what == "megatron":
        import megatron.core.datasets.gpt_dataset
        import megatron.core.datasets.helpers  # noqa: F401
    before = peak_megabytes()
    started = time.perf_counter()
    MEASURED[what](**arguments)
    seconds = time.perf_counter() - started
    peak = peak_megabytes()
    print(json.dumps({"seconds": seconds, "added_megabytes": peak - before, "peak_megabytes": peak}))


def peak_megabytes() -> float:
    """Peak memory of this program since its start (getrusage would count its parent's before the exec)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def opening(folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """From 10^5 to 10^7 documents in 1,000 shards with 10^12 tokens; Megatron's index over one shard of each size."""
    rows = []
    for documents_ in (10**5,) if quick else (10**5, 10**6, 10**7):
        place = folder / f"sparse{documents_}"
        place.mkdir()
        tokens = 10**12
        for number in range(SHARDS):
            sparse_shard(place / f"s{number:04}", documents_ // SHARDS, tokens // SHARDS)
        manifest = str(folder / f"manifest{documents_}.json")
        freeze = in_a_process("freeze", folder=str(place), manifest=manifest)
        opens = [in_a_process("open", manifest=manifest) for _ in range(3)]
        row: dict[str, Any] = {
            "documents": documents_,
            "shards": SHARDS,
            "tokens": tokens,
            "freeze_once": freeze,
            "open_seconds": _results.spread([one["seconds"] for one in opens]),
            "open_added_megabytes": _results.spread([one["added_megabytes"] for one in opens]),
            "open_peak_megabytes": _results.spread([one["peak_megabytes"] for one in opens]),
        }
        shutil.rmtree(place)
        row["megatron"] = []
        for size in (10**9,) if quick else (10**11, 10**12):
            prefix = sparse_shard(folder / "one", documents_, size)
            row["megatron"].append({"tokens": size, **in_a_process("megatron", prefix=prefix)})
        rows.append(row)
        print("opening", json.dumps(row), flush=True)
    return rows


def real_shards(folder: Path, count: int) -> str:
    """One shard of documents of some hundred random tokens, each with its end."""
    generator = np.random.default_rng(0)
    lengths = np.maximum(2, generator.lognormal(6, 1, count)).astype(np.int64)
    ids = generator.integers(1, 60_000, lengths.sum(), dtype=np.uint16)
    ids[np.cumsum(lengths) - 1] = EOD
    writer = ShardWriter(folder / "real", np.uint16)
    writer.add(ids, lengths)
    writer.finish()
    return str(folder / "real")


Batch = dict[str, Any]


def ours(dataset: Dataset, micro: int, *, flags: bool) -> Iterator[Batch]:
    """relayrun's reader, and what the model makes of a micro-batch."""
    import torch

    order = MixtureSampler({"train": MixturePart(dataset=dataset, weight=1.0, record={})}, {})
    ones = positions = None
    with BatchReader(
        order,
        data_parallel_rank=0,
        data_parallel_size=1,
        micro_batch_size=micro,
        batch_sizes=GlobalBatchSizes(8 * micro),
        consumed_samples=0,
    ) as reader:
        for iteration in reader:
            for micro_batch in iteration:
                rows = micro_batch.tokens
                tokens = torch.from_numpy(rows)
                if flags:
                    mask = torch.from_numpy((rows[:, :-1] != EOD).astype(np.float32))
                    places = torch.from_numpy(sample_rows.document_positions(rows[:, :-1], EOD))
                else:
                    if ones is None or positions is None:
                        ones = torch.ones(micro, rows.shape[1] - 1)
                        positions = torch.arange(rows.shape[1] - 1).expand(micro, -1)
                    mask, places = ones, positions
                yield {
                    "tokens": tokens[:, :-1].contiguous(),
                    "labels": tokens[:, 1:].contiguous(),
                    "loss_mask": mask,
                    "position_ids": places,
                }


def theirs(dataset: Any, micro: int, workers: int) -> Iterator[Batch]:
    from torch.utils.data import DataLoader

    while True:
        yield from DataLoader(dataset, batch_size=micro, num_workers=workers, drop_last=True)


def rate(batches: Iterator[Batch], seconds: float) -> float:
    """Batches per second, once the first has come."""
    next(batches)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        next(batches)
        count += 1
    return count / (time.perf_counter() - started)


def check_same(prefix: str, seq_length: int, micro: int, *, flags: bool) -> None:
    """In Megatron's order, both loaders give the same tensors."""
    import torch

    from tests.training.megatron_order import MegatronOrder

    same = MegatronOrder(DatasetSpec(name="t", seed=1, seq_length=seq_length, manifest=DatasetManifest.build([prefix])))
    other = megatron_dataset(prefix, seq_length, reset_position_ids=flags, eod_mask_loss=flags)
    for a, b, _ in zip(ours(same, micro, flags=flags), theirs(other, micro, 0), range(20), strict=False):
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(a[name], b[name]), name


def throughput(folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Batches per second, in turns; memory before and after."""
    prefix = real_shards(folder, 2_000 if quick else 100_000)
    manifest = DatasetManifest.build([prefix])
    rows = []
    for seq_length, micro in ((512, 8), (4096, 2)):
        for flags in (False, True):
            check_same(prefix, seq_length, micro, flags=flags)
            dataset = megatron_dataset(prefix, seq_length, reset_position_ids=flags, eod_mask_loss=flags)
            order = WindowOrder(manifest, seq_length=seq_length, seed=1)
            rates: dict[str, list[float]] = {"relayrun": [], "workers 0": [], "workers 1": [], "workers 2": []}
            for _ in range(1 if quick else 5):
                seconds = 0.2 if quick else 1.0
                rates["relayrun"].append(rate(ours(order, micro, flags=flags), seconds))
                for workers in range(3):
                    rates[f"workers {workers}"].append(rate(theirs(dataset, micro, workers), seconds))
            best = max((name for name in rates if name != "relayrun"), key=lambda name: statistics.median(rates[name]))
            ratios = [a / b for a, b in zip(rates["relayrun"], rates[best], strict=True)]
            rows.append(
                {
                    "seq_length": seq_length,
                    "micro_batch_size": micro,
                    "resets_and_eod_mask": flags,
                    "batches_per_second": {name: _results.spread(values) for name, values in rates.items()},
                    "megatron_best": best,
                    "ratio": _results.spread(ratios),
                }
            )
            print("throughput", json.dumps(rows[-1]), flush=True)
    return rows


def memory_growth(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Resident memory of the reader after few and after many batches."""
    order = WindowOrder(DatasetManifest.build([str(folder / "real")]), seq_length=512, seed=1)
    batches = ours(order, 8, flags=True)
    marks = {}
    for count in (1_000, 2_000 if quick else 50_000):
        for _ in range(count):
            next(batches)
        marks[count] = resident_megabytes()
    first, last = marks.values()
    return {"batches": list(marks), "resident_megabytes": [first, last], "growth_megabytes": last - first}


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def addressing() -> dict[str, Any]:
    """232M windows on 48 ranks: time per sample, no array of the windows anywhere."""
    windows, ranks = 232_000_000, 48
    permutation = Permutation(windows, permutation_key(1, "train", 0))
    numbers = [k * ranks + k % ranks for k in range(20_000)]
    started = time.perf_counter()
    for k in numbers:
        permutation(k % windows)
    one = (time.perf_counter() - started) / len(numbers)
    started = time.perf_counter()
    permutation.map(np.arange(1_000_000))
    many = time.perf_counter() - started  # seconds for 10^6 are microseconds for one
    mix = {}
    for count in (2, 20, 500):
        interleave = Interleave(integer_weights({f"d{i}": 1 + i % 7 for i in range(count)}))
        started = time.perf_counter()
        for k in numbers:
            interleave.locate(k)
        mix[str(count)] = (time.perf_counter() - started) / len(numbers) * 1e6
    return {
        "windows": windows,
        "ranks": ranks,
        "microseconds_each": one * 1e6,
        "microseconds_each_in_numpy": many,
        "mix_microseconds_by_datasets": mix,
    }


def shuffle_quality(folder: Path, *, quick: bool) -> dict[str, Any]:
    """80 files of documents sorted from long to short; the value of a window is the length of its first document."""
    generator = np.random.default_rng(0)
    files, each = (4, 200) if quick else (80, 2000)
    prefixes, lengths = [], []
    place = folder / "sorted"
    place.mkdir()
    for number in range(files):
        own = np.sort(np.maximum(2, generator.lognormal(6, 1, each)).astype(np.int64))[::-1]
        writer = ShardWriter(place / f"s{number:02}", np.uint16)
        writer.add(np.ones(int(own.sum()), dtype=np.uint16), own)
        writer.finish()
        prefixes.append(place / f"s{number:02}")
        lengths.append(own)
    order = WindowOrder(DatasetManifest.build(prefixes), seq_length=512, seed=1)
    all_lengths = np.concatenate(lengths)
    starts = np.concatenate([[0], np.cumsum(all_lengths)[:-1]])
    windows = np.array([order.window(0, i) for i in range(len(order))])
    batch = 128
    result: dict[str, Any] = {"windows": len(windows), "batch": batch, "bound_lag_1": 4 / np.sqrt(len(windows))}
    for name, sequence in (("none", np.arange(len(windows))), ("relayrun", windows)):
        values = np.log(all_lengths[np.searchsorted(starts, sequence * 512, side="right") - 1])
        means = values[: len(values) // batch * batch].reshape(-1, batch).mean(axis=1)
        result[name] = {
            "lag_1_correlation": float(np.corrcoef(values[:-1], values[1:])[0, 1]),
            "batch_mean_variance_ratio": float(means.var() / (values.var() / batch)),
        }
    print("shuffle", json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes; writes no result")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.measure:
        measured(options.measure[0], json.loads(options.measure[1]))
        return
    with tempfile.TemporaryDirectory(prefix="relayrun-bench-") as name:
        folder = Path(name)
        figures = {
            "load_average": os.getloadavg()[0],
            "throughput": throughput(folder, quick=options.quick),
            "memory_growth": memory_growth(folder, quick=options.quick),
            "addressing": addressing(),
            "shuffle": shuffle_quality(folder, quick=options.quick),
            "opening": opening(folder, quick=options.quick),
        }
    if options.quick:
        print(json.dumps(figures))
    else:
        print(_results.write("data_order", figures))


if __name__ == "__main__":
    main()
