"""Run by test_training_recompute.py in a process of its own: one pass with each way to recompute. Prints JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])

import numpy as np  # noqa: E402
import torch  # noqa: E402

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.train import distributed  # noqa: E402
from relayrun.train.model import cpu_patches  # noqa: E402

cpu_patches.patch_for_cpu()

from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from relayrun.train.model.attention import CausalAttention  # noqa: E402
from relayrun.train.model.gpt import MicroBatch, ModelStage  # noqa: E402

VOCABULARY, LENGTH, SIZE = 64, 48, 2
CONFIG: dict[str, Any] = {
    "project": "tests",
    "name": "recompute",
    "model": {
        "num_layers": 3,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    },
    "data": {"tokenizer": "none", "datasets": ["none"]},
    "training": {"steps": 10, "micro_batch_size": SIZE, "global_batch_size": 2 * SIZE, "seq_length": LENGTH},
    "optimizer": {"lr": 1e-2},
    "checkpoint": {"interval": 10},
    "job": {"time": "10"},
    "cluster": {"name": "test", "scheduler": "local"},
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full"},
    "first layer": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "by default": {"recompute_granularity": "selective"},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "both": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]},
}


def pass_with(way: dict[str, Any], dropout: dict[str, float], precision: str) -> dict[str, Any]:
    """The losses' sum, a checksum of all gradients, and the bytes that one forward pass keeps for the backward pass."""
    sections = CONFIG | {
        "model": CONFIG["model"] | dropout,
        "training": CONFIG["training"] | way | {"precision": precision},
    }
    model = ModelStage(RunConfig.model_validate_json(json.dumps(sections)), ranks, VOCABULARY)
    model.train_mode(True)
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, VOCABULARY, (2, SIZE, LENGTH + 1))
    model.zero_grad()
    loss = model.run([MicroBatch(tokens=part) for part in tokens], train=True)
    digest = hashlib.sha256()
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            assert parameter.main_grad.abs().sum() > 0
            digest.update(parameter.main_grad.numpy().tobytes())
    return {"loss": loss.total.hex(), "gradients": digest.hexdigest(), "kept": kept(model, tokens[0])}


def kept(model: ModelStage, tokens: np.ndarray) -> int:
    """Bytes of all tensors but weights that autograd holds between the passes."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = torch.from_numpy(tokens)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.chunks[0](inputs[:, :-1], torch.arange(LENGTH).expand(SIZE, -1), None, labels=inputs[:, 1:])
    assert loss.requires_grad
    return sum(storages.values())


def attention_within_a_fork(again: bool) -> list[str]:
    """Output and gradients of an attention with dropout where sequence parallel calls it, computed again or not."""
    transformer = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.5,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    attention = CausalAttention(transformer)
    distributed.seed_generators(1, 1 + ranks.data_parallel_rank, ranks.pipeline_rank)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn((LENGTH, SIZE, 4, 8), generator=generator).requires_grad_() for _ in range(3)]
    with get_cuda_rng_tracker().fork():
        torch.rand(7)  # the layers before
        out = checkpoint(attention, False, *parts) if again else attention(*parts)
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    return [
        hashlib.sha256(part.detach().numpy().tobytes()).hexdigest() for part in (out, *(part.grad for part in parts))
    ]


torch.set_num_threads(1)
ranks = distributed.start_process_groups(RunConfig.model_validate_json(json.dumps(CONFIG)))
passes = {
    f"{precision}, {'dropout' if dropout else 'none'}": {
        name: pass_with(way, dropout, precision) for name, way in WAYS.items()
    }
    for precision in ("fp32", "bf16")
    for dropout in ({}, DROPOUT)
}
print(json.dumps({"passes": passes, "attention": [attention_within_a_fork(again) for again in (False, True)]}))
sys.stdout.flush()
os._exit(0)
