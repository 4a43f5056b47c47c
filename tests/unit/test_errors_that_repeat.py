"""Which errors of a rank every attempt would meet."""

from __future__ import annotations

import json

import pytest

from relayrun.errors import ConfigError, FatalTrainingError, InputError, RunDirError
from relayrun.training.__main__ import would_come_again


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
    assert would_come_again(error, before_first_step=True) is before
    assert would_come_again(error, before_first_step=False) is after
