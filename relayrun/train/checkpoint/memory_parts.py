"""Division of a node's copies in memory: a tensor that several ranks of a node have is in the copy of one of them.

Data parallel ranks have the same weights, and tensor parallel ranks the same norms: with eight of them on a node a copy
of each would take the weights eight times. The ranks of a node tell each other their tensors by files in the node's
memory. Each tensor goes to the rank that has the fewest bytes so far, so all write for equally long.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash
from megatron.core.dist_checkpointing import ShardedTensor

from relayrun.files import write_atomic
from relayrun.train.distributed import Ranks


class TensorPart(NamedTuple):
    """A rank's part of a tensor."""

    name: str
    """Key, offset, shape and type: those with the same name are replicas of each other."""
    size: int
    """In bytes."""
    replica: str
    """Replica id, by which megatron-core tells replicas apart."""


class TensorPlace(NamedTuple):
    """Where a rank's part of a tensor lies."""

    rank: int
    """The rank whose copy has it."""
    at: int
    """Bytes before it in that copy, after the plain values."""


def tensor_parts(tensors: Sequence[ShardedTensor]) -> list[TensorPart]:
    """Return the parts of a rank in the order of its state."""
    seen: Counter[str] = Counter()
    parts = []
    for tensor in tensors:
        data = tensor.data
        words = [tensor.key, list(tensor.global_offset), list(data.shape), str(data.dtype)]
        name = json.dumps([*words, str(getattr(tensor, "flattened_range", None))])
        seen[name] += 1
        parts.append(TensorPart(f"{name} {seen[name]}", data.nbytes, str(tensor.replica_id)))
    return parts


class NodeDivision:
    """The division of the copies of a node's ranks, the same on each of them."""

    def __init__(self, rank: int, parts: Mapping[int, Sequence[TensorPart]]) -> None:
        """`parts`: of each rank of the node that takes part, `rank` among them."""
        replicas: dict[str, dict[str, int]] = {}
        for one in sorted(parts):
            for part in parts[one]:
                replicas.setdefault(part.name, {})[part.replica] = one
        count = Counter(part.name for each in parts.values() for part in each)
        shared = {name: sorted(of.values()) for name, of in replicas.items() if 1 < count[name] == len(of)}
        taken = {one: sum(part.size for part in parts[one] if part.name not in shared) for one in parts}
        owner: dict[str, int] = {}
        for one in sorted(parts):
            for part in parts[one]:
                if part.name in shared and part.name not in owner:
                    owner[part.name] = min(shared[part.name], key=lambda each: (taken[each], each))
                    taken[owner[part.name]] += part.size
        self._places: dict[str, TensorPlace] = {}
        for one in sorted(parts, key=lambda each: each == rank):  # this rank's own last: it reads what is not shared
            at = 0
            for part in parts[one]:
                if owner.get(part.name, one) == one:
                    self._places[part.name] = TensorPlace(one, at)
                    at += part.size
        self._rank = rank
        self.places = [self._places[part.name] for part in parts[rank]]
        """The place of each tensor of this rank, in the order of its state."""
        self.own_bytes = taken[rank]
        """Bytes of the tensors in this rank's copy."""
        words = [[*part, self._places[part.name].rank == rank] for part in parts[rank]]
        self.layout = xxhash.xxh3_128_hexdigest(json.dumps(words).encode())
        """Hash of what this rank's copy has, and of what the others' have for it."""


def divide_among_node(folder: Path, ranks: Ranks, per_node: int, parts: Sequence[TensorPart]) -> NodeDivision:
    """Divide the copies of the ranks of this node; all ranks call it together. `folder`: the node's, in memory.

    If a file cannot be written or read, each rank of every node copies all that it has.
    """
    first = ranks.rank - ranks.rank % per_node
    found: dict[int, list[TensorPart]] = {}
    failed = 0
    try:
        write_atomic(folder / f"parts.{ranks.rank:04}.json", json.dumps(parts), durable=False)
    except OSError:
        failed = 1
    if not ranks.maximum([failed])[0]:
        try:
            for rank in range(first, min(first + per_node, ranks.world_size)):
                text = (folder / f"parts.{rank:04}.json").read_text(encoding="utf-8")
                found[rank] = [TensorPart(*part) for part in json.loads(text)]
        except (OSError, ValueError):
            failed = 1
        failed = ranks.maximum([failed])[0]
    return NodeDivision(ranks.rank, {ranks.rank: parts} if failed or not found else found)
