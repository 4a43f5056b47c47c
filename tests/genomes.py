"""Small files like those of OpenGenome2: gzipped JSONL, sorted from long sequences to short ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np


def sequences(generator: np.random.Generator, count: int, *, median: float = 60.0) -> list[str]:
    """Sequences with a long tail of lengths, long ones first; one base in 50 is degenerate, some are lower case."""
    lengths = np.sort(generator.lognormal(np.log(median), 1.1, count).astype(int) + 8)[::-1]
    motif = generator.choice([*"ACGT"], 24)
    made = []
    for length in lengths.tolist():
        bases = np.where(generator.random(length) < 0.2, generator.choice([*"ACGT"], length), np.resize(motif, length))
        bases = np.where(generator.random(length) < 0.02, "N", bases)
        text = "".join(bases)
        made.append(text.lower() if generator.random() < 0.1 else text)
    return made


def jsonl_gz(texts: list[str]) -> bytes:
    """A file of JSON lines, compressed, without the time of day."""
    lines = "".join(json.dumps({"record": number, "text": text}) + "\n" for number, text in enumerate(texts))
    return gzip.compress(lines.encode(), mtime=0)


def write(folder: Path, *, files: int = 4, count: int = 60, seed: int = 1) -> list[str]:
    """Write `files` files, the first with the longest sequences; return all texts."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = sequences(np.random.default_rng(seed), files * count)
    for number in range(files):
        part = texts[number * count : (number + 1) * count]
        (folder / f"data_metagenomics_train_chunk{number + 1}.jsonl.gz").write_bytes(jsonl_gz(part))
    return texts
