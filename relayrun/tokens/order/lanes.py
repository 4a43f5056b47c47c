"""Data sets whose samples have no numbers: streams, which are read in lanes, and what one replica reads of them.

A stream has `lanes` lanes, fixed when it begins. The sample number n of a phase comes from lane n mod lanes of the data
set that the schedule names for it: the next sample of that lane. A lane is a sequence that depends on no other lane,
and knows where it stands by a list of integers, its cursor. So the cursors are the whole state of a stream.

Of R replicas, where R divides the lanes, replica r trains on the samples whose number in the phase is r modulo R, and
so reads the lanes that are r modulo R, and no other. Any such R gives the same samples with the same numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.order.rows import SampleRow
from relayrun.tokens.order.schedule import Schedule

Cursor = tuple[int, ...]
"""Where a lane stands; what the integers mean only its stream knows."""


class OpenLanes(Protocol):
    """Some lanes of a stream that are being read, by one thread."""

    def take(self, lane: int) -> SampleRow:
        """Return the next sample of a lane."""

    def cursor(self, lane: int) -> Cursor:
        """Return where a lane stands behind the sample that was taken last."""

    def close(self) -> None:
        """Let go of threads and files."""


@runtime_checkable
class Stream(Protocol):
    """A data set without numbers."""

    lanes: int

    def first_cursors(self) -> list[Cursor]:
        """Return where all lanes begin."""

    def record(self) -> dict[str, Any]:
        """Return what decides the samples beside settings and files, plain JSON."""

    def check_cursors(self, cursors: Sequence[Cursor]) -> None:
        """Raise ValueError if these can be no cursors of this stream."""

    def open_lanes(self, cursors: Mapping[int, Cursor]) -> OpenLanes:
        """Go on in some lanes at these cursors, by lane."""


class LanePositions:
    """Where all lanes of a stream stood when the sample number `at` was next."""

    def __init__(self, at: int, cursors: Sequence[Sequence[int]]) -> None:
        self.at = at
        self.cursors = [tuple(cursor) for cursor in cursors]

    def to_json(self, consumed: int, newer: Mapping[int, Cursor]) -> dict[str, Any]:
        """What a checkpoint keeps at sample `consumed`, with the cursors that are known to be newer."""
        if newer and len(newer) != len(self.cursors):
            missing = sorted(set(range(len(self.cursors))) - set(newer))
            raise ValueError(f"no rank tells where lane {missing[0]} stands")
        if not newer:
            return {"at": self.at, "cursors": [*map(list, self.cursors)]}
        return {"at": consumed, "cursors": [[*newer[lane]] for lane in range(len(self.cursors))]}


class LaneReader:
    """The samples of one replica of a mixture with streams, in rising numbers, from `consumed` on."""

    def __init__(
        self,
        schedule: Schedule,
        streams: Mapping[str, Stream],
        standing: Mapping[str, LanePositions],
        indexed: Callable[[int], SampleRow],
        *,
        name: str,
        lanes: int,
        consumed: int,
        replica: int,
        replicas: int,
    ) -> None:
        """`indexed` gives the samples of all other data sets. Raises ConfigError if `replicas` does not divide lanes.

        Lanes that stand before `consumed`, because samples were passed over, are read up to there at once.
        """
        if lanes % replicas:
            raise ConfigError(
                f"the {lanes} lanes of this run's streams cannot be divided among {replicas} data-parallel replicas",
                hint=f"start a number of ranks with which the replicas divide data.lanes = {lanes}",
            )
        self.name = name
        self._schedule = schedule
        self._indexed = indexed
        self._lanes, self._replica, self._replicas = lanes, replica, replicas
        self._lock = threading.Lock()
        self._base = {
            (name, lane): standing[name].cursors[lane] for name in streams for lane in range(replica, lanes, replicas)
        }
        self._taken: dict[tuple[str, int], deque[tuple[int, Cursor]]] = {key: deque() for key in self._base}
        self._open = {
            name: stream.open_lanes({lane: self._base[name, lane] for lane in range(replica, lanes, replicas)})
            for name, stream in streams.items()
        }
        for name in streams:
            self._catch_up(name, standing[name].at, consumed)

    def numbers(self, first: int, end: int) -> range:
        """Numbers of this replica's samples, of those from `first` to below `end`, which are of one phase."""
        offset = (self._replica - self._schedule.in_phase(first)) % self._replicas
        return range(first + offset, end, self._replicas)

    def row(self, k: int) -> SampleRow:
        """Return global sample k, which must be one of `numbers`, and none below the one before."""
        name, _ = self._schedule.locate(k)
        return self._take(name, k) if name in self._open else self._indexed(k)

    def sample(self, k: int) -> npt.NDArray[np.int64]:
        """Return the token ids of global sample k, int64 [seq_length + 1]; see `row`."""
        return self.row(k).tokens.astype(np.int64, copy=False)

    def cursors(self, consumed: int) -> dict[str, dict[int, Cursor]]:
        """Where this replica's lanes stand when sample `consumed` is next, by data set and lane.

        Older positions are forgotten. Called by another thread than the one that reads.
        """
        found: dict[str, dict[int, Cursor]] = {}
        with self._lock:
            for (name, lane), taken in self._taken.items():
                while taken and taken[0][0] < consumed:
                    self._base[name, lane] = taken.popleft()[1]
                found.setdefault(name, {})[lane] = self._base[name, lane]
        return found

    def close(self) -> None:
        """Let go of threads and files."""
        for lanes in self._open.values():
            lanes.close()

    def _catch_up(self, name: str, at: int, consumed: int) -> None:
        """Read what was passed over of a stream."""
        for k in range(at, consumed):
            if self._schedule.in_phase(k) % self._replicas == self._replica and self._schedule.locate(k)[0] == name:
                self._take(name, k)

    def _take(self, name: str, k: int) -> SampleRow:
        lane = self._schedule.in_phase(k) % self._lanes
        row = self._open[name].take(lane)
        with self._lock:
            self._taken[name, lane].append((k, self._open[name].cursor(lane)))
        return row


def read_lane_positions(
    value: Mapping[str, Any], consumed: int, streamed: Collection[str] = ()
) -> dict[str, LanePositions]:
    """Read what a checkpoint at sample `consumed` keeps of all streams. Raises FatalTrainingError if it is damaged.

    `streamed`: data sets that must be among them, since samples were taken of their lanes.
    """
    found = {}
    for name in dict.fromkeys([*streamed, *value]):
        try:
            at, cursors = value[name]["at"], value[name]["cursors"]
            whole = isinstance(at, int) and all(isinstance(one, int) for cursor in cursors for one in cursor)
            if not whole or not 0 <= at <= consumed:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise FatalTrainingError(
                f"the lanes of data set {name!r} in the checkpoint are damaged", hint="resume from an older checkpoint"
            ) from None
        found[name] = LanePositions(at, cursors)
    return found
