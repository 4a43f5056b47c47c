"""Runs of a campaign begin once each, in order, whoever looks, and wherever it is killed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.chain import campaign as supervisor
from relayrun.control.chain.campaign import CampaignPassResult, condition_readiness, start_due_in_campaign
from relayrun.control.chain.evaluation_jobs import submit_left_evaluations
from relayrun.control.rundir import campaign, evaluations
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership, MemberStarted
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.plan import Plan, chain_job_name
from relayrun.control.rundir.records import ChainEnd, CheckpointCommit
from relayrun.control.rundir.run import Run, stop_reason, write_stop
from relayrun.control.scheduler.slurm_commands import TooManyJobsError
from relayrun.errors import RunDirError
from relayrun.submit.campaign import TAKE_OVER_HINT
from relayrun.trust import UntrustedError
from tests.campaigns import ROOT
from tests.history import began
from tests.owners import copy_as_ones_own, give_away

from .conftest import MakeRun
from .exhaustion import FAULTS, KILL, Fault, Reached, run_child
from .fake_slurm import FakeSlurm, Jobs
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
                job_name=chain_job_name("tests", name, at),
                owner=os.geteuid(),
            )
            CampaignMembership(folder=str(folder), member=name).write(campaign.membership_path(run))
            found.append(CampaignMember(name=name, run_dir=str(run.path), **fields))
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
    assert len(start_due_in_campaign(folder).begun) == 2
    assert sorted(jobs(folder, slurm)) == ["01", "02"]
    assert start_due_in_campaign(folder).begun == []
    write_stop(member_run(folder, "02"), ChainEnd("done", "the last iteration, 20, is saved"))
    supervisor.start_due_members_of(member_run(folder, "02"))
    assert sorted(jobs(folder, slurm)) == ["01", "02", "03"]
    slurm.set(jobs(folder, slurm)["01"][0], state="FAILED")  # its fallback job goes on with it
    assert start_due_in_campaign(folder).begun == []
    for job_id in slurm.fallback_jobs():
        slurm.set(job_id, state="CANCELLED")  # nobody does: a broken chain holds up no other
    assert len(start_due_in_campaign(folder).begun) == 1
    assert {name: len(found) for name, found in jobs(folder, slurm).items()} == dict.fromkeys(
        ["01", "02", "03", "04"], 1
    )


def test_nothing_begins_without_its_record_behind_a_stop_and_for_another_user(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, slurm = make({}, {})
    record = folder / "campaign.json"
    record.rename(folder / "aside")
    with pytest.raises(RunDirError, match="its submit was killed"):
        start_due_in_campaign(folder)
    assert campaign.waits_for_campaign(Run(folder.with_name("campaign-01")))
    (folder / "aside").rename(record)
    campaign.write_campaign_stop(folder, "stopped by ada")
    assert start_due_in_campaign(folder).begun == []
    campaign.campaign_stop_path(folder).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert start_due_in_campaign(folder).begun == []
    assert not slurm.jobs()
    assert len(start_due_in_campaign(folder).begun) == 2


def test_nothing_of_another_users_campaign_or_run_begins_whatever_the_records_say(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that looks at it is enough to begin what is due."""
    folder, slurm = make({}, {})
    for path in (folder, folder / "campaign.json"):
        with monkeypatch.context() as patch:
            give_away(patch, path)
            assert start_due_in_campaign(folder).begun == []
    for path in (folder.with_name("campaign-01"), folder.with_name("campaign-01") / "plan.json"):
        with monkeypatch.context() as patch:
            give_away(patch, path, folder.with_name("campaign-02"))
            look = start_due_in_campaign(folder)
            assert look.begun == []
            assert set(look.stuck) == {"01", "02"}
            assert "this belongs to" in look.stuck["01"]
    assert not slurm.jobs()
    assert len(start_due_in_campaign(folder).begun) == 2


@pytest.mark.parametrize("name", [".", "campaign.json", "members"])
def test_nothing_of_a_campaign_that_others_can_write_begins(make: Make, name: str) -> None:
    folder, slurm = make({}, {})
    (folder / "members").mkdir(exist_ok=True)
    mode = (folder / name).stat().st_mode
    (folder / name).chmod(mode | 0o020)
    with pytest.raises(UntrustedError, match="its group may write this"):
        start_due_in_campaign(folder)
    assert not slurm.jobs()
    (folder / name).chmod(mode)
    assert len(start_due_in_campaign(folder).begun) == 2


def test_another_user_resumes_and_takes_over_no_campaign_but_its_runs_one_by_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, slurm = make({}, {})
    give_away(monkeypatch, folder, folder / "campaign.json")
    for words in (["sweep", "resume"], ["stages", "resume"]):
        assert main([*words, str(folder)]) == 1
        assert "submit runs of your own" in capsys.readouterr().err
    for verb in ("sweep", "stages"):  # no half of one is ever taken over
        with pytest.raises(SystemExit):
            main([verb, "submit", "config.yaml", "--take-over"])
        assert "unrecognized arguments: --take-over" in capsys.readouterr().err
    assert "relayrun submit` the newest file in its config/ --take-over" in TAKE_OVER_HINT
    assert not slurm.jobs()


def test_no_evaluation_of_another_users_run_is_queued(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, slurm = make({})
    run = member_run(folder, "01")
    saved(run, 10)
    run.evaluations.mkdir()
    EvaluationPolicy(interval=10, total_steps=0, hold=3, time_limit=60).write(run.evaluation_policy)
    assert evaluations.unqueued_iterations(run) == {10: ""}
    give_away(monkeypatch, run.path)
    with pytest.raises(UntrustedError):
        submit_left_evaluations(run)
    assert not slurm.jobs()


def test_who_cannot_ask_for_jobs_begins_none_beyond_the_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, slurm = make({}, {}, at_once=1)
    start_due_in_campaign(folder)
    slurm.set("1", state="FAILED")
    down = subprocess.CompletedProcess([], 1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    monkeypatch.setattr(slurm, "run", lambda *_: down)
    assert start_due_in_campaign(folder, patience=0).begun == []


def test_eight_who_look_at_once_begin_each_run_once(make: Make) -> None:
    folder, slurm = make(*({} for _ in range(6)))
    threads = [threading.Thread(target=start_due_in_campaign, args=(folder,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert {name: len(found) for name, found in jobs(folder, slurm).items()} == {f"{n:02}": 1 for n in range(1, 7)}


def at_every_call(
    look: Callable[[], int],
    calls: Sequence[str],
    work: Path,
    template: Path,
    slurm: FakeSlurm,
    queued: Jobs,
    judge: Callable[[Fault, Reached], str],
    *,
    everything: bool,
) -> None:
    """Let a look be killed, or meet an error, at each of its calls, and another one follow; `judge` says what is wrong.

    Each begins with the files of `template` in `work`, and with these jobs in the queue.
    """
    wrong, count = [], 0
    for number, call in enumerate(calls):
        for index, fault in enumerate((KILL, *FAULTS)):
            if not everything and (number + index) % 20 != todays(20):
                continue
            count += 1
            shutil.rmtree(work)
            copy_as_ones_own(template, work)
            slurm.write(queued)
            run_child(look, work, slurm, at=number, fault=fault)
            done = run_child(look, work, slurm)
            if words := judge(fault, done):
                wrong.append(f"{fault} at {number} {call}: {words}: {done.output}")
    assert count
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:20]])


@pytest.mark.slow
@EVERYTHING
def test_killed_or_failing_at_any_call_each_run_begins_once(make: Make, tmp_path: Path, everything: bool) -> None:
    """Whoever begins runs is killed, or meets an error, at each of its calls; the next look mends it."""
    folder, slurm = make({}, {}, {}, at_once=2)
    work, template = folder.parent, tmp_path / "template"
    shutil.copytree(work, template)

    def look() -> int:
        start_due_in_campaign(folder)
        return 0

    undisturbed = run_child(look, work, slurm)
    assert undisturbed.code == 0, undisturbed.output

    def judge(fault: Fault, done: Reached) -> str:
        found = jobs(folder, slurm)
        records = {name: MemberStarted.read(campaign.member_started_path(folder, name)) for name in ("01", "02", "03")}
        told = {name: [record.job_id] for name, record in records.items() if record is not None}
        # after an error who could not be read was passed over, and waits for its turn
        right = sorted(found) == ["01", "02"] or (fault is not KILL and len(found) == 2)
        once = all(len(ids) == 1 for ids in found.values())
        return f"{found}, on record {told}" if done.code or not right or not once or told != found else ""

    at_every_call(look, undisturbed.calls, work, template, slurm, {}, judge, everything=everything)


def saved(run: Run, iteration: int) -> None:
    """A checkpoint of the run's first attempt."""
    if 1 not in run.attempt_numbers():
        run.attempt(1).path.mkdir(parents=True)
        began(run, 1).write(run.attempt(1).begin)
    run.checkpoint(iteration).mkdir(parents=True)
    commit = CheckpointCommit(
        iteration=iteration, path=str(run.checkpoint(iteration)), consumed_samples=iteration, time=0.0, seconds=1.0
    )
    run.attempt(1).append_commit(commit)


def test_a_stage_begins_when_its_iteration_is_durable_and_that_checkpoint_stays_until_then(make: Make) -> None:
    folder, slurm = make({"name": "stable"}, {"name": "decay", "source": "stable", "iteration": 8})
    start_due_in_campaign(folder)
    stable, decay = member_run(folder, "stable"), member_run(folder, "decay")
    saved(stable, 4)
    assert start_due_in_campaign(folder).begun == []
    whole = Campaign.load(folder)
    assert condition_readiness(whole, whole.member("decay")).why == "waits for iteration 8 of stable"
    assert campaign.iterations_held_by_campaign(stable) == {8}
    saved(stable, 8)
    saved(stable, 12)
    supervisor.start_due_members_of(stable)  # as its watch does
    assert sorted(jobs(folder, slurm)) == ["decay", "stable"]
    plan = Plan.load(decay)
    assert (plan.load_iteration, plan.load_path) == (8, str(stable.checkpoint(8)))
    assert campaign.iterations_held_by_campaign(stable) == {8}
    saved(decay, 10)
    assert campaign.iterations_held_by_campaign(stable) == set()


AFTER = {"name": "long", "source": "stable", "counts_from_zero": True}


def test_a_stage_waits_for_the_end_of_the_one_before(make: Make) -> None:
    folder, slurm = make({"name": "stable"}, dict(AFTER), {"name": "last", "after": "long"})
    start_due_in_campaign(folder)
    stable, whole = member_run(folder, "stable"), Campaign.load(folder)
    saved(stable, 20)

    def why(name: str = "long", *, stuck: bool = False) -> str:
        look = start_due_in_campaign(folder)
        assert look.begun == []
        assert (name in look.stuck) == stuck
        return condition_readiness(whole, whole.member(name)).why

    assert why() == "waits for the end of stable"
    write_stop(stable, ChainEnd("stopped", "stopped by ada"))
    assert why(stuck=True) == "waits for stable, which ended: stopped by ada"
    stable.stop.unlink()
    write_stop(stable, ChainEnd("done", "the last iteration, 20, is saved"))
    assert len(start_due_in_campaign(folder).begun) == 1
    assert why("last") == "waits for the end of long"
    plan = Plan.load(member_run(folder, "long"))
    assert (plan.load_iteration, plan.load_path) == (0, str(stable.checkpoint(20)))
    assert sorted(jobs(folder, slurm)) == ["long", "stable"]
    write_stop(member_run(folder, "long"), ChainEnd("done", "the last iteration, 40, is saved"))
    assert len(start_due_in_campaign(folder).begun) == 1
    assert Plan.load(member_run(folder, "last")).load_path is None


def test_a_member_that_cannot_be_read_holds_its_own_checkpoint_alone(make: Make) -> None:
    branches = [{"name": f"b{number}", "source": "stable", "iteration": number} for number in (8, 12)]
    folder, _ = make({"name": "stable"}, *branches)
    torn = member_run(folder, "b8")
    began(torn, 1)
    torn.attempt(1).begin.write_text("{")
    saved(member_run(folder, "b12"), 14)
    assert campaign.iterations_held_by_campaign(member_run(folder, "stable")) == {8}


def test_a_log_folder_that_cannot_be_made_holds_up_no_other(make: Make) -> None:
    folder, slurm = make({}, {})
    run = member_run(folder, "01")
    (run.path / "file").touch()
    replace(Plan.load(run), log_folder=str(run.path / "file/logs")).write(run.plan)
    look = start_due_in_campaign(folder)
    assert jobs_by_name(slurm) == ["02"]
    assert look.stuck["01"].startswith("01 cannot begin: ")


def refuse(monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm, name: str, words: str) -> list[str]:
    """Let Slurm refuse the jobs whose script lies in a folder of this name; return the list of what was refused."""
    refused: list[str] = []

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        if command[0] == "sbatch" and name in Path(command[-1]).parent.name:
            refused.append(command[-1])
            return subprocess.CompletedProcess(command, 1, "", f"sbatch: error: {words}")
        return slurm.run(command, more.get("input") or "")

    monkeypatch.setattr("subprocess.run", run)
    return refused


@pytest.mark.parametrize("damage", ["torn plan", "no run", "torn begin", "a folder", "an odd record"])
def test_a_member_that_cannot_be_read_holds_up_no_other(make: Make, damage: str) -> None:
    folder, slurm = make({}, {}, {})
    run = member_run(folder, "02")
    if damage == "torn plan":
        run.plan.write_text('{"format": ')
    elif damage == "no run":
        run.path.rename(run.path.with_name("moved"))
    elif damage == "a folder":
        run.plan.unlink()
        run.plan.mkdir()
    elif damage == "an odd record":
        run.plan.write_text('["a list"]')
    else:
        began(run, 1)
        run.attempt(1).begin.write_text("{")
    look = start_due_in_campaign(folder)
    assert sorted(jobs_by_name(slurm)) == ["01", "03"]
    assert len(look.begun) == 2
    assert list(look.stuck) == ["02"]
    assert look.stuck["02"].startswith("02 cannot begin: ")
    assert start_due_in_campaign(folder).stuck == look.stuck


def jobs_by_name(slurm: FakeSlurm) -> list[str]:
    """The members that have jobs, by the names of the jobs."""
    return [job["name"].split("-")[1] for job in slurm.jobs().values() if "fallback" not in job["name"]]


@pytest.mark.parametrize("damage", ["moved", "torn commits", "torn stop"])
def test_a_source_that_cannot_be_read_is_told_and_holds_up_no_other(make: Make, damage: str) -> None:
    folder, slurm = make({"name": "a"}, {"name": "b"}, {"name": "c", "source": "a", "iteration": 8}, {"name": "d"})
    start_due_in_campaign(folder)
    campaign.member_started_path(folder, "d").unlink()  # as if it had to begin yet
    slurm.write({})
    source = member_run(folder, "a")
    saved(source, 8)
    if damage == "moved":
        source.path.rename(source.path.with_name("moved"))
        words = f"waits for a, which is not at {source.path} any more"
    elif damage == "torn commits":
        source.attempt(1).begin.write_text("{")
        words = "waits for a, whose records cannot be read: "
    else:
        source.stop.write_bytes(b"\xff\xfe")
        words = "waits for a, whose records cannot be read: "
    look = start_due_in_campaign(folder)
    assert jobs_by_name(slurm) == ["d"]
    assert look.stuck["c"].startswith(words)


def test_a_member_that_slurm_refuses_holds_up_no_other_and_is_tried_again_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, slurm = make({}, {}, {}, at_once=1)
    refused = refuse(monkeypatch, slurm, "campaign-01", "Batch job submission failed: Invalid partition")
    look = start_due_in_campaign(folder)
    assert jobs_by_name(slurm) == ["02"]
    words = "its first job is refused: sbatch: sbatch: error: Batch job submission failed: Invalid partition"
    assert look.stuck == {"01": words}
    write_stop(member_run(folder, "02"), ChainEnd("done", "the last iteration, 20, is saved"))
    slurm.write({})
    assert len(start_due_in_campaign(folder).begun) == 1
    assert jobs_by_name(slurm) == ["03"]
    assert len(refused) == 1  # an order to Slurm is not given at every look
    monkeypatch.setattr(supervisor.time, "time", lambda: 4e9)
    monkeypatch.setattr("subprocess.run", lambda command, **more: slurm.run(command, more.get("input") or ""))
    slurm.write({})
    assert start_due_in_campaign(folder).stuck == {}
    assert jobs_by_name(slurm) == ["01"]


def test_a_refusal_that_passes_by_stops_no_sweep(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a restart of the controller nodes are not back yet. The last chain that ends tries at once."""
    folder, slurm = make({}, {}, {}, at_once=2)
    start_due_in_campaign(folder)
    refuse(monkeypatch, slurm, "campaign-03", "Requested node configuration is not available")
    first, second = member_run(folder, "01"), member_run(folder, "02")
    write_stop(first, ChainEnd("done", "the last iteration, 20, is saved"))
    supervisor.start_due_members_of(first, leaves=True)
    monkeypatch.setattr("subprocess.run", lambda command, **more: slurm.run(command, more.get("input") or ""))
    assert start_due_in_campaign(folder).stuck == {"03": REFUSED}
    write_stop(second, ChainEnd("done", "the last iteration, 20, is saved"))
    supervisor.start_due_members_of(second)
    assert sorted(jobs(folder, slurm)) == ["01", "02", "03"]
    assert start_due_in_campaign(folder) == CampaignPassResult()


REFUSED = "its first job is refused: sbatch: sbatch: error: Requested node configuration is not available"


def test_who_is_refused_is_tried_later_each_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, slurm = make({})
    refused = refuse(monkeypatch, slurm, "campaign-01", "Requested node configuration is not available")
    tried = []
    for now in range(0, 4000, 10):
        monkeypatch.setattr(supervisor.time, "time", lambda now=now: 1e9 + now)
        start_due_in_campaign(folder)
        tried += [now] * (len(refused) - len(tried))
    assert tried == [0, 30, 90, 210, 450, 930, 1530, 2130, 2730, 3330, 3930]


def test_where_slurm_takes_no_more_jobs_nobody_is_stuck(make: Make) -> None:
    folder, slurm = make({}, {}, {})
    slurm.limit = 2  # the first one and its fallback job
    with pytest.raises(TooManyJobsError):
        start_due_in_campaign(folder)
    assert supervisor.start_due_members([folder]) == {folder: CampaignPassResult()}
    slurm.limit = 99
    assert len(start_due_in_campaign(folder).begun) == 2


def test_a_member_that_has_begun_and_cannot_be_read_counts_as_long_as_its_jobs_are_there(make: Make) -> None:
    folder, slurm = make({}, {}, {}, at_once=1)
    run = member_run(folder, "01")
    plan = Plan.load(run)
    named = chain_job_name("tests", "c-01", run.path)
    replace(plan, job_name=named).write(run.plan)
    assert len(start_due_in_campaign(folder).begun) == 1
    run.plan.write_text("{")
    assert start_due_in_campaign(folder).begun == []
    for job_id in slurm.jobs():
        slurm.set(job_id, state="FAILED")
    assert len(start_due_in_campaign(folder).begun) == 1


def test_a_begun_member_that_was_moved_holds_up_no_other(make: Make) -> None:
    folder, slurm = make({}, {}, at_once=1)
    assert len(start_due_in_campaign(folder).begun) == 1
    run = member_run(folder, "01")
    slurm.write({})
    run.path.rename(run.path.with_name("moved"))
    assert len(start_due_in_campaign(folder).begun) == 1


def test_what_no_look_can_mend_is_returned_by_folder(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make({})
    text = (folder / "campaign.json").read_text()
    (folder / "campaign.json").write_text("{")
    (look,) = supervisor.start_due_members([folder]).values()
    assert look.stuck[""].startswith(f"{folder}/campaign.json: unreadable record: ")
    assert "is left for later" in capsys.readouterr().err
    (folder / "campaign.json").write_text(text)
    campaign.campaign_stop_path(folder).write_bytes(b"\xff")  # a torn file
    (look,) = supervisor.start_due_members([folder]).values()
    assert "UnicodeDecodeError" in look.stuck[""]
    (folder / "campaign.json").unlink()
    (look,) = supervisor.start_due_members([folder]).values()
    assert look.stuck[""].startswith("there is no campaign.json")


def test_a_stop_passes_over_a_member_that_cannot_be_read_and_says_so(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = make({}, {}, {})
    start_due_in_campaign(folder)
    member_run(folder, "01").plan.write_text("{")
    assert main(["sweep", "stop", str(folder)]) == 1
    said = capsys.readouterr()
    assert "campaign-01: it could not be stopped: " in said.err
    assert stop_reason(member_run(folder, "02")) is not None
    assert stop_reason(member_run(folder, "03")) is not None


def test_a_stop_on_a_full_disk_stops_what_is_under_way(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, slurm = make({}, {})
    start_due_in_campaign(folder)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in ("campaign", "run"):
        monkeypatch.setattr(f"relayrun.control.rundir.{module}.write_atomic", refuse)
    assert main(["sweep", "stop", str(folder)]) == 1
    said = capsys.readouterr()
    assert f"{folder}: No space left on device: runs that wait may still begin, call it again" in said.err
    assert "could not be written (No space left on device" in said.out
    assert {job["state"] for job in slurm.jobs().values()} == {"CANCELLED"}


def test_a_stop_finds_the_job_of_who_was_killed_before_it_was_written_down(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, slurm = make({}, {})
    job = slurm.add(Plan.load(member_run(folder, "01")).job_name)
    assert main(["sweep", "stop", str(folder)]) == 0
    assert slurm.jobs()[job]["state"] == "CANCELLED"
    assert stop_reason(member_run(folder, "01")) is not None
    record = MemberStarted.read(campaign.member_started_path(folder, "01"))
    assert record is not None
    assert record.job_id == job
    assert stop_reason(member_run(folder, "02")) is None  # it waits, for `resume`
    assert not campaign.member_started_path(folder, "02").exists()


def test_a_stop_that_cannot_ask_says_that_a_job_may_be_left(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = make({}, {})
    down = subprocess.CompletedProcess([], 1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: down)
    monkeypatch.setattr(supervisor, "PATIENCE", 0.0)
    assert main(["sweep", "stop", str(folder)]) == 1
    assert "it is not known whether a job was queued" in capsys.readouterr().err
    assert campaign.campaign_stop_reason(folder) is not None


def test_what_slurm_refused_is_tried_at_once_where_a_person_asks(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, slurm = make({}, {})
    refused = refuse(monkeypatch, slurm, "campaign-01", "Batch job submission failed: Invalid account")
    start_due_in_campaign(folder)
    assert main(["sweep", "resume", str(folder)]) == 1
    assert len(refused) == 2
    assert "campaign: 01: its first job is refused: sbatch: sbatch: error: Batch job" in capsys.readouterr().err


def test_status_says_who_is_stuck_as_the_page_shows(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, slurm = make({}, {}, {})
    refuse(monkeypatch, slurm, "campaign-03", "Batch job submission failed: Invalid account")
    wanted = re.findall(r"^stuck: .*$", (ROOT / "docs/how-to/sweeps.md").read_text(encoding="utf-8"), re.M)
    assert main(["status", str(member_run(folder, "01").path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("due: work/campaign: 01, 02, 03: ")
    assert not slurm.jobs()  # a look starts nothing
    start_due_in_campaign(folder)
    assert main(["status", str(member_run(folder, "01").path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [shown[-1]] == [line.replace("my-project/my-sweep", "work/campaign") for line in wanted]
    assert main(["sweep", "status", str(folder)]) == 0
    said = capsys.readouterr()
    assert "its first job is refused" in " ".join(said.out.split())
    assert "stuck: work/campaign: 03: its first job is refused: sbatch" in said.err


def test_trouble_of_many_members_is_one_line() -> None:
    stuck = {"b": "waits for a, which ended: x", "c": "waits for a, which ended: x", "d": "no"}
    assert supervisor.stuck_lines(stuck) == ["b, c: waits for a, which ended: x", "d: no"]


def test_a_run_that_a_person_submitted_by_hand_is_not_begun_again(make: Make) -> None:
    folder, slurm = make({}, {})
    run = member_run(folder, "01")
    slurm.add(Plan.load(run).job_name)
    assert start_due_in_campaign(folder).begun[0].endswith("was queued, job 1")
    assert {name: len(found) for name, found in jobs(folder, slurm).items()} == {"01": 1, "02": 1}
