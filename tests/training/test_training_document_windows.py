"""`order: document-window` in real training: packed rows are their windows alone, and a resume is exact."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.scheduler.local_srun import free_port
from relayrun.files import read_json
from tests import warm
from tests.checkpoints import assert_same_bytes

CUT = {"window": 40, "overlap": 4, "bos": 1, "eos": True, "mask_special": True}


@pytest.mark.long
def test_windows_together_are_windows_apart(tmp_path: Path) -> None:
    """Loss and gradients of rows of windows, by any packing, are those of each window in a sequence of its own."""
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "tests.training.packed_windows", str(port), str(tmp_path)]
        process = warm.start(command, stdout=log.fileno(), stderr=log.fileno())
    assert process.wait(600) == 0, (tmp_path / "log").read_text()
    found = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    for packing, figures in found.items():
        assert figures["tokens"][0] == figures["tokens"][1], packing
        assert figures["error"] < 2e-6, packing
        assert figures["gradient error"] < 2e-6, packing
    assert found["pad"]["rows"] == found["pad"]["windows"] > found["best_fit"]["rows"]


@pytest.mark.long
def test_a_run_over_packed_rows_in_pieces_and_in_another_layout_is_the_run_in_one_piece(
    harness: Callable[..., Any],
) -> None:
    """Through both epochs' border: 12 steps of 8 rows; attempts of two replicas, cut at 4 and at 8."""
    settings: dict[str, Any] = {
        "data": {"order": "document-window", "document_window": CUT},
        "model": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "training": {"steps": 12, "loss_mean": "token"},
        "optimizer": {"lr_decay_style": "constant", "lr_warmup_steps": 0},
        "checkpoint": {"interval": 4, "keep_last": 10},
    }
    whole, pieces = harness(**settings), harness(**settings)
    expected = whole.train().steps()
    for end in (4, 8, None):
        pieces.config["training"]["stop_after"] = end
        pieces.train()
    found = {number: step for attempt in pieces.attempts for number, step in attempt.steps().items()}
    assert sorted(found) == list(range(1, 13))
    for number, step in found.items():
        for name in ("loss", "grad_norm", "padding_share", "windows_per_row"):
            assert step[name].hex() == expected[number][name].hex(), (number, name)
        assert step["useful_tokens"] == round((1 - step["padding_share"]) * 8 * 64)
        assert 0 <= step["padding_share"] < 0.5
        assert step["windows_per_row"] >= 1
    name = "iter_0000012"
    assert_same_bytes(whole.run.checkpoints / name, pieces.run.checkpoints / name)

    staged = harness(**settings)
    shutil.rmtree(staged.run.path)
    shutil.copytree(whole.run.path, staged.run.path)
    for iteration in (8, 12):
        shutil.rmtree(staged.run.checkpoints / f"iter_{iteration:07}")
    staged.config = whole.config | {"parallel": {"pipeline_model_parallel_size": 2}}
    staged.revision = 2
    staged.write_config()
    base = staged.run.checkpoints / "iter_0000004"
    steps = staged.train(base_iteration=4, base_path=str(base)).steps()
    assert sorted(steps) == list(range(5, 13))
    for number, step in steps.items():
        assert step["loss"] == pytest.approx(expected[number]["loss"], rel=1e-5)
        assert step["padding_share"] == expected[number]["padding_share"]


@pytest.mark.long
def test_another_window_is_refused_by_the_ranks(harness: Callable[..., Any]) -> None:
    """A submit refuses it, too, or begins the data set anew; see tests/tokens/test_data_evolution.py."""
    made = harness(
        data={"order": "document-window", "document_window": CUT},
        training={"steps": 2},
        optimizer={"lr_decay_style": "constant", "lr_warmup_steps": 0},
        checkpoint={"interval": 1},
    )
    made.train()
    state = read_json(made.attempts[0].directory.data)
    assert state["datasets"]["train"]["order"] == "document-window"
    assert state["datasets"]["train"]["options"]["overlap"] == 4
    made.config["data"]["document_window"] = CUT | {"overlap": 5}
    made.config["training"]["steps"] = 3
    made.revision = 2
    made.write_config()
    attempt = made.start()
    assert attempt.wait() != [0, 0]
    assert "options of data set 'train' was" in "".join(failure.error for failure in attempt.failures())


SCORED = """
import json, sys
from pathlib import Path
from relayrun.config.compose.schema import EvaluationSection
from relayrun.train.export import scores
from relayrun.train.export.source_and_target import find_checkpoint
from relayrun.control.rundir.run import Run
source, model = find_checkpoint(Run(Path(sys.argv[1]))), Path(sys.argv[2])
scores.export_model(source, model)
print(json.dumps(scores.held_out_loss(source, model, EvaluationSection(interval=4), gpus=0)[0]))
"""


@pytest.mark.long
@pytest.mark.parametrize("mean", ["token", "sample"])
def test_validation_rows_have_the_loss_that_transformers_gives_their_windows(
    harness: Callable[..., Any], tmp_path: Path, mean: str
) -> None:
    """The same for one replica and for two, whose last micro-batches are filled up; the rows are counted once."""
    from tests.export.models import write_tokenizer  # which imports torch

    def made(ranks: int) -> Any:
        return harness(
            data={
                "order": "document-window",
                "document_window": CUT,
                "tokenizer": str(write_tokenizer(tmp_path / "tokenizer.json")),
            },
            # the padding of a vocabulary has a share in training's softmax alone
            model={"hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": 4},
            training={"steps": 4, "eval_interval": 4, "eval_steps": 20, "loss_mean": mean},
            optimizer={"lr": 1e-2, "lr_decay_style": "constant", "lr_warmup_steps": 0},
            checkpoint={"interval": 4},
            job={"ntasks_per_node": ranks},
        )

    one, two = made(1), made(2)
    losses = [each.train().evaluations()[4]["held-out"] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(list(one.run.data_cache.glob("*-rows.npy"))) == 2
    scored = tmp_path / "scored.py"
    scored.write_text(SCORED)
    done = warm.run([sys.executable, scored, one.run.path, tmp_path / "out"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["held-out"]["loss"] == pytest.approx(losses[0], abs=1e-5)
