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

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.tokenize.encode.tokenizer_files import write_byte_tokenizer

from .conftest import Harness

pytestmark = [pytest.mark.slow, pytest.mark.long]

VOCABULARY, LENGTH, STEPS, BATCH, EOD = 256, 48, 20, 8, 0
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
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=600
    )
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
        data={"tokenizer": "none", "datasets": ["none"], "order": "tests.training.megatron_order:MegatronOrder"}
        | options,
        training={"steps": STEPS, "seq_length": LENGTH, "loss_mean": mean},
        optimizer=OPTIMIZER,
        checkpoint={"load": str(imported), "finetune": True},
    )
    manifest = Manifest.build({"train": prefixes}, {}, vocabulary_size=VOCABULARY, eod=EOD, tokenizer="none")
    manifest.write(made.run.manifest)
    ours = losses(made, imported)
    theirs = independent(tmp_path, hf, shards=prefixes, eod=EOD if masked else None, mean=mean)
    assert_equal(ours, theirs)
    assert ours[-1] < ours[0] - 0.3, "it learns"


@pytest.mark.parametrize("mean", ["micro_batch", "sample", "token"])
def test_an_independent_loop_has_our_losses_with_the_masks_of_a_user(
    harness: Callable[..., Harness], start: tuple[Path, Path, list[str]], tmp_path: Path, mean: str
) -> None:
    """A data set that returns masks of all shares, of ones and of zeros, below `mask_tokens_except`."""
    hf, imported, _ = start
    generator = np.random.default_rng(8)
    tokens = generator.choice([*b"ACGTNNacgtn"], (STEPS * BATCH, LENGTH + 1))
    shares = generator.choice([0.0, 0.1, 0.5, 0.9, 1.0], STEPS * BATCH)
    masks = (generator.random((STEPS * BATCH, LENGTH)) < shares[:, None]).astype(np.int64)
    rows = tmp_path / "rows.npz"
    np.savez(rows, tokens=tokens, masks=masks)
    source = {"weight": 1.0, "order": "tests.training.masked:FromFile", "options": {"file": str(rows)}}
    made = harness(
        data={
            "tokenizer": str(write_byte_tokenizer(tmp_path / "bytes")),
            "mixture": {"train": source | {"loss_mask": True}},
            "datasets": [],
        }
        | {"mask_tokens_except": "ACGTacgt"},
        training={"steps": STEPS, "seq_length": LENGTH, "loss_mean": mean},
        optimizer=OPTIMIZER,
        checkpoint={"load": str(imported), "finetune": True},
    )
    build_manifest(RunConfig.model_validate_json(json.dumps(made.config))).write(made.run.manifest)
    ours = losses(made, imported)
    masked = {"rows": str(rows), "letters": [*b"ACGTacgt"]}
    assert_equal(ours, independent(tmp_path, hf, **masked, mean=mean))
    without = independent(tmp_path, hf, rows=str(rows), letters=[*range(VOCABULARY)], mean=mean)
    assert max(abs(a - b) for a, b in zip(ours, without, strict=True)) > 1e-2, "what is not masked tells"


def losses(made: Harness, imported: Path) -> list[float]:
    """The losses of a run that begins with the imported weights."""
    model = yaml_file.read_yaml(imported / "model.yaml").values["model"]
    made.config["model"] = model | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return [step["loss"] for step in made.train(base_path=str(imported)).steps().values()]


def independent(folder: Path, model: Path, **given: Any) -> list[float]:
    """The losses of the other loop."""
    settings: dict[str, Any] = {
        "model": str(model),
        "shards": [],
        "rows": None,
        "eod": None,
        "steps": STEPS,
        "batch": BATCH,
        "micro_batch": 2,
        "length": LENGTH,
        "seed": 28,
        "lr": OPTIMIZER["lr"],
        "warmup": OPTIMIZER["lr_warmup_steps"],
        "weight_decay": OPTIMIZER["weight_decay"],
        "betas": [0.9, OPTIMIZER["adam_beta2"]],
        "eps": 1e-8,
        "clip": OPTIMIZER["clip_grad"],
    }
    (folder / "settings.json").write_text(json.dumps(settings | given))
    program = Path(__file__).with_name("independent.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, program, folder / "settings.json", folder / "losses.json"]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


def assert_equal(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6
