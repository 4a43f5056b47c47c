"""Attention as training calls it, forward and backward: the kernel that torch picks, and its speed.

Whole sequences, documents (`data.reset_attention_mask`) and a sliding window (`model.transformer.window_size`) use
`CausalAttention`, the module of a training run. FLOPs count the
visible pairs, with a backward pass of 2.5 times the forward pass: 3.5 x 2 x 2 x channels x heads x pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from relayrun.lab.gpucheck.programs.common import RankProgram, median_seconds, wait_for
from relayrun.train.model.attention import CausalAttention
from relayrun.train.model.packed_documents import PackedDocuments

KERNEL_PREFIXES = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention",
    "aten::_cudnn_attention",
    "aten::_efficient_attention",
)
"""Operations whose names tell which implementation `scaled_dot_product_attention` has chosen."""


class AttentionTensors:
    """Tensors of an attention layer in megatron-core's layout: [sequence, batch, heads, channels]."""

    def __init__(self, program: RankProgram) -> None:
        given = program.setup.sizes.attention
        self.batch, self.sequence, self.channels = given["batch"], given["sequence"], given["channels"]
        self.heads, self.groups = given["heads"], given["groups"]
        self.device = program.device
        self.dtype = torch.bfloat16 if program.device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(28)
        cuts = torch.randperm(self.sequence - 1, generator=generator)[: given["documents"] - 1] + 1
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), cuts.sort().values, torch.tensor([self.sequence])])
        self.lengths = bounds.diff().repeat(self.batch)
        """Tokens of each document, row after row."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value with new random values."""
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "requires_grad": True}
        query, key, value = (
            torch.randn(self.sequence, self.batch, heads, self.channels, **options)
            for heads in (self.heads, self.groups, self.groups)
        )
        return query, key, value

    def documents(self) -> PackedDocuments:
        """Return the documents in training's format."""
        return PackedDocuments(lengths=self.lengths.view(self.batch, -1).tolist(), device=self.device)

    @property
    def window(self) -> int:
        """Preceding tokens that a token sees with a window."""
        return self.sequence // 8

    def pairs(self, lengths: torch.Tensor) -> float:
        """Return the number of visible pairs in sequences of these lengths."""
        return float((lengths.double() ** 2).sum()) / 2

    def pairs_with_window(self) -> float:
        """Return the number of visible pairs in whole sequences with a window."""
        return self.batch * float((torch.arange(self.sequence).clamp(max=self.window) + 1).sum())


def attention_module(shape: AttentionTensors, window: int | None = None) -> CausalAttention:
    """Return the attention of a training run's local layers, with or without a sliding window."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.heads * shape.channels,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        attention_dropout=0.0,
        params_dtype=shape.dtype,
        window_size=None if window is None else (window, 0),
    )
    return CausalAttention(config)


def measure_call(
    shape: AttentionTensors,
    forward: Callable[[], torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    pairs: float,
    repeats: int,
) -> dict[str, Any]:
    """Return speed and kernels of one attention call."""
    flops = 3.5 * 2 * 2 * shape.channels * shape.heads * pairs
    gradient = torch.randn_like(forward())

    def both() -> None:
        for part in inputs:
            part.grad = None  # accumulating gradients is not part of attention
        forward().backward(gradient)  # type: ignore[no-untyped-call]

    seconds = median_seconds(both, shape.device, repeats=repeats)
    found: dict[str, Any] = {"seconds": seconds, "tflops": flops / seconds / 1e12}
    return found | attention_kernels(both, shape.device)


def attention_kernels(action: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return the attention operations of torch, and the longest GPU kernels with seconds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        action()
        wait_for(device)
    operations = sorted(
        {event.name for event in profile.events() or () if event.name.startswith((*KERNEL_PREFIXES, "torch_attn::"))}
    )
    spent: dict[str, float] = {}
    for event in profile.events() or ():
        if str(getattr(event, "device_type", "")).endswith("CUDA"):
            spent[event.name] = spent.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
    longest = sorted(spent.items(), key=lambda entry: -entry[1])[:4]
    return {"operations": operations, "kernels": [{"name": name[:120], "seconds": value} for name, value in longest]}


WAYS = {
    "whole": "attention of whole sequences",
    "packed": "attention of packed documents",
    "window": "attention of whole sequences, with a window",
}
"""Descriptions by name."""


def measure_way(program: RankProgram, name: str) -> dict[str, Any]:
    """Return speed and kernels of attention in one of the `WAYS`."""
    shape = AttentionTensors(program)
    pairs = {"whole": shape.pairs(torch.full((shape.batch,), shape.sequence)), "window": shape.pairs_with_window()}
    attend = attention_module(shape, shape.window if name == "window" else None)
    documents, inputs = shape.documents() if name == "packed" else None, shape.inputs()
    forward = partial(attend.__call__, *inputs, packed_seq_params=documents)
    made = measure_call(
        shape, forward, inputs, pairs.get(name, shape.pairs(shape.lengths)), program.setup.sizes.repeats
    )
    kernels = [each for each in made["operations"] if "backward" not in each]
    ran = ", ".join(each.removeprefix("aten::_").removeprefix("torch_attn::_") for each in kernels) or "unknown"
    longest = f"; {made['kernels'][0]['name'][:50]}" if made["kernels"] else ""
    return made | {"words": f"{made['tflops']:,.4g} TFLOP/s, {1000 * made['seconds']:.4g} ms: {ran}{longest}"}
