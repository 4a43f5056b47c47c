"""Run by test_training_loss_mean.py, one process a rank: the loss and the gradients of one global batch, as an npz."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

warnings.simplefilter("ignore")
rank, world_size, port, settings = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.train import distributed  # noqa: E402
from relayrun.train.model import cpu_patches  # noqa: E402

cpu_patches.patch_for_cpu()

from relayrun.train.model.gpt import MicroBatch, ModelStage  # noqa: E402

VOCABULARY, LENGTH, BATCH, EOD = 64, 32, 8, 5
SHARES = (0.0, 0.9, 0.1, 0.5, 0.3, 1.0, 0.02, 0.7)
"""The share of each sample's tokens that end a document."""

FOLDER, PARALLEL, SIZES = json.loads(settings)


def samples() -> np.ndarray:
    generator = np.random.default_rng(3)
    tokens = generator.integers(EOD + 1, VOCABULARY, (BATCH, LENGTH + 1))
    ends = generator.random(tokens.shape) < np.array(SHARES)[:, None]
    return np.where(ends, EOD, tokens)


def config(mean: str | None, size: int) -> RunConfig:
    sections: dict[str, Any] = {
        "project": "tests",
        "name": "loss-mean",
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
        },
        "data": {"tokenizer": "none", "datasets": ["none"], "eod_mask_loss": mean is not None},
        "training": {
            "steps": 1,
            "micro_batch_size": size,
            "global_batch_size": BATCH,
            "seq_length": LENGTH,
            "threads": 1,
            "loss_mean": mean,
        },
        "optimizer": {"lr": 1e-3, "lr_warmup_steps": 0},
        "checkpoint": {"interval": 1},
        "parallel": PARALLEL,
        "job": {"time": "1", "ntasks_per_node": int(world_size)},
        "cluster": {"name": "t", "scheduler": "local"},
    }
    return RunConfig.model_validate_json(json.dumps(sections))


def parameters(model: ModelStage, first_layer: int) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """By the names that they have where the model is one; a pipeline stage counts its own layers."""
    for chunk in model.chunks:
        for name, parameter in chunk.module.named_parameters():
            yield re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first_layer}", name), parameter


def same_weights(model: ModelStage, first_layer: int) -> None:
    """Every layout begins with the same ones, which the seed alone does not give."""
    with torch.no_grad():
        for name, parameter in parameters(model, first_layer):
            generator = np.random.default_rng(zlib.crc32(name.encode()))
            values = generator.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.05, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values))


def main() -> None:
    torch.set_num_threads(1)
    ranks = distributed.start_process_groups(config("token", 1))
    found: dict[str, Any] = {}
    tokens = samples()
    first_layer = ranks.pipeline_rank * 2 // ranks.pipeline_size
    for mean in ("micro_batch", "sample", "token", None):
        for size in SIZES:
            model = ModelStage(config(mean, size), ranks, VOCABULARY, eod=EOD)
            same_weights(model, first_layer)
            first = ranks.data_parallel_rank * size
            batches = [
                MicroBatch(tokens=tokens[at : at + size]) for at in range(first, BATCH, ranks.data_parallel_size * size)
            ]
            for train in (True, False):  # gradients are looked at after the second: it must not touch them
                model.train_mode(train)
                if train:
                    model.zero_grad()
                loss = ranks.mean_loss(model.run(batches, train=train))
                found[f"{mean}/{size}/{'loss' if train else 'evaluation'}"] = np.array(loss)
            for name, parameter in parameters(model, first_layer):
                found[f"{mean}/{size}/gradient/{name}"] = parameter.main_grad.numpy().copy()
    np.savez(f"{FOLDER}/{rank}.npz", **found)
    distributed.stop_process_groups()


if __name__ == "__main__":
    main()
