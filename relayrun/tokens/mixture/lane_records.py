"""Where the lanes of streams stood, as the run directory has it: at each checkpoint, and where each attempt began.

A sample of a stream has no number of its own in its files. To find one, its lane is read from the nearest
record before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relayrun.control.rundir.lineage import lineage_commits
from relayrun.control.rundir.run import Run, stream_positions_path
from relayrun.errors import FatalTrainingError
from relayrun.files import read_json
from relayrun.tokens.order.lanes import LanePositions, read_lane_positions
from relayrun.tokens.order.schedule import Schedule

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
