"""Training with `training.deterministic` on CPUs: it is on in every rank, and a resume is exact."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.checkpoints import assert_same_bytes

pytestmark = pytest.mark.slow

STEPS = 12
WITNESS = {"hook": "tests.training.user_hooks:Witness"}


def test_it_is_on_and_a_run_cut_by_a_signal_is_the_uninterrupted_run(harness: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {
        "training": {"steps": STEPS, "deterministic": True, "precision": "bf16", "hooks": [WITNESS]},
        "parallel": {"use_distributed_optimizer": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        "checkpoint": {"interval": STEPS},
    }
    whole, pieces = harness(**settings), harness(**settings)
    reference = whole.train()
    said = [line for line in reference.output().splitlines() if line.startswith("deterministic: ")]
    assert said == ["deterministic: torch True, megatron-core True, NCCL_ALGO=Ring"] * 2

    assert "TP2 x PP1, cpu, deterministic), from the beginning" in reference.output()

    first = pieces.start(inject="step-delay=0.1")
    first.wait_for_iteration(3)
    first.signal(signal.SIGUSR2)
    assert first.wait() == [0, 0], first.output()
    assert 3 <= first.outcome.iteration < STEPS
    rest = pieces.train()
    for attempt in (first, rest):
        for iteration, step in attempt.steps().items():
            for name in ("loss", "grad_norm"):
                assert step[name].hex() == reference.steps()[iteration][name].hex(), (iteration, name)
    assert_same_bytes(whole.run.checkpoint(STEPS), pieces.run.checkpoint(STEPS))


def test_a_rank_whose_environment_takes_determinism_away_does_not_begin(
    harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    attempt = harness(training={"deterministic": True}).start()
    assert attempt.wait() == [3, 3], attempt.output()
    assert attempt.outcome.outcome == "fatal"
    assert "NCCL_ALGO=Tree makes results differ from run to run" in attempt.outcome.reason
