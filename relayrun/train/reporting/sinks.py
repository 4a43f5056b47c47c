"""Where points go: TensorBoard's event files, and W&B. Each knows itself up to where it has been told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import TrackerRun
from relayrun.control.trainers.wandb import WandbMode
from relayrun.train.reporting import wandb_files
from relayrun.train.reporting.points import MetricPoint


class TrackerSink(Protocol):
    """Takes points whose iterations rise. Anything may raise: the feed starts over with a new one."""

    mark: int
    """The highest iteration that it holds; 0 where it holds none."""

    def write(self, point: MetricPoint) -> None:
        """Take a point above the mark."""

    def flush(self) -> None:
        """Make what was taken readable, where that is not done anyway."""

    def close(self) -> None:
        """Hand on all that was taken, and take no more."""


class TensorBoard(TrackerSink):
    """Event files in tensorboard/<id>/, a new one per attempt; all values of an iteration are one event."""

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
    """The highest step in a folder of event files; 0 where there is none."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        steps = [Event.FromString(raw).step for raw in RawEventFileLoader(str(path)).Load()]
        if any(steps):
            return int(max(steps))
    return 0


def wandb_client_settings() -> Any:
    """W&B's client without console, code, git state, metadata of the machine and system metrics."""
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


class WandB(TrackerSink):
    """One W&B run over all attempts, by its id. Step is the iteration.

    The client takes no console, code, git state, metadata of the machine or system metrics: they would be those of one
    node, and nothing of the environment shall reach a file.
    """

    def __init__(self, run: Run, stream: TrackerRun, config: CommonConfig, mode: WandbMode) -> None:
        import wandb

        for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # homes may be full or not there
            os.environ.setdefault(name, str(run.path / "wandb"))
        (run.path / "wandb").mkdir(exist_ok=True)
        self._run = wandb.init(
            project=config.project,
            name=config.name if stream.forked_from is None else f"{config.name}-from-{stream.fork_iteration}",
            id=stream.id,
            group=config.name,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(run.path),
            config=_shown(config, stream),
            settings=wandb_client_settings(),
        )
        if mode == "online":  # the service knows best
            self.mark = max(0, self._run.starting_step - 1)
        else:
            self.mark = wandb_files.highest_wandb_step(run.path / "wandb", stream.id)

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
    """The config as W&B shows it, without the variables that a site sets."""
    values = config.model_dump(mode="json")
    del values["cluster"]["environment"]
    if stream.forked_from is not None:
        values["forked_from"] = {"id": stream.forked_from, "iteration": stream.fork_iteration}
    return values
