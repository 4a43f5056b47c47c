"""Token shards made by the commands: dumps, their merge, a global shuffle, a mixture; each file by its hash."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.config.compose import yaml_file
from tests.tokenization_corpus import EOS, TEXTS, train_tokenizer

from .masks import environment, masked, masked_values, write_json, write_text

ROWS = 120

SMALL = 4000
"""Bytes of a record that is kept as it is."""


def write_text_files(folder: Path) -> None:
    """Write the same kind of text in three forms: parquet, JSON lines, compressed JSON lines."""
    folder.mkdir()
    texts = [f"{number} {TEXTS[number % len(TEXTS)]}" * (1 + number % 7) for number in range(ROWS)]
    lines = [json.dumps({"text": text, "number": number}) for number, text in enumerate(texts)]
    pq.write_table(pa.table({"text": texts[:50], "number": list(range(50))}), folder / "a.parquet", row_group_size=20)
    (folder / "b.jsonl").write_text("\n".join(lines[50:90]) + "\n", encoding="utf-8")
    with gzip.GzipFile(folder / "c.jsonl.gz", "wb", mtime=0) as file:
        file.write(("\n".join(lines[90:]) + "\n").encode())


def command(folder: Path, *words: str | Path) -> str:
    """Run a command in a folder; return its exit status and what it printed, without bars and times."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "relayrun", *map(str, words)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{words}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def of_folder(folder: Path, place: Path) -> dict[str, Any]:
    """Return every file below a folder: the target of a link, or the hash of its bytes; of JSON without its times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {masked(os.readlink(path), {'PLACE': place})}"
        elif path.is_file():
            found[name] = digest(path, place)
    return found


def digest(path: Path, place: Path) -> Any:
    """Return the hash of a file, or the whole text of a small record."""
    data = path.read_bytes()
    if path.suffix == ".csv":  # datatrove's own, with times in it
        return f"{len(data.splitlines())} lines"
    if path.suffix not in (".json", ".txt") or len(data) > SMALL:
        return hashlib.sha256(data).hexdigest()
    text = re.sub(r"\b1[5-9]\d{8,17}(\.\d+)?\b", "0", masked(data.decode(), {"PLACE": place}))
    return text if path.suffix == ".txt" else masked_values(json.loads(text), {"seconds": "SECONDS"})


def make(place: Path) -> None:
    """Make everything below a folder, by the commands that a user calls."""
    write_text_files(place / "raw")
    train_tokenizer(place / "tokenizer" / "tokenizer.json")
    dumps: list[str | Path] = ["--dataset-folder", place / "raw", "--preprocessing-metadata-folder", place / "dumps"]
    command(place, "dumps", "prepare", *dumps, "--n-dumps", "2")
    settings = {
        "tokenizer": str(place / "tokenizer"),
        "tokenizer_name": "t",
        "dataset_name": "d",
        "metadata_folder": str(place / "dumps"),
        "output_folder": str(place / "tokens"),
        "logs": str(place / "logs"),
        "tasks": 2,
        "workers": 1,
        "eos_token": EOS,
        "executor": "local",
    }
    (place / "settings.yaml").write_text(yaml_file.dump_yaml(settings), encoding="utf-8")
    command(place, "dumps", "submit", place / "settings.yaml")
    tokens = place / "tokens" / "t" / "d"
    command(place, "dumps", "merge", "--input", tokens, "--output-prefix", place / "merged" / "all")
    shuffled: list[str | Path] = [
        "--output-folder",
        place / "shuffled",
        "--seed",
        "7",
        "--row-group-size",
        "16",
        "--column",
        "text",
    ]
    (place / "parquet").mkdir()
    os.link(place / "raw" / "a.parquet", place / "parquet" / "a.parquet")
    command(place, "dumps", "shuffle", "--dataset-folder", place / "parquet", *shuffled)
    both: list[str | Path] = ["--folders", tokens, place / "merged", "--weights", "0.25", "0.75"]
    command(place, "mixture", "create", *both, "--output", place / "mixture")
    command(place, "dumps", "tokenizer", "--bytes", "--output-folder", place / "bytes")


def record(folder: Path) -> None:
    """Write the hashes of all files, and what two commands print about them."""
    with tempfile.TemporaryDirectory(prefix="record-tokens-") as text:
        place = Path(text)
        make(place)
        for name in ("dumps", "tokens", "merged", "shuffled", "mixture", "bytes"):
            write_json(folder / f"{name}.json", of_folder(place / name, place))
        lengths = command(place, "data", "lengths", place / "tokens", "--json")
        write_text(folder / "lengths.txt", masked(lengths, {"PLACE": place}))
        prefixes = command(place, "mixture", "prefixes", "--paths", place / "tokens")
        write_text(folder / "prefixes.txt", masked(prefixes, {"PLACE": place}))
