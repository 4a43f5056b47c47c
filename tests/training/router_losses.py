"""Run by test_training_routers.py, one process a rank: gradients of routers, and what a skipped update leaves."""

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
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer  # noqa: E402

VOCABULARY, LENGTH, BATCH, EOD = 64, 32, 8, 5
LOSSES: dict[str, dict[str, Any]] = {
    "aux": {"moe_aux_loss_coeff": 1.0},
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0},
    "two": {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.5, 1.0]},
    "global": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0},
    "z": {"moe_z_loss_coeff": 1.0},
}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
FOLDER, PARALLEL, CASES = json.loads(settings)


def config(mean: str, size: int, experts: dict[str, Any], precision: str = "fp32") -> RunConfig:
    model = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
    model |= {"num_query_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    transformer = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32} | experts
    training = {"steps": 9, "micro_batch_size": size, "global_batch_size": BATCH, "seq_length": LENGTH, "threads": 1}
    sections: dict[str, Any] = {
        "project": "tests",
        "name": "routers",
        "model": model | {"transformer": transformer},
        "data": {"tokenizer": "none", "datasets": ["none"], "eod_mask_loss": True},
        "training": training | {"loss_mean": mean, "precision": precision},
        "optimizer": {"lr": 1e-3, "lr_warmup_steps": 0},
        "checkpoint": {"interval": 1},
        "parallel": PARALLEL,
        "job": {"time": "1", "ntasks_per_node": int(world_size)},
        "cluster": {"name": "t", "scheduler": "local"},
    }
    return RunConfig.model_validate_json(json.dumps(sections))


def samples(share: float) -> np.ndarray:
    """The same tokens for each share, but that so many are an end of document, more of them in later samples."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(EOD + 1, VOCABULARY, (BATCH, LENGTH + 1))
    ends = generator.random(tokens.shape) < share * np.linspace(0.9, 1.1, BATCH)[:, None]
    return np.where(ends, EOD, tokens)


def parameters(model: ModelStage, ranks: distributed.Ranks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """By the names that they have where the model is one; a pipeline stage counts its own layers."""
    first = ranks.pipeline_rank * 2 // ranks.pipeline_size
    for chunk in model.chunks:
        for name, parameter in chunk.module.named_parameters():
            yield re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first}", name), parameter


def same_weights(model: ModelStage, ranks: distributed.Ranks) -> None:
    """Every layout begins with the same ones, each rank with its part of them."""
    with torch.no_grad():
        for name, parameter in parameters(model, ranks):
            shape, axis = list(parameter.shape), getattr(parameter, "partition_dim", -1)
            split = getattr(parameter, "tensor_model_parallel", False) and ranks.tensor_size > 1
            if split:
                shape[axis] *= ranks.tensor_size
            generator = np.random.default_rng(zlib.crc32(name.encode()))
            values = generator.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.05, shape)
            if split:
                halves = np.split(values, 2) if "linear_fc1" in name else [values]  # a gate, and what it is for
                parts = [np.split(half, ranks.tensor_size, axis)[ranks.tensor_rank] for half in halves]
                values = np.concatenate(parts)
            parameter.copy_(torch.from_numpy(values))


def router_gradients(ranks: distributed.Ranks, mean: str, size: int, loss: str, share: float) -> dict[str, np.ndarray]:
    """Return the gradients of the routers' losses alone: those with them, less those without."""
    found: list[dict[str, np.ndarray]] = []
    tokens = samples(share)
    for experts in (LOSSES[loss], {"moe_aux_loss_coeff": 0.0}):
        model = ModelStage(config(mean, size, experts), ranks, VOCABULARY, eod=EOD)
        same_weights(model, ranks)
        model.train_mode(True)
        step = ranks.data_parallel_size * size
        batches = [
            MicroBatch(tokens=tokens[at : at + size]) for at in range(ranks.data_parallel_rank * size, BATCH, step)
        ]
        for _ in range(2):  # each step has a scale of its own
            model.zero_grad()
            model.run(batches, train=True)
            reported = model.auxiliary_losses.take(len(batches))
        gradients = {
            name: parameter.main_grad.numpy().copy()
            for name, parameter in parameters(model, ranks)
            if name.endswith("router.weight")
        }
        found.append(gradients | {f"reported {name}": np.array(value) for name, value in reported.items()})
    with_loss, without = found
    return {name: value - without.get(name, 0.0) for name, value in with_loss.items()}


def biases(ranks: distributed.Ranks, precision: str) -> dict[str, Any]:
    """Whether skipped updates move any state of the model, and whether one that is done moves the biases."""
    model = ModelStage(made := config("micro_batch", 4, BIASED, precision), ranks, VOCABULARY, eod=EOD)
    optimizer = ScheduledOptimizer(made, model)
    model.train_mode(True)
    batches = [MicroBatch(tokens=samples(0.0)[:4])]
    model.chunks[0].module.register_buffer("forwards", torch.zeros(()))  # as a layer of a user's own may have

    def count(module: torch.nn.Module, *_: Any) -> None:
        module.get_buffer("forwards").add_(1)

    model.chunks[0].module.register_forward_hook(count)

    def buffers() -> list[tuple[str, torch.Tensor]]:
        return [each for chunk in model.chunks for each in chunk.module.named_buffers()]

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in [*buffers(), *parameters(model, ranks)]}

    def step(update: bool) -> list[str]:
        before = state()
        optimizer.zero_grad()
        model.run(batches, train=True)
        norm = optimizer.prepare()
        optimizer.step(norm if update else None)
        return [name for name, value in state().items() if not torch.equal(before[name].to(value.dtype), value)]

    result: dict[str, Any] = {"skipped": step(False), "updated": step(True), "skipped again": step(False)}
    name, bias = next((name, each) for name, each in buffers() if name.endswith("expert_bias"))
    before = bias.clone()
    model.run(batches, train=True)  # and no step: what follows begins without it
    result["untouched"] = torch.equal(before, bias)  # a save may read it still
    step(True)
    result["moved"] = float((dict(buffers())[name] - before).abs().max())
    return result


def counted_tokens(ranks: distributed.Ranks, precision: str) -> list[float]:
    """The tokens that each router has counted in a step of sixteen micro-batches, summed over its experts."""
    model = ModelStage(config("micro_batch", 4, BIASED, precision), ranks, VOCABULARY, eod=EOD)
    model.train_mode(True)
    finalize, found = model.transformer.finalize_model_grads_func, []

    def look(*arguments: Any, **named: Any) -> None:
        routers = [module for module in model.chunks[0].modules() if hasattr(module, "local_tokens_per_expert")]
        found.extend(float(router.local_tokens_per_expert.double().sum()) for router in routers)
        finalize(*arguments, **named)

    model.transformer.finalize_model_grads_func = look
    model.run([MicroBatch(tokens=samples(0.0)[:4])] * 16, train=True)
    return found


def main() -> None:
    torch.set_num_threads(1)
    ranks = distributed.start_process_groups(config("token", 1, LOSSES["aux"]))
    found: dict[str, Any] = {}
    for name, *case in CASES:
        for key, value in router_gradients(ranks, *case).items():
            found[f"{name}/{key}"] = value
    np.savez(f"{FOLDER}/{rank}.npz", **found)
    if not CASES:
        precisions = ("fp32", "bf16")
        found = {each: biases(ranks, each) | {"counted": counted_tokens(ranks, each)} for each in precisions}
        print(json.dumps(found))
    distributed.stop_process_groups()


if __name__ == "__main__":
    main()
