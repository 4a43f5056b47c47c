"""The parts `models`, `layouts` and `export`: correctness of models on this device.

Each variant trains a small model in bf16 on one batch, so that its loss must fall; the same weights then compute the
loss in fp32. `export` compares the logits of an exported model in transformers with megatron-core's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from relayrun.config.compose import resolve
from relayrun.errors import RelayrunError
from relayrun.files import write_atomic
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures, run_and_record_program
from relayrun.lab.small_run import Sections, merge_sections

EXPORT_STEPS = 3
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_aux_loss_coeff": 0.01}
ENGINE = {"training": {"transformer_impl": "transformer_engine"}}
LATENT_ATTENTION = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "rope_type": "rope",
    "qk_layernorm": True,
}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
BF16_MOMENTS = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
FP32_MOMENTS = {"use_precision_aware_optimizer": False, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def measure_export(setup: CheckSetup, figures: PartFigures) -> None:
    """Train a few iterations, export, compare logits. Raises CheckFailed."""
    sizes = setup.sizes
    sections = {
        "model": dict(sizes.resumed_model),
        "data": runs.data_with_tokenizer(setup),
        "training": {
            "steps": EXPORT_STEPS,
            "micro_batch_size": sizes.resumed_batch,
            "global_batch_size": sizes.resumed_batch * setup.ranks,
            "seq_length": sizes.resumed_seq_length,
        },
    }
    run = runs.start_run(setup, "export", sections).wait(EXPORT_STEPS)
    folder = setup.path / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    run_and_record_program(setup, figures, "models:export_and_compare", run_dir=run.path, folder=folder)
    runs.remove_checkpoints(run)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class ModelVariant:
    """A model, optimizer or data type to try."""

    what: str
    """Description in one line."""
    sections: Sections = field(default_factory=dict)
    """Differences from a Llama trained by Adam in bf16."""
    exact: Sections | None = field(default_factory=dict)
    """Differences from `sections` for the loss in fp32; None: skip it."""


def _transformer(**settings: object) -> Sections:
    return {"model": {"transformer": settings}}


MODEL_VARIANTS: dict[str, ModelVariant] = {
    "llama": ModelVariant("a Llama"),
    "documents": ModelVariant(
        "documents in rows, with positions of their own", {"data": DOCUMENTS | {"eod_mask_loss": True}}
    ),
    "window": ModelVariant(
        "a sliding window, in every second layer", _transformer(window_size=[15, 0], window_attn_skip_freq=2)
    ),
    "qwen3": ModelVariant(
        "norms of queries and keys, heads of their own size (Qwen3)", _transformer(qk_layernorm=True, kv_channels=32)
    ),
    "apertus": ModelVariant(
        "xIELU and two matrices in feed-forward layers (Apertus)",
        _transformer(qk_layernorm=True, gated_linear_unit=False, activation_func="xielu"),
    ),
    "experts": ModelVariant("experts, tokens by allgather (Mixtral)", _transformer(**EXPERTS)),
    "experts_sent": ModelVariant(
        "experts, tokens by alltoall, and shared experts with a gate",
        _transformer(
            **EXPERTS,
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_intermediate_size=64,
            moe_shared_expert_gate=True,
        ),
    ),
    "latent": ModelVariant("multi-latent attention (DeepSeek)", _transformer(**LATENT_ATTENTION)),
    "muon": ModelVariant(
        "Muon",
        {
            "optimizer": {"name": "muon", "muon_extra_scale_factor": 0.2},
            "parallel": {"use_distributed_optimizer": False},
        },
    ),
    "bf16_gradients": ModelVariant(
        "gradients in bf16",
        {"optimizer": {"main_grads_dtype": "bf16"}},
        exact={"optimizer": {"main_grads_dtype": "fp32"}},
    ),
    "fused_loss": ModelVariant(
        "the fused loss",
        {"training": {"cross_entropy_loss_fusion": True}},
        exact={"training": {"cross_entropy_loss_fusion": False}},
    ),
    "precision_aware": ModelVariant(
        "TransformerEngine's Adam, with a state in bf16", {"optimizer": BF16_MOMENTS}, exact={"optimizer": FP32_MOMENTS}
    ),
    "engine": ModelVariant("TransformerEngine's layers", ENGINE),
    "fp8": ModelVariant(
        "products in 8 bits (fp8 hybrid, delayed scales)",
        {**ENGINE, **_transformer(fp8="hybrid")},
        exact=_transformer(),
    ),
    "fp8_blockwise": ModelVariant(
        "products in 8 bits, a scale for each block",
        {**ENGINE, **_transformer(fp8="e4m3", fp8_recipe="blockwise")},
        exact=_transformer(),
    ),
}

EXPERT_DISPATCH = _transformer(**EXPERTS, moe_token_dispatcher_type="alltoall")
LAYOUT_VARIANTS: dict[str, ModelVariant] = {
    "tensor": ModelVariant("two tensor-parallel ranks, with sequence parallelism", {"parallel": SEQUENCE}),
    "pipeline": ModelVariant("two pipeline stages", {"parallel": {"pipeline_model_parallel_size": 2}}),
    "context": ModelVariant(
        "two context-parallel ranks, documents in rows",
        {"parallel": {"context_parallel_size": 2}, "data": DOCUMENTS, "training": {"transformer_impl": "local"}},
    ),
    "experts": ModelVariant(
        "experts over two ranks", {**EXPERT_DISPATCH, "parallel": {"expert_model_parallel_size": 2}}
    ),
    "whole_experts": ModelVariant(
        "whole experts on two tensor-parallel ranks",
        {**EXPERT_DISPATCH, "parallel": SEQUENCE | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}},
    ),
    "instances": ModelVariant("two distributed optimizers", {"parallel": {"num_distributed_optimizer_instances": 2}}),
    "overlap": ModelVariant(
        "tp_comm_overlap, by TransformerEngine",
        {**ENGINE, "parallel": SEQUENCE | {"tp_comm_overlap": True}},
        exact=None,
    ),
}
"""Variants of two ranks, each on its own GPU."""


def measure_models(setup: CheckSetup, figures: PartFigures) -> None:
    """Try every variant on one rank. Raises CheckFailed if the ranks' program fails as a whole."""
    if not try_variants(setup, figures, MODEL_VARIANTS, ranks=1):
        raise CheckFailed("no variant could be tried")


def measure_layouts(setup: CheckSetup, figures: PartFigures) -> None:
    """Try every layout on two GPUs, each in a start of the ranks of its own."""
    if setup.gpus == 1:
        figures.add("layouts", {"what": "layouts of two ranks", "not_measured": "this machine has one GPU"})
        return
    for name, variant in LAYOUT_VARIANTS.items():
        try:
            try_variants(setup, figures, {name: variant}, ranks=2)
        except CheckFailed as error:  # other layouts have ranks of their own
            figures.add(name, {"what": variant.what, "failed": error.message})


def try_variants(setup: CheckSetup, figures: PartFigures, variants: Mapping[str, ModelVariant], *, ranks: int) -> bool:
    """Record the result of each variant; return True if any could be tried. Raises CheckFailed."""
    folder = setup.path / "models"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, variant in variants.items():
        try:
            text = variant_config_text(setup, name, variant.sections, ranks=ranks, precision="bf16")
            write_atomic(folder / f"{name}.yaml", text)
            if variant.exact is not None:
                exact = merge_sections(variant.sections, variant.exact)
                text = variant_config_text(setup, name, exact, ranks=ranks, precision="fp32")
                write_atomic(folder / f"{name}-exact.yaml", text)
        except RelayrunError as error:
            (folder / f"{name}.yaml").unlink(missing_ok=True)
            figures.add(name, {"what": variant.what, "not_measured": error.message})
    if not any(folder.iterdir()):
        return False
    found = run_and_record_program(setup, figures, "models:train_every_config", ranks=ranks, configs=folder)
    for name, one in found.items():
        figures.add(name, {"what": variants[name].what} | one)
    return True


def variant_config_text(setup: CheckSetup, name: str, sections: Sections, *, ranks: int, precision: str) -> str:
    """Return the resolved run config of a variant. Raises ConfigError."""
    sizes = setup.sizes
    common = {
        "model": sizes.resumed_model,
        "training": {
            "steps": 100,
            "micro_batch_size": sizes.resumed_batch,
            "global_batch_size": sizes.resumed_batch * ranks,
            "seq_length": sizes.resumed_seq_length,
            "precision": precision,
        },
        "optimizer": {"lr": 3e-3, "lr_warmup_steps": 1},
        "parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "job": {"time": "01:00:00", "ntasks_per_node": ranks, "gpus_per_node": min(ranks, setup.gpus)},
    }
    made = merge_sections(runs.check_run_values(setup, f"models-{name}", common), sections)
    if made["model"].get("transformer", {}).get("multi_latent_attention"):  # it has no grouped queries
        made["model"]["num_query_groups"] = made["model"]["num_attention_heads"]
    return resolve.dump_run_config(runs.compose_values(setup, made))
