"""Trains a Llama of transformers with torch's AdamW on shards read by numpy; it shares no code with relayrun.

`python independent.py SETTINGS.json OUTPUT.json`: writes the reported loss of every step. Settings are plain values:
`model` (a folder of transformers), `shards` (prefixes) or `rows` (an npz of `tokens` and `masks`; targets other than
`letters` do not count either), `steps`, `batch`, `micro_batch`, `length`, `seed`, `eod` (null: no masks), `mean`,
`lr`, `warmup`, `weight_decay`, `betas`, `eps`, `clip`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

DTYPES = {3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def documents(prefix: str) -> list[np.ndarray]:
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert int.from_bytes(index[9:17], "little") == 1
    dtype = DTYPES[index[17]]
    count = int.from_bytes(index[18:26], "little")
    lengths = np.frombuffer(index, np.int32, count, 34)
    starts = np.frombuffer(index, np.int64, count, 34 + 4 * count)
    data = Path(f"{prefix}.bin").read_bytes()
    return [np.frombuffer(data, dtype, length, start) for length, start in zip(lengths, starts, strict=True)]


def samples(prefixes: list[str], length: int, seed: int) -> np.ndarray:
    """The first epoch of Megatron's GPTDataset: shuffled documents, one stream, windows, shuffled again."""
    found = [document for prefix in prefixes for document in documents(prefix)]
    generator = np.random.RandomState(seed)
    order = np.arange(len(found), dtype=np.int32)
    generator.shuffle(order)
    stream = np.concatenate([found[number] for number in order]).astype(np.int64)
    windows = np.arange((len(stream) - 1) // length, dtype=np.uint32)
    generator.shuffle(windows)
    return np.stack([stream[number * length : number * length + length + 1] for number in windows.tolist()])


def rows_and_masks(settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [samples, length + 1], and which losses count [samples, length]."""
    if settings["rows"] is not None:
        found = np.load(settings["rows"])
        return found["tokens"], found["masks"] * np.isin(found["tokens"][:, 1:], settings["letters"])
    rows = samples(settings["shards"], settings["length"], settings["seed"])
    return rows, np.ones_like(rows[:, 1:]) if settings["eod"] is None else rows[:, :-1] != settings["eod"]


def document_mask(tokens: torch.Tensor, eod: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What may be seen (added to scores), and positions, of inputs [batch, sequence]."""
    batch, length = tokens.shape
    mask = torch.full((batch, 1, length, length), torch.finfo(torch.float32).min)
    positions = torch.zeros_like(tokens)
    for row in range(batch):
        first = 0
        for at in range(length):
            mask[row, 0, at, first : at + 1] = 0.0
            positions[row, at] = at - first
            if tokens[row, at] == eod:
                first = at + 1
    return mask, positions


def rate(settings: dict[str, Any], done: int) -> float:
    if done <= settings["warmup"]:
        return settings["lr"] * done / settings["warmup"]
    share = (done - settings["warmup"]) / (settings["steps"] - settings["warmup"])
    return settings["lr"] * 0.5 * (math.cos(math.pi * share) + 1.0)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(settings["model"], attn_implementation="eager", dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings["weight_decay"]}, {"params": norms, "weight_decay": 0.0}],
        betas=settings["betas"],
        eps=settings["eps"],
    )
    rows, masks = rows_and_masks(settings)
    batch, size, mean = settings["batch"], settings["micro_batch"], settings["mean"]
    reported = []
    for step in range(settings["steps"]):
        for group in adam.param_groups:
            group["lr"] = rate(settings, step)
        own = torch.from_numpy(rows[step * batch : (step + 1) * batch])
        mask = torch.from_numpy(masks[step * batch : (step + 1) * batch]).float()
        counted = int(mask.sum())
        total, by_sample = 0.0, 0.0
        adam.zero_grad()
        for at in range(0, batch, size):
            tokens = own[at : at + size]
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            given: dict[str, Any] = {}
            counts = mask[at : at + size]
            if settings["eod"] is not None:
                given["attention_mask"], given["position_ids"] = document_mask(inputs, settings["eod"])
            logits = model(input_ids=inputs, use_cache=False, **given).logits
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * counts
            sums = losses.sum(dim=1) / counts.sum(dim=1).clamp(min=1)
            if mean == "micro_batch":
                loss = losses.sum() / counts.sum() / (batch // size)
            elif mean == "sample":
                loss = sums.sum() / batch
            else:
                loss = losses.sum() / counted
            loss.backward()
            total += losses.detach().double().sum().item()
            by_sample += sums.detach().double().sum().item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        adam.step()
        reported.append(by_sample / batch if mean == "sample" else total / counted)
    assert not any(name.partition(".")[0] in ("relayrun", "megatron") for name in sys.modules)
    Path(sys.argv[2]).write_text(json.dumps(reported))


if __name__ == "__main__":
    main()
