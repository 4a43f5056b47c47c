"""A quota with room for few more checkpoints is told; one with enough room is not."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.chain import quota as measuring
from relayrun.control.chain.quota import QuotaMonitor, make_limits, measure_quotas, parse_quota_output, read_quotas
from relayrun.control.notify import notices
from relayrun.control.notify.events import write_due_notices
from relayrun.control.notify.notices import NoticePolicy, NoticeTarget
from relayrun.control.rundir import storage_limits
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import QuotaUsage
from relayrun.control.scheduler.base import Job
from relayrun.errors import RelayrunError, RunDirError
from relayrun.watch import symptoms
from relayrun.watch.status import run_status, run_status_text
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.text import format_time
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.history import began

DAY = 86400.0
NOW = 1_700_000_000.0
FILE_SYSTEM = "file system"
ONE = 1_024_000
"""Bytes of a checkpoint."""


class Site:
    """A run that saves, on a file system with planted programs that say how full it is."""

    def __init__(self, make: MakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch, *, program: str = "lfs") -> None:
        self.run, plan = make(folder="run", checkpoints_kept=2)
        self.plan = replace(plan, checkpoints_kept=2)
        self.programs = folder / "programs"
        self.programs.mkdir()
        monkeypatch.setenv("PATH", f"{self.programs}:{os.environ['PATH']}")
        self.program = program
        self.now = NOW
        self.others = 0
        """Bytes that others use."""
        self.limit = 100 * ONE
        self.files, self.most_files = 10, 0
        began(self.run, 1, start_time=NOW)
        self.saved = 0

    def save(self) -> None:
        """Publish a checkpoint; those beyond the newest two go."""
        self.saved += 1
        folder = self.run.checkpoint(self.saved)
        folder.mkdir(parents=True)
        values = {"consumed_samples": 1, "time": self.now, "seconds": 1.0, "files": {"data": ONE}}
        self.run.attempt(1).append_commit(CheckpointCommit(iteration=self.saved, path=str(folder), **values))  # type: ignore[arg-type]
        if self.saved > 2:
            self.run.checkpoint(self.saved - 2).rmdir()

    def look(self) -> list[QuotaUsage]:
        """Ask the planted program, as a job does; what is known of the quota."""
        used = self.others + ONE * min(self.saved, 2)
        row = f"/scratch {used // 1024} 0 {self.limit // 1024} - {self.files} 0 {self.most_files} -"
        program = self.programs / self.program
        program.write_text(f'#!/bin/sh\n[ "$1$3" = quota-u ] || exit 1\necho "{row}"\n')
        program.chmod(0o755)
        measure_quotas(self.run, self.plan, now=self.now)
        return storage_limits.read_usage(self.run)[0]

    def status(self) -> RunStatus:
        return run_status.read_run_status(self.run, QueueStatus(), now=self.now, plan=self.plan)


@pytest.fixture
def site(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:  # noqa: F811
    return Site(make_run, tmp_path, monkeypatch)


# what is told


def test_what_is_left_is_told_in_checkpoints(site: Site) -> None:
    site.others = 32 * ONE
    site.save()
    site.save()
    (found,) = site.look()
    assert found.own == 2 * ONE
    words = "lfs quota: 34.8 MB of 102 MB used, 2.05 MB in checkpoints of this run: room for 66 more than are kept"
    assert found.words() == words
    assert [found.is_scarce(count) for count in (0, 2, 65, 67)] == [False, False, False, True]


def test_what_the_rules_keep_and_is_not_there_yet_is_counted(site: Site) -> None:
    site.others, site.limit = 98 * ONE + 600_000, 100 * ONE
    site.save()
    (found,) = site.look()
    assert found.is_scarce(1)  # the second checkpoint has no room
    assert found.words().endswith("room for 0 more than are kept")
    site.limit = 102 * ONE
    (found,) = site.look()
    assert [found.is_scarce(1), found.is_scarce(2)] == [False, True]


def test_before_the_first_checkpoint_a_quota_is_scarce_when_it_is_used_up(site: Site) -> None:
    site.others = site.limit
    (found,) = site.look()
    assert found.is_scarce(1)
    assert found.words() == "lfs quota: 102 MB of 102 MB used"


def test_files_are_counted_too(site: Site) -> None:
    site.files, site.most_files = 999, 1000
    site.save()
    (files,) = [each for each in site.look() if each.kind == "files"]
    assert files.is_scarce(1)
    assert files.words() == (
        "lfs quota: 999 files of 1,000 files used, 1 files in checkpoints of this run: room for 0 more than are kept"
    )


# who is told


def test_status_says_it(site: Site) -> None:
    site.save()
    site.look()
    text = run_status_text.run_status_table(site.status(), now=site.now)
    (line,) = [line for line in text.splitlines() if line.startswith("quota")]
    assert "lfs quota: 1.02 MB of 102 MB used" in line
    assert line.endswith("(looked 0 s ago)")
    assert asdict(site.status())["quotas"][0]["source"] == "lfs quota"


def test_a_notice_is_written_while_there_is_room_for_few_and_once_a_week(site: Site) -> None:
    values = {"failed_attempts": 9, "no_progress": 1e9, "disk_checkpoints": 2, "program": ["true"]}
    target = vars(NoticeTarget(name="t", command=["true"], events=["disk"]))
    policy = NoticePolicy(run="m/r", cluster="c", since=NOW, targets=[target], **values)  # type: ignore[arg-type]
    notices.write_notice_policy(site.run, policy)
    site.save()
    for days, others in enumerate((90, 95, 97, 97, 97, 97, 97, 97)):  # in MB, besides 2 checkpoints
        site.now, site.others = NOW + days * DAY, others * ONE
        site.look()
        assert write_due_notices(site.run, site.plan, policy, now=site.now, at_work=True) == []
        assert bool(notices.known_notices(site.run)) == (others > 96)
    names = sorted(notices.known_notices(site.run))
    assert 1 <= len(names) <= 2
    assert all(name.startswith("disk-quota-lfs-quota-bytes-") for name in names)
    (notice, *_) = [entry for entry, _ in notices.pending_notices(site.run)]
    assert "room for 1 more than are kept" in notice.reason


def test_a_symptom_shares_its_notice_with_the_job(site: Site) -> None:
    site.save()
    site.others = 97 * ONE
    site.look()
    status = replace(site.status(), state="running")
    (symptom,) = symptoms._quotas_used_up(status, site.now, 2)
    assert symptom.cause == "quota-lfs-quota-bytes"
    assert symptom.notice == f"disk-quota-lfs-quota-bytes-{int(site.now // (7 * DAY))}"
    assert "free some space" in symptom.reason
    assert list(symptoms._quotas_used_up(status, site.now, 1)) == []
    assert list(symptoms._quotas_used_up(replace(status, state="stopped"), site.now, 2)) == []


# who is asked


def test_a_site_names_a_command_of_its_own(site: Site) -> None:
    program = site.programs / "ourquota"
    program.write_text("""#!/bin/sh\necho '{"used": 5000, "limit": 9000}'\necho "$@" > "$0.seen"\n""")
    program.chmod(0o755)
    site.plan = replace(site.plan, quota_command=[str(program), "--of", "{user}", "{path}/; rm -rf /"])
    measure_quotas(site.run, site.plan, now=site.now)
    (found,) = storage_limits.read_usage(site.run)[0]
    assert (found.source, found.used, found.limit) == ("ourquota", 5000, 9000)
    seen = Path(f"{program}.seen").read_text()
    assert seen == f"--of {os.getuid()} {site.run.path}/; rm -rf /\n"  # an argument, and no line of a shell


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo who are you", "it says no quota: who are you"),
        ("exit 1", "it says no quota: nothing"),
        ("sleep 60", "it did not answer within 1 s"),
        (None, "it cannot be run: No such file"),
    ],
)
def test_a_command_that_says_nothing_is_said(
    site: Site, monkeypatch: pytest.MonkeyPatch, script: str | None, words: str
) -> None:
    monkeypatch.setattr(measuring, "QUOTA_QUESTION_SECONDS", 1.0 if script == "sleep 60" else 60.0)
    program = site.programs / "ourquota"
    if script is not None:
        program.write_text(f"#!/bin/sh\nexec {script}\n")
        program.chmod(0o755)
    with pytest.raises(RelayrunError, match=words):
        read_quotas(site.run.path, [str(program)])
    site.plan = replace(site.plan, quota_command=[str(program)])
    measure_quotas(site.run, site.plan, now=site.now)
    assert words in (site.status().quota_complaint or "")


def test_words_of_quota_and_json() -> None:
    assert parse_quota_output("x", '{"used": 1, "limit": 2}') == [
        storage_limits.QuotaLimit(source="x", kind="bytes", used=1, limit=2)
    ]
    assert parse_quota_output("x", '{"used": "a lot"}') is None
    assert parse_quota_output("x", "[]") is None
    assert parse_quota_output("x", "/home 1 0 0 0 1 0 0 0") == []


def test_a_job_measures_with_its_saves_and_says_what_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[int] = []

    def measure(run: Run, plan: Plan, *, now: float) -> None:
        measured.append(1)
        if len(measured) > 2:
            raise RunDirError("unreadable record", where=run.path)

    monkeypatch.setattr(measuring, "measure_quotas", measure)
    watch = QuotaMonitor(site.run, site.plan)

    def look(saved: int) -> int:
        watch.look(saved)
        assert watch._thread is not None
        watch._thread.join(300)
        return len(measured)

    assert look(0) == 1
    assert look(100) == 1  # ten minutes have not passed
    monkeypatch.setattr(measuring, "MEASURE_AFTER_SAVE_SECONDS", 0.0)
    assert look(200) == 2
    assert look(200) == 2  # no save meanwhile
    assert look(300) == 3
    with pytest.raises(RelayrunError, match="unreadable record"):
        watch.look(300)


def test_the_command_says_it(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.now = time.time()
    site.others = 99 * ONE
    site.save()
    site.look()
    Plan.load(site.run)
    assert main(["status", str(site.run.path)]) == 0
    assert "lfs quota: 102 MB of 102 MB used, 1.02 MB in checkpoints of this run: room for 0 more than are kept" in (
        capsys.readouterr().out
    )
    assert json.loads(site.run.quota.read_text())["complaint"] is None


def test_a_full_disk_says_since_when_what_is_missing_and_what_could_go(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0
    monkeypatch.setattr(
        run_status, "file_system_limit", lambda place: make_limits(FILE_SYSTEM, 1000, 1000 + left, 0, 0)
    )
    for _ in range(5):
        site.save()
    for iteration in range(1, 4):  # as before keep_last was set
        site.run.checkpoint(iteration).mkdir()
    quarantine = site.run.checkpoints / ".quarantine" / "iter_0000009-0001"
    quarantine.mkdir(parents=True)
    (quarantine / "data").write_bytes(bytes(500_000))
    folder = Path(site.plan.log_folder)
    folder.mkdir()
    (folder / f"{site.plan.job_name}-41.err").write_bytes(bytes(200_000))
    (folder / "another-1.err").write_bytes(bytes(700_000))
    (site.run.attempt(1).heartbeats).mkdir()
    for path in (*site.run.attempt(1).path.iterdir(), site.run.attempt(1).heartbeats / "n0.json"):
        path.write_text("{}") if not path.exists() else None
        os.utime(path, (NOW, NOW - 60 if path.name != "n0.json" else NOW))
    waiting = QueueStatus(jobs=[Job(id="9", name="j", state="PENDING")])

    def disk() -> list[str]:
        return run_status.read_run_status(site.run, waiting, now=NOW, plan=site.plan).disk

    could_go = (
        "; could go: 3.07 MB in older checkpoints (iteration 3, 2, 1; checkpoint.keep_last), 500 kB in "
        f"{site.run.checkpoints}/.quarantine, 200 kB in logs in {folder}"
    )
    assert disk() == [
        f"full: 0 bytes left below {site.run.checkpoints}; no job can record anything until some is freed (nothing was "
        f"recorded since {format_time(NOW)}); a checkpoint takes 1.02 MB{could_go}"
    ]
    left = 900_000
    words = f"too full for a checkpoint: 900 kB left below {site.run.checkpoints}; a checkpoint takes 1.02 MB"
    assert disk() == [words + could_go]
    left = ONE
    assert disk() == []


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ([("bytes", 1000, 1000)], "full: 0 bytes left below {}; no job can record anything until some is freed"),
        ([("bytes", 1_000_000, 1_004_096)], "full: 4,096 bytes left"),
        ([("bytes", 10, 10_000_000), ("files", 7, 7)], "full: 0 files left below {}"),
        ([("bytes", 10, 10_000_000), ("files", 6, 7)], None),
        ([], None),
    ],
)
def test_status_says_that_the_disk_is_full_also_of_a_chain_that_has_ended(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    limits: list[tuple[storage_limits.QuotaKind, int, int]],
    said: str | None,
) -> None:
    found = [
        storage_limits.QuotaLimit(source=FILE_SYSTEM, kind=kind, used=used, limit=limit) for kind, used, limit in limits
    ]
    monkeypatch.setattr(run_status, "file_system_limit", lambda place: found)
    site.run.stop.write_text("cancelled by ada\n")
    status = run_status.read_run_status(site.run, QueueStatus(), now=NOW)
    words = [text for name, text in run_status_text._lines(status, NOW) if name == "disk"]
    assert len(words) == (said is not None)
    assert said is None or words[0].startswith(said.format(site.run.path))
    assert asdict(status)["disk"] == words
