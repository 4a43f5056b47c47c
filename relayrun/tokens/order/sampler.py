"""The tokens of global sample k of a run, and the state of the data order in a checkpoint.

    sample k → (data set, position) → (epoch, i) → tokens

The schedule maps the number to a data set and a position, a division by the windows of an epoch gives epoch and i, the
data set gives the tokens. The state is the number of consumed samples; phases, fingerprints and counts are stored for
comparison on load.

Samples of a stream have no numbers. A stream has `lanes` lanes: sample number n of a phase is the next sample of lane n
mod lanes. A cursor of a lane is a list of integers, and the cursors are the whole state of a stream. Of R replicas,
where R divides the lanes, replica r reads the lanes with number r modulo R (`ReplicaSampleReader`).

A new mixture begins a phase at the sample of the checkpoint from which the run resumes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.order.datasets import Dataset
from relayrun.tokens.order.sample_rows import SampleRow, read_row
from relayrun.tokens.order.schedule import Schedule, integer_weights

Cursor = tuple[int, ...]
"""Position of a lane; only its stream interprets the integers."""


class OpenLanes(Protocol):
    """Some lanes of a stream, read by one thread."""

    def take(self, lane: int) -> SampleRow:
        """Return the next sample of a lane."""

    def cursor(self, lane: int) -> Cursor:
        """Return the cursor of a lane behind its latest sample."""

    def close(self) -> None:
        """Stop threads and close files."""


@runtime_checkable
class Stream(Protocol):
    """A data set whose samples have no numbers."""

    lanes: int

    def first_cursors(self) -> list[Cursor]:
        """Return the initial cursors of all lanes."""

    def record(self) -> dict[str, Any]:
        """Return the values besides settings and files that determine the samples, plain JSON."""

    def check_cursors(self, cursors: Sequence[Cursor]) -> None:
        """Raise ValueError for cursors that do not fit this stream."""

    def open_lanes(self, cursors: Mapping[int, Cursor]) -> OpenLanes:
        """Open some lanes at the given cursors, by lane."""


LaneOpener = Callable[[Mapping[int, Cursor]], OpenLanes]
"""`Stream.open_lanes`, or its substitute."""


class LanePositions:
    """The cursors of all lanes of a stream when sample `at` was next."""

    def __init__(self, at: int, cursors: Sequence[Sequence[int]]) -> None:
        self.at = at
        self.cursors = [tuple(cursor) for cursor in cursors]

    def to_json(self, consumed: int, newer: Mapping[int, Cursor]) -> dict[str, Any]:
        """Return the state for a checkpoint at sample `consumed`, with newer cursors if known."""
        if newer and len(newer) != len(self.cursors):
            missing = sorted(set(range(len(self.cursors))) - set(newer))
            raise ValueError(f"no rank tells where lane {missing[0]} stands")
        if not newer:
            return {"at": self.at, "cursors": [*map(list, self.cursors)]}
        return {"at": consumed, "cursors": [[*newer[lane]] for lane in range(len(self.cursors))]}


class ReplicaSampleReader:
    """The samples of one replica of a mixture with streams, in ascending numbers, from `consumed` on."""

    def __init__(
        self,
        schedule: Schedule,
        openers: Mapping[str, LaneOpener],
        positions: Mapping[str, LanePositions],
        indexed: Callable[[int], SampleRow],
        *,
        name: str,
        lanes: int,
        consumed: int,
        replica: int,
        replicas: int,
    ) -> None:
        """`openers` open all streams; `indexed` returns samples of other data sets. Samples that were passed over are
        read and dropped here, up to `consumed`. Raises ConfigError if `replicas` does not divide lanes."""
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
            (name, lane): positions[name].cursors[lane] for name in openers for lane in range(replica, lanes, replicas)
        }
        self._taken: dict[tuple[str, int], deque[tuple[int, Cursor]]] = {key: deque() for key in self._base}
        self._open = {
            name: opener({lane: self._base[name, lane] for lane in range(replica, lanes, replicas)})
            for name, opener in openers.items()
        }
        for name in openers:
            for k in range(positions[name].at, consumed):
                if schedule.number_in_phase(k) % replicas == replica and schedule.locate(k)[0] == name:
                    self._take(name, k)

    def numbers(self, first: int, end: int) -> range:
        """Return the numbers of this replica's samples in the range, which lies in one phase."""
        offset = (self._replica - self._schedule.number_in_phase(first)) % self._replicas
        return range(first + offset, end, self._replicas)

    def row(self, k: int) -> SampleRow:
        """Return global sample k of `numbers`; calls must be in ascending order."""
        name, _ = self._schedule.locate(k)
        return self._take(name, k) if name in self._open else self._indexed(k)

    def cursors(self, consumed: int) -> dict[str, dict[int, Cursor]]:
        """Return this replica's cursors by data set and lane when sample `consumed` is next; forget older positions."""
        found: dict[str, dict[int, Cursor]] = {}
        with self._lock:
            for (name, lane), taken in self._taken.items():
                while taken and taken[0][0] < consumed:
                    self._base[name, lane] = taken.popleft()[1]
                found.setdefault(name, {})[lane] = self._base[name, lane]
        return found

    def close(self) -> None:
        """Stop threads and close files."""
        for lanes in self._open.values():
            lanes.close()

    def _take(self, name: str, k: int) -> SampleRow:
        lane = self._schedule.number_in_phase(k) % self._lanes
        row = self._open[name].take(lane)
        with self._lock:
            self._taken[name, lane].append((k, self._open[name].cursor(lane)))
        return row


def read_lane_positions(
    value: Mapping[str, Any], consumed: int, streamed: Collection[str] = ()
) -> dict[str, LanePositions]:
    """Read the lane positions from a checkpoint at sample `consumed`. Raises FatalTrainingError if they are damaged.
    `streamed`: data sets that must be present, since samples of their lanes were consumed."""
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
    """A data set of the mixture."""

    dataset: Dataset | Stream
    weight: float
    """Share of the samples, in any unit."""
    record: Mapping[str, Any]
    """Values that determine the order of the data set, plain JSON; the record in a checkpoint must be equal."""


class MixtureSampler:
    """The samples of a run in order. `settings` determine the order of all parts, plain JSON."""

    def __init__(self, parts: Mapping[str, MixturePart], settings: Mapping[str, Any], *, name: str = "train") -> None:
        self.name = name
        self.parts = dict(parts)
        self.settings = dict(settings)
        self.weights = integer_weights({name: part.weight for name, part in parts.items()})
        self.streams = {name: part.dataset for name, part in parts.items() if isinstance(part.dataset, Stream)}
        """Data sets of the mixture without numbers; see `lane_reader`."""
        self.lanes = next((stream.lanes for stream in self.streams.values()), None)
        """Lanes of the streams, equal for all; None: no stream."""
        self.schedule = Schedule.from_weights(self.weights, self.lanes)
        self.records: dict[str, dict[str, Any]] = {
            name: {**part.record, "windows": None if isinstance(part.dataset, Stream) else len(part.dataset)}
            for name, part in parts.items()
        }
        """Records of all data sets in the schedule, including data sets that left the mixture."""
        self.lane_positions = {name: LanePositions(0, stream.first_cursors()) for name, stream in self.streams.items()}
        """Lane positions at the start of this attempt, including streams that left the mixture."""

    def locate(self, k: int) -> tuple[str, int, int]:
        """Return (data set, epoch, i) of sample k; (name, 0, position) for a stream. Raises IndexError if k < 0."""
        name, position = self.schedule.locate(k)
        windows = self.records[name]["windows"]
        epoch, i = (0, position) if windows is None else divmod(position, int(windows))
        return name, epoch, i

    def row(self, k: int) -> SampleRow:
        """Return sample k, not of a stream. Raises IndexError if k < 0, KeyError if its data set left the mixture."""
        name, epoch, i = self.locate(k)
        return read_row(self.parts[name].dataset, epoch, i)

    def lane_reader(
        self, consumed_samples: int, replica: int, replicas: int, *, openers: Mapping[str, LaneOpener] | None = None
    ) -> ReplicaSampleReader:
        """Return the samples of a data-parallel replica from `consumed_samples` on. Only for a mixture with streams.
        `openers` replace those of the streams."""
        assert self.lanes is not None
        return ReplicaSampleReader(
            self.schedule,
            {name: stream.open_lanes for name, stream in self.streams.items()} if openers is None else openers,
            self.lane_positions,
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
        """Return the state for a checkpoint, plain JSON; the next sample is `consumed_samples`. `cursors`: results of
        `ReplicaSampleReader.cursors` of all ranks; empty: lanes stand at the start of the attempt."""
        newer: dict[str, dict[int, Cursor]] = {}
        for part in cursors:
            for name, lanes in part.items():
                newer.setdefault(name, {}).update(lanes)
        standing: dict[str, dict[str, Any]] = {}
        for name, one in self.lane_positions.items():
            if name not in self.streams:  # it left the mixture, so its lanes do not move
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
        """Resume from a state and return its consumed samples. A changed mixture begins there.

        Raises FatalTrainingError with each difference if the state belongs to other data or another order, so that
        sample numbers would mean other samples, or if its counts are wrong.
        """
        consumed, schedule, settings, records, standing = _read_state(state)
        refuse_other_order(settings, records, self.settings, self.records)
        for name in [name for name in self.streams if name in standing]:
            try:
                self.streams[name].check_cursors(standing[name].cursors)
            except ValueError as error:
                words = f"the lanes of data set {name!r} in the checkpoint are damaged: {error}"
                raise FatalTrainingError(words, hint="resume from an older checkpoint") from None
        begun = {name: LanePositions(consumed, stream.first_cursors()) for name, stream in self.streams.items()}
        self.schedule = schedule.with_phase(consumed, self.weights, self.lanes)
        self.records = records | self.records
        self.lane_positions = begun | standing
        return consumed


def refuse_other_order(
    settings: Mapping[str, Any],
    records: Mapping[str, Mapping[str, Any]],
    own_settings: Mapping[str, Any],
    own_records: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise FatalTrainingError, naming each difference, if the settings or a data set that both name differ.

    `settings`, `records`: of the state in a checkpoint; records are by data set.
    """
    differences = [
        f"{name} was {short_value(old)}, is {short_value(own_settings.get(name))}"
        for name, old in settings.items()
        if own_settings.get(name) != old
    ]
    for dataset in [name for name in records if name in own_records]:
        was, now = records[dataset], own_records[dataset]
        differences += [
            f"{name} of data set {dataset!r} was {short_value(was.get(name))}, is {short_value(now.get(name))}"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name)
        ]
    if differences:
        raise FatalTrainingError(
            "the data order differs from the checkpoint's, samples would be lost or repeated: "
            + "; ".join(differences),
            hint="restore these settings and the shards; `relayrun submit` says which changes a run accepts",
        )


def _read_state(
    state: Mapping[str, Any],
) -> tuple[int, Schedule, dict[str, Any], dict[str, dict[str, Any]], dict[str, LanePositions]]:
    """Return consumed samples, schedule, settings, records and lane positions. Raises FatalTrainingError for damage."""
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
        settings, streams = {**state["settings"]}, {**state.get("streams", {})}
        records = {name: dict(record) for name, record in state["datasets"].items()}
        if records.keys() != set(schedule.names):
            raise ValueError("its data sets are not those of its phases")
        streamed = [name for name, record in records.items() if record["windows"] is None]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FatalTrainingError(
            f"the data state of the checkpoint is damaged: {error}", hint="resume from an older checkpoint"
        ) from None
    return consumed, schedule, settings, records, read_lane_positions(streams, consumed, streamed)


def short_value(value: object) -> str:
    return repr(value[:12] + "…") if isinstance(value, str) and len(value) == 64 else repr(value)
