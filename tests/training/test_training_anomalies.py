"""Iterations that are skipped, rollbacks: on all ranks alike, and the same to the last bit in a replay."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.control.rundir.checkpoint_records import quarantined_checkpoints, resume_point
from relayrun.control.rundir.merged_metrics import MergedViews, valid_lines
from relayrun.files import read_json, read_json_lines
from relayrun.tokens.order.batches import TrainingProgress
from tests.checkpoints import assert_same_bytes, contents, state_tensors
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

SETTINGS: dict[str, dict[str, Any]] = {
    "training": {"steps": 16, "eval_interval": 0, "spike_window": 8},
    "parallel": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "checkpoint": {"interval": 1000, "keep_last": 100},
}
BAD = 7
"""The iteration of sample 50, in batches of 8."""


def with_policy(interval: int, **training: Any) -> dict[str, dict[str, Any]]:
    return SETTINGS | {
        "training": SETTINGS["training"] | training,
        "checkpoint": SETTINGS["checkpoint"] | {"interval": interval},
    }


def counted(run: Any) -> dict[int, dict[str, Any]]:
    lines = [line for line in valid_lines(run) if "loss" in line]
    found = {line["iteration"]: line for line in lines}
    assert len(found) == len(lines)
    assert sorted(found) == list(range(1, len(lines) + 1))
    return found


def assert_same_steps(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> None:
    assert a.keys() == b.keys()
    for iteration, line in a.items():
        for name in ("loss", "grad_norm", "lr", "consumed_samples", "skipped"):
            assert repr(line[name]) == repr(b[iteration][name]), (iteration, name)


def test_a_skipped_update_changes_nothing_on_any_rank_and_is_skipped_again_in_a_replay(
    harness: Callable[..., Any],
) -> None:
    whole = harness(**with_policy(1, on_nan="skip"))
    reference = whole.train(inject="nan-sample=50")
    steps = reference.steps()
    assert [iteration for iteration, line in steps.items() if line["skipped"]] == [BAD]
    assert math.isnan(steps[BAD]["loss"])
    assert all(math.isfinite(line["loss"]) for iteration, line in steps.items() if iteration != BAD)
    assert steps[16]["consumed_samples"] == 16 * 8
    before, skipped, after = (state_tensors(whole.run.checkpoint(iteration)) for iteration in (BAD - 1, BAD, BAD + 1))
    assert before == skipped
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)

    pieces = harness(**with_policy(5, on_nan="skip"))
    assert pieces.start(inject="nan-sample=50,crash-at=9").wait() == [1, 1]
    pieces.train(inject="nan-sample=50")
    assert_same_steps(counted(whole.run), counted(pieces.run))
    assert_same_bytes(whole.run.checkpoint(16), pieces.run.checkpoint(16))
    common = contents(pieces.run.checkpoint(16))["common"]
    assert TrainingProgress.resume(common["progress"], GlobalBatchSizes(8)).untrained == [(8 * BAD - 8, 8 * BAD)]


def test_a_rollback_passes_over_the_same_samples_whether_the_process_goes_on_or_is_killed(
    harness: Callable[..., Any],
) -> None:
    """NaN in iteration 7 in the first pass; after the rollback to iteration 5 sample 50 is not read any more."""
    whole = harness(**with_policy(5, on_nan="rollback"))
    reference = whole.train(inject="nan-sample=50")
    assert f"iteration {BAD}: loss nan, gradient norm nan; back to iteration 5" in reference.output()
    assert [line["next_sample"] for line in read_json_lines(whole.run.attempt(1).rollbacks)] == [BAD * 8]
    steps = counted(whole.run)
    assert [steps[i]["consumed_samples"] for i in (5, 6, 16)] == [40, BAD * 8 + 8, BAD * 8 + 11 * 8]
    assert all(math.isfinite(line["loss"]) for line in steps.values())
    progress = TrainingProgress.resume(read_json(whole.run.attempt(1).data)["progress"], GlobalBatchSizes(8))
    assert progress.passed_over == [(40, BAD * 8)]

    pieces = harness(**with_policy(5, on_nan="rollback"))
    attempt = pieces.start(inject="nan-sample=50,step-delay=0.1")
    wait_for(
        lambda: any("rollback" in line for line in read_json_lines(attempt.directory.metrics)),
        600,
        step=0.01,
        words=attempt.output,
    )
    attempt.signal(signal.SIGKILL)
    attempt.wait()
    second = pieces.train(inject="nan-sample=50")
    assert "passing over the samples up to 56: iteration 7: loss nan" in second.output()
    assert min(second.steps()) == 6
    assert_same_steps(steps, counted(pieces.run))
    assert_same_bytes(whole.run.checkpoint(16), pieces.run.checkpoint(16))


@pytest.mark.parametrize(
    ("interval", "sample", "steps", "damaged"),
    [(5, 90, 12, [10]), pytest.param(1, 40, 8, [5, 4], marks=pytest.mark.long)],
)
def test_a_rollback_that_meets_a_damaged_checkpoint_takes_the_one_before_in_the_same_job(
    harness: Callable[..., Any], interval: int, sample: int, steps: int, damaged: list[int]
) -> None:
    """Nothing is lost: what the damaged one held is trained again, then the trouble comes again, and its rollback."""
    policy = with_policy(interval, on_nan="rollback", max_rollbacks=1, steps=steps)
    whole, broken = harness(**policy), harness(**policy)
    whole.train(inject=f"nan-sample={sample}")
    hook = {"hook": "tests.training.user_hooks:FlipsBits", "options": {"iterations": damaged}}
    broken.config["training"] = broken.config["training"] | {"hooks": [hook]}
    output = broken.train(inject=f"nan-sample={sample}").output()
    assert [left.iteration for left in quarantined_checkpoints(broken.run)] == damaged
    for left in quarantined_checkpoints(broken.run):
        assert "are not those that were saved" in left.why
        assert f"iteration {left.iteration} is damaged: {left.why}" in output
    went_back = [entry["base_iteration"] for entry in read_json_lines(broken.run.attempt(1).rollbacks)]
    assert went_back == [max(damaged), min(damaged) - interval, max(damaged)]
    assert_same_steps(counted(whole.run), counted(broken.run))
    assert resume_point(whole.run).iteration == resume_point(broken.run).iteration == steps
    assert_same_bytes(whole.run.checkpoint(steps), broken.run.checkpoint(steps))
    MergedViews(broken.run).update()
    assert list(read_json_lines(broken.run.metrics_view)) == list(valid_lines(broken.run))


@pytest.mark.long
def test_a_spike_that_comes_back_ends_in_a_stop_after_the_rollbacks_that_are_allowed(
    harness: Callable[..., Any],
) -> None:
    made = harness(**with_policy(9, on_spike="rollback", max_rollbacks=1, spike_threshold=200.0))
    attempt = made.start(inject="spike-sample=85:1000,nan-sample=110")
    assert attempt.wait() == [3, 3], attempt.output()
    assert "is a spike" in attempt.output()
    assert "back to iteration 9" in attempt.output()
    assert attempt.outcome.outcome == "fatal"
    made = harness(**with_policy(1000, on_nan="rollback"))
    attempt = made.start(inject="nan-sample=10")
    assert attempt.wait() == [3, 3], attempt.output()
    assert "there is no checkpoint to go back to" in attempt.outcome.reason
