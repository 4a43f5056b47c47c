"""What copies of saves take of the host is what a check says before."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from relayrun.config.compose.schema import RunConfig
from relayrun.submit.forecast import host_copy_bytes
from relayrun.train.model.size import count_parameters, pad_to_multiple

from .conftest import VOCABULARY, Harness

REPORT = [sys.executable, "-m", "tests.training.variants", "report-host-memory", "--"]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["adam", "distributed-optimizer"])
def test_the_estimate_is_what_the_fullest_rank_takes(
    harness: Callable[..., Harness], distributed: bool, precision: str
) -> None:
    made = harness(
        training={"steps": 4, "precision": precision},
        model={"hidden_size": 128, "ffn_hidden_size": 512},
        parallel={"use_distributed_optimizer": distributed},
    )
    attempt = made.train(prefix=REPORT)
    found = re.findall(r"reserved: (\d+) bytes, (\d+) pinned", attempt.output())
    assert len(found) == 2, attempt.output()
    taken, pinned = (max(int(number) for number in column) for column in zip(*found, strict=True))

    def estimated(gpus: int) -> int:
        job: dict[str, Any] = made.config["job"] | {"gpus_per_node": gpus}
        config = RunConfig.model_validate_json(json.dumps(made.config | {"job": job}))
        size = pad_to_multiple(VOCABULARY, config.model.make_vocab_size_divisible_by)
        return host_copy_bytes(config, count_parameters(config.model, size), size)

    print(f"{precision}: {taken:,} bytes, estimated {estimated(0):,}; pinned {pinned:,}, estimated {estimated(2):,}")
    assert taken == pytest.approx(estimated(0), rel=0.1)
    assert pinned == estimated(2)
