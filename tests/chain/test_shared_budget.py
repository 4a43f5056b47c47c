"""The runs of a sweep or of stages share one budget: what all have used counts, wherever a job or a run begins."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose.campaign import describe_campaign
from relayrun.control.chain import budget
from relayrun.control.chain.campaign import start_due_in_campaign
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, MemberStarted
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd
from relayrun.control.rundir.run import Run, read_stop
from relayrun.submit.campaign import campaign_cost
from tests.campaigns import relayrun, words, write_config
from tests.history import began
from tests.owners import give_away
from tests.plans import plan_with

from .conftest import make_run  # noqa: F401 - a fixture
from .test_campaign import Make, jobs, make, member_run  # noqa: F401 - a fixture


def limit(folder: Path, **chain: Any) -> None:
    for member in Campaign.load(folder).members:
        plan_with(Plan.load(member.run), **chain).write(member.run.plan)


def used(run: Run, seconds: float, *, nodes: int = 1, ended: bool = True, number: int = 1) -> None:
    """An attempt that had so many nodes until now."""
    now = time.time()
    start = now - seconds
    began(run, number, start_time=start, job_start_time=start, job_end_time=now + 7200, options={"nodes": str(nodes)})
    if ended:
        end = {"cause": "saved", "reason": "", "exit_code": 0, "durable_iteration": 1, "progress": True}
        AttemptEnd(attempt=number, end_time=now, action="stop", **end).write(run.attempt(number).end)  # type: ignore[arg-type]


def end_of(run: Run, **more: Any) -> budget.BudgetEnd:
    return budget.budget_end(run, Plan.load(run), nodes=1, start=time.time(), **more)


def test_what_all_runs_have_used_counts_and_those_beside_go_on_using_it(make: Make) -> None:  # noqa: F811
    folder, _ = make({}, {}, {})
    limit(folder, max_node_hours=10.0, max_gpu_hours=30.0)
    one, two, three = (member_run(folder, name) for name in ("01", "02", "03"))
    used(one, 3600, nodes=4)
    end = end_of(three)
    assert end.words == "4.00 of chain.max_node_hours 10 are used by all runs of campaign together"
    assert end.time == pytest.approx(time.time() + 6 * 3600, abs=5)
    used(two, 3600, nodes=2, ended=False)  # has two nodes now, and uses them
    assert end_of(three).time == pytest.approx(time.time() + 4 / 3 * 3600, abs=5)
    assert end_of(three).left == pytest.approx(4, abs=0.01)
    assert end_of(two, before=1).left == pytest.approx(6, abs=0.01)  # from `start` on
    plan_with(Plan.load(one), gpus_per_node=8).write(one.plan)
    plan_with(Plan.load(three), gpus_per_node=4).write(three.plan)
    assert end_of(three).setting == "max_gpu_hours"  # 32 of 30 by the first alone


def test_the_limit_of_a_stage_counts_the_hours_of_all(make: Make) -> None:  # noqa: F811
    folder, _ = make({}, {"settings": {"chain.max_node_hours": 20}})
    limit(folder, max_node_hours=10.0)
    two = member_run(folder, "02")
    plan_with(Plan.load(two), max_node_hours=20.0).write(two.plan)
    used(member_run(folder, "01"), 5 * 3600)
    assert end_of(two).left == pytest.approx(15)


def test_another_users_campaign_is_no_budget_of_this_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    folder, _ = make({}, {})
    limit(folder, max_node_hours=10.0)
    used(member_run(folder, "01"), 20 * 3600)
    assert end_of(member_run(folder, "02")).left < 0
    with monkeypatch.context() as patch:
        give_away(patch, folder)
        assert end_of(member_run(folder, "02")).left == 10
    run = member_run(folder, "02")
    (folder / "campaign.json").unlink()  # its runs go on alone
    assert end_of(run).left == 10


def test_records_of_another_run_that_cannot_be_read_stop_nothing(
    make: Make,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = make({}, {})
    limit(folder, max_node_hours=10.0)
    used(member_run(folder, "01"), 3600)
    member_run(folder, "01").attempt(1).end.write_text("{")
    assert end_of(member_run(folder, "02")).left == pytest.approx(10)
    assert "what 01 has used of the budget is not known: " in capsys.readouterr().err


def test_no_further_run_begins_behind_the_budget_until_its_owner_raises_it(
    make: Make,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, slurm = make({}, {"iteration": 10, "source": "01"}, {}, {})
    limit(folder, max_node_hours=10.0)
    used(member_run(folder, "01"), 10 * 3600 - 1)
    campaign.member_started_path(folder, "01").parent.mkdir(parents=True)
    MemberStarted(job_id="1", time=0.0).write(campaign.member_started_path(folder, "01"))
    looked = start_due_in_campaign(folder)
    assert looked.begun == []
    assert not jobs(folder, slurm)
    why = "the budget is over: 10.00 of chain.max_node_hours 10 are used by all runs of campaign together"
    assert looked.stuck.keys() == {"03", "04"}
    assert looked.stuck["03"].startswith(why)
    assert f"to go on: relayrun sweep resume {folder} --set chain.max_node_hours=..." in looked.stuck["03"]
    assert main(["sweep", "status", str(folder)]) == 0
    assert f"stuck: work/campaign: 03, 04: {why}" in capsys.readouterr().err
    for wrong in ("max_node_hours=lots", "max_node_hours=-1", "deadline=tomorrow", "auto_requeue=true"):
        assert main(["sweep", "resume", str(folder), "--set", f"chain.{wrong}"]) == 1
        assert f"chain.{wrong.partition('=')[0]}" in capsys.readouterr().err
    assert Campaign.load(folder).budget == {}
    assert main(["sweep", "resume", str(folder), "--set", "chain.max_node_hours=12"]) == 0
    assert sorted(jobs(folder, slurm)) == ["03", "04"]
    assert end_of(member_run(folder, "03")).left == pytest.approx(2, abs=0.01)
    assert main(["stages", "resume", str(folder), "--set", "chain.deadline=2001-01-01"]) == 0
    assert end_of(member_run(folder, "03")).words == "chain.deadline is 2001-01-01"


@pytest.mark.slow
def test_a_sweep_is_stopped_by_its_budget_and_goes_on_when_it_is_raised(tmp_path: Path) -> None:
    chain = {"max_node_hours": 24 / 3600, "grace_period": 2, "signal_seconds": 1}
    command = {"run": words(tmp_path, 10, seconds=1.0), "steps": 10}
    axes = {"product": {"job.cpus_per_task": [1, 2, 3]}}
    path = write_config(tmp_path, command=command, sweep=axes, chain=chain, job={"time": "1"})
    done = relayrun("sweep", "submit", path)
    assert done.returncode == 1, done.stdout + done.stderr
    runs = [Run(tmp_path / f"tiny-0{number}") for number in (1, 2, 3)]
    assert [bool(run.attempt_numbers()) for run in runs] == [True, True, False], done.stdout + done.stderr
    total = sum(budget.used_node_seconds(run, Plan.load(run), until=time.time()) for run in runs)
    assert 15 < total < 26
    assert "of chain.max_node_hours 0.00666667 are used by all runs of tiny together" in done.stderr
    raised = relayrun("sweep", "resume", tmp_path / "tiny", "--set", "chain.max_node_hours=1")
    assert runs[2].attempt_numbers(), raised.stdout + raised.stderr
    for run in runs:
        stop = read_stop(run)
        assert stop is not None
        if stop.state != "done":
            assert f"-> relayrun resume {run.path}" in raised.stdout
            assert relayrun("resume", run.path).returncode == 0
        assert (read_stop(run) or stop).state == "done"


@pytest.mark.parametrize(
    ("chain", "stages", "hours"),
    [
        ({"max_node_hours": 2.0}, {"one": None, "two": None, "three": None}, 2.0),
        ({"max_node_hours": 2.0}, {"one": None, "two": {"chain.max_node_hours": 3.0}}, 3.0),
        ({"max_node_hours": 2.0, "auto_requeue": False}, {"one": None, "two": None}, 2 * 5 / 60),
        ({}, {"one": {"chain.max_node_hours": 3.0}, "two": {"chain.max_gpu_hours": 3.0}}, math.inf),
    ],
)
def test_a_submit_asks_for_what_all_runs_can_use(
    tmp_path: Path, chain: dict[str, Any], stages: dict[str, Any], hours: float
) -> None:
    described = describe_campaign(write_config(tmp_path, stages=stages, chain=chain), kind="stages")
    assert campaign_cost(described).most == pytest.approx(hours)
