"""Host memory for copies of saves is estimated as torch takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.submit.forecast import host_copy_bytes
from relayrun.train.checkpoint.host_buffers import BUFFER_PIECE_BYTES, lay_out_buffers, pinned_bytes
from relayrun.train.model.size import count_parameters, pad_to_multiple

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def test_pinned_pieces_are_powers_of_two() -> None:
    _, lengths = lay_out_buffers([3 * GIB // 2, GIB // 2, 5 << 20, 700 << 20], BUFFER_PIECE_BYTES)
    assert lengths == [2 * GIB, 705 << 20]
    assert pinned_bytes(lengths) == [2 * GIB, GIB]


@pytest.mark.parametrize(
    ("overrides", "low", "high"),
    [
        # 8.03e9 parameters x 14 bytes on 64 ranks are 1.64 GiB; one of them has the embedding of 0.98 GiB besides
        (["job.nodes=16"], 2.5, 4.0),
        # on 8 ranks 13.1 GiB, and the embedding is smaller than a rank's share of the weights
        (["job.nodes=2"], 13.0, 15.0),
    ],
)
def test_the_estimate_of_the_8b(overrides: list[str], low: float, high: float) -> None:
    config = resolve.load_run_config(ROOT / "configs/runs/llama3-8b.yaml", [*overrides, "job.gpus_per_node=4"])
    size = pad_to_multiple(128_256, config.model.make_vocab_size_divisible_by)
    found = host_copy_bytes(config, count_parameters(config.model, size), size)
    assert low * GIB <= found <= high * GIB
    assert found % (1 << 20) == 0
