"""Mappings between megatron-core and transformers: which tensors correspond, how they are joined, which settings.

A mapping is data. Everything that reads or writes weights by it is here, and knows of no class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from relayrun.config.compose.schema import ModelSection
from relayrun.errors import InputError

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


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True)
class Weight:
    """One tensor of megatron-core, and what it is in transformers."""

    key: str
    """Its name in a checkpoint. The tensor of what begins with `decoder.layers.` has the layers as its first dimension,
    and what is below `mlp.experts.experts.` has the experts as its second."""
    shape: tuple[str | int, ...]
    """That of one layer, and of one expert: names of `ModelSizes`, or numbers."""
    names: tuple[str, ...]
    """Names in transformers. `{layer}` and `{expert}` are filled in."""
    join: Join = SAME
    also: str | None = None
    """Another name of megatron-core for the same, which a checkpoint may have instead."""

    @property
    def in_layers(self) -> bool:
        return self.key.startswith(LAYERS)

    @property
    def in_experts(self) -> bool:
        return EXPERTS in self.key

    def part(self, sizes: ModelSizes) -> Shape:
        """Return the shape of one layer, and of one expert."""
        return tuple(size if isinstance(size, int) else getattr(sizes, size) for size in self.shape)

    def whole(self, sizes: ModelSizes) -> Shape:
        """Return the shape of the whole tensor."""
        experts = (sizes.experts,) if self.in_experts else ()
        return (*((sizes.layers,) if self.in_layers else ()), *experts, *self.part(sizes))


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of megatron-core, or one layer's or one expert's part of it, and what it is in transformers."""

    key: str
    index: tuple[int, ...]
    """Which part: (), (layer,) or (layer, expert)."""
    rows: int | None
    """How many of the tensor's first rows are taken; None: all."""
    shapes: Mapping[str, Shape]
    """Shapes of the tensors that it is in transformers, by their names."""
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    """Splits the tensor into those of `shapes`, in that order."""
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Joins the tensors of `shapes` into this one: the inverse of `split`."""


@dataclass(frozen=True, kw_only=True)
class ModelMapping:
    """A class of transformers, and which of megatron-core's models it is."""

    name: str
    """What people call the model, for messages."""
    model_type: str
    """`model_type` of its config.json."""
    architecture: str
    """The class in transformers, as `architectures` of its config.json has it."""
    weights: tuple[Weight, ...]
    """All weights, in the order of transformers' files."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers that transformers' files hold in every layer and megatron-core does not keep, by name."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `model.transformer` without which a model is not of this class."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of `model.transformer` that config.json has under names of its own."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that are the same for all models of the class which a run can train."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that have another value in transformers than None or False where the file has none."""

    @property
    def with_article(self) -> str:
        """The name within a sentence."""
        return f"an {self.name}" if self.name[0] in "AEIOU" else f"a {self.name}"

    def used(self, model: ModelSection) -> Iterator[Weight]:
        """Return the weights that this model has: a tied output layer is none."""
        return (each for each in self.weights if each.key != OUTPUT or model.untie_embeddings_and_output_weights)

    def megatron_shapes(self, model: ModelSection, padded_vocabulary: int) -> dict[str, Shape]:
        """Return the shape of every weight that a checkpoint of this model holds, by its key."""
        sizes = sizes_of(model, padded_vocabulary)
        return {weight.key: weight.whole(sizes) for weight in self.used(model)}

    def keys(self, model: ModelSection, found: Mapping[str, object]) -> dict[str, str]:
        """Return the keys that a checkpoint with the weights `found` has for those of the mapping."""
        return {each.key: each.also if each.also in found and each.also else each.key for each in self.used(model)}

    def check(self, found: Mapping[str, Shape], model: ModelSection, padded_vocabulary: int, where: object) -> None:
        """Raise InputError unless these are the weights of this model, no more and no less."""
        keys = self.keys(model, found)
        wanted = {keys[key]: shape for key, shape in self.megatron_shapes(model, padded_vocabulary).items()}
        problems = [
            f"{key} has the shape {list(found[key])}, not {list(shape)}" if key in found else f"{key} is missing"
            for key, shape in wanted.items()
            if found.get(key) != shape
        ]
        problems += [f"{key} is no weight of {self.with_article}" for key in found if key not in wanted]
        if problems:
            more = f", and {len(problems) - 1} more differences" if len(problems) > 1 else ""
            raise InputError(
                f"this checkpoint is not the model of its run's config: {problems[0]}{more}",
                where=where,
                hint="give the config that it was trained with",
            )

    def pieces(self, model: ModelSection, vocabulary: int) -> Iterator[MappedTensor]:
        """Return the whole model in the order of transformers' files; `vocabulary`: without padding."""
        sizes = sizes_of(model, vocabulary)
        used = list(self.used(model))
        first = next(number for number, weight in enumerate(used) if weight.in_layers)
        inner = [weight for weight in used if weight.in_layers]
        for weight in used[:first]:
            yield _piece(weight, sizes, ())
        for layer in range(sizes.layers):
            for of_experts, group in itertools.groupby(inner, lambda weight: weight.in_experts):
                together = list(group)
                for expert in range(sizes.experts) if of_experts else (None,):
                    index = (layer,) if expert is None else (layer, expert)
                    yield from (_piece(weight, sizes, index) for weight in together)
        for weight in used[first:]:
            if not weight.in_layers:
                yield _piece(weight, sizes, ())

    def constants_of(self, layers: int) -> dict[str, float]:
        """Return the numbers that are in transformers' files alone, by their whole names."""
        return {name.format(layer=layer): value for layer in range(layers) for name, value in self.constants.items()}


def sizes_of(model: ModelSection, vocabulary: int) -> ModelSizes:
    """Return the sizes of a model with so many rows of embeddings."""
    own = model.transformer
    return ModelSizes(
        layers=model.num_layers,
        hidden=model.hidden_size,
        vocabulary=vocabulary,
        heads=model.num_attention_heads,
        groups=model.num_query_groups,
        head=model.head_channels,
        ffn=model.ffn_hidden_size,
        experts=own.num_moe_experts or 0,
        expert_ffn=own.moe_ffn_hidden_size or model.ffn_hidden_size,
    )


def _piece(weight: Weight, sizes: ModelSizes, index: tuple[int, ...]) -> MappedTensor:
    shape = weight.part(sizes)
    places = dict(zip(("layer", "expert"), index, strict=False))
    names = [name.format(**places) for name in weight.names]
    return MappedTensor(
        key=weight.key,
        index=index,
        rows=sizes.vocabulary if weight.shape[0] == "vocabulary" else None,
        shapes=dict(zip(names, weight.join.shapes(shape, sizes), strict=True)),
        split=partial(weight.join.split, sizes=sizes),
        join=partial(weight.join.join, sizes=sizes),
    )
