"""Loss masks of data sets of a user's own, as rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relayrun.config.sections.data import DataSection
from relayrun.errors import FatalTrainingError
from relayrun.tokens.order.sample_rows import read_row


class Pair:
    """A data set whose `read` gives what it was made of."""

    def __init__(self, *found: Any) -> None:
        self._found = found

    def read(self, epoch: int, i: int) -> Any:
        return self._found if len(self._found) > 1 else self._found[0]


def test_tokens_with_a_mask_are_a_row() -> None:
    row = read_row(Pair(np.arange(5), [1, 0, 1, 1]), 0, 0)
    assert row.tokens.tolist() == [0, 1, 2, 3, 4]
    assert row.loss_mask is not None
    assert row.loss_mask.dtype == np.float32
    assert row.loss_mask.tolist() == [1, 0, 1, 1]
    assert read_row(Pair(np.arange(5)), 0, 0).loss_mask is None


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(FatalTrainingError, match=r"loss mask of shape \[5\] with 5 tokens"):
        read_row(Pair(np.arange(5), [1] * 5), 0, 0)


def test_a_mask_is_announced_by_the_one_order_that_may_have_it() -> None:
    def data(order: str, **source: Any) -> DataSection:
        return DataSection.model_validate(
            {"tokenizer": "t", "mixture": {"a": {"weight": 1.0, "path": "x", "order": order, **source}}}
        )

    assert data("own:Masked", loss_mask=True).masks_loss
    assert not data("own:Masked").masks_loss
    with pytest.raises(ValueError, match="loss_mask belongs to a user's own order"):
        data("window", loss_mask=True)
