"""A loss mask from a data set of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def made(harness: Callable[..., Any], mask: str, *, announced: bool) -> Any:
    source = {"weight": 1.0, "order": "tests.training.masked:Masked", "options": {"mask": mask}, "loss_mask": announced}
    return harness(
        data={"datasets": [], "mixture": {"train": source}},
        training={"steps": 2, "loss_mean": "token"},
        model={"hidden_dropout": 0.0, "attention_dropout": 0.0},
        optimizer={"lr_decay_style": "constant", "lr_warmup_steps": 0},
    )


@pytest.mark.long
def test_what_the_mask_leaves_out_does_not_count(harness: Callable[..., Any]) -> None:
    """A mask of ones changes nothing but rounding; another one does; one that was not announced ends the run."""
    plain = made(harness, "none", announced=False).train().steps()
    ones = made(harness, "ones", announced=True).train().steps()
    odd = made(harness, "odd", announced=True).train().steps()
    for number in (1, 2):
        assert ones[number]["loss"] == pytest.approx(plain[number]["loss"], rel=1e-5)
    assert odd[2]["loss"] != pytest.approx(plain[2]["loss"], rel=1e-5)
    attempt = made(harness, "odd", announced=False).start()
    assert attempt.wait() != [0, 0]
    assert "data.mixture.NAME.loss_mask=true" in attempt.output()
