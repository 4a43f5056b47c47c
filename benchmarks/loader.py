#!/usr/bin/env python3
"""The loader beside others: tokens per CPU second, memory, CPU seconds to the first batch and after a resume.

    benchmarks/loader.py TOKENIZER_JSON [--rows 4000] [--rounds 3] [--seconds 10] [--python PYTHON] [--quick]

Each way reads the same parquet files of made-up documents of 14 kB on average, in a process of its own and in turns,
with the same engine for the same tokenizer, and gives batches of 8 rows of 4,096 tokens: `relayrun.loader`; torchdata's
StatefulDataLoader over a stream of Hugging Face datasets, whose documents are joined and cut as its example `run_clm`
does (its state leaves out the documents in the shuffle's buffer); Grain, whose documents are joined and cut by
ConcatThenSplitIterDataset. `relayrun_alone` has no threads, as torchdata has none here; Grain has threads, as
`relayrun`. Rows are shuffled among 1,000, by `relayrun.loader` among 2,048, its least of 8 lanes;
`relayrun_default` is the same with `shuffle_buffer` at its default of 10,000, here all rows. `bare` is a loop that
reads the files, encodes and cuts, without shuffle, state or reading ahead: what any of them can reach at most.

Three more ways read tokens, the same documents of 3,500 tokens on average, in batches of the same size, each way
shuffled over all of them: `relayrun_shards`; megatron-core's GPTDataset, over the same .bin and .idx, in a DataLoader
whose sampler begins at the sample that is next; MosaicML's StreamingDataset in its StreamingDataLoader, over MDS files
of the tokens cut to rows. Their ratios are to `relayrun_shards`.

`--python` is an interpreter in which grain, torchdata, datasets, megatron-core and mosaicml-streaming are installed
beside this package; a way that it lacks is left out, and so is one outside of `--ways`.
CPU seconds are those of the process with its threads and children, from its start, imports included;
`resume_in_process_cpu_seconds` are those of a new loader in a process that has read with one, from its making to the
first batch behind the state. Results: benchmarks/results/loader.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _results
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.tokens.shards.shard import ShardWriter

LENGTH, BATCH, WORDS = 4096, 8, 30_000
NEEDS = {
    "relayrun": (),
    "relayrun_alone": (),
    "relayrun_default": (),
    "torchdata": ("torchdata", "datasets"),
    "grain": ("grain",),
    "bare": (),
    "relayrun_shards": (),
    "gptdataset": ("megatron", "torch"),
    "mosaicml": ("streaming", "torch"),
}
SHARDS, ROWS = ("relayrun_shards", "gptdataset"), "mosaicml"
"""Ways that read token shards, and the one that reads rows of tokens."""
OWN = dict.fromkeys((*SHARDS, ROWS), "relayrun_shards") | dict.fromkeys(("torchdata", "bare"), "relayrun_alone")
"""The way of ours that another is compared with; of those that are not here, `relayrun`."""
END = 50256
"""The id behind a document: that of GPT-2's tokenizer."""


def write_files(folder: Path, files: int, rows: int) -> None:
    """Write documents of 14 kB on average, the longest forty times the median."""
    generator, letters = random.Random(1), "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(generator.choices(letters, range(26, 0, -1), k=generator.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / (rank + 3) for rank in range(WORDS)]
    folder.mkdir(parents=True)
    for number in range(files):
        counts = [min(80_000, 20 + int(generator.lognormvariate(7.2, 1.0))) for _ in range(rows // files)]
        texts = [" ".join(generator.choices(words, weights, k=count)) for count in counts]
        pq.write_table(
            pa.table({"text": texts}), folder / f"{number:05}.parquet", row_group_size=max(1, len(texts) // 4)
        )


def write_tokens(shards: Path, rows: Path | None, documents: int) -> None:
    """Write documents of 3,500 tokens on average as a shard, and as MDS files of rows if these are wanted."""
    generator = np.random.default_rng(1)
    lengths = np.minimum(30_000, 20 + generator.lognormal(7.6, 1.0, documents)).astype(np.int64)
    ids = generator.integers(0, END, int(lengths.sum()), np.int32)
    ids[np.cumsum(lengths) - 1] = END
    shards.mkdir()
    writer = ShardWriter(shards / "00000_tokens", np.int32)
    writer.add(ids, lengths)
    writer.finish()
    if rows is not None:
        streaming: Any = importlib.import_module("streaming")
        with streaming.MDSWriter(out=str(rows), columns={"tokens": f"ndarray:int32:{LENGTH + 1}"}) as made:
            for begin in range(0, len(ids) - LENGTH, LENGTH):
                made.write({"tokens": ids[begin : begin + LENGTH + 1]})


def encoders(tokenizer: str) -> tuple[Callable[[list[str] | pa.Array], Any], Callable[[str], Any]]:
    """Return the engine that the loader takes for this tokenizer, for texts together and for one by the engine's own
    function: their ids with an end each."""
    from relayrun.tokens.readers.texts import PackedTexts
    from relayrun.tokens.tokenize.encode.engines import select_engine
    from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
    from relayrun.tokens.tokenize.options import TokenizeOptions

    loaded = load_tokenizer(TokenizeOptions(tokenizer=tokenizer))
    some = PackedTexts.of(["some words to choose by " * 20])
    chosen = select_engine("auto", loaded.tokenizer, some, lambda _: None, definition=loaded.definition)
    engine, end = chosen.build(loaded.definition), loaded.eos_id or 0
    one = loaded.tokenizer.encode
    if chosen.engine == "gigatoken":
        own = importlib.import_module("gigatoken").Tokenizer.from_json(loaded.definition).encode
    else:
        own = lambda text: one(text).ids  # noqa: E731

    def together(texts: list[str] | pa.Array) -> Any:
        packed = PackedTexts.of(texts) if isinstance(texts, list) else PackedTexts.from_arrow(texts)
        ids, lengths = engine.encode(packed)[:2]
        return np.insert(np.asarray(ids, np.int64), np.cumsum(lengths), end)

    return together, lambda text: np.append(np.asarray(own(text), np.int64), end)


def relayrun(
    folder: str, tokenizer: str, state: Any, stream: dict[str, int] | None = None, *, read_ahead: bool = True
) -> tuple[Iterator[Any], Callable[[], Any]]:
    from relayrun.loader import Loader

    source = {"source": "parquet", "path": folder, "weight": 1.0, "stream": stream or {}}
    data = {"tokenizer": tokenizer, "mixture": {"web": source}, "lanes": 8}
    loader = Loader(data, seq_length=LENGTH, batch_size=BATCH, read_ahead=read_ahead)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["input_ids"] for batch in loader), loader.state_dict


def torchdata(folder: str, tokenizer: str, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    datasets: Any = importlib.import_module("datasets")
    stateful: Any = importlib.import_module("torchdata.stateful_dataloader")
    encode, _ = encoders(tokenizer)

    def cut(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids = encode(batch["text"])
        rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
        return {"input_ids": list(rows)}

    files = sorted(map(str, Path(folder).iterdir()))
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    stream = stream.shuffle(seed=1, buffer_size=1000).map(cut, batched=True, batch_size=256, remove_columns=["text"])
    loader = stateful.StatefulDataLoader(stream.repeat(1000).with_format("torch"), batch_size=BATCH)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["input_ids"] for batch in loader), loader.state_dict


def grain(folder: str, tokenizer: str, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    python, experimental = (importlib.import_module(f"grain.{name}") for name in ("python", "experimental"))
    _, encode = encoders(tokenizer)
    files = python.MapDataset.source(sorted(map(str, Path(folder).iterdir()))).shuffle(seed=1).repeat()
    rows = experimental.InterleaveIterDataset(files.map(experimental.ParquetIterDataset), cycle_length=5)
    made = experimental.WindowShuffleIterDataset(rows, window_size=1000, seed=1)
    made = made.map(lambda row: {"ids": encode(row["text"])})
    made = experimental.ConcatThenSplitIterDataset(made, length_struct={"ids": LENGTH})
    batches = iter(made.map(lambda row: row["ids"]).batch(BATCH))
    if state is not None:
        batches.set_state(state)
    return batches, batches.get_state


def bare(folder: str, tokenizer: str, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    encode, _ = encoders(tokenizer)

    def batches() -> Iterator[Any]:
        rest, size = np.empty(0, np.int64), BATCH * LENGTH
        for path in itertools.cycle(sorted(Path(folder).iterdir())):
            for part in pq.ParquetFile(path).iter_batches(256, columns=["text"], use_threads=False):
                rest = np.concatenate([rest, encode(part.column(0))])
                yield from rest[: len(rest) // size * size].reshape(-1, BATCH, LENGTH)
                rest = rest[len(rest) // size * size :]

    return batches(), lambda: 0


def relayrun_shards(folder: str, tokenizer: str, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    from relayrun.loader import Loader

    data = {"tokenizer": tokenizer, "mixture": {"web": {"path": folder, "weight": 1.0}}}
    loader = Loader(data, seq_length=LENGTH, batch_size=BATCH)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["input_ids"] for batch in loader), loader.state_dict


def gptdataset(folder: str, tokenizer: str, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    names = ("gpt_dataset", "indexed_dataset", "utils")
    gpt, indexed, utils = (importlib.import_module(f"megatron.core.datasets.{name}") for name in names)
    data: Any = importlib.import_module("torch.utils.data")
    prefix = f"{folder}/00000_tokens"
    config = gpt.GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        split="1",
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=END, vocab_size=None, unique_identifiers="none"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=f"{folder}-indices",
    )
    documents, samples, taken = indexed.IndexedDataset(prefix), 1_000_000, [state or 0]
    numbers = np.arange(len(documents), dtype=np.int32)
    dataset = gpt.GPTDataset(documents, prefix, numbers, samples, utils.Split.train, config)

    def batches() -> Iterator[Any]:
        for batch in data.DataLoader(dataset, batch_size=BATCH, sampler=range(taken[0], samples)):
            taken[0] += BATCH
            yield batch["tokens"]

    return batches(), lambda: taken[0]


def mosaicml(folder: str, tokenizer: str, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
    streaming: Any = importlib.import_module("streaming")
    if state is None:
        streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=folder, shuffle=True, shuffle_seed=1, batch_size=BATCH)
    loader = streaming.StreamingDataLoader(dataset, batch_size=BATCH)
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            for batch in loader:
                yield batch["tokens"][:, :-1]

    return batches(), loader.state_dict


def measure(way: str, folder: str, tokenizer: str, seconds: float, kept: Path) -> dict[str, float]:
    """Read in this process: from the beginning for so many CPU seconds, or the first batch behind a kept state."""
    state = pickle.loads(kept.read_bytes()) if kept.exists() else None
    make: Any = {
        "relayrun": partial(relayrun, stream={"shuffle_buffer": 1000}),
        "relayrun_alone": partial(relayrun, stream={"shuffle_buffer": 1000}, read_ahead=False),
        "relayrun_default": relayrun,
        "torchdata": torchdata,
        "grain": grain,
        "bare": bare,
        "relayrun_shards": relayrun_shards,
        "gptdataset": gptdataset,
        "mosaicml": mosaicml,
    }[way]
    batches, take = make(folder, tokenizer, state)
    next(batches)
    first = _results.cpu_seconds()
    if state is not None:
        return {"resume_cpu_seconds": first}
    while _results.cpu_seconds() < first + seconds / 4:
        next(batches)
    begin, count = _results.cpu_seconds(), 0
    own = time.process_time()  # the other clock reads a file of each thread, which costs as much as a batch of shards
    while time.process_time() < own + seconds:
        count += sum(np.asarray(batch).size for batch in islice(batches, 4))
    now = _results.cpu_seconds()
    kept.write_bytes(pickle.dumps(take()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    time.sleep(1)  # until the first loader's threads have read ahead
    begin_again = _results.cpu_seconds()
    next(make(folder, tokenizer, pickle.loads(kept.read_bytes()))[0])
    again = _results.cpu_seconds() - begin_again
    return {
        "resume_in_process_cpu_seconds": again,
        "million_tokens_per_cpu_second": count / (now - begin) / 1e6,
        "first_batch_cpu_seconds": first,
        "peak_gigabytes": peak,
        "state_bytes": kept.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a tokenizer.json, or a folder that holds one")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds of one measurement")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of all ways")
    parser.add_argument("--ways", nargs="+", choices=[*NEEDS], default=[*NEEDS])
    parser.add_argument("--quick", action="store_true", help="small files, one short round; results are only printed")
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "FOLDER", "STATE"), help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, metavar=("FOLDER", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        folder, rows = Path(options.write[0]), options.write[1] == "True"
        write_tokens(folder / "shards", folder / "rows" if rows else None, options.rows)
        return
    if options.measure:
        way, folder, kept = options.measure
        print(json.dumps(measure(way, folder, options.tokenizer, options.seconds, Path(kept))))
        os._exit(0)  # threads of a way may still read
    if options.quick:
        options.rows, options.rounds, options.seconds = 200, 1, 0.5
    look = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    wanted = [name for names in NEEDS.values() for name in names]
    there = subprocess.run([options.python, "-c", look, *wanted], stdout=subprocess.PIPE, text=True, check=True).stdout
    ways = [way for way, names in NEEDS.items() if {*names} <= {*there.split()} and way in options.ways]
    found: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    with tempfile.TemporaryDirectory() as temporary:
        kinds = {way: "shards" if way in SHARDS else "rows" if way == ROWS else "text" for way in ways}
        folders = {way: Path(temporary, kind) for way, kind in kinds.items()}
        if "text" in kinds.values():
            write_files(Path(temporary, "text"), 8, options.rows)
        if {"shards", "rows"} & {*kinds.values()}:
            words = [__file__, options.tokenizer, f"--rows={options.rows}", "--write", temporary, str(ROWS in ways)]
            subprocess.run([options.python, *words], check=True)
        for number in range(options.rounds + 1):  # the first one fills caches
            for way in ways:
                kept = Path(temporary, f"{way}-{number}")
                for _ in ("read", "resume"):
                    words = [
                        __file__,
                        options.tokenizer,
                        f"--seconds={options.seconds}",
                        "--measure",
                        way,
                        folders[way],
                        kept,
                    ]
                    done = subprocess.run([options.python, *words], stdout=subprocess.PIPE, text=True, check=True)
                    if number or options.quick:
                        for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                            found[way].setdefault(name, []).append(value)
    figures = {
        "load_average": os.getloadavg()[0],
        **{way: {name: _results.spread(values) for name, values in of.items()} for way, of in found.items()},
        "ratio": {
            way: {
                name: _results.spread([a / max(b, 0.01) for a, b in zip(found[own][name], values, strict=True)])
                for name, values in found[way].items()
            }
            for way in ways
            if (own := OWN.get(way, "relayrun")) != way and own in ways
        },
    }
    print(json.dumps(figures, indent=1) if options.quick else _results.write("loader", figures))


if __name__ == "__main__":
    main()
