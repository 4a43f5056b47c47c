"""Checkpoints of Megatron-LM: export and import of its `torch_dist` folders, and export of its plain `torch` file.

    OUT/latest_checkpointed_iteration.txt
    OUT/iter_0000100/    .metadata  metadata.json  *.distcp  common.pt {args, iteration, optimizer, opt_param_scheduler}

Tensors are copied one at a time. The optimizer has the plain form, which every megatron-core reads on every layout.

A run can also start directly from such a folder. An imported copy does not depend on the original, has hashes, and its
optimizer may have the other form: plain, or distributed over the data-parallel ranks.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/mp_rank_00/model_optim_rng.pt    {model, args, iteration, checkpoint_version}

The plain file has the layout of tensor- and pipeline-parallel size 1, the names of Megatron's `--transformer-impl`, and
with the optimizer also {optimizer, opt_param_scheduler}. The whole model is in memory while the file is written.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ModelSection, RunConfig
from relayrun.control.trainers.megatron_lm_log import TRACKER_FILE
from relayrun.errors import InputError
from relayrun.progress import Progress, count
from relayrun.publishing import InputFiles
from relayrun.train.checkpoint.megatron_folder import MegatronCheckpoint
from relayrun.train.checkpoint.reader import MEGATRON_LAYOUT, with_torch_tensors
from relayrun.train.export import megatron_settings, megatron_state
from relayrun.train.export.huggingface import DTYPES
from relayrun.train.export.megatron_settings import MEGATRON_TABLES
from relayrun.train.export.model_families import mapping_for_model, require_llama
from relayrun.train.export.model_mapping import EMBEDDING, FINAL_NORM, OUTPUT
from relayrun.train.export.source_and_target import CheckpointSource
from relayrun.train.export.torch_dist import CheckpointReader, TorchDistSavePlan, new_folder
from relayrun.train.model.size import flops_per_token, pad_to_multiple

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MegatronExport:
    """Result of an export."""

    parameters: int
    optimizer: bool
    notes: list[str]
    """Differences from the run, in words."""


def write_megatron(source: CheckpointSource, folder: Path) -> MegatronExport:
    """Write into the existing `folder`; without an optimizer if the checkpoint has none (an untrained import). Raises
    InputError if the checkpoint does not fit the config of its run."""
    config, model = source.config, source.config.model
    reader = CheckpointReader(source.folder, source.checksum)
    vocabulary = pad_to_multiple(source.manifest.vocabulary_size, model.make_vocab_size_divisible_by)
    mapping = require_llama(model, source.folder)
    mapping.check(reader.shapes, model, vocabulary, source.folder)
    weights = mapping.megatron_shapes(model, vocabulary)
    common = reader.common()
    position = megatron_state.checkpoint_position(common, config, source.iteration)
    contents, notes = TorchDistSavePlan(), []
    for key in weights:
        contents.copy_tensor(reader, key, key)
    contents.add_extra_states(weights)
    dtype = reader.dtype
    state: dict[str, Any] = {
        "args": Namespace(
            **megatron_state.megatron_arguments(config, vocabulary, dtype, position)
            | megatron_state.layout_arguments(config)
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
        found = megatron_state.find_adam_state(reader, common["optimizer"])
        adam = replace(found, groups=found.with_defaults())
        precision = config.training.resolved_precision
        adam.copy_into(contents, weights, mapping.keys(model, weights), distributed=False, precision=precision)
        state["optimizer"] = adam.plain(distributed=False, precision=precision)
        state["opt_param_scheduler"] = megatron_state.scheduler_state(config, position)
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


def _add_generators(contents: TorchDistSavePlan, reader: CheckpointReader, config: RunConfig) -> list[str]:
    """Add the states of the random generators, one for each tensor- and pipeline-parallel rank; return notes.
    Megatron-LM stops without them. They come from the run's first data-parallel ranks; fresh states replace missing
    ones. megatron-core 0.11 also needs the state of its rerun machine, and reads it only with `--rerun-mode`."""
    tensor, pipeline = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    notes = []
    for stage in range(pipeline):
        for part in range(tensor):
            rank = stage * (config.world_size // pipeline) + part  # tensor-parallel ranks are neighbours
            key = f"random/shard_{rank}_{config.world_size}"
            where = f"shard_{stage}.{part}_{pipeline}.{tensor}"
            if key not in reader.objects:
                notes = ["states of random generators are fresh ones: the checkpoint has none"]
            contents.add_object(f"rng_state/{where}", partial(_generators, reader, key, config.training.seed))
            contents.add_object(f"rerun_state_machine_state/{where}", lambda: None)
    return notes


def _generators(reader: CheckpointReader, key: str, seed: int) -> list[dict[str, Any]]:
    """Return states under Megatron-LM's names, fresh without a `key`. On CPUs its "CUDA" generator is the CPU's."""
    if key not in reader.objects:
        numpy_state: tuple[Any, ...] = np.random.RandomState(seed).get_state(legacy=True)  # type: ignore[assignment]
        cpu = torch.Generator().manual_seed(seed).get_state()
        version, internal, gauss = random.Random(seed).getstate()
        cuda, tracker = None, {}
    else:
        states = reader.read_object(key)
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


@dataclass(frozen=True, kw_only=True)
class MegatronImportResult:
    """Result of an import."""

    iteration: int
    consumed_samples: int
    optimizer: bool
    """True if Adam's moments came along; else the checkpoint holds weights alone."""
    not_taken: list[str]
    """Parts that were left out, in words."""


def import_megatron(
    checkpoint: MegatronCheckpoint,
    output: Path,
    *,
    distributed: bool | None = None,
    weights_only: bool = False,
    read: InputFiles | None = None,
) -> MegatronImportResult:
    """Write the checkpoint `output`, whole or not at all. `distributed`: True for a run with the distributed optimizer;
    None: as it was. Raises InputError if the checkpoint is torn, or no run can train its model."""
    sections = megatron_settings.run_sections(checkpoint)
    model = megatron_settings.model_section(checkpoint)
    reader = CheckpointReader(checkpoint.folder)
    rows = reader.shapes.get(EMBEDDING, (0,))[0]
    mapping = mapping_for_model(model)
    weights, keys = mapping.megatron_shapes(model, rows), mapping.keys(model, reader.shapes)
    extra = sorted(reader.shapes.keys() - keys.values())
    mapping.check(
        {key: reader.shapes[key] for key in reader.shapes if key not in extra}, model, rows, checkpoint.folder
    )
    kind = checkpoint.distributed is not None if distributed is None else distributed
    adam, why = _adam(checkpoint, reader) if not weights_only else (None, "weights alone were asked for")
    with new_folder(output, read) as made:
        contents = TorchDistSavePlan()
        for key in weights:
            contents.copy_tensor(reader, keys[key], key)
        contents.add_extra_states(weights)
        common: dict[str, Any] = {"iteration": 0}
        if adam is not None:
            adam.copy_into(contents, weights, keys, distributed=kind, precision=checkpoint.precision)
            common = {
                "optimizer": adam.plain(distributed=kind, precision=checkpoint.precision),
                "layout": MEGATRON_LAYOUT,
                "fixed": checkpoint.fixed_settings() | {"parallel.use_distributed_optimizer": kind},
                "data": None,
                "progress": checkpoint.progress(),
            }
        written = contents.write(made, common)
        sections["parallel"] = {"use_distributed_optimizer": kind}
        origin = f"# of {checkpoint.folder.absolute()}\n"
        beginning: dict[str, Any] = {"model": sections["model"]}
        if adam is not None:
            beginning["iteration"] = checkpoint.iteration
        (made / "model.yaml").write_text(origin + yaml_file.dump_yaml(beginning), encoding="utf-8")
        (made / "run.yaml").write_text(origin + yaml_file.dump_yaml(sections), encoding="utf-8")
        arguments = json.dumps(dict(sorted(checkpoint.args.items())), indent=1, skipkeys=True, default=str)
        (made / "arguments.json").write_text(arguments + "\n", encoding="utf-8")
        written.add_checksums(checkpoint.iteration)
    left = megatron_settings.describe_not_taken(checkpoint, optimizer=why)
    left += [f"{key} {list(reader.shapes[key])}: the model has no such weight" for key in extra]
    return MegatronImportResult(
        iteration=checkpoint.iteration,
        consumed_samples=checkpoint.consumed_samples,
        optimizer=adam is not None,
        not_taken=left,
    )


def _adam(
    checkpoint: MegatronCheckpoint, reader: CheckpointReader
) -> tuple[megatron_state.AdamState | None, str | None]:
    if checkpoint.optimizer is None or (why := checkpoint.no_adam()) is not None:
        return None, why
    try:
        return megatron_state.find_adam_state(reader, with_torch_tensors(checkpoint.optimizer)), None
    except InputError as error:
        return None, error.message


_LAYER_PREFIX = "decoder.layers."


def write_torch_format(
    source: CheckpointSource, folder: Path, *, dtype: str, transformer_impl: str, with_optimizer: bool = False
) -> int:
    """Write into `folder`; return the number of parameters, padding included. Raises like
    `huggingface.write_huggingface`, and InputError if a requested optimizer's state is missing."""
    model, config = source.config.model, source.config
    reader = CheckpointReader(source.folder, source.checksum)
    vocabulary = pad_to_multiple(source.manifest.vocabulary_size, model.make_vocab_size_divisible_by)
    require_llama(model, source.folder).check(reader.shapes, model, vocabulary, source.folder)
    of = reader.dtype if dtype == "auto" else DTYPES[dtype]
    notes: list[str] = []
    exact, _ = megatron_state.weights_as(of, reader, [*reader.shapes], notes)
    for note in notes:
        log.warning("%s", note)
    names: dict[str, str] = MEGATRON_TABLES["local_names"] if transformer_impl == "local" else {}

    def read(key: str, layer: int | None, dtype: torch.dtype, prefix: str = "") -> torch.Tensor:
        shape = reader.shapes[key]
        start = [layer or 0] + [0] * (len(shape) - 1)
        part = shape if layer is None else (1, *shape[1:])
        tensor = (reader if prefix else exact).read(prefix + key, start=start, shape=part, dtype=dtype)
        count(tensor.numel())
        return tensor if layer is None else tensor[0]

    weights: dict[str, torch.Tensor] = {}
    parameters = sum(torch.Size(shape).numel() for shape in reader.shapes.values())
    with Progress("reading", parameters, "parameters"):
        for key in reader.shapes:
            if not key.startswith(_LAYER_PREFIX):
                weights[key] = read(key, None, of)
                continue
            name = key.removeprefix(_LAYER_PREFIX)
            for layer in range(model.num_layers):
                weights[f"{_LAYER_PREFIX}{layer}.{names.get(name, name)}"] = read(key, layer, of)
    common = reader.common()
    position = megatron_state.checkpoint_position(common, config, source.iteration)
    arguments = megatron_state.megatron_arguments(config, vocabulary, of, position) | {
        "transformer_impl": transformer_impl,
        "ckpt_format": "torch",
        "no_save_optim": not with_optimizer,
        "no_save_rng": True,
    }
    state: dict[str, Any] = {
        "model": weights,
        "args": Namespace(**arguments),
        "iteration": source.iteration,
        "checkpoint_version": 3.0,
    }
    if with_optimizer:
        if "optimizer" not in common:
            raise InputError("this checkpoint has no optimizer", where=source.folder, hint="leave out --optimizer")
        adam = megatron_state.find_adam_state(reader, common["optimizer"])
        bf16 = config.training.resolved_precision == "bf16"
        with Progress("reading the optimizer", (3 if bf16 else 2) * parameters, "parameters"):
            state["optimizer"] = _optimizer(adam, _numbered(model, transformer_impl), read, bf16=bf16)
        state["opt_param_scheduler"] = megatron_state.scheduler_state(config, position)
    target = folder / f"iter_{source.iteration:07}" / "mp_rank_00"
    target.mkdir(parents=True)
    torch.save(state, target / "model_optim_rng.pt")
    (folder / TRACKER_FILE).write_text(f"{source.iteration}\n")
    return parameters


def _numbered(model: ModelSection, transformer_impl: str) -> tuple[list[tuple[str, int | None]], ...]:
    """Return the weights by group of the optimizer: matrices, then norms, which have no weight decay."""
    layers = [
        (_LAYER_PREFIX + name, layer)
        for layer in range(model.num_layers)
        for name in MEGATRON_TABLES["parameter_order"][transformer_impl]
    ]
    every: list[tuple[str, int | None]] = [(EMBEDDING, None), *layers, (FINAL_NORM, None)]
    if model.untie_embeddings_and_output_weights:
        every.append((OUTPUT, None))
    norms = [each for each in every if "norm" in each[0]]
    return [each for each in every if each not in norms], norms


def _optimizer(
    adam: megatron_state.AdamState,
    groups: tuple[list[tuple[str, int | None]], ...],
    read: Callable[..., torch.Tensor],
    *,
    bf16: bool,
) -> dict[str, Any]:
    """Return Adam's state as torch numbers it; for a bf16 model with fp32 weights."""
    step = torch.tensor(float(adam.step), dtype=torch.float32)
    every = [each for group in groups for each in group]
    state = {
        number: {
            "step": step.clone(),
            **{
                name: read(*each, torch.float32, f"{megatron_state.OPTIMIZER_PREFIX}{name}.")
                for name in megatron_state.ADAM_MOMENTS
            },
        }
        for number, each in enumerate(every)
    }
    numbers = itertools.count()
    numbered = [
        settings | {"params": list(itertools.islice(numbers, len(group)))}
        for settings, group in zip(adam.with_defaults(), groups, strict=True)
    ]
    inner = {"state": state, "param_groups": numbered}
    if not bf16:
        return inner
    prefix = "" if adam.main is None else f"{megatron_state.OPTIMIZER_PREFIX}{adam.main}."
    return {
        "optimizer": inner,
        "fp32_from_fp16_params": [[read(*each, torch.float32, prefix) for each in group] for group in groups],
    }
