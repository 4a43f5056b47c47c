"""`training.loss` and `model.spec` by import path, in real training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Harness

pytestmark = [pytest.mark.slow, pytest.mark.long]

Make = Callable[..., Harness]
CODE = "tests.training.user_code"
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
MASKED = {"tokenizer": "none", "datasets": ["none"], "eod_mask_loss": True}


def trained(harness: Make, **sections: dict[str, Any]) -> dict[int, tuple[float, float]]:
    made = harness(**({"training": {"steps": 3, "eval_steps": 1}} | sections))
    attempt = made.train()
    found = {iteration: (step["loss"], step["grad_norm"]) for iteration, step in attempt.steps().items()}
    (evaluation,) = attempt.evaluations().values()
    return found | {0: (evaluation["held-out"], 0.0)}


def near(ones: dict[int, tuple[float, float]], others: dict[int, tuple[float, float]], factor: float = 1.0) -> bool:
    return all(abs(factor * one - other) < 5e-6 for n in ones for one, other in zip(ones[n], others[n], strict=True))


@pytest.mark.parametrize("parallel", [{}, TP2, PP2, {"context_parallel_size": 2}], ids=["DP2", "TP2", "PP2", "CP2"])
@pytest.mark.parametrize("mean", [None, "micro_batch", "sample", "token"], ids=str)
def test_a_loss_of_ones_own_has_the_mean_of_the_run(harness: Make, parallel: dict[str, Any], mean: str | None) -> None:
    """The same cross-entropy from logits gives the same run; twice the losses give twice loss and gradient."""
    sections: dict[str, Any] = {"parallel": parallel, "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "lr_warmup_steps": 0}}
    sections["data"] = MASKED if mean else {}
    training = {"steps": 2, "eval_steps": 1, "loss_mean": mean}
    plain = trained(harness, **sections, training=training)
    assert near(plain, trained(harness, **sections, training=training | {"loss": f"{CODE}:cross_entropy"}))
    doubled = trained(harness, **sections, training=training | {"loss": f"{CODE}:doubled"})
    assert near({1: plain[1]}, {1: doubled[1]}, factor=2.0)


def test_a_loss_of_logits_trains(harness: Make) -> None:
    plain = trained(harness)
    own = trained(harness, training={"steps": 3, "eval_steps": 1, "loss": f"{CODE}:z_loss"})
    assert 0.1 < own[1][0] - plain[1][0] < 1.0


@pytest.mark.parametrize("spec", ["same_layers", "same_block", "own_model"])
@pytest.mark.parametrize("parallel", [{}, TP2, PP2], ids=["DP2", "TP2", "PP2"])
def test_the_same_layers_by_ones_own_function_are_the_same_run(
    harness: Make, spec: str, parallel: dict[str, Any]
) -> None:
    plain = trained(harness, parallel=parallel)
    model = harness().config["model"] | {"spec": f"{CODE}:{spec}"}
    assert trained(harness, parallel=parallel, model=model) == plain


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"training": {"loss": f"{CODE}:of_nothing"}}, "of_nothing takes labels; a loss takes either logits or losses"),
        ({"training": {"loss": f"{CODE}:mean_of_all"}}, "mean_of_all returned []; a loss returns one of each token"),
        ({"training": {"loss": "no_such_module:x"}}, "no_such_module:x cannot be imported"),
        ({"model": {"spec": f"{CODE}:no_model"}}, "no_model returned str, which is no ModuleSpec"),
        ({"model": {"spec": f"{CODE}:nothing"}}, "nothing cannot be imported: AttributeError"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_error_that_ends_the_chain(
    harness: Make, sections: dict[str, dict[str, Any]], said: str
) -> None:
    made = harness()
    for section, changes in sections.items():
        made.config[section] = made.config[section] | changes
    attempt = made.start()
    assert attempt.wait() == [3, 3], attempt.output()
    assert said in attempt.outcome.reason
