"""`relayrun status PROJECTS`: who runs what, what is blocked and why, and the node hours of seven days."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir.find_runs import find_runs_of
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from relayrun.control.scheduler import slurm
from relayrun.control.scheduler.base import Job
from relayrun.errors import RunDirError, user_name
from tests.history import make_history
from tests.owners import give_away
from tests.plans import plan_with

DAY = 86400.0


def a_run(project: Path, name: str, *, days: tuple[float, ...], hours: float = 2.0, nodes: int = 2) -> Run:
    """A run on Slurm whose jobs began so many days ago, the newest last."""
    run = make_history(project / f"logs/runs/models/{name}", lines=30, attempts=len(days))
    plan_with(Plan.load(run), scheduler="slurm", run=f"models/{name}", job_name=f"{name}-chain").write(run.plan)
    for number, ago in enumerate(days, start=1):
        attempt, start = run.attempt(number), time.time() - ago * DAY
        begin, end = attempt.started_record(), attempt.read_end()
        assert end is not None
        options = {"nodes": str(nodes)}
        replace(begin, start_time=start, job_start_time=start, job_end_time=None, options=options).write(attempt.begin)
        replace(end, end_time=start + 3600 * hours).write(attempt.end)
    return run


def queued(monkeypatch: pytest.MonkeyPatch, **states: tuple[str, str]) -> None:
    """Let Slurm tell a job of each run, in this state and for this reason."""
    found = {f"{name}-chain": [Job(id=name, name=name, state=s, reason=why)] for name, (s, why) in states.items()}
    monkeypatch.setattr(slurm, "jobs_by_name", lambda names, patience: found)


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Projects of two users: one trains, the other has a blocked run, a damaged one and old ones."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    a_run(mine, "trains", days=(20, 8, 3, 1))
    a_run(mine, "waits", days=(5,))
    blocked = a_run(theirs, "blocked", days=(7 + 1 / 24, 2), nodes=4)
    ended, damaged = a_run(theirs, "ended", days=(9,)), Run(theirs / "logs/runs/models/damaged")
    write_stop(ended, ChainEnd("done", "the last iteration is saved"))
    damaged.path.mkdir()
    damaged.plan.write_text("{")
    give_away(monkeypatch, blocked.path, ended.path, damaged.path)
    queued(
        monkeypatch,
        trains=("RUNNING", ""),
        waits=("PENDING", "Priority"),
        blocked=("PENDING", "AssocMaxNodePerJobLimit"),
    )
    return mine, theirs


def test_it_says_who_runs_what_and_what_is_blocked_and_why(
    projects: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    me, other = user_name(os.geteuid()), user_name(os.geteuid() + 1)
    assert main(["status", *map(str, projects), "--json"]) == 0
    found = {Path(each["path"]).name: each for each in json.loads(capsys.readouterr().out)}
    assert {name: (each["user"], each.get("state", "damaged")) for name, each in found.items()} == {
        "trains": (me, "running"),
        "waits": (me, "queued"),
        "blocked": (other, "blocked"),
        "ended": (other, "done"),
        "damaged": (other, "damaged"),
    }
    assert found["trains"]["week_node_hours"] == pytest.approx(2 * 2 * 2, abs=0.01)  # of two jobs of four
    assert found["blocked"]["week_node_hours"] == pytest.approx(4 * (1 + 2), abs=0.01)  # one hour before the week
    assert (found["ended"]["week_node_hours"], found["damaged"]["week_node_hours"]) == (0, None)
    assert found["waits"]["pending"] == {"waits": "Priority"}
    assert "never starts unless a person changes something: AssocMaxNodePerJobLimit" in found["blocked"]["broken"]
    assert main(["status", *map(str, projects)]) == 0
    shown = capsys.readouterr().out
    assert "models/ended" not in shown
    assert "1 more runs have ended, and had no nodes in the last 7 days" in shown
    sums = [line.split() for line in shown.splitlines()[-2:]]
    assert sorted(sums) == sorted([[me, "1", "1", "0", "12.0"], [other, "0", "0", "1", "12.0"]])


def test_node_hours_have_their_price(projects: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of one user may have prices of two sites."""
    for name, currency in (("trains", "CHF"), ("waits", "EUR")):
        run = Run(projects[0] / f"logs/runs/models/{name}")
        plan_with(Plan.load(run), cost_per_node_hour=3.0, currency=currency).write(run.plan)
    assert main(["status", *map(str, projects)]) == 0
    shown = capsys.readouterr().out
    assert "8.0 (24.00 CHF)" in shown
    assert "12.0 (24.00 CHF, 12.00 EUR)" in shown
    assert main(["goodput", str(run.path)]) == 0
    assert " node h allocated (12.00 EUR), goodput" in capsys.readouterr().out
    assert main(["goodput", str(run.path), "--json"]) == 0
    account = json.loads(capsys.readouterr().out)
    assert (account["cost"], account["currency"]) == (pytest.approx(12, abs=0.1), "EUR")


def test_a_project_with_one_run_is_no_run_and_a_run_is_no_project(
    projects: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    mine, _ = projects
    assert main(["status", str(mine)]) == 0
    assert "node hours, 7 days" in capsys.readouterr().out
    run = find_runs_of([str(mine / "logs/runs")], now=time.time())[0]
    assert main(["status", str(run.path)]) == 0
    assert "node hours, 7 days" not in capsys.readouterr().out
    with pytest.raises(RunDirError, match="there is no such run"):
        find_runs_of([str(mine), str(mine / "nothing")], now=time.time())
    assert main(["status", "-f", *map(str, projects)]) == 1


def test_what_others_wrote_into_their_records_hides_no_other_run(
    projects: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, theirs = projects
    run = Run(theirs / "logs/runs/models/blocked")
    for number, options in ((1, {"nodes": "many"}), (2, ["4"])):
        text = json.loads(run.attempt(number).begin.read_text())
        run.attempt(number).begin.write_text(json.dumps(text | {"options": options, "start_time": 1e400}))
    shutil.rmtree(theirs / "logs/runs/models/ended/attempts")
    assert main(["status", *map(str, projects), "--json"]) == 0
    found = {Path(each["path"]).name: each for each in json.loads(capsys.readouterr().out)}
    assert found["trains"]["state"] == "running"
    assert found.keys() >= {"trains", "ended", "damaged"}
