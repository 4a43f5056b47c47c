"""`relayrun sentinel`: planted deaths of each kind are told, quiet hours are not, and its own death shows."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.chain import quota
from relayrun.control.notify import notices
from relayrun.control.notify.notices import NOTICE_EVENTS, NoticePolicy, NoticeTarget
from relayrun.control.rundir import campaign, find_runs
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership, MemberStarted
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.mirror import MirrorPass, MirrorPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, ChainEnd, CheckpointCommit, Heartbeat, StartTimes
from relayrun.control.rundir.run import Run, write_stop
from relayrun.control.rundir.storage_limits import QuotaLimit
from relayrun.control.scheduler import slurm, slurm_states
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.job_history import JobEnd
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import InputError, SchedulerError, user_name
from relayrun.files import write_error
from relayrun.trust import UntrustedError
from relayrun.watch import cron_check, symptoms, unsent_notices
from relayrun.watch.status import cron_check_record as records
from relayrun.watch.status import queue as asking
from relayrun.watch.status import run_status, tables
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.run_status import RunStatus
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.history import began
from tests.owners import give_away

EVERY = 120.0
"""Seconds between two looks."""
HOUR = 3600.0
ME = user_name(os.geteuid())


class World:
    """A run on a cluster whose time and whose answers the test decides."""

    def __init__(self, make: MakeRun, folder: Path, *, told: bool = True) -> None:
        self.run, self.plan = make(
            folder="runs/mine/run", scheduler="slurm", total_steps=100_000, save_interval=100, start_timeout=900
        )
        self.folder = folder / "runs"
        self.start = self.now = float(int(time.time()))
        self.jobs: list[Job] = []
        self.error: Exception | None = None
        self.asked = 0
        if told:
            tell(self)
        os.utime(self.run.plan, (self.start, self.start))

    def jobs_of(self, names: list[str], *, patience: float) -> dict[str, list[Job]]:
        """Answer for Slurm what the jobs of all chains are."""
        if self.error is not None:
            raise self.error
        return {name: self.jobs if name == self.plan.job_name else [] for name in names}

    def ask(self, *_: object, brief: bool = False) -> QueueStatus:
        """Answer for Slurm how the last job of a chain without jobs ended."""
        self.asked += 1
        return QueueStatus(last_job=JobEnd(id="7", state="NODE_FAIL", nodes="n1", source="sacct"))

    def queue(self, *jobs: tuple[str, str, str]) -> None:
        """Let the chain have these jobs: id, state, and why it waits."""
        self.jobs = [
            Job(id=number, name=self.plan.job_name, state=state, reason=reason) for number, state, reason in jobs
        ]

    def begin(self, number: int, job: str, *, base: int = 0) -> None:
        until = self.now + 6 * HOUR
        began(self.run, number, base=base, job_id=job, nodes="n[0-1]", start_time=self.now, job_end_time=until)

    def beat(self, number: int, phase: str = "step", iteration: int = 0) -> None:
        """Let a node of the attempt give a sign of life; a step takes two seconds."""
        attempt = self.run.attempt(number)
        attempt.heartbeats.mkdir(exist_ok=True)
        step = None if phase == "start" else 2.0
        beat = Heartbeat(node="n0", iteration=iteration, phase=phase, time=self.now, step_p95=step, save_p95=30.0)
        (attempt.heartbeats / "n0.json").write_text(json.dumps(vars(beat)))
        if phase != "start" and not attempt.started.exists():
            StartTimes(process=self.now, imported=self.now, initialised=self.now, loaded=self.now).write(
                attempt.started
            )

    def commit(self, number: int, iteration: int) -> None:
        folder = self.run.checkpoint(iteration)
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"12345")
        self.run.attempt(number).append_commit(
            CheckpointCommit(
                iteration=iteration,
                path=str(folder),
                consumed_samples=1,
                time=self.now,
                seconds=30.0,
                files={"data": 5},
            )
        )

    def end(self, number: int, iteration: int) -> None:
        record = AttemptEnd(
            attempt=number,
            cause="saved",
            reason="time limit near",
            exit_code=0,
            durable_iteration=iteration,
            progress=True,
            end_time=self.now,
            action="continue",
        )
        record.write(self.run.attempt(number).end)

    def look(self, *, after: float = EVERY) -> list[str]:
        """Let time pass, then look; the lines that are printed."""
        self.now += after
        return cron_check.check_folder(self.folder, now=self.now)

    def notices(self) -> list[str]:
        return sorted(notices.known_notices(self.run))


def tell(world: World, *events: str) -> None:
    """Let somebody be told."""
    target = NoticeTarget(name="t", command=["true"], events=list(events or NOTICE_EVENTS))
    policy = NoticePolicy(
        run="mine/run",
        cluster="c",
        since=world.now,
        targets=[vars(target)],
        failed_attempts=2,
        no_progress=6 * HOUR,
        disk_checkpoints=2,
        program=["true"],
    )
    notices.write_notice_policy(world.run, policy)


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeWorld:
    monkeypatch.setattr(quota, "file_system_limit", lambda *_: [])  # of a machine on which other tests write

    def make(*, told: bool = True) -> World:
        world = World(make_run, tmp_path, told=told)
        monkeypatch.setattr(slurm, "jobs_by_name", world.jobs_of)
        monkeypatch.setattr(asking, "query_queue", world.ask)
        monkeypatch.setattr(unsent_notices, "_start", lambda *_: None)
        return world

    return make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()


def train(world: World) -> None:
    """Attempt 1 of job 7 runs, and saved iteration 100 now; job 8 waits behind it."""
    world.queue(("7", "RUNNING", ""), ("8", "PENDING", "Dependency"))
    assert world.look() == []
    world.begin(1, "7")
    world.beat(1)
    world.commit(1, 100)
    assert world.look() == []


# each kind of death


def no_job(world: World) -> None:
    world.queue()


def held(world: World) -> None:
    world.queue(("8", "PENDING", "JobHeldUser"))


def no_account(world: World) -> None:
    world.queue(("8", "PENDING", "InvalidAccount"))


def no_budget(world: World) -> None:
    world.queue(("8", "PENDING", "AssocGrpBillingMinutes"))


def silent(world: World) -> None:
    world.now += world.plan.chain.hang_timeout + symptoms.ENDING_SECONDS


def unbegun(world: World) -> None:
    world.queue(("8", "RUNNING", ""))
    assert world.look() == []
    world.now += 2 * HOUR


def no_saves(world: World) -> None:
    """The ranks live, and are three saves beyond the newest checkpoint."""
    world.beat(1, iteration=400)


DEATHS = {
    "stopped-gone": (no_job, "attempt 1, job 7, is gone without an end"),
    "stopped-held": (held, "job 8 never starts unless a person changes something: JobHeldUser"),
    "stopped-held ": (no_account, "InvalidAccount"),
    "stopped-budget": (no_budget, "job 8 waits until its account has time to spend again: AssocGrpBillingMinutes"),
    "hang-silent": (silent, "no sign of life for"),
    "hang-unbegun": (unbegun, "job 8 has run for 2.1 h without a sign of life"),
    "stalled-saves": (no_saves, "no checkpoint since iteration 100, and training is at 400: one is due every 100"),
}


@pytest.mark.parametrize("told", [True, False], ids=["notices", "a line for cron"])
@pytest.mark.parametrize("kind", DEATHS)
def test_a_planted_death_is_told_once(make_world: MakeWorld, kind: str, told: bool) -> None:
    world = make_world(told=told)
    train(world)
    plant, words = DEATHS[kind]
    plant(world)
    alive = (lambda: world.beat(1, iteration=400)) if kind == "stalled-saves" else lambda: None
    assert world.look() == []  # one look proves nothing
    assert world.notices() == []
    alive()
    said = world.look()
    if told:
        assert said == []
        ((notice, _),) = notices.pending_notices(world.run)
        assert notice.id.startswith(kind.strip())
        assert words in notice.reason
        assert notice.attempt == 1
    else:
        (line,) = said
        assert words in line
        assert line.split(" ", 2)[2].startswith("mine/run: ")
        assert ("\n  -> " in line) == kind.startswith("stopped")
    for _ in range(5):
        alive()
        assert world.look() == []
    assert len(world.notices()) == int(told)


@pytest.mark.parametrize("may", [True, False])
def test_a_job_that_slurm_holds_since_its_launch_failed_is_released(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, may: bool
) -> None:
    """After a failed prolog, which drains the node. A person's hold stays."""
    world, released = make_world(told=False), []

    def release(_self: Slurm, job_id: str) -> None:
        released.append(job_id)
        if not may:
            raise SchedulerError("scontrol: Access/permission denied")

    monkeypatch.setattr(Slurm, "release", release)
    train(world)
    world.queue(("8", "PENDING", "launch failed requeued held"), ("9", "PENDING", "JobHeldUser"))
    assert world.look() == released == []
    said = "\n".join(world.look())
    assert released == ["8"]
    assert ("job 8 since its launch failed on a node; it was released" in said) == may
    assert ("it cannot be released: scontrol: Access/permission denied\n  -> scontrol release 8" in said) != may
    assert "job 9 never starts unless" in said
    assert world.look() == []
    assert released == ["8"]


def test_a_full_quota_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`statvfs` knows no quota: a small file is written. Where it is full, silence of the ranks says nothing."""
    train(world)
    make = tempfile.mkstemp

    def full(*, dir: Path, prefix: str) -> tuple[int, str]:
        if dir == world.run.checkpoints:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return make(dir=dir, prefix=prefix)

    monkeypatch.setattr(tempfile, "mkstemp", full)
    silent(world)
    assert world.look() == []
    assert world.look() == []
    ((notice, _),) = notices.pending_notices(world.run)
    assert notice.id.startswith("disk-unwritable-")
    assert notice.reason == f"nothing can be written to {world.run.checkpoints}: Disk quota exceeded"


def test_a_disk_that_fills_while_the_run_waits_is_told_as_a_job_would(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(world)
    world.end(1, 100)
    world.queue(("8", "PENDING", "Priority"))
    assert world.look() == []
    monkeypatch.setattr("relayrun.control.notify.events.free_space", lambda _: 9)
    for _ in range(3):
        assert world.look() == []
    assert world.notices() == ["disk-0001"]


@pytest.mark.parametrize("complaint", ["/away is away", None])
def test_a_mirror_that_gets_no_copies_is_told_once(world: World, complaint: str | None) -> None:
    train(world)
    world.run.mirror.mkdir()
    MirrorPolicy(folder="/away", id="1", keep_last=1, program=[]).write(world.run.mirror_policy)
    last = MirrorPass(time=world.now, iteration=50, behind=1, complaint=complaint, good_time=world.now)
    last.write(world.run.mirror_pass)
    for _ in range(4):
        world.now += 2 * HOUR
        world.beat(1)
        world.look()
    (notice,) = [entry for entry, _ in notices.pending_notices(world.run) if entry.event == "disk"]
    if complaint:
        assert notice.reason == f"checkpoints are not copied to the mirror: {complaint}"
    else:
        assert notice.reason == "1 checkpoints wait for their copy in the mirror; the newest copy is of 50"


def test_a_quota_that_fills_is_told_while_jobs_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody of the run measures then; others write a tenth of the quota a day."""
    begin = world.now
    monkeypatch.setattr(
        quota,
        "read_quotas",
        lambda *_: [QuotaLimit(source="quota", kind="bytes", used=int((world.now - begin) * 1e6), limit=int(86.4e9))],
    )
    world.queue(("7", "PENDING", "Priority"))
    while not world.notices():
        assert world.look(after=600.0) == []
        assert world.now < begin + 86400 + 3 * 3600.0, "it is full, and nobody was told"
    assert world.now > begin + 86400
    (notice,) = [entry for entry, _ in notices.pending_notices(world.run)]
    assert notice.id.startswith("disk-quota-quota-bytes-")
    assert notice.reason.startswith("quota: 8")


def test_a_folder_that_cannot_be_written_is_found() -> None:
    assert isinstance(write_error(Path("/proc/self")), OSError)


@pytest.mark.parametrize("state", ["COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING"])
def test_a_job_that_neither_runs_nor_ends_is_told_after_an_hour(world: World, state: str) -> None:
    """A node that does not let go of its processes, a person who went away: the next job waits for it."""
    train(world)
    world.queue(("7", state, ""), ("8", "PENDING", "Dependency"))
    for _ in range(6):
        assert world.look(after=HOUR / 6) == []
    assert world.notices() == []
    assert world.look(after=HOUR / 6) == []
    ((notice, _),) = notices.pending_notices(world.run)
    assert notice.id.startswith(f"hang-{state.lower()}-7-")
    assert notice.reason == f"job 7 has been {state} for more than an hour, and nothing goes on with the chain"
    assert notice.go_on == "scontrol show job 7"
    for _ in range(12):
        assert world.look(after=HOUR / 6) == []
    assert len(world.notices()) == 1
    train_on(world)
    world.look()
    world.queue(("7", state, ""), ("8", "PENDING", "Dependency"))
    for _ in range(6):  # it counts from the first look on, again
        assert world.look(after=HOUR / 6) == []
    assert len(world.notices()) == 1


def member_of(world: World, make: MakeRun, *, ended: str | None) -> Path:
    """Let the run be the second stage of a campaign, behind one that has ended so; return the campaign's folder."""
    folder = world.folder / "mine/c"
    (folder / "members/a").mkdir(parents=True)
    before, _ = make(folder="runs/mine/c-a", scheduler="slurm", owner=os.geteuid())
    if ended is not None:
        write_stop(before, ChainEnd("stopped", ended))
    members = [
        CampaignMember(name="a", run_dir=str(before.path)),
        CampaignMember(name="b", run_dir=str(world.run.path), source="a"),
    ]
    for member in members:
        CampaignMembership(folder=str(folder), member=member.name).write(campaign.membership_path(member.run))
    MemberStarted(job_id="6", time=world.now).write(campaign.member_started_path(folder, "a"))
    Campaign(kind="stages", name="mine/c", owner=os.geteuid(), scheduler="slurm", at_once=None, members=members).save(
        folder
    )
    return folder


@pytest.mark.parametrize("told", [True, False], ids=["notices", "a line for cron"])
@pytest.mark.parametrize("trouble", ["ended", "unreadable", "gone"])
def test_a_stage_that_never_begins_is_told_once(
    make_world: MakeWorld,
    make_run: MakeRun,  # noqa: F811
    told: bool,
    trouble: str,
) -> None:
    world = make_world(told=told)
    folder = member_of(world, make_run, ended="stopped by ada")
    words = "it does not begin: waits for a, which ended: stopped by ada"
    if trouble == "unreadable":
        (folder / "campaign.json").write_text("{")
        words = f"nothing more of its campaign begins: {folder}/campaign.json: unreadable record: "
    elif trouble == "gone":
        shutil.rmtree(folder)
        words = "nothing more of its campaign begins: there is no campaign.json"
    assert world.look() == []
    assert world.notices() == []
    said = world.look()
    if told:
        assert said == []
        ((notice, _),) = notices.pending_notices(world.run)
        assert notice.id.startswith("stopped-stuck-")
        assert words in notice.reason
        assert notice.go_on == f"relayrun status {world.run.path}"
    else:
        (line,) = said
        assert f"mine/run: {words}" in line
        assert line.endswith(f"\n  -> relayrun status {world.run.path}")
    for _ in range(5):
        assert world.look() == []
    assert len(world.notices()) == int(told)


def test_a_stage_that_waits_as_planned_is_not_told(world: World, make_run: MakeRun) -> None:  # noqa: F811
    folder = member_of(world, make_run, ended=None)
    campaign.write_campaign_stop(folder, "stopped by ada")
    for _ in range(4):
        world.look()
    assert world.notices() == []
    campaign.campaign_stop_path(folder).unlink()
    for _ in range(4):
        world.look()
    assert world.notices() == []


# nothing that passes by is told


def quiet_hours(world: World, hours: float, *, every: float) -> None:
    """A chain as it lives, with all that only looks like a death: each of its jobs runs for four hours."""
    end = world.now + hours * HOUR
    job, attempt, iteration = 7, 0, 0

    def step(state: str, seconds: float, *, reason: str = "", beat: str = "", save: bool = False) -> None:
        nonlocal iteration
        until = world.now + seconds
        while world.now < until:
            behind = [(str(job + 1), "PENDING", "Dependency")] if state != "PENDING" else []
            world.queue((str(job), state, reason), *behind)
            if beat:
                world.beat(attempt, beat, iteration)
                iteration += int(every / 2) if beat == "step" else 0
            if save and iteration // 100 * 100 > newest():
                world.commit(attempt, iteration // 100 * 100)
            assert world.look(after=every) == []

    def newest() -> int:
        return max((commit.iteration for commit in Lineage(world.run).line()), default=0)

    while world.now < end:
        step("PENDING", 3 * HOUR, reason="Priority")
        step("PENDING", 600, reason="Resources")
        step("RUNNING", 300)  # a prolog, a container
        attempt += 1
        world.begin(attempt, str(job), base=newest())
        step("RUNNING", 700, beat="start")
        step("RUNNING", 1.5 * HOUR, beat="step", save=True)
        step("RUNNING", 900, beat="evaluation")
        world.error = SchedulerError("squeue: Unable to contact slurm controller")
        step("RUNNING", 1800, beat="step", save=True)
        world.error = None
        world.queue()  # an answer that is not whole
        assert world.look(after=every) == []
        step("RUNNING", HOUR / 2, beat="step", save=True)
        step("SUSPENDED", HOUR)
        world.beat(attempt, "step", iteration)
        world.now += 2 * HOUR  # nobody looks: the login node is away, and meanwhile the ranks go on
        world.beat(attempt, "step", iteration)
        iteration = iteration // 100 * 100 + 100
        world.commit(attempt, iteration)
        step("RUNNING", HOUR / 2, beat="step", save=True)
        # its node is lost: the same job waits again, runs again, and takes its time to begin
        step("PENDING", 7 * HOUR, reason="BeginTime")
        step("RUNNING", 900)
        world.end(attempt, iteration)
        attempt += 1
        world.begin(attempt, str(job), base=newest())
        step("RUNNING", 600, beat="start")
        step("RUNNING", HOUR / 2, beat="step", save=True)
        world.end(attempt, iteration)
        step("COMPLETING", 240)
        job += 1


@pytest.mark.parametrize(
    "every", [pytest.param(300.0, marks=pytest.mark.slow), pytest.param(120.0, marks=pytest.mark.long)]
)
def test_twenty_four_quiet_hours_without_a_false_alarm(world: World, every: float) -> None:
    quiet_hours(world, 24, every=every)
    assert world.now - world.start >= 24 * HOUR
    assert world.notices() == []
    no_job(world)  # and behind them a death is seen
    assert world.look() == []
    assert world.look() == []
    (notice,) = world.notices()
    assert notice.startswith(f"stopped-gone-{world.run.attempt_numbers()[-1]:04}-")


def test_a_submit_that_is_under_way_is_no_death(world: World) -> None:
    with open(world.run.path / ".submit.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [world.look() for _ in range(3)] == [[], [], []]
    assert world.notices() == []


def test_a_run_that_has_ended_or_is_anothers_is_left_alone(make_world: MakeWorld) -> None:
    world = make_world(told=False)
    write_stop(world.run, ChainEnd("stopped", "stopped by ada"))
    assert [world.look() for _ in range(3)] == [[], [], []]
    world.run.stop.unlink()
    plan = json.loads(world.run.plan.read_text())
    world.run.plan.write_text(json.dumps(plan | {"owner": os.geteuid() + 1}))
    assert [world.look() for _ in range(3)] == [[], [], []]
    world.run.plan.write_text(json.dumps(plan))
    assert len([world.look() for _ in range(3)][-2]) == 1  # as it is without either


@pytest.mark.parametrize("whose", ["", "plan.json", "notices/policy.json"])
def test_nothing_of_another_users_run_starts_whatever_its_plan_says(
    make_world: MakeWorld, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    ran = world.run.path / "ran"
    command = ["/bin/sh", "-c", f"touch {ran}"]
    replace(world.plan, owner=None, quota_command=command).write(world.run.plan)
    started: list[object] = []
    monkeypatch.setattr(unsent_notices, "_start", lambda *given: started.append(given))
    world.queue(("7", "PENDING", "Priority"))
    with monkeypatch.context() as patch:
        give_away(patch, world.run.path / whose)
        world.look()
        assert not ran.exists()
        world.queue()
        lines = [line for _ in range(3) for line in world.look()]
        assert started == []
        assert bool(lines) == (whose == "notices/policy.json")  # cron tells of a run of this user's own
    world.queue(("7", "PENDING", "Priority"))
    world.look()
    assert ran.exists()
    write_stop(world.run, ChainEnd("failed", "fatal: it broke"))
    world.look()
    assert started


@pytest.mark.parametrize("owner", [os.geteuid(), os.geteuid() + 1, None, 0])
def test_a_copy_of_a_run_starts_nothing_whomever_its_plan_names(make_world: MakeWorld, owner: int | None) -> None:
    """`cp -r` gives its files to who copies it: another user may have written them for that."""
    world = make_world()
    command = ["/bin/sh", "-c", f"touch {world.folder}/ran"]
    replace(world.plan, owner=owner, quota_command=command, setup=command).write(world.run.plan)
    copy = world.run.path.with_name("copy")
    shutil.copytree(world.run.path, copy)
    shutil.rmtree(world.run.path)
    world.queue(("7", "PENDING", "Priority"))
    assert [world.look() for _ in range(3)] == [[], [], []]
    assert not (world.folder / "ran").exists()
    with pytest.raises(UntrustedError, match="this is a copy of a run directory"):
        Plan.load_trusted(Run(copy))


def test_a_stop_that_nobody_could_tell_is_told(world: World) -> None:
    """The batch script wrote it, where there was no Python."""
    world.run.stop.write_text("begin failed in job 7 on n3\n")
    assert world.look() == []
    assert [name.partition("-")[0] for name in world.notices()] == ["stopped"]


def test_who_does_not_want_to_hear_of_hangs_does_not(world: World) -> None:
    tell(world, "disk")
    train(world)
    silent(world)
    assert [world.look() for _ in range(3)] == [[], [], []]
    assert world.notices() == []


# at most once an hour


def test_a_symptom_that_comes_and_goes_is_said_once_an_hour(make_world: MakeWorld) -> None:
    world = make_world(told=False)
    train(world)
    said = []
    for number in range(60):  # two hours
        held(world) if number % 4 < 2 else train_on(world)
        said += world.look()
    assert len(said) == 2


def train_on(world: World) -> None:
    world.queue(("7", "RUNNING", ""), ("8", "PENDING", "Dependency"))
    world.beat(1)
    if world.now - world.run.attempt(1).read_commits()[-1].time > 200:
        world.commit(1, world.run.attempt(1).read_commits()[-1].iteration + 100)


def test_a_notice_that_cannot_be_written_is_a_line_and_comes_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(world)
    no_job(world)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(notices.Notice, "write", full)
        assert world.look() == []
        gone, why = world.look()
        assert "is gone without an end" in gone
        assert "its notices cannot be written: OSError: [Errno 28] No space left on device" in why
        assert world.look() == []


def test_where_nothing_can_be_kept_it_is_said_at_once_and_hourly(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(told=False)
    train(world)
    no_job(world)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(tempfile, "mkstemp", full)
    monkeypatch.setattr(records.CronCheckRecord, "write", full)
    said = [world.look(after=HOUR / 6) for _ in range(12)]
    assert [len(lines) for lines in said] == [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert "is gone without an end" in said[0][0]
    assert "cannot be written: Disk quota exceeded" in said[0][1]


def test_slurm_that_does_not_answer_is_said_after_an_hour(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(told=False)
    train(world)
    no_job(world)
    assert world.look() == []
    world.error = SchedulerError("squeue: Unable to contact slurm controller")
    monkeypatch.setattr(cron_check.shutil, "which", lambda _: "/usr/bin/squeue")
    said = [world.look(after=600) for _ in range(8)]
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert "nothing is known of the jobs: the scheduler did not answer: squeue: Unable to contact" in said[6][0]
    world.error = None
    assert "is gone without an end" in world.look()[0]  # what was seen before is not forgotten


def test_without_squeue_it_is_said_at_once(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(told=False)
    world.error = SchedulerError("squeue is not installed here")
    monkeypatch.setattr(cron_check.shutil, "which", lambda _: None)
    (line,) = world.look()
    assert "squeue is not installed here" in line


def test_chains_that_died_long_ago_are_counted_when_it_is_set_up(world: World) -> None:
    os.utime(world.run.plan, (1e9, 1e9))
    (line,) = world.look()
    assert "1 chains died more than a day ago" in line
    assert [world.look() for _ in range(3)] == [[], [], []]
    assert world.notices() == []


def test_a_look_that_knew_no_jobs_is_not_the_first_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentinel is set up while the controller is away: what died long ago is counted when it is back."""
    monkeypatch.setattr(cron_check.shutil, "which", lambda _: "/usr/bin/squeue")
    os.utime(world.run.plan, (1e9, 1e9))
    world.error = SchedulerError("squeue: Unable to contact slurm controller")
    assert [world.look() for _ in range(3)] == [[], [], []]
    world.error = None
    (line,) = world.look()
    assert "1 chains died more than a day ago" in line
    assert [world.look() for _ in range(3)] == [[], [], []]
    assert world.notices() == []


def test_slurm_is_not_asked_again_and_again_about_a_dead_chain(world: World) -> None:
    train(world)
    no_job(world)
    for _ in range(10):
        world.look()
    assert world.asked == 2
    os.utime(world.run.plan, (world.now, world.now))  # it is submitted again, and dies again
    world.look()
    assert world.asked == 3


# its own life


def state(world: World) -> RunStatus:
    return run_status.read_run_status(world.run, QueueStatus(), now=world.now)


def test_status_shows_when_it_last_looked_and_that_it_is_dead(world: World) -> None:
    assert state(world).sentinel is None
    train(world)
    look = state(world).sentinel
    assert look is not None
    assert (look.folder, look.time, look.period, look.late) == (str(world.folder), world.now, EVERY, False)
    world.now += 40
    (line,) = tables.cron_check_lines([state(world)], now=world.now)
    assert line.startswith(f"sentinel: looked 40 s ago ({world.folder}, by ")
    world.now += 5 * HOUR
    (line,) = tables.cron_check_lines([state(world)], now=world.now)
    assert line.startswith("sentinel: dead or late: looked 5.0 h ago")
    assert "every 120 s before" in line or "every 2 min before" in line
    records.cron_check_path(world.folder, ME).write_text("{")
    (line,) = tables.cron_check_lines([state(world)], now=world.now)
    assert "nobody knows when it last looked" in line


def test_a_run_is_looked_after_through_links_too(world: World, tmp_path: Path) -> None:
    train(world)
    (tmp_path / "elsewhere").symlink_to(world.run.path)
    found = records.last_cron_check(find_runs.find_run(str(tmp_path / "elsewhere")), None, now=world.now)
    assert found is not None
    assert found.folder == os.path.realpath(world.folder)


def test_two_do_not_look_at_once_and_one_that_hangs_is_said(world: World) -> None:
    train(world)
    no_job(world)
    before = records.read_cron_check(world.folder, ME)
    with open(records.cron_check_lock_path(world.folder, ME), "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert world.look() == []
        assert records.read_cron_check(world.folder, ME) == before
        (line,) = world.look(after=HOUR)
        assert "a look that began long ago has not ended" in line
        assert world.look() == []
    assert world.look() == []  # it sees the death for the first time
    world.look()
    assert len(world.notices()) == 1


def test_a_damaged_memory_is_said_and_the_look_goes_on(world: World) -> None:
    train(world)
    records.cron_check_path(world.folder, ME).write_text('{"time": ')
    (line,) = world.look()
    assert "what the last look saw is lost" in line
    no_job(world)
    assert [world.look(), world.look()] == [[], []]
    assert len(world.notices()) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("plan.json", "unreadable record"),
        ("attempts/0001/begin.json", "Is a directory"),
        ("notices/policy.json", "unreadable record"),
    ],
)
def test_a_run_that_cannot_be_read_does_not_hide_the_others(world: World, damage: str, words: str) -> None:
    train(world)
    no_job(world)
    other = world.folder / "mine/a torn one"
    shutil.copytree(world.run.path, other)
    world.plan.write(other / "plan.json")
    (other / damage).unlink()
    if "begin" in damage:
        (other / damage).mkdir()
    else:
        (other / damage).write_text('{"format": ')
    assert world.look() == []
    said = world.look()
    assert "mine/a torn one: " in said[0]
    assert words in said[-1]
    assert len(world.notices()) == 1


def test_what_another_user_left_in_the_folder_is_not_touched(world: World) -> None:
    others = records.cron_check_path(world.folder, "grace")
    others.write_text("{")
    records.cron_check_lock_path(world.folder, "grace").touch()
    train(world)
    assert others.read_text() == "{"
    found = records.last_cron_check(world.run, None, now=world.now)
    assert found is not None
    assert (found.user, found.late) == (ME, False)


# the command


def test_the_command_needs_the_standard_library_alone(make_world: MakeWorld) -> None:
    """A login node may have no more than a Python: -S leaves site-packages out."""
    world = make_world(told=False)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "relayrun.cli", "sentinel", world.folder],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(cron_check.__file__).parents[2]), "PATH": "/nowhere"},
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "squeue is not installed here" in done.stdout
    memory = records.read_cron_check(world.folder, ME)
    assert memory is not None
    assert memory.period is None


def test_a_folder_that_is_not_there_keeps_no_other_from_being_looked_at(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.queue(("7", "PENDING", "Priority"))
    assert main(["sentinel", str(tmp_path / "nowhere"), str(world.folder)]) == 1
    said = capsys.readouterr()
    assert f"error: {tmp_path}/nowhere: there is no such folder" in said.err
    assert said.out == ""
    assert records.read_cron_check(world.folder, ME) is not None


def test_a_look_that_hangs_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relayrun.cli.watch import cron_check as command

    monkeypatch.setattr(command, "TIME_LIMIT_SECONDS", 1)
    monkeypatch.setattr(world, "jobs_of", lambda *_, **__: time.sleep(100))
    monkeypatch.setattr(slurm, "jobs_by_name", world.jobs_of)
    assert main(["sentinel", str(world.folder)]) == 1
    assert "no end of this look in 1 s" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["hangs", "a defect", "refused"])
def test_a_look_that_fails_says_so_once_an_hour(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Cron would mail it every two minutes; another folder is looked at all the same, and the exit code says it."""
    from relayrun.cli.watch import cron_check as command

    other = world.folder.parent / "others"
    other.mkdir()

    def fail(folder: Path, **_: object) -> list[str]:
        if folder == other:
            return ["the other one"]
        if kind == "a defect":
            raise KeyError("a defect")
        raise command._CheckTimeoutError if kind == "hangs" else InputError("refused", where=folder)

    monkeypatch.setattr(cron_check, "check_folder", fail)
    said = []
    for number in range(12):
        monkeypatch.setattr(command.time, "time", lambda number=number: world.start + number * HOUR / 6)
        assert main(["sentinel", str(world.folder), str(other)]) == 1
        found = capsys.readouterr()
        assert found.out == "the other one\n"
        said.append(found.err)
    words = {"hangs": "no end of this look in 240 s", "a defect": "KeyError: 'a defect'", "refused": "refused"}[kind]
    assert [words in text for text in said] == [number % 6 == 0 for number in range(12)]
    assert [bool(text) for text in said] == [number % 6 == 0 for number in range(12)]


def test_which_runs_a_folder_has(make_run: MakeRun, tmp_path: Path) -> None:  # noqa: F811
    for name in ("runs/a/one", "runs/a/one/checkpoints/inner", "runs/.hidden/x", "runs/1/2/3/4", "runs/1/2/3/4b/5"):
        make_run(folder=name)
    make_run(folder="scratch/two")
    (tmp_path / "runs/a/two").symlink_to(tmp_path / "scratch/two")
    (tmp_path / "runs/a/again").symlink_to(tmp_path / "scratch/two")
    (tmp_path / "runs/a/circle").symlink_to(tmp_path / "runs")
    found = [
        str(run.path.relative_to(tmp_path / "runs")) for run in find_runs.find_runs_below(tmp_path / "runs", depth=4)
    ]
    assert found == ["a/again", "a/one", "1/2/3/4"]


@pytest.mark.parametrize(
    ("reason", "for_ever", "budget"),
    [
        ("JobHeldAdmin", True, False),
        ("launch failed requeued held", True, False),
        ("job_requeued_in_held_state", True, False),
        ("JobHoldMaxRequeue", True, False),
        ("AccountNotAllowed", True, False),
        ("QOSMaxCpuPerJobLimit", True, False),  # what one job may have: no other job's end lets it start
        ("QOSMaxCpuMinutesPerJobLimit", True, False),
        ("QOSMaxMemoryPerJob", True, False),
        ("QOSMaxWallDurationPerJobLimit", True, False),
        ("QOSMaxGRESPerNode", True, False),
        ("AssocMaxNodePerJobLimit", True, False),
        ("AssocMaxWallDurationPerJobLimit", True, False),
        ("AssocMaxCpuMinutesPerJobLimit", True, False),
        ("MaxMemPerLimit", True, False),
        ("QOSMaxNodePerUserLimit", False, False),  # jobs that run now end some day
        ("QOSMaxJobsPerUserLimit", False, False),
        ("AssocMaxJobsLimit", False, False),
        ("AssocGrpCPUMinutesLimit", False, True),
        ("QOSGrpBillingMinutes", False, True),
        ("AssocGrpCPURunMinutesLimit", False, False),  # jobs that run now end some day
        ("AssocGrpNodeLimit", False, False),
        ("ReqNodeNotAvail, Reserved for maintenance", False, False),
        ("Priority", False, False),
    ],
)
def test_reasons_that_never_end(reason: str, for_ever: bool, budget: bool) -> None:
    assert (slurm_states.never_starts(reason), slurm_states.reason_of(reason).kind == "budget") == (for_ever, budget)
