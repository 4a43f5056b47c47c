"""What documents of one sample see of each other, in the model itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import warm

PROGRAM = """
import os, sys, json
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
import numpy as np
from relayrun.config.schema import RunConfig
from relayrun.training import parallel
from relayrun.training.model import device_shim
device_shim.install()
from relayrun.training.model.gpt import MicroBatch, Model

def config(length, **data):
    return RunConfig.model_validate_json(json.dumps({
        "project": "t", "name": "t",
        "model": {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
                  "num_query_groups": 2},
        "data": {"tokenizer": "none", "datasets": ["none"], **data},
        "training": {"steps": 1, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": length},
        "optimizer": {"lr": 1e-3}, "checkpoint": {"interval": 1}, "job": {"time": "1"},
        "cluster": {"name": "t", "scheduler": "local"}}))

ranks = parallel.start(config(4))

def loss(tokens, **data):
    model = Model(config(len(tokens) - 1, **data), ranks, 64, eod=0)
    model.train_mode(False)
    sums = model.run([MicroBatch(tokens=np.array([tokens]))], train=False)
    return sums.total / sums.count

reset = {"reset_attention_mask": True, "reset_position_ids": True}
first, second = [7, 3, 9, 0], [11, 12, 13, 14, 0]
apart = 3 * loss(first, **reset), 4 * loss(second, **reset)
together = loss(first + second, **reset, eod_mask_loss=True)
plain = loss(first + second, eod_mask_loss=True)
print(json.dumps([apart, together, plain]))
parallel.stop()
"""


@pytest.mark.slow
def test_documents_together_have_the_loss_of_documents_apart(tmp_path: Path) -> None:
    """Two documents in one sample, attention reset, the joint masked: exactly the losses of two samples."""
    import json
    import socket

    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = warm.run([sys.executable, str(script), str(port)])
    assert done.returncode == 0, done.stderr
    apart, together, plain = json.loads(done.stdout.splitlines()[-1])
    assert together == pytest.approx(sum(apart) / 7, abs=2e-6)
    assert abs(plain - together) > 1e-5
