#!/usr/bin/env python3
"""Tokenization against datatrove's own writer: CPU time, tokens per second and core, memory, identity.

One run of each variant after the other, `--rounds` times, on the same machine, files, tasks and workers, with
default flags: the engine's proof and the routing are part of what is measured. The .bin and .idx of both sides
must be the same bytes. Corpus and tokenizer are kept in the system's folder for temporary files.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _results import write

from relayrun.demo.corpus import build_corpus
from relayrun.indexed import Shard

CACHE = Path(tempfile.gettempdir()) / "relayrun-benchmarks" / "tokenization"
DOOR = Path(__file__).resolve().parents[1] / "scripts/tokenization/preprocess_megatron.py"
TASKS, FILES = 4, 8
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
import glob, multiprocessing, sys
import pyarrow.parquet as pq
from relayrun.tokenization.engines import Gigatoken
from relayrun.tokenization.texts import Texts
def work(argument):
    data, tokenizer, part, parts = argument
    engine = Gigatoken(open(tokenizer).read())
    for name in sorted(glob.glob(data + "/*.parquet"))[part::parts]:
        for batch in pq.ParquetFile(name).iter_batches(1000, columns=["text"], use_threads=False):
            engine.encode(Texts.from_arrow(batch.column(0)))
if __name__ == "__main__":
    data, tokenizer, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(work, [(data, tokenizer, part, workers) for part in range(workers)])
        pool.close()
        pool.join()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    data, tokenizer = corpus(), make_tokenizer()
    (CACHE / "paths.txt").write_text("".join(f"{file.name}\n" for file in sorted(data.glob("*.parquet"))))
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        figures = {
            "datatrove": run(BASELINE, data, tokenizer, EOS, CACHE / "theirs", TASKS, options.workers),
            "relayrun": ours(data, tokenizer, CACHE / "ours", options.workers),
            "relayrun fastokens": ours(data, tokenizer, CACHE / "fast", options.workers, "--engine", "fastokens"),
            "bare gigatoken": run(BARE, data, tokenizer, options.workers),
            "relayrun 1 worker": ours(data, tokenizer, CACHE / "one", 1),
        }
        theirs = digests(CACHE / "theirs")
        assert len(theirs) == 2 * TASKS
        for folder in ("ours", "fast", "one"):
            assert digests(CACHE / folder) == theirs, f"{folder} differs from datatrove's bytes"
        rounds.append(figures)
        print(f"round {number + 1}: {json.dumps(figures)}", flush=True)
    report(rounds, data, tokenizer)


def report(rounds: list[dict[str, dict[str, float]]], data: Path, tokenizer: Path) -> None:
    record = json.loads((CACHE / "ours" / "tokenization.json").read_text())
    shards = record["shards"].values()
    tokens = sum(Shard.open(file.with_suffix("")).tokens for file in (CACHE / "ours").glob("*.idx"))

    def ratio(above: str, below: str, what: str = "cpu_s") -> dict[str, float]:
        values = [figures[above][what] / figures[below][what] for figures in rounds]
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    figures: dict[str, Any] = {
        "text_mb": sum(pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size
                       for file in data.glob("*.parquet")) / 1e6,
        "tokens": tokens,
        "vocabulary": len(json.loads(tokenizer.read_text())["model"]["vocab"]),
        "tokenizer": (tokenizer.parent / "origin.txt").read_text(),
        "engine": sorted({f"{task['engine']} {task['engine_version']}" for task in shards}),
        "documents": sum(task["documents"] for task in shards),
        "routed_documents": sum(task["routed_documents"] for task in shards),
        "same_bytes_as_datatrove": True,
        "load_average": os.getloadavg()[0],
        "cpu_speed_up_over_datatrove": ratio("datatrove", "relayrun"),
        "cpu_speed_up_over_datatrove_fastokens": ratio("datatrove", "relayrun fastokens"),
        "share_of_the_bare_loop": ratio("bare gigatoken", "relayrun"),
        "one_to_two_workers": ratio("relayrun 1 worker", "relayrun", "wall_s"),
        "mtok_per_cpu_second": tokens / 1e6 / statistics.median(each["relayrun"]["cpu_s"] for each in rounds),
        "published_mtok_per_core_second": PUBLISHED,
        "largest_process_mb": {name: max(each[name]["largest_mb"] for each in rounds) for name in rounds[0]},
        "rounds": rounds,
    }  # fmt: skip
    write("tokenization", figures)
    print(json.dumps({name: value for name, value in figures.items() if name != "rounds"}, indent=1))


def ours(data: Path, tokenizer: Path, out: Path, workers: int, *flags: str) -> dict[str, float]:
    shutil.rmtree(out, ignore_errors=True)
    return measured([sys.executable, str(DOOR), "--tokenizer-name-or-path", str(tokenizer), "--dataset", str(data),
                     "--paths-file", str(CACHE / "paths.txt"), "--output-folder", str(out), "--eos-token", EOS,
                     "--n-tasks", str(TASKS), "--n-workers", str(workers), *flags])  # fmt: skip


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
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for suffix in ("bin", "idx") for file in folder.glob(f"*.{suffix}")}  # fmt: skip


def corpus() -> Path:
    """Texts of the Python installation, and each of them once more with its lines in another order."""
    folder = CACHE / "corpus"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    build_corpus(CACHE / "source", megabytes=400)
    texts = [text for file in sorted((CACHE / "source").rglob("*.parquet"))
             for text in pq.read_table(file, columns=["text"])["text"].to_pylist() if "<|" not in text]  # fmt: skip
    generator = random.Random(0)
    for text in list(texts):
        lines = text.split("\n")
        generator.shuffle(lines)
        texts.append("\n".join(lines))
    generator.shuffle(texts)
    building = CACHE / "corpus.building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    for number in range(FILES):
        table = pa.table({"text": texts[number::FILES]})
        pq.write_table(table, building / f"{number:02d}.parquet", row_group_size=1 << 20, compression="snappy")
    building.rename(folder)
    return folder


def make_tokenizer() -> Path:
    """The Llama-3 vocabulary if `llama-models` is installed, else as many entries trained on the corpus."""
    file = CACHE / "tokenizer" / "tokenizer.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        found = importlib.util.find_spec("llama_models")
        made, origin = (
            (_llama3(Path(found.origin).parent), "llama3") if found and found.origin else (_trained(), "trained")
        )
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
    return Converter(vocab_file=str(package / "llama3/tokenizer.model"), pattern=PATTERN,
                     extra_special_tokens=special).converted()  # fmt: skip


def _trained() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=128_000, special_tokens=[EOS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tables = (pq.read_table(file, columns=["text"])["text"].to_pylist() for file in sorted(corpus().glob("*.parquet")))
    tokenizer.train_from_iterator((text for texts in tables for text in texts), trainer)
    return tokenizer


if __name__ == "__main__":
    main()
