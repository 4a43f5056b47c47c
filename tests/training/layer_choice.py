"""Run by test_training_layers.py in a process of its own: imports megatron-core, which warns. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.config.sections.model import TransformerSection  # noqa: E402
from relayrun.errors import FatalTrainingError  # noqa: E402
from relayrun.train.model import kernels as model_kernels  # noqa: E402
from relayrun.train.model.gpt import layers  # noqa: E402

CONFIG: dict[str, Any] = {
    "project": "tests",
    "name": "layers",
    "model": {
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "num_query_groups": 1,
    },
    "data": {"tokenizer": "none", "datasets": ["none"]},
    "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2, "seq_length": 16},
    "optimizer": {"lr": 1e-2},
    "checkpoint": {"interval": 10},
    "job": {"time": "10", "ntasks_per_node": 2},
    "cluster": {"name": "test", "scheduler": "local"},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "auto": {},
    "auto, masked": {"data": {"reset_attention_mask": True}},
    "local": {"training": {"transformer_impl": "local"}},
    "transformer_engine": {"training": {"transformer_impl": "transformer_engine"}},
    "context parallel": {"parallel": {"context_parallel_size": 2}},
    "window": {"model": {"transformer": {"window_size": [4, 0]}}},
    "window, context parallel": {
        "model": {"transformer": {"window_size": [4, 0]}},
        "parallel": {"context_parallel_size": 2},
    },
}
KERNELS: dict[str, dict[str, dict[str, Any]]] = {
    "auto": {},
    "positions": {"data": {"reset_position_ids": True}},
    "off": {"training": {"apply_rope_fusion": False, "gradient_accumulation_fusion": False}},
    "rope": {"training": {"apply_rope_fusion": True}},
    "sum": {"training": {"gradient_accumulation_fusion": True}},
}


def choice(changes: dict[str, dict[str, Any]]) -> str:
    sections = {name: CONFIG.get(name, {}) | values for name, values in changes.items()}
    try:
        return layers.layer_implementation(RunConfig.model_validate_json(json.dumps(CONFIG | sections)))
    except FatalTrainingError as error:
        return error.message


def kernels(changes: dict[str, dict[str, Any]], device: str) -> dict[str, bool] | str:
    """The fused kernels that are used, or why one that is asked for is not."""
    sections = {name: CONFIG.get(name, {}) | values for name, values in changes.items()}
    try:
        return model_kernels.choose_fused_kernels(
            RunConfig.model_validate_json(json.dumps(CONFIG | sections)), torch.device(device)
        )
    except FatalTrainingError as error:
        return error.message


def overlap(*, new: bool) -> dict[str, Any]:
    """What TransformerEngine is asked for to overlap, before its version 2.7 and since."""
    asked: dict[str, Any] = {}

    def since(shape: list[int], tp_size: int, quantization_modes: list[Any], bootstrap_backend: str) -> None:
        asked.update(shape=shape, tp_size=tp_size, modes=quantization_modes, backend=bootstrap_backend)

    def before(shape: list[int], tp_size: int, use_fp8: bool, bootstrap_backend: str) -> None:
        asked.update(shape=shape, tp_size=tp_size, fp8=use_fp8, backend=bootstrap_backend)

    module = types.ModuleType("transformer_engine.pytorch.module")
    modes = types.SimpleNamespace(FP8="fp8", NONE="none")
    initialize = since if new else before
    module.base = types.SimpleNamespace(initialize_ub=initialize, UserBufferQuantizationMode=modes)  # type: ignore[attr-defined]
    sys.modules |= {"transformer_engine.pytorch.module": module}
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules.setdefault(name, types.ModuleType(name))
    parallel = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
    config = RunConfig.model_validate_json(json.dumps(CONFIG | parallel | {"model": CONFIG["model"] | GROUPS}))
    model_kernels.init_tp_overlap_buffers(config, types.SimpleNamespace(fp8=None))
    return asked


class Hopper:
    """TransformerEngine's answers on such a GPU; its version knows no scales by blocks."""

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        return True, ""

    @staticmethod
    def is_mxfp8_available() -> tuple[bool, str]:
        return False, "a GPU of compute capability 10.0 is needed"


def in_8_bits(recipe: str | None, *, known: bool = True) -> str:
    """What a rank says of a recipe. `known`: whether the installed version has it."""

    def made(_: Any) -> None:
        if not known:
            raise ValueError("no such recipe")

    model_kernels.fp8_utils.get_fp8_recipe = made
    settings = TransformerSection.model_validate({"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {})
    try:
        model_kernels.check_fp8(settings, types.SimpleNamespace())
    except FatalTrainingError as error:
        return error.message
    return "can"


GROUPS = {"num_query_groups": 2}
torch.distributed.get_rank = lambda group=None: 0
fused: dict[str, Any] = {}
for there in (False, True):
    model_kernels.rope_utils.fused_apply_rotary_pos_emb = print if there else None
    model_kernels.layers._grad_accum_fusion_available = there
    for kind in ("cpu", "cuda"):
        for name, values in KERNELS.items():
            fused[f"{name}, {kind}, {'there' if there else 'missing'}"] = kernels(values, kind)
fused["overlap"] = [overlap(new=new) for new in (False, True)]

without = in_8_bits("delayed")
model_kernels.fp8_utils.FP8GlobalStateManager = Hopper
model_kernels.fp8_utils.get_te_version = lambda: "2.2"
recipes = {str(recipe): in_8_bits(recipe) for recipe in (None, "delayed", "tensorwise", "blockwise", "mxfp8")}
recipes |= {"missing": without, "unknown": in_8_bits("tensorwise", known=False)}

results: dict[str, Any] = {"fused": fused, "fp8": recipes}
for installed in (False, True):
    for gpu in (False, True):
        layers.HAVE_TE = installed
        torch.cuda.is_available = lambda gpu=gpu: gpu
        results[f"TE {installed}, GPU {gpu}"] = {name: choice(changes) for name, changes in CASES.items()}
print(json.dumps(results))
sys.stdout.flush()
os._exit(0)
