"""Variables that torch, CUDA and NCCL read when a rank starts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from relayrun.control.chain.job_script import rank_defaults

torch = pytest.importorskip("torch")

from relayrun.train import distributed  # noqa: E402

EXPANDABLE = "expandable_segments:True"


def test_defaults_depend_on_the_trainer() -> None:
    native, megatron, command = (
        rank_defaults("7", trainer=name, site={}) for name in ("native", "megatron-lm", "command")
    )
    assert (native["PYTORCH_ALLOC_CONF"], native["PYTORCH_CUDA_ALLOC_CONF"]) == (EXPANDABLE, EXPANDABLE)
    assert megatron["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not {"CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_AVOID_RECORD_STREAMS"} & (native.keys() | command.keys())
    assert not [name for name in megatron.keys() | command.keys() if "ALLOC_CONF" in name]
    for each in (native, megatron, command):
        assert each.items() >= {"OMP_NUM_THREADS": "7", "TORCH_FR_BUFFER_SIZE": "2000"}.items()


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
    ],
)
def test_a_variable_of_the_site_holds_under_either_of_its_names(name: str, without: str) -> None:
    """Torch would take the default under the other name."""
    assert without not in rank_defaults("7", trainer="native", site={name: "x"})


@pytest.mark.parametrize(
    ("version", "layout", "found"),
    [
        ("2.13.0+cu130", (1, 1), {}),
        ("2.13.0", (2, 1), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("2.10.0a0", (1, 2), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (
            "2.7.1",
            (1, 1),
            {
                "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
                "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
                "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/trace-",
            },
        ),
    ],
)
def test_ranks_set_what_their_layout_and_their_torch_need(
    monkeypatch: pytest.MonkeyPatch, version: str, layout: tuple[int, int], found: dict[str, str]
) -> None:
    given = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/run/trace-"}
    environment = dict(given)
    monkeypatch.setattr(distributed, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(torch, "__version__", version)
    tensor, context = layout
    config: Any = SimpleNamespace(
        parallel=SimpleNamespace(tensor_model_parallel_size=tensor, context_parallel_size=context)
    )
    distributed.set_library_variables(config)
    assert environment == given | found
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    distributed.set_library_variables(config)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "of the site"
    assert environment is not os.environ
