"""A loop that shares no code with ours (transformers' Llama, torch's AdamW, shards read by numpy) has our losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config import yamlfile
from relayrun.shards.indexed import ShardWriter
from relayrun.shards.manifest import Manifest

from .conftest import Harness

pytestmark = [pytest.mark.slow, pytest.mark.long]

VOCABULARY, LENGTH, STEPS, EOD = 200, 48, 20, 0
OPTIMIZER = {"lr": 2e-3, "lr_warmup_steps": 4, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 0.5}
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MAKE = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(5)
model = LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2])))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
model.save_pretrained(sys.argv[1])
"""


def run(*command: str | Path) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A model as transformers writes it, the same imported, and shards whose documents end."""
    folder = tmp_path_factory.mktemp("independent")
    run("-c", MAKE, folder / "hf", json.dumps(MODEL))
    imported = folder / "imported"
    arguments = ("--output", imported, "--make-vocab-size-divisible-by", "1")
    run("-m", "relayrun.cli", "import", "hf", folder / "hf", *arguments)
    generator = np.random.default_rng(3)
    prefixes = []
    for number in range(2):
        lengths = generator.integers(1, 60, 250)
        ids = np.minimum(generator.geometric(0.04, lengths.sum()), VOCABULARY - 1)
        ids[np.cumsum(lengths) - 1] = EOD
        prefixes.append(str(folder / f"shard{number}"))
        writer = ShardWriter(prefixes[-1], np.uint16)
        writer.add(ids, lengths)
        writer.finish()
    return folder / "hf", imported, prefixes


@pytest.mark.parametrize("mean", [None, "micro_batch", "sample", "token"], ids=str)
def test_an_independent_loop_has_our_losses(
    harness: Callable[..., Harness], start: tuple[Path, Path, list[str]], tmp_path: Path, mean: str | None
) -> None:
    """None: no masks."""
    hf, imported, prefixes = start
    masked = mean is not None
    options = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), masked)
    made = harness(
        data={"tokenizer": "none", "datasets": ["none"], "order": "megatron"} | options,
        training={"steps": STEPS, "seq_length": LENGTH, "loss_mean": mean},
        optimizer=OPTIMIZER,
        checkpoint={"load": str(imported), "finetune": True},
    )
    model = yamlfile.read(imported / "model.yaml").values["model"]
    made.config["model"] = model | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    manifest = Manifest.build({"train": prefixes}, {}, vocabulary_size=VOCABULARY, eod=EOD, tokenizer="none")
    manifest.write(made.run.manifest)
    attempt = made.train(base_path=str(imported))
    ours = [step["loss"] for step in attempt.steps().values()]

    settings: dict[str, Any] = {
        "model": str(hf),
        "shards": prefixes,
        "steps": STEPS,
        "batch": 8,
        "micro_batch": 2,
        "length": LENGTH,
        "seed": 28,
        "eod": EOD if masked else None,
        "mean": mean,
        "lr": OPTIMIZER["lr"],
        "warmup": OPTIMIZER["lr_warmup_steps"],
        "weight_decay": OPTIMIZER["weight_decay"],
        "betas": [0.9, OPTIMIZER["adam_beta2"]],
        "eps": 1e-8,
        "clip": OPTIMIZER["clip_grad"],
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    program = Path(__file__).with_name("independent.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, program, tmp_path / "settings.json", tmp_path / "losses.json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = json.loads((tmp_path / "losses.json").read_text())
    assert len(ours) == len(theirs) == STEPS
    assert ours[-1] < ours[0] - 0.3, "it learns"
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6
