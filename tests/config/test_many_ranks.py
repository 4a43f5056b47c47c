"""Settings of many ranks that cannot work are refused before submission, with the setting to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError
from relayrun.submit.check.report import check_config

RUN = Path(__file__).resolve().parents[2] / "configs" / "runs" / "llama3-70b.yaml"
PLAIN = ["data.mock_data=true", "data.reset_position_ids=false", "training.transformer_impl=auto"]
ENGINE = "training.transformer_impl=transformer_engine"


def config(*overrides: str) -> RunConfig:
    return resolve.require_native(resolve.load_run_config(RUN, [*PLAIN, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tp_comm_overlap=true"], "set\n? *training.transformer_impl=transformer_engine"),
        (
            ["parallel.tp_comm_overlap=true", "parallel.sequence_parallel=false", ENGINE],
            "tp_comm_overlap needs sequence_parallel",
        ),
        (
            ["training.apply_rope_fusion=true", "data.reset_position_ids=true"],
            "leave out training.apply_rope_fusion",
        ),
        (
            ["parallel.defer_embedding_wgrad_compute=true", "training.gradient_accumulation_fusion=false"],
            "leave out training.gradient_accumulation_fusion",
        ),
        (
            ["parallel.num_distributed_optimizer_instances=3"],
            r"4 ranks that share a part of the model .* no multiple of parallel.num_distributed_optimizer_instances 3",
        ),
        (
            ["parallel.num_distributed_optimizer_instances=2", "parallel.use_distributed_optimizer=false"],
            "num_distributed_optimizer_instances above 1 needs use_distributed_optimizer",
        ),
    ],
)
def test_what_cannot_work_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def refused(*overrides: str, **cluster: Any) -> list[str]:
    made = config(*overrides)
    made = made.model_copy(update={"cluster": made.cluster.model_copy(update={"python": None} | cluster)})
    return [finding.words for finding in check_config(made).errors if finding.name.startswith("node.")]


def test_a_kernel_that_is_missing_is_refused_where_it_is_asked_for() -> None:
    rope, total = "training.apply_rope_fusion=true", "training.gradient_accumulation_fusion=true"
    (words,) = refused(rope, transformer_engine=False)
    assert rope in words
    assert "needs TransformerEngine" in words
    assert [words for words in refused(total) if "no Apex with fused_weight_gradient_mlp_cuda" in words]
    assert [words for words in refused(total, "job.gpus_per_node=0") if "a kernel for GPUs" in words]


def test_the_state_of_the_optimizer_is_divided_within_an_instance() -> None:
    whole = config()
    assert whole.optimizer_parts == 4
    assert config("parallel.num_distributed_optimizer_instances=2").optimizer_parts == 2
