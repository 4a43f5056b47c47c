"""Run by test_training_optimizer.py in a process of its own, since the device shim changes torch.

Trains three steps with the distributed optimizer on one rank, saves, and loads into a new model and
optimizer: once as it should be, once without each of the patches, and from and into megatron-core's own format.
Prints what happened as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.tokens.order.batches import TrainingProgress  # noqa: E402
from relayrun.train import distributed  # noqa: E402
from relayrun.train.checkpoint.megatron_strategy import InProcessStrategy  # noqa: E402
from relayrun.train.messages import RankObjectCollectives  # noqa: E402
from relayrun.train.model import cpu_patches  # noqa: E402
from relayrun.train.model.gpt import MicroBatch, ModelStage  # noqa: E402
from relayrun.train.optimizer.megatron_optimizer import (  # noqa: E402
    ScheduledOptimizer,
    ShardedCheckpointOptimizer,
    TorchDistributedOptimizer,
)

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
CONFIG = {
    "project": "tests",
    "name": "patches",
    "model": {
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "num_query_groups": 1,
    },
    "data": {"tokenizer": "none", "datasets": ["none"]},
    "training": {"steps": 10, "micro_batch_size": 2, "global_batch_size": 2, "seq_length": 16, "threads": 1},
    "optimizer": {"lr": 1e-2},
    "checkpoint": {"interval": 10},
    "parallel": {"use_distributed_optimizer": True},
    "job": {"time": "10"},
    "cluster": {"name": "test", "scheduler": "local"},
}


def step(model: ModelStage, optimizer: ScheduledOptimizer, number: int) -> None:
    optimizer.zero_grad()
    tokens = np.random.default_rng(number).integers(0, 100, (2, 17))
    model.run([MicroBatch(tokens=tokens)], train=True)
    optimizer.step(optimizer.prepare())


def sharded(model: ModelStage, optimizer: ScheduledOptimizer, *, loading: bool) -> Any:
    weights = model.sharded_state_dict(dict(FORMAT))
    state = optimizer.inner.sharded_state_dict(weights, is_loading=loading, metadata=dict(FORMAT))
    return {"model": weights, "optimizer": state}


def save(folder: Path) -> None:
    folder.mkdir()
    dist_checkpointing.save(
        sharded(model, optimizer, loading=False),
        str(folder),
        InProcessStrategy(RankObjectCollectives(ranks.cpu_group, tag=1)),
    )


@contextlib.contextmanager
def replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    own = vars(owner)[name]
    setattr(owner, name, value)
    yield
    setattr(owner, name, own)


@contextlib.contextmanager
def megatrons_format() -> Iterator[None]:
    """The state as megatron-core itself saves and loads it, in whole tensors."""
    with contextlib.ExitStack() as stack:
        for name in ("sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable"):
            stack.enter_context(replaced(ShardedCheckpointOptimizer, name, getattr(DistributedOptimizer, name)))
        yield


def gathered(*_: Any, **__: Any) -> None:
    raise AssertionError("the state was gathered")


def weights_and_steps(model: ModelStage, optimizer: ScheduledOptimizer) -> dict[str, Any]:
    inner = optimizer.inner.chained_optimizers[0].optimizer
    return {
        "weights": [parameter.detach().numpy().tobytes().hex() for parameter in model.chunks[0].parameters()],
        "steps": sorted({state["step"].item() for state in inner.state.values()}),
    }


def resume(folder: Path) -> dict[str, Any]:
    model = ModelStage(config, ranks, 100)
    try:
        optimizer = ScheduledOptimizer(config, model)
        state = dist_checkpointing.load(sharded(model, optimizer, loading=True), str(folder))
        model.load(state["model"])
        optimizer.load(state["optimizer"], position)
    except (AssertionError, KeyError) as error:
        return {"error": repr(error)}
    step(model, optimizer, 3)
    return weights_and_steps(model, optimizer)


cpu_patches.patch_for_cpu()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
config = RunConfig.model_validate_json(json.dumps(CONFIG))
ranks = distributed.start_process_groups(config)
folder = Path(sys.argv[1])

model = ModelStage(config, ranks, 100)
optimizer = ScheduledOptimizer(config, model)
for number in range(3):
    step(model, optimizer, number)
position = TrainingProgress(config.training.batch_sizes)
for _ in range(3):
    position.advance()
with replaced(DistributedOptimizer, "get_parameter_state_dp_zero", gathered):
    save(folder / "own")
with megatrons_format():
    save(folder / "megatrons")
step(model, optimizer, 3)
results = {
    "uninterrupted": weights_and_steps(model, optimizer),
    "from megatron-core's format": resume(folder / "megatrons"),
}
with replaced(DistributedOptimizer, "get_parameter_state_dp_zero", gathered):
    results["patched"] = resume(folder / "own")
with megatrons_format():
    results["by megatron-core's format"] = resume(folder / "own")
for name in ("initialize_state", "_set_main_param_and_optimizer_states", "load_state_dict"):
    with replaced(TorchDistributedOptimizer, name, vars(DistributedOptimizer).get(name, lambda self: None)):
        results[f"without {name}"] = resume(folder / "own")
print(json.dumps(results))
sys.stdout.flush()
os._exit(0)
