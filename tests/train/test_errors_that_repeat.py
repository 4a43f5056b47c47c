"""Which errors of a rank every attempt would meet."""

from __future__ import annotations

import json

import pytest

from relayrun.errors import ConfigError, FatalTrainingError, InputError, RunDirError
from relayrun.train.__main__ import fails_on_every_attempt
from relayrun.train.hooks import HookFailed


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (FatalTrainingError("loss nan"), True, True),
        (ConfigError("no such hook"), True, True),
        (KeyError("layout"), True, False),
        (AssertionError("hidden size must be divisible"), True, False),
        (TypeError("got an unexpected keyword"), True, False),
        (AssertionError("Invalid device id"), False, False),
        (RuntimeError("CUDA error: uncorrectable ECC error"), False, False),
        (RuntimeError("Connection closed by peer"), False, False),
        (FileNotFoundError("shard0.bin"), False, False),
        (ModuleNotFoundError("torch"), False, False),  # the supervisor knows whether all ranks lack it
        (InputError("shard0.bin: missing"), False, False),
        (RunDirError("unreadable record"), False, False),
        (json.JSONDecodeError("Expecting value", "", 0), False, False),
        (KeyboardInterrupt(), False, False),
        (MemoryError(), False, False),
    ],
)
def test_errors_of_the_program_come_again_and_those_of_a_node_need_not(
    error: BaseException, before: bool, after: bool
) -> None:
    assert fails_on_every_attempt(error, before_first_step=True) is before
    assert fails_on_every_attempt(error, before_first_step=False) is after


@pytest.mark.parametrize(("cause", "again"), [(TypeError("no such option"), True), (ConnectionError("away"), False)])
def test_of_a_hook_that_failed_what_it_raised_counts(cause: Exception, again: bool) -> None:
    error = HookFailed("hook probe: setup")
    error.__cause__ = cause
    assert fails_on_every_attempt(error, before_first_step=True) is again
    assert fails_on_every_attempt(error, before_first_step=False) is False
