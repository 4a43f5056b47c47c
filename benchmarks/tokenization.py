#!/usr/bin/env python3
"""Tokenization against datatrove's own writer: CPU time, tokens per second and core, memory, identity.

One run of each variant after the other, `--rounds` times, on the same machine, files, tasks and workers, with
default flags: the engine's proof and the routing are part of what is measured. The .bin and .idx of both sides
must be the same bytes. Beside ours runs the bare loop of the engine, which reads, encodes and throws the ids away;
once more on eight times the corpus, as links, where the start of a program counts for less, and there also with ids
that are written. One worker against two is measured on that, too. Corpus and tokenizer are kept in the system's
folder for temporary files.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _results import spread, write

from relayrun.lab.corpus import build_corpus
from relayrun.tokens.shards.shard import Shard

CACHE = Path(tempfile.gettempdir()) / "relayrun-benchmarks" / "tokenization-2"
DOOR = Path(__file__).resolve().parents[1] / "scripts/tokenization/preprocess_megatron.py"
TASKS, FILES = 4, 8
COPIES, LONG_TASKS = 8, 16
KNOWN = CACHE / "known"
"""What a start keeps for the next: here each one is the first."""
os.environ["RELAYRUN_CACHE"] = str(KNOWN)
_SET_CHILD_SUBREAPER = 36  # prctl: orphans below us become our children, and so their CPU time is seen
EOS = "<|end_of_text|>"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)  # the pre-tokenizer of Llama 3
PUBLISHED = 70 / 288
"""Mtok/s per core of the system that this project takes up."""

BASELINE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
if __name__ == "__main__":
    data, tokenizer, eos, out, tasks, workers = sys.argv[1:]
    LocalPipelineExecutor([
        ParquetReader(data),
        MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token=eos),
    ], tasks=int(tasks), workers=int(workers), logging_dir=out + "-logs").run()
"""

BARE = """
import glob, multiprocessing, os, sys
import awkward, gigatoken
import pyarrow.parquet as pq
from awkward import contents
from relayrun.tokens.readers.texts import PackedTexts
def work(argument):
    data, tokenizer, part, parts, out = argument
    engine = gigatoken.Tokenizer.from_json(open(tokenizer, "rb").read())
    with open(f"{out}-{part}" if out else os.devnull, "wb") as file:
        for name in sorted(glob.glob(data + "/*.parquet"))[part::parts]:
            for batch in pq.ParquetFile(name).iter_batches(1000, columns=["text"], use_threads=False):
                texts = PackedTexts.from_arrow(batch.column(0))
                strings = contents.ListOffsetArray(
                    awkward.index.Index64(texts.offsets),
                    contents.NumpyArray(texts.data, parameters={"__array__": "char"}),
                    parameters={"__array__": "string"},
                )
                ids = engine.encode_batch(awkward.Array(strings), parallel=False)
                if out:
                    file.write(ids.layout.content.data.data)
if __name__ == "__main__":
    data, tokenizer, workers, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(work, [(data, tokenizer, part, workers, out) for part in range(workers)])
        pool.close()
        pool.join()
"""
"""The bare loop of the fastest engine: reads and encodes; with a last argument that is not empty it also writes ids."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prepare", action="store_true", help="make corpus and tokenizer, and measure nothing")
    options = parser.parse_args()
    if options.prepare:
        print(corpus(), make_tokenizer())
        return
    # in a process of its own, which may become large: a child's peak of memory begins with its parent's
    subprocess.run([sys.executable, __file__, "--prepare"], check=True)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    data, tokenizer = corpus(), make_tokenizer()
    long = many_times(data)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        figures = {
            "datatrove": run(BASELINE, data, tokenizer, EOS, CACHE / "theirs", TASKS, options.workers),
            "bare loop": run(BARE, data, tokenizer, options.workers, ""),
            "relayrun": ours(data, tokenizer, CACHE / "ours", options.workers),
        }
        theirs = digests(CACHE / "theirs")
        assert len(theirs) == 2 * TASKS
        assert digests(CACHE / "ours") == theirs, "ours differs from datatrove's bytes"
        figures |= {
            "bare loop long": run(BARE, long, tokenizer, options.workers, ""),
            "bare loop long that writes": run(BARE, long, tokenizer, options.workers, CACHE / "bare"),
            "relayrun long": ours(long, tokenizer, CACHE / "long-ours", options.workers, tasks=LONG_TASKS),
            "relayrun long 1 worker": ours(long, tokenizer, CACHE / "long-one", 1, tasks=LONG_TASKS),
        }
        assert digests(CACHE / "long-ours") == digests(CACHE / "long-one")
        figures["relayrun long"]["tasks_s"] = tasks_seconds(CACHE / "long-ours")
        figures["relayrun long 1 worker"]["tasks_s"] = tasks_seconds(CACHE / "long-one")
        for file in (*CACHE.glob("bare-*"), *CACHE.glob("long-o*/*.bin")):
            file.unlink()
        rounds.append(figures)
        print(f"round {number + 1}: {json.dumps(figures)}", flush=True)
    make_huge_document()
    largest = {kind: long_document(tokenizer, kind) for kind in ("parquet", "jsonl", "huge")}
    report(rounds, largest, data, tokenizer)


Rounds = list[dict[str, dict[str, float]]]


def report(rounds: Rounds, largest: dict[str, float], data: Path, tokenizer: Path) -> None:
    record = json.loads((CACHE / "ours" / "tokenization.json").read_text())
    shards = record["shards"].values()
    tokens = sum(Shard.open(file.with_suffix("")).tokens for file in (CACHE / "ours").glob("*.idx"))

    def ratio(above: str, below: str, what: str = "cpu_s") -> dict[str, float]:
        return spread([figures[above][what] / figures[below][what] for figures in rounds])

    figures: dict[str, Any] = {
        "text_mb": sum(
            pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size for file in data.glob("*.parquet")
        )
        / 1e6,
        "tokens": tokens,
        "vocabulary": len(json.loads(tokenizer.read_text())["model"]["vocab"]),
        "tokenizer": (tokenizer.parent / "origin.txt").read_text(),
        "engine": sorted({f"{task['engine']} {task['engine_version']}" for task in shards}),
        "documents": sum(task["documents"] for task in shards),
        "routed_documents": sum(task["routed_documents"] for task in shards),
        "same_bytes_as_datatrove": True,
        "load_average": os.getloadavg()[0],
        "cpu_speed_up_over_datatrove": ratio("datatrove", "relayrun"),
        "share_of_the_bare_loop": ratio("bare loop", "relayrun"),
        "share_of_the_bare_loop_long": ratio("bare loop long", "relayrun long"),
        "share_of_the_bare_loop_long_that_writes": ratio("bare loop long that writes", "relayrun long"),
        "one_to_two_workers": ratio("relayrun long 1 worker", "relayrun long", "tasks_s"),
        "one_to_two_workers_with_start": ratio("relayrun long 1 worker", "relayrun long", "wall_s"),
        "mtok_per_cpu_second": tokens / 1e6 / statistics.median(each["relayrun"]["cpu_s"] for each in rounds),
        "published_mtok_per_core_second": PUBLISHED,
        "mtok_per_cpu_second_long": COPIES
        * tokens
        / 1e6
        / statistics.median(each["relayrun long"]["cpu_s"] for each in rounds),
        "largest_process_mb_document_of_1_gb": largest.pop("huge"),
        "largest_process_mb_document_of_60_mb": largest,
        "largest_process_mb": {name: max(each[name]["largest_mb"] for each in rounds) for name in rounds[0]},
        "rounds": rounds,
    }
    write("tokenization", figures)
    print(json.dumps({name: value for name, value in figures.items() if name != "rounds"}, indent=1))


def tasks_seconds(folder: Path) -> float:
    """From the beginning of the first task to the end of the last."""
    tasks = json.loads((folder / "tokenization.json").read_text())["shards"].values()
    return float(max(task["started"] + task["seconds"] for task in tasks) - min(task["started"] for task in tasks))


def long_document(tokenizer: Path, kind: str) -> float:
    """Memory of the largest process, in MB, for a file with a long document."""
    return ours(CACHE / f"long-{kind}", tokenizer, CACHE / f"long-{kind}-tokens", 1, tasks=1)["largest_mb"]


def make_long_documents(data: Path) -> None:
    text = "\n".join(pq.read_table(next(data.glob("*.parquet")))["text"].to_pylist())
    text = (text * (60_000_000 // len(text) + 1))[:60_000_000]
    for kind in ("parquet", "jsonl"):
        (CACHE / f"long-{kind}").mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": ["short", text]}), CACHE / "long-parquet" / "long.parquet")
    (CACHE / "long-jsonl" / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")


def make_huge_document() -> None:
    """One of about 1 GB, in jsonl; piece by piece: a child's peak of memory begins with its parent's."""
    file = CACHE / "long-huge" / "long.jsonl"
    if file.exists():
        return
    file.parent.mkdir(exist_ok=True)
    begin = (CACHE / "long-jsonl" / "long.jsonl").stat().st_size
    with file.with_suffix(".tmp").open("wb") as out:
        for copy in range(1_000_000_000 // begin + 1):
            with (CACHE / "long-jsonl" / "long.jsonl").open("rb") as source:
                source.seek(len(b'{"text": "') if copy else 0)
                left = begin - source.tell() - len(b'"}\n')
                while left:
                    left -= out.write(source.read(min(left, 1 << 20)))
        out.write(b'"}\n')
    file.with_suffix(".tmp").rename(file)


def many_times(data: Path) -> Path:
    """Links to the files of `data`."""
    folder = CACHE / "corpus-long"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for copy in range(COPIES):
        for file in data.glob("*.parquet"):
            (folder / f"{copy}-{file.name}").symlink_to(file)
    return folder


def ours(
    data: Path,
    tokenizer: Path,
    out: Path,
    workers: int,
    *flags: str,
    tasks: int = TASKS,
    eos: str = EOS,
    met: bool = False,
) -> dict[str, float]:
    """What our program takes. `met`: on a machine that has met the tokenizer, as from its second job on."""
    for folder in (out,) if met else (out, KNOWN):
        shutil.rmtree(folder, ignore_errors=True)
    paths = CACHE / "paths.txt"
    paths.write_text("".join(f"{file.name}\n" for file in sorted(data.iterdir())))
    return measured(
        [
            sys.executable,
            str(DOOR),
            "--tokenizer-name-or-path",
            str(tokenizer),
            "--dataset",
            str(data),
            "--paths-file",
            str(paths),
            "--output-folder",
            str(out),
            "--eos-token",
            eos,
            "--n-tasks",
            str(tasks),
            "--n-workers",
            str(workers),
            *flags,
        ]
    )


def run(program: str, *arguments: object) -> dict[str, float]:
    if program == BASELINE:
        for name in ("theirs", "theirs-logs"):
            shutil.rmtree(CACHE / name, ignore_errors=True)
    file = CACHE / f"{hashlib.sha256(program.encode()).hexdigest()[:8]}.py"
    file.write_text(program)
    return measured([sys.executable, str(file), *map(str, arguments)])


def measured(command: list[str]) -> dict[str, float]:
    """Wall and CPU seconds of a process and all its children, and the memory of the largest of them in MB."""
    started = time.monotonic()
    with (CACHE / "output.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    cpu, largest = 0.0, 0
    with contextlib.suppress(ChildProcessError):
        while True:  # the process itself, and orphans that it leaves (datatrove's workers are nobody's children)
            pid, status, usage = os.wait4(-1, 0)
            cpu, largest = cpu + usage.ru_utime + usage.ru_stime, max(largest, usage.ru_maxrss)
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                wall = time.monotonic() - started
    if process.returncode:
        raise SystemExit((CACHE / "output.log").read_text())
    return {"wall_s": wall, "cpu_s": cpu, "largest_mb": largest / 1024}


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for suffix in ("bin", "idx"):
        for path in folder.glob(f"*.{suffix}"):
            with path.open("rb") as file:  # not at once: a child's peak of memory begins with its parent's
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def corpus() -> Path:
    """PackedTexts of the Python installation, about 190 MB; where it has less, each once more with its lines mixed."""
    folder = CACHE / "corpus-190"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    build_corpus(CACHE / "source", megabytes=400)
    texts = [
        text
        for file in sorted((CACHE / "source").rglob("*.parquet"))
        for text in pq.read_table(file, columns=["text"])["text"].to_pylist()
        if "<|" not in text
    ]
    generator = random.Random(0)
    while sum(map(len, texts)) < 181_000_000:
        for text in list(texts):
            lines = text.split("\n")
            generator.shuffle(lines)
            texts.append("\n".join(lines))
    generator.shuffle(texts)
    sizes = itertools.accumulate(map(len, texts))
    texts = [text for text, size in zip(texts, sizes, strict=True) if size < 190_000_000]
    building = CACHE / "building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    for number in range(FILES):
        table = pa.table({"text": texts[number::FILES]})
        pq.write_table(table, building / f"{number:02d}.parquet", row_group_size=1 << 20, compression="snappy")
    make_long_documents(building)
    building.rename(folder)
    os.execv(sys.executable, [sys.executable, *sys.argv])  # a child's peak of memory begins with its parent's
    raise AssertionError


def make_tokenizer() -> Path:
    """The Llama-3 vocabulary if `llama-models` is installed, else as many entries trained on the corpus."""
    file = CACHE / "tokenizer" / "tokenizer.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        found = importlib.util.find_spec("llama_models")
        if found and found.origin:
            made, origin = _llama3(Path(found.origin).parent), "llama3"
        else:
            tables = (pq.read_table(each, columns=["text"])["text"] for each in sorted(corpus().glob("*.parquet")))
            made, origin = trained(text for texts in tables for text in texts.to_pylist()), "trained"
        (file.parent / "origin.txt").write_text(origin)
        made.save(str(file) + ".tmp")
        os.rename(str(file) + ".tmp", file)
    return file


def _llama3(package: Path) -> Any:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):  # type: ignore[misc]
        @staticmethod
        def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
            lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
            return {base64.b64decode(token): int(rank) for token, rank in lines}

    special = ["<|begin_of_text|>", EOS, *(f"<|reserved_special_token_{number}|>" for number in range(254))]
    return Converter(
        vocab_file=str(package / "llama3/tokenizer.model"), pattern=PATTERN, extra_special_tokens=special
    ).converted()


def trained(texts: Iterable[str], size: int = 128_000) -> Any:
    """A tokenizer with Llama 3's pattern and so many entries, trained on these texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    main()
