"""Context parallelism by heads: for attention alone, every rank gets the whole sequence and a part of the heads.

An all-to-all before attention and one behind it (DeepSpeed-Ulysses, arXiv 2309.14509). Attention itself then runs as
on one rank, with any documents in the sequence. megatron-core's other layers see the tokens of their rank: of 2 n equal
parts of a sequence, rank r of n has the parts r and 2 n - 1 - r (`get_batch_on_this_cp_rank`).
"""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all


def gather_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From this rank's tokens and all heads to all tokens, in order, and this rank's heads.

    query [sequence / n, batch, heads, channels], key and value with groups in the place of heads. Returns them as
    [sequence, batch, heads / n, channels]; groups that are too few are repeated.
    """
    size = parallel_state.get_context_parallel_world_size()
    heads, groups = query.shape[2], key.shape[2]
    if groups % size:
        repeat = size // math.gcd(groups, size)
        repeat = repeat if heads % (groups * repeat) == 0 else heads // groups
        key, value = (part.repeat_interleave(repeat, dim=2) for part in (key, value))
    return _gathered(query, size), _gathered(key, size), _gathered(value, size)


def scatter_sequence(out: torch.Tensor) -> torch.Tensor:
    """Back from all tokens [sequence, batch, heads / n, channels] to this rank's [sequence / n, batch, heads, ...]."""
    size = parallel_state.get_context_parallel_world_size()
    sequence, batch, heads, channels = out.shape
    parts = out.reshape(2 * size, sequence // (2 * size), batch, heads, channels)[_of_ranks(size)]
    parts = parts.reshape(size, sequence // size, batch, heads, channels)
    found = all_to_all(parallel_state.get_context_parallel_group(), parts)  # [n of heads, sequence / n, ...]
    return found.permute(1, 2, 0, 3, 4).reshape(sequence // size, batch, size * heads, channels)  # type: ignore[no-any-return]


def _gathered(part: torch.Tensor, size: int) -> torch.Tensor:
    own, batch, heads, channels = part.shape
    by_rank = part.view(own, batch, size, heads // size, channels).permute(2, 0, 1, 3, 4)
    found = all_to_all(parallel_state.get_context_parallel_group(), by_rank)  # [n of tokens, sequence / n, ...]
    pieces = found.view(2 * size, own // 2, batch, heads // size, channels)
    order = torch.tensor(_of_ranks(size)).argsort().tolist()
    return pieces[order].view(own * size, batch, heads // size, channels)  # type: ignore[no-any-return]


def _of_ranks(size: int) -> list[int]:
    """The parts of a sequence in the order in which the ranks hold them."""
    return [part for rank in range(size) for part in (rank, 2 * size - 1 - rank)]
