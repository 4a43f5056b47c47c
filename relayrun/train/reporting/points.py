"""The metrics of a stream as trackers want them: one record per iteration, in order, each once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.control.rundir import merged_metrics
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import TrackerRun

SPEED_METRICS = frozenset(
    [
        "tokens_per_second",
        "step_seconds",
        "data_seconds",
        "forward_backward_seconds",
        "optimizer_seconds",
        "save_seconds",
        "evaluation_seconds",
        "model_tflops_per_gpu",
        "mfu",
        "slowest_rank_ratio",
        "memory_bytes",
        "memory_allocated_bytes",
        "memory_reserved_bytes",
        "memory_max_reserved_bytes",
    ]
)
"""Fields that say how fast it goes, and not what is learned."""

METRIC_GROUPS = {
    "validation": "validation",
    "perplexity": "perplexity",
    "params_norm_per_param": "params_norm",
    "auxiliary_losses": "train",
}
"""Fields that hold a number for each of several names, and what the names stand below."""


@dataclass
class MetricPoint:
    """What is known of one iteration: its step and, where there was one, its evaluation."""

    iteration: int
    time: float = 0.0
    """Seconds since 1970, at the end of the step."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers of the iteration by the names that trackers show: train/loss, speed/mfu, validation/<set>."""

    def add(self, line: dict[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        for name, value in line.items():
            if name in METRIC_GROUPS:
                self.values |= {f"{METRIC_GROUPS[name]}/{part}": number for part, number in value.items()}
            elif name == "timers":
                self.values |= {f"timers/{part}": times["max"] for part, times in value.items()}
            elif name == "time":
                self.time = self.time or value
            elif name != "iteration" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self.values[f"{'speed' if name in SPEED_METRICS else 'train'}/{name}"] = value


class StreamRolledBack(Exception):
    """Raised where the attempt went back to a checkpoint: what follows is another stream's."""


class PointReader:
    """Joins the lines of iterations above `mark`: those of `earlier`, then those that `file` has and will have.

    An iteration is given out when a later one has begun, since its evaluation comes in a line of its own; so an
    attempt that is killed between the two leaves the whole iteration to the next one.
    """

    def __init__(
        self, earlier: Iterable[dict[str, Any]], file: Path | None = None, *, mark: int, rewinds: int = 0
    ) -> None:
        self._earlier = iter(earlier)
        self._file = file
        self._rewinds = rewinds
        """Rewinds in the file that still lie before this stream's lines."""
        self._offset = 0
        self._mark = mark
        self._held: MetricPoint | None = None

    @classmethod
    def of_attempt(cls, run: Run, begin: AttemptStart, stream: TrackerRun, *, mark: int) -> PointReader:
        """Follow the newest stream: what is there of it up to the attempt's base or newest rewind, then what comes."""
        rewinds = stream.rewind if stream.first_attempt == begin.attempt else 0
        base = stream.fork_iteration if rewinds else begin.base_iteration
        before = merged_metrics.valid_lines(run, above=mark, before=(begin.attempt, rewinds))
        earlier = (line for line in before if line["iteration"] <= base)
        return cls(earlier, run.attempt(begin.attempt).metrics, mark=mark, rewinds=rewinds)

    @classmethod
    def of_stream(cls, run: Run, streams: Sequence[TrackerRun], number: int, *, mark: int) -> PointReader:
        """Read all of `streams[number]` that is there now."""
        end = streams[number + 1].start if number + 1 < len(streams) else None
        return cls(merged_metrics.valid_lines(run, above=mark, before=end), mark=mark)

    def poll(self, *, complete: bool = False) -> Iterator[MetricPoint]:
        """Yield the points since the last call; `complete`: no line will be added, so the last one is whole.

        Raises Rewound behind the last point of the stream.
        """
        for lines in (self._earlier, self._new_lines()):
            for line in lines:
                if "rewind" in line:
                    yield from self._rest()
                    raise StreamRolledBack
                yield from self._take(line)
        if complete:
            yield from self._rest()

    def _rest(self) -> Iterator[MetricPoint]:
        if self._held is not None:
            yield self._held
            self._mark, self._held = self._held.iteration, None

    def _take(self, line: dict[str, Any]) -> Iterator[MetricPoint]:
        if "round" in line:  # what follows was told before, and is computed again to the same bits
            return
        iteration = line.get("iteration", 0)
        if self._held is not None and iteration > self._held.iteration:
            yield from self._rest()
        if iteration > self._mark:
            self._held = self._held or MetricPoint(iteration)
            if iteration == self._held.iteration:
                self._held.add(line)

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines of the file since the last call."""
        if self._file is None:
            return
        try:
            with open(self._file, "rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    try:
                        value = json.loads(line)
                    except ValueError:  # what a killed or full disk left
                        continue
                    if not isinstance(value, dict):
                        continue
                    if self._rewinds:
                        self._rewinds -= "rewind" in value
                    else:
                        yield value
        except FileNotFoundError:
            return
