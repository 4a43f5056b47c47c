"""Runs of a campaign begin once each, in order, whoever looks, and wherever it is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.chain import campaign as supervisor
from relayrun.chain.campaign import begin_due, readiness
from relayrun.rundir import campaign, evaluations
from relayrun.rundir.campaign import Begun, Campaign, Member, Membership
from relayrun.rundir.evaluations import Result
from relayrun.rundir.plan import Plan, job_name
from relayrun.rundir.records import Commit
from relayrun.rundir.run import Run
from relayrun.rundir.stop import write_stop
from tests.history import began

from .conftest import MakeRun
from .exhaustion import FAULTS, KILL, run_child
from .fake_slurm import FakeSlurm
from .test_exhaustion import EVERYTHING, todays

Make = Callable[..., tuple[Path, FakeSlurm]]


@pytest.fixture
def make(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a campaign on a pretended Slurm: a member for each dictionary of its fields."""

    def made(*members: dict[str, Any], at_once: int | None = None) -> tuple[Path, FakeSlurm]:
        folder = tmp_path / "work/campaign"
        folder.mkdir(parents=True)
        found = []
        for number, fields in enumerate(members, start=1):
            name = fields.pop("name", f"{number:02}")
            at = tmp_path / f"work/campaign-{name}"
            run, _ = make_run(
                folder=f"work/campaign-{name}",
                scheduler="slurm",
                fallback_job=True,
                job_name=job_name("tests", name, at),
                owner=os.geteuid(),
            )
            Membership(folder=str(folder), member=name).write(campaign.membership_path(run))
            found.append(Member(name=name, run_dir=str(run.path), **fields))
        Campaign(
            kind="sweep", name="tests/c", owner=os.geteuid(), scheduler="slurm", at_once=at_once, members=found
        ).save(folder)
        (tmp_path / "queue").mkdir()
        slurm = FakeSlurm(tmp_path / "queue/jobs.json", "none")
        monkeypatch.setattr("subprocess.run", lambda command, **more: slurm.run(command, more.get("input") or ""))
        return folder, slurm

    return made


def member_run(folder: Path, name: str) -> Run:
    return Campaign.load(folder).member(name).run


def jobs(folder: Path, slurm: FakeSlurm) -> dict[str, list[str]]:
    """Ids of all jobs that were ever queued for each member, by its name; members without are left out."""
    names = {Plan.load(member.run).job_name: member.name for member in Campaign.load(folder).members}
    found: dict[str, list[str]] = {}
    for job_id, job in slurm.jobs().items():
        if job["name"] in names:
            found.setdefault(names[job["name"]], []).append(job_id)
    return found


def test_no_more_than_the_limit_and_the_next_one_when_a_chain_ends(make: Make) -> None:
    folder, slurm = make({}, {}, {}, {}, at_once=2)
    assert len(begin_due(folder)) == 2
    assert sorted(jobs(folder, slurm)) == ["01", "02"]
    assert begin_due(folder) == []
    write_stop(member_run(folder, "02"), "the last iteration, 20, is durable")
    supervisor.attend(member_run(folder, "02"))
    assert sorted(jobs(folder, slurm)) == ["01", "02", "03"]
    slurm.set(jobs(folder, slurm)["01"][0], state="FAILED")  # its fallback job goes on with it
    assert begin_due(folder) == []
    for job_id in slurm.fallback_jobs():
        slurm.set(job_id, state="CANCELLED")  # nobody does: a broken chain holds up no other
    assert len(begin_due(folder)) == 1
    assert {name: len(found) for name, found in jobs(folder, slurm).items()} == dict.fromkeys(
        ["01", "02", "03", "04"], 1
    )


def test_nothing_begins_without_its_record_behind_a_stop_and_for_another_user(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, slurm = make({}, {})
    record = folder / "campaign.json"
    record.rename(folder / "aside")
    assert begin_due(folder) == []  # the submit was killed
    assert campaign.waits(Run(folder.with_name("campaign-01")))
    (folder / "aside").rename(record)
    campaign.write_stop(folder, "stopped by ada")
    assert begin_due(folder) == []
    campaign.stop_path(folder).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert begin_due(folder) == []
    assert not slurm.jobs()
    assert len(begin_due(folder)) == 2


def test_who_cannot_ask_for_jobs_begins_none_beyond_the_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, slurm = make({}, {}, at_once=1)
    begin_due(folder)
    slurm.set("1", state="FAILED")
    down = subprocess.CompletedProcess([], 1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    monkeypatch.setattr(slurm, "run", lambda *_: down)
    assert begin_due(folder, patience=0) == []


def test_eight_who_look_at_once_begin_each_run_once(make: Make) -> None:
    folder, slurm = make(*({} for _ in range(6)))
    threads = [threading.Thread(target=begin_due, args=(folder,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: len(found) for name, found in jobs(folder, slurm).items()} == {f"{n:02}": 1 for n in range(1, 7)}


@pytest.mark.slow
@EVERYTHING
def test_killed_or_failing_at_any_call_each_run_begins_once(make: Make, tmp_path: Path, everything: bool) -> None:
    """Whoever begins runs is killed, or meets an error, at each of its calls; the next look mends it."""
    folder, slurm = make({}, {}, {}, at_once=2)
    work, template = folder.parent, tmp_path / "template"
    shutil.copytree(work, template)

    def look() -> int:
        begin_due(folder)
        return 0

    undisturbed = run_child(look, work, slurm)
    assert undisturbed.code == 0, undisturbed.output
    wrong, count = [], 0
    for number, call in enumerate(undisturbed.calls):
        for index, fault in enumerate((KILL, *FAULTS)):
            if not everything and (number + index) % 10 != todays(10):
                continue
            count += 1
            shutil.rmtree(work)
            shutil.copytree(template, work)
            slurm.write({})
            run_child(look, work, slurm, at=number, fault=fault)
            done = run_child(look, work, slurm)
            found = jobs(folder, slurm)
            records = {name: Begun.read(campaign.begun_path(folder, name)) for name in ("01", "02", "03")}
            told = {name: [record.job_id] for name, record in records.items() if record is not None}
            if done.code or sorted(found) != ["01", "02"] or told != found:
                wrong.append(f"{fault} at {number} {call}: {found}, on record {told}: {done.output}")
    assert count
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:20]])


def saved(run: Run, iteration: int) -> None:
    """A checkpoint of the run's first attempt."""
    if 1 not in run.attempt_numbers():
        run.attempt(1).path.mkdir(parents=True)
        began(run, 1).write(run.attempt(1).begin)
    run.checkpoint(iteration).mkdir(parents=True)
    commit = Commit(
        iteration=iteration, path=str(run.checkpoint(iteration)), consumed_samples=iteration, time=0.0, seconds=1.0
    )
    run.attempt(1).append_commit(commit)


def test_a_stage_begins_when_its_iteration_is_durable_and_that_checkpoint_stays_until_then(make: Make) -> None:
    folder, slurm = make({"name": "stable"}, {"name": "decay", "source": "stable", "iteration": 8})
    begin_due(folder)
    stable, decay = member_run(folder, "stable"), member_run(folder, "decay")
    saved(stable, 4)
    assert begin_due(folder) == []
    whole = Campaign.load(folder)
    assert readiness(whole, whole.member("decay")).why == "waits for iteration 8 of stable"
    assert campaign.held(stable) == {8}
    saved(stable, 8)
    saved(stable, 12)
    supervisor.attend(stable)  # as its watch does
    assert sorted(jobs(folder, slurm)) == ["decay", "stable"]
    plan = Plan.load(decay)
    assert (plan.load_iteration, plan.load_path) == (8, str(stable.checkpoint(8)))
    assert campaign.held(stable) == {8}
    saved(decay, 10)
    assert campaign.held(stable) == set()


def test_a_stage_waits_for_the_end_of_the_one_before_and_for_its_evaluation(make: Make) -> None:
    after = {"name": "long", "source": "stable", "evaluated": True, "counts_from_zero": True}
    folder, slurm = make({"name": "stable"}, after, {"name": "last", "after": "long"})
    begin_due(folder)
    stable, whole = member_run(folder, "stable"), Campaign.load(folder)
    saved(stable, 20)

    def why(name: str = "long") -> str:
        assert begin_due(folder) == []
        return readiness(whole, whole.member(name)).why

    assert why() == "waits for the end of stable"
    write_stop(stable, "stopped by ada")
    assert why() == "waits for stable, which ended: stopped by ada"
    stable.stop.unlink()
    write_stop(stable, "the last iteration, 20, is durable")
    assert why() == "waits for the evaluation of stable:20, which has no result yet"
    evaluations.directory(stable, 20, 1).path.mkdir(parents=True)
    evaluations.finish(stable, Result(iteration=20, attempt=1, status="failed", time=0.0))
    assert why() == "waits for the evaluation of stable:20, which failed"
    evaluations.finish(stable, Result(iteration=20, attempt=1, status="done", time=0.0))
    assert len(begin_due(folder)) == 1
    assert why("last") == "waits for the end of long"
    plan = Plan.load(member_run(folder, "long"))
    assert (plan.load_iteration, plan.load_path) == (0, str(stable.checkpoint(20)))
    assert sorted(jobs(folder, slurm)) == ["long", "stable"]
    write_stop(member_run(folder, "long"), "the last iteration, 40, is durable")
    assert len(begin_due(folder)) == 1
    assert Plan.load(member_run(folder, "last")).load_path is None


def test_a_run_that_a_person_submitted_by_hand_is_not_begun_again(make: Make) -> None:
    folder, slurm = make({}, {})
    run = member_run(folder, "01")
    slurm.add(Plan.load(run).job_name)
    assert begin_due(folder)[0].endswith("was queued, job 1")
    assert {name: len(found) for name, found in jobs(folder, slurm).items()} == {"01": 1, "02": 1}
