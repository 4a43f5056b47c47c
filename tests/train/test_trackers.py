"""What trackers are told, with sinks that are lists: order, high-water mark, forks, failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relayrun.control.rundir.records import AttemptOutcome, AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.control.trainers.tools import wandb_mode
from relayrun.files import append_line
from relayrun.train.reporting import tracker_feed
from relayrun.train.reporting import trackers as reporting_trackers
from relayrun.train.reporting.trackers import MetricPoint, PointReader, StreamRolledBack, highest_tensorboard_step
from tests.history import began
from tests.waiting import read_line, wait_for


class Memory:
    """A sink that remembers."""

    def __init__(self, kept: list[MetricPoint]) -> None:
        self.kept = kept
        self.mark = kept[-1].iteration if kept else 0
        self.closed = False

    def write(self, point: MetricPoint) -> None:
        self.kept.append(point)
        self.mark = point.iteration

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def begin(run: Run, number: int, base: int = 0, *, rolled_back: bool = False) -> AttemptStart:
    return began(run, number, base=base, base_path=None, rolled_back=rolled_back, start_time=0.0)


def step(run: Run, number: int, *iterations: int, loss: float = 1.0) -> None:
    for iteration in iterations:
        append_line(run.attempt(number).metrics, {"iteration": iteration, "loss": loss, "mfu": None, "time": 5.0})


def evaluate(run: Run, number: int, iteration: int) -> None:
    append_line(run.attempt(number).metrics, {"iteration": iteration, "validation": {"held-out": 2.0}, "time": 6.0})


def leave(run: Run, number: int) -> None:
    AttemptOutcome(outcome="saved", reason="", iteration=0, time=0.0).write(run.attempt(number).outcome)


def told(run: Run, at: AttemptStart, sink: Memory) -> list[int]:
    """The iterations that an attempt's feed tells when the attempt has ended already."""
    before = len(sink.kept)
    tracker_feed.feed_tracker(run, at, update_tracker_runs(run)[-1], sink, lambda _seconds: True)
    return [point.iteration for point in sink.kept[before:]]


def test_an_iteration_and_its_evaluation_are_one_point(tmp_path: Path) -> None:
    run = Run(tmp_path)
    at = begin(run, 1)
    step(run, 1, 1, 2)
    evaluate(run, 1, 2)
    points = PointReader.of_attempt(run, at, update_tracker_runs(run)[-1], mark=0)
    assert [point.iteration for point in points.poll()] == [1]
    step(run, 1, 3)
    (point,) = points.poll()
    assert (point.iteration, point.values) == (2, {"train/loss": 1.0, "validation/held-out": 2.0})
    assert list(points.poll()) == []
    assert [point.iteration for point in points.poll(complete=True)] == [3]


def test_what_has_several_names_is_told_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    at = begin(run, 1)
    measured = {
        "memory_reserved_bytes": 7,
        "params_norm": 5.0,
        "params_norm_per_param": {"decoder.layers.0.mlp.linear_fc1.weight": 3.0},
        "timers": {"forward-backward": {"min": 1.0, "max": 2.0}},
    }
    append_line(run.attempt(1).metrics, {"iteration": 1, "time": 5.0} | measured)
    line = {"iteration": 1, "validation": {"held-out": 2.0}, "perplexity": {"held-out": 7.4}, "time": 6.0}
    append_line(run.attempt(1).metrics, line)
    (point,) = PointReader.of_attempt(run, at, update_tracker_runs(run)[-1], mark=0).poll(complete=True)
    assert point.values == {
        "speed/memory_reserved_bytes": 7,
        "train/params_norm": 5.0,
        "params_norm/decoder.layers.0.mlp.linear_fc1.weight": 3.0,
        "timers/forward-backward": 2.0,
        "validation/held-out": 2.0,
        "perplexity/held-out": 7.4,
    }


def test_what_was_told_is_not_told_again_and_what_was_lost_is_made_up_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    sink = Memory([])
    first = begin(run, 1)
    step(run, 1, *range(1, 26))  # killed, 20 is durable
    assert told(run, first, sink) == list(range(1, 25))  # the last may lack its evaluation
    second = begin(run, 2, base=20)
    step(run, 2, *range(21, 31))
    leave(run, 2)
    del sink.kept[22:]  # the tracker's own client was killed too
    assert told(run, second, Memory(sink.kept)) == list(range(23, 31))
    assert [point.iteration for point in sink.kept] == list(range(1, 31))


def test_lines_beyond_the_base_of_the_next_attempt_do_not_count(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, 1)
    step(run, 1, *range(1, 26), loss=1.0)
    second = begin(run, 2, base=20)
    step(run, 2, *range(21, 26), loss=2.0)
    sink = Memory([])
    told(run, second, sink)
    assert [point.values["train/loss"] for point in sink.kept] == [1.0] * 20 + [2.0] * 4


def test_only_a_rollback_forks_and_the_fork_holds_the_whole_line(tmp_path: Path) -> None:
    run = Run(tmp_path)
    begin(run, 1)
    step(run, 1, *range(1, 26), loss=1.0)
    begin(run, 2, base=20)
    step(run, 2, *range(21, 31), loss=2.0)
    (one,) = update_tracker_runs(run)
    assert update_tracker_runs(run) == [one]
    begin(run, 3, base=10, rolled_back=True)
    step(run, 3, *range(11, 16), loss=3.0)
    streams = update_tracker_runs(run)
    assert [stream.id for stream in streams] == [entry["id"] for entry in json.loads(run.streams.read_text())]
    first, fork = streams
    assert first == one
    assert fork.id != first.id
    assert (fork.forked_from, fork.fork_iteration, fork.first_attempt) == (first.id, 10, 3)
    begin(run, 4, base=15)
    assert update_tracker_runs(run) == streams
    lines = [
        [
            (point.iteration, point.values["train/loss"])
            for point in PointReader.of_stream(run, streams, number, mark=0).poll(complete=True)
        ]
        for number in range(2)
    ]
    assert lines[0] == [(k, 1.0) for k in range(1, 21)] + [(k, 2.0) for k in range(21, 31)]
    assert lines[1] == [(k, 1.0) for k in range(1, 11)] + [(k, 3.0) for k in range(11, 16)]


@pytest.mark.slow
def test_a_failure_is_one_line_and_is_tried_again_from_what_the_tracker_has(tmp_path: Path) -> None:
    """The folder of event files cannot be made at first, as on a full disk."""
    run = Run(tmp_path)
    begin(run, 1)
    (stream,) = update_tracker_runs(run)
    step(run, 1, *range(1, 10))
    run.tensorboard.touch()
    command = [
        sys.executable,
        "-m",
        "relayrun.train.reporting.tracker_feed",
        "tensorboard",
        f"--run-dir={run.path}",
        "--attempt=1",
        f"--parent={os.getpid()}",
        "--pause=1",
        "--last-seconds=120",
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    first, second = (read_line(process, process.stderr).decode() for _ in range(2))
    assert first.startswith("warning: tensorboard: ")
    assert first.endswith("; training goes on, and tensorboard is tried again in 1 s\n")
    assert second.endswith("tried again in 2 s\n")
    run.tensorboard.unlink()
    wait_for(lambda: (run.tensorboard / stream.id).is_dir())
    leave(run, 1)
    process.communicate(b"\n", timeout=300)
    assert highest_tensorboard_step(run.tensorboard / stream.id) == 9


def rollback(run: Run, number: int, base: int, *, told: bool = True) -> None:
    """What rank 0 leaves when it goes back to the checkpoint of iteration `base`."""
    record = {"iteration": base + 5, "reason": "NaN", "base_iteration": base, "next_sample": 0, "time": 0.0}
    append_line(run.attempt(number).rollbacks, record)
    if told:
        append_line(run.attempt(number).metrics, {"iteration": base, "rollback": record})


def test_a_rollback_inside_an_attempt_forks_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    at = begin(run, 1)
    step(run, 1, *range(1, 16), loss=1.0)
    (one,) = update_tracker_runs(run)
    old = Memory([])
    points = PointReader.of_attempt(run, at, one, mark=0)
    old.kept += points.poll()
    rollback(run, 1, 10)
    step(run, 1, *range(11, 14), loss=2.0)
    with pytest.raises(StreamRolledBack):
        old.kept += points.poll()
    fork = update_tracker_runs(run)[-1]
    assert (fork.start, fork.forked_from, fork.fork_iteration) == ((1, 1), one.id, 10)
    new = Memory([])
    following = PointReader.of_attempt(run, at, fork, mark=0)
    new.kept += following.poll()
    step(run, 1, 14, loss=2.0)
    new.kept += following.poll(complete=True)
    assert losses(new.kept) == [(k, 1.0) for k in range(1, 11)] + [(k, 2.0) for k in range(11, 15)]

    rollback(run, 1, 10, told=False)  # killed right after the record; the next attempt goes on from there
    second = begin(run, 2, base=10)
    step(run, 2, *range(11, 13), loss=3.0)
    leave(run, 2)
    streams = update_tracker_runs(run)
    assert [stream.start for stream in streams] == [(1, 0), (1, 1), (1, 2)]
    run.streams.unlink()
    last = Memory([])
    told(run, second, last)
    assert losses(last.kept) == [(k, 1.0) for k in range(1, 11)] + [(k, 3.0) for k in range(11, 13)]
    whole = [losses(PointReader.of_stream(run, streams, number, mark=0).poll(complete=True)) for number in range(3)]
    assert whole == [
        [(k, 1.0) for k in range(1, 16)],
        [(k, 1.0) for k in range(1, 11)] + [(k, 2.0) for k in range(11, 15)],
        losses(last.kept),
    ]


def losses(points: Iterable[MetricPoint]) -> list[tuple[int, float]]:
    return [(point.iteration, point.values["train/loss"]) for point in points]


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, None),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "online"}, None),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, None),
        ({"WANDB_API_KEY": ""}, None),
    ],
)
def test_when_wandb_is_on(environment: dict[str, str], mode: str | None) -> None:
    assert wandb_mode(environment) == mode


@pytest.mark.alone
def test_rank_0_lets_go_of_a_feed_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracker_feed, "LEAVE_SECONDS", 0.3)
    hung: list[subprocess.Popen[bytes]] = []

    def start(*_arguments: Any) -> subprocess.Popen[bytes]:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        hung.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, bufsize=0))
        return hung[-1]

    monkeypatch.setattr(tracker_feed, "_start", start)
    said: list[str] = []
    config: Any = SimpleNamespace(project="p", name="n", tracking=SimpleNamespace(tensorboard=True))
    made = tracker_feed.TrackerProcesses(Run(tmp_path), 1, config, said.append)
    made.at_start(0, 0)
    assert len(hung) == 2
    begun = time.monotonic()
    made.close()
    assert time.monotonic() - begun < 5
    assert all(process.returncode == -9 for process in hung)


def test_one_line_says_that_wandb_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    said: list[str] = []
    config: Any = SimpleNamespace(project="p", name="n", tracking=SimpleNamespace(tensorboard=False))
    made = tracker_feed.TrackerProcesses(Run(tmp_path), 1, config, said.append)
    made.at_start(0, 0)
    made.close()
    assert said == ["W&B is off: neither WANDB_API_KEY nor WANDB_MODE=offline is in the environment"]
    assert list(tmp_path.iterdir()) == []


def test_trackers_that_cannot_start_are_off_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "streams.json").write_text("{")
    said: list[str] = []
    config: Any = SimpleNamespace(project="p", name="n", tracking=SimpleNamespace(tensorboard=False))
    made = tracker_feed.TrackerProcesses(Run(tmp_path), 1, config, said.append)
    made.at_start(0, 0)
    made.close()
    assert said[0].startswith("warning: W&B and TensorBoard are off in this attempt: ")


@pytest.mark.slow
def test_a_feed_ends_when_rank_0_is_gone(tmp_path: Path) -> None:
    """Its parent is a shell that ends at once, while somebody else holds the pipe open."""
    run = Run(tmp_path)
    begin(run, 1)
    update_tracker_runs(run)
    step(run, 1, 1, 2, 3)
    reading, writing = os.pipe()
    command = (
        f"{sys.executable} -m relayrun.train.reporting.tracker_feed tensorboard --run-dir '{run.path}' --attempt 1 "
        "--parent $$ --last-seconds 120 <&0 & echo $!; sleep 1"
    )
    shell = subprocess.run(["bash", "-c", command], stdin=reading, capture_output=True, text=True, timeout=300)
    assert shell.stderr == ""
    os.close(reading)
    wait_for(lambda: not Path(f"/proc/{shell.stdout.strip()}").exists())
    os.close(writing)
    assert list(run.tensorboard.glob("*/events*"))


@pytest.mark.slow
def test_records_of_a_wandb_file_span_blocks_and_a_torn_end_is_left(tmp_path: Path) -> None:
    import wandb

    folder = tmp_path / "wandb"
    run = wandb.init(
        project="p",
        id="abcd1234",
        dir=str(tmp_path),
        mode="offline",
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    for iteration in range(1, 31):
        run.log({"text": "x" * 5000, "loss": float(iteration)}, step=iteration)
    run.finish()
    wandb.teardown()  # the client writes its file's end when it goes
    (path,) = reporting_trackers.offline_wandb_files(folder, "abcd1234")
    assert [row["_step"] for row in reporting_trackers.wandb_history(path)] == list(range(1, 31))
    assert reporting_trackers.highest_wandb_step(folder, "abcd1234") == 30
    assert reporting_trackers.highest_wandb_step(folder, "other") == 0
    path.write_bytes(path.read_bytes()[:100_000])
    left = [row["_step"] for row in reporting_trackers.wandb_history(path)]
    assert left == list(range(1, len(left) + 1))
    assert 5 < len(left) < 30
    assert reporting_trackers.highest_wandb_step(folder, "abcd1234") == len(left)
