"""The part of a parameter that a data-parallel rank holds, as parts of the tensors in a checkpoint.

The distributed optimizer gives each rank a range of the flattened parameter; a checkpoint names parts of tensors
by offset and size along each axis. A range of a matrix is up to three such blocks: the end of a row, whole rows,
the beginning of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

TensorBlock = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size along each axis."""


def row_major_blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorBlock]:
    """The elements [start, stop) of a tensor of this shape, in row-major order, as blocks in the same order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _inside(shape, last, start - last * row, stop - last * row)
        return
    yield from _inside(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _inside(shape, last, 0, stop - last * row)


def _inside(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[TensorBlock]:
    for offset, size in row_major_blocks(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def state_shards(
    parameter: torch.Tensor,
    whole: ShardedBase,
    held: range,
    state: Mapping[str, torch.Tensor],
    *,
    prefix: str,
    instance: int = 0,
) -> dict[str, dict[int, ShardedTensor]]:
    """What a rank saves of a parameter's state, or reads into `state`: by name, in the order of the elements.

    `whole`: how the model saves `parameter`. `held`: the elements of the flattened parameter that the rank
    holds. `state`: flat tensors of as many elements, by name; the result has views of them. Keys are
    `<prefix>.<name>.<the parameter's key>`. `instance`: which of several distributed optimizers this is a part of.
    """
    pieces = list(nested_values([whole.build()] if isinstance(whole, ShardedTensorFactory) else [whole]))
    found: dict[str, dict[int, ShardedTensor]] = {name: {} for name in state}
    for piece in pieces:
        begins = piece.data.storage_offset() - parameter.storage_offset()
        assert piece.data.is_contiguous()
        assert piece.data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        start, stop = (min(max(at - begins, 0), piece.data.numel()) for at in (held.start, held.stop))
        at = begins + start - held.start
        stacked = (1,) * piece.prepend_axis_num  # megatron-core numbers the layers of a stack by a first axis
        for block, elements in row_major_blocks(piece.local_shape, start, stop):
            offset, size = (0,) * len(stacked) + block, stacked + elements
            for name, flat in state.items():
                data = flat[at : at + math.prod(size)].view(size)
                found[name][len(found[name])] = ShardedTensor(
                    key=f"{prefix}.{name}.{piece.key}",
                    data=data,
                    dtype=data.dtype,
                    local_shape=size,
                    global_shape=piece.global_shape,
                    global_offset=tuple(a + b for a, b in zip(piece.global_offset, offset, strict=True)),
                    axis_fragmentations=None,
                    replica_id=(*piece.replica_id[:2], instance),  # no other rank of the instance holds it
                )
            at += math.prod(size)
    return found
