"""CUDA_DEVICE_MAX_CONNECTIONS of the native trainer's ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from relayrun.train import distributed  # noqa: E402

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


class AsksForCuda(Exception):
    """The variable must be set by then."""


@pytest.mark.parametrize(
    ("tensor", "context", "site", "found"),
    [(1, 1, None, None), (2, 1, None, "1"), (1, 2, None, "1"), (2, 2, "8", "8"), (1, 1, "8", "8")],
)
def test_one_queue_of_kernels_where_layers_or_sequences_are_split(
    monkeypatch: pytest.MonkeyPatch, tensor: int, context: int, site: str | None, found: str | None
) -> None:
    def asked() -> bool:
        raise AsksForCuda

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    for name in ("raise_file_limit", "send_no_pickles", "bind_to_job_network"):
        monkeypatch.setattr(distributed, name, lambda *_: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", NAME: site or ""}.items():
        monkeypatch.setenv(name, value)
    if site is None:
        monkeypatch.delenv(NAME)
    sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": context, "pipeline_model_parallel_size": 1}
    config: Any = SimpleNamespace(parallel=SimpleNamespace(**sizes), model_parallel_size=tensor * context)
    with pytest.raises(AsksForCuda):
        distributed.start_process_groups(config)
    assert os.environ.get(NAME) == found
