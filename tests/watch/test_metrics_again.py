"""Metrics of a run whose ended attempts were summed before: what is read again, and what is never believed."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptOutcome
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.rundir.run import Run
from relayrun.files import append_line
from relayrun.watch import prometheus
from relayrun.watch.goodput.account import read_attempt_sums
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.summary import summarize_run
from tests.history import STEP, began, ended, history_plan
from tests.plans import plan_with

opened: list[str] = []
listed: list[str] = []
sys.addaudithook(lambda event, details: opened.extend([str(details[0])] if event == "open" else []))
sys.addaudithook(lambda event, details: listed.extend([str(details[0])] if event == "os.listdir" else []))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAYRUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    made.path.mkdir()
    plan_with(history_plan(made, total_steps=1200), max_node_hours=100.0).write(made.plan)
    for number in range(1, 13):
        attempted(made, number, base=10 * (number - 1), last=10 * number)
    return made


def attempted(run: Run, number: int, *, base: int, last: int, recorded: bool = True) -> None:
    """An attempt of a job of its own: 20 s until its first step, 5 s a step, and a record of its end or none."""
    start, attempt = 1e9 + 1000 * number, run.attempt(number)
    began(run, number, base=base, job_id=str(number), start_time=start, job_submit_time=start - 7 * number)
    steps = [json.loads(STEP.format(iteration)) for iteration in range(base + 1, last + 1)]
    for at, step in enumerate(steps):
        append_line(attempt.metrics, step | {"time": start + 20 + 6 * at, "step_seconds": 5.0})
    outcome = AttemptOutcome(outcome="saved", reason="time limit near", iteration=last, time=start + 500)
    outcome.write(attempt.outcome)
    if recorded:
        ended(run, number, base=base, durable=last)
        end = attempt.read_end()
        assert end is not None
        replace(end, end_time=start + 600).write(attempt.end)


def looked(run: Run) -> list[object]:
    """All samples of a run, as a process of its own would yield them."""
    found = summarize_run(Run(run.path), QueueStatus(), now=2e9)
    return list(prometheus.run_samples(found, Run(run.path), Plan.load(run), now=2e9))


def anew(run: Run) -> list[object]:
    """The same with nothing kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAYRUN_CACHE", "")
        return looked(run)


def read_attempts(run: Run) -> set[int]:
    """Numbers of the attempts of which the sums open files."""
    opened.clear()
    read_attempt_sums(Run(run.path), Plan.load(run), now=2e9)
    folder = f"{run.attempts}/"
    return {int(path.removeprefix(folder)[:4]) for path in opened if path.startswith(folder)}


def test_an_ended_attempt_is_read_once(run: Run, cache: Path) -> None:
    assert read_attempts(run) == {*range(1, 13)}
    assert read_attempts(run) == {11, 12}
    assert looked(run) == anew(run)
    began(run, 13, base=120, start_time=1e9 + 13_000)
    assert read_attempts(run) == {11, 12, 13}
    assert looked(run) == anew(run)
    assert read_attempts(run) == {12, 13}


def test_a_look_lists_the_attempts_and_reads_the_plan_once(run: Run, cache: Path) -> None:
    collector = prometheus.RunsCollector(lambda: [Run(run.path)])
    assert list(collector.collect())
    for number in (13, 14):  # each look anew
        attempted(run, number, base=120, last=130)
        listed.clear()
        opened.clear()
        found = {sample.name: sample.value for family in collector.collect() for sample in family.samples}
        assert found["relayrun_attempts_total"] == number
        assert (listed.count(str(run.attempts)), opened.count(str(run.plan))) == (1, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_figures_are_those_of_all_attempts(run: Run, cache: Path, seed: int) -> None:
    """Attempts go on, go back, restart ranks, and record their ends or do not."""
    dice, newest = random.Random(seed), 120
    for number in range(13, 30):
        base = dice.choice([newest, newest, newest, max(0, newest - 15)])
        newest = base + dice.randrange(12)
        attempted(run, number, base=base, last=newest, recorded=dice.random() < 0.8)
        if dice.random() < 0.3:
            FailedRestart(
                restart=1,
                time=1e9 + 1000 * number + 30,
                rank=dice.choice([None, 1]),
                node="n1",
                words="killed by SIGKILL",
                iteration=base + 2,
                base_iteration=base,
                durable_iteration=base,
                next_iteration=base,
                again=True,
            ).append(run.attempt(number).failed_restarts)
        assert looked(run) == anew(run)
    assert len(read_attempts(run)) <= 3


def end_changed(run: Run) -> None:
    attempt = run.attempt(3)
    end = attempt.read_end()
    assert end is not None
    replace(end, cause="timeout").write(attempt.end)


def line_lost(run: Run) -> None:
    metrics = run.attempt(3).metrics
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))


def attempt_lost(run: Run) -> None:
    shutil.rmtree(run.attempt(2).path)


def plan_changed(run: Run) -> None:
    plan_with(Plan.load(run), nodes=4).write(run.plan)


def went_back(run: Run) -> None:
    began(run, 13, base=15, start_time=1e9 + 13_000)


@pytest.mark.parametrize("change", [end_changed, line_lost, attempt_lost, plan_changed, went_back])
def test_sums_of_records_that_were_others_are_not_believed(
    run: Run, cache: Path, change: Callable[[Run], None]
) -> None:
    before = looked(run)
    change(run)
    assert looked(run) == anew(run) != before
    assert len(read_attempts(run)) == 2, "and the new sums are kept"


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_sums_that_are_torn_forged_or_of_another_run_are_not_believed(run: Run, cache: Path, tmp_path: Path) -> None:
    right = looked(run)
    (kept,) = files(cache)
    text = kept.read_bytes()
    for other in (b"", text[: len(text) // 2], text.replace(b"saved", b"saveD"), os.urandom(999)):
        kept.write_bytes(other)
        assert looked(run) == right
    kept.write_bytes(text)
    kept.chmod(0o622)
    assert len(read_attempts(run)) == 12, "anybody can have written it"
    copied = Run(tmp_path / "copy")
    shutil.copytree(run.path, copied.path)
    assert len(read_attempts(copied)) == 12
    shutil.rmtree(run.path)
    copied.path.rename(run.path)  # another run has the place now
    assert len(read_attempts(run)) == 12


def test_nothing_is_written_into_a_run_and_the_sums_are_private(run: Run, cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    looked(run)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert [path.stat().st_mode & 0o777 for path in files(cache)] == [0o600]
