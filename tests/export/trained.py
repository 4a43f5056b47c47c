"""A run whose checkpoint has an optimizer, without training one: random moments beside the weights of an import."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.files import append_line, file_sizes
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train.export import megatron_state
from relayrun.train.export.torch_dist import CheckpointReader, TorchDistSavePlan
from tests.export.models import Imported, make_run

GROUP = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "max_lr": 0.001,
    "min_lr": 0.0,
    "lr": 0.0005,
    "betas": (0.9, 0.95),
    "eps": 1e-08,
    "weight_decay": 0.1,
}


def generators(seed: int) -> dict[str, Any]:
    """As `random_state.capture` gives them on a CPU."""
    name, keys, position, has_gauss, cached = np.random.RandomState(seed).get_state(legacy=True)
    cpu = torch.Generator().manual_seed(seed).get_state()
    return {
        "torch": cpu,
        "cuda": None,
        "tracker": {"model-parallel-rng": torch.Generator().manual_seed(seed + 1).get_state()},
        "python": (3, tuple(range(625)), None),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
    }


def make_trained(folder: Path, hf: Path, *, distributed: bool = False, precision: str = "fp32") -> Imported:
    """A run at iteration 7, of 14."""
    made = make_run(
        folder,
        hf,
        training={
            "steps": 14,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "seq_length": 128,
            "precision": precision,
        },
        parallel={"use_distributed_optimizer": distributed},
    )
    model = made.run
    reader = CheckpointReader(made.checkpoint)
    weights = reader.shapes
    contents = TorchDistSavePlan()
    generator = torch.Generator().manual_seed(3)
    names = [*megatron_state.ADAM_MOMENTS]
    if distributed:
        names.append("param")
    elif precision == "bf16":
        names.append("fp32_param")
    of = torch.bfloat16 if precision == "bf16" else torch.float32
    for key, size in weights.items():
        whole = reader.read(key, start=[0] * len(size), shape=size, dtype=torch.float32)
        for start, part in reader.blocks(key):

            def cut(tensor: torch.Tensor, start: Any = start, part: Any = part) -> torch.Tensor:
                return tensor[tuple(slice(a, a + b) for a, b in zip(start, part, strict=True))].contiguous()

            contents.add_tensor(
                key, size=size, start=start, part=part, dtype=of, make=lambda t=whole, c=cut: c(t).to(of)
            )
        for name in names:
            state = whole if "param" in name else torch.rand(size, generator=generator)
            contents.add_tensor(
                f"{megatron_state.OPTIMIZER_PREFIX}{name}.{key}",
                size=size,
                start=[0] * len(size),
                part=size,
                dtype=torch.float32,
                make=lambda state=state: state.contiguous(),
            )
    contents.add_extra_states(weights)
    contents.add_object("random/shard_0_1", lambda: generators(5))
    adam = megatron_state.AdamState(
        reader=reader, groups=[GROUP, GROUP | {"wd_mult": 0.0, "weight_decay": 0.0}], step=7, main=None, form=None
    )
    position = TrainingProgress.resume(
        {
            "iteration": 7,
            "consumed_samples": 56,
            "legs": [{"iteration": 0, "consumed_samples": 0, "global_batch_size": 8, "rampup_batch_size": None}],
            "skipped": [],
        },
        GlobalBatchSizes(8, None),
    )
    common = {
        "optimizer": adam.plain(distributed=distributed, precision=precision),
        "layout": "DP1 x TP1 x PP1",
        "fixed": {"parallel.use_distributed_optimizer": distributed, "training.precision": precision},
        "data": {"consumed_samples": 56},
        "progress": position.state(),
    }
    new = made.checkpoint.with_name("new")
    new.mkdir()
    contents.write(new, common).add_checksums(7)
    shutil.rmtree(made.checkpoint)
    new.rename(made.checkpoint)
    (commit,) = model.attempt(1).read_commits()
    model.attempt(1).commits.unlink()
    append_line(model.attempt(1).commits, asdict(commit) | {"files": file_sizes(made.checkpoint)})
    return made


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist checkpoint, whole."""
    reader = CheckpointReader(folder)
    return {
        key: reader.read(key, start=[0] * len(reader.size(key)), shape=reader.size(key), dtype=reader.dtype_of(key))
        for key in reader.tensors
    }
