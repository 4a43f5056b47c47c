"""What checkouts of Megatron-LM do by themselves: torchrun alone, without relayrun, on CPUs; see `tests.checkouts`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from tests.checkouts import checkout_of, command, make_shard
from tests.checkouts.alone import train_alone
from tests.checkpoints import state_tensors, whole_tensors

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

LR, WEIGHT_DECAY = 1e-3, 1.0
FLAGS = f"--pipeline-model-parallel-size 2 --lr-decay-style constant --lr {LR} --weight-decay {WEIGHT_DECAY}"
"""Two layers, one on each of two ranks."""


def saved_twice(folder: Path, dialect: MegatronDialect, flags: str, **environment: str) -> tuple[Path, Path]:
    """Iteration 4 of a run that was not disturbed, and of one that began with its iteration 3."""
    checkout = checkout_of(dialect)
    data = make_shard(folder / "data")
    words = command(checkout, *FLAGS.split(), *flags.split(), data=data, steps=4, interval=1)
    whole, resumed = folder / "whole", folder / "resumed"
    train_alone(words, checkout=checkout, ranks=2, save=whole, environment=environment)
    from_three = ["--ckpt-step", "3"]
    train_alone(words, *from_three, checkout=checkout, ranks=2, save=resumed, load=whole, environment=environment)
    return whole / "iter_0000004", resumed / "iter_0000004"


def weights(checkpoint: Path) -> dict[tuple[str, int], torch.Tensor]:
    """Weights in fp32, by name and pipeline stage."""
    tensors = whole_tensors(checkpoint)
    found: dict[tuple[str, int], torch.Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("decoder.layers.") and value.is_floating_point():
            whole = tensors.get(f"optimizer.state.fp32_param.{name}", value)
            found |= {(name, stage): whole[stage] for stage in range(2)}
    return found


OPTIMIZERS = pytest.mark.parametrize(
    "flags", ["", "--bf16", "--bf16 --optimizer ademamix"], ids=["fp32", "bf16", "bf16-ademamix"]
)
"""The distributed optimizer of this version needs a fused Adam: not on CPUs."""


@OPTIMIZERS
def test_swiss_ai_swaps_weight_decay_on_a_later_pipeline_stage_when_it_loads(tmp_path: Path, flags: str) -> None:
    """The groups of the optimizer that rank 0 saved are taken by their position: norms decay, matrices do not.

    Where a stage begins with a norm, its groups have the other order (`_get_param_groups`, core 0.11); the settings of
    a group lie in `common.pt`, rank 0's (`load_state_dict`). The step and the learning rate are right.
    """
    whole, resumed = (weights(path) for path in saved_twice(tmp_path, MegatronDialect.SWISS_AI, flags))
    before = weights(tmp_path / "whole" / "iter_0000003")
    assert len(whole) > 10
    for (name, stage), value in whole.items():
        found, decay = resumed[name, stage], LR * WEIGHT_DECAY * before[name, stage]
        if stage == 0:
            assert torch.equal(found, value), name
        else:
            sign = -1 if "norm" in name else 1
            assert torch.allclose(found - value, sign * decay, atol=3e-7), name


@OPTIMIZERS
def test_swiss_ai_resumes_bit_for_bit_with_one_order_of_groups(tmp_path: Path, flags: str) -> None:
    sorted_groups = {"MEGATRON_ON_CPU_SORTED_GROUPS": "1"}
    whole, resumed = saved_twice(tmp_path, MegatronDialect.SWISS_AI, flags, **sorted_groups)
    assert state_tensors(whole) == state_tensors(resumed)


def test_nvidia_resumes_bit_for_bit_with_pipeline_stages(tmp_path: Path) -> None:
    whole, resumed = saved_twice(tmp_path, MegatronDialect.NVIDIA, "--bf16")
    assert state_tensors(whole) == state_tensors(resumed)
