"""Programs that build models: `python -m ....models models|batch|export`.

`models` trains each variant on one batch and computes its last loss again in fp32. `batch` searches the largest
micro-batch that fits: one rank doubles it until memory is out. `export` writes the newest checkpoint as a Hugging Face
folder and compares logits.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import RelayrunError
from relayrun.lab.gpucheck.programs.common import RankProgram, wait_for
from relayrun.train import distributed
from relayrun.train.distributed import Ranks
from relayrun.train.model import cpu_patches
from relayrun.train.model.gpt import MicroBatch, ModelStage
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.optimizer.parameter_groups import parameter_names

TRAINED_STEPS, TIMED_STEPS = 8, 4
"""Iterations, and the number of timed ones at the end."""
END_TOKEN = 0
"""End-of-document token."""


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


@torch.no_grad()
def copy_weights(model: ModelStage, other: ModelStage) -> ModelStage:
    """Copy the weights of `model` into `other`; return it."""
    weights = {name: parameter for parameter, name in parameter_names(model.chunks)}
    for parameter, name in parameter_names(other.chunks):
        parameter.copy_(weights.pop(name))
    assert not weights, sorted(weights)
    return other


def try_all_variants() -> None:
    """Try the variants one after the other, and write each result at once; an error does not affect the others."""
    program = RankProgram.begin("configs")
    cpu_patches.patch_for_cpu()
    folder = Path(program.options.configs)
    found: dict[str, Any] = {}
    ranks: Ranks | None = None
    for path in sorted(folder.glob("*.yaml")):
        if path.stem.endswith("-exact"):
            continue
        config, twin = read_variant_config(path), path.with_name(f"{path.stem}-exact.yaml")
        ranks = ranks or distributed.start_process_groups(config)
        try:
            exact = read_variant_config(twin) if twin.exists() else None
            found[path.stem] = train_variant(config, exact, ranks, program.setup.sizes.resumed_vocabulary)
        except RelayrunError as error:  # needs a package or GPU that is missing
            found[path.stem] = {"not_measured": error.message}
        except Exception as error:  # torch raises many types; try the others
            found[path.stem] = {"failed": f"{type(error).__name__}: {error}"[:400]}
        gc.collect()
        program.write(found)
    if ranks is not None:
        distributed.stop_process_groups()


def read_variant_config(path: Path) -> RunConfig:
    """Return a config that the part has resolved."""
    return resolve.require_native(resolve.read_resolved_config(path))


if __name__ == "__main__":
    try_all_variants()
