"""Mappings between megatron-core and transformers: corresponding tensors, their joins, and settings.

A mapping is data. The code here reads and writes weights by any mapping, without knowledge of a class.
"""

from __future__ import annotations

import itertools
import math
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
    """Sizes of a model, by the names in the shapes of a mapping."""

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
    """Experts of a layer; 0: a layer has one feed-forward network."""
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
    """Joins tensors into one, and splits it again. Shapes are those of one layer, and of one expert."""

    def shapes(self, shape: Shape, sizes: ModelSizes) -> list[Shape]:
        """Return the shapes of the parts of a tensor of this shape."""
        ...

    def split(self, tensor: torch.Tensor, sizes: ModelSizes) -> list[torch.Tensor]:
        """Return the parts of a tensor."""
        ...

    def join(self, parts: Sequence[torch.Tensor], sizes: ModelSizes) -> torch.Tensor:
        """Return the tensor of these parts: the inverse of `split`."""
        ...


@dataclass(frozen=True)
class StackedTensors(Join):
    """`count` tensors of one shape, concatenated along the first dimension."""

    count: int

    def shapes(self, shape: Shape, sizes: ModelSizes) -> list[Shape]:
        return [(shape[0] // self.count, *shape[1:])] * self.count

    def split(self, tensor: torch.Tensor, sizes: ModelSizes) -> list[torch.Tensor]:
        return list(tensor.chunk(self.count))

    def join(self, parts: Sequence[torch.Tensor], sizes: ModelSizes) -> torch.Tensor:
        return torch.cat(list(parts)) if self.count > 1 else parts[0]


class QueryKeyValue(Join):
    """Queries, key and value of each query group in turn; transformers has all queries, all keys and all values apart.
    Rotary positions pair the two halves of a head in both (rotary_interleaved is off), so nothing within a head is
    permuted."""

    def shapes(self, shape: Shape, sizes: ModelSizes) -> list[Shape]:
        return [(rows, *shape[1:]) for rows in (sizes.queries, sizes.keys, sizes.keys)]

    def split(self, tensor: torch.Tensor, sizes: ModelSizes) -> list[torch.Tensor]:
        rest = tensor.shape[1:]
        own = sizes.queries // sizes.groups
        by_group = tensor.view(sizes.groups, own + 2 * sizes.head, *rest)
        return [part.reshape(-1, *rest) for part in torch.split(by_group, [own, sizes.head, sizes.head], dim=1)]

    def join(self, parts: Sequence[torch.Tensor], sizes: ModelSizes) -> torch.Tensor:
        rest = parts[0].shape[1:]
        by_group = torch.cat([part.view(sizes.groups, -1, *rest) for part in parts], dim=1)
        return by_group.reshape(-1, *rest)


SAME, QKV, GATE_UP = StackedTensors(1), QueryKeyValue(), StackedTensors(2)


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True)
class Weight:
    """One tensor of megatron-core, and its tensors in transformers."""

    key: str
    """Name in a checkpoint. A tensor of `decoder.layers.` has the layers as its first dimension, a tensor of
    `mlp.experts.experts.` the experts as its second."""
    shape: tuple[str | int, ...]
    """Shape in one layer, and of one expert: names of `ModelSizes`, or numbers."""
    names: tuple[str, ...]
    """Names in transformers. `{layer}` and `{expert}` are filled in."""
    join: Join = SAME
    also: str | None = None
    """Alternative name in a checkpoint."""

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
        layers = (sizes.layers,) if self.in_layers else ()
        experts = (sizes.experts,) if self.in_experts else ()
        return (*layers, *experts, *self.part(sizes))


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of megatron-core, or its part for one layer or expert, and its tensors in transformers."""

    key: str
    index: tuple[int, ...]
    """Index of the part: (), (layer,) or (layer, expert)."""
    rows: int | None
    """Number of first rows that are used; None: all."""
    shapes: Mapping[str, Shape]
    """Shapes of its tensors in transformers, by name."""
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    """Splits the tensor into those of `shapes`, in that order."""
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Joins the tensors of `shapes` into this one: the inverse of `split`."""

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


@dataclass(frozen=True, kw_only=True)
class ModelMapping:
    """A class of transformers, and its model in megatron-core."""

    name: str
    """Name of the model in messages."""
    model_type: str
    """`model_type` of its config.json."""
    architecture: str
    """The class in transformers: `architectures` of its config.json."""
    weights: tuple[Weight, ...]
    """All weights, in the order of transformers' files."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers of every layer by name that only transformers' files hold."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `model.transformer` that a model of this class needs."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Names in config.json of settings of `model.transformer`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that are equal for all models of the class that a run can train."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for entries of config.json, besides None and False."""

    @property
    def with_article(self) -> str:
        return f"an {self.name}" if self.name[0] in "AEIOU" else f"a {self.name}"

    def used(self, model: ModelSection) -> Iterator[Weight]:
        """Yield the weights of this model: not the output layer if it is tied."""
        return (each for each in self.weights if each.key != OUTPUT or model.untie_embeddings_and_output_weights)

    def megatron_shapes(self, model: ModelSection, padded_vocabulary: int) -> dict[str, Shape]:
        """Return the shapes of the weights in a checkpoint of this model, by key."""
        sizes = sizes_of(model, padded_vocabulary)
        return {weight.key: weight.whole(sizes) for weight in self.used(model)}

    def keys(self, model: ModelSection, found: Mapping[str, object]) -> dict[str, str]:
        """Return the keys in a checkpoint with the weights `found`, by the keys of the mapping."""
        return {each.key: each.also if each.also in found and each.also else each.key for each in self.used(model)}

    def check(self, found: Mapping[str, Shape], model: ModelSection, padded_vocabulary: int, where: object) -> None:
        """Raise InputError unless these are exactly the weights of this model."""
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
        """Yield all tensors in the order of transformers' files; `vocabulary`: without padding."""
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
        return {name.format(layer=layer): value for layer in range(layers) for name, value in self.constants.items()}


def sizes_of(model: ModelSection, vocabulary: int) -> ModelSizes:
    """Return the sizes of a model with this number of rows of embeddings."""
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
