"""Run by test_training_oracle.py: the terms of the losses of several configs, each in its layout against one rank."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.lab import loss_oracle, loss_terms  # noqa: E402
from relayrun.train.model import cpu_patches, experts  # noqa: E402

BALANCED = {
    "num_moe_experts": 64,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 1024,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.01, 0.01],
    "moe_z_loss_coeff": 0.001,
}


def config(ranks: int, sections: dict[str, dict[str, Any]]) -> RunConfig:
    """A large config, with changes."""
    model = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
    training = {"steps": 9, "micro_batch_size": 4, "global_batch_size": 512, "seq_length": 4096, "precision": "bf16"}
    values: dict[str, Any] = {
        "project": "tests",
        "name": "oracle",
        "model": model | {"num_query_groups": 8},
        "data": {"tokenizer": "none", "datasets": ["none"]},
        "training": training,
        "optimizer": {"lr": 1e-3, "lr_warmup_steps": 0},
        "checkpoint": {"interval": 1},
        "parallel": {},
        "job": {"time": "1", "ntasks_per_node": ranks},
        "cluster": {"name": "t", "scheduler": "local"},
    }
    return RunConfig.model_validate(values | {name: values[name] | fields for name, fields in sections.items()})


def break_routers(fault: str) -> None:
    """Undo a correction of the routers' losses."""
    scale = experts.RouterLosses.scale

    def broken(self: experts.RouterLosses, factor: float) -> None:
        self._replicas = 1 if fault == "replicas" else self._replicas
        scale(self, 1.0 if fault == "tokens" else factor)

    experts.RouterLosses.scale = broken  # type: ignore[method-assign]


def main() -> None:
    folder, cases, fault = json.loads(sys.argv[4])
    cpu_patches.patch_for_cpu()
    break_routers(fault)
    answers = []
    for ranks, sections in cases:
        answers.append(loss_terms.compare(*loss_oracle.shrink(config(ranks, sections))))
    with open(f"{folder}/answers.json", "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
