"""Programs that build models: `python -m relayrun.lab.gpucheck.programs.models NAME`."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck.programs.common import RankProgram, run_measurement, wait_for
from relayrun.train import distributed
from relayrun.train.distributed import Ranks
from relayrun.train.model.gpt import MicroBatch, ModelStage
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.optimizer.parameter_groups import parameter_names

TRAINED_STEPS, TIMED_STEPS = 8, 4
"""Iterations, and the number of timed ones at the end."""
END_TOKEN = 0
"""End-of-document token."""


def config_files(program: RankProgram) -> dict[str, Path]:
    """Return the configs in the folder `--configs` by their names, without those of exact twins."""
    files = sorted(Path(program.options.configs).glob("*.yaml"))
    return {path.stem: path for path in files if not path.stem.endswith("-exact")}


def train_config(program: RankProgram, path: Path) -> dict[str, Any]:
    """Train a variant, and compute its loss by its exact twin. Raises any error of torch."""
    config, twin = read_config(path), path.with_name(f"{path.stem}-exact.yaml")
    exact = read_config(twin) if twin.exists() else None
    return train_variant(config, exact, join_ranks(path), program.setup.sizes.resumed_vocabulary)


@cache
def _ranks(path: Path) -> Ranks:
    return distributed.start_process_groups(read_config(path))


def join_ranks(path: Path) -> Ranks:
    """Return the ranks, which all configs of a folder share."""
    return _ranks(min(path.parent.glob("*.yaml")))


def stop_ranks() -> None:
    if torch.distributed.is_initialized():
        distributed.stop_process_groups()


def read_config(path: Path) -> RunConfig:
    """Return a config that the part has resolved."""
    return resolve.require_native(resolve.read_resolved_config(path))


def train_variant(config: RunConfig, exact: RunConfig | None, ranks: Ranks, vocabulary: int) -> dict[str, Any]:
    """Train `config` and return its figures; `exact`: the same model in fp32."""
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    batch = learnable_batch(config, vocabulary)
    model = ModelStage(config, ranks, vocabulary, eod=END_TOKEN)
    optimizer = ScheduledOptimizer(config, model)
    found: dict[str, Any] = {"first_loss": mean_loss(model, batch)}
    started = 0.0
    for step in range(TRAINED_STEPS):
        if step == TRAINED_STEPS - TIMED_STEPS:
            wait_for(ranks.device)
            started = time.perf_counter()
        optimizer.zero_grad()
        model.run([batch], train=True)
        optimizer.step(optimizer.prepare())
    wait_for(ranks.device)
    seconds = (time.perf_counter() - started) / TIMED_STEPS
    tokens = config.training.micro_batch_size * config.training.seq_length * ranks.data_parallel_size
    found |= {
        "last_loss": mean_loss(model, batch),
        "tokens_per_second": tokens / seconds,
        "peak_bytes": distributed.peak_memory(ranks),
    }
    if exact is not None:
        found["exact_loss"] = mean_loss(copy_weights(model, ModelStage(exact, ranks, vocabulary, eod=END_TOKEN)), batch)
    return found


def learnable_batch(config: RunConfig, vocabulary: int) -> MicroBatch:
    """Return a micro-batch of documents over a skewed vocabulary, from which a model can learn."""
    generator = np.random.default_rng(28)
    shape = (config.training.micro_batch_size, config.training.seq_length + 1)
    tokens = np.minimum(generator.geometric(10 / vocabulary, shape), vocabulary - 1)
    tokens[generator.random(shape) < 4 / config.training.seq_length] = END_TOKEN
    return MicroBatch(tokens=tokens)


def mean_loss(model: ModelStage, batch: MicroBatch) -> float:
    """Return the loss without dropout, equal on all ranks."""
    model.train_mode(False)
    with torch.no_grad():
        found = model.ranks.mean_loss(model.run([batch], train=False))
    model.train_mode(True)
    return found


@torch.no_grad()
def copy_weights(model: ModelStage, other: ModelStage) -> ModelStage:
    """Copy the weights of `model` into `other`; return it."""
    weights = {name: parameter for parameter, name in parameter_names(model.chunks)}
    for parameter, name in parameter_names(other.chunks):
        parameter.copy_(weights.pop(name))
    assert not weights, sorted(weights)
    return other


def export_and_compare() -> None:
    """Export the newest checkpoint of `--run-dir` to `--folder`, and compare logits."""
    from relayrun.train.export import compare_logits, huggingface  # transformers: seconds
    from relayrun.train.export.source_and_target import find_checkpoint

    program = RankProgram.begin("run-dir", "folder")
    source = find_checkpoint(Run(Path(program.options.run_dir)))
    folder = Path(program.options.folder)
    folder.mkdir(parents=True)
    made = huggingface.write_huggingface(source, folder, dtype="auto", max_shard_size=huggingface.SHARD_SIZE)
    found = compare_logits.compare_logits(source, folder)
    program.write(
        {
            "parameters": made.parameters,
            "tokens": found.tokens,
            "difference": found.difference,
            "largest": found.largest,
        }
    )


if __name__ == "__main__":
    run_measurement(export_and_compare)
