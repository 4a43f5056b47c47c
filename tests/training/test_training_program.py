"""The training program from outside: what it obeys, what it leaves, what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.records import StartTimes
from relayrun.files import read_json_lines
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter
from tests.waiting import wait_for

Make = Callable[..., Any]

pytestmark = pytest.mark.slow


def answer(run: Any, name: str) -> dict[str, Any]:
    path = run.triggers / f"{name}.done"
    wait_for(path.exists, words=f"{path} is written")
    return json.loads(path.read_text())


def test_triggers_save_and_exit_are_obeyed_and_answered(harness: Make) -> None:
    made = harness(training={"steps": 100_000})
    triggers.touch_trigger(made.run, "save")  # there before the ranks are
    attempt = made.start()
    first = answer(made.run, "save")
    assert (first["iteration"], first["result"]) == (1, "saved")
    attempt.wait_for_iteration(first["iteration"] + 2)
    assert [beat.phase for beat in attempt.heartbeats()] == ["step"], "one node: one heartbeat"
    wait_for(lambda: attempt.heartbeats()[0].save_p95 is not None)  # of a step after the save: one a second is written
    assert attempt.heartbeats()[0].save_p95 == attempt.commits[0].seconds
    attempt.signal(signal.SIGUSR1)

    def stacks() -> list[str]:
        return [path.read_text() for path in sorted(made.run.stacks(1).glob("rank-*.txt"))]

    wait_for(lambda: ["__main__.py" in text for text in stacks()] == [True, True], words=stacks)
    assert ["loop.py" in text and "__main__.py" in text for text in stacks()] == [True, True], stacks()
    assert not (made.run.triggers / "save").exists()
    triggers.touch_trigger(made.run, "exit")
    assert attempt.wait() == [0, 0], attempt.output()
    outcome = attempt.outcome
    assert outcome.outcome == "exit"
    assert outcome.reason.startswith("exit trigger by ")
    last = answer(made.run, "exit")
    assert (last["iteration"], last["result"]) == (outcome.iteration, "saved")
    assert not (made.run.triggers / "exit").exists()
    assert [commit.iteration for commit in attempt.commits] == [1, outcome.iteration]
    folder = made.run.checkpoint(outcome.iteration)
    assert attempt.commits[-1].files == {path.name: path.stat().st_size for path in folder.iterdir()}
    files = [f"__{rank}_{thread}.distcp" for rank in range(2) for thread in range(2)]
    for step in attempt.steps().values():
        parts = step["data_seconds"] + step["forward_backward_seconds"] + step["optimizer_seconds"]
        assert 0 < parts <= step["step_seconds"]
        assert step["model_tflops_per_gpu"] > 0
        assert step["mfu"] is None
        assert step["memory_bytes"] > 1e7
        assert (step["save_seconds"] > 0) == (step["iteration"] == 2), "after the save at iteration 1"
    hashes = {"checksums.json", "__0.checksums.jsonl", "__1.checksums.jsonl"}
    assert {"common.pt", "metadata.json", ".metadata", *files, *hashes} == set(attempt.commits[-1].files)
    started = StartTimes.read(attempt.directory.started)
    assert started is not None
    times = list(vars(started).values())
    assert times == sorted(times)
    assert resume_point(made.run).iteration == outcome.iteration
    assert made.run.tracker.read_text().strip() == str(outcome.iteration)


@pytest.mark.long
def test_asked_to_leave_before_the_first_iteration_it_leaves_and_resumes_as_if_nothing_was(harness: Make) -> None:
    """A signal while Python starts is ignored, one during the imports is remembered; the stop file always counts."""
    made = harness(training={"steps": 3})
    attempt = made.start(imported=False)
    attempt.signal(signal.SIGUSR2)
    attempt.directory.stop.write_text("SIGUSR2\n")
    assert attempt.wait() == [0, 0], attempt.output()
    outcome = attempt.outcome
    assert (outcome.outcome, outcome.iteration) == ("saved", 0)
    assert "stop file: SIGUSR2" in outcome.reason
    assert attempt.steps() == {}
    assert attempt.commits == []

    done = made.train()
    assert done.outcome.outcome == "done"
    assert [commit.iteration for commit in done.commits] == [3]


def test_evaluation_changes_nothing_in_training(harness: Make) -> None:
    settings = {"steps": 12}
    plain = harness(training=settings).train()
    evaluated = harness(training=settings | {"eval_interval": 1, "eval_steps": 3}).train()
    assert len(evaluated.evaluations()) == 12
    assert list(plain.evaluations()) == [12], "the last iteration always evaluates"
    for iteration, step in plain.steps().items():
        assert step["loss"].hex() == evaluated.steps()[iteration]["loss"].hex()
        assert step["grad_norm"].hex() == evaluated.steps()[iteration]["grad_norm"].hex()


def test_an_evaluation_that_the_job_has_no_time_for_is_not_begun(harness: Make) -> None:
    """None was measured, so its length follows from the first step's; the attempt saves and leaves in time."""
    made = harness(training={"steps": 6, "eval_interval": 2, "eval_steps": 1})
    prefix = [sys.executable, "-m", "tests.training.long_evaluation", "--"]
    attempt = made.start(prefix=prefix, job_end_time=time.time() + 3600)
    assert attempt.wait() == [0, 0], attempt.output()
    assert (attempt.outcome.outcome, attempt.outcome.reason) == ("saved", "time limit near")
    assert (resume_point(made.run).iteration, attempt.evaluations()) == (1, {})


def test_an_overtaken_attempt_publishes_nothing(harness: Make) -> None:
    made = harness(training={"steps": 100_000})
    attempt = made.start()
    attempt.wait_for_iteration(2)
    made.begin()
    triggers.touch_trigger(made.run, "save")
    assert attempt.wait() == [3, 3], attempt.output()
    outcome = attempt.outcome
    assert outcome.outcome == "fatal"
    assert "superseded: attempt 2 has begun" in outcome.reason
    assert [failure.rank for failure in attempt.failures()] == [0, 1]
    assert all("FatalTrainingError: " in failure.error for failure in attempt.failures())
    assert attempt.commits == []
    assert [path.name for path in made.run.checkpoints.iterdir()] == [".staging"]


def test_a_save_that_fails_on_one_rank_stops_nothing_until_the_end(harness: Make) -> None:
    """Rank 1 may write no file above 8 kB: its part of the checkpoint fails, rank 0's does not."""
    made = harness(training={"steps": 10}, checkpoint={"interval": 4})
    attempt = made.start(file_limit=8192)
    assert attempt.wait() == [1, 1], attempt.output()
    assert sorted(attempt.steps()) == list(range(1, 11))
    output = attempt.output()
    for iteration, times in ((4, 1), (8, 1), (10, 3)):
        assert output.count(f"SAVE FAILED at iteration {iteration}: rank 1: ") == times
    assert [line["iteration"] for line in read_json_lines(attempt.directory.failed_saves)] == [4, 8, 10, 10, 10]
    assert "iteration 10 could not be saved" in output
    assert "Traceback" not in output
    assert attempt.outcome is None
    assert attempt.commits == []
    assert resume_point(made.run).iteration == 0


def test_a_loss_that_is_no_number_is_fatal_and_not_saved(harness: Make) -> None:
    made = harness(optimizer={"lr": 1e30, "lr_warmup_steps": 0})
    attempt = made.start()
    assert attempt.wait() == [3, 3], attempt.output()
    assert attempt.outcome.outcome == "fatal"
    assert "nan" in attempt.outcome.reason
    assert attempt.commits == []


def test_other_data_than_the_checkpoint_saw_are_fatal(harness: Make, tmp_path: Path) -> None:
    made = harness(training={"steps": 4})
    writer = ShardWriter(tmp_path / "shard", np.uint16)
    writer.add(np.arange(600) % 300, [600])
    writer.finish()
    first = made.train()
    made.config["training"]["steps"] = 8
    made.revision = 2
    made.write_config()

    original = made.run.manifest.read_text()
    shards = {"train": [tmp_path / "shard"]}
    Manifest.build(shards, {}, vocabulary_size=300, eod=0, tokenizer="none").write(made.run.manifest)
    other = made.start()
    assert other.wait() == [3, 3], other.output()
    assert other.outcome.outcome == "fatal"
    assert "fingerprint" in other.outcome.reason
    assert other.outcome.iteration == 4

    made.run.manifest.write_text(original)
    shutil.rmtree(other.directory.path)
    prefix = Manifest.read(made.run.manifest).datasets["train"].shards[0].prefix
    Path(f"{prefix}.bin").rename(tmp_path / "away")
    try:
        missing = made.start()
        assert missing.wait() == [1, 1], missing.output()
        assert missing.outcome is None, "a file system may be away for a while: not fatal"
    finally:
        (tmp_path / "away").rename(f"{prefix}.bin")
    assert first.outcome.outcome == "done"
