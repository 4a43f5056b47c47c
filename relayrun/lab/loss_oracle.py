"""`relayrun check --oracle`: each term of the loss of a config in its layout against one rank, on this machine's CPUs.

The model shrinks and keeps every switch; each parallel size above 1 becomes 2. `lab.loss_terms` computes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.model import Fp8Fields
from relayrun.submit.check.rehearsal import ask_ranks
from relayrun.terminal import print_rows

SECONDS = 120.0
TOLERANCE = 1e-4
"""Relative difference above which a term differs; rounding in fp32 is below 1e-5."""
LENGTH, CHANNELS, WIDTH = 32, 16, 32
"""Tokens of a sample, channels of a head, and width of an expert."""
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
_OF_GPUS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap")
_KEPT_OF_TRAINING = ("seed", "loss", "loss_mean", "recompute_granularity", "recompute_modules")


@dataclass(frozen=True, kw_only=True)
class OracleReport:
    """The result of a comparison: the settings that were shrunk, and a row for each term of the loss."""

    shrunk: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, tuple[float, str]]] = field(default_factory=dict)
    """For each term and each way to compute it the largest relative difference, and the tensor that has it."""
    failure: str | None = None  # why nothing was compared

    @property
    def differing(self) -> list[str]:
        return [term for term, row in self.rows.items() if not all(apart <= TOLERANCE for apart, _ in row.values())]

    def print(self) -> None:
        """Print what was shrunk, a row for each term, and the verdict."""
        print("small, on CPUs, in fp32:", *self.shrunk, sep="\n  ")
        ways = list(dict.fromkeys(way for row in self.rows.values() for way in row))
        rows = []
        for term, row in self.rows.items():
            rows.append([term, *(f"{row[way][0]:.1e}" if way in row else "" for way in ways), max(row.values())[1]])
        print_rows(["against one rank", *(f"{way}|n" for way in ways), "largest in"], rows)
        if self.failure is not None:
            print(f"not compared: {self.failure}")
        elif self.differing:
            print(f"{', '.join(self.differing)}: not equal, more than {TOLERANCE:g} apart")
        else:
            print(f"every term is equal to within {TOLERANCE:g}")


def ask_oracle(config: RunConfig) -> OracleReport:
    """Compare the terms of a config's loss, within `SECONDS`."""
    try:
        small, reference = shrink(config)
    except ValidationError as error:
        return OracleReport(failure=f"this config cannot be shrunk: {error.errors()[0]['msg']}")
    request, shrunk = [each.model_dump(mode="json") for each in (small, reference)], list(_changes(config, small))
    answer = ask_ranks(config, "relayrun.lab.loss_terms", request, limit=SECONDS, variables=_ENVIRONMENT)
    if isinstance(answer, str):
        return OracleReport(shrunk=shrunk, failure=answer)
    rows = {term: row for term, row in answer.items() if row}
    nothing = None if rows else "on one rank, with micro-batches of 1 and no mask, there is one way to the loss"
    return OracleReport(shrunk=shrunk, rows=rows, failure=nothing)


def shrink(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """Return a small config with the same switches in its layout, and the same on one rank."""
    names = [name for name in type(config.parallel).model_fields if name.endswith("parallel_size")]
    sizes = {name: min(size, 2) for name in names if (size := getattr(config.parallel, name)) is not None}
    asked, instances = config.training, config.parallel.num_distributed_optimizer_instances
    # an expert on one of two replicas is there once
    sizes["num_distributed_optimizer_instances"] = 1 if config.parallel.separates_experts else min(instances, 2)
    stages, replicas = sizes["pipeline_model_parallel_size"], min(config.data_parallel_size, 2)
    parts = stages * (2 if config.virtual_stages > 1 else 1)
    model = _small_model(config, sizes, parts)
    parallel = config.parallel.model_dump() | sizes
    parallel |= {"tp_comm_overlap": False, "defer_embedding_wgrad_compute": False, "wgrad_deferral_limit": 0}  # of GPUs
    if config.virtual_stages > 1:
        parallel["num_layers_per_virtual_pipeline_stage"] = model["num_layers"] // parts
    size, once = min(asked.micro_batch_size, 2), asked.micro_batch_size * config.data_parallel_size
    batches = 2 if asked.global_batch_size > once or config.virtual_stages > 1 else 1
    training: dict[str, Any] = {name: getattr(asked, name) for name in _KEPT_OF_TRAINING}
    training |= {"micro_batch_size": size, "global_batch_size": size * replicas * batches, "seq_length": LENGTH}
    training |= {"precision": "fp32", "transformer_impl": "auto", "cross_entropy_loss_fusion": False}
    training |= {"recompute_num_layers": asked.recompute_num_layers and 1, "steps": asked.steps}
    data: dict[str, Any] = {"tokenizer": "none", "datasets": ["none"], "eod_mask_loss": config.data.masks_loss}
    data |= {
        "reset_attention_mask": config.data.attends_documents,
        "reset_position_ids": config.data.restarts_positions,
    }
    sections: dict[str, Any] = {"project": config.project, "name": config.name, "model": model, "data": data}
    sections |= {"training": training, "optimizer": {"lr": 1e-3, "lr_warmup_steps": 0, "lr_decay_steps": 1}}
    sections |= {"checkpoint": {"interval": 1}, "cluster": {"name": "oracle", "scheduler": "local"}}
    ranks = sizes["tensor_model_parallel_size"] * sizes["context_parallel_size"] * stages * replicas
    small = sections | {"parallel": parallel, "job": {"time": "1", "ntasks_per_node": ranks}}
    one = sections | {"job": {"time": "1", "ntasks_per_node": 1}}
    return RunConfig.model_validate(small), RunConfig.model_validate(one)


def _small_model(config: RunConfig, sizes: Mapping[str, int], parts: int) -> dict[str, Any]:
    """Return the section `model` with few layers, heads and experts, for `parts` parts of a pipeline."""
    model, split = config.model, sizes["tensor_model_parallel_size"] * sizes["context_parallel_size"]
    transformer = _small_transformer(config)
    groups = math.gcd(model.num_query_groups, split)
    heads = groups * min(model.num_attention_heads // model.num_query_groups, 2)
    while heads % split or heads == 1 < model.num_attention_heads:
        heads *= 2
    groups = heads if model.num_query_groups == model.num_attention_heads else groups
    patterns = [name for name in ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq") if transformer.get(name)]
    layers = parts * 2 if patterns else max(parts, 2)
    for name in patterns:
        if isinstance(pattern := transformer[name], list):
            transformer[name] = [(pattern[0] + number * (len({*pattern}) > 1)) % 2 for number in range(layers)]
        else:
            transformer[name] = min(pattern, 2)
    if own := transformer.get("kv_channels") is not None:
        transformer["kv_channels"] = CHANNELS
    hidden = 64 if own else heads * CHANNELS
    found: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 2 * WIDTH}
    found |= {"num_attention_heads": heads, "num_query_groups": groups, "transformer": transformer}
    return model.model_dump() | found | {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _small_transformer(config: RunConfig) -> dict[str, Any]:
    settings, parallel = config.model.transformer, config.parallel
    small = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    small = small if settings.multi_latent_attention else {}
    small |= {"moe_ffn_hidden_size": WIDTH, "moe_shared_expert_intermediate_size": WIDTH}
    found = {name: value for name, value in settings.model_dump().items() if name not in Fp8Fields.model_fields}
    found |= {name: size for name, size in small.items() if getattr(settings, name) is not None}
    if settings.window_size is not None:
        found["window_size"] = [min(settings.window_size[0], 7), 0]
    if settings.num_moe_experts is None:
        return found
    experts, chosen = min(settings.num_moe_experts, 4), min(settings.moe_router_topk, 2)
    if (of_groups := settings.moe_router_group_topk) is not None and settings.moe_router_num_groups is not None:
        groups, own = min(settings.moe_router_num_groups, 4), min(of_groups, 2)
        experts, chosen = 2 * groups, own * min(settings.moe_router_topk // of_groups, 2)
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": own}
    found |= {"num_moe_experts": experts, "moe_router_topk": chosen, "moe_input_jitter_eps": None}
    found |= dict.fromkeys(_OF_GPUS, False)
    if min(parallel.expert_tensor_size, parallel.expert_model_parallel_size) > 1:  # alltoall gathers on GPUs alone
        found["moe_token_dispatcher_type"] = "allgather"
    return found


def _changes(config: RunConfig, small: RunConfig) -> Iterator[str]:
    """Yield the settings that the small config does not keep."""
    for section in ("model", "model.transformer", "parallel", "training"):
        before, after = (attrgetter(section)(each) for each in (config, small))
        names = after.model_fields_set | (set() if section == "training" else before.model_fields_set)
        for name in sorted(names - {"transformer"}):
            if (value := getattr(before, name)) != (other := getattr(after, name)):
                yield f"{section}.{name}: {value} -> {other}"
    if config.data_parallel_size != small.data_parallel_size:
        yield f"data-parallel size: {config.data_parallel_size} -> {small.data_parallel_size}"
    yield "data: random tokens" + (", some of them masked" if config.data.masks_loss else "")
