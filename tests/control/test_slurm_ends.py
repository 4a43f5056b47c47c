"""Why a job ends: its limit, a reservation, a maintenance, a cancellation, a requeue by an operator."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.slurm_commands import (
    parse_job,
    parse_timestamp,
)
from tests.control.slurm_doubles import LINE, slurm_of

RESERVATION = (
    "ReservationName=res StartTime=2026-11-21T04:00:00 EndTime=2026-11-21T06:00:00 Duration=02:00:00 Nodes=n3 "
    "NodeCnt=1 Features=(null) Flags=IGNORE_JOBS,SPEC_NODES Users=ann State=ACTIVE"
)


def test_when_a_reservation_ends_that_ends_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(script: str) -> float | None:
        return slurm_of(tmp_path, monkeypatch, scontrol=script).reservation_end("res")

    assert asked(f'echo "{RESERVATION}"') == parse_timestamp("2026-11-21T06:00:00")
    assert asked(f'echo "{RESERVATION.replace("SPEC_NODES", "FLEX")}"') is None  # jobs may go on behind its end
    assert asked('echo "Reservation res not found" >&2; exit 1') is None


def test_a_job_ends_with_its_limit_its_reservation_or_a_maintenance_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse_job(LINE.replace("Reservation=res", "Reservation=(null)"))
    maintenance = RESERVATION.replace("=res ", "=mend ").replace("IGNORE_JOBS", "MAINT,IGNORE_JOBS")
    maintenance = maintenance.replace("2026-11-21T04:00:00", "2026-11-21T05:00:00").replace("Nodes=n3", "Nodes=n[1-3]")

    def end(*reservations: str, of: Job = job) -> tuple[float | None, str]:
        script = "\n".join(["true", *(f'echo "{each}"' for each in reservations)])
        return slurm_of(tmp_path, monkeypatch, scontrol=script).job_end(of)

    assert end() == (job.end_time, "")
    assert end(RESERVATION, "No reservations in the system") == (job.end_time, "")  # of others
    assert end(RESERVATION, of=parse_job(LINE)) == (parse_timestamp("2026-11-21T06:00:00"), "reservation res ends")
    assert end(RESERVATION.replace("SPEC_NODES", "FLEX"), of=parse_job(LINE)) == (job.end_time, "")
    begins = (parse_timestamp("2026-11-21T05:00:00"), "maintenance mend begins")
    assert end(RESERVATION, maintenance) == end(RESERVATION, maintenance, of=parse_job(LINE)) == begins
    assert end(maintenance.replace("n[1-3]", "n[2-3]")) == (job.end_time, "")
    assert end(maintenance.replace("StartTime=2026-11-21T05", "StartTime=2026-11-21T03")) == (job.end_time, "")
    assert end(maintenance, of=replace(job, end_time=None)) == begins
    assert end(of=replace(job, end_time=None)) == (None, "")
    assert slurm_of(tmp_path, monkeypatch, scontrol="exit 1").job_end(job) == (job.end_time, "")


@pytest.mark.parametrize("flag", ["HOURLY", "DAILY", "WEEKDAY", "WEEKEND", "WEEKLY", "NO_HOLD_JOBS_AFTER_END"])
def test_a_reservation_that_comes_again_ends_its_jobs_and_is_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f'echo "{RESERVATION.replace("IGNORE_JOBS", flag)}"')
    assert slurm.reservation_end("res") == parse_timestamp("2026-11-21T06:00:00")
    assert slurm.reservation_end("res", for_good=True) == math.inf
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f'echo "{RESERVATION}"')
    assert slurm.reservation_end("res", for_good=True) == parse_timestamp("2026-11-21T06:00:00")


def test_a_job_that_slurm_ends_with_its_reservation_was_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm 22.05 shows it: the reservation has gone from it, and its time limit was not reached."""
    line = LINE.replace("JobState=RUNNING Reason=None", "JobState=COMPLETING Reason={reason}")
    line = line.replace("EndTime=2026-11-22", "EndTime=2026-11-21").replace("Reservation=res", "Reservation=(null)")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for reason, cancelled in (("TimeLimit", False), ("None", True)):
        script = f'echo "{line.format(reason=reason)}"'
        slurm = slurm_of(tmp_path, monkeypatch, scontrol=script, sinfo="echo idle")
        assert slurm.cancelled("17", nodes="n[0-1]") is cancelled


@pytest.mark.parametrize(
    ("json", "accounting", "cancelled"),
    [  # scontrol's JSON of 24.11 and 26.05; that of 22.05 hides the state, too
        ('["CANCELLED","COMPLETING"]', "", True),
        ('["TIMEOUT","COMPLETING"]', "", False),
        ('["PREEMPTED","COMPLETING"]', "CANCELLED by 0", False),
        ('["COMPLETING"]', "CANCELLED by 1000", True),
        ('"COMPLETING"', "CANCELLED by 1000", True),
        ('"COMPLETING"', "NODE_FAIL", False),
        ('"COMPLETING"', "RUNNING", True),  # no cause is left
        ("", "", True),
    ],
)
def test_how_slurm_ends_the_own_job_is_asked_before_it_is_concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json: str, accounting: str, cancelled: bool
) -> None:
    line = LINE.replace("JobState=RUNNING", "JobState=COMPLETING").replace("EndTime=2026-11-22", "EndTime=2026-11-21")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    answer = f'echo \'{{"jobs": [{{"job_state": {json}}}]}}\'' if json else "exit 1"
    scontrol = f'case "$*" in *--json*) {answer} ;; *) echo "{line}" ;; esac'
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=scontrol, sinfo="echo idle", sacct=f"echo {accounting}")
    assert slurm.cancelled("17", nodes="n[0-1]") is cancelled


@pytest.mark.parametrize(("state", "cancelled"), [("CANCELLED by 1000", True), ("COMPLETED", False), ("", False)])
def test_accounting_knows_who_was_cancelled_when_slurm_has_forgotten_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, cancelled: bool
) -> None:
    unknown = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=unknown, sacct=f"echo '{state}'")
    assert slurm.cancelled("17", nodes="n[0-1]") is cancelled


@pytest.mark.parametrize(("restarts", "started", "cancelled"), [(1, "", False), (1, "1", True), (2, "1", False)])
def test_a_job_that_an_operator_requeued_was_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, started: str, cancelled: bool
) -> None:
    """Slurm counts the restart when it is ordered; until the processes are gone the job is COMPLETING."""
    line = LINE.replace("JobState=RUNNING Reason=None", f"JobState=COMPLETING Reason=None Restarts={restarts}")
    line = line.replace("EndTime=2026-11-22", "EndTime=2026-11-21")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", started)
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f'echo "{line}"', sinfo="echo idle")
    assert slurm.cancelled("17", nodes="n[0-1]") is cancelled
