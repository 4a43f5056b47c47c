"""Settings of optimizers, losses and layers of a user's own: what goes together, and what is refused at the submit."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.model import ModelSection
from relayrun.config.sections.optimizer import OptimizerSection
from relayrun.config.sections.training import TrainingSection

RUN: dict[str, Any] = {
    "project": "tests",
    "name": "own",
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    },
    "data": {"tokenizer": "none", "datasets": ["none"]},
    "training": {"steps": 20, "micro_batch_size": 2, "global_batch_size": 8, "seq_length": 64},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"interval": 1000},
    "job": {"time": "10", "ntasks_per_node": 2},
    "cluster": {"name": "test", "scheduler": "local"},
}


def optimizer(**changes: Any) -> OptimizerSection:
    return OptimizerSection.model_validate({"lr": 1e-3} | changes)


def test_a_class_by_import_path_survives_a_revision() -> None:
    found = optimizer(**{"class": "torch.optim:NAdam", "arguments": {"betas": [0.9, 0.99]}})
    assert (found.class_path, found.kind) == ("torch.optim:NAdam", "torch.optim:NAdam")
    again = OptimizerSection.model_validate(yaml.safe_load(yaml.safe_dump(found.model_dump(mode="json"))))
    assert again == found
    assert (optimizer().class_path, optimizer().kind, optimizer(name="muon").kind) == (None, "adam", "muon")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"class": "a:B", "name": "muon"}, "name muon and class a:B are two optimizers; leave out one"),
        ({"class": "a:B", "adam_beta2": 0.9}, "adam_beta2 is Adam's; write what a:B takes into arguments"),
        ({"class": "a:B", "arguments": {"lr": 1}}, "arguments names lr; set optimizer.lr itself"),
        ({"class": "a.b"}, "String should match pattern"),
        ({"arguments": {"betas": 1}}, "arguments are those of `class`, which is not set"),
        ({"muon_momentum": 0.9}, "muon_momentum needs name muon"),
        ({"name": "muon", "muon_tp_mode": "blockwise"}, "Input should be 'duplicated'"),
        ({"groups": [{"match": "*"}]}, "match \\* sets nothing; give lr_mult or weight_decay"),
        ({"groups": [{"match": "*", "lr": 1.0}]}, "Extra inputs are not permitted"),
        ({"groups": [{"match": "*", "lr_mult": -1.0}]}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        optimizer(**changes)


@pytest.mark.parametrize("own", [{"name": "muon"}, {"class": "a:B"}])
def test_whole_parameters_and_the_distributed_optimizer_are_refused_with_the_setting(own: dict[str, Any]) -> None:
    values = RUN | {"optimizer": {"lr": 1e-3} | own}
    assert RunConfig.model_validate(values).optimizer.kind != "adam"
    with pytest.raises(ValidationError, match=r"set parallel\.use_distributed_optimizer=false"):
        RunConfig.model_validate(values | {"parallel": {"use_distributed_optimizer": True}})


@pytest.mark.parametrize("path", ["loss", "a.b.C", "a:b:c", "a:", ":b", "a b:c"])
def test_what_is_no_import_path_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        TrainingSection.model_validate(RUN["training"] | {"loss": path})
    with pytest.raises(ValidationError, match="pattern"):
        ModelSection.model_validate(RUN["model"] | {"spec": path})
