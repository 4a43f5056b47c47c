"""Run by test_training_document_windows.py, one process: packed rows against each of their windows alone, as JSON.

The windows alone are whole sequences of a model of the order `window`, with the same weights.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
port, folder = sys.argv[1:]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.tokens.order.document_packing import DocumentWindowOrder  # noqa: E402
from relayrun.tokens.order.sample_rows import RowBatch  # noqa: E402
from relayrun.tokens.shards.manifest import DatasetManifest  # noqa: E402
from relayrun.tokens.shards.shard import ShardWriter  # noqa: E402
from relayrun.train import distributed  # noqa: E402
from relayrun.train.model import cpu_patches  # noqa: E402

cpu_patches.patch_for_cpu()

from relayrun.train.model.gpt import MicroBatch, ModelStage  # noqa: E402

VOCABULARY, LENGTH, BOS, EOS = 64, 48, 1, 2
PACKINGS = ("none", "pad", "greedy", "first_fit", "best_fit")


def config(data: dict[str, Any], mean: str) -> RunConfig:
    sections: dict[str, Any] = {
        "project": "tests",
        "name": "windows",
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "init_method_std": 0.2,
            "rotary_base": 100,
        },
        "data": {"tokenizer": "none", "datasets": ["none"], **data},
        "training": {
            "steps": 1,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "seq_length": LENGTH,
            "threads": 1,
            "loss_mean": mean,
        },
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": 1},
        "job": {"time": "1", "ntasks_per_node": 1},
        "cluster": {"name": "t", "scheduler": "local"},
    }
    return RunConfig.model_validate_json(json.dumps(sections))


def gradients(model: ModelStage, batches: list[MicroBatch]) -> tuple[float, float, list[torch.Tensor]]:
    """Sum and count of the losses, and the gradients of their mean."""
    model.zero_grad()
    loss = model.run(batches, train=True)
    return loss.total, loss.count, [p.main_grad.clone().double() for p in model.chunks[0].parameters()]


def main() -> None:
    torch.set_num_threads(1)
    generator = np.random.default_rng(4)
    lengths = generator.integers(1, 90, 14)
    writer = ShardWriter(Path(folder) / "s", np.uint16)
    writer.add(generator.integers(3, VOCABULARY, lengths.sum()), lengths)
    writer.finish()
    manifest = DatasetManifest.build([Path(folder) / "s"])
    plain_config = config({}, "token")
    ranks = distributed.start_process_groups(plain_config)
    plain = ModelStage(plain_config, ranks, VOCABULARY)
    found: dict[str, Any] = {}
    for packing in PACKINGS:
        cut = {"window": 40, "overlap": 7, "bos": BOS, "eos": EOS, "packing": packing}
        packed_config = config({"order": "document-window", "document_window": cut}, "token")
        packed = ModelStage(packed_config, ranks, VOCABULARY)
        with torch.no_grad():
            for to, of in zip(packed.chunks[0].parameters(), plain.chunks[0].parameters(), strict=True):
                to.copy_(of)
        settings = packed_config.data.cut_by_document["train"]
        order = DocumentWindowOrder(manifest, settings, seq_length=LENGTH, seed=1, name="train")
        rows = [RowBatch.stack([order.row(0, i)]) for i in range(len(order))]
        batches = [MicroBatch(tokens=row.tokens, lengths=row.lengths, loss_mask=row.loss_mask) for row in rows]
        total, count, together = gradients(packed, batches)
        right, targets, apart = 0.0, 0, [torch.zeros_like(part) for part in together]
        windows = [order.rows.windows.read(i) for i in range(len(order.rows.windows))]
        for window in windows:
            plain.seq_length = len(window) - 1
            plain._positions = torch.arange(plain.seq_length)
            mean, _, parts = gradients(plain, [MicroBatch(tokens=window[None])])
            right, targets = right + mean * plain.seq_length, targets + plain.seq_length
            apart = [sum_ + part * plain.seq_length for sum_, part in zip(apart, parts, strict=True)]
        apart = [part / targets for part in apart]
        error = torch.stack([(one - other).norm() for one, other in zip(together, apart, strict=True)]).norm()
        norm = torch.stack([part.norm() for part in apart]).norm()
        found[packing] = {
            "loss": total / count,
            "error": abs(total / count - right / targets),
            "gradient error": (error / norm).item(),
            "tokens": [int(count), targets],
            "rows": len(rows),
            "windows": len(windows),
        }
    print(json.dumps(found))
    sys.stdout.flush()
    distributed.stop_process_groups()
    os._exit(0)


if __name__ == "__main__":
    main()
