"""Runs with a checkpoint, without ranks: a Hugging Face Llama with random weights, imported, and a run's records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from relayrun.config import compose
from relayrun.config.schema import RunConfig
from relayrun.data.manifest import Manifest
from relayrun.export import importer
from relayrun.rundir.layout import RunDir
from relayrun.rundir.records import Begin, Commit, append_commit
from relayrun.tokenization.tokenizer import load_tokenizer

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 10000.0,
         "tie_word_embeddings": False}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
VOCABULARY = 300


def write_tokenizer(path: Path, size: int = VOCABULARY) -> Path:
    """One word an id."""
    words = {"</s>": 0} | {f"w{number}": number for number in range(1, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def make_hf(folder: Path, *, seed: int = 0, vocabulary: int = VOCABULARY, **changes: Any) -> Path:
    """A folder as transformers writes it, with a tokenizer; every weight random, norms too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(SMALL | {"vocab_size": vocabulary} | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json", vocabulary)
    return folder


@dataclass(frozen=True)
class Imported:
    """A run whose only checkpoint, of iteration 7, is an imported one."""

    run: RunDir
    hf: Path
    """What it was imported from."""

    @property
    def checkpoint(self) -> Path:
        return self.run.checkpoint(7)


def make_run(folder: Path, hf: Path, *, divisible_by: int = 128, **sections: Any) -> Imported:
    run = RunDir(folder)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    run.config.mkdir()
    made = importer.import_hf(hf, run.checkpoint(7), divisible_by=divisible_by)
    values: dict[str, Any] = {
        "project": "tests", "name": "imported", "model": made.model.model_dump(),
        "data": {"tokenizer": str(hf / "tokenizer.json"), "datasets": ["none"]},
        "training": {"steps": 20, "micro_batch_size": 2, "global_batch_size": 8, "seq_length": 128},
        "optimizer": {"lr": 1e-3}, "checkpoint": {"interval": 7}, "job": {"time": "5"},
        "cluster": {"name": "test", "scheduler": "local"},
    }  # fmt: skip
    config = RunConfig.model_validate(values | sections)
    run.config_revision(1).write_text(compose.dump(config))
    tokenizer = load_tokenizer(str(hf / "tokenizer.json"))
    Manifest(datasets={}, validation={}, vocabulary_size=tokenizer.size, eod=tokenizer.eos_id,
             tokenizer=str(hf / "tokenizer.json"), tokenizer_fingerprint=tokenizer.fingerprint,
             ).write(run.manifest)  # fmt: skip
    Begin(attempt=1, job_id="1", job_name="test", nodes="here", config_revision=1, base_iteration=0, base_path=None,
          start_time=0.0, job_end_time=None, lead=0.0).write(attempt.begin)  # fmt: skip
    files = {path.name: path.stat().st_size for path in run.checkpoint(7).iterdir()}
    append_commit(attempt, Commit(iteration=7, path=str(run.checkpoint(7)), consumed_samples=56, time=1.0, seconds=1.0,
                                  files=files))  # fmt: skip
    return Imported(run, hf)
