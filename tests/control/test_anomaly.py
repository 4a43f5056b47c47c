"""Which iterations are left out, and when it is enough: decided from losses alone, and the same after a restart."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from relayrun.config.compose.schema import TrainingSection
from relayrun.control.rundir.merged_metrics import valid_lines
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.restarts import Rollback, rollbacks_since_save
from relayrun.control.rundir.run import Run
from relayrun.train.hooks import Action
from relayrun.train.loss_guard import LossGuard
from tests.history import began

NAN = float("nan")


def settings(**changes: Any) -> TrainingSection:
    values = {"steps": 1, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": 1, "spike_window": 16}
    return TrainingSection.model_validate(values | changes)


def judged(guard: LossGuard, loss: float, grad_norm: float = 1.0) -> Action:
    verdict = guard.judge(loss, grad_norm)
    assert (verdict.reason is None) == (verdict.action is Action.UPDATE)
    guard.record(verdict.action, loss)
    return verdict.action


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
@pytest.mark.parametrize(("loss", "grad_norm"), [(NAN, 1.0), (1.0, NAN), (float("inf"), 1.0), (1.0, float("inf"))])
def test_what_is_no_finite_number_meets_the_policy(action: str, loss: float, grad_norm: float) -> None:
    guard = LossGuard(settings(on_nan=action))
    assert judged(guard, loss, grad_norm) is Action[action.upper()]
    assert guard.may_differ == (action != "stop")


def test_a_spike_is_measured_in_median_deviations_of_the_full_window() -> None:
    guard = LossGuard(settings(on_spike="skip", spike_threshold=4.0))
    for number in range(16):
        assert judged(guard, 1e6 if number == 3 else 2.0 + 0.25 * (number % 2)) is Action.UPDATE
    assert judged(guard, 2.125 + 4 * 0.125) is Action.UPDATE  # now the median is 2.25, the deviation 0.25
    assert judged(guard, 2.25 + 4 * 0.25 + 1e-9) is Action.SKIP
    assert judged(guard, 0.1) is Action.UPDATE
    assert "is a spike: the last 16 have the median" in (guard.judge(4.0, 1.0).reason or "")


def test_a_noisy_run_that_learns_has_no_spike() -> None:
    generator = random.Random(1)
    guard = LossGuard(settings(on_spike="stop", spike_window=128))
    for step in range(3000):
        loss = 2 + 9 / (1 + step / 50) + generator.gauss(0, 0.05)
        assert judged(guard, loss) is Action.UPDATE, step


def test_too_many_skips_in_a_row_stop() -> None:
    guard = LossGuard(settings(on_nan="skip", max_skips=3))
    for _ in range(2):
        assert [judged(guard, NAN) for _ in range(3)] == [Action.SKIP] * 3
        assert judged(guard, 1.0) is Action.UPDATE
    assert [judged(guard, NAN) for _ in range(4)] == [Action.SKIP] * 3 + [Action.STOP]


def test_too_many_rollbacks_stop() -> None:
    guard = LossGuard(settings(on_nan="rollback", max_rollbacks=2))
    guard.rollbacks = 2
    assert judged(guard, NAN) is Action.STOP
    assert "rolled back 2 times before" in (guard.judge(NAN, 1.0).reason or "")


def test_a_guard_that_was_saved_anywhere_decides_as_the_one_that_was_not() -> None:
    generator = random.Random(2)
    losses = [generator.choice([2.0, 2.0, 2.1, 1.9, 2.2, 9.0, NAN]) + generator.random() / 100 for _ in range(400)]
    config = settings(on_nan="skip", on_spike="skip", max_skips=4, spike_threshold=3.0)
    whole = LossGuard(config)
    expected = [judged(whole, loss) for loss in losses]
    assert set(expected) == {Action.UPDATE, Action.SKIP, Action.STOP}
    for cut in range(0, 400, 23):
        guard = LossGuard(config)
        for loss in losses[:cut]:
            judged(guard, loss)
        resumed = LossGuard(config)
        resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
        assert [judged(resumed, loss) for loss in losses[cut:]] == expected[cut:]


def begin(run: Run, number: int, base: int) -> None:
    began(run, number, base=base)


def trained(run: Run, number: int, first: int, last: int, mark: str) -> None:
    with run.attempt(number).metrics.open("a") as file:
        for iteration in range(first, last + 1):
            file.write(json.dumps({"iteration": iteration, "loss": mark}) + "\n")


def rollback(run: Run, number: int, at: int, base: int, sample: int, time: float) -> None:
    found = Rollback(iteration=at, reason="loss nan", base_iteration=base, next_sample=sample, time=time)
    found.append(run.attempt(number).rollbacks)
    with run.attempt(number).metrics.open("a") as file:
        file.write(json.dumps({"iteration": base, "rollback": found.words}) + "\n")


def commit(run: Run, number: int, iteration: int, time: float) -> None:
    run.attempt(number).append_commit(
        CheckpointCommit(
            iteration=iteration, path=str(run.checkpoint(iteration)), consumed_samples=0, time=time, seconds=1.0
        ),
    )


def test_a_rollback_counts_until_its_checkpoint_is_not_the_newest_and_is_not_written_anew(tmp_path: Any) -> None:
    run = Run(tmp_path)
    begin(run, 1, 0)
    commit(run, 1, 10, 100.0)
    rollback(run, 1, 17, 10, 170, 110.0)
    rollback(run, 1, 15, 10, 220, 120.0)
    assert [found.next_sample for found in rollbacks_since_save(run, 10, 100)] == [170, 220]
    assert rollbacks_since_save(run, 20, 200) == []
    begin(run, 2, 10)  # killed; the next one starts from there too
    begin(run, 3, 10)
    assert len(rollbacks_since_save(run, 10, 100)) == 2
    rollback(run, 3, 15, 10, 100, 125.0)  # to a checkpoint behind a damaged one: it passes over nothing
    assert len(rollbacks_since_save(run, 10, 100)) == 2
    commit(run, 3, 20, 130.0)
    assert rollbacks_since_save(run, 20, 200) == []
    begin(run, 4, 0)  # a person went back to the beginning: another 10 is written, which knows nothing of it
    commit(run, 4, 10, 200.0)
    assert rollbacks_since_save(run, 10, 100) == []


def test_the_merged_view_holds_what_counts_after_rollbacks(tmp_path: Any) -> None:
    run = Run(tmp_path)
    begin(run, 1, 0)
    trained(run, 1, 1, 17, "a")
    rollback(run, 1, 17, 10, 170, 1.0)
    trained(run, 1, 11, 15, "b")
    rollback(run, 1, 15, 10, 220, 2.0)
    trained(run, 1, 11, 33, "c")
    rollback(run, 1, 33, 30, 500, 3.0)
    trained(run, 1, 31, 36, "d")
    begin(run, 2, 30)
    trained(run, 2, 31, 32, "e")
    lines = list(valid_lines(run))
    assert [line["iteration"] for line in lines] == list(range(1, 33))
    assert "".join(line["loss"] for line in lines) == "a" * 10 + "c" * 20 + "e" * 2
