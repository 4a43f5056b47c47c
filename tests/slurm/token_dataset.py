"""A dataset, the shards that the local way makes of it, and both launchers' settings, for tests on a real Slurm."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from relayrun.tokens.tokenize.dump_jobs import tokenize_dump
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import TokenizationSettings

from .cluster import ROOT

BASH = ROOT / "scripts/tokenization/submit_tokenization.sh"
PYTHON = ROOT / "launchers/submit_tokenization.py"
DUMPS = 3


@dataclass(frozen=True)
class Dataset:
    """A dataset in a folder with blanks, its tokenizer, and the shards of every dump, made without Slurm."""

    folder: Path
    tokenizer: Path
    expected: dict[str, bytes]

    def settings(self, name: str) -> TokenizationSettings:
        """A fresh metadata folder and output `name`, with all dumps prepared."""
        prepare_dumps(self.folder / "data", self.folder / name / "meta", n_dumps=DUMPS)
        return TokenizationSettings(
            tokenizer=str(self.tokenizer),
            tokenizer_name="T",
            dataset_name=name,
            tasks=2,
            workers=2,
            metadata_folder=str(self.folder / name / "meta"),
            output_folder=str(self.folder / name / "out"),
            logs=str(self.folder / name / "logs"),
        )


def shards(settings: TokenizationSettings) -> dict[str, bytes]:
    output = settings.dataset_output
    return {str(file.relative_to(output)): file.read_bytes() for file in sorted(output.rglob("*_tokens.*"))}


LENGTH = 6000
"""Characters of a document."""


def make_dataset(folder: Path) -> Dataset:
    """Below `folder`: six parquet files with odd names, a tokenizer, and the dumps tokenized without Slurm."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [source.read_text(encoding="utf-8", errors="replace") for source in sources]
    # of one length, so that every dump gets two files, whatever Python's sources are
    texts = [text[:LENGTH] for text in texts if len(text) >= LENGTH][:60]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(
        texts[:5], trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "data").mkdir()
    for number in range(6):
        pq.write_table(pa.table({"text": texts[number::6]}), folder / "data" / f" {number} ü.parquet")
    made = Dataset(folder, folder / "tokenizer.json", {})
    local = made.settings("local")
    for index in range(DUMPS):
        tokenize_dump(local, index)
    return Dataset(made.folder, made.tokenizer, shards(local))


def environment(settings: TokenizationSettings) -> dict[str, str]:
    return {
        "TOKENIZER": settings.tokenizer,
        "TOKENIZER_NAME": settings.tokenizer_name,
        "DATASET_NAME": settings.dataset_name,
        "PATH_TO_PREPROCESSING_METADATA": settings.metadata_folder,
        "PATH_TO_OUTPUT_FOLDER": settings.output_folder,
        "PATH_TO_LOGS": settings.logs,
        "NUMBER_OF_DATATROVE_TASKS": "2",
        "PYTHON": sys.executable,
    }


def write_config(settings: TokenizationSettings, *, max_parallel: int) -> Path:
    config = Path(settings.metadata_folder, "config.yaml")
    lines = [f"{name}: {json.dumps(value)}" for name, value in settings if value is not None]
    config.write_text("\n".join([*lines, f"max_parallel: {max_parallel}", "job: {time: 5, partition: debug}", ""]))
    return config
