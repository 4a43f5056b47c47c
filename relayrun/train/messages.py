"""Small values between all ranks, as messages through rank 0, beside the collectives of the same group.

The collectives of a group must come in one order on every rank, so a second thread cannot call them. A second group
would need a second mesh: over gloo a socket from every rank to every other one. Messages with a tag of their own match
by sender and tag alone, whatever other threads do, and need no more sockets.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class RankObjectCollectives:
    """Pickled messages between ranks; all call the same methods in the same order, from one thread each."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        """`group`: over gloo, of all ranks. `tag`: not used by other messages of the group."""
        self._group = group
        self._tag = tag
        self.rank = group.rank()
        self.size = group.size()

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0; None elsewhere."""
        if self.rank:
            self._send([0], [_packed(value)])
            return None
        return [value, *map(_unpacked, self._receive(range(1, self.size)))]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return the value for this rank. `values`: on rank 0 one value for each rank; None elsewhere."""
        if self.rank:
            return _unpacked(self._receive([0])[0])
        assert values is not None
        self._send(range(1, self.size), [_packed(value) for value in values[1:]])
        return values[0]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        if self.rank:
            return _unpacked(self._receive([0])[0])
        packed = _packed(value)
        self._send(range(1, self.size), [packed] * (self.size - 1))
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        values: list[Any] = self.broadcast(self.gather(value))
        return values

    def _send(self, targets: Sequence[int], data: Sequence[torch.Tensor]) -> None:
        lengths = [torch.tensor([len(each)]) for each in data]
        sent = [dist.isend(each, rank, self._group, self._tag) for rank, each in zip(targets, lengths, strict=True)]
        sent += [dist.isend(each, rank, self._group, self._tag) for rank, each in zip(targets, data, strict=True)]
        for work in sent:
            assert work is not None
            work.wait()

    def _receive(self, sources: Sequence[int]) -> list[torch.Tensor]:
        """Return what each source sent, in their order. Messages of one rank arrive in order."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in sources]
        self._take(sources, lengths)
        data = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        self._take(sources, data)
        return data

    def _take(self, sources: Sequence[int], targets: Sequence[torch.Tensor]) -> None:
        taken = [dist.irecv(each, rank, self._group, self._tag) for rank, each in zip(sources, targets, strict=True)]
        for work in taken:
            assert work is not None
            work.wait()


def portable_error(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: the error itself, or its words if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
