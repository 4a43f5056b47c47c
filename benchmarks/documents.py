"""What attention to documents costs: by their lengths, against one mask over a whole row.

    python benchmarks/documents.py [--rounds 5]

One layer of 8 heads in 2 groups of 64 channels, forward and backward, a row of 8,192 tokens that is one document, or 4,
16, 64 of equal length. CPU time of this process with one thread, by turns with a mask of [8192, 8192] that the same
documents have. Then the memory of a row of 32,768 tokens in 64 documents, over that of the row as one document: the
most that a process of its own takes for it, without what it has before. A quarter of an hour on an idle core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import _results

HEADS, GROUPS, CHANNELS = 8, 2, 64
ROW, LONG_ROW = 8192, 32768
COUNTS = (1, 4, 16, 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is not None:
        attention = Attention(LONG_ROW)
        before = memory_bytes("VmRSS")
        attention.pass_with(attention.documents(options.memory))
        print(memory_bytes("VmHWM") - before)
        return 0
    figures = measure(options.rounds)
    path = _results.write("documents", figures)
    print(json.dumps(figures, indent=2))
    print(f"written to {path}")
    return 0


def measure(rounds: int) -> dict[str, Any]:
    attention = Attention(ROW)
    found: dict[str, Any] = {}
    for count in COUNTS:
        documents = attention.documents(count)
        own, masked = [], []
        for turn in range(rounds + 1):
            pair = [spent(lambda d=documents: attention.pass_with(d)), spent(lambda d=documents: attention.masked(d))]
            if turn:  # the first allocates
                own.append(pair[0])
                masked.append(pair[1])
        found[str(count)] = {
            "cpu_seconds": _results.spread(own),
            "cpu_seconds_masked": _results.spread(masked),
            "masked_over_ours": _results.spread([other / one for one, other in zip(own, masked, strict=True)]),
        }
    memory = [pass_bytes(64) / pass_bytes(1)]  # once: it does not depend on what else the machine does
    return {"documents": found, "memory_over_one_document": _results.spread(memory), "load_average": os.getloadavg()[0]}


def memory_bytes(name: str) -> int:
    """A value of this process; getrusage's peak would be that of the process that started it, where that is larger."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def pass_bytes(count: int) -> int:
    done = subprocess.run([sys.executable, __file__, f"--memory={count}"], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def spent(action: Callable[[], None]) -> float:
    begun = time.process_time()
    action()
    return time.process_time() - begun


class Attention:
    """The attention of the local layers, and the same tensors for it each time."""

    def __init__(self, length: int) -> None:
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.transformer import TransformerConfig

        from relayrun.train.model.attention import CausalAttention

        torch.set_num_threads(1)
        self.length = length
        config = TransformerConfig(
            num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS, attention_dropout=0.0
        )
        self.module = CausalAttention(config)
        generator = torch.Generator().manual_seed(28)
        self.parts = [
            torch.randn((length, 1, heads, CHANNELS), generator=generator).to(torch.bfloat16).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        ]

    def documents(self, count: int) -> Any:
        import torch

        from relayrun.train.model.packed_documents import PackedDocuments

        return PackedDocuments(lengths=[[self.length // count] * count], device=torch.device("cpu"))

    def pass_with(self, documents: Any) -> None:
        self.module(*self.parts, packed_seq_params=documents).sum().backward()

    def masked(self, documents: Any) -> None:
        import torch
        import torch.nn.functional as functional

        (lengths,) = documents.lengths
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        at = torch.arange(self.length)
        mask = (number[:, None] == number) & (at <= at[:, None])
        query, key, value = (part.permute(1, 2, 0, 3) for part in self.parts)
        functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).sum().backward()


if __name__ == "__main__":
    raise SystemExit(main())
