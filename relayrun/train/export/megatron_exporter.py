"""A checkpoint of a run as a folder of Megatron-LM (`torch_dist`), with all that its `--load` looks for.

    OUT/latest_checkpointed_iteration.txt
    OUT/iter_0000100/    .metadata  metadata.json  *.distcp  common.pt {args, iteration, optimizer, opt_param_scheduler}

Tensors are copied one at a time. The optimizer has the plain form, which every megatron-core reads on every layout.
"""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relayrun.config.compose.schema import RunConfig
from relayrun.control.trainers.megatron_lm_checkpoints import TRACKER_FILE
from relayrun.train.export import megatron_arguments, optimizer_state
from relayrun.train.export.checkpoint_source import CheckpointSource
from relayrun.train.export.choose import require_llama
from relayrun.train.export.contents import CheckpointContents
from relayrun.train.export.reader import CheckpointReader
from relayrun.train.model.size import flops_per_token, pad_to_multiple


@dataclass(frozen=True, kw_only=True)
class MegatronExport:
    """What an export wrote."""

    parameters: int
    optimizer: bool
    notes: list[str]
    """What is not as in the run, in words."""


def write_megatron(source: CheckpointSource, folder: Path) -> MegatronExport:
    """Write into `folder`, which is there and gets its name later.

    Raises InputError if the checkpoint is not that of its run's config.

    A checkpoint without an optimizer (an import that a run has not trained) gives one without it.
    """
    config, model = source.config, source.config.model
    reader = CheckpointReader(source.folder, source.checksum)
    vocabulary = pad_to_multiple(source.manifest.vocabulary_size, model.make_vocab_size_divisible_by)
    mapping = require_llama(model, source.folder)
    mapping.check(reader.shapes, model, vocabulary, source.folder)
    weights = mapping.megatron_shapes(model, vocabulary)
    common = reader.common()
    position = megatron_arguments.checkpoint_position(common, config, source.iteration)
    contents, notes = CheckpointContents(), []
    for key in weights:
        contents.copy_tensor(reader, key, key)
    contents.add_extra_states(weights)
    dtype = reader.dtype
    state: dict[str, Any] = {
        "args": Namespace(
            **megatron_arguments.megatron_arguments(config, vocabulary, dtype, position)
            | megatron_arguments.layout_arguments(config)
        ),
        "checkpoint_version": 3.0,
        "iteration": source.iteration,
        "num_floating_point_operations_so_far": int(
            flops_per_token(model, vocabulary, config.training.seq_length)
            * position.consumed_samples
            * config.training.seq_length
        ),
        "tokens_so_far": position.consumed_samples * config.training.seq_length,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    kind = config.optimizer.kind
    if "optimizer" in common and kind == "adam":
        found = optimizer_state.find_adam_state(reader, common["optimizer"])
        adam = replace(found, groups=found.with_defaults())
        precision = config.training.resolved_precision
        adam.copy_into(contents, weights, distributed=False, precision=precision)
        state["optimizer"] = adam.plain(distributed=False, precision=precision)
        state["opt_param_scheduler"] = megatron_arguments.scheduler_state(config, position)
        if adam.form is not None:
            notes.append("the optimizer's state is in the plain form: load it without --use-distributed-optimizer")
    else:
        state["args"].no_save_optim = True
        why = f"the state of {kind} is left out" if "optimizer" in common else "it has no optimizer"
        notes.append(f"{why}: load it with --finetune, or --no-load-optim")
    notes += _add_generators(contents, reader, config)
    iteration = folder / f"iter_{source.iteration:07}"
    iteration.mkdir()
    contents.write(iteration, state)
    (folder / TRACKER_FILE).write_text(f"{source.iteration}\n")
    if position.passed_over or position.skipped:
        notes.append("the run has passed over samples; a run that goes on from here counts from behind them")
    return MegatronExport(
        parameters=sum(torch.Size(size).numel() for size in weights.values()),
        optimizer="optimizer" in common and kind == "adam",
        notes=notes,
    )


def _add_generators(contents: CheckpointContents, reader: CheckpointReader, config: RunConfig) -> list[str]:
    """Add the states of the random generators, one for each tensor- and pipeline-parallel rank.

    Megatron-LM stops where there is none. Those of the run's first data-parallel ranks are taken, and fresh ones where
    the checkpoint has none. megatron-core 0.11 asks for the state of its rerun machine as well, and looks into it only
    where that is switched on (`--rerun-mode`).
    """
    tensor, pipeline = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    notes = []
    for stage in range(pipeline):
        for part in range(tensor):
            rank = stage * (config.world_size // pipeline) + part  # tensor-parallel ranks are neighbours
            key = f"random/shard_{rank}_{config.world_size}"
            where = f"shard_{stage}.{part}_{pipeline}.{tensor}"
            if key not in reader.objects:
                notes = ["states of random generators are fresh ones: the checkpoint has none"]
                contents.add_object(f"rng_state/{where}", lambda: _generators(None, config.training.seed))
            else:
                contents.add_object(
                    f"rng_state/{where}",
                    lambda key=key: _generators(reader.read_object(key), 0),  # type: ignore[misc]
                )
            contents.add_object(f"rerun_state_machine_state/{where}", lambda: None)
    return notes


def _generators(states: dict[str, Any] | None, seed: int) -> list[dict[str, Any]]:
    """States under the names of Megatron-LM. On CPUs its "CUDA" generator is that of the CPU."""
    if states is None:
        numpy_state: tuple[Any, ...] = np.random.RandomState(seed).get_state(legacy=True)  # type: ignore[assignment]
        cpu = torch.Generator().manual_seed(seed).get_state()
        version, internal, gauss = random.Random(seed).getstate()
        cuda, tracker = None, {}
    else:
        name, keys, at, has_gauss, cached = states["numpy"]
        numpy_state = (name, keys.numpy().astype(np.uint32), at, has_gauss, cached)
        cpu, cuda, tracker = states["torch"], states["cuda"], states["tracker"]
        version, internal, gauss = states["python"]
    return [
        {
            "random_rng_state": (version, tuple(internal), gauss),
            "np_rng_state": numpy_state,
            "torch_rng_state": cpu,
            "cuda_rng_state": cpu if cuda is None else cuda,
            "rng_tracker_states": tracker or {"model-parallel-rng": cpu if cuda is None else cuda},
        }
    ]
