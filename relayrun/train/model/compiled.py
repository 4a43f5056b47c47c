"""Parts of the model in a few kernels that torch compiles on GPUs: the loss from the logits, and rotary positions.

megatron-core's own loss makes several copies of the logits in fp32, and its fused one still makes two, each of tokens x
vocabulary. Here the logits stay in their type: the forward pass keeps two numbers for a token, its largest logit and
the sum of the exponentials above it, and the backward pass computes the gradient from them. All arithmetic is in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

PIECE_ELEMENTS = 1 << 30
"""Most logits that one kernel processes: from 2^31 on its indices have 64 bits, which makes it seven times slower."""

_ROTATE = rope_utils._apply_rotary_pos_emb_bshd


def compile_rotary_positions() -> None:
    """Let megatron-core rotate queries and keys in one kernel without TransformerEngine, in this whole process."""
    rope_utils._apply_rotary_pos_emb_bshd = _compiled(_ROTATE)


def language_model_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """Return the losses in nats, fp32 [batch, sequence], as GPTModel.compute_language_model_loss does.

    `labels`: int64 [batch, sequence]. `logits`: [sequence, batch, vocabulary of this tensor-parallel rank].
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous())  # type: ignore[no-untyped-call]
    return losses.transpose(0, 1).contiguous()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _pieces(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Return slices of tokens that are equally long where that is possible: each length is compiled anew."""
    pieces = 1
    while -(-tokens // pieces) * vocabulary > PIECE_ELEMENTS and pieces < tokens:
        pieces *= 2
    length = -(-tokens // pieces)
    return (slice(start, start + length) for start in range(0, tokens, length))


def _exponentials_and_target(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token the largest logit, the sum of exp(logit - largest), and the target's logit, or 0 if another
    rank has it."""
    logits = logits.float()
    largest = logits.max(dim=-1).values.clamp(min=torch.finfo(torch.float32).min)  # a part may be masked by -inf
    total = (logits - largest[:, None]).exp().sum(dim=-1)
    here = (target >= 0) & (target < logits.shape[-1])
    own = logits.gather(-1, torch.where(here, target, 0)[:, None])[:, 0]
    return largest, total, torch.where(here, own, 0.0)


def _logit_gradient(
    logits: Tensor, target: Tensor, largest: Tensor, total: Tensor, gradient: Tensor, out: Tensor
) -> None:
    """Write the gradient of the logits into `out`."""
    column = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    probability = (logits.float() - largest[:, None]).exp() / total[:, None]
    out.copy_((probability - (column == target[:, None]).float()) * gradient[:, None])


class _CrossEntropy(torch.autograd.Function):
    """Loss of logits [sequence, batch, vocabulary part] and target ids [sequence, batch]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        rows = logits.detach().reshape(-1, logits.shape[-1])
        tokens, vocabulary = rows.shape
        # int32: a vocabulary is far below 2^31, and the kernel compares it with every column
        ids = (target.reshape(-1) - parallel_state.get_tensor_model_parallel_rank() * vocabulary).int()
        largest, total, own = torch.empty(3, tokens, dtype=torch.float32, device=rows.device)
        for piece in _pieces(tokens, vocabulary):
            largest[piece], total[piece], own[piece] = _compiled(_exponentials_and_target)(
                rows[piece], ids[piece].long()
            )
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            here = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            total, own = sums = torch.stack([total * (here - largest).exp(), own])
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(rows, ids, largest, total)
        ctx.shape = logits.shape
        losses: Tensor = total.log() + (largest - own)
        return losses.view(target.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rows, ids, largest, total = ctx.saved_tensors
        out, gradient = torch.empty_like(rows), gradients[0].reshape(-1).float()
        for piece in _pieces(*rows.shape):
            parts = (each[piece] for each in (rows, ids, largest, total, gradient, out))
            _compiled(_logit_gradient)(*parts)
        return out.view(ctx.shape), None
