"""`relayrun sentinel`: planted deaths of each kind are told, quiet hours are not, and its own death shows."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from relayrun.control.chain import quota
from relayrun.control.notify import notices
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership, MemberStarted
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.mirror import MirrorPass, MirrorPolicy
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import write_stop
from relayrun.control.rundir.storage_limits import QuotaLimit
from relayrun.control.scheduler import slurm_states
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import SchedulerError
from relayrun.files import write_error
from relayrun.watch import cron_check, symptoms
from relayrun.watch.status import cron_check_record as records
from tests.chain.conftest import MakeRun
from tests.watch.sentinel_world import HOUR, MakeWorld, World, no_job, tell, train


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
    make_run: MakeRun,
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


def test_a_stage_that_waits_as_planned_is_not_told(world: World, make_run: MakeRun) -> None:
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
