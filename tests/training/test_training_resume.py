"""A run in pieces is the run in one piece: every loss, every gradient norm, every tensor, to the last bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from relayrun.control.rundir.records import AttemptStart
from relayrun.files import write_atomic
from tests.checkpoints import assert_same_bytes

STEPS = 30
INTERVAL = 16


def cut_by_signal(attempt: Any) -> str:
    attempt.wait_for_iteration(5)
    attempt.signal(signal.SIGUSR2)
    return "SIGUSR2"


def cut_by_stop_file(attempt: Any) -> str:
    attempt.wait_for_iteration(AttemptStart.read(attempt.directory.begin).base_iteration + 2)
    write_atomic(attempt.directory.stop, "asked by a test\n")  # it may be read at any moment
    return "stop file: asked by a test"


@pytest.mark.slow
@pytest.mark.parametrize(
    "distributed",
    [
        pytest.param(False, id="adam", marks=pytest.mark.long),
        pytest.param(True, id="distributed-optimizer-and-ramp"),
    ],
)
def test_three_attempts_equal_the_uninterrupted_run_to_the_last_bit(
    harness: Callable[..., Any], distributed: bool
) -> None:
    ramp = {"global_batch_size": 12, "rampup_batch_size": [[4, 24], [8, 100]]} if distributed else {}
    settings = {
        "training": {"steps": STEPS, "eval_interval": 7, "eval_steps": 2} | ramp,
        "optimizer": {"lr_warmup_steps": 0, "lr_warmup_tokens": 50 * 64, "lr_decay_tokens": 250 * 64},
        "checkpoint": {"interval": INTERVAL},
        "parallel": {"use_distributed_optimizer": distributed},
    }
    whole, pieces = harness(**settings), harness(**settings)
    reference = whole.train()
    assert sorted(reference.steps()) == list(range(1, STEPS + 1))

    ends = []
    for cut in (cut_by_signal, cut_by_stop_file):
        attempt = pieces.start()
        reason = cut(attempt)
        assert attempt.wait() == [0, 0], attempt.output()
        outcome = attempt.outcome
        assert (outcome.outcome, outcome.reason) == ("saved", reason)
        assert attempt.commits[-1].iteration == outcome.iteration
        ends.append(outcome.iteration)
    pieces.train()
    assert 0 < ends[0] < ends[1] < STEPS
    assert all(end % INTERVAL for end in ends), "the test is about cuts between the regular saves"

    expected = reference.steps()
    for attempt, first in zip(pieces.attempts, [1, ends[0] + 1, ends[1] + 1], strict=True):
        steps = attempt.steps()
        assert min(steps) == first
        for iteration, step in steps.items():
            for name in ("loss", "grad_norm", "lr"):
                assert step[name].hex() == expected[iteration][name].hex(), (iteration, name)
            sizes = [4] * 6 + [8] * 10 + [12] * 14 if distributed else [8] * STEPS
            assert step["consumed_samples"] == expected[iteration]["consumed_samples"] == sum(sizes[:iteration])
            assert step["global_batch_size"] == sizes[iteration - 1]
        for iteration, losses in attempt.evaluations().items():
            assert losses == reference.evaluations()[iteration]
    name = f"iter_{STEPS:07}"
    tensors = assert_same_bytes(whole.run.checkpoints / name, pieces.run.checkpoints / name)
    assert tensors > 3 * 18  # weight and two moments of each parameter, and the generators


@pytest.mark.slow
def test_a_run_that_stops_early_goes_on_as_if_it_had_not(harness: Callable[..., Any], trained: Any) -> None:
    """`trained`: twelve iterations in one piece."""
    made = harness(
        training={"steps": 12, "stop_after": 5},
        checkpoint={"interval": 4, "keep_last": 10},
        parallel={"use_distributed_optimizer": True},
    )
    outcome = made.train().outcome
    assert (outcome.outcome, outcome.iteration) == ("done", 5)
    assert outcome.reason == "iteration 5 of 12 reached, where training.stop_after ends the run"
    assert [commit.iteration for commit in made.attempts[0].commits] == [4, 5]
    del made.config["training"]["stop_after"]
    assert made.train().outcome.reason == "iteration 12 of 12 reached"
    expected, found = trained.attempts[0].steps(), made.attempts[0].steps() | made.attempts[1].steps()
    assert sorted(found) == sorted(expected)
    for iteration, step in found.items():
        for name in ("loss", "grad_norm", "lr"):
            assert step[name].hex() == expected[iteration][name].hex(), (iteration, name)
    assert_same_bytes(trained.run.checkpoint(12), made.run.checkpoint(12))
