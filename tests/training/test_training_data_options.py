"""Data options in real training: a split, documents kept apart; over two layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from relayrun.files import read_json


@pytest.mark.slow
def test_two_layouts_train_alike_with_every_data_option(harness: Callable[..., Any]) -> None:
    """From one checkpoint, data-parallel and pipeline ranks see the same samples and masks."""
    data = {
        "tokenizer": "none",
        "datasets": ["none"],
        "split": 0.05,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
    }
    first = harness(
        data=data,
        model={"hidden_dropout": 0.0, "attention_dropout": 0.0},
        training={"steps": 1},
        optimizer={"lr_decay_style": "constant", "lr_warmup_steps": 0},
    )
    first.train()
    losses, evaluations = [], []
    for pipeline in (1, 2):
        made = harness()
        shutil.rmtree(made.run.path)
        shutil.copytree(first.run.path, made.run.path)
        made.config = first.config | {
            "training": first.config["training"] | {"steps": 3, "micro_batch_size": 4 // pipeline, "eval_steps": 1},
            "parallel": {"pipeline_model_parallel_size": pipeline},
        }
        made.revision = 2
        made.write_config()
        attempt = made.train()
        steps = attempt.steps()
        assert sorted(steps) == [2, 3]
        losses.append([step["loss"] for step in steps.values()])
        (evaluation,) = attempt.evaluations().values()
        assert sorted(evaluation) == ["held-out", "train"]  # by path, and what the split holds out
        evaluations.append(list(evaluation.values()))
        state = read_json(attempt.directory.data)
        assert state["datasets"]["train"]["order"] == "window"
        assert state["consumed_samples"] == 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
