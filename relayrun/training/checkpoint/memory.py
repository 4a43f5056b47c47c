"""A rank's whole state in the memory of its own node, for rounds in which ranks died and no node was lost.

A copy holds what the rank itself has of the state: the parts of model and optimizer, its generators, and the plain
values of a checkpoint. So it fits the layout of this job alone, and nothing is sent. It counts for a round when every
rank has one of the same iteration, and is put in place only if every rank finds the bytes that it wrote: XXH3-128 over
all of them, and the names, shapes and types of the parts.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from relayrun.agent.memory import HEADER, SLOTS, NoRoom, Slot
from relayrun.config.rampup import BatchSizes
from relayrun.data.progress import Progress
from relayrun.training.checkpoint.state import Checkpointer
from relayrun.training.parallel import Ranks

log = logging.getLogger(__name__)


class MemoryTier:
    """The copies of one rank. `load` is called by all ranks together, `save` at the same iterations."""

    def __init__(self, folder: Path, checkpointer: Checkpointer, ranks: Ranks) -> None:
        """`folder`: of the agent, in memory."""
        self._checkpointer, self._ranks = checkpointer, ranks
        self._slots = [Slot(folder, ranks.rank, number) for number in range(SLOTS)]
        self._on = True

    @torch.no_grad()
    def save(self, position: Progress) -> float:
        """Copy the state as it is now; return the seconds it took. Where there is no room, say so once and go on."""
        started = time.perf_counter()
        state = self._checkpointer.state(position)  # by all ranks: a hook may gather
        if self._on:
            try:
                self._write(position.iteration, state)
            except (NoRoom, OSError) as error:
                self._on = False
                self.void()
                log.warning("rank %s: no copies in memory: %s; rounds start from the disk", self._ranks.rank, error)
        return time.perf_counter() - started

    def void(self) -> None:
        """Let no copy count: training goes back on purpose."""
        for slot in self._slots:
            slot.void()

    def load(self, iteration: int, sizes: BatchSizes) -> Progress | None:
        """Put the copies of this iteration in place; return where they stand.

        None, on every rank, where one of them has not what it wrote; then nothing has changed.
        """
        found = self._read(iteration)
        wanted = self._checkpointer.wanted()
        names = None if found is None else _layout(_parts_of_load(wanted)[0])
        bad = found is None or found[0] != names
        if bad:
            log.warning("rank %s: its copy of iteration %s in memory is not what it wrote", self._ranks.rank, iteration)
        if self._ranks.maximum([int(bad)])[0]:
            return None
        assert found is not None
        _, plain, body = found

        def fill(wanted: ShardedStateDict, plain: dict[str, Any]) -> dict[str, Any]:
            parts, nonpersistent, factories = _parts_of_load(wanted)
            at = 0

            def value(part: ShardedBase) -> Any:
                nonlocal at
                if isinstance(part, ShardedTensor):
                    size = part.data.nbytes
                    made = torch.from_numpy(body[at : at + size].copy()).view(part.data.dtype).view(part.data.shape)
                else:
                    size = int(body[at : at + 8].view(np.int64)[0])
                    at += 8
                    made = torch.load(io.BytesIO(body[at : at + size].tobytes()), weights_only=True)
                at += size
                return made

            loaded = dict_list_map_outplace(value, parts)
            merge(plain, nonpersistent)
            merge(plain, loaded)
            state: dict[str, Any] = apply_factory_merges(plain, factories)
            return state

        return self._checkpointer.put(torch.load(io.BytesIO(plain), weights_only=True), sizes, fill)

    def _write(self, iteration: int, state: ShardedStateDict) -> None:
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        parts = list(nested_values(sharded))
        plain = _packed(common)
        pieces: list[torch.Tensor | bytes] = [plain]
        for part in parts:
            if isinstance(part, ShardedTensor):
                pieces.append(part.data.detach())
            else:
                packed = _packed(part.data)
                pieces.append(np.int64(len(packed)).tobytes() + packed)
        size = sum(piece.nbytes if isinstance(piece, torch.Tensor) else len(piece) for piece in pieces)
        slot = min(self._slots, key=lambda slot: (slot.header() or {"iteration": -1})["iteration"])
        for each in self._slots:
            each.reserve(size)
        slot.void()
        digest = _copy(pieces, np.frombuffer(slot.reserve(size), dtype=np.uint8)[HEADER:])
        slot.commit(iteration=iteration, size=size, plain=len(plain), layout=_layout(sharded), hash=digest)

    def _read(self, iteration: int) -> tuple[str, bytes, npt.NDArray[np.uint8]] | None:
        """The names of the parts, the plain values and the parts of a copy; None where it is not what was written."""
        for slot in self._slots:
            header = slot.header()
            if header is None or header.get("iteration") != iteration:
                continue
            try:
                body = np.frombuffer(slot.open(), dtype=np.uint8)[HEADER : HEADER + header["size"]]
                if len(body) == header["size"] and xxhash.xxh3_128_hexdigest(body.data) == header["hash"]:
                    return str(header["layout"]), body[: header["plain"]].tobytes(), body[header["plain"] :]
            except (OSError, KeyError, TypeError, ValueError):
                continue
        return None


def _parts_of_load(wanted: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Any], Any]:
    sharded, nonpersistent, factories = load_preprocess(wanted)
    return extract_sharded_base(sharded)[0], nonpersistent, factories


def _layout(sharded: ShardedStateDict) -> str:
    """A hash of what the parts are, in their order."""
    words = [
        [part.key, list(part.global_offset), list(part.data.shape), str(part.data.dtype)]
        if isinstance(part, ShardedTensor)
        else [part.unique_key]
        for part in nested_values(sharded)
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(words).encode())


def _packed(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _copy(pieces: Sequence[torch.Tensor | bytes], target: npt.NDArray[np.uint8]) -> str:
    """Lay the pieces one behind the other into the target; return the hash of what lies there then."""
    found, at = xxhash.xxh3_128(), 0
    for piece in pieces:
        if isinstance(piece, bytes):
            part = target[at : at + len(piece)]
            part[:] = np.frombuffer(piece, dtype=np.uint8)
        else:
            part = target[at : at + piece.nbytes]
            if len(part):
                torch.from_numpy(part).copy_(piece.contiguous().reshape(-1).view(torch.uint8))
        found.update(part.data)
        at += len(part)
    return found.hexdigest()
