"""W&B and TensorBoard: metrics of a tracker run as points, one record per iteration, and the sinks that take them.

A sink knows the highest iteration of its records; for W&B offline its files are read. The client keeps up to 32 KiB in
memory and loses them with its process, so a call of its API proves nothing. A .wandb file is a LevelDB log
(https://github.com/google/leveldb/blob/main/doc/log_format.md: blocks of 32 KiB, records cut into fragments of crc32,
length, kind) after a header of 7 bytes, `:W&B`, two bytes and a version; a record is a protobuf
`wandb_internal.Record`. wandb 0.31 itself reads it only in Go.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.rundir import evaluations, merged_metrics
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import TrackerRun, read_tracker_runs
from relayrun.control.trainers.tools import WandbMode
from relayrun.files import parse_record
from relayrun.leftovers import open_lock

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
"""Fields about speed, not about learning."""

METRIC_GROUPS = {
    "validation": "validation",
    "perplexity": "perplexity",
    "params_norm_per_param": "params_norm",
    "auxiliary_losses": "train",
}
"""Fields with a number per name, and the prefix of the names."""


@dataclass
class MetricPoint:
    """Values of one iteration: its step and, if there was one, its evaluation."""

    iteration: int
    time: float = 0.0
    """Seconds since 1970, at the end of the step."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers by the names that trackers show: train/loss, speed/mfu, validation/<set>."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
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
    """The attempt rolled back to a checkpoint: later lines belong to another tracker run."""


class PointReader:
    """Joins the lines of iterations above `mark`: lines of `earlier`, then present and future lines of `file`.

    An iteration is complete when a later one begins, since its evaluation has a line of its own; if an attempt is
    killed in between, the next attempt's feed sends the whole iteration.
    """

    def __init__(
        self, earlier: Iterable[dict[str, Any]], file: Path | None = None, *, mark: int, rollbacks: int = 0
    ) -> None:
        self._earlier = iter(earlier)
        self._file = file
        self._rollbacks = rollbacks
        """Rollbacks in the file before the lines of this tracker run."""
        self._offset = 0
        self._mark = mark
        self._held: MetricPoint | None = None

    @classmethod
    def of_attempt(cls, run: Run, begin: AttemptStart, stream: TrackerRun, *, mark: int) -> PointReader:
        """Follow the newest tracker run: lines up to the attempt's base or newest rollback, then new lines."""
        rollbacks = stream.rollback if stream.first_attempt == begin.attempt else 0
        base = stream.fork_iteration if rollbacks else begin.base_iteration
        before = merged_metrics.valid_lines(run, above=mark, before=(begin.attempt, rollbacks))
        earlier = (line for line in before if line["iteration"] <= base)
        return cls(earlier, run.attempt(begin.attempt).metrics, mark=mark, rollbacks=rollbacks)

    @classmethod
    def of_stream(cls, run: Run, streams: Sequence[TrackerRun], number: int, *, mark: int) -> PointReader:
        """Read the present lines of `streams[number]`."""
        end = streams[number + 1].start if number + 1 < len(streams) else None
        return cls(merged_metrics.valid_lines(run, above=mark, before=end), mark=mark)

    def poll(self, *, complete: bool = False) -> Iterator[MetricPoint]:
        """Yield the points since the last call; `complete`: no line will follow, so the last point is complete.

        Raises StreamRolledBack after the last point of the tracker run.
        """
        for lines in (self._earlier, self._new_lines()):
            for line in lines:
                if "rollback" in line:
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
        if "restart" in line:  # a restart computes known iterations again, to the same bits
            return
        iteration = line.get("iteration", 0)
        if self._held is not None and iteration > self._held.iteration:
            yield from self._rest()
        if iteration > self._mark:
            self._held = self._held or MetricPoint(iteration)
            if iteration == self._held.iteration:
                self._held.add(line)

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines of the file since the last call."""
        if self._file is None:
            return
        try:
            with open(self._file, "rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    if (value := parse_record(line)) is None:  # a line torn by a kill or a full disk
                        continue
                    if self._rollbacks:
                        self._rollbacks -= "rollback" in value
                    else:
                        yield value
        except FileNotFoundError:
            return


WANDB_BLOCK_BYTES = 32 * 1024
WANDB_HEADER_BYTES = 7
_FULL, _LAST = 1, 4


def offline_wandb_files(folder: Path, run_id: str) -> list[Path]:
    """Return the .wandb files that were written offline with this id, oldest first."""
    return sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def highest_wandb_step(folder: Path, run_id: str) -> int:
    """Return the highest step in the offline files of this id, newest file first; 0 without one."""
    for path in reversed(offline_wandb_files(folder, run_id)):
        steps = [int(row["_step"]) for row in wandb_history(path)]
        if steps:
            return max(steps)
    return 0


def wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged values, a dict per step, oldest first, up to the end of a killed client."""
    from wandb.proto import wandb_internal_pb2

    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a .wandb file."""
    if data[:4] != b":W&B":
        return
    at, record = WANDB_HEADER_BYTES, b""
    while at + WANDB_HEADER_BYTES <= len(data):
        left = WANDB_BLOCK_BYTES - at % WANDB_BLOCK_BYTES
        if left < WANDB_HEADER_BYTES:  # zeros fill the rest of a block without room for a fragment
            at += left
            continue
        _checksum, size, kind = struct.unpack_from("<IHB", data, at)
        at += WANDB_HEADER_BYTES
        if not kind or at + size > len(data):
            return
        record += data[at : at + size]
        at += size
        if kind in (_FULL, _LAST):
            yield record
            record = b""


class TrackerSink(Protocol):
    """Takes points of rising iterations. Any method may raise: the feed then starts over with a new sink."""

    mark: int
    """Highest iteration of its records; 0 without records."""

    def write(self, point: MetricPoint) -> None:
        """Take a point above the mark."""

    def flush(self) -> None:
        """Make the points readable, if necessary."""

    def close(self) -> None:
        """Send all points, and take no more."""


class TensorBoard(TrackerSink):
    """Event files in tensorboard/<id>/, a new file per attempt; all values of an iteration are one event."""

    def __init__(self, run: Run, stream: TrackerRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.tensorboard / stream.id
        self.mark = highest_tensorboard_step(folder)
        self._writer = EventFileWriter(str(folder))

    def write(self, point: MetricPoint) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._writer.add_event(Event(step=point.iteration, wall_time=point.time, summary=Summary(value=values)))
        self.mark = point.iteration

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def highest_tensorboard_step(folder: Path) -> int:
    """Return the highest step in a folder of event files; 0 without one."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        steps = [Event.FromString(raw).step for raw in RawEventFileLoader(str(path)).Load()]
        if any(steps):
            return int(max(steps))
    return 0


def wandb_client_settings() -> Any:
    """Return settings of the W&B client without console, code, git state, machine metadata and system metrics."""
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
    )


def start_wandb_client(
    run: Run, settings: CommonConfig, mode: WandbMode, *, run_id: str, name: str, **more: Any
) -> tuple[Any, int]:
    """Start the client of a W&B run; return it and the highest step of its records, 0 without records."""
    import wandb

    (run.path / "wandb").mkdir(exist_ok=True)
    client = wandb.init(
        project=settings.project,
        name=name,
        id=run_id,
        group=settings.name,
        resume="allow" if mode == "online" else None,
        mode=mode,
        dir=str(run.path),
        settings=wandb_client_settings(),
        **more,
    )
    if mode == "online":  # the service knows best
        return client, max(0, client.starting_step - 1)
    return client, highest_wandb_step(run.path / "wandb", run_id)


class WandB(TrackerSink):
    """One W&B run over all attempts, by its id; a step is an iteration.

    The client collects nothing itself (`wandb_client_settings`): it would describe one node, and must not write
    anything of the environment to a file.
    """

    def __init__(self, run: Run, stream: TrackerRun, config: CommonConfig, mode: WandbMode) -> None:
        for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # homes may be full or missing
            os.environ.setdefault(name, str(run.path / "wandb"))
        name = config.name if stream.forked_from is None else f"{config.name}-from-{stream.fork_iteration}"
        self._run, self.mark = start_wandb_client(
            run, config, mode, run_id=stream.id, name=name, config=_shown(config, stream)
        )

    def write(self, point: MetricPoint) -> None:
        self._run.log(point.values | {"_timestamp": point.time}, step=point.iteration)
        self.mark = point.iteration

    def flush(self) -> None:
        pass  # the client sends by itself

    def close(self) -> None:
        import wandb

        self._run.finish(exit_code=0)
        wandb.teardown()  # waits until the client has written the end of its file


def _shown(config: CommonConfig, stream: TrackerRun) -> dict[str, Any]:
    """Return the config that W&B shows, without the site's environment variables."""
    values = config.model_dump(mode="json")
    del values["cluster"]["environment"]
    if stream.forked_from is not None:
        values["forked_from"] = {"id": stream.forked_from, "iteration": stream.fork_iteration}
    return values


def send_evaluations(run: Run, config: CommonConfig, mode: WandbMode) -> None:
    """Send the results that W&B lacks to a run beside the training's own. An evaluation may end long after its
    iteration, and W&B's steps only rise, so a step is the number of the result by time. Raises any error of the
    client."""
    streams = read_tracker_runs(run)
    results = sorted(
        (r for r in evaluations.evaluation_results(run) if r.status == "done"), key=lambda result: result.time
    )
    if not streams or not results:
        return
    import wandb

    with open(open_lock(run.evaluations / "wandb.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two jobs may end at the same time
        client, known = start_wandb_client(
            run,
            config,
            mode,
            run_id=f"{streams[0].id}-evaluation",
            name=f"{config.name}-evaluation",
            job_type="evaluation",
        )
        client.define_metric("evaluation/*", step_metric="iteration")
        for number, result in enumerate(results, 1):
            if number > known:
                values = {
                    f"evaluation/{task}/{metric}": value
                    for task, metrics in result.results.items()
                    for metric, value in metrics.items()
                }
                client.log(values | {"iteration": result.iteration, "_timestamp": result.time}, step=number)
        client.finish(exit_code=0)
        wandb.teardown()
