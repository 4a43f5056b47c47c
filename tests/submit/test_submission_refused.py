"""What a submit leaves behind that the scheduler refuses: nothing. And one owner of a run at a time."""

from __future__ import annotations

import codecs
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.chain import supervisor
from relayrun.control.rundir import mirror
from relayrun.control.rundir.checkpoint_records import BEGINNING, ResumePoint
from relayrun.control.rundir.mirror import CheckpointCopy, MirrorOwner, MirrorPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd, Heartbeat
from relayrun.control.rundir.run import Run, stop_reason, write_stop
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE
from relayrun.errors import ConfigError, RunDirError, SchedulerError
from relayrun.files import append_line, read_json_lines
from relayrun.submit import policies, submission
from relayrun.submit.check import existing_run
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.train.mirror import sync
from relayrun.trust import UntrustedError
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.history import began
from tests.mirrored import Mirrored, flip
from tests.slurm.test_triggers_uids import MEMBER, OWNER, TEAM, acting_as
from tests.workspace import Workspace


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != ".submit.lock"
    }


def refused(*_: object, **__: object) -> str:
    raise SchedulerError("sbatch: invalid partition specified: nope")


def config(workspace: Workspace, **sections: object) -> RunConfig:
    return resolve.load_run_config(workspace.config("deep/run", **sections))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "deep").mkdir()
    made = Workspace.make(tmp_path)
    resolve.load_run_config(made.config("deep/run"))
    return made


def test_what_another_submit_made_meanwhile_stays(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workspace.folder / "made" / "by" / "both"
    mkdir = Path.mkdir

    def other_is_first(path: Path, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if path == folder:
            (path / "notes").write_text("theirs")
            raise FileExistsError(path)

    monkeypatch.setattr(Path, "mkdir", other_is_first)
    monkeypatch.setattr(LocalScheduler, "submit_first", refused)
    with pytest.raises(SchedulerError, match="invalid partition"):
        submission.submit_run(config(workspace, run_dir=str(folder)))
    assert (folder / "notes").read_text() == "theirs"


def test_a_second_submit_at_the_same_time_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, found = config(workspace), []

    def while_the_first_submits(*_: object, **__: object) -> str:
        with pytest.raises(RunDirError, match="another submit of this run is under way") as caught:
            submission.submit_run(wanted)
        found.append(caught.value.where)
        return refused()

    monkeypatch.setattr(LocalScheduler, "submit_first", while_the_first_submits)
    with pytest.raises(SchedulerError, match="invalid partition"):
        submission.submit_run(wanted)
    assert found == [str(workspace.run("deep/run").path)]


def test_a_first_submit_that_is_refused_leaves_no_run(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(workspace, run_dir=str(workspace.folder / "made" / "by" / "it"))
    monkeypatch.setattr(LocalScheduler, "submit_first", refused)
    with pytest.raises(SchedulerError, match="invalid partition"):
        submission.submit_run(wanted)
    assert not (workspace.folder / "made").exists()


@pytest.mark.slow
def test_a_later_submit_that_is_refused_leaves_the_run_as_it_was(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submission.submit_run(config(workspace)).job_id
    run = workspace.run("deep/run")
    LocalScheduler(run).cancel(job)
    write_stop(run, ChainEnd("stopped", "enough"))
    before = tree(run.path)
    monkeypatch.setattr(LocalScheduler, "submit_first", refused)
    evaluated = config(workspace, training={"steps": 77}, debug={"backup_codebase": True})
    with pytest.raises(SchedulerError, match="invalid partition"):
        submission.submit_run(evaluated, resume=True)
    assert tree(run.path) == before
    monkeypatch.undo()
    submission.submit_run(evaluated, resume=True)
    assert run.revisions() == [1, 2]


@pytest.fixture
def shared() -> Iterator[Workspace]:
    """A workspace of OWNER in which the group may write."""
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("CI has no root: two users need it")
        pytest.skip("two users need root")
    top, mask = Path(tempfile.mkdtemp()), os.umask(0o002)
    try:
        top.chmod(0o711)
        work = top / "work"
        work.mkdir()
        os.chown(work, OWNER.uid, TEAM)
        work.chmod(0o2775)
        for name in ("ascii", "latin-1"):  # loaded now: another user may not be able to read this Python's files
            codecs.lookup(name)
        yield Workspace.make(work)
    finally:
        os.umask(mask)
        shutil.rmtree(top)


@pytest.mark.slow
def test_a_take_over_makes_a_run_directory_of_ones_own(shared: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "log_folder", lambda _: shared.folder / "logs")
    wanted = resolve.load_run_config(shared.config("run", cluster={"python": None}))
    with acting_as(OWNER):
        job = submission.submit_run(wanted).job_id
    run = shared.run("run")
    before = tree(run.path)
    with acting_as(MEMBER):
        with pytest.raises(RunDirError, match=f"this run is {OWNER.uid}'s, who submitted it last"):
            submission.submit_run(wanted)
        with pytest.raises(RunDirError, match="this run has jobs already"):
            submission.submit_run(wanted, take_over=True)
    LocalScheduler(run).cancel(job)
    # a job of the owner runs where this user cannot see it
    began(run, 1, base=0)
    run.attempt(1).heartbeats.mkdir()
    beat = Heartbeat(node="n", iteration=1, phase="step", time=2e9, step_p95=None, save_p95=None)
    beat.write(run.attempt(1).heartbeats / "n.json")
    monkeypatch.setattr(submission.time, "time", lambda: 2e9 + 5)
    with (
        acting_as(MEMBER),
        pytest.raises(RunDirError, match="attempt 1, in a job of 61001, gave a sign of life 5 s ago"),
    ):
        submission.submit_run(wanted, take_over=True)
    monkeypatch.setattr(submission.time, "time", lambda: 2e9 + 10_000)
    with acting_as(MEMBER), pytest.raises(RunDirError, match="this run has no checkpoint to go on from"):
        submission.submit_run(wanted, take_over=True)
    base = ResumePoint(iteration=2, path=str(run.checkpoint(2)))
    monkeypatch.setattr(existing_run, "resume_point", lambda found: base if found.path == run.path else BEGINNING)
    monkeypatch.setattr(submission.initial_checkpoint, "find_initial_checkpoint", lambda *_, **__: base)
    with acting_as(MEMBER):
        mine = submission.submit_run(wanted, take_over=True)
        assert submission.check_submission(wanted, intent=SubmitIntent(take_over=True)).run == mine.run
    assert mine.run.path == run.path.with_name(f"run-{MEMBER.uid}")
    assert (mine.plan.owner, mine.plan.load_path, mine.plan.load_iteration) == (MEMBER.uid, base.path, 2)
    config = resolve.require_native(resolve.read_resolved_config(mine.run.config_revision(1)))
    assert config.checkpoint.load == f"{run.path}:2"
    (line,) = read_json_lines(mine.run.owners)
    assert (line["owner"], line["former"], line["run"]) == (MEMBER.uid, OWNER.uid, str(run.path))
    assert tree(run.path).keys() - before.keys() == {
        "attempts",
        *(n for n in tree(run.path) if n.startswith("attempts/")),
    }


@pytest.mark.slow
def test_what_a_group_may_write_is_refused_before_a_job_starts(
    shared: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask of the submit lets the group write, and nothing that jobs execute follows it."""
    monkeypatch.setattr(submission, "log_folder", lambda _: shared.folder / "logs")
    wanted = resolve.load_run_config(shared.config("run", cluster={"python": None}, debug={"backup_codebase": True}))
    with acting_as(OWNER):
        job = submission.submit_run(wanted).job_id
        run = shared.run("run")
        assert [path for path in [run.path, *run.path.rglob("*")] if _others_write(path)] == [run.triggers]
        code = next(path for path in run.code.rglob("run_module.py"))
        monkeypatch.setenv(JOB_ID_VARIABLE, job)
        for path in (run.path, run.plan, run.job_script, run.config_revision(1), code, run.path / "local"):
            mode = path.stat().st_mode
            path.chmod(mode | 0o020)
            with pytest.raises(UntrustedError, match="its group may write this"):
                supervisor.begin_attempt(Run(run.path))
            assert (stop_reason(run) or "").startswith("this job could not begin: its group may write this")
            run.stop.unlink()
            path.chmod(mode)
        assert supervisor.begin_attempt(Run(run.path)) == 0
        for found in LocalScheduler(run).jobs(Plan.load(run)):
            LocalScheduler(run).cancel(found.id)
        (untouched := next(path for path in run.code.rglob("errors.py"))).chmod(0o664)
        with pytest.raises(UntrustedError, match=f"chmod -R go-w {run.path}"):
            submission.submit_run(wanted, resume=True)
        assert _others_write(untouched)


def _others_write(path: Path) -> bool:
    return not path.is_symlink() and path.name != ".submit.lock" and bool(path.stat().st_mode & 0o022)


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_files_are_no_wider_than_the_umask(workspace: Workspace, mask: int) -> None:
    before = os.umask(mask)
    try:
        submission.submit_run(config(workspace))
    finally:
        os.umask(before)
    run = workspace.run("deep/run")
    for path in [run.plan, run.job_script, run.manifest, run.config_revision(1), run.owners]:
        assert path.stat().st_mode & mask == 0, path


@pytest.fixture
def mirrored(workspace: Workspace) -> tuple[RunConfig, Path]:
    """A run with a second place, and that place, which has the copies of the same run directory before it was lost."""
    second = workspace.folder / "second"
    second.mkdir()
    wanted = config(workspace, checkpoint={"interval": 10, "mirror": {"path": str(second)}})
    LocalScheduler(workspace.run("deep/run")).cancel(submission.submit_run(wanted).job_id)
    run = workspace.run("deep/run")
    place = second / wanted.project / wanted.name
    policy = MirrorPolicy.read(run.mirror_policy)
    assert policy is not None
    (place / ".staging").mkdir(parents=True)
    MirrorOwner(id=policy.id, run=str(run.path)).write(place / "mirror.json")
    shutil.rmtree(run.path)
    return wanted, place


def mirror_findings(wanted: RunConfig, **intent: bool) -> list[tuple[str, str | None]]:
    every = submission.check_submission(wanted, intent=SubmitIntent(**intent)).findings.all
    return [(each.line, each.remedy) for each in every if each.name == "run.mirror" and each.level == "error"]


@pytest.mark.slow
def test_the_copies_of_a_lost_run_directory_are_refused_until_they_are_taken_over(
    workspace: Workspace, mirrored: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run goes on, right after a loss, and nothing of it is copied."""
    wanted, place = mirrored
    run = workspace.run("deep/run")
    ((said, remedy),) = mirror_findings(wanted)
    assert f"checkpoint.mirror.path: {place}: it holds the copies of a run that is not there any more" in said
    assert "submit with --take-over" in (remedy or "")
    with pytest.raises(ConfigError, match="nothing would be copied"):
        submission.submit_run(wanted)
    assert not run.path.exists()
    assert mirror_findings(wanted, take_over=True) == []
    with monkeypatch.context() as patch:
        patch.setattr(LocalScheduler, "submit_first", refused)
        with pytest.raises(SchedulerError, match="invalid partition"):
            submission.submit_run(wanted, take_over=True)
    assert not run.path.exists()
    submission.submit_run(wanted, take_over=True)
    policy = MirrorPolicy.read(run.mirror_policy)
    assert policy is not None
    sync.check_owner(run, policy)  # as a pass does before it copies
    assert mirror_findings(wanted, resume=True) == []


def test_a_run_that_begins_anew_does_not_take_copies_over_that_it_would_remove(
    workspace: Workspace, mirrored: tuple[RunConfig, Path]
) -> None:
    """Its own checkpoints of the same iterations take their places, and they are all that is left of the lost run."""
    wanted, place = mirrored
    (place / "iter_0000010").mkdir()
    append_line(place / "copies.jsonl", asdict(CheckpointCopy(name="iter_0000010", iteration=10, time=1.0)))
    assert list(mirror.read_copies(place)) == ["iter_0000010"]
    with pytest.raises(ConfigError, match="would begin anew") as error:
        submission.submit_run(wanted, take_over=True)
    assert f"relayrun checkpoint restore {place} --to FOLDER" in (error.value.hint or "")
    assert not workspace.run("deep/run").path.exists()
    ((said, _),) = mirror_findings(wanted, take_over=True)
    assert "would begin anew" in said
    loads = config(workspace, checkpoint={**wanted.checkpoint.model_dump(exclude_unset=True), "load": str(place)})
    policies.refuse_mirror_of_other_run(loads, workspace.run("deep/run"), take_over=True)


@pytest.mark.slow
def test_the_copies_of_a_run_that_is_there_are_never_taken_over(
    workspace: Workspace, mirrored: tuple[RunConfig, Path]
) -> None:
    wanted, place = mirrored
    other = workspace.run("other")
    other.mirror.mkdir(parents=True)
    MirrorPolicy(folder=str(place), id="0123", keep_last=2, program=["true"]).write(other.mirror_policy)
    MirrorOwner(id="0123", run=str(other.path)).write(place / "mirror.json")
    with pytest.raises(ConfigError, match=f"holds the copies of another run, {other.path}") as error:
        submission.submit_run(wanted, take_over=True)
    assert error.value.hint == "set checkpoint.mirror.path to another place"
    assert not workspace.run("deep/run").path.exists()


def test_a_take_over_reads_the_checkpoint_back(make_run: MakeRun, tmp_path: Path) -> None:  # noqa: F811
    mirrored = Mirrored(make_run, tmp_path)
    commit = mirrored.save(10)
    assert existing_run._verified_base(mirrored.run) == ResumePoint.of(commit)
    flip(Path(commit.path) / "part/data")
    with pytest.raises(RunDirError, match="this checkpoint is damaged: part/data"):
        existing_run._verified_base(mirrored.run)


def test_jobs_that_never_start_are_refused_with_the_command_that_mends_them(workspace: Workspace) -> None:
    run = Run(workspace.folder / "run")
    queued = [Job(id="8", name="j", state="PENDING")]
    history = SimpleNamespace(pending_reasons=lambda _plan: {"8": "launch failed requeued held"})
    scheduler: Any = SimpleNamespace(jobs=lambda _plan, anyone: queued, history=history)
    plan: Any = None
    with pytest.raises(RunDirError) as error:
        existing_run.refuse_while_live(run, plan, scheduler)
    assert error.value.hint == "they never start: scontrol release 8"
    history.pending_reasons = lambda _plan: {"8": "Priority"}
    with pytest.raises(RunDirError) as error:
        existing_run.refuse_while_live(run, plan, scheduler)
    assert (error.value.hint or "").startswith("let them run")
