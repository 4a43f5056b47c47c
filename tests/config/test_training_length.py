"""The length of a training in samples or tokens: the steps that consume at most so many."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from relayrun.config.sections.training import TrainingSection

BATCHES: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 8, "seq_length": 16}
RAMP = {"rampup_batch_size": [2, 2, 12]}
"""2 from sample 0 on, 4 from 4, 6 from 8, 8 from 12: iterations end at 2, 4, 8, 14, 22."""


def steps(**settings: Any) -> int:
    return TrainingSection.model_validate(BATCHES | settings).steps


@pytest.mark.parametrize(("samples", "expected"), [(8, 1), (15, 1), (16, 2), (800, 100)])
def test_samples_are_whole_global_batches(samples: int, expected: int) -> None:
    assert steps(samples=samples) == expected
    assert steps(tokens=16 * samples + 15) == expected


@pytest.mark.parametrize(("samples", "expected"), [(2, 1), (7, 2), (8, 3), (13, 3), (14, 4), (21, 4), (22, 5)])
def test_a_ramp_counts(samples: int, expected: int) -> None:
    """Every length by the sizes that the ranks themselves would take."""
    assert steps(samples=samples, **RAMP) == expected
    sizes = TrainingSection.model_validate(BATCHES | RAMP | {"steps": 9}).batch_sizes
    consumed = counted = 0
    while consumed + sizes.at(consumed) <= samples:
        consumed, counted = consumed + sizes.at(consumed), counted + 1
    assert counted == expected


def test_a_resolved_config_gives_itself_again() -> None:
    found = TrainingSection.model_validate(BATCHES | {"tokens": 1600, "stop_after": 9})
    assert (found.steps, found.stop_after) == (12, 9)
    assert TrainingSection.model_validate(found.model_dump()) == found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"samples": 80, "steps": 9}, "steps 9 and samples say the same, and samples are 10 steps"),
        ({"samples": 80, "tokens": 80}, "samples and tokens say the same"),
        ({"tokens": 100}, "6 samples are no whole global batch"),
        ({"samples": 80, "stop_after": 11}, "stop_after 11 lies behind the last of steps 10"),
        ({"samples": 80, "global_batch_size": 0}, "global_batch_size"),
        ({}, "steps"),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        steps(**settings)
