"""Default variables of ranks."""

from __future__ import annotations

import pytest

from relayrun.control.chain.job_script import rank_defaults

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


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_sites_allocator_holds_under_either_of_its_names(name: str) -> None:
    """Torch would take a default under the other name."""
    assert not [each for each in rank_defaults("7", trainer="native", site={name: "x"}) if "ALLOC_CONF" in each]
