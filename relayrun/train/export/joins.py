"""How one tensor of megatron-core is made of several of transformers: the same, stacked, or by query groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a model, under the names that shapes of a mapping are written in."""

    layers: int
    hidden: int
    vocabulary: int
    """Rows of the embeddings: padded for megatron-core's tensors, not padded for those of transformers."""
    heads: int
    groups: int
    """Key-value heads."""
    head: int
    """Channels of one head."""
    ffn: int
    experts: int = 0
    """Experts of a layer; 0: its feed-forward network is one."""
    expert_ffn: int = 0
    """Width of one expert."""

    @property
    def queries(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.groups * self.head

    @property
    def qkv(self) -> int:
        """Rows of queries, keys and values in one tensor."""
        return self.queries + 2 * self.keys

    @property
    def gate_up(self) -> int:
        """Rows of gate and up projection in one tensor."""
        return 2 * self.ffn

    @property
    def expert_gate_up(self) -> int:
        """Rows of the gate and up projection of one expert in one tensor."""
        return 2 * self.expert_ffn


class Join(Protocol):
    """How tensors become one, and the way back. Shapes are those of one layer, and of one expert."""

    def shapes(self, shape: Shape, sizes: ModelSizes) -> list[Shape]:
        """Return the shapes of the parts of a tensor of this shape."""
        ...

    def split(self, tensor: torch.Tensor, sizes: ModelSizes) -> list[torch.Tensor]:
        """Return the parts of a tensor."""
        ...

    def join(self, parts: Sequence[torch.Tensor], sizes: ModelSizes) -> torch.Tensor:
        """Return the tensor that these are the parts of: the inverse of `split`."""
        ...


class SameTensor:
    """One tensor is one tensor."""

    def shapes(self, shape: Shape, sizes: ModelSizes) -> list[Shape]:
        """Return the shape itself."""
        return [shape]

    def split(self, tensor: torch.Tensor, sizes: ModelSizes) -> list[torch.Tensor]:
        """Return the tensor itself."""
        return [tensor]

    def join(self, parts: Sequence[torch.Tensor], sizes: ModelSizes) -> torch.Tensor:
        """Return the only part."""
        return parts[0]


@dataclass(frozen=True)
class StackedTensors:
    """Several tensors of one shape lie one behind the other in the first dimension."""

    count: int

    def shapes(self, shape: Shape, sizes: ModelSizes) -> list[Shape]:
        """Return the shape of a part, `count` times."""
        return [(shape[0] // self.count, *shape[1:])] * self.count

    def split(self, tensor: torch.Tensor, sizes: ModelSizes) -> list[torch.Tensor]:
        """Return `count` equal parts."""
        return list(tensor.chunk(self.count))

    def join(self, parts: Sequence[torch.Tensor], sizes: ModelSizes) -> torch.Tensor:
        """Return the parts, one behind the other."""
        return torch.cat(list(parts))


class QueryKeyValue:
    """Each query group has its queries, then its key, then its value; transformers has all queries, keys, values apart.

    Rotary positions turn the two halves of a head against each other in both (rotary_interleaved is off), so nothing
    within a head is permuted.
    """

    def shapes(self, shape: Shape, sizes: ModelSizes) -> list[Shape]:
        """Return the shapes of queries, keys and values."""
        return [(rows, *shape[1:]) for rows in (sizes.queries, sizes.keys, sizes.keys)]

    def split(self, tensor: torch.Tensor, sizes: ModelSizes) -> list[torch.Tensor]:
        """Return queries, keys and values."""
        rest = tensor.shape[1:]
        own = sizes.queries // sizes.groups
        by_group = tensor.view(sizes.groups, own + 2 * sizes.head, *rest)
        bounds = [0, own, own + sizes.head, own + 2 * sizes.head]
        return [by_group[:, start:end].reshape(-1, *rest) for start, end in itertools.pairwise(bounds)]

    def join(self, parts: Sequence[torch.Tensor], sizes: ModelSizes) -> torch.Tensor:
        """Return queries, keys and values group by group."""
        rest = parts[0].shape[1:]
        by_group = torch.cat([part.view(sizes.groups, -1, *rest) for part in parts], dim=1)
        return by_group.reshape(-1, *rest)


SAME, QKV, GATE_UP = SameTensor(), QueryKeyValue(), StackedTensors(2)
