"""Runs of Megatron-LM of which no plan can be made, or that would begin with what they cannot load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.trainers import megatron_lm_log
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from tests.config.test_trainer_configs import MEGATRON, written
from tests.crafted import Command
from tests.history import make_history

TRAINING = {"steps": 10, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": 8}


def checkout(folder: Path) -> dict[str, Any]:
    """The section of a folder that looks like a checkout of Megatron-LM."""
    (folder / "checkout/megatron/training").mkdir(parents=True)
    (folder / "checkout/megatron/training/arguments.py").write_text("--trigger-path")
    (folder / "checkout/pretrain_gpt.py").write_text("")
    return MEGATRON["megatron_lm"] | {"dir": str(folder / "checkout")}


def save(folder: Path, iteration: int) -> Path:
    rank = folder / f"iter_{iteration:07d}" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"iteration": iteration}, rank / "model_optim_rng.pt")
    megatron_lm_log.write_tracker(folder, iteration)
    return rank.parent


def refused(path: Path, load: object, *overrides: str) -> list[str]:
    """What a submit would refuse of a checkpoint to begin with."""
    config = resolve.load_run_config(path, [f"checkpoint.load={load}", *overrides])
    found = submission.check_submission(config, intent=SubmitIntent()).findings.errors
    return [finding.words for finding in found if finding.name == "run.initial_checkpoint"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"dir": "/gone"}, "is no checkout of Megatron-LM"), ({"args_file": "/gone.sh"}, "No such file")],
)
def test_what_no_plan_can_be_made_of_is_an_error_and_for_programs_a_finding(
    changes: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, MEGATRON, megatron_lm=checkout(tmp_path) | changes)
    assert main(["check", str(path)]) == 1
    assert words in capsys.readouterr().err
    assert main(["check", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert (report["refused"], finding["level"], words in finding["words"]) == (True, "error", True)


def test_a_checkpoint_behind_the_last_step_is_refused_but_not_its_weights(tmp_path: Path) -> None:
    path = written(tmp_path, MEGATRON, megatron_lm=checkout(tmp_path), checkpoint={"interval": 5}, training=TRAINING)
    newest = save(tmp_path / "theirs", 10)
    (words,) = refused(path, newest.parent)
    assert words == f"{newest.parent} stands at iteration 10, and training.steps is 10"
    assert refused(path, newest.parent, "checkpoint.finetune=true") == []


def test_a_checkpoint_that_names_more_than_values_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, MEGATRON, megatron_lm=checkout(tmp_path), checkpoint={"interval": 5})
    newest = save(tmp_path / "theirs", 5)
    torch.save(Command(tmp_path / "was-run"), newest / "mp_rank_00/model_optim_rng.pt")
    (words,) = refused(path, newest.parent)
    assert words.startswith("this checkpoint is not loaded: mp_rank_00/model_optim_rng.pt: it names posix.mkdir, which")
    assert not (tmp_path / "was-run").exists()


def test_a_native_run_is_not_taken_for_a_checkpoint_of_megatron_lm(tmp_path: Path) -> None:
    path = written(tmp_path, MEGATRON, megatron_lm=checkout(tmp_path), checkpoint={"interval": 5})
    native = make_history(tmp_path / "native", lines=30, attempts=1)
    save(native.checkpoints, 20)
    for load in (native.path, native.checkpoints, native.checkpoint(20)):
        (words,) = refused(path, load)
        assert words == f"{native.path} is a run of trainer native, whose checkpoints Megatron-LM cannot load"
