"""Hooks of a user's own in real training: state over attempts, the points of their calls, their errors."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.files import read_json_lines
from tests.checkpoints import assert_same_bytes, contents
from tests.waiting import wait_for

from .conftest import Harness

pytestmark = pytest.mark.slow

Make = Callable[..., Harness]
HOOKS = "tests.training.user_hooks"
COUNT = f"{HOOKS}:CountSteps"


def common(made: Harness, iteration: int) -> dict[str, Any]:
    found: dict[str, Any] = contents(made.run.checkpoint(iteration))["common"]
    return found


def diary(made: Harness, rank: int) -> list[str]:
    return (made.run.path / f"diary-{len(made.attempts)}-{rank}").read_text().splitlines()


def test_a_users_hook_counts_steps_over_three_attempts_and_training_stays_what_it_is(harness: Make) -> None:
    """The second attempt is killed after its save: the steps that are trained again are counted once."""
    settings = {"steps": 20}
    plain = harness(training=settings, checkpoint={"interval": 8})
    reference = plain.train()
    made = harness(training=settings | {"hooks": [{"hook": COUNT, "options": {}}]}, checkpoint={"interval": 8})
    first = made.start(inject="step-delay=0.1")
    first.wait_for_iteration(5)
    first.signal(signal.SIGUSR2)
    assert first.wait() == [0, 0], first.output()
    killed = made.start(inject="step-delay=0.3")
    killed.wait_for_iteration(11)
    wait_for(lambda: killed.commits, step=0.01, words=killed.output)
    killed.signal(signal.SIGKILL)
    killed.wait()
    assert resume_point(made.run).iteration == 8
    last = made.train()
    counted = list(read_json_lines(made.run.path / "counted.jsonl"))
    assert [(line["attempt"], line["iteration"]) for line in counted] == [(1, first.outcome.iteration), (3, 20)]
    assert [line["counts"] for line in counted] == [[first.outcome.iteration] * 2, [20, 20]]
    losses = [step["loss"] for step in reference.steps().values()]
    assert counted[-1]["losses"] == losses

    states = {iteration: common(made, iteration).pop(COUNT) for iteration in (8, 16, 20)}
    for iteration, state in states.items():  # those of 8 and 16 were written while training went on
        assert state["steps"] == iteration
        assert state["losses"].tolist() == losses[:iteration]
    assert {iteration: step["loss"] for iteration, step in last.steps().items()} == dict(enumerate(losses[8:], 9))
    assert all(step["hooks_seconds"] > 0 for step in list(last.steps().values())[1:])
    assert all("hooks_seconds" not in step for step in reference.steps().values())
    values = torch.load(made.run.checkpoint(20) / "common.pt")
    del values[COUNT]
    torch.save(values, made.run.checkpoint(20) / "common.pt")
    assert_same_bytes(plain.run.checkpoint(20), made.run.checkpoint(20))


def test_a_hook_that_is_new_or_gone_on_a_resume_is_said_in_one_line(harness: Make) -> None:
    made = harness(training={"steps": 3})
    made.train()
    for steps, hooks, said in (
        (5, [COUNT], f"hook {COUNT} has no state in this checkpoint: it begins anew"),
        (7, [], f"hook {COUNT} has a state in this checkpoint and is not in training.hooks: it is left out"),
    ):
        made.config["training"] |= {"steps": steps, "hooks": hooks}
        assert made.train().output().count(said) == 1
    assert next(iter(read_json_lines(made.run.path / "counted.jsonl")))["counts"] == [2, 2]
    assert COUNT in common(made, 5)
    assert COUNT not in common(made, 7)


def test_the_points_come_in_their_order_on_every_rank(harness: Make) -> None:
    hooks = {"steps": 3, "eval_interval": 2, "eval_steps": 1, "hooks": [f"{HOOKS}:Diary"]}
    made = harness(training=hooks, checkpoint={"interval": 2, "async_save": False})
    made.train()

    def step(number: int) -> list[str]:
        return [
            f"before_step {number} {8 * number - 8} 8",
            f"before_update {number}",
            f"after_step {number} {8 * number}",
        ]

    def save(number: int) -> list[str]:
        return ["state_dict", f"before_publish {number}", f"after_save {number}"]

    expected = ["setup", "state_dict", "at_start 0 0", *step(1), *step(2), "at_evaluation 2 held-out", *save(2)]
    expected += [*step(3), "at_evaluation 3 held-out", *save(3), "at_end done", "close"]
    assert diary(made, 0) == expected
    assert diary(made, 1) == [line for line in expected if not line.startswith("before_publish")]

    made.config["training"]["steps"] = 4
    made.train()
    for rank in (0, 1):
        assert diary(made, rank)[:4] == ["setup", "state_dict", "load_state_dict {'rank': 0}", "at_start 3 24"]


def test_a_verdict_of_one_rank_counts_on_all_within_the_bounds_of_the_config(harness: Make) -> None:
    objector = {"hook": f"{HOOKS}:Objector", "options": {"iteration": 3}}
    made = harness(training={"steps": 20, "max_skips": 2, "hooks": [objector, COUNT]})
    attempt = made.start()
    assert attempt.wait() == [3, 3], attempt.output()
    steps = attempt.steps()
    assert [bool(step["skipped"]) for step in steps.values()] == [False, False, True, True, True]
    assert steps[3]["skipped"] == "another rank saw trouble"
    assert "2 iterations before it were skipped in a row" in attempt.outcome.reason
    assert any("Objector: I do not like it" in failure.error for failure in attempt.failures())


def test_the_state_of_a_hook_goes_back_with_a_rollback(harness: Make) -> None:
    made = harness(training={"steps": 12, "on_nan": "rollback", "hooks": [COUNT]}, checkpoint={"interval": 5})
    made.train(inject="nan-sample=50")  # in iteration 7
    (line,) = read_json_lines(made.run.path / "counted.jsonl")
    assert line["counts"] == [12, 12]
    assert "NaN" not in json.dumps(line["losses"])


@pytest.mark.parametrize("rank", [-1, 1])
def test_an_error_in_a_hook_is_one_message_with_its_import_path_and_ends_every_rank(harness: Make, rank: int) -> None:
    options = {"method": "after_step", "rank": rank}
    made = harness(training={"hooks": [{"hook": f"{HOOKS}:Raises", "options": options}]}, checkpoint={"interval": 2})
    attempt = made.start()
    assert attempt.wait() == [1, 1], attempt.output()
    said = f"hook {HOOKS}:Raises, after_step: ZeroDivisionError: of my own ("
    assert [said in failure.error for failure in attempt.failures()] == [rank == -1, True]
    assert f"error: {said}" in attempt.output()
    assert "user_hooks.py, line " in attempt.output()
    assert ("Traceback" in attempt.output()) == (rank == 1), "of the other rank, which lost its partner"
    assert attempt.outcome is None, "not fatal: another attempt may do better"


def test_an_error_before_a_checkpoint_counts_fails_that_save_alone(harness: Make) -> None:
    options = {"method": "before_publish", "iteration": 4}
    hooks = [{"hook": f"{HOOKS}:Raises", "options": options}]
    made = harness(training={"steps": 6, "hooks": hooks}, checkpoint={"interval": 2})
    attempt = made.train()
    assert [commit.iteration for commit in attempt.commits] == [2, 6]
    (failed,) = read_json_lines(attempt.directory.failed_saves)
    assert failed["iteration"] == 4
    assert f"hook {HOOKS}:Raises, before_publish: ZeroDivisionError: of my own" in failed["error"]


@pytest.mark.parametrize(
    ("name", "said", "code"),
    [
        ("Leaves", "Leaves, after_step: SystemExit: 0", 1),
        ("NotPlain", "state['paths'][0] is a PosixPath; a checkpoint", 3),  # seen before the first step: it comes again
    ],
)
def test_an_end_of_the_process_and_a_state_that_no_checkpoint_keeps_are_errors_of_the_hook(
    harness: Make, name: str, said: str, code: int
) -> None:
    attempt = harness(training={"hooks": [f"{HOOKS}:{name}"]}).start()
    assert attempt.wait() == [code, code], attempt.output()
    assert said in attempt.output()
    assert f"{HOOKS}:{name}, " in attempt.output()
    assert "Traceback" not in attempt.output()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nowhere:Hook", "hook nowhere:Hook cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (f"{HOOKS}:Absent", f"hook {HOOKS}:Absent cannot be imported: AttributeError"),
        (f"{HOOKS}:NoHook", f"hook {HOOKS}:NoHook is no class that inherits relayrun.train.hooks.Hook"),
        (f"{HOOKS}:OneWay", f"hook {HOOKS}:OneWay has one of state_dict and load_state_dict without the other"),
        (
            {"hook": COUNT, "options": {"colour": "red"}},
            f"hook {COUNT} cannot be made with the options {{'colour': 'red'}}: TypeError: ",
        ),
    ],
    ids=["no-module", "no-name", "no-hook", "one-way", "options"],
)
def test_what_cannot_become_a_hook_ends_the_chain_with_its_reason(harness: Make, entry: Any, said: str) -> None:
    attempt = harness(training={"hooks": [entry]}).start()
    assert attempt.wait() == [3, 3], attempt.output()
    assert attempt.outcome.outcome == "fatal"
    assert said in attempt.outcome.reason
    assert attempt.outcome.reason.startswith("training.hooks: ")
    assert "Traceback" not in attempt.output()
