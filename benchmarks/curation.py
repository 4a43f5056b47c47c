#!/usr/bin/env python3
"""Filters and MinHash beside datatrove's own executor with the same steps: CPU time, memory, and the same bytes.

    python benchmarks/curation.py                              100 MB of text, three rounds
    python benchmarks/curation.py --megabytes 20 --rounds 1    to try it

The text is made here: words of a Zipf distribution in lines and sentences, with addresses, short and repetitive
documents, copies and near copies. Each round takes on both sides FineWeb's filters with tokenization behind them; the
tokenization of what they keep; and MinHash with FineWeb's parameters. The bytes of the shards and the documents that
stay must be equal. The filters' time is that of the first less the second: it has the reading and writing of what
they drop. With s, its share of datatrove's time, and r, our ratio of the second, the whole can be 1/(s + (1-s)/r)
times as fast as theirs if the filters are exactly as fast.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _results import spread, write
from tokenization import _SET_CHILD_SUBREAPER, CACHE, EOS, digests, measured, ours, trained

FOLDER = CACHE.with_name("curation-1")
HERE = Path(__file__).resolve().parent
FILES = 4
"""And tasks: a file each."""
FILTERS = ("Repetition", "Quality", "C4", "FineWeb")
MINHASH = {"n_grams": 5, "num_buckets": 14, "hashes_per_bucket": 8}
FREQUENT = ("the", "be", "to", "of", "and", "that", "have", "with")

THEIR_FILTERS = """
import sys
import _curation_steps as steps
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
if __name__ == "__main__":
    data, tokenizer, eos, out, tasks, workers, *names = sys.argv[1:]
    filters = [getattr(steps, name)(exclusion_writer=JsonlWriter(f"{out}-removed/{name}")) for name in names]
    LocalPipelineExecutor(
        [
            JsonlReader(data),
            *filters,
            *([PIIFormatter()] if names else []),
            MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token=eos),
        ],
        tasks=int(tasks), workers=int(workers), logging_dir=out + "-logs",
    ).run()
"""

THEIR_MINHASH = """
import json, sys
import _curation_steps as steps
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline import dedup
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
if __name__ == "__main__":
    data, out, tasks, workers, given = sys.argv[1:]
    config = dedup.MinhashConfig(**json.loads(given), hash_config=HashConfig(hash_fc="sha1"))
    read = JsonlReader(data, add_file_path=False)
    writer = JsonlWriter(f"{out}-removed")
    signatures, buckets, clusters = (f"{out}-{name}" for name in ("signatures", "buckets", "clusters"))
    for name, number, pipeline in (
        ("signatures", tasks, [read, dedup.MinhashDedupSignature(signatures, config, steps.WORDS)]),
        ("buckets", config.num_buckets, [dedup.MinhashDedupBuckets(signatures, buckets, config=config)]),
        ("clusters", 1, [dedup.MinhashDedupCluster(buckets, clusters, config)]),
        ("kept", tasks, [read, dedup.MinhashDedupFilter(clusters, writer), JsonlWriter(out)]),
    ):
        logs = f"{out}-logs/{name}"
        LocalPipelineExecutor(pipeline, tasks=int(number), workers=int(workers), logging_dir=logs).run()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--prepare", action="store_true", help="make text and tokenizer, and measure nothing")
    options = parser.parse_args()
    place = FOLDER / f"{options.megabytes}-mb"
    if options.prepare:
        make_text(place / "text", options.megabytes)
        return
    # in a process of its own, which may become large: a child's peak of memory begins with its parent's
    subprocess.run([sys.executable, __file__, "--prepare", "--megabytes", str(options.megabytes)], check=True)
    os.environ["PYTHONPATH"] = str(HERE)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rounds = []
    for number in range(options.rounds):
        rounds.append(one_round(place, options.workers))
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", flush=True)
    report(place, rounds, options.megabytes)


class TotalMemory(threading.Thread):
    """Looks at the memory of all processes below this one, ten times a second: pages that they share count once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self._over = 0, threading.Event()

    def __enter__(self) -> TotalMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.largest = max(self.largest, sum(map(kilobytes, children(os.getpid()))))


def children(pid: int) -> list[int]:
    """Return the processes below one."""
    with contextlib.suppress(OSError):
        own = [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]
        return own + [each for child in own for each in children(child)]
    return []


def kilobytes(pid: int) -> int:
    """Return the proportional set size of a process."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return 0


Sides = dict[str, dict[str, dict[str, float]]]


def one_round(place: Path, workers: int) -> Sides:
    """Measure both sides of each work; raises AssertionError if their bytes differ."""
    found: Sides = {"filters": filtered(place, place / "text", workers, FILTERS)}
    keep_text(place)
    found["tokenization"] = filtered(place, place / "kept", workers, ())
    found["minhash"] = minhash(place, workers)
    return found


def filtered(place: Path, data: Path, workers: int, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Tokenize the text of a folder behind these filters; none: as it is."""
    tokenizer, steps = place.parent / "tokenizer.json", place / "steps.yaml"
    pipeline = [*(f"_curation_steps.{name}" for name in names), "pii"] if names else []
    steps.write_text(json.dumps(settings(place, workers) | {"pipeline": pipeline}))
    given = (data, tokenizer, EOS, place / "theirs", FILES, workers, *names)
    theirs = program(place, THEIR_FILTERS, *given)
    flags = ("--steps", str(steps)) if names else ()
    own = ours(data, tokenizer, place / "ours", workers, *flags, tasks=FILES, met=True)
    assert digests(place / "theirs") == digests(place / "ours"), "ours differs from datatrove's bytes"
    return {"datatrove": theirs, "relayrun": own}


def settings(place: Path, workers: int) -> dict[str, Any]:
    """Return what every YAML of a data set has."""
    places = {"metadata_folder": f"{place}/meta", "output_folder": f"{place}/none", "logs": f"{place}/logs"}
    names = {"tokenizer": "none", "tokenizer_name": "t", "dataset_name": "d"}
    return {**places, **names, "executor": "local", "tasks": FILES, "workers": workers}


def keep_text(place: Path) -> None:
    """Write the documents that the filters left into the folder `kept`, with the texts that they had before: the
    tokenizer sees all but the addresses that a formatter replaced."""
    folder = place / "kept"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, file in enumerate(sorted((place / "text").iterdir())):
        dropped: set[str] = set()
        with gzip.open(place / "ours/exclusions" / f"{number:05d}_tokens.jsonl.gz", "rt") as lines:
            dropped.update(json.loads(line)["id"] for line in lines)
        with file.open() as lines, (folder / file.name).open("w") as kept:
            kept.writelines(line for line in lines if json.loads(line)["id"] not in dropped)


def minhash(place: Path, workers: int) -> dict[str, dict[str, float]]:
    theirs = program(place, THEIR_MINHASH, place / "text", place / "theirs", FILES, workers, json.dumps(MINHASH))
    shutil.rmtree(place / "clean", ignore_errors=True)
    shutil.rmtree(place / "meta", ignore_errors=True)
    prepare = ["dumps", "prepare", "--dataset-folder", str(place / "text")]
    relayrun = [sys.executable, "-m", "relayrun"]
    subprocess.run(
        [*relayrun, *prepare, "--preprocessing-metadata-folder", str(place / "meta")], check=True, capture_output=True
    )
    words = {"language": "_curation_steps.Words", "minhash": MINHASH, "exact": False}
    values = settings(place, workers) | {"dedup": {"output_folder": f"{place}/clean", **words}}
    (place / "dedup.yaml").write_text(json.dumps(values))
    with TotalMemory() as memory:
        own = measured([*relayrun, "dumps", "dedup", str(place / "dedup.yaml")])
    own["total_mb"] = memory.largest / 1024
    assert texts(place / "theirs") == texts(place / "clean"), "ours keeps other documents than datatrove"
    return {"datatrove": theirs, "relayrun": own}


def texts(folder: Path) -> dict[str, bytes]:
    """Return the lines of each compressed file."""
    return {file.name: gzip.decompress(file.read_bytes()) for file in sorted(folder.glob("*.jsonl.gz"))}


def program(place: Path, source: str, *arguments: object) -> dict[str, float]:
    """Measure a program of theirs in new folders."""
    for folder in place.glob("theirs*"):
        shutil.rmtree(folder)
    (place / "program.py").write_text(source)
    with TotalMemory() as memory:
        found = measured([sys.executable, str(place / "program.py"), *map(str, arguments)])
    return found | {"total_mb": memory.largest / 1024}


def report(place: Path, rounds: list[Sides], megabytes: int) -> None:
    """Write and print the ratios, of which more than 1 is faster than datatrove."""

    def seconds(each: Sides, work: str, side: str) -> float:
        return each[work][side]["cpu_s"]

    def ratio(each: Sides, work: str) -> float:
        return seconds(each, work, "datatrove") / seconds(each, work, "relayrun")

    def filters(each: Sides, side: str) -> float:
        return seconds(each, "filters", side) - seconds(each, "tokenization", side)

    def bound(each: Sides) -> float:
        share = filters(each, "datatrove") / seconds(each, "filters", "datatrove")
        return 1 / (share + (1 - share) / ratio(each, "tokenization"))

    def memory(each: Sides, what: str) -> float:
        return each["minhash"]["relayrun"][what] / each["minhash"]["datatrove"][what]

    shares = [filters(each, "datatrove") / seconds(each, "filters", "datatrove") for each in rounds]
    documents = sum(sum(1 for _ in file.open("rb")) for file in (place / "text").iterdir())
    kept = sum(sum(1 for _ in file.open("rb")) for file in (place / "kept").iterdir())
    figures: dict[str, Any] = {
        "text_mb": megabytes,
        "documents": documents,
        "documents_behind_the_filters": kept,
        "same_bytes_as_datatrove": True,
        "load_average": os.getloadavg()[0],
        "filters_share_of_datatrove": spread(shares),
        "tokenization_over_datatrove": spread([ratio(each, "tokenization") for each in rounds]),
        "filters_over_datatrove": spread([filters(each, "datatrove") / filters(each, "relayrun") for each in rounds]),
        "whole_over_datatrove": spread([ratio(each, "filters") for each in rounds]),
        "bound": spread([bound(each) for each in rounds]),
        "share_of_the_bound": spread([ratio(each, "filters") / bound(each) for each in rounds]),
        "minhash_over_datatrove": spread([ratio(each, "minhash") for each in rounds]),
        "minhash_memory_of_datatroves": spread([memory(each, "total_mb") for each in rounds]),
        "rounds": rounds,
    }
    write("curation", figures)
    print(json.dumps({name: value for name, value in figures.items() if name != "rounds"}, indent=1))


def make_text(folder: Path, megabytes: int) -> None:
    """Write the files and the tokenizer, if they are not there."""
    tokenizer = FOLDER / "tokenizer.json"
    if not folder.is_dir():
        building = folder.with_name("building")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for number in range(FILES):
            with (building / f"{number:02d}.jsonl").open("w") as out:
                for row, text in enumerate(documents(number, megabytes * 1_000_000 // FILES)):
                    out.write(json.dumps({"text": text, "id": f"{number}-{row}"}) + "\n")
        building.rename(folder)
    if not tokenizer.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        trained(documents(0, 4_000_000), size=32_000).save(str(tokenizer))


def documents(seed: int, size: int) -> Iterator[str]:
    """Yield texts of so many bytes: good, short, repetitive and bulleted ones, copies and near copies."""
    generator, letters = random.Random(0), "etaoinshrdlucmfwypvbgk"
    vocabulary = [
        "".join(generator.choices(letters, range(22, 0, -1), k=generator.randint(3, 10))) for _ in range(30_000)
    ]
    weights = [1 / (rank + 10) for rank in range(len(vocabulary))]
    generator = random.Random(seed + 1)
    recent: list[str] = []
    while size > 0:
        kind = generator.random()
        if recent and kind < 0.2:
            lines = generator.choice(recent).split("\n")
            if kind > 0.05:
                lines[generator.randrange(len(lines))] = "Another line takes the place of one of the lines."
            text = "\n".join(lines)
        else:
            words = iter(generator.choices(vocabulary, weights, k=int(generator.lognormvariate(5.7, 0.8)) + 5))
            lines = list(sentences(words, generator))
            if kind > 0.9:
                lines = [f"- {line}" for line in lines] if kind > 0.95 else lines[:3] * 8
            text = "\n".join(lines)
            recent = [*recent[-499:], text]
        size -= len(text)
        yield text


def sentences(words: Iterator[str], generator: random.Random) -> Iterator[str]:
    line: list[str] = []
    for word in words:
        line += [word, generator.choice(FREQUENT)] if generator.random() < 0.4 else [word]
        if generator.random() < 0.001:
            line.append(f"{word}@mail.com")
        if len(line) > generator.randint(8, 40):
            yield " ".join(line).capitalize() + "."
            line = []
    if line:
        yield " ".join(line).capitalize() + "."


if __name__ == "__main__":
    main()
