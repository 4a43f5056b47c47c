"""Copies of a micro-batch to the GPU: from pinned memory, so the host does not wait for the kernels in the queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from relayrun.config.sections.data import DataSection  # noqa: E402
from relayrun.tokens.order.sample_rows import RowMasks  # noqa: E402
from relayrun.train.distributed import to_device  # noqa: E402
from relayrun.train.model import gpt  # noqa: E402
from relayrun.train.model.loss import loss_function  # noqa: E402
from relayrun.train.model.packed_documents import PackedDocuments  # noqa: E402

GPU = torch.device("cuda")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU, which is not here, would be asked for."""
    asked: list[str] = []

    def pinned(values: Any) -> Any:
        asked.append("pinned")
        return values

    def to(values: Any, device: Any, non_blocking: bool = False) -> Any:
        asked.append(f"{device} {'at once' if non_blocking else 'waits'}")
        return values

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return asked


def test_values_of_a_micro_batch_are_copied_once_from_pinned_memory(copies: list[str]) -> None:
    tokens = np.arange(10).reshape(2, 5)
    data = DataSection.model_validate({"tokenizer": "none", "mock_data": True, "reset_position_ids": True})
    masks = RowMasks(data, eod=3, counted=None, vocabulary_size=10)
    stage: Any = SimpleNamespace(ranks=SimpleNamespace(device=GPU), _masks=masks)
    to_device(torch.from_numpy(tokens), GPU)
    positions = gpt.ModelStage._position_ids(stage, gpt.MicroBatch(tokens=tokens))
    assert positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    bounds = PackedDocuments(lengths=[[1, 3], [4]], device=GPU).bounds
    assert bounds.tolist() == [0, 1, 4, 8]
    assert copies == 3 * ["pinned", "cuda at once"]


def test_on_a_cpu_nothing_is_copied(copies: list[str]) -> None:
    tokens = np.arange(10).reshape(2, 5)
    assert to_device(torch.from_numpy(tokens), torch.device("cpu")).data_ptr() == tokens.__array_interface__["data"][0]
    assert copies == ["cpu waits"]


def test_the_reported_loss_makes_no_tensor_of_a_number_of_the_host() -> None:
    """Its copy to a GPU would wait."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[str] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(function))
            return function(*args, **(kwargs or {}))

    losses = torch.arange(6.0).reshape(2, 3)
    for weights in (None, torch.ones(2)):
        with Operators():
            *_, report = loss_function("sample", mask=None, weights=weights)(losses)
        assert report.tolist() == [5.0, 2.0]
    assert not [name for name in made if "lift_fresh" in name or "copy_" in name]
