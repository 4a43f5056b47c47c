#!/usr/bin/env python3
"""Tokenization against datatrove's own writer for each kind of tokenizer: CPU time from parquet to shards, same bytes.

    python benchmarks/tokenizer_families.py                          all of it: hours
    python benchmarks/tokenizer_families.py --megabytes 2 --rounds 1 "Llama 3" GPT-2

150 MB of text in many languages and of code, two workers on each side, default flags: a program's start and the
routing are part of what is measured, twice: on a machine that meets the tokenizer, where a start has its proof, and
again. Beside both runs the bare loop of the engine, where it takes the tokenizer's file as it is: it reads, encodes and
throws the ids away, and each of its workers loads the engine. The tokenizers are those of `tests/published.py`. Each
one's row is kept when it is done, so a run that was ended goes on behind it (`--again` begins anew); the result is
written when all are there.
"""

from __future__ import annotations

import argparse
import ctypes
import gettext
import json
import math
import os
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _report import FAMILIES as WANTED
from _results import spread, write
from tokenization import _SET_CHILD_SUBREAPER, BARE, BASELINE, CACHE, FILES, KNOWN, TASKS, digests, measured, ours, run

from relayrun.lab.corpus import build_corpus

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.published import FORMS, published

NO_TEXT = ("<|", "</s>", "<s>", "<unk>", "<pad>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Text of special tokens, which becomes these tokens in datatrove alone."""

BARE_TOO = ("Llama 3", "GPT-2", "o200k", "Tekken")
"""Tokenizers whose file the engine takes without any preparation."""

START = """
import sys
from relayrun.tokens.tokenize.processes import use_one_thread
use_one_thread()
import relayrun.tokens.tokenize.pipeline
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.readers.texts import PackedTexts
loaded = load_tokenizer(TokenizeOptions(tokenizer=sys.argv[1], eos_token=sys.argv[2]))
sample = PackedTexts.of([open(sys.argv[3]).read()[:60_000]])
selection = select_engine("auto", lambda: loaded.tokenizer, sample, print, definition=loaded.definition)
selection.build(loaded.definition).encode(PackedTexts.of(["a first document"]))
"""
"""All that a program does before its first document."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WANTED), help=f"of: {', '.join(FORMS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=150)
    parser.add_argument("--again", action="store_true", help="rows that are kept are measured again")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    CACHE.mkdir(parents=True, exist_ok=True)
    data = multilingual(options.megabytes)
    rows = CACHE / f"families-{options.megabytes:g}MB-{options.rounds}"
    rows.mkdir(exist_ok=True)
    for name in options.names:
        row = rows / f"{name}.json"
        if options.again or not row.exists():
            row.write_text(json.dumps(measure(name, data, options.workers, options.rounds)))
        figures = json.loads(row.read_text())
        print(
            f"{name:24} {figures['engine']:12} {figures['cpu_speed_up_first']['median']:6.1f} times, "
            f"again {figures['cpu_speed_up']['median']:.1f}, wanted {WANTED.get(name, 1)}, "
            f"bare loop {figures.get('cpu_speed_up_of_bare_loop', {}).get('median', math.nan):.1f}; "
            f"start {figures['start_cpu_s']['median']:.2f} s, "
            f"again {figures['start_again_cpu_s']['median']:.2f} s, load {figures['load_average']:.1f}, "
            f"{figures['routed_documents']:,} of {figures['documents']:,} documents routed",
            flush=True,
        )
    kept = {name: rows / f"{name}.json" for name in WANTED}
    if all(file.exists() for file in kept.values()) and options.megabytes >= 150:
        write("tokenizer_families", {name: json.loads(file.read_text()) for name, file in kept.items()})


def measure(name: str, data: Path, workers: int, rounds: int) -> dict[str, Any]:
    """The row of a tokenizer. Raises SystemExit where the bytes differ."""
    tokenizer = published(name)
    tokens = json.loads(tokenizer.read_text())["added_tokens"]
    special = {token["content"] for token in tokens if token["special"]}
    eos = next(each for each in ("<|endoftext|>", "</s>", "<eos>", "[SEP]") if each in special)
    program = CACHE / "start.py"
    program.write_text(START)
    some = CACHE / "some-text.txt"
    some.write_text("\n".join(pq.read_table(next(data.glob("*.parquet")))["text"].to_pylist())[:100_000])
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        theirs = run(BASELINE, data, tokenizer, eos, CACHE / "theirs", TASKS, workers)
        mine: dict[str, float] = {}
        for met in (False, True):
            figures = ours(data, tokenizer, CACHE / "ours", workers, eos=eos, met=met)
            mine["ours again" if met else "ours"] = figures["cpu_s"]
            if digests(CACHE / "ours") != digests(CACHE / "theirs"):
                raise SystemExit(f"{name}: other bytes than datatrove's")
        if name in BARE_TOO:
            mine["bare"] = run(BARE, data, tokenizer, workers, "")["cpu_s"]
        shutil.rmtree(KNOWN, ignore_errors=True)
        first, again = (measured([sys.executable, str(program), str(tokenizer), eos, str(some)]) for _ in range(2))
        starts = {"start": first["cpu_s"], "start again": again["cpu_s"]}
        found.append({"theirs": theirs["cpu_s"], **mine, **starts})
    shards = json.loads((CACHE / "ours" / "tokenization.json").read_text())["shards"].values()
    return {
        "engine": "+".join(sorted({task["engine"] for task in shards})),
        "cpu_speed_up_first": spread([each["theirs"] / each["ours"] for each in found]),
        "cpu_speed_up": spread([each["theirs"] / each["ours again"] for each in found]),
        **(
            {"cpu_speed_up_of_bare_loop": spread([each["theirs"] / each["bare"] for each in found])}
            if name in BARE_TOO
            else {}
        ),
        "start_cpu_s": spread([each["start"] for each in found]),
        "start_again_cpu_s": spread([each["start again"] for each in found]),
        "load_average": os.getloadavg()[0],
        "cpu_s_first": statistics.median(each["ours"] for each in found),
        "cpu_s": statistics.median(each["ours again"] for each in found),
        "cpu_s_of_datatrove": statistics.median(each["theirs"] for each in found),
        "documents": sum(task["documents"] for task in shards),
        "routed_documents": sum(task["routed_documents"] for task in shards),
        "same_bytes_as_datatrove": True,
    }


def multilingual(megabytes: float) -> Path:
    """Parquet files of translations (three fifths) and of code, each document again with its lines mixed if too few."""
    folder = CACHE / f"multilingual-{megabytes:g}"
    if folder.is_dir():
        return folder
    source = CACHE / f"source-{megabytes:g}"
    if not source.is_dir():
        build_corpus(source, megabytes=max(10, int(megabytes)))
    files = sorted(source.rglob("*.parquet"))
    code = [text for file in files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
    generator = random.Random(0)
    texts: list[str] = []
    for kind, share in ((translations(), 0.6), (code, 0.4)):
        kind = [text for text in kind if not any(mark in text for mark in NO_TEXT) and text.strip()]
        left = megabytes * 1e6 * (share if kind else 0)
        while left > 0:
            generator.shuffle(kind)
            for text in kind:
                texts.append(text)
                left -= len(text.encode())
                if left < 0:
                    break
            kind = ["\n".join(generator.sample(lines, len(lines))) for lines in (text.split("\n") for text in kind)]
    generator.shuffle(texts)
    building = CACHE / "building-multilingual"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    for number in range(FILES):
        table = pa.table({"text": texts[number::FILES]})
        pq.write_table(table, building / f"{number:02d}.parquet", row_group_size=1 << 20, compression="snappy")
    building.rename(folder)
    return folder


def translations() -> list[str]:
    """The messages of this machine's catalogues, 20 a document."""
    documents: list[str] = []
    for path in sorted(Path("/usr/share/locale").glob("*/LC_MESSAGES/*.mo")):
        try:
            with path.open("rb") as file:
                messages = [*gettext.GNUTranslations(file)._catalog.values()]  # type: ignore[attr-defined]
        except (UnicodeError, ValueError, OSError, TypeError, IndexError):
            continue
        documents += ["\n".join(messages[begin : begin + 20]) for begin in range(0, len(messages), 20)]
    return documents


if __name__ == "__main__":
    main()
