from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import factory, local_srun, slurm_commands
from relayrun.control.scheduler.base import FallbackOrder, Job, Scheduler, clean_environment
from relayrun.control.scheduler.slurm import Slurm, jobs_by_name
from relayrun.control.scheduler.slurm_commands import (
    are_gpus_ambiguous,
    is_job_text_ambiguous,
    parse_job,
    parse_timestamp,
)
from relayrun.errors import SchedulerError
from tests.plans import plan_with

LINE = (
    "JobId=17 JobName=relayrun-demo-1a2b3c4d UserId=ann(1000) Priority=1 QOS=long JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=0 Restarts=0 RunTime=00:00:04 TimeLimit=1-00:02:00 TimeMin=N/A "
    "StartTime=2026-11-21T04:48:32 EndTime=2026-11-22T04:50:32 PreemptEligibleTime=2026-11-21T04:48:32 "
    "PreemptTime=None Partition=debug Account=(null) ExcNodeList=n3 NodeList=n[0-1] BatchHost=n0 NumNodes=2 "
    "NumCPUs=4 NumTasks=2 CPUs/Task=2 MinCPUsNode=2 MinMemoryNode=100M Features=(null) Reservation=res "
    "TresPerNode=gres:gpu:3 Command=/home/ann/a b/job.sbatch WorkDir=/home/ann"
)


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


def test_a_new_job_inherits_nothing_from_the_surrounding_one() -> None:
    environment = {
        "SLURM_JOB_ID": "1",
        "SBATCH_PARTITION": "x",
        "SRUN_CPUS_PER_TASK": "2",
        "SQUEUE_STATES": "RUNNING",
        "RELAYRUN_RUN_DIR": "r",
        "SLURM_CONF": "/etc/slurm.conf",
        "PATH": "/bin",
        "WANDB_API_KEY": "k",
    }
    assert set(clean_environment(environment)) == {"SLURM_CONF", "PATH", "WANDB_API_KEY"}


def fake_command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_unreachable_controller_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    fake_command(
        tmp_path,
        "scontrol",
        f"echo x >> {count}; [ $(wc -l < {count}) -lt 3 ] && "
        f'{{ echo "Unable to contact slurm controller (connect failure)" >&2; exit 1; }}; echo "{LINE}"',
    )
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    job = Slurm(patience=2, pause=0.01).query("17")
    assert job is not None
    assert job.id == "17"
    assert count.read_text().count("x") == 3


def test_a_refusal_is_not_repeated_and_says_what_slurm_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(tmp_path, "sbatch", f'echo x >> {tmp_path}/count; echo "invalid partition specified" >&2; exit 1')
    fake_command(tmp_path, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + "/bin")
    with pytest.raises(SchedulerError, match="sbatch: invalid partition specified"):
        Slurm(patience=2, pause=0.01).test(Path("job"))
    assert (tmp_path / "count").read_text().count("x") == 1
    assert Slurm(patience=2, pause=0.01).query("1") is None


def test_missing_slurm_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="sbatch is not installed here"):
        Slurm().test(Path("job"))


def slurm_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Slurm:
    for name, script in scripts.items():
        fake_command(folder, name, script)
    monkeypatch.setenv("PATH", str(folder) + os.pathsep + os.environ["PATH"])
    return Slurm(patience=60, pause=0.01)


def test_whatever_a_question_meets_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    script = (
        f"echo x >> {count}; [ $(wc -l < {count}) -lt 3 ] && "
        f'{{ echo "slurm_load_jobs error: Some new words" >&2; exit 1; }}; echo "{LINE}"'
    )
    job = slurm_of(tmp_path, monkeypatch, scontrol=script).query("17")
    assert job is not None
    assert count.read_text().count("x") == 3


def test_a_command_that_hangs_is_ended_and_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tmp_path / "once"
    monkeypatch.setattr("relayrun.control.scheduler.slurm_commands.COMMAND_SECONDS", 3.0)
    script = f'if [ ! -e {once} ]; then touch {once}; exec sleep 100; fi; echo "{LINE}"'
    assert slurm_of(tmp_path, monkeypatch, scontrol=script).query("17") is not None


@pytest.mark.parametrize("words", ["Protocol authentication error", "Socket timed out on send/recv operation"])
def test_a_job_that_was_queued_in_spite_of_an_error_is_found(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = tmp_path / "queue"
    slurm = slurm_of(
        tmp_path,
        monkeypatch,
        sbatch=f'for word; do case "$word" in --comment=*) echo "7|${{word#--comment=}}" >> {queue};; esac; done; '
        f'echo "sbatch: error: {words}" >&2; exit 1',
        squeue=f"[ ! -e {queue} ] || cat {queue}",
    )
    plan = Plan.of(PLAN)
    assert slurm.submit(plan, Path("job"), options={}) == "7"
    assert len(queue.read_text().splitlines()) == 1
    assert slurm.submit_auxiliary(plan, Path("job"), name="e", arguments=[], limit=60) == "7"
    assert len(queue.read_text().splitlines()) == 2


def test_an_answer_of_sbatch_without_a_job_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, sbatch="echo hello", squeue="true")
    with pytest.raises(SchedulerError, match="no job id in its answer 'hello'"):
        slurm.submit(Plan.of(PLAN), Path("job"), options={})


PLAN = {
    "run": "a/b",
    "job_name": "j",
    "scheduler": "slurm",
    "total_steps": 1,
    "config_revision": 1,
    "submitted_after_attempt": 0,
    "chain": {"auto_requeue": True},
    "time_limit": 60,
    "grace_period": 1.0,
    "min_grace_period": 1.0,
    "max_grace_period": 1.0,
    "signal_seconds": 1,
    "nodes": 1,
    "ntasks_per_node": 1,
    "cpus_per_task": 1,
    "sbatch_options": {},
    "srun_options": [],
    "command_prefix": [],
    "program": [],
    "environment": {},
    "modules": [],
    "host_python": "python3",
    "package_root": "/",
    "log_folder": "/",
}


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


def test_a_job_whose_begin_failed_says_so_in_its_comment() -> None:
    job = parse_job(LINE + " Comment=relayrun:begin-failed=2@n0,n7")
    assert job.begin_failed_on == "n0,n7"
    other = parse_job(LINE + " Comment=relayrun:0a1b2c")
    assert other.begin_failed_on == ""


def test_a_step_on_the_batch_host_asks_for_it_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Slurm 24.05 `--relative=0` is another node for each step; with a topology it is that of a switch."""
    slurm = slurm_of(tmp_path, monkeypatch, srun='echo "$@"')
    names = ["batch"]
    monkeypatch.setattr(slurm, "ask", lambda _command: "\n".join(names))
    monkeypatch.setattr(slurm, "query", lambda _id: parse_job(LINE.replace("BatchHost=n0", "BatchHost=n1")))
    steps = [slurm.run_beside("17", ["env"], nodes=1).split()]
    monkeypatch.setattr("relayrun.control.scheduler.slurm.subprocess.Popen", lambda words, **_: steps.append(words))
    slurm.guard("17", ["env"], log=tmp_path / "guard.log")
    assert len(steps) == 2
    for words in steps:
        assert "--nodelist=n1" in words
        assert not [word for word in words if word.startswith("--relative")]
    names.append("relayrun-guard")
    slurm.guard("17", ["env"], log=tmp_path / "guard.log")  # a watch that starts again
    assert len(steps) == 2


def rendezvous(monkeypatch: pytest.MonkeyPatch, slurm: Slurm, name: str = "localhost") -> tuple[str, int]:
    monkeypatch.setattr("relayrun.control.scheduler.slurm_nodes.SlurmNodes.expand", lambda _self, _nodes: [name])
    found = slurm.rank_launch(Plan.of(PLAN), parse_job(LINE), leave_signal=None).environment
    return found["MASTER_ADDR"], int(found["MASTER_PORT"])


def test_each_start_meets_at_a_free_port_that_no_connection_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = tmp_path / "range"
    ports.write_text("21000\t60999\n")
    monkeypatch.setattr(local_srun, "CONNECTION_PORTS_FILE", ports)
    with contextlib.ExitStack() as held:
        for port in range(local_srun.LOWEST_PORT, 21_000, 2):
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # another program has it
                listener.bind(("", port))
        found = {rendezvous(monkeypatch, Slurm())[1] for _ in range(20)}
    assert all(local_srun.LOWEST_PORT < port < 21_000 and port % 2 for port in found)
    assert len(found) > 10  # the next start does not meet the same neighbour again


def test_a_node_whose_name_does_not_resolve_is_reached_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, sinfo="echo 10.1.2.3")
    assert rendezvous(monkeypatch, slurm, "n.invalid")[0] == "10.1.2.3"
    assert rendezvous(monkeypatch, slurm)[0] == "localhost"
    slurm = slurm_of(tmp_path, monkeypatch, sinfo="exit 1")
    assert rendezvous(monkeypatch, slurm, "n.invalid")[0] == "n.invalid"  # the ranks say why


@pytest.mark.parametrize(
    ("memory", "options", "dropped", "kept"),
    [
        ("MinMemoryCPU=50M", [], ["SLURM_MEM_PER_NODE", "SLURM_MEM_PER_GPU"], ["SLURM_MEM_PER_CPU"]),
        ("MinMemoryNode=50M", [], ["SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"], ["SLURM_MEM_PER_NODE"]),
        ("MinMemoryNode=0", [], [], ["SLURM_MEM_PER_CPU", "SLURM_GPUS_PER_NODE"]),
        ("MinMemoryNode=0", ["--gres=gpu:1"], ["SLURM_GPUS_PER_NODE", "SLURM_GPUS"], []),
        ("MinMemoryNode=0", ["--gpus-per-node=1"], ["SLURM_GPUS_PER_NODE", "SLURM_GPUS"], []),
    ],
)
def test_variables_of_the_job_in_which_a_job_was_submitted_do_not_reach_the_ranks(
    monkeypatch: pytest.MonkeyPatch, memory: str, options: list[str], dropped: list[str], kept: list[str]
) -> None:
    """`sbatch` inside of `salloc --mem=100` hands on SLURM_MEM_PER_NODE, and beside --mem-per-cpu srun refuses it."""
    monkeypatch.setattr("relayrun.control.scheduler.slurm_nodes.SlurmNodes.expand", lambda _self, _nodes: ["localhost"])
    job = parse_job(LINE.replace("MinMemoryNode=100M", memory))
    unset = Slurm().rank_launch(replace(Plan.of(PLAN), srun_options=options), job, leave_signal=None).unset
    assert {"SLURM_TIMELIMIT", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", *dropped} <= set(
        unset
    )
    assert not set(kept) & set(unset)


def test_the_options_of_a_job_that_asks_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "PartitionName=low Default=NO\nPartitionName=debug Default=YES\n"
    account = 'case "$*" in *DefaultAccount*) echo proj ;; *) echo ;; esac'
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f"printf '{rows}'", sacctmgr=account)
    assert slurm.default_options() == {"partition": "debug", "account": "proj", "qos": "normal"}
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f"printf '{rows}'", sacctmgr="echo You are not running; exit 1")
    assert slurm.default_options() == {"partition": "debug"}  # without accounting


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


def test_another_job_that_is_completing_is_asked_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, line = tmp_path / "count", LINE.replace("JobState=RUNNING", "JobState=$state")
    states = f"echo x >> {count}; state=COMPLETING; [ $(wc -l < {count}) -lt 4 ] || state=CANCELLED"
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm_of(tmp_path, monkeypatch, scontrol=f'{states}; echo "{line}"').cancelled("17", nodes="n[0-1]")
    assert [seconds for seconds in slept if seconds >= 1] == [1, 1, 1]  # `subprocess` sleeps as well


def test_a_preemption_from_which_a_job_has_come_back_is_over() -> None:
    """Slurm 24.11 keeps its time."""
    earlier, later = (LINE.replace("PreemptTime=None", f"PreemptTime=2026-11-2{day}T04:49:00") for day in (0, 1))
    assert not parse_job(earlier).preempted
    assert parse_job(later).preempted


def test_nodes_that_a_controller_does_not_know_yet_are_neither_down_nor_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm 26.05, right after `scontrol reconfigure`."""
    refused = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
    for states, known in (("unknown unknown*", False), ("idle down*", True), ("idle*", True)):
        words = " ".join(f"'{state}'" for state in states.split())
        slurm = slurm_of(tmp_path, monkeypatch, sinfo=f"printf '%s\\n' {words}", sbatch=refused)
        assert slurm._node_is_down("n0") is known
        assert slurm.nodes.enough_up(Plan.of(PLAN), tmp_path / "job", {}) is not known


@pytest.mark.parametrize(
    ("said", "states", "away"),
    [
        (
            "Requested node configuration is not available",
            "n0 idle\nn1 drained\nn2 maint",
            ["n1 (drained)", "n2 (maint)"],
        ),
        ("Requested node configuration is not available", "n0 idle\nn1 mixed", []),
        ("Invalid partition name specified", "n0 drained", []),
    ],
)
def test_a_job_that_waits_for_nodes_that_are_away_is_not_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: str,
    states: str,
    away: list[str],
) -> None:
    sbatch = f"case \"$*\" in *--test-only*) echo 'allocation failure: {said}' >&2; exit 1 ;; *) echo 7 ;; esac"
    slurm = slurm_of(tmp_path, monkeypatch, sbatch=sbatch, sinfo=f"printf '{states}\\n'")
    plan = replace(Plan.of(PLAN), log_folder=str(tmp_path))
    if not away:
        with pytest.raises(SchedulerError, match=said):
            slurm.submit_first(plan, tmp_path / "job")
        return
    assert slurm.submit_first(plan, tmp_path / "job") == "7"
    assert f"the job waits for some of {', '.join(away)}" in caplog.text


@pytest.mark.parametrize(
    "state", ["RESV_DEL_HOLD", "REQUEUE_HOLD", "SPECIAL_EXIT", "EXPEDITING", "STAGE_OUT", "PENDING"]
)
def test_a_job_in_whatever_state_is_cancelled_unless_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    gone = tmp_path / "gone"
    line = LINE.replace("JobState=RUNNING", f"JobState={state}")
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f'echo "{line}"', scancel=f"echo $1 > {gone}")
    slurm.cancel("17")
    assert gone.read_text() == "17\n"
    gone.unlink()
    for ended in ("CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED"):
        slurm = slurm_of(tmp_path, monkeypatch, scontrol=f'echo "{line.replace(state, ended)}"')
        slurm.cancel("17")
    assert not gone.exists()


def test_several_jobs_are_cancelled_by_one_order_or_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    assert slurm_of(tmp_path, monkeypatch, scancel=f'echo "$@" >> {asked}').cancel_together(["17", "18"])
    assert asked.read_text() == "17 18\n"
    refuses = "echo 'scancel: error: Kill job error on job id 18: Invalid job id specified' >&2; exit 1"
    assert not slurm_of(tmp_path, monkeypatch, scancel=refuses).cancel_together(["17", "18"])


def test_a_signal_is_the_ranks_and_never_the_batch_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    steps = "printf '%s\\n' 17.batch 17.extern 17.0 17.12"
    found = slurm_of(tmp_path, monkeypatch, squeue=steps, scancel=f'echo "$@" >> {asked}')
    found.signal_ranks("17", signal.SIGUSR1)
    assert asked.read_text() == "--signal=USR1 17\n"
    found.signal_ranks("17", signal.SIGKILL)
    assert asked.read_text().splitlines()[1:] == ["--signal=KILL 17.0", "--signal=KILL 17.12"]


def test_jobs_of_several_names_have_the_reason_why_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "17|RUNNING|None|a",
        "18|PENDING|Dependency|a",
        "19|PENDING|None|b|c",
        "20|RUNNING|None|other",
        "21|PENDING",
    ]
    slurm_of(tmp_path, monkeypatch, squeue=f"printf '%s\\n' {' '.join(map(repr, lines))}")
    found = jobs_by_name(["a", "b|c"], patience=1)
    shown = {name: [(job.id, job.state, job.reason) for job in jobs] for name, jobs in found.items()}
    assert shown == {
        "a": [("17", "RUNNING", ""), ("18", "PENDING", "Dependency")],
        "b|c": [("19", "PENDING", "")],
    }


def test_a_new_job_gets_the_users_python_path_and_not_the_supervisors() -> None:
    inside = {"PYTHONPATH": "/relayrun", "RELAYRUN_USER_PYTHONPATH": "/my/hooks"}
    assert clean_environment(inside) == {"PYTHONPATH": "/my/hooks"}
    assert clean_environment(inside | {"RELAYRUN_USER_PYTHONPATH": ""}) == {}
    inside["PYTHONSAFEPATH"] = (
        "1"  # the supervisor's: a program finds the modules beside it in every job, not the first
    )
    assert clean_environment(inside) == {"PYTHONPATH": "/my/hooks"}
    mine = {"RELAYRUN_USER_PYTHONSAFEPATH": "1"}
    assert clean_environment(inside | mine) == {"PYTHONPATH": "/my/hooks", "PYTHONSAFEPATH": "1"}
    assert clean_environment({"PYTHONPATH": "/my/hooks"}) == {"PYTHONPATH": "/my/hooks"}


def test_a_free_port_is_one_that_no_connection_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(local_srun.CONNECTION_PORTS_FILE.read_text().split()[0])
    found = {local_srun.free_port() for _ in range(20)}
    assert len(found) > 10
    if first >= local_srun.LOWEST_PORT + 1000:
        assert all(local_srun.LOWEST_PORT <= port < first for port in found)
    monkeypatch.setattr(local_srun, "CONNECTION_PORTS_FILE", tmp_path / "range")
    (tmp_path / "range").write_text("1024\t65535\n")  # no room below it: the kernel chooses
    assert local_srun.free_port("") > 1024


def test_a_second_scheduler_writes_eleven_methods(capsys: pytest.CaptureFixture[str]) -> None:
    """The other methods have defaults, with which a job is queued, begins and goes on."""

    def say(self: Scheduler, *said: object, **_: object) -> str:
        print(*said)
        return "1"

    assert len(Scheduler.__abstractmethods__) == 11
    printer = type("Printer", (Scheduler,), dict.fromkeys(Scheduler.__abstractmethods__, say))()
    plan, job = Plan.of(PLAN), Job(id="1", name="n", state="RUNNING")
    assert printer.submit_first(plan, Path("job.sbatch")) == "1"
    printer.adopt(job, plan)
    printer.guard("1", ["true"], log=Path("log"))
    printer.confirm_begin(job, followed=True, log=None)
    printer.note_stop("1", "ada")
    assert printer.nodes is printer.fallback_jobs is printer.reservation_end("r") is printer.cancelled_by("1") is None
    assert printer.single_task_command(plan, cpus_per_task="1") == []
    with pytest.raises(SchedulerError, match="cannot delay"):
        printer.postpone("1", delay=1)
    assert "job.sbatch" in capsys.readouterr().out


def slow_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """Slurm's commands, each of which takes so long."""
    answers = {"squeue": "", "sbatch": "17\n", "scontrol": ""}
    for name, answer in answers.items():
        (folder / name).write_text(f"#!/bin/sh\nsleep {seconds}\nprintf '{answer}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_commands, "SILENCE_SECONDS", 0.1)


def test_a_person_waits_for_an_order_as_long_as_a_job_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a controller that takes 30 s, cancel and submit gave up after 10 and 20 s."""
    slow_commands(tmp_path, monkeypatch, seconds=0.5)
    limits: list[float] = []
    run = slurm_commands.run_slurm_command

    def recorded(*arguments: Any, seconds: float, **options: Any) -> str:
        limits.append(seconds)
        return run(*arguments, seconds=seconds, **options)

    monkeypatch.setattr(slurm_commands, "run_slurm_command", recorded)
    caplog.set_level("INFO", "relayrun")
    person = factory.slurm_scheduler(patience=5.0, ordered=True)
    assert person.submit_once(["script"], name="j") == "17"
    assert person.jobs_named("j") == []
    assert limits == [slurm_commands.COMMAND_SECONDS] * 2
    assert "sbatch has not answered for 0 s; waiting up to 120 s" in caplog.text
    assert "squeue has not answered" in caplog.text
    caplog.clear()
    factory.slurm_scheduler(patience=5.0).jobs_named("j")  # a question of `status`
    assert limits[2:] == [10.0]
    assert not caplog.text


def test_an_sbatch_without_an_answer_says_that_the_job_may_be_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_commands(tmp_path, monkeypatch, seconds=600)
    monkeypatch.setattr(slurm_commands, "COMMAND_SECONDS", 0.2)
    with pytest.raises(slurm_commands.TimedOutError, match="whether it has queued the job is unknown") as found:
        Slurm(patience=0.0, ordered=True).submit_once(["script"], name="j-1")
    assert found.value.hint is not None
    assert "squeue --me --name=j-1" in found.value.hint


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, False),
        ({"partition": "large"}, True),
        ({"partition": "large,debug"}, False),
        ({"partition": "other"}, False),
    ],
)
def test_a_fallback_job_is_as_large_as_its_partition_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], whole: bool
) -> None:
    """On Slurm 26.05 `sbatch --test-only` takes a job of one node that its partition never lets start."""
    shown = "echo 'PartitionName=debug Default=YES MinNodes=0'; echo 'PartitionName=large Default=NO MinNodes=2'"
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=shown, sbatch=f'echo "$@" >>{tmp_path}/asked; echo 7')
    order = FallbackOrder(job_id="6", failed_begins=0)
    given: dict[str, str | None] = {"nodes": "2", **options}
    assert slurm.fallback_jobs.queue(tmp_path / "script", name="x", order=order, options=given, limit=60) == "7"
    queued = (tmp_path / "asked").read_text().splitlines()[-1]
    assert "--test-only" not in queued
    assert ("--nodes=2" in queued) is whole


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


@pytest.mark.parametrize("known", [None, "BatchHost="])
def test_no_step_on_the_batch_host_where_slurm_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch)
    job = None if known is None else parse_job(LINE.replace("BatchHost=n0", known))
    monkeypatch.setattr(slurm, "query", lambda _id: job)
    with pytest.raises(SchedulerError, match="does not say on which node the batch script of job 17 runs"):
        slurm.run_beside("17", ["env"], nodes=1)


@pytest.mark.parametrize("comment", ["", "relayrun:starts-only-if-job=x-fails,failed-begins=1", "a word"])
def test_a_fallback_job_without_its_order_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comment: str
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, squeue=f"echo '{comment}'")
    with pytest.raises(SchedulerError, match="the comment of job 17 does not say which job it stands behind"):
        slurm.fallback_jobs.order("17")


@pytest.mark.parametrize(("mode", "asked"), [("requeue", True), ("singleton", True), ("requeue", False)])
def test_a_job_that_slurm_would_requeue_otherwise_than_the_plan_is_changed(
    monkeypatch: pytest.MonkeyPatch, mode: str, *, asked: bool
) -> None:
    """A site may forbid it, which only a chain of one job cannot do without."""
    slurm, changes = Slurm(patience=0), list[str]()

    def refuse(_job: str, *words: str) -> None:
        changes.extend(words)
        raise SchedulerError("Access denied")

    monkeypatch.setattr(slurm, "update_job", refuse)
    plan = plan_with(Plan.of(PLAN), mode=mode, auto_requeue=True)
    job = replace(parse_job(LINE), id="7", name=plan.job_name, requeue=not asked)
    if asked and mode == "requeue":
        with pytest.raises(SchedulerError, match="Access denied"):
            slurm.adopt(job, plan)
    else:
        slurm.adopt(job, plan)
    assert changes == (["Requeue=1"] if asked else [])


@pytest.mark.parametrize("outlives", [False, True])
def test_the_ranks_of_a_job_that_outlives_nodes_have_a_step_of_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, outlives: bool
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, scontrol="printf 'n0\\nn1\\n'")
    monkeypatch.setattr(slurm, "_resolvable", lambda node: node)
    plan = plan_with(Plan.of(PLAN), spare_nodes=int(outlives))
    if outlives:
        plan = plan_with(plan, recovery="node")
    assert plan.outlives_nodes is outlives
    found = slurm.rank_launch(plan, replace(parse_job(LINE), nodes="n[0-1]", num_nodes=2), leave_signal=None)
    assert [*found.nodes] == (["n0", "n1"] if outlives else [])
    assert ("--overlap" in found.command) is outlives
    assert f"--nodes={1 if outlives else 2}" in found.command


@pytest.mark.parametrize("refused", [False, True])
def test_a_fallback_job_has_one_node_where_a_site_takes_such_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    """sbatch queues also what no partition ever lets start."""
    slurm, queued = Slurm(patience=0), list[list[str]]()

    def order(_words: list[str]) -> None:
        if refused:
            raise SchedulerError("sbatch: error: every job needs GPUs")

    monkeypatch.setattr(slurm, "order", order)
    monkeypatch.setattr(slurm, "partitions", list)
    monkeypatch.setattr(slurm, "submit_once", lambda words, **_: queued.append(words) or "8")
    options = {"nodes": "4", "gpus-per-node": "8", "account": "ada", "time": "600"}
    order_ = FallbackOrder(job_id="7", failed_begins=0)
    assert slurm.fallback_jobs.queue(tmp_path / "s.sbatch", name="n", order=order_, options=options, limit=10) == "8"
    assert ("--gpus-per-node=8" in queued[0], "--account=ada" in queued[0]) == (refused, True)
