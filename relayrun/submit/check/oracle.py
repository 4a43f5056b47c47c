"""`relayrun check --oracle`: each term of the loss of a config in its layout against one rank, on this machine's CPUs.

The model shrinks and keeps every switch; each parallel size above 1 becomes 2. The ranks' Python computes it, see
`relayrun.train.oracle`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.model import Fp8Fields
from relayrun.submit.check.rehearsal import run_python, runs_in_container, search_path
from relayrun.watch.text import print_table, text_table

SECONDS = 120.0
"""Time limit."""
TOLERANCE = 1e-4
"""Relative difference above which a term differs; rounding in fp32 is below 1e-5."""
LENGTH, CHANNELS, WIDTH = 32, 16, 32
"""Tokens of a sample, channels of a head, and width of an expert."""
_SHRUNK_OF_TRAINING = frozenset(
    [
        "micro_batch_size",
        "global_batch_size",
        "seq_length",
        "precision",
        "transformer_impl",
        "cross_entropy_loss_fusion",
    ]
)
_KEPT_OF_TRAINING = ("seed", "loss", "loss_mean", "recompute_granularity", "recompute_modules")


@dataclass(frozen=True, kw_only=True)
class OracleReport:
    """What was shrunk and what came out."""

    shrunk: list[str] = field(default_factory=list)
    """Changed settings as `section.name: before -> after`."""
    rows: dict[str, dict[str, tuple[float, str]]] = field(default_factory=dict)
    """For each term and each way to compute it the largest relative difference, and the tensor that has it."""
    failure: str | None = None
    """Why nothing was compared."""

    @property
    def differing(self) -> list[str]:
        """Terms that are not equal."""
        return [term for term, row in self.rows.items() if not all(apart <= TOLERANCE for apart, _ in row.values())]

    def print(self) -> None:
        """Print what was shrunk, a row for each term, and the verdict."""
        print("small, on CPUs, in fp32:", *self.shrunk, sep="\n  ")
        ways = list(dict.fromkeys(way for row in self.rows.values() for way in row))
        rows = [
            (
                term,
                *(f"{row[way][0]:.1e}" if way in row else "" for way in ways),
                max(row.values(), default=("", ""))[1],
            )
            for term, row in self.rows.items()
        ]
        print_table(text_table(["against one rank", *(f"{way}|n" for way in ways), "largest in"], rows))
        if self.failure is not None:
            print(f"not compared: {self.failure}")
        elif self.differing:
            print(f"{', '.join(self.differing)}: not equal, more than {TOLERANCE:g} apart")
        else:
            print(f"every term is equal to within {TOLERANCE:g}")


def ask_oracle(config: RunConfig) -> OracleReport:
    """Compare the terms of a config's loss, within `SECONDS`."""
    if runs_in_container(config):
        return OracleReport(failure="the ranks run in a container, which is not started here")
    try:
        small, reference = shrink(config)
    except ValidationError as error:
        return OracleReport(failure=f"this config cannot be shrunk: {error.errors()[0]['msg']}")
    shrunk, python = list(_changes(config, small)), config.cluster.rank_python
    request = {"config": small.model_dump(mode="json"), "reference": reference.model_dump(mode="json")}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment = config.cluster.environment | hidden | {"PYTHONPATH": search_path(config)}
    done = run_python([python, "-m", "relayrun.train.oracle"], environment, text=json.dumps(request), limit=SECONDS)
    if done is None or isinstance(done, str):
        return OracleReport(shrunk=shrunk, failure=f"{python} {done or f'was not done within {SECONDS:.0f} s'}")
    try:
        return OracleReport(shrunk=shrunk, rows=json.loads(done.stdout))
    except ValueError:
        said = [line for line in done.stderr.splitlines() if line[:1].strip()]  # without hints, which are indented
        last = said[-1] if said else f"exit code {done.returncode}"
        return OracleReport(shrunk=shrunk, failure=f"{python}: {last}")


def shrink(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """Return a small config with the same switches in its layout, and the same on one rank."""
    sizes = _parallel_sizes(config)
    replicas = min(config.data_parallel_size, 2)
    parallel = config.parallel.model_dump() | sizes
    # these need a GPU's kernels
    parallel |= {"tp_comm_overlap": False, "defer_embedding_wgrad_compute": False, "wgrad_deferral_limit": 0}
    tensor, context = sizes["tensor_model_parallel_size"], sizes["context_parallel_size"]
    stages = sizes["pipeline_model_parallel_size"]
    parts = stages * (2 if config.virtual_stages > 1 else 1)
    model = _small_model(config, tensor, context, parts)
    if config.virtual_stages > 1:
        parallel["num_layers_per_virtual_pipeline_stage"] = model["num_layers"] // parts
    size = min(config.training.micro_batch_size, 2)
    training: dict[str, Any] = {name: getattr(config.training, name) for name in _KEPT_OF_TRAINING}
    accumulated = config.training.global_batch_size > config.training.micro_batch_size * config.data_parallel_size
    batches = 2 if accumulated or config.virtual_stages > 1 else 1
    training |= {"steps": 9, "micro_batch_size": size, "global_batch_size": size * replicas * batches}
    training |= {"seq_length": LENGTH, "precision": "fp32", "threads": 1}
    if config.training.recompute_num_layers is not None:
        training["recompute_num_layers"] = 1
    data = {
        "tokenizer": "none",
        "datasets": ["none"],
        "reset_attention_mask": config.data.attends_documents,
        "reset_position_ids": config.data.restarts_positions,
        "eod_mask_loss": config.data.masks_loss,
    }
    ranks = tensor * context * stages * replicas
    sections: dict[str, Any] = {
        "project": config.project,
        "name": config.name,
        "model": model,
        "data": data,
        "training": training,
        "optimizer": {"lr": 1e-3, "lr_warmup_steps": 0},
        "checkpoint": {"interval": 1},
        "cluster": {"name": "oracle", "scheduler": "local"},
    }
    job = {"time": "1", "nodes": 1, "gpus_per_node": 0}
    small = sections | {"parallel": parallel, "job": job | {"ntasks_per_node": ranks}}
    one = sections | {"job": job | {"ntasks_per_node": 1}}
    return RunConfig.model_validate(small), RunConfig.model_validate(one)


def _parallel_sizes(config: RunConfig) -> dict[str, int]:
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
    names += ["expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances"]
    found = {name: min(size, 2) for name in names if (size := getattr(config.parallel, name)) is not None}
    if config.parallel.separates_experts:  # two replicas: an expert has one
        found["num_distributed_optimizer_instances"] = 1
    return found


def _small_model(config: RunConfig, tensor: int, context: int, parts: int) -> dict[str, Any]:
    """Return the section `model` with few layers, heads and experts, for `parts` parts of a pipeline."""
    model = config.model
    transformer = _small_transformer(config)
    groups = math.gcd(model.num_query_groups, tensor * context)
    heads = groups * min(model.num_attention_heads // model.num_query_groups, 2)
    while heads % (tensor * context) or heads == 1 < model.num_attention_heads:
        heads *= 2
    if model.num_query_groups == model.num_attention_heads:
        groups = heads
    patterns = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq")
    layers = parts * 2 if any(transformer.get(name, 1) not in (1, None) for name in patterns) else max(parts, 2)
    for name in patterns:
        if isinstance(pattern := transformer.get(name), list):
            mixed = len(set(pattern)) > 1
            transformer[name] = [(pattern[0] + number * mixed) % 2 for number in range(layers)]
        elif isinstance(pattern, int):
            transformer[name] = min(pattern, 2)
    own = model.transformer.kv_channels is not None
    hidden = 64 if own else heads * CHANNELS
    return model.model_dump() | {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 2 * WIDTH,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer": transformer | ({"kv_channels": CHANNELS} if own else {}),
    }


def _small_transformer(config: RunConfig) -> dict[str, Any]:
    settings, parallel = config.model.transformer, config.parallel
    found = {name: value for name, value in settings.model_dump().items() if name not in Fp8Fields.model_fields}
    small: Mapping[str, Any] = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "moe_ffn_hidden_size": WIDTH,
        "moe_shared_expert_intermediate_size": WIDTH,
    }
    given = {name: getattr(settings, name) for name in small if getattr(settings, name) is not None}
    if not settings.multi_latent_attention:
        given = {name: value for name, value in given.items() if name.startswith("moe_")}
    found |= {name: small[name] for name in given}
    if settings.window_size is not None:
        found["window_size"] = [min(settings.window_size[0], 7), 0]
    if settings.num_moe_experts is None:
        return found
    experts, chosen = min(settings.num_moe_experts, 4), min(settings.moe_router_topk, 2)
    if (of_groups := settings.moe_router_group_topk) is not None and settings.moe_router_num_groups is not None:
        groups = min(settings.moe_router_num_groups, 4)
        each = min(settings.moe_router_topk // of_groups, 2)
        experts, chosen = 2 * groups, min(of_groups, 2) * each
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": min(of_groups, 2)}
    found |= {"num_moe_experts": experts, "moe_router_topk": chosen, "moe_input_jitter_eps": None}
    found |= dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"), False)
    found["moe_shared_expert_overlap"] = False
    if min(parallel.expert_tensor_size, parallel.expert_model_parallel_size) > 1:
        found["moe_token_dispatcher_type"] = "allgather"  # alltoall gathers on GPUs alone
    return found


def _changes(config: RunConfig, small: RunConfig) -> Iterator[str]:
    """Yield the settings that the small config does not keep."""
    for section in ("model", "parallel", "training"):
        before, after = (_flat(section, getattr(each, section).model_dump()) for each in (config, small))
        for name in sorted({*before, *after}):
            told = section != "training" or name.removeprefix("training.") in _SHRUNK_OF_TRAINING
            if told and before.get(name) != after.get(name):
                yield f"{name}: {before.get(name)} -> {after.get(name)}"
    if config.data_parallel_size != small.data_parallel_size:
        yield f"data-parallel size: {config.data_parallel_size} -> {small.data_parallel_size}"
    yield "data: random tokens" + (", some of them masked" if config.data.masks_loss else "")


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: each for inner, of_inner in value.items() for key, each in _flat(f"{name}.{inner}", of_inner).items()}
