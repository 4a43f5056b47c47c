"""A job as Slurm shows it: fields, times, GPUs, and texts of persons that never become a field."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.slurm_commands import (
    are_gpus_ambiguous,
    is_job_text_ambiguous,
    parse_job,
    parse_timestamp,
)
from tests.control.slurm_doubles import LINE


def test_a_job_is_read_back_with_the_options_that_hold_for_successors() -> None:
    job = parse_job(LINE)
    assert (job.id, job.name, job.state, job.nodes, job.num_nodes) == (
        "17",
        "relayrun-demo-1a2b3c4d",
        "RUNNING",
        "n[0-1]",
        2,
    )
    assert job.options == {
        "nodes": "2",
        "time": "1-00:02:00",
        "partition": "debug",
        "qos": "long",
        "reservation": "res",
        "exclude": "n3",
        "cpus-per-task": "2",
        "mem": "100M",
        "gpus-per-node": "3",
    }
    assert job.live
    assert not job.preempted


@pytest.mark.parametrize(
    ("start", "end", "at_limit"),
    [("2026-11-21T04:00:00", "2026-11-22T04:02:00", True), ("2026-11-21T04:00:00", "2026-11-21T05:00:00", False)],
)
def test_a_job_at_its_limit_is_told_from_one_that_was_ended_earlier(start: str, end: str, at_limit: bool) -> None:
    line = LINE.replace("StartTime=2026-11-21T04:48:32", f"StartTime={start}", 1)
    assert parse_job(line.replace("EndTime=2026-11-22T04:50:32", f"EndTime={end}")).at_limit is at_limit


def test_when_a_job_was_queued_started_and_ended() -> None:
    times = "SubmitTime=2026-11-21T04:40:00 EligibleTime=2026-11-21T04:45:00 AccrueTime=Unknown StartTime="
    line = LINE.replace("StartTime=", times, 1)
    job = parse_job(line)
    assert job.start_time is not None
    assert job.submit_time == job.start_time - 512
    assert job.eligible_time == job.start_time - 212
    assert job.end_time == job.start_time + 86_520
    assert parse_job(line.replace("JobState=RUNNING", "JobState=PENDING")).start_time is None
    unlimited = line.replace("TimeLimit=1-00:02:00", "TimeLimit=UNLIMITED")
    assert parse_job(unlimited).end_time is None
    assert parse_job(unlimited.replace("JobState=RUNNING", "JobState=COMPLETED")).end_time == job.end_time
    old = parse_job(LINE)
    assert (old.submit_time, old.eligible_time) == (None, None)


def test_slurm_is_asked_for_times_that_are_told_apart_when_summer_time_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that night 02:30 comes twice; and the person's own way to see times must not reach the parser."""
    monkeypatch.setenv("TZ", "Europe/Zurich")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    time.tzset()
    try:
        shown = 'case "$SLURM_TIME_FORMAT" in %s) echo "$1";; *) date -d "@$1" +%Y-%m-%dT%H:%M:%S;; esac'
        for program in ("squeue", "scontrol", "sacct"):
            (tmp_path / program).write_text(f"#!/bin/sh\n{shown}\n")
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
        for program in ("squeue", "scontrol", "sacct"):
            for moment in (1792888200, 1792891800):  # 2026-10-25 02:30, in summer time and an hour later
                assert (
                    parse_timestamp(slurm_commands.run_slurm_command([program, str(moment)], seconds=30).strip())
                    == moment
                )
    finally:
        monkeypatch.undo()
        time.tzset()


def test_typed_gpus_and_newer_slurm_are_read() -> None:
    assert parse_job(LINE.replace("gres:gpu:3", "gres/gpu:a100:4")).options["gpus-per-node"] == "a100:4"


def test_an_unlimited_job_has_no_end() -> None:
    job = parse_job(LINE.replace("1-00:02:00", "UNLIMITED").replace("2026-11-22T04:50:32", "Unknown"))
    assert job.end_time is None
    assert not job.at_limit


REAL = (
    "JobId=6 JobName={name} UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901754 Nice=0 Account={account} "
    "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:01 TimeLimit=00:05:00 TimeMin=N/A StartTime=2026-11-22T17:51:40 EndTime=2026-11-22T17:56:40 "
    "PreemptTime=None Partition=debug ExcNodeList=(null) NodeList=n1 BatchHost=n1 NumNodes=1 CPUs/Task=2 "
    "MinMemoryNode=0 Features=(null) OverSubscribe=OK Licenses=(null) Network={network} Command=/w/script {text} "
    "WorkDir=/w/{text} Comment={comment}  StdErr=/w/{text}/6.out StdIn=/dev/null StdOut={output} Power= {gpus}"
)
"""One line of scontrol, of Slurm 22.05."""

LINES = {
    "22.05": REAL,
    "24.11": REAL.replace(" Power=", ""),
    "26.05": REAL.replace(" Power=", "")
    .replace("OverSubscribe=OK", "OverSubscribe=NO Exclusive=NO")
    .replace(" WorkDir=", " SubmitLine=sbatch /w/script {text} WorkDir=")
    .replace("  StdErr=/w/{text}/6.out", " StdErr="),
}


@pytest.mark.parametrize("output", ["/dev/null", "/w/{text}/6.out"])
@pytest.mark.parametrize("version", LINES)
@pytest.mark.parametrize("gpus", ["", "TresPerNode=gres/gpu:2 "])
def test_no_text_of_a_persons_becomes_a_field(gpus: str, version: str, output: str) -> None:
    text = "x JobState=COMPLETED NodeList=n9 TresPerNode=gres:gpu:9 ExcNodeList=n3 Power= "
    text += "Comment=relayrun:begin-failed=2@n4"
    parts = {"network": text, "text": text, "account": text.lower(), "gpus": gpus, "output": output.format(text=text)}
    plain = LINES[version].format(name=text, comment="relayrun:begin-failed=1@n0,n7", **parts)
    block = f"{text} UserId=a(1) {text} Command=/x"
    whole = LINES[version].format(name=block, comment="relayrun:begin-failed=1@n0,n7", **parts)
    for line, name in ((plain, text), (whole, block)):
        asked = gpus.strip().removeprefix("TresPerNode=") or "N/A"
        job = parse_job(line, name=name if is_job_text_ambiguous(line) else None, gpus=asked)
        assert (job.id, job.name, job.state, job.nodes, job.requeue) == ("6", name, "RUNNING", "n1", True)
        assert job.begin_failed_on == "n0,n7"
        assert job.options.get("gpus-per-node") == ("2" if gpus else None)
        assert "exclude" not in job.options
    assert not is_job_text_ambiguous(plain)
    assert is_job_text_ambiguous(whole)


@pytest.mark.parametrize(
    ("output", "ambiguous"),
    [
        ("/dev/null Power= TresPerNode=gres:gpu:4", False),
        ("/dev/null Power=", False),
        ("/home/ada/out TresPerNode=gpu:8 Power=", True),  # a folder of this name
        ("/home/a StdOut=/dev/null Power= TresPerNode=gres:gpu:4", True),
    ],
)
def test_gpus_that_may_be_words_of_a_path_are_asked_for(output: str, *, ambiguous: bool) -> None:
    assert are_gpus_ambiguous(f"JobId=1 JobName=a UserId=ada(1) StdIn=/dev/null StdOut={output}") is ambiguous


def test_a_preemption_from_which_a_job_has_come_back_is_over() -> None:
    """Slurm 24.11 keeps its time."""
    earlier, later = (LINE.replace("PreemptTime=None", f"PreemptTime=2026-11-2{day}T04:49:00") for day in (0, 1))
    assert not parse_job(earlier).preempted
    assert parse_job(later).preempted
