"""Run by test_training_optimizer.py in a process of its own, since the device shim changes torch.

Trains three steps with the distributed optimizer on one rank, saves, and loads into a new model and
optimizer: once as it should be, and once without each of the cures. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from relayrun.config.schema import RunConfig  # noqa: E402
from relayrun.data.progress import Progress  # noqa: E402
from relayrun.training import device_shim, parallel  # noqa: E402
from relayrun.training.checkpoint import InProcessStrategy  # noqa: E402
from relayrun.training.model import MicroBatch, Model  # noqa: E402
from relayrun.training.optimizer import Optimizer, TorchDistributedOptimizer  # noqa: E402

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
CONFIG = {
    "project": "tests", "name": "cures",
    "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2,
              "num_query_groups": 1},
    "data": {"tokenizer": "none", "datasets": ["none"]},
    "training": {"steps": 10, "micro_batch_size": 2, "global_batch_size": 2, "seq_length": 16, "threads": 1},
    "optimizer": {"lr": 1e-2}, "checkpoint": {"interval": 10}, "parallel": {"use_distributed_optimizer": True},
    "job": {"time": "10"}, "cluster": {"name": "test", "scheduler": "local"},
}  # fmt: skip


def step(model: Model, optimizer: Optimizer, number: int) -> None:
    optimizer.zero_grad()
    tokens = np.random.default_rng(number).integers(0, 100, (2, 17))
    model.run([MicroBatch(tokens=tokens)], train=True)
    optimizer.step(optimizer.prepare())


def sharded(model: Model, optimizer: Optimizer, *, loading: bool) -> Any:
    weights = model.sharded_state_dict(dict(FORMAT))
    state = optimizer.inner.sharded_state_dict(weights, is_loading=loading, metadata=dict(FORMAT))
    return {"model": weights, "optimizer": state}


def weights_and_steps(model: Model, optimizer: Optimizer) -> dict[str, Any]:
    inner = optimizer.inner.chained_optimizers[0].optimizer
    return {
        "weights": [parameter.detach().numpy().tobytes().hex() for parameter in model.chunks[0].parameters()],
        "steps": sorted({state["step"].item() for state in inner.state.values()}),
    }


def resume(folder: Path) -> dict[str, Any]:
    model = Model(config, ranks, 100)
    try:
        optimizer = Optimizer(config, model)
        state = dist_checkpointing.load(sharded(model, optimizer, loading=True), str(folder))
        model.load(state["model"])
        optimizer.load(state["optimizer"], position)
    except (AssertionError, KeyError) as error:
        return {"error": repr(error)}
    step(model, optimizer, 3)
    return weights_and_steps(model, optimizer)


device_shim.install()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
config = RunConfig.model_validate_json(json.dumps(CONFIG))
ranks = parallel.start(config)
folder = Path(sys.argv[1])

model = Model(config, ranks, 100)
optimizer = Optimizer(config, model)
for number in range(3):
    step(model, optimizer, number)
position = Progress(config.training.batch_sizes)
for _ in range(3):
    position.advance()
dist_checkpointing.save(sharded(model, optimizer, loading=False), str(folder), InProcessStrategy(ranks.cpu_group))
step(model, optimizer, 3)
results = {"uninterrupted": weights_and_steps(model, optimizer), "cured": resume(folder)}
for name in ("initialize_state", "_set_main_param_and_optimizer_states", "load_state_dict"):
    cure = vars(TorchDistributedOptimizer)[name]
    setattr(TorchDistributedOptimizer, name, vars(DistributedOptimizer).get(name, lambda self: None))
    results[f"without {name}"] = resume(folder)
    setattr(TorchDistributedOptimizer, name, cure)
print(json.dumps(results))
sys.stdout.flush()
os._exit(0)
