"""The demo's jobs have as much time as this machine needs, now; and the stories that it learns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from relayrun.config.compose import resolve
from relayrun.control.rundir.records import AttemptEnd, CheckpointCommit, StartTimes
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.places import CODE_ROOT as ROOT
from relayrun.slurmtime import parse_time
from relayrun.watch.report.report_data import read_report_data
from scripts.demo import __main__ as demo
from scripts.demo import stories
from tests.history import began, history_plan

STEPS = 360
CONFIG = resolve.require_native(resolve.load_run_config(ROOT / "configs/runs/demo.yaml"))


class Machine:
    """Does what a job of the demo would do: so many seconds for a start, a step, a save and the end.

    `busy`: how many times slower it is in each attempt; the last figure goes on.
    """

    start, step, save = 12.0, 0.2, 1.0

    def __init__(self, run: Run, *, busy: Sequence[float]) -> None:
        self.run, self.busy = run, busy
        self.iteration = self.attempt = 0
        self.limits: list[float] = []

    def submit(self, _program: str, *arguments: object, chain: bool) -> None:
        assert chain
        (stop,) = (int(str(text).partition("stop_after=")[2]) for text in arguments if "stop_after" in str(text))
        self.job(time=3600.0, grace_period=600.0, last=stop)

    def resume(self, command: str, folder: Path, *arguments: str, chain: bool) -> None:
        assert (command, folder, chain) == ("resume", self.run.path, True)
        changes = dict(text.removeprefix("--set=").split("=") for text in arguments)
        assert changes.pop("training.stop_after") == "null"
        limit, lead = float(parse_time(changes.pop("job.time"))), float(changes.pop("chain.grace_period"))
        assert not changes
        assert 0 < lead < limit
        self.limits.append(limit)
        while self.iteration < STEPS and self.job(time=limit, grace_period=lead, last=STEPS):
            pass

    def job(self, *, time: float, grace_period: float, last: int) -> bool:
        """Record an attempt; return True if it has trained."""
        self.attempt += 1
        slow = self.busy[min(self.attempt, len(self.busy)) - 1]
        began(self.run, self.attempt, base=self.iteration, start_time=0.0, job_end_time=time)
        attempt, base = self.run.attempt(self.attempt), self.iteration
        most = int((time - grace_period - self.start * slow) / (self.step * slow))
        self.iteration = min(last, max(base, base + most))
        if time > self.start * slow:
            StartTimes(process=1, imported=2, initialised=3, loaded=self.start * slow).write(attempt.started)
        lines = [
            {"iteration": i, "loss": 3.0, "step_seconds": self.step * slow} for i in range(base + 1, self.iteration + 1)
        ]
        attempt.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        wall = self.start * slow + len(lines) * self.step * slow + self.save * slow
        if lines:
            folder = self.run.checkpoint(self.iteration)
            folder.mkdir(parents=True)
            attempt.append_commit(
                CheckpointCommit(
                    iteration=self.iteration, path=str(folder), consumed_samples=1, time=wall, seconds=self.save * slow
                )
            )
        end = AttemptEnd(
            attempt=self.attempt,
            cause="saved",
            reason="time limit near",
            exit_code=0,
            durable_iteration=self.iteration,
            progress=bool(lines),
            end_time=min(wall, time),
            action="continue",
        )
        end.write(attempt.end)
        return bool(lines)


Make = Callable[..., Machine]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*busy: float) -> Machine:
        machine = Machine(Run(tmp_path / "run"), busy=busy)
        machine.run.path.mkdir()
        history_plan(machine.run, total_steps=STEPS).write(machine.run.plan)
        monkeypatch.setattr(demo, "run_program", machine.submit)
        monkeypatch.setattr(demo, "run_relayrun", machine.resume)
        return machine

    return make


def trained_by(machine: Machine) -> list[int]:
    """Let the demo train there; return how many iterations each attempt did."""
    demo.train_to_end(machine.run, CONFIG, ["demo.yaml"], slurm=False)
    rows = read_report_data(machine.run).attempts
    steps = [row.steps or (1, 0) for row in rows]
    assert steps[-1][1] == machine.iteration == STEPS
    return [last - first + 1 for first, last in steps]


@pytest.mark.parametrize("slow", [0.1, 1.0, 20.0])
def test_any_machine_shows_three_attempts(machines: Make, slow: float) -> None:
    machine = machines(slow)
    trained = trained_by(machine)
    assert len(trained) >= 3
    assert trained[0] == STEPS // 3
    assert min(trained) > 0
    assert len(machine.limits) == 1


def test_a_machine_that_becomes_busy_gets_more_time(machines: Make) -> None:
    """Four times as slow behind the first job: a start alone would take the whole time that was measured."""
    machine = machines(1.0, 8.0)
    trained = trained_by(machine)
    assert 0 in trained, "the case is the one that is meant"
    assert machine.limits == sorted(machine.limits)
    assert len(machine.limits) >= 2


def test_a_machine_that_saves_nothing_ends_the_demo_with_the_reason(machines: Make) -> None:
    machine = machines(1.0)
    machine.job = lambda **_: False  # type: ignore[method-assign]
    machine.run.stop.write_text("2 attempts in a row without a new checkpoint\n\nThe chain has ended.\n")
    with pytest.raises(RelayrunError) as raised:
        demo.train_to_end(machine.run, CONFIG, ["demo.yaml"], slurm=False)
    why = "4 chains in a row saved nothing behind iteration 0: 2 attempts in a row without a new checkpoint"
    assert why in str(raised.value)
    assert "relayrun status" in str(raised.value)


@pytest.mark.parametrize("slurm", [False, True])
def test_a_submit_or_resume_that_is_refused_ends_the_demo_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: bool
) -> None:
    """The demo tried four times, with more time each, and reported chains that had saved nothing."""
    run, tried = Run(tmp_path / "run"), list[str]()

    def refused(program: str, *_: object, chain: bool) -> bool:
        tried.append(program)
        return chain

    monkeypatch.setattr(demo, "run_program", refused)
    monkeypatch.setattr(demo, "run_relayrun", refused)
    with pytest.raises(RelayrunError, match="no job of this chain began; why stands above"):
        demo.train_to_end(run, CONFIG, ["demo.yaml"], slurm=slurm)
    run.path.mkdir()
    history_plan(run, total_steps=STEPS).write(run.plan)
    monkeypatch.setattr(demo, "run_program", lambda *_, chain: not chain)
    with pytest.raises(RelayrunError, match="no job of this chain began; why stands above"):
        demo.train_to_end(run, CONFIG, ["demo.yaml"], slurm=False)
    assert tried == ["launchers/submit.py", "resume"]


def test_the_relay_shows_each_attempt_where_it_went_on(machines: Make) -> None:
    machine = machines(1.0)
    trained_by(machine)
    summary = read_report_data(machine.run)
    lines = demo.attempts_chart(summary).splitlines()
    assert len(lines) == len(summary.attempts)
    bars = [line[9 : 9 + demo.CHART_WIDTH] for line in lines]
    for before, after in pairwise(bars):
        assert len(before.rstrip()) == len(after) - len(after.lstrip())
    assert len(bars[-1].rstrip()) == demo.CHART_WIDTH


def texts(folder: Path) -> list[str]:
    return [text for file in sorted(folder.iterdir()) for text in pq.read_table(file)["text"].to_pylist()]


def test_stories_are_the_same_again_never_twice_and_held_out_ones_are_not_trained_on(tmp_path: Path) -> None:
    made = stories.build_stories(tmp_path / "a", megabytes=0.2)
    again = stories.build_stories(tmp_path / "b", megabytes=0.2)
    train, heldout = texts(made.train), texts(made.heldout)
    assert (train, heldout) == (texts(again.train), texts(again.heldout))
    assert len({*train, *heldout}) == len(train) + len(heldout)
    assert made.documents == len(train)
    assert made.bytes == sum(len(text.encode()) for text in train) >= 200_000
    assert len(train) * 0.003 < len(heldout) < len(train) * 0.03
    assert len({*islice(stories.generate_stories(1), 50)} & {*islice(stories.generate_stories(2), 50)}) == 0
    for text in islice(stories.generate_stories(3), 500):
        assert not {"{", "}"} & set(text)
