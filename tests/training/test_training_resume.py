"""A run in pieces is the run in one piece: every loss, every gradient norm, every tensor, to the last bit."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from relayrun.rundir.records import Begin

STEPS = 30
INTERVAL = 16


def contents(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, by key and position: tensors and plain values."""
    found: dict[str, Any] = {"common": torch.load(path / "common.pt", weights_only=False)}
    for index, item in FileSystemReader(path).read_metadata().storage_data.items():
        with (path / item.relative_path).open("rb") as file:
            file.seek(item.offset)
            data = io.BytesIO(file.read(item.length))
        key = f"{index.fqn} {tuple(index.offset or ())}"
        assert key not in found
        found[key] = torch.load(data, weights_only=False)
    return found


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts, lists and tuples to one dict of leaves; BytesIO is what torch saved an object as."""
    if isinstance(value, io.BytesIO):
        value = torch.load(value, weights_only=False)
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{name}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, item in enumerate(value) for k, v in flatten(item, f"{name}/{key}").items()}
    return {name: value}


def assert_same_bytes(one: Path, other: Path) -> int:
    """Compare two checkpoints; return how many tensors they hold."""
    first, second = flatten(contents(one)), flatten(contents(other))
    assert first.keys() == second.keys()
    tensors = 0
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            tensors += 1
            assert value.dtype == second[name].dtype, name
            assert value.numpy().tobytes() == second[name].numpy().tobytes(), name
        else:
            assert value == second[name], name
    return tensors


def cut_by_signal(attempt: Any) -> str:
    attempt.wait_for_iteration(5)
    attempt.signal(signal.SIGUSR2)
    return "SIGUSR2"


def cut_by_stop_file(attempt: Any) -> str:
    attempt.wait_for_iteration(Begin.read(attempt.directory.begin).base_iteration + 2)
    attempt.directory.stop.write_text("asked by a test\n")
    return "stop file: asked by a test"


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True], ids=["adam", "distributed-optimizer"])
def test_three_attempts_equal_the_uninterrupted_run_to_the_last_bit(
    harness: Callable[..., Any], distributed: bool
) -> None:
    settings = {
        "training": {"steps": STEPS, "eval_interval": 7, "eval_steps": 2},
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
        left = attempt.outcome
        assert (left.outcome, left.reason) == ("saved", reason)
        assert attempt.commits[-1].iteration == left.iteration
        ends.append(left.iteration)
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
            assert step["consumed_samples"] == expected[iteration]["consumed_samples"] == 8 * iteration
        for iteration, losses in attempt.evaluations().items():
            assert losses == reference.evaluations()[iteration]
    name = f"iter_{STEPS:07}"
    tensors = assert_same_bytes(whole.run.checkpoints / name, pieces.run.checkpoints / name)
    assert tensors > 3 * 18  # weight and two moments of each parameter, and the generators
