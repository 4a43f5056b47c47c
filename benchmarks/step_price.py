#!/usr/bin/env python3
"""The price of a step that does nothing: CPU time of a dump without `pipeline`, and with a step that passes every
document.

    python benchmarks/step_price.py                              400 MB of text, three rounds
    python benchmarks/step_price.py --megabytes 40 --rounds 1    to try it

The text of curation.py in files of parquet with the same documents. The step is datatrove's LambdaFilter with a
function that is true for every document. Each round takes both, in turns, of the whole text and of a few documents:
what these take is the start, which is left out of the price. The bytes of the shards must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _results import spread, write
from curation import FOLDER, documents, make_text, settings
from tokenization import digests, ours

FILES = 16
STEP = {"lambda": {"filter_function": "operator.truth"}}
Rounds = list[dict[str, dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--prepare", action="store_true", help="make text and tokenizer, and measure nothing")
    options = parser.parse_args()
    place = FOLDER.with_name("step-price") / f"{options.megabytes}-mb"
    if options.prepare:
        make_files(place, options.megabytes)
        return
    # in a process of its own, which may become large: a child's peak of memory begins with its parent's
    subprocess.run([sys.executable, __file__, "--prepare", "--megabytes", str(options.megabytes)], check=True)
    (place / "steps.yaml").write_text(json.dumps(settings(place, 1) | {"pipeline": [STEP]}))
    one_round(place, "few")  # Python compiles its modules, and the tokenizer is met
    rounds = [one_round(place, "text", "few") for _ in range(options.rounds)]
    report(rounds, options.megabytes, pq.ParquetFile(place / "text/0.parquet").metadata.num_rows * FILES)


def make_files(place: Path, megabytes: int) -> None:
    """Write the files, if they are not there, and the tokenizer of curation.py."""
    make_text(FOLDER / "8-mb/text", 8)
    if place.is_dir():
        return
    texts = list(documents(0, megabytes * 1_000_000 // FILES))
    for name, number, rows in (("text", FILES, texts), ("few", 1, texts[:20])):
        (place / name).mkdir(parents=True)
        for file in range(number):
            table = pa.table({"text": rows, "id": [f"{file}-{row}" for row in range(len(rows))]})
            pq.write_table(table, place / name / f"{file}.parquet", compression="zstd")


def one_round(place: Path, *names: str) -> dict[str, dict[str, float]]:
    """Return CPU seconds by folder of files, without the step and with it."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        flags = {"none": (), "step": ("--steps", str(place / "steps.yaml"))}
        tasks = len([*(place / name).iterdir()])
        found[name] = {
            way: ours(place / name, FOLDER / "tokenizer.json", place / way, 1, *given, tasks=tasks, met=True)["cpu_s"]
            for way, given in flags.items()
        }
        assert digests(place / "none") == digests(place / "step"), "the step changes bytes"
    return found


def report(rounds: Rounds, megabytes: int, number: int) -> None:
    prices = [
        (each["text"]["step"] - each["few"]["step"]) - (each["text"]["none"] - each["few"]["none"]) for each in rounds
    ]
    figures: dict[str, Any] = {
        "text_mb": megabytes,
        "documents": number,
        "load_average": os.getloadavg()[0],
        "cpu_s": {way: spread([each["text"][way] for each in rounds]) for way in ("none", "step")},
        "start_cpu_s": {way: spread([each["few"][way] for each in rounds]) for way in ("none", "step")},
        "ms_per_mb": spread([1e3 * price / megabytes for price in prices]),
        "us_per_document": spread([1e6 * price / number for price in prices]),
        "rounds": rounds,
    }
    write("step_price", figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
