"""One vocabulary for the state of a run: whoever shows it says the same word."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from relayrun.cli import main
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from relayrun.watch.status.summary import RunState
from tests.accounted import make_project

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The only run of a sweep, whose first job has ended; the sweep and the run lie in a project."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin")
    monkeypatch.chdir(tmp_path)
    made = make_project(tmp_path)
    replace(Plan.load(made), scheduler="local").write(made.plan)
    folder = made.path.parent / "sweep"
    folder.mkdir()
    CampaignMembership(folder=str(folder), member="01").write(campaign.membership_path(made))
    member = CampaignMember(name="01", run_dir=str(made.path))
    Campaign(kind="sweep", name="tests/c", owner=os.geteuid(), scheduler="local", at_once=1, members=[member]).save(
        folder
    )
    return made


def shown_states(run: Run, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The state of the run, by the command that shows it."""

    def printed(*words: str) -> Any:
        assert main([*words]) == 0
        return capsys.readouterr().out

    name = str(run.path)
    text = dict(line.strip().split(maxsplit=1) for line in printed("status", name).splitlines() if " " in line.strip())
    rows = {
        "status of all": json.loads(printed("status", "--json")),
        "runs": json.loads(printed("runs", "list", "--json")),
        "sweep": json.loads(printed("sweep", "status", str(run.path.parent / "sweep"), "--json")),
    }
    found = {command: row["state"] for command, [row] in rows.items()}
    found["status"] = text["state"].partition(":")[0]
    printed("report", name, "--html", "page.html")
    found["page"] = Path("page.html").read_text(encoding="utf-8").split("<div>state<b>")[1].partition("<")[0]
    printed("report", name, name, "--html", "page.html")
    of_two = Path("page.html").read_text(encoding="utf-8").split("<div>state<b>")[1:]
    assert len(of_two) == 2
    found["two runs"] = of_two[1].partition("<")[0]
    return found


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_the_state_of_an_ended_run_is_that_of_stop(run: Run, state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write_stop(run, ChainEnd(state, "for some reason"))
    assert set(shown_states(run, capsys).values()) == {state}


def test_a_chain_that_nothing_continues_has_failed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(shown_states(run, capsys).values()) == {"failed"}


def test_a_chain_of_one_job_that_ended_as_planned_is_done(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.load(run)
    replace(plan, chain=replace(plan.chain, auto_requeue=False)).write(run.plan)
    end = run.attempt(2).read_end()
    assert end is not None
    assert end.cause == "done"
    assert set(shown_states(run, capsys).values()) == {"done"}


def test_the_docs_list_every_state() -> None:
    text = (DOCS / "reference/failure-modes.md").read_text(encoding="utf-8")
    table = text.partition("| state | meaning |")[2].partition("\n\n")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == list(get_args(RunState))
