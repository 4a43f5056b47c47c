"""What a submit says about node hours, the question that it asks, and the budget that a check looks at."""

from __future__ import annotations

import io
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.rundir.records import AttemptEnd
from tests.history import began
from tests.workspace import CONFIG, Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.make(tmp_path)


def submit(workspace: Workspace, *options: str, **chain: Any) -> int:
    return main(["submit", str(workspace.config("run", chain=CONFIG["chain"] | chain)), *options])


def exits_with_2(workspace: Workspace, *options: str, **chain: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        submit(workspace, *options, **chain)
    assert ended.value.code == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_submit_above_the_limit_without_a_terminal_is_refused_with_2(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    exits_with_2(workspace, ask_above_node_hours=0.5)
    told = capsys.readouterr()
    assert "node hours no maximum (chain.max_node_hours sets one); needed: not known" in told.out
    assert "this can use more than 0.5 node hours" in told.err
    assert "add --yes" in told.err
    assert not workspace.run("run").path.exists()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    exits_with_2(workspace, ask_above_node_hours=0.5)
    assert "submit it? [y/N] error: nothing was submitted\n" in capsys.readouterr().err
    assert not workspace.run("run").path.exists()


def test_a_submit_is_not_refused_below_the_limit_or_after_a_yes(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayrun.cli.run.submit.print_submitted", lambda submitted: print("job", submitted.job_id))
    price = ["--set=cluster.cost_per_node_hour=3.0", "--set=cluster.currency=CHF"]
    assert submit(workspace, *price, ask_above_node_hours=2.0, max_node_hours=1.5) == 0
    assert "node hours at most 1.50 (4.50 CHF); needed: not known\njob 1" in capsys.readouterr().out
    other = ["--set=name=second", "--set=run_dir=null", "--set=cluster.ask_above_node_hours=0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    exits_with_2(workspace, *other)
    assert submit(workspace, *other, "--yes") == 0
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    assert submit(workspace, "--set=name=third", *other[1:]) == 0


def test_without_auto_requeue_the_maximum_is_one_job(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    exits_with_2(workspace, auto_requeue=False, ask_above_node_hours=0.08)
    assert "node hours at most 0.08; needed: not known" in capsys.readouterr().out


def test_a_run_whose_budget_is_over_is_refused_until_it_is_raised(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayrun.cli.run.submit.print_submitted", lambda submitted: print("job", submitted.job_id))
    past = datetime.fromtimestamp(time.time() - 60).isoformat(timespec="seconds")
    assert submit(workspace, deadline=past) == 1
    assert f"the budget is over: chain.deadline is {past}; 0 s are left" in capsys.readouterr().err
    assert submit(workspace, max_node_hours=1.0) == 0
    run, now = workspace.run("run"), time.time()
    began(run, 1, start_time=now - 3600, job_end_time=now - 60)
    end = {"cause": "saved", "reason": "", "exit_code": 0, "durable_iteration": 1, "progress": True, "action": "stop"}
    AttemptEnd(attempt=1, end_time=now - 60, **end).write(run.attempt(1).end)  # type: ignore[arg-type]
    (run.path / "local").rename(run.path / "jobs-before")
    assert main(["check", str(workspace.config("run", chain={"auto_requeue": True, "max_node_hours": 1.0}))]) == 1
    assert "0.98 of chain.max_node_hours 1 are used" in " ".join(capsys.readouterr().out.split())
    assert submit(workspace, "--resume", max_node_hours=1.0) == 1
    told = capsys.readouterr().err
    assert f"to go on: relayrun resume {run.path} --set chain.max_node_hours=..." in told
    assert submit(workspace, "--resume", max_node_hours=2.0) == 0
    assert "node hours at most 1.02; needed: about 19.67" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["tomorrow", "2027-13-01", "2027-01-31T18:00Z", "20270131"])
def test_a_deadline_is_a_date(workspace: Workspace, capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert submit(workspace, deadline=value) == 1
    assert "chain.deadline" in capsys.readouterr().err
