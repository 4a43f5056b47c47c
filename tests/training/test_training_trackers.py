"""A run of three attempts as W&B (the real client, offline) and TensorBoard have it: the first is killed after
progress, in the second the W&B service is away. No file of the run holds a secret of the environment."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from relayrun.control.rundir import merged_metrics
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.train.reporting.trackers import offline_wandb_files, wandb_history
from tests.waiting import wait_for

from .conftest import Harness

pytestmark = pytest.mark.slow

SECRETS = {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567", "HF_TOKEN": "hf_ThisIsASecretOfTheEnvironment"}


def files_with(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_one_run_over_three_attempts_without_gap_or_repeat_and_no_secret(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    made = harness(
        job={"ntasks_per_node": 1},
        training={"steps": 60, "eval_interval": 7, "eval_steps": 1},
        checkpoint={"interval": 20},
        tracking={"tensorboard": True},
    )
    killed = made.start(inject="step-delay=0.2")
    killed.wait_for_iteration(45)
    wait_for(lambda: resume_point(made.run).iteration >= 40, words=killed.output)  # what follows is computed again
    killed.processes[0].kill()
    killed.wait()
    with monkeypatch.context() as service_away:
        service_away.setenv("WANDB_MODE", "online")
        service_away.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        second = made.start()
    second.wait_for_iteration(52)
    second.signal(signal.SIGUSR2)
    assert second.wait() == [0], second.output()
    third = made.train(prefix=[sys.executable, "-m", "tests.training.patient_feeds", "--"])
    assert third.outcome is not None
    assert third.outcome.outcome == "done"

    (stream,) = json.loads(made.run.streams.read_text())
    files = offline_wandb_files(made.run.path / "wandb", stream["id"])
    assert set(files) == set((made.run.path / "wandb").glob("offline-run-*/*.wandb"))
    rows = [row for path in files for row in wandb_history(path)]
    assert [row["_step"] for row in rows] == list(range(1, 61))
    merged = {line["iteration"]: line for line in merged_metrics.valid_lines(made.run) if "loss" in line}
    assert [row["train/loss"] for row in rows] == [merged[k]["loss"] for k in range(1, 61)]
    assert [row["_timestamp"] for row in rows[:40]] == pytest.approx(
        [merged[k]["time"] for k in range(1, 41)], abs=0.01
    )
    assert {row["_step"] for row in rows if "validation/held-out" in row} == {*range(7, 61, 7), 60}

    events = [
        event
        for path in sorted((made.run.tensorboard / stream["id"]).iterdir())
        for event in EventFileLoader(str(path)).Load()
        if event.summary.value
    ]
    assert [event.step for event in events] == list(range(1, 61))
    assert {"train/loss", "train/lr", "speed/tokens_per_second"} <= {value.tag for value in events[0].summary.value}
    assert f"W&B is on (offline): project tests, run tiny, id {stream['id']}" in third.output()

    for secret in SECRETS.values():
        assert files_with(made.run.path, secret) == []
    assert files_with(made.run.path, "train/loss")  # the search does find what is there


@pytest.mark.long
def test_a_rollback_by_policy_is_a_fork(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = harness(
        job={"ntasks_per_node": 1},
        training={"steps": 16, "on_nan": "rollback"},
        checkpoint={"interval": 5},
        tracking={"tensorboard": True},
    )
    made.train(inject="nan-sample=50,step-delay=0.6")  # iteration 7; back to 5
    first, fork = json.loads(made.run.streams.read_text())
    assert (fork["forked_from"], fork["fork_iteration"], fork["first_attempt"], fork["rollback"]) == (
        first["id"],
        5,
        1,
        1,
    )
    rows = {
        stream["id"]: [
            row for path in offline_wandb_files(made.run.path / "wandb", stream["id"]) for row in wandb_history(path)
        ]
        for stream in (first, fork)
    }
    old = [row["_step"] for row in rows[first["id"]]]
    assert old == list(range(1, len(old) + 1))
    assert len(old) <= 7  # fewer where the feed started after the rollback
    merged = [(line["iteration"], line["loss"]) for line in merged_metrics.valid_lines(made.run) if "loss" in line]
    assert [(row["_step"], row["train/loss"]) for row in rows[fork["id"]]] == merged
    assert len(merged) == 16
