"""Run by test_training_layers.py in a process of its own: imports megatron-core, which warns. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402

from relayrun.config.schema import RunConfig  # noqa: E402
from relayrun.errors import FatalTrainingError  # noqa: E402
from relayrun.training.model.gpt import layers  # noqa: E402

CONFIG: dict[str, Any] = {
    "project": "tests",
    "name": "layers",
    "model": {
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "num_query_groups": 1,
    },
    "data": {"tokenizer": "none", "datasets": ["none"]},
    "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2, "seq_length": 16},
    "optimizer": {"lr": 1e-2},
    "checkpoint": {"interval": 10},
    "job": {"time": "10", "ntasks_per_node": 2},
    "cluster": {"name": "test", "scheduler": "local"},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "auto": {},
    "auto, masked": {"data": {"reset_attention_mask": True}},
    "local": {"training": {"transformer_impl": "local"}},
    "transformer_engine": {"training": {"transformer_impl": "transformer_engine"}},
    "context parallel": {"parallel": {"context_parallel_size": 2}},
    "window": {"model": {"transformer": {"window_size": [4, 0]}}},
    "window, context parallel": {
        "model": {"transformer": {"window_size": [4, 0]}},
        "parallel": {"context_parallel_size": 2},
    },
}


def choice(changes: dict[str, dict[str, Any]]) -> str:
    sections = {name: CONFIG.get(name, {}) | values for name, values in changes.items()}
    try:
        return layers.implementation(RunConfig.model_validate_json(json.dumps(CONFIG | sections)))
    except FatalTrainingError as error:
        return error.message


results: dict[str, dict[str, str]] = {}
for installed in (False, True):
    for gpu in (False, True):
        layers.HAVE_TE = installed
        torch.cuda.is_available = lambda gpu=gpu: gpu
        results[f"TE {installed}, GPU {gpu}"] = {name: choice(changes) for name, changes in CASES.items()}
print(json.dumps(results))
sys.stdout.flush()
os._exit(0)
