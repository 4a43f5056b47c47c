"""Run by test_training_documents.py, one process a rank: documents in one row against each of them alone, as JSON.

The documents alone are whole sequences of a plain model, so that nothing of what is tested is in what it is tested
against. Both run in the same layout on the same weights: fresh ones, and ones that a few steps have made sharp.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

warnings.simplefilter("ignore")
rank, world_size, port, settings = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.train import distributed  # noqa: E402
from relayrun.train.model import cpu_patches  # noqa: E402

cpu_patches.patch_for_cpu()

from relayrun.train.model.gpt import MicroBatch, ModelStage  # noqa: E402

VOCABULARY, LENGTH, EOD, STEPS = 64, 96, 5, 12
SECTIONS: dict[str, Any] = json.loads(settings)
LAYOUT = SECTIONS.get("parallel", {})
PARTS = 2 * LAYOUT["context_parallel_size"] if "context_parallel_size" in LAYOUT else 1
MULTIPLE = PARTS * (LAYOUT["tensor_model_parallel_size"] if LAYOUT.get("sequence_parallel") else 1)
"""A document whose length is no multiple of it cannot be a sequence of its own."""
CUTS = [
    [[LENGTH], [MULTIPLE, LENGTH - MULTIPLE]],  # the whole window; the shortest document
    [[8, 16, 32, 40], [max(4, MULTIPLE)] * (LENGTH // max(4, MULTIPLE))],
] + ([] if MULTIPLE > 1 else [[[1, 1, 93, 1], [2, 57, 5, 32]], [[1] * LENGTH, [13, 31, 52]]])
"""Lengths of the documents in the rows of a micro-batch, for each micro-batch."""


def config(length: int, *, documents: bool) -> RunConfig:
    names = ("reset_attention_mask", "reset_position_ids")
    sections: dict[str, Any] = {
        "project": "tests",
        "name": "documents",
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "rotary_base": 100,
        }
        | SECTIONS.get("model", {}),
        "data": {"tokenizer": "none", "datasets": ["none"], **dict.fromkeys(names, documents)},
        "training": {"steps": 1, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": length, "threads": 1}
        | SECTIONS.get("training", {}),
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": 1},
        "parallel": SECTIONS.get("parallel", {}),
        "job": {"time": "1", "ntasks_per_node": int(world_size)},
        "cluster": {"name": "t", "scheduler": "local"},
    }
    return RunConfig.model_validate_json(json.dumps(sections))


def rows(cuts: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """Token ids [rows, LENGTH + 1]: random ones, with an end of document where a document ends."""
    tokens = np.random.default_rng(seed).integers(EOD + 1, VOCABULARY, (len(cuts), LENGTH + 1))
    for row, lengths in zip(tokens, cuts, strict=True):
        row[np.cumsum(lengths)[:-1] - 1] = EOD
    return tokens


def gradients(model: ModelStage, batches: list[MicroBatch]) -> tuple[float, list[torch.Tensor]]:
    """Sum of the samples' mean losses, and the gradients of their mean."""
    model.zero_grad()
    loss = model.run(batches, train=True)
    return loss.total, [p.main_grad.clone().double() for chunk in model.chunks for p in chunk.parameters()]


def together(model: ModelStage, batches: list[np.ndarray]) -> tuple[float, list[torch.Tensor]]:
    return gradients(model, [MicroBatch(tokens=tokens) for tokens in batches])


def apart(model: ModelStage, batches: list[np.ndarray]) -> tuple[float, list[torch.Tensor]]:
    """The same from each document as a sequence of its own, weighted by its tokens."""
    total, sums = 0.0, None
    count = sum(len(tokens) for tokens in batches)
    for tokens, cuts in zip(batches, CUTS, strict=True):
        for row, lengths in zip(tokens, cuts, strict=True):
            ends = np.cumsum(lengths)
            for end, length in zip(ends, lengths, strict=True):
                model.seq_length = length
                model._positions = torch.arange(length)
                document = MicroBatch(tokens=row[None, end - length : end + 1])
                loss, found = gradients(model, [document] * model.batches_multiple)
                share = length / LENGTH
                total += share * loss / model.batches_multiple
                parts = [share / count * part for part in found]
                sums = parts if sums is None else [one + other for one, other in zip(sums, parts, strict=True)]
    assert sums is not None
    return total, sums


def sharpen(model: ModelStage, batches: list[np.ndarray]) -> None:
    for _ in range(STEPS):
        _, found = together(model, batches)
        square = torch.stack([part.norm() for part in found]).square().sum()
        torch.distributed.all_reduce(square)  # ranks that hold the same weights must change them alike
        norm = square.sqrt()
        with torch.no_grad():
            parameters = [p for chunk in model.chunks for p in chunk.parameters()]
            for parameter, part in zip(parameters, found, strict=True):
                parameter -= (0.5 * part / norm).to(parameter.dtype)


def main() -> None:
    torch.set_num_threads(1)
    ranks = distributed.start_process_groups(config(LENGTH, documents=True))
    packed = ModelStage(config(LENGTH, documents=True), ranks, VOCABULARY, eod=EOD)
    plain = ModelStage(config(LENGTH, documents=False), ranks, VOCABULARY, eod=EOD)
    batches = [rows(cuts, seed) for seed, cuts in enumerate(CUTS)]
    found: dict[str, Any] = {}
    for weights in ("fresh", "sharp"):
        if weights == "sharp":
            sharpen(packed, batches)
        with torch.no_grad():
            for one, other in zip(plain.chunks, packed.chunks, strict=True):
                for to, of in zip(one.parameters(), other.parameters(), strict=True):
                    to.copy_(of)
        plain.seq_length, plain._positions = LENGTH, torch.arange(LENGTH)
        whole_loss, _ = together(plain, batches)
        loss, of_rows = together(packed, batches)
        right_loss, right = apart(plain, batches)
        error = torch.stack([(one - other).norm() for one, other in zip(of_rows, right, strict=True)]).norm()
        norm = torch.stack([part.norm() for part in right]).norm()
        samples = sum(len(tokens) for tokens in batches)
        found[weights] = {
            "loss": loss / samples,
            "error": abs(loss - right_loss) / samples,
            "gradient error": (error / norm).item(),
            "without documents": abs(whole_loss - right_loss) / samples,
        }
    print(json.dumps(found if ranks.is_last_stage else {}))
    sys.stdout.flush()
    distributed.stop_process_groups()
    os._exit(0)


if __name__ == "__main__":
    main()
