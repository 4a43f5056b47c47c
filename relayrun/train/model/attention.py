"""Attention on torch alone, in place of megatron-core's: causal attention, and multi-latent attention (MLA).

megatron-core's DotProductAttention keeps scores and probabilities of [batch, heads, sequence, sequence] for every
layer. torch selects a flash kernel, on GPUs and on CPUs, whose memory grows with the sequence instead of its square.
With attention dropout on a CPU torch has no such kernel and computes the matrix.

Documents (`data.reset_attention_mask`) are attended to separately, without a mask: on GPUs in one call of torch's
kernel for variable lengths (`attend_varlen`), elsewhere one after the other. A sliding window
(`model.transformer.window_size`) is an option of that kernel; elsewhere a sequence is processed in blocks, each with
the tokens in its window, so time grows with sequence x window.

Context parallelism splits attention by heads, with an all-to-all before and after it (DeepSpeed-Ulysses, arXiv
2309.14509): `gather_sequence` gives every rank the whole sequence and a part of the heads. Other layers see the tokens
of their rank: of 2 n equal parts of a sequence, rank r of n has the parts r and 2 n - 1 - r
(`get_batch_on_this_cp_rank`).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.backends import cuda
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend

from relayrun.train.model.packed_documents import PackedDocuments, whole_rows

log = logging.getLogger(__name__)
SHORTEST_BLOCK = 128
"""Least tokens of a block of a sequence with a window."""


class CausalAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """`core_attention` for megatron-core's layer specs, with their arguments."""

    def __init__(
        self, config: TransformerConfig, *, layer_number: int = 1, softmax_scale: float | None = None, **_: Any
    ) -> None:
        """`layer_number` counts from 1: a pattern sets the layers with a window."""
        super().__init__(config=config)
        pattern = config.window_attn_skip_freq
        windowed = is_layer_window_attention(config.window_size, pattern, layer_number)
        self._window: int | None = config.window_size[0] if windowed else None
        self._scale = softmax_scale
        self._dropout = config.attention_dropout
        self._forked = config.sequence_parallel
        self._context_size, self._logged = config.context_parallel_size, False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *_: Any,
        packed_seq_params: PackedDocuments | None = None,
        **__: Any,
    ) -> Tensor:
        """Attend with query [sequence, batch, heads, channels] to key and value [sequence, batch, groups, channels].

        Returns [sequence, batch, heads * channels], with the channels of value, which may differ from query and key.
        Heads and groups are those of this tensor-parallel rank, the sequence is this context-parallel rank's part. A
        token sees the tokens before it in its row, or in its document with `packed_seq_params`, which describe whole
        rows. There is no mask.
        """
        assert attention_mask is None
        channels = value.shape[-1]
        query, key, value = _of_one_width(query, key, value)
        if self._context_size > 1:
            query, key, value = gather_sequence(query, key, value)
        dropout = self._dropout if self.training else 0.0
        # Heads are split over tensor-parallel ranks: each draws its own masks. With sequence parallelism whole layers
        # are in such a fork; recomputed, they have its state but not its name, and a second fork would draw anew.
        if dropout and not self._forked:
            with get_cuda_rng_tracker().fork():
                out = self._attend(query, key, value, packed_seq_params, dropout)
        else:
            out = self._attend(query, key, value, packed_seq_params, dropout)
        if self._context_size > 1:
            out = all_to_all_heads_to_sequence(out)
        return out[..., :channels].flatten(2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments | None, dropout: float
    ) -> Tensor:
        """Attend over whole rows; return [sequence, batch, heads, channels]."""
        packed = documents is not None or self._window is not None
        if packed and not dropout and varlen_usable(query, window=self._window):
            _log_kernel("varlen_attn, for packed rows or a window")
            rows = documents or whole_rows(query.shape[1], query.shape[0], query.device)
            return attend_varlen(query, key, value, rows, scale=self._scale, window=self._window)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if documents is None:
            return self._sequence(query, key, value, dropout).permute(2, 0, 1, 3)
        outs = []
        for row, lengths in enumerate(documents.lengths):
            queries, keys, values = (
                torch.split(part[row : row + 1], list(lengths), dim=2) for part in (query, key, value)
            )
            each = zip(queries, keys, values, strict=True)
            outs.append(torch.cat([self._sequence(q, k, v, dropout) for q, k, v in each], dim=2))
        return torch.cat(outs).permute(2, 0, 1, 3)

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Attend within one sequence, all [batch, heads or groups, sequence, channels]."""
        length, window = query.shape[2], self._window
        if window is None or length <= window + 1:
            return self._call(query, key, value, dropout)
        block, outs, masks = max(window + 1, SHORTEST_BLOCK), [], {}
        for begin in range(0, length, block):
            end, first = min(begin + block, length), max(0, begin - window)
            shape = begin - first, end - begin
            if shape not in masks:
                masks[shape] = _within(window, *shape, device=query.device)
            own, keys, values = query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end]
            outs.append(self._call(own, keys, values, dropout, masks[shape]))
        return torch.cat(outs, dim=2)

    def _call(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
        """Call torch's kernel for [batch, heads or groups, sequence, channels]: causal, or with a mask."""
        repeat = query.shape[1] // key.shape[1]
        shared = repeat > 1 and _kernel_takes_groups(query, key, value, dropout, mask)
        if repeat > 1 and not shared:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        if query.is_cuda and not self._logged:
            kernel = torch._fused_sdp_choice(query, key, value, mask, dropout, mask is None, enable_gqa=shared)
            _log_kernel(f"{SDPBackend(kernel).name} of scaled_dot_product_attention")
            self._logged = True
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=shared,
        )


@cache
def _log_kernel(name: str) -> None:
    """Log on rank 0 that attention has used this kernel, once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info("attention: %s", name)


def _within(window: int, before: int, length: int, *, device: torch.device) -> Tensor:
    """Return the mask [length, before + length]: True for the tokens that each token of a block sees."""
    own = torch.arange(before, before + length, device=device)[:, None]
    other = torch.arange(before + length, device=device)
    return (other <= own) & (other >= own - window)


def _of_one_width(*parts: Tensor) -> list[Tensor]:
    """Pad the channels of query, key and value to the widest with zeros, which do not change the result. torch's flash
    kernels need equal channels in value and query; without a flash kernel torch keeps all scores."""
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else functional.pad(part, (0, width - part.shape[-1])) for part in parts]


def _kernel_takes_groups(query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None) -> bool:
    """True if torch reads grouped keys and values directly, all [batch, heads or groups, sequence, channels].

    The flash kernel of CPUs does. On GPUs flash does, which lacks fp32, and the memory-efficient kernel in some
    versions of torch. Without either torch would fall back to the whole matrix.
    """
    if key.device.type == "cpu":
        return True
    asked = SDPAParams(query, key, value, mask, dropout, mask is None, True)
    return cuda.can_use_flash_attention(asked) or cuda.can_use_efficient_attention(asked)


def varlen_usable(query: Tensor, *, window: int | None = None) -> bool:
    """True if it has a kernel for this device, type and window: flash attention's, for 16 bits."""
    call = varlen_function()
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16) or call is None:
        return False
    if window is not None and "window_size" not in inspect.signature(call).parameters:
        return False
    return query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


@cache
def varlen_function() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn`; None if this torch lacks it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    *,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Attend with query [sequence, batch, heads, channels] to key and value of groups; return query's shape."""
    call = varlen_function()
    assert call is not None
    sequence, batch = query.shape[:2]
    heads, groups = query.shape[2], key.shape[2]
    known = inspect.signature(call).parameters
    asked, takes_groups = varlen_options(known, grouped=groups != heads, window=window)
    if groups != heads and not takes_groups:
        key, value = (part.repeat_interleave(heads // groups, dim=2) for part in (key, value))
    if scale is not None:
        asked["scale"] = scale
    # rows one after the other, as the bounds count
    flat = (part.transpose(0, 1).reshape(batch * sequence, part.shape[2], -1) for part in (query, key, value))
    bounds, longest = documents.bounds, documents.longest
    out = call(*flat, bounds, bounds, longest, longest, **asked)
    out = out[0] if isinstance(out, tuple) else out
    return out.view(batch, sequence, heads, -1).transpose(0, 1)  # type: ignore[no-any-return]


def varlen_options(known: Iterable[str], *, grouped: bool, window: int | None = None) -> tuple[dict[str, Any], bool]:
    """Return the arguments of causal attention for a function with these argument names, which differ between versions.

    Also returns True if the function takes grouped keys and values; else it needs them for every head. `window`: number
    of previous tokens that a token sees; None: all.
    """
    left = -1 if window is None else window
    causal: dict[str, Any] = {"window_size": (left, 0)} if "window_size" in known else {"is_causal": True}
    takes = "enable_gqa" in known
    return causal | ({"enable_gqa": True} if takes and grouped else {}), takes


def gather_sequence(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens of all heads for all tokens, in order, of this rank's heads.

    query [sequence / n, batch, heads, channels], key and value with groups in place of heads. Returns them as
    [sequence, batch, heads / n, channels]; too few groups are repeated.
    """
    size = parallel_state.get_context_parallel_world_size()
    heads, groups = query.shape[2], key.shape[2]
    if groups % size:
        repeat = size // math.gcd(groups, size)
        repeat = repeat if heads % (groups * repeat) == 0 else heads // groups
        key, value = (part.repeat_interleave(repeat, dim=2) for part in (key, value))
    return _gathered(query, size), _gathered(key, size), _gathered(value, size)


def all_to_all_heads_to_sequence(out: Tensor) -> Tensor:
    """Exchange [sequence, batch, heads / n, channels] for this rank's [sequence / n, batch, heads, channels]."""
    size = parallel_state.get_context_parallel_world_size()
    sequence, batch, heads, channels = out.shape
    parts = _reordered(out, _of_ranks(size)).reshape(size, sequence // size, batch, heads, channels)
    found = all_to_all(parallel_state.get_context_parallel_group(), parts)  # [n of heads, sequence / n, ...]
    return found.permute(1, 2, 0, 3, 4).reshape(sequence // size, batch, size * heads, channels)  # type: ignore[no-any-return]


def _gathered(part: Tensor, size: int) -> Tensor:
    own, batch, heads, channels = part.shape
    by_rank = part.view(own, batch, size, heads // size, channels).permute(2, 0, 1, 3, 4)
    found = all_to_all(parallel_state.get_context_parallel_group(), by_rank)  # [n of tokens, sequence / n, ...]
    order = sorted(range(2 * size), key=_of_ranks(size).__getitem__)
    return _reordered(found.view(own * size, batch, heads // size, channels), order)


def _reordered(tokens: Tensor, order: Sequence[int]) -> Tensor:
    """Return equal parts of the first axis in this order: slices, since a list as an index is copied to the GPU, for
    which the host waits, and its gradient sorts the indices."""
    parts = tokens.chunk(len(order))
    return torch.cat([parts[place] for place in order])


def _of_ranks(size: int) -> list[int]:
    """Return the parts of a sequence in the order in which the ranks hold them."""
    return [part for rank in range(size) for part in (rank, 2 * size - 1 - rank)]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # megatron-core has no types
    """Attention of a layer. Documents concern only its core attention, and positions are set from outside.

    megatron-core's own drops a batch axis of size 1 if there are documents, as its format `thd` requires.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if isinstance(self.linear_kv_down_proj, ColumnParallelLinear) and self.pg_collection.tp.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gathered)

    def _gathered(self, _: torch.nn.Module, __: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Gather the tensor-parallel projection to keys and values here instead of in the base class.

        Fault: all heads share the rotary channels of a key, and a rank has their gradient for its own heads only.
        megatron-core 0.16.1 gathers the channels (multi_latent_attention.py) with a backward pass that takes a rank's
        part of its own gradient, which is right only after a column-parallel layer.
        """
        whole = gather_from_tensor_model_parallel_region(out[0])
        if self.config.sequence_parallel:  # of this rank's tokens; the base class gathers the rotary channels, and sums
            return scatter_to_sequence_parallel_region(whole), out[1]
        compressed, positions = whole.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        summed = _OfAllHeads.apply(positions, self.pg_collection.tp)  # type: ignore[no-untyped-call]
        return torch.cat([compressed, summed], dim=-1), out[1]

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> tuple[Tensor, ...]:
        """Return query, key and value [sequence, batch, heads, channels], and their inputs."""
        seen = None if isinstance(packed_seq_params, PackedDocuments) else packed_seq_params
        found: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, seen, **named
        )
        return found


class _OfAllHeads(torch.autograd.Function):
    """Identity; its gradient is the sum over tensor-parallel ranks.

    megatron-core's `copy_to_tensor_model_parallel_region` sums a copy of a gradient that is a view, and returns the
    original (tensor_parallel/mappings.py, `_reduce`).
    """

    @staticmethod
    def forward(context: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=context.group)
        return summed, None
