"""Copies of a rank's state in the memory of its own node and of the next node, for restarts inside the job.

A copy holds this rank's parts of model and optimizer, its generators, and the plain values of a checkpoint, so it fits
only the layout of this job. A restart uses an iteration of which every rank has a copy, its own or a neighbour's, and
loads it only if every rank finds the bytes that were written.

A tensor that several ranks of a node have is in the copy of one of them: data parallel ranks have the same weights, and
tensor parallel ranks the same norms, so with eight of them on a node a copy of each would take the weights eight times.
The ranks of a node tell each other their tensors by files in the node's memory. Each tensor goes to the rank that has
the fewest bytes so far, so all write for equally long.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from relayrun.control.agent.memory_copies import SLOTS_PER_RANK, MemorySlot, NodeMemoryFullError
from relayrun.files import write_atomic
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train.checkpoint.checkpointer import Checkpointer, torch_bytes
from relayrun.train.checkpoint.memory_replication import (
    ByteArray,
    MemoryCopy,
    NeighbourReplica,
    copy_body,
    discard_later_copies,
    whole_copy,
    write_copy,
)
from relayrun.train.distributed import Ranks
from relayrun.train.reporting.metrics import Metrics

log = logging.getLogger(__name__)


class TensorPart(NamedTuple):
    """A rank's part of a tensor."""

    name: str
    """Key, offset, shape and type: those with the same name are replicas of each other."""
    size: int
    """In bytes."""
    replica: str
    """Replica id, by which megatron-core tells replicas apart."""


class TensorPlace(NamedTuple):
    """The place of a part of a tensor in the copies of the ranks of a node."""

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


class MemoryTier:
    """Copies of one rank. All ranks call every method together."""

    def __init__(self, folder: Path, checkpointer: Checkpointer, *, metrics: Metrics) -> None:
        """`folder`: the agent's folder in memory."""
        config, ranks = checkpointer.config, checkpointer.ranks
        self._checkpointer, self._ranks, self._metrics = checkpointer, ranks, metrics
        self._interval, self._newest = config.checkpoint.memory_interval, 0
        self._slots = [MemorySlot(folder, ranks.rank, number) for number in range(SLOTS_PER_RANK)]
        self._folder, self._per_node = folder, config.job.ntasks_per_node
        self._division: NodeDivision | None = None
        self._neighbour: NeighbourReplica | None = None
        if self._per_node < ranks.world_size:
            secret = checkpointer.run.attempt(checkpointer.attempt).read_secret()
            self._neighbour = NeighbourReplica(folder, ranks, per_node=self._per_node, secret=secret)
        self._on = True
        self.source = "memory"
        """Source of the state that `load` restored: `memory` or `neighbour`."""

    def start(self, iteration: int) -> None:
        """Training starts from this iteration, which has a copy or a checkpoint."""
        self._newest = iteration

    def due(self, iteration: int) -> bool:
        """True if the state of this iteration is to be copied; equal on all ranks."""
        self._newest = min(self._newest, iteration)  # after a rollback
        return self._on and iteration > self._newest and iteration % self._interval == 0

    @torch.no_grad()
    def save(self, position: TrainingProgress) -> float:
        """Copy the state, and start to send it to the neighbour; return the seconds that training waited.

        At every moment one iteration is complete everywhere: no rank overwrites a copy before all ranks and their
        neighbours have the next one. If a rank lacks memory, it logs that once, and all continue without copies.
        """
        started = time.perf_counter()
        if self._neighbour is not None:
            self._neighbour.wait()
            self._metrics.sync()  # the copy outlives this node, and must not be ahead of the metrics on disk
            self._ranks.maximum([0])  # the copy before the last may be overwritten when the last has arrived everywhere
        written = None
        try:
            written = self._write(position.iteration, self._checkpointer.state(position))
        except (NodeMemoryFullError, OSError) as error:
            words = "no copies in memory: %s; restarts start from the disk"
            log.warning("rank %s: " + words, self._ranks.rank, error)
        if self._ranks.maximum([int(written is None)])[0]:
            self._on = False
            self.discard()
        elif self._neighbour is not None and written is not None:
            self._neighbour.send(written)
        self._newest = position.iteration
        return time.perf_counter() - started

    def finish(self) -> None:
        """Wait for the transfer in progress."""
        if self._neighbour is not None:
            self._neighbour.wait()

    def discard(self, *, after: int = -1) -> None:
        """Discard copies later than iteration `after`, before or after training goes back on purpose.

        The later steps are computed again and must not be mixed with the first ones.
        """
        discard_later_copies(self._slots, after=after)
        if self._neighbour is not None:
            self._neighbour.discard(after=after)

    def load(self, iteration: int) -> TrainingProgress | None:
        """Restore the copies of this iteration; return their position.

        None, on every rank, if a rank has neither an intact copy nor one at its neighbour; then nothing has changed.
        """
        found = self._find(iteration)
        tensors = _tensors_and_objects(_parts_of_load(self._checkpointer.wanted_state())[0])[0]
        division = self._divide(tensors)
        bad = found is None or found.header["layout"] != division.layout
        if bad:
            log.warning("rank %s: no copy of iteration %s in memory is what was written", self._ranks.rank, iteration)
        if self._ranks.maximum([int(bad)])[0]:
            return None
        assert found is not None
        self.discard(after=iteration)
        plain, body = found.body[: found.header["plain"]].tobytes(), found.body[found.header["plain"] :]
        bodies = {place.rank: self._body_beside(place.rank, iteration) for place in division.places}
        bodies[self._ranks.rank] = body

        def fill(wanted: ShardedStateDict, plain: dict[str, Any]) -> dict[str, Any]:
            parts, nonpersistent, factories = _parts_of_load(wanted)
            places = iter(division.places)
            at = division.own_bytes

            def value(part: ShardedBase) -> Any:
                nonlocal at
                if isinstance(part, ShardedTensor):
                    place = next(places)
                    source = bodies[place.rank][place.at : place.at + part.data.nbytes].copy()
                    return torch.from_numpy(source).view(part.data.dtype).view(part.data.shape)
                size = int(body[at : at + 8].view(np.int64)[0])
                at += 8 + size
                return torch.load(io.BytesIO(body[at - size : at].tobytes()), weights_only=True)

            loaded = dict_list_map_outplace(value, parts)
            merge(plain, nonpersistent)
            merge(plain, loaded)
            state: dict[str, Any] = apply_factory_merges(plain, factories)
            return state

        return self._checkpointer.restore_copy(torch.load(io.BytesIO(plain), weights_only=True), fill)

    def _divide(self, tensors: Sequence[ShardedTensor]) -> NodeDivision:
        if self._division is None:
            parts = tensor_parts(tensors)
            self._division = divide_among_node(self._folder, self._ranks, self._per_node, parts)
        return self._division

    def _body_beside(self, rank: int, iteration: int) -> ByteArray:
        """Return the parts in the copy of a rank of this node, which that rank has found intact."""
        for number in range(SLOTS_PER_RANK):
            slot = MemorySlot(self._folder, rank, number)
            header = slot.header() or {}
            if header.get("iteration") == iteration:
                return copy_body(slot, header["size"])[header["plain"] :]
        raise FileNotFoundError(f"the copy of rank {rank} in memory is gone: {self._folder}")

    def _write(self, iteration: int, state: ShardedStateDict) -> MemoryCopy:
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        tensors, objects = _tensors_and_objects(sharded)
        division = self._divide(tensors)  # all ranks come here: nothing above depends on this node
        plain, rank = torch_bytes(common), self._ranks.rank
        pieces: list[torch.Tensor | bytes] = [plain]
        pieces += [
            tensor.data.detach() for tensor, place in zip(tensors, division.places, strict=True) if place.rank == rank
        ]
        for each in objects:
            packed = torch_bytes(each.data)
            pieces.append(np.int64(len(packed)).tobytes() + packed)
        size = sum(piece.nbytes if isinstance(piece, torch.Tensor) else len(piece) for piece in pieces)
        slot = min(self._slots, key=lambda slot: (slot.header() or {"iteration": -1})["iteration"])
        for each in self._slots:
            each.reserve(size)
        header = {"rank": rank, "ranks": self._ranks.world_size, "iteration": iteration}
        return write_copy(slot, pieces, **header, size=size, plain=len(plain), layout=division.layout)

    def _find(self, iteration: int) -> MemoryCopy | None:
        """Return this rank's copy of an iteration, its own or the neighbour's; None if neither is intact."""
        rank, size = self._ranks.rank, self._ranks.world_size
        found = None
        for slot in self._slots:
            mine = (slot.header() or {}).get("iteration") == iteration
            copy = whole_copy(slot, rank=rank, ranks=size, iteration=iteration) if mine else None
            found = found or copy
            if mine and copy is None:
                slot.void()  # the other ranks of the node must not read it
        if self._neighbour is None:
            return found
        lost = self._ranks.maximum([int(found is None and number == rank) for number in range(size)])
        if any(lost):
            self.source = "neighbour"
            brought = self._neighbour.fetch(iteration, [bool(each) for each in lost], self._slots[0])
            return found or brought
        return found


def _parts_of_load(wanted: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Any], Any]:
    sharded, nonpersistent, factories = load_preprocess(wanted)
    return extract_sharded_base(sharded)[0], nonpersistent, factories


def _tensors_and_objects(sharded: ShardedStateDict) -> tuple[list[ShardedTensor], list[ShardedBase]]:
    parts = list(nested_values(sharded))
    return [each for each in parts if isinstance(each, ShardedTensor)], [
        each for each in parts if not isinstance(each, ShardedTensor)
    ]
