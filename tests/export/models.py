"""Runs with a checkpoint, without ranks: a Hugging Face Llama with random weights, imported, and a run's records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.files import file_sizes
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.export import huggingface
from tests.history import began

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VOCABULARY = 300
TINY: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "Qwen2": {},
}
"""Classes of transformers, and what a tiny one of each has besides `SMALL`."""

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3": {"qk_layernorm": True, "kv_channels": 16},
    "Mixtral": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01},
    "Apertus": {"qk_layernorm": True, "gated_linear_unit": False, "activation_func": "xielu"},
}
"""Classes of transformers, and `model.transformer` of a run that trains one."""


def write_tokenizer(path: Path, size: int = VOCABULARY) -> Path:
    """One word an id."""
    words = {"</s>": 0} | {f"w{number}": number for number in range(1, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def make_hf(folder: Path, kind: str = "Llama", *, seed: int = 0, vocabulary: int = VOCABULARY, **changes: Any) -> Path:
    """A folder as transformers writes it, with a tokenizer; every weight random, norms too."""
    import transformers

    torch.manual_seed(seed)
    settings = SMALL | TINY[kind] | {"vocab_size": vocabulary} | changes
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(config.dtype or torch.float32).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json", vocabulary)
    return folder


@dataclass(frozen=True)
class Imported:
    """A run whose only checkpoint is an imported one."""

    run: Run
    hf: Path
    """What it was imported from."""
    checkpoint: Path


def make_run(
    folder: Path,
    hf: Path,
    *,
    iteration: int = 7,
    divisible_by: int = 128,
    mapping: str | None = None,
    **sections: Any,
) -> Imported:
    run = Run(folder)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    run.config.mkdir()
    checkpoint = run.checkpoint(iteration)
    made = huggingface.import_huggingface(hf, checkpoint, divisible_by=divisible_by, mapping=mapping)
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=str(hf / "tokenizer.json")))
    writer = ShardWriter(str(folder / "data" / "shard"), np.uint16)
    lengths = np.full(50, 300)
    writer.add(np.arange(lengths.sum()) % tokenizer.size, lengths)
    writer.finish()
    values: dict[str, Any] = {
        "project": "tests",
        "name": "imported",
        "model": made.model.model_dump(),
        "data": {"tokenizer": str(hf / "tokenizer.json"), "datasets": [str(folder / "data")]},
        "training": {"steps": 2 * iteration, "micro_batch_size": 2, "global_batch_size": 8, "seq_length": 128},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": iteration},
        "job": {"time": "5"},
        "cluster": {"name": "test", "scheduler": "local"},
    }
    config = RunConfig.model_validate(values | sections)
    run.config_revision(1).write_text(resolve.dump_run_config(config))
    Manifest.build(
        {"train": [folder / "data" / "shard"]},
        {},
        vocabulary_size=tokenizer.size,
        eod=tokenizer.eos_id,
        tokenizer=str(hf / "tokenizer.json"),
        tokenizer_fingerprint=tokenizer.fingerprint,
    ).write(run.manifest)
    began(run, 1, start_time=0.0)
    files = file_sizes(checkpoint)
    attempt.append_commit(
        CheckpointCommit(
            iteration=iteration,
            path=str(checkpoint),
            consumed_samples=8 * iteration,
            time=1.0,
            seconds=1.0,
            files=files,
        ),
    )
    return Imported(run, hf, checkpoint)


def write_task(folder: Path, *, documents: int) -> Path:
    """A task of lm-evaluation-harness, `tiny_choice`, with its data; no network."""
    folder.mkdir(parents=True)
    lines = [
        {"prompt": f"w{n + 1} w{n + 2}", "choices": [f"w{n + 3}", f"w{n + 50}"], "label": n % 2}
        for n in range(documents)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "test.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tiny.yaml").write_text(yaml_file.dump_yaml(task))
    return folder
