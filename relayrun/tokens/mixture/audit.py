"""The samples that a run has read and will read, computed from its directory alone for any sample number.

The data order is a pure function, so training logs nothing: the newest attempt's `data.json` holds the phases, and
the rest follows. Samples beyond the trained ones are what the run will read if its mixture stays. A sample of a
stream has no number in its files: its lane is read from the nearest record of lane positions before it, at a
checkpoint or where an attempt began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.checkpoint_records import lineage_commits, resume_point
from relayrun.control.rundir.run import Run, stream_positions_path
from relayrun.errors import FatalTrainingError, InputError
from relayrun.files import read_json
from relayrun.tokens.mixture.build_datasets import make_dataset, training_order
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.order.datasets import Dataset, DocumentOrigin
from relayrun.tokens.order.sampler import LanePositions, MixtureSampler, Stream, read_lane_positions
from relayrun.tokens.order.schedule import Schedule
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.streams.lane_cursor import LaneCursor, skipped_rows

_DAMAGED_RECORD_ERRORS = (FatalTrainingError, ValueError, KeyError, TypeError, AttributeError, OSError)
"""What a record raises that cannot be read; an older one may do."""


def lane_positions_before(
    run: Run, schedule: Schedule, name: str, record: Mapping[str, Any], k: int
) -> LanePositions | None:
    """Where the lanes of the stream `name` stood, from the record that is nearest before sample k; None: there is none.

    `schedule`, `record`: the run's phases, and what decides the samples of the stream. A record of a past that is none
    any more, because the run went back and took another mixture, is passed over. So is a damaged one.
    """
    for path in _lane_record_paths(run, k):
        try:
            state = read_json(path)
            standing = read_lane_positions(state.get("streams", {}), state["consumed_samples"]).get(name)
            known, phases = state["datasets"].get(name, {}), Schedule.from_json(state["phases"])
        except _DAMAGED_RECORD_ERRORS:
            continue
        if standing is None or standing.at > k or known != dict(record):
            continue
        if _phases_until(phases, standing.at) == _phases_until(schedule, standing.at):
            return standing
    return None


def newest_lane_positions(run: Run, consumed: int) -> dict[str, LanePositions]:
    """Where the lanes of all streams stood at the newest record up to sample `consumed`; nothing if there is none."""
    for path in _lane_record_paths(run, consumed):
        try:
            state = read_json(path)
            return read_lane_positions(state.get("streams", {}), state["consumed_samples"])
        except _DAMAGED_RECORD_ERRORS:
            continue
    return {}


def lane_samples(schedule: Schedule, name: str, lane: int, lanes: int, first: int, end: int) -> Iterator[int]:
    """The samples of one lane of a stream, of those from `first` to below `end`, which may be of several phases."""
    borders = [phase.start for phase in schedule.phases if first < phase.start < end]
    for begin, stop in zip([first, *borders], [*borders, end], strict=True):
        for k in range(begin + (lane - schedule.in_phase(begin)) % lanes, stop, lanes):
            if schedule.locate(k)[0] == name:
                yield k


def _lane_record_paths(run: Run, k: int) -> list[Path]:
    """The records that were made up to sample k, the newest first; of one sample, that of the checkpoint."""
    commits = lineage_commits(run)
    consumed = {0: 0} | {commit.iteration: commit.consumed_samples for commit in commits}
    found = [(commit.consumed_samples, 1, stream_positions_path(Path(commit.path))) for commit in commits]
    for number in run.attempt_numbers():
        begin = run.attempt(number).read_begin()
        if begin is not None and begin.base_iteration in consumed:
            found.append((consumed[begin.base_iteration], 0, run.attempt(number).data))
    return [path for at, _, path in sorted(found, reverse=True) if at <= k and path.is_file()]


def _phases_until(schedule: Schedule, at: int) -> list[dict[str, Any]]:
    return [phase for phase in schedule.to_json() if phase["start"] < at]


MAX_COMPARED_SAMPLES = 100_000
"""Samples that `data_differences` looks at, at most."""


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """A run's data order, with its past."""

    run: Run
    config: RunConfig
    order: MixtureSampler
    datasets: dict[str, Dataset | Stream]
    """Data sets by identity, also those that have left the mixture."""
    progress: TrainingProgress
    """Which iteration trained on which samples, from the beginning on."""
    iteration: int
    consumed_samples: int
    """Samples consumed at the newest durable checkpoint."""


@dataclass(frozen=True, kw_only=True)
class AuditedSample:
    """One global sample: where it comes from, and its tokens."""

    number: int
    dataset: str
    epoch: int
    i: int
    """The sample's place in the epoch of its data set; of a stream, its number among all samples of the data set."""
    step: int | None
    """The iteration that trained on it, or will with the batch sizes of now; None: it was passed over."""
    origins: list[DocumentOrigin]
    """Documents that the sample is made of; empty for a data set that does not say."""
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LaneProgress:
    """How far the lanes of a stream were at the newest record: a checkpoint, or where an attempt began."""

    sample: int
    """The global sample that was next."""
    epochs: tuple[int, int]
    """Epoch of the lane that is furthest behind, and of the one furthest ahead; from 0."""
    rows: int
    """Rows in the blocks that lanes have left behind."""
    left_out: dict[str, int]
    """Rows among them that gave no sample, by reason."""
    files: int
    """Files that were left out whole, once an epoch."""


@dataclass(frozen=True, kw_only=True)
class DatasetLedger:
    """One data set's account."""

    dataset: str
    weight: float
    """Share of the samples in the newest phase; 0: the data set has left the mixture."""
    samples: int
    """Samples of the data set that are consumed."""
    untrained: int
    """Consumed samples that no update came from: passed over by a rewind, or of an iteration that was skipped."""
    windows: int | None
    """Windows of the data set in one epoch; None: it is a stream, which knows when it has read them."""
    exhausted_sample: int | None
    """The sample that ends its first epoch; None if that never comes, or is not known."""
    exhausted_step: int | None
    """The iteration that trains on that sample, with the batch sizes of now; None if it was passed over."""
    lanes: LaneProgress | None = None
    """How far the lanes of a stream are."""

    @property
    def epochs(self) -> float | None:
        return None if self.windows is None else self.samples / self.windows


def audit_run(run: Run) -> AuditedRun:
    """Read a run's records. Raises InputError if it has none."""
    revisions = run.revisions()
    if not revisions:
        raise InputError("this run has no config", where=run.config)
    revision, state = revisions[-1], None
    for number in reversed(run.attempt_numbers()):
        attempt = run.attempt(number)
        begin = attempt.read_begin()
        if begin is not None and attempt.data.is_file():
            revision, state = begin.config_revision, read_json(attempt.data)
            break
    config = resolve.require_native(
        resolve.read_resolved_config(run.config_revision(revision))
    )  # another trainer's has no manifest
    manifest = Manifest.read(run.manifest)
    order = training_order(config, manifest)
    progress = TrainingProgress(config.training.batch_sizes)
    if state is not None:
        order.resume(state)
        progress = TrainingProgress.resume(state["progress"], config.training.batch_sizes)
    datasets: dict[str, Dataset | Stream] = {name: part.dataset for name, part in order.parts.items()}
    for number in reversed(revisions):
        past = (
            config
            if number == revision
            else resolve.require_native(resolve.read_resolved_config(run.config_revision(number)))
        )
        for name, source in past.data.sources.items():
            if (identity := source.identity(name)) in order.schedule.names and identity not in datasets:
                datasets[identity] = make_dataset(past, manifest, name)
    iteration, consumed = _durable_samples(run)
    return AuditedRun(
        run=run,
        config=config,
        order=order,
        datasets=datasets,
        progress=progress,
        iteration=iteration,
        consumed_samples=consumed,
    )


def audited_samples(audited: AuditedRun, numbers: range) -> Iterator[AuditedSample]:
    """Locate and read global samples."""
    for k in numbers:
        name, epoch, i = audited.order.locate(k)
        dataset = audited.datasets[name]
        if isinstance(dataset, Stream):
            yield _stream_sample(audited, k, name, i)
            continue
        origins = getattr(dataset, "origins", None)
        yield AuditedSample(
            number=k,
            dataset=name,
            epoch=epoch,
            i=i,
            step=audited.progress.iteration_of(k),
            origins=origins(epoch, i) if origins else [],
            tokens=dataset.read(epoch, i),
        )


def _stream_sample(audited: AuditedRun, k: int, name: str, position: int) -> AuditedSample:
    """A sample of a stream, for which its lane is read from the nearest record before it.

    Raises InputError if there is none.
    """
    from relayrun.tokens.streams.text_stream import TextStream  # pyarrow, which a look at token shards does without

    stream, schedule = audited.datasets[name], audited.order.schedule
    standing = lane_positions_before(audited.run, schedule, name, audited.order.records[name], k)
    if not isinstance(stream, TextStream) or standing is None:
        raise InputError(
            f"sample {k} is of the stream {name!r}, and no record says where its lanes stood before it",
            where=audited.run.path,
            hint="attempts/*/data.json and checkpoints/*/data.json are these records; ask for a later sample",
        )
    lane = schedule.in_phase(k) % stream.lanes
    lanes = stream.open_lanes({lane: standing.cursors[lane]})
    try:
        for _ in lane_samples(schedule, name, lane, stream.lanes, standing.at, k):
            lanes.take(lane)
        row = lanes.take(lane)
        origins, epoch = lanes.origins(lane), LaneCursor(*lanes.cursor(lane)).epoch
    finally:
        lanes.close()
    return AuditedSample(
        number=k,
        dataset=name,
        epoch=epoch,
        i=position,
        step=audited.progress.iteration_of(k),
        origins=origins,
        tokens=row.tokens,
    )


def dataset_ledgers(audited: AuditedRun) -> list[DatasetLedger]:
    """The account of each data set at the newest durable checkpoint. Its samples sum to the consumed samples."""
    schedule = audited.order.schedule
    total = sum(schedule.phases[-1].weights.values())
    gaps = [(schedule.counts(first), schedule.counts(end)) for first, end in audited.progress.untrained]
    rows, newest = [], newest_lane_positions(audited.run, audited.consumed_samples)
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
                lanes=None if windows is not None else _lane_progress(newest.get(name, audited.order.standing[name])),
            )
        )
    return rows


def _lane_progress(standing: LanePositions) -> LaneProgress:
    lanes = [LaneCursor(*cursor) for cursor in standing.cursors]
    return LaneProgress(
        sample=standing.at,
        epochs=(min(lane.epoch for lane in lanes), max(lane.epoch for lane in lanes)),
        rows=sum(lane.rows for lane in lanes),
        left_out=skipped_rows(lanes),
        files=sum(lane.files for lane in lanes),
    )


def data_differences(a: AuditedRun, b: AuditedRun) -> list[str]:
    """What differs in the data of two runs, a line each, the first different sample last; none if nothing does."""
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
            return [
                *lines,
                f"first different sample: {k}: {_location_text(first_place)} | {_location_text(second_place)}",
            ]
    return [*lines, f"the first {end:,} samples are the same"] if lines else []


def _durable_samples(run: Run) -> tuple[int, int]:
    """Iteration and consumed samples of the newest durable checkpoint."""
    base = resume_point(run)
    consumed = [commit.consumed_samples for commit in lineage_commits(run) if commit.iteration == base.iteration]
    return base.iteration, max(0, consumed[-1]) if consumed else 0


def _phases(audited: AuditedRun) -> dict[str, Any]:
    return {str(number): phase for number, phase in enumerate(audited.order.schedule.to_json())}


def _different_pairs(a: dict[str, Any], b: dict[str, Any]) -> Sequence[tuple[str, Any, Any]]:
    return [(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def _location_text(place: tuple[str, int, int]) -> str:
    return f"{place[0]}, epoch {place[1]}, number {place[2]}"
