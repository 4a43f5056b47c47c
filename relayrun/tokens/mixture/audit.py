"""The samples that a run has read and will read, for any sample number, from the run directory alone.

The data order is a pure function, so training logs no samples: the newest attempt's `data.json` holds the phases.
Samples beyond the trained ones assume an unchanged mixture. A sample of a stream has no number in its files: its lane
is read from the nearest earlier record of lane positions, at a checkpoint or at the start of an attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.checkpoint_records import Lineage, resume_point, started_attempts_backwards
from relayrun.control.rundir.run import Run, stream_positions_path
from relayrun.errors import FatalTrainingError, InputError
from relayrun.files import read_json
from relayrun.tokens.mixture.build_datasets import make_dataset, training_order
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.order.datasets import Dataset, SampleSegment
from relayrun.tokens.order.sampler import LanePositions, MixtureSampler, Stream, read_lane_positions
from relayrun.tokens.order.schedule import Schedule
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.streams.lane_cursor import LaneCursor, skipped_rows

_DAMAGED_RECORD_ERRORS = (FatalTrainingError, ValueError, KeyError, TypeError, AttributeError, OSError)
"""Errors of a damaged record, whose place an older record takes."""


def lane_positions_before(
    run: Run, schedule: Schedule, name: str, record: Mapping[str, Any], k: int
) -> LanePositions | None:
    """Return the lane positions of the stream `name` from the nearest record before sample k; None: no record.
    `schedule` and `record` are the run's phases and the stream's record. Damaged records, and records of phases that a
    rollback has replaced, are skipped."""
    for state, found in _lane_records(run, k):
        positions = found.get(name)
        try:
            known, phases = state["datasets"].get(name, {}), Schedule.from_json(state["phases"])
        except _DAMAGED_RECORD_ERRORS:
            continue
        if positions is None or positions.at > k or known != dict(record):
            continue
        if _phases_until(phases, positions.at) == _phases_until(schedule, positions.at):
            return positions
    return None


def _lane_records(run: Run, k: int) -> Iterator[tuple[Any, dict[str, LanePositions]]]:
    """Yield the undamaged records up to sample k, newest first, each with the lane positions of all streams."""
    for path in _lane_record_paths(run, k):
        try:
            state = read_json(path)
            found = read_lane_positions(state.get("streams", {}), state["consumed_samples"])
        except _DAMAGED_RECORD_ERRORS:
            continue
        yield state, found


def lane_samples(schedule: Schedule, name: str, lane: int, lanes: int, first: int, end: int) -> Iterator[int]:
    """Yield the samples of one lane of a stream in first .. end - 1, which may span phases."""
    borders = [phase.start for phase in schedule.phases if first < phase.start < end]
    for begin, stop in zip([first, *borders], [*borders, end], strict=True):
        for k in range(begin + (lane - schedule.number_in_phase(begin)) % lanes, stop, lanes):
            if schedule.locate(k)[0] == name:
                yield k


def _lane_record_paths(run: Run, k: int) -> list[Path]:
    """Return the records up to sample k, newest first; for equal samples the checkpoint's before the attempt's."""
    commits = Lineage(run).line()
    consumed = {0: 0} | {commit.iteration: commit.consumed_samples for commit in commits}
    found = [(commit.consumed_samples, 1, stream_positions_path(Path(commit.path))) for commit in commits]
    found += [(consumed, 1, path) for consumed, path in _loader_states(run)]
    for number in run.attempt_numbers():
        begin = run.attempt(number).read_begin()
        if begin is not None and begin.base_iteration in consumed:
            found.append((consumed[begin.base_iteration], 0, run.attempt(number).data))
    return [path for at, _, path in sorted(found, reverse=True) if at <= k and path.is_file()]


def _loader_states(run: Run) -> list[tuple[int, Path]]:
    """Return the states that a `relayrun.loader` recorded, each with its samples."""
    return [(int(path.stem), path) for path in run.loader_states.glob("*.json") if path.stem.isdecimal()]


def _phases_until(schedule: Schedule, at: int) -> list[dict[str, Any]]:
    return [phase for phase in schedule.to_json() if phase["start"] < at]


MAX_COMPARED_SAMPLES = 100_000
"""Maximum samples that `data_differences` compares."""


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """A run's data order, with its past."""

    run: Run
    config: RunConfig
    order: MixtureSampler
    datasets: dict[str, Dataset | Stream]
    """Data sets by identity, including data sets that left the mixture."""
    progress: TrainingProgress
    """Maps samples to iterations, from the start of the run."""
    iteration: int
    consumed_samples: int
    """Samples consumed at the newest durable checkpoint."""


@dataclass(frozen=True, kw_only=True)
class AuditedSample:
    """The origin and tokens of a global sample."""

    number: int
    dataset: str
    epoch: int
    i: int
    """Position in the epoch of the data set; for a stream, number among all samples of the data set."""
    step: int | None
    """Iteration that trains on the sample, with the present batch sizes; None: the sample was passed over."""
    origins: list[SampleSegment]
    """Documents in the sample; empty if the data set does not implement `origins`."""
    tokens: npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, kw_only=True)
class LaneProgress:
    """Progress of a stream's lanes at the newest record: a checkpoint, or the start of an attempt."""

    sample: int
    """The next global sample."""
    epochs: tuple[int, int]
    """Lowest and highest epoch of the lanes, from 0."""
    rows: int
    """Rows in completed blocks."""
    left_out: dict[str, int]
    """Rows in completed blocks that gave no sample, by reason."""
    files: int
    """Files that were left out whole, counted once an epoch."""


@dataclass(frozen=True, kw_only=True)
class DatasetLedger:
    """The account of a data set."""

    dataset: str
    weight: float
    """Share of the samples in the newest phase; 0: the data set left the mixture."""
    samples: int
    """Consumed samples of the data set."""
    untrained: int
    """Consumed samples without an update: passed over by a rollback, or of a skipped iteration."""
    windows: int | None
    """Windows of the data set in an epoch; None: a stream."""
    exhausted_sample: int | None
    """Last sample of the first epoch; None if it never comes or is unknown."""
    exhausted_step: int | None
    """Iteration that trains on that sample, with the present batch sizes; None if it was passed over."""
    lanes: LaneProgress | None = None
    """Progress of a stream's lanes."""

    @property
    def epochs(self) -> float | None:
        return None if self.windows is None else self.samples / self.windows


def audit_run(run: Run) -> AuditedRun:
    """Read a run's records. Raises InputError for a run without a config."""
    revisions = run.revisions()
    if not revisions:
        raise InputError("this run has no config", where=run.config)
    revision, state, states = revisions[-1], None, _loader_states(run)
    if states:
        state = read_json(max(states)[1])
    for number, begin in started_attempts_backwards(run):
        if (data := run.attempt(number).data).is_file():
            revision, state = begin.config_revision, read_json(data)
            break
    config = _native_config(run, revision)
    manifest = Manifest.read(run.manifest)
    order = training_order(config, manifest)
    progress = TrainingProgress(config.training.batch_sizes)
    if state is not None:
        order.resume(state)
        if "progress" in state:  # a loader's program counts its steps itself
            progress = TrainingProgress.resume(state["progress"], config.training.batch_sizes)
    datasets: dict[str, Dataset | Stream] = {name: part.dataset for name, part in order.parts.items()}
    for number in reversed(revisions):
        past = config if number == revision else _native_config(run, number)
        for name, source in past.data.sources.items():
            if (identity := source.identity(name)) in order.schedule.names and identity not in datasets:
                datasets[identity] = make_dataset(past, manifest, name)
    iteration, consumed = _durable_samples(run)
    if states:
        consumed = max(states)[0]
        iteration = consumed // config.training.batch_sizes.at(consumed)
    return AuditedRun(
        run=run,
        config=config,
        order=order,
        datasets=datasets,
        progress=progress,
        iteration=iteration,
        consumed_samples=consumed,
    )


def _native_config(run: Run, revision: int) -> RunConfig:
    return resolve.require_native(resolve.read_resolved_config(run.config_revision(revision)))


def audited_samples(audited: AuditedRun, numbers: range) -> Iterator[AuditedSample]:
    """Yield samples with origins and tokens. Raises InputError for a stream without an earlier record of lanes."""
    for k in numbers:
        name, epoch, i = audited.order.locate(k)
        dataset = audited.datasets[name]
        if isinstance(dataset, Stream):
            epoch, origins, tokens = _stream_sample(audited, k, name)
        else:
            find = getattr(dataset, "origins", None)
            origins, tokens = find(epoch, i) if find else [], dataset.read(epoch, i)
        step = audited.progress.iteration_of(k)
        yield AuditedSample(number=k, dataset=name, epoch=epoch, i=i, step=step, origins=origins, tokens=tokens)


def _stream_sample(
    audited: AuditedRun, k: int, name: str
) -> tuple[int, list[SampleSegment], npt.NDArray[np.signedinteger[Any]]]:
    """Return epoch, origins and tokens of a stream's sample. Reads its lane from the nearest earlier record."""
    from relayrun.tokens.streams.text_stream import TextStream  # imports pyarrow, which token shards do not need

    stream, schedule = audited.datasets[name], audited.order.schedule
    positions = lane_positions_before(audited.run, schedule, name, audited.order.records[name], k)
    if not isinstance(stream, TextStream) or positions is None:
        words = f"sample {k} is of the stream {name!r}, and no record says where its lanes stood before it"
        hint = "attempts/*/data.json and checkpoints/*/data.json are these records; ask for a later sample"
        raise InputError(words, where=audited.run.path, hint=hint)
    lane = schedule.number_in_phase(k) % stream.lanes
    with contextlib.closing(stream.open_lanes({lane: positions.cursors[lane]})) as lanes:
        for _ in lane_samples(schedule, name, lane, stream.lanes, positions.at, k):
            lanes.take(lane)
        row = lanes.take(lane)
        return LaneCursor(*lanes.cursor(lane)).epoch, lanes.origins(lane), row.tokens


def dataset_ledgers(audited: AuditedRun) -> list[DatasetLedger]:
    """Return the account of each data set at the newest durable checkpoint. Samples sum to the consumed samples."""
    schedule = audited.order.schedule
    total = sum(schedule.phases[-1].weights.values())
    gaps = [(schedule.counts(first), schedule.counts(end)) for first, end in audited.progress.untrained]
    rows, newest = [], next((found for _, found in _lane_records(audited.run, audited.consumed_samples)), {})
    for name, count in schedule.counts(audited.consumed_samples).items():
        windows = audited.order.records[name]["windows"]
        last = None if windows is None else schedule.sample_of(name, windows - 1)
        rows.append(
            DatasetLedger(
                dataset=name,
                weight=schedule.phases[-1].weights.get(name, 0) / total,
                samples=count,
                untrained=sum(after[name] - before[name] for before, after in gaps),
                windows=windows,
                exhausted_sample=last,
                exhausted_step=None if last is None else audited.progress.iteration_of(last),
                lanes=None
                if windows is not None
                else _lane_progress(newest.get(name, audited.order.lane_positions[name])),
            )
        )
    return rows


def _lane_progress(positions: LanePositions) -> LaneProgress:
    lanes = [LaneCursor(*cursor) for cursor in positions.cursors]
    return LaneProgress(
        sample=positions.at,
        epochs=(min(lane.epoch for lane in lanes), max(lane.epoch for lane in lanes)),
        rows=sum(lane.rows for lane in lanes),
        left_out=skipped_rows(lanes),
        files=sum(lane.files for lane in lanes),
    )


def data_differences(a: AuditedRun, b: AuditedRun) -> list[str]:
    """Return the differences of the data of two runs, a line each, the first different sample last; empty if equal."""
    lines = [f"{name}: {was!r} | {now!r}" for name, was, now in _different_pairs(a.order.settings, b.order.settings)]
    lines += [f"phase {number}: {was} | {now}" for number, was, now in _different_pairs(_phases(a), _phases(b))]
    for name in sorted(a.order.records.keys() | b.order.records.keys()):
        first, second = a.order.records.get(name), b.order.records.get(name)
        if first is None or second is None:
            lines.append(f"data set {name!r}: only in the {'second' if first is None else 'first'}")
        else:
            lines += [
                f"data set {name!r}, {what}: {was!r} | {now!r}" for what, was, now in _different_pairs(first, second)
            ]
    end = min(max(a.consumed_samples, b.consumed_samples, 1), MAX_COMPARED_SAMPLES)
    for k in range(end):
        first_place, second_place = a.order.locate(k), b.order.locate(k)
        same_data = a.order.records[first_place[0]] == b.order.records[second_place[0]]
        if first_place != second_place or not same_data or a.order.settings != b.order.settings:
            places = f"{_location_text(first_place)} | {_location_text(second_place)}"
            return [*lines, f"first different sample: {k}: {places}"]
    return [*lines, f"the first {end:,} samples are the same"] if lines else []


def _durable_samples(run: Run) -> tuple[int, int]:
    base = resume_point(run)
    consumed = [commit.consumed_samples for commit in Lineage(run).line() if commit.iteration == base.iteration]
    return base.iteration, max(0, consumed[-1]) if consumed else 0


def _phases(audited: AuditedRun) -> dict[str, Any]:
    return {str(number): phase for number, phase in enumerate(audited.order.schedule.to_json())}


def _different_pairs(a: dict[str, Any], b: dict[str, Any]) -> Sequence[tuple[str, Any, Any]]:
    return [(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def _location_text(place: tuple[str, int, int]) -> str:
    return f"{place[0]}, epoch {place[1]}, number {place[2]}"
