"""The tokens of global sample k of a run, and the state of the data order in a checkpoint.

    sample k → (data set, position) → (epoch, i) → tokens

The schedule takes the first step, a division by the windows of an epoch the second, the data set the last. The state is
one number, the consumed samples; phases, fingerprints and counts are stored to be compared on load.

Samples of a stream have no numbers. A stream has `lanes` lanes: sample number n of a phase comes from lane n mod lanes,
and is the next sample of that lane. A lane's cursor is a list of integers, and the cursors are the whole state of a
stream. Of R replicas, where R divides the lanes, replica r reads the lanes that are r modulo R (`LaneReader`).

A new mixture makes a phase when a checkpoint is resumed: it begins at the sample at which that checkpoint stands.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from relayrun.config.sections.data import FORMER_ORDERS
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.order.datasets import Dataset
from relayrun.tokens.order.sample_rows import SampleRow, read_row
from relayrun.tokens.order.schedule import Schedule, integer_weights

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


SAMPLER_STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One data set of the mixture."""

    dataset: Dataset | Stream
    weight: float
    """Share of the samples, in any unit."""
    record: Mapping[str, Any]
    """What decides the order of the data set, plain JSON; a checkpoint must have been made with the same."""


class MixtureSampler:
    """The samples of a run in order; sample k is any k >= 0.

    `settings` is what decides the order of all parts alike (seed, sequence length, tokenizer), plain JSON.
    """

    def __init__(self, parts: Mapping[str, MixturePart], settings: Mapping[str, Any], *, name: str = "train") -> None:
        self.name = name
        self.parts = dict(parts)
        self.settings = dict(settings)
        self.weights = integer_weights({name: part.weight for name, part in parts.items()})
        self.streams = {name: part.dataset for name, part in parts.items() if isinstance(part.dataset, Stream)}
        """Data sets of the mixture without numbers; see `reading`."""
        self.lanes = next((stream.lanes for stream in self.streams.values()), None)
        """Lanes of the streams, the same of all; None: there is no stream."""
        self.schedule = Schedule.of(self.weights, self.lanes)
        self.records: dict[str, dict[str, Any]] = {
            name: {**part.record, "windows": None if isinstance(part.dataset, Stream) else len(part.dataset)}
            for name, part in parts.items()
        }
        """Records of all data sets that the schedule names, also of those that have left the mixture."""
        self.standing = {name: LanePositions(0, stream.first_cursors()) for name, stream in self.streams.items()}
        """Where the lanes stand at the begin of this attempt, also those of streams that have left the mixture."""

    def locate(self, k: int) -> tuple[str, int, int]:
        """Return (data set, epoch, i) of global sample k; of a stream (name, 0, position).

        Raises IndexError if k < 0.
        """
        name, position = self.schedule.locate(k)
        windows = self.records[name]["windows"]
        epoch, i = (0, position) if windows is None else divmod(position, int(windows))
        return name, epoch, i

    def sample(self, k: int) -> npt.NDArray[np.int64]:
        """Return the token ids of global sample k, int64 [seq_length + 1]; inputs are [:-1], labels [1:].

        Raises KeyError for a sample of a data set that has left the mixture; not for those of a stream.
        """
        return self.row(k).tokens

    def row(self, k: int) -> SampleRow:
        """Return global sample k with what its data set knows of its tokens. Errors as in `sample`."""
        name, epoch, i = self.locate(k)
        return read_row(self.parts[name].dataset, epoch, i)

    def reading(
        self, consumed_samples: int, replica: int, replicas: int, *, streams: Mapping[str, Stream] | None = None
    ) -> LaneReader:
        """Return the samples of one of the data-parallel replicas, from `consumed_samples` on. Only of streams.

        `streams`: what is opened in place of the streams of the mixture, and gives their samples.
        """
        assert self.lanes is not None
        return LaneReader(
            self.schedule,
            self.streams if streams is None else streams,
            self.standing,
            self.row,
            name=self.name,
            lanes=self.lanes,
            consumed=consumed_samples,
            replica=replica,
            replicas=replicas,
        )

    def state(
        self, consumed_samples: int, cursors: Sequence[Mapping[str, Mapping[int, Cursor]]] = ()
    ) -> dict[str, Any]:
        """Return what a checkpoint keeps, plain JSON: the next sample is number `consumed_samples`.

        `cursors`: what `LaneReader.cursors` gave on every rank; none: lanes stand where the attempt began.
        """
        newer: dict[str, dict[int, Cursor]] = {}
        for part in cursors:
            for name, lanes in part.items():
                newer.setdefault(name, {}).update(lanes)
        standing: dict[str, dict[str, Any]] = {}
        for name, one in self.standing.items():
            if name not in self.streams:  # it has left the mixture, and stands still
                one = LanePositions(consumed_samples, one.cursors)
            standing[name] = one.to_json(consumed_samples, newer.get(name, {}))
        return {
            **({"streams": standing} if standing else {}),
            "version": SAMPLER_STATE_VERSION,
            "consumed_samples": consumed_samples,
            "settings": self.settings,
            "phases": self.schedule.to_json(),
            "datasets": {name: self.records[name] for name in self.schedule.names},
            "counts": self.schedule.counts(consumed_samples),
        }

    def resume(self, state: Mapping[str, Any]) -> int:
        """Go on from a state; return its consumed samples. A mixture that is another than the state's begins there.

        Raises FatalTrainingError, naming each difference, if the state was made over other data or in
        another order, so that sample numbers would not mean the same samples, or if its ledger is wrong.
        """
        consumed, phases, records = _read_phases(state)
        streamed = [name for name, record in records.items() if record.get("windows", 0) is None]
        standing = read_lane_positions(state.get("streams", {}), consumed, streamed)
        differences = [
            f"{name} was {_text(old)}, is {_text(self.settings.get(name))}"
            for name, old in state["settings"].items()
            if self.settings.get(name) != old
        ]
        for dataset, record in records.items():
            now = self.records.get(dataset)
            if now is not None and dataset in self.parts:
                pairs = {name: (record.get(name), now.get(name)) for name in sorted(record.keys() | now.keys())}
                differences += [
                    f"{name} of data set {dataset!r} was {_text(old)}, is {_text(new)}"
                    for name, (old, new) in pairs.items()
                    if old != new
                ]
        if differences:
            raise FatalTrainingError(
                "the data order differs from the checkpoint's, samples would be lost or repeated: "
                + "; ".join(differences),
                hint="restore these settings and the shards; `relayrun submit` says which changes it accepts",
            )
        begun = {name: LanePositions(consumed, stream.first_cursors()) for name, stream in self.streams.items()}
        for name, stream in self.streams.items():
            if name in standing:
                try:
                    stream.check_cursors(standing[name].cursors)
                except ValueError as error:
                    raise FatalTrainingError(
                        f"the lanes of data set {name!r} in the checkpoint are damaged: {error}",
                        hint="resume from an older checkpoint",
                    ) from None
        self.schedule = phases.with_phase(consumed, self.weights, self.lanes)
        self.records = records | self.records
        self.standing = begun | standing
        return consumed


def _read_phases(state: Mapping[str, Any]) -> tuple[int, Schedule, dict[str, dict[str, Any]]]:
    """Consumed samples, schedule and records of a state. Raises FatalTrainingError if it is damaged."""
    try:
        if state.get("version") != SAMPLER_STATE_VERSION:
            raise ValueError(f"its version is {state.get('version')!r}, this program reads {SAMPLER_STATE_VERSION}")
        consumed = state["consumed_samples"]
        if not isinstance(consumed, int) or isinstance(consumed, bool) or consumed < 0:
            raise ValueError(f"consumed_samples is {consumed!r}")
        schedule = Schedule.from_json(state["phases"])
        counts = schedule.counts(consumed)
        if state["counts"] != counts:
            raise ValueError(f"its ledger counts {dict(state['counts'])}, its phases give {counts}")
        records = {name: _current_order_names(record) for name, record in state["datasets"].items()}
        if records.keys() != set(schedule.names):
            raise ValueError("its data sets are not those of its phases")
        return consumed, schedule, records
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FatalTrainingError(
            f"the data state of the checkpoint is damaged: {error}", hint="resume from an older checkpoint"
        ) from None


def _current_order_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A data set's record, which may be of an earlier version."""
    return {**record, "order": FORMER_ORDERS.get(record["order"], record["order"])} if "order" in record else {**record}


def _text(value: object) -> str:
    """Fingerprints shortened."""
    return repr(value[:12] + "…") if isinstance(value, str) and len(value) == 64 else repr(value)
