"""Saves beside training: what they hold, when they count, and what waits for them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.train.checkpoint.async_writer import BACKGROUND_NICE, BackgroundSave, ThreadedWriter
from tests.checkpoints import assert_same_bytes
from tests.waiting import wait_for

Make = Callable[..., Any]

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def test_a_file_that_one_thread_cannot_write_fails_the_save(tmp_path: Path) -> None:
    """torch's own writer loses the error of every thread but the first, and the tensors of its file."""
    state = {"one": torch.ones(3), "two": torch.zeros(5)}
    with pytest.warns(UserWarning, match="single process"):
        state_dict_saver.save(state, storage_writer=ThreadedWriter(tmp_path / "good", 2), no_dist=True)
    assert {path.name for path in (tmp_path / "good").iterdir()} == {".metadata", "__0_0.distcp", "__0_1.distcp"}
    for name in ("__0_0.distcp", "__0_1.distcp"):
        folder = tmp_path / name
        (folder / name).mkdir(parents=True)
        with (
            pytest.raises(CheckpointException, match="Is a directory"),
            pytest.warns(UserWarning, match="single process"),
        ):
            state_dict_saver.save(state, storage_writer=ThreadedWriter(folder, 2), no_dist=True)
        assert not (folder / ".metadata").exists()


def test_no_thread_of_the_writer_spends_its_time_on_checksums_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's switch for them holds for the thread that turns it alone."""
    switches: dict[str, bool] = {}
    save = torch.save
    both = threading.Barrier(2)

    def watched(*arguments: Any, **options: Any) -> None:
        switches[threading.current_thread().name] = torch.serialization.get_crc32_options()
        both.wait(timeout=300)  # or a thread that is done already might take the other's file, too
        save(*arguments, **options)

    monkeypatch.setattr(torch, "save", watched)
    state = {"one": torch.ones(3), "two": torch.zeros(5)}
    with pytest.warns(UserWarning, match="single process"):
        state_dict_saver.save(state, storage_writer=ThreadedWriter(tmp_path, 2), no_dist=True)
    assert switches == {"writer_0": False, "writer_1": False}


@pytest.mark.parametrize("beside", [True, False])
def test_once_the_state_is_copied_a_save_beside_training_stands_behind_it_on_the_processors(beside: bool) -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: list[int] = []

    def write(copied: Callable[[], None]) -> Any:
        seen.append(nice())
        copied()
        seen.append(nice())
        threads = [threading.Thread(target=lambda: seen.append(nice())) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join(300)
        return "commit"

    assert BackgroundSave(1, write, beside=beside).result() == "commit"
    usual, behind = nice(), min(19, nice() + (BACKGROUND_NICE if beside else 0))  # 19 is the most there is
    assert seen == [usual, behind, behind, behind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        pytest.param(OVERLAP, {"precision": "bf16"}, id="distributed-optimizer-bf16-overlap"),
        pytest.param({}, {}, id="adam-fp32", marks=pytest.mark.long),
    ],
)
def test_a_save_beside_training_holds_the_state_of_its_own_iteration(
    harness: Make, parallel: dict[str, Any], training: dict[str, Any]
) -> None:
    """Its bytes are written when training is many steps further, and are those of a save that stops training."""
    settings = {"training": {"steps": 12} | training, "parallel": parallel}
    stopping = harness(**settings, checkpoint={"interval": 4, "async_save": False, "writer_threads": 1})
    reference = stopping.train()
    beside = harness(**settings, checkpoint={"interval": 4})
    attempt = beside.start(inject="slow-save=4:3")
    attempt.wait_for_iteration(8)
    assert resume_point(beside.run).iteration == 0
    assert attempt.wait() == [0, 0], attempt.output()
    assert [commit.iteration for commit in attempt.commits] == [4, 8, 12]
    assert attempt.commits[0].time > attempt.steps()[8]["time"]
    for iteration in (4, 8, 12):
        assert_same_bytes(stopping.run.checkpoint(iteration), beside.run.checkpoint(iteration))
    losses = [{number: step["loss"] for number, step in run.steps().items()} for run in (reference, attempt)]
    assert losses[0] == losses[1]
    assert "iteration 8 is to be saved, and the save of iteration 4 is still under way: waiting" in attempt.output()
    assert attempt.steps()[9]["save_seconds"] > 1, "an interval's save waits for the one before"
    assert attempt.steps()[7]["save_seconds"] == 0
    assert reference.steps()[5]["save_seconds"] > 0
    assert attempt.output().count("host memory for saves: ") == 1, "all of it, before the first save"
    assert "GiB of host memory" not in attempt.output()
    assert attempt.steps()[2]["save_seconds"] > 0, "and its time counts"
    assert "host memory" not in reference.output()
    assert reference.steps()[2]["save_seconds"] == 0


@pytest.mark.slow
def test_triggers_and_signals_during_a_save_wait_for_it_and_then_save_what_was_trained(harness: Make) -> None:
    made = harness(training={"steps": 100_000}, checkpoint={"interval": 4, "keep_last": 10})
    attempt = made.start(inject="slow-save=4:2,step-delay=0.1")
    attempt.wait_for_iteration(5)
    triggers.touch_trigger(made.run, "save")
    answered = made.run.triggers / "save.done"
    wait_for(answered.exists, words=attempt.output)
    answer = json.loads(answered.read_text())
    assert answer["result"] == "saved"
    assert answer["iteration"] > 5, "of the state after the trigger"
    assert answer["iteration"] in [commit.iteration for commit in attempt.commits], "durable when answered"
    attempt.signal(signal.SIGUSR2)
    assert attempt.wait() == [0, 0], attempt.output()
    saved = [commit.iteration for commit in attempt.commits]
    assert saved[:2] == [4, 8]
    assert saved == sorted(set(saved))
    assert (attempt.outcome.outcome, attempt.outcome.iteration) == ("saved", saved[-1])


@pytest.mark.slow
def test_a_kill_during_a_save_leaves_nothing_that_counts(harness: Make) -> None:
    made = harness(training={"steps": 8}, checkpoint={"interval": 4})
    attempt = made.start(inject="publish-delay=60,step-delay=0.1")
    attempt.wait_for_iteration(6)
    staged = made.run.staging(1) / "iter_0000004"
    wait_for((staged / "metadata.json").exists, words=attempt.output)
    attempt.signal(signal.SIGKILL)
    attempt.wait()
    assert [path.name for path in made.run.checkpoints.iterdir()] == [".staging"]
    assert resume_point(made.run).iteration == 0
    done = made.train()
    assert [commit.iteration for commit in done.commits] == [4, 8]
    assert not made.run.staging(1).exists()
