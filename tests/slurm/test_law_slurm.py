"""A chain is never silent, on a real Slurm: faults of nodes, of Slurm's commands and of the run directory."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptStart
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.slurm_commands import parse_timestamp
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.watchers import mounted, undone_by

from .cluster import TestCluster
from .conftest import MakeCluster
from .test_chain import SLURM, ends, hurry, logs, wait_for_end, wait_for_iteration

pytestmark = pytest.mark.slurm

ONE_NODE = SLURM | {"nodes": 1}


def quick(run: Run, **values: int) -> None:
    """Let the job script wait less between two tries."""
    text = run.job_script.read_text()
    for name, value in ({"BEGIN_BACKOFF": 1} | values).items():
        text = re.sub(rf"RELAYRUN_{name}=\d+", f"RELAYRUN_{name}={value}", text)
    run.job_script.write_text(text)


def start(cluster: TestCluster, run: Run, *options: str, commands: Path | None = None) -> str:
    """Submit the first job; `commands`: a folder of commands that stand before Slurm's own."""
    (run.path.parent / "logs").mkdir(exist_ok=True)
    env = {"PATH": f"{commands}:{cluster.env['PATH']}"} if commands else None
    return cluster.sbatch([*options, run.job_script], env=env)


def program(folder: Path, name: str, text: str) -> Path:
    """A script in `folder/bin`."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def host_python(folder: Path, at_begin: str) -> str:
    """A Python of the batch script that does `at_begin` (Bash) before it starts `begin`."""
    text = f'if [[ " $* " == *" relayrun.control.chain begin "* ]]; then\n{at_begin}\nfi\nexec "{sys.executable}" "$@"'
    return str(program(folder, "host-python", text))


def begin_of(run: Run, attempt: int) -> AttemptStart:
    begin = AttemptStart.read(run.attempt(attempt).begin)
    assert begin is not None
    return begin


def pending(cluster: TestCluster, plan: Plan) -> list[str]:
    return [job.id for job in cluster.queue() if job.name == plan.job_name and job.state == "PENDING"]


def test_a_node_where_the_supervisor_cannot_start_does_not_end_the_chain(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    python = host_python(
        tmp_path, '[[ "${SLURMD_NODENAME}" != n0 ]] || { echo "No module named relayrun" >&2; exit 1; }'
    )
    run, plan = make_run("--steps=10", total_steps=10, host_python=python, **ONE_NODE)
    quick(run)
    job = start(cluster, run, "--exclude=n3")
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    known = cluster.job(job)
    assert (known["Restarts"], known["ExcNodeList"]) == ("1", "n3,n0"), known
    assert begin_of(run, 1).job_id == job
    assert begin_of(run, 1).options["exclude"] == "n3"  # the next jobs need not leave n0 out
    assert known["Comment"] == f"relayrun:log={begin_of(run, 1).log}"
    assert known["Requeue"] == "0"  # its successor waited behind it


@pytest.mark.long
def test_a_job_that_queues_itself_again_may_have_a_node_again_where_its_begin_failed(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    once = tmp_path / "once"
    python = host_python(tmp_path, f'[[ -e "{once}" ]] || {{ echo "${{SLURMD_NODENAME}}" >"{once}"; exit 1; }}')
    run, plan = make_run("--steps=60", total_steps=60, mode="requeue", host_python=python, **ONE_NODE)
    quick(run)
    job = start(cluster, run, "--exclude=n3")
    wait_for_iteration(cluster, run)
    cluster.wait_until(lambda: cluster.job(job)["Comment"].startswith("relayrun:begin-failed=0@"), what="the comment")
    assert cluster.job(job)["ExcNodeList"] == f"n3,{once.read_text().strip()}"
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert cluster.job(job)["Restarts"] == "2"
    assert cluster.job(job)["ExcNodeList"] == "n3"
    assert begin_of(run, 2).options["exclude"] == "n3"


def test_a_supervisor_that_never_starts_ends_the_chain_with_a_reason(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    run, plan = make_run(host_python=host_python(tmp_path, "exit 9"), **ONE_NODE)
    quick(run, MAX_FAILED_BEGINS=3)
    job = start(cluster, run)
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    assert re.fullmatch(rf"begin failed in job {job} on n\d \(exit code 9\), 3 times in a row", stop_reason(run) or "")
    known = cluster.job(job)
    assert known["Restarts"] == "2"
    assert known["Comment"].startswith("relayrun:begin-failed=3@n"), known


def test_without_auto_requeue_a_job_that_cannot_begin_stays_ended(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    run, plan = make_run(host_python=host_python(tmp_path, "exit 9"), auto_requeue=False, **ONE_NODE)
    job = start(cluster, run)
    wait_for_end(cluster, run, plan)
    assert cluster.job(job)["Restarts"] == "0"
    assert (stop_reason(run) or "").startswith(f"begin failed in job {job} on n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, at `run`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=40m", "tmpfs"):
        yield folder


def test_a_run_directory_that_is_read_only_at_a_job_boundary_does_not_end_the_chain(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    small_disk: Path,
) -> None:
    run, plan = make_run("--steps=10", folder="disk/run", total_steps=10, **ONE_NODE)
    quick(run)
    logs_folder = run.path.parent.parent / "logs"
    logs_folder.mkdir()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    job = cluster.sbatch([run.job_script])
    cluster.wait_until(
        lambda: cluster.job(job).get("Comment", "").startswith("relayrun:begin-failed=2"), what="2 tries"
    )
    subprocess.run([word.replace("ro", "rw") if word == "remount,ro" else word for word in remount], check=True)
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"]


@pytest.fixture
def disk_that_hangs(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, at `disk`, which `fsfreeze` makes hang: not even SIGKILL ends who writes to it."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(40 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with undone_by("fsfreeze", "-u", folder), mounted(folder, "-o", "loop", str(image)):
        yield folder
        subprocess.run(["fsfreeze", "-u", str(folder)], check=False, capture_output=True)


@pytest.mark.long
@pytest.mark.parametrize("heard", ["USR2", "TERM"])
def test_a_run_directory_that_hangs_until_the_time_limit_does_not_end_the_chain(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    disk_that_hangs: Path,
    heard: str,
) -> None:
    """The signal before the limit is heard, or where it is lost the one at the limit."""
    cluster = make_cluster(kill_wait=30)
    lead = {"signal_seconds": 20} if heard == "USR2" else {}
    run, plan = make_run("--steps=10", folder="disk/run", total_steps=10, **ONE_NODE | {"time_limit": 60} | lead)
    quick(run)
    text = run.job_script.read_text()
    if heard == "TERM":
        text = text.replace("#SBATCH --signal=", "# without ")
    run.job_script.write_text(text)
    (run.path.parent.parent / "logs").mkdir()
    subprocess.run(["fsfreeze", "-f", str(disk_that_hangs)], check=True)
    job = cluster.sbatch(["--time=1", run.job_script])
    cluster.wait_until(
        lambda: cluster.job(job).get("Comment", "").startswith("relayrun:begin-failed=1"), timeout=200, what="a try"
    )
    subprocess.run(["fsfreeze", "-u", str(disk_that_hangs)], check=True)
    cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=10"])
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    said = "".join(path.read_text() for path in (run.path.parent.parent / "logs").glob("*.err"))
    assert f"begin, which was not done at SIG{heard}, failed in job {job} on n" in said
    assert [end.cause for end in ends(run)] == ["done"], said
    assert cluster.job(job)["Restarts"] == "1"


@pytest.mark.long
def test_a_job_that_is_preempted_inside_begin_goes_on(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    python = host_python(tmp_path, f'[[ -e "{here}" ]] || {{ touch "{here}"; sleep 1000; }}')
    run, plan = make_run("--steps=10", total_steps=10, host_python=python, **ONE_NODE)
    quick(run)
    job = start(cluster, run, "--partition=low")
    cluster.wait_until(here.exists, what="begin")
    other = cluster.sbatch(["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"])
    cluster.wait_job(other)
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    assert begin_of(run, 1).job_id == job


def test_a_log_folder_that_is_away_does_not_end_the_chain(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Slurm would not even start a job whose output file it cannot open, and nobody would say so."""
    run, plan = make_run("--steps=60", total_steps=60, log_folder=str(tmp_path / "file/logs"), **ONE_NODE)
    (tmp_path / "file").write_text("no folder")
    job = start(cluster, run)
    wait_for_iteration(cluster, run)
    log = run.path / f"{plan.job_name}-{job}.err"
    cluster.wait_until(lambda: cluster.job(job).get("Comment") == f"relayrun:log={log}", what="the comment")
    assert begin_of(run, 1).log == str(log)
    assert f"this log is in {run.path} of n" in log.read_text()
    (tmp_path / "file").unlink()
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], log.read_text()
    second = tmp_path / "file/logs" / f"{plan.job_name}-{begin_of(run, 2).job_id}.err"  # there again, with its folder
    assert begin_of(run, 2).log == str(second)


@pytest.mark.long
def test_a_job_that_stays_completing_is_no_successor(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    slow = tmp_path / "slow"
    slow.touch()
    epilog = program(tmp_path, "epilog", f'while [[ -e "{slow}" ]]; do sleep 0.5; done')
    with cluster.conf.open("a") as conf:
        conf.write(f"Epilog={epilog}\n")
    cluster.run(["scontrol", "reconfigure"])
    run, plan = make_run("--steps=1000", total_steps=1000, **SLURM)
    start(cluster, run)
    wait_for_iteration(cluster, run)
    first = begin_of(run, 1).job_id
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_iteration(cluster, run, attempt=2)
    assert cluster.job(first)["JobState"] == "COMPLETING"
    assert len(pending(cluster, plan)) == 1, cluster.queue()
    slow.unlink()
    cluster.run(["scancel", "--me"])


def test_a_submission_that_is_queued_and_reported_as_failed_is_not_repeated(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    sbatch = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    text = (
        f'"{sbatch}" "$@" >/dev/null\necho "sbatch: error: Batch job submission failed: Socket timed out" >&2\nexit 1'
    )
    program(tmp_path, "sbatch", text)
    run, plan = make_run("--steps=60", total_steps=60, **ONE_NODE)
    (run.path.parent / "logs").mkdir()
    env = {"PATH": f"{tmp_path / 'bin'}:{cluster.env['PATH']}"}
    cluster.run([sbatch, run.job_script], env=env)
    wait_for_iteration(cluster, run)
    assert len(pending(cluster, plan)) == 1, cluster.queue()
    cluster.run(["scancel", "--signal=USR2", "--batch", begin_of(run, 1).job_id])
    wait_for_end(cluster, run, plan)  # which refuses more than one pending job
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)


@pytest.mark.long
def test_a_persons_defaults_for_squeue_hide_no_job(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    """Variables that a login shell exports, and sbatch hands on."""
    run, plan = make_run("--steps=60", total_steps=60, **ONE_NODE)
    (run.path.parent / "logs").mkdir()
    job = cluster.sbatch([run.job_script], env={"SQUEUE_STATES": "RUNNING", "SQUEUE_PARTITION": "high"})
    wait_for_iteration(cluster, run)
    assert len(pending(cluster, plan)) == 1
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    wait_for_end(cluster, run, plan)  # which refuses more than one pending job
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert run.attempt_numbers() == [1, 2]


@pytest.mark.long
def test_a_limit_of_one_submitted_job_makes_the_job_queue_itself_again(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    sbatch = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    refuse = '[[ " $* " != *singleton* ]] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }'
    program(tmp_path, "sbatch", f'{refuse}\nexec "{sbatch}" "$@"')
    run, plan = make_run("--steps=60", total_steps=60, **ONE_NODE)
    job = start(cluster, run, commands=tmp_path / "bin")
    wait_for_iteration(cluster, run)
    assert "no successor yet: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit" in logs(run)
    assert cluster.job(job)["Requeue"] == "1"  # nothing else would go on after the loss of its node
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert cluster.job(job)["Restarts"] == "1"


def test_what_a_person_does_to_the_queue_stands(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    held, plan = make_run("--steps=60", "--crash-at=30", total_steps=60, max_failed_attempts=2, **ONE_NODE)
    start(cluster, held)
    waiting = held.attempt(1).successor
    cluster.wait_until(waiting.exists, what="a successor")
    (successor,) = pending(cluster, plan)
    cluster.run(["scontrol", "hold", successor])
    cluster.wait_until(held.attempt(1).end.exists, what="the end of the first attempt")
    cluster.wait_until(lambda: [job.id for job in cluster.queue() if job.name == plan.job_name] == [successor])
    assert cluster.job(successor)["Reason"] in ("JobHeldUser", "JobHeldAdmin"), cluster.job(successor)
    hurry(cluster, plan)
    cluster.run(["scontrol", "release", successor])
    wait_for_end(cluster, held, plan)
    assert [begin_of(held, number).job_id for number in held.attempt_numbers()][1] == successor

    cancelled, plan = make_run("--steps=1000", folder="cancelled", total_steps=1000, **ONE_NODE)
    start(cluster, cancelled)
    wait_for_iteration(cluster, cancelled)
    (successor,) = pending(cluster, plan)
    cluster.run(["scancel", successor])
    cluster.run(["scancel", "--signal=USR2", "--batch", begin_of(cancelled, 1).job_id])
    wait_for_end(cluster, cancelled, plan)
    assert [end.cause for end in ends(cancelled)] == ["saved"]
    assert (stop_reason(cancelled) or "").startswith(f"the successor, job {successor}, was cancelled")


@pytest.mark.long
def test_a_node_that_is_lost_before_anything_is_queued_does_not_end_the_chain(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    """With its batch script, in the middle of `begin`."""
    cluster = make_cluster(node_timeout=10)
    here = tmp_path / "here"
    python = host_python(tmp_path, f'[[ -e "{here}" ]] || {{ echo $$ >"{here}"; sleep 1000; }}')
    run, plan = make_run("--steps=10", total_steps=10, host_python=python, **ONE_NODE)
    job = start(cluster, run)
    cluster.wait_until(lambda: here.exists() and here.read_text().strip(), what="begin")
    node = cluster.job(job)["NodeList"]
    cluster.kill_node(node)
    for pid in job_processes(job):
        os.kill(pid, signal.SIGKILL)
    cluster.wait_until(lambda: stop_reason(run), timeout=300, what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    assert begin_of(run, 1).job_id == job
    assert begin_of(run, 1).nodes != node


def job_processes(job: str) -> list[int]:
    """All processes of a job on this machine, and slurmstepd above them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"SLURM_JOB_ID={job}".encode() in variables or f"slurmstepd: [{job}.".encode() in words:
            found.append(int(entry.name))
    return found


@pytest.mark.long
def test_the_end_of_an_attempt_is_recorded_once(cluster: TestCluster, make_run: MakeRun, tmp_path: Path) -> None:  # noqa: F811
    """`end` is killed; the batch script calls it again."""
    once = tmp_path / "once"
    text = (
        f'if [[ " $* " == *" relayrun.control.chain end "* && ! -e "{once}" ]]; then\n'
        f'  touch "{once}"; kill -KILL $$\nfi\n'
        f'exec "{sys.executable}" "$@"'
    )
    run, plan = make_run(
        "--steps=5", total_steps=5, host_python=str(program(tmp_path, "host-python", text)), **ONE_NODE
    )
    start(cluster, run)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    assert isinstance(ends(run)[0], AttemptEnd)
    assert once.exists()


def relayrun(cluster: TestCluster, *arguments: str | Path) -> str:
    """What a person's command says, on this cluster; it must work."""
    command = [sys.executable, "-m", "relayrun", *map(str, arguments)]
    done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fill(folder: Path) -> None:
    """Take all the room of a file system."""
    with (folder / "others").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(itertools.repeat(bytes(1 << 12)))


def test_cancel_and_status_need_no_room_on_the_disk(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    small_disk: Path,
) -> None:
    run, plan = make_run("--steps=100000", folder="disk/run", total_steps=100_000, **ONE_NODE)
    (run.path.parent.parent / "logs").mkdir()
    job = cluster.sbatch([run.job_script])
    wait_for_iteration(cluster, run)
    cluster.wait_until(lambda: len(cluster.queue()) == 2, what="a successor")
    assert "full:" not in relayrun(cluster, "status", run.path)
    fill(small_disk)
    said = " ".join(relayrun(cluster, "status", run.path).split())
    assert "0 bytes left below" in said
    assert "(nothing was recorded since " in said
    assert "could not be written (No space left on device" in relayrun(cluster, "cancel", run.path)
    wait_for_end(cluster, run, plan)
    assert cluster.job(job)["Restarts"] == "0"
    (small_disk / "others").unlink()
    run.attempt(1).end.unlink(missing_ok=True)  # the end of the job may have found a last block
    replace(plan, submitted_after_attempt=1).write(run.plan)  # as `relayrun resume`
    run.stop.unlink(missing_ok=True)
    (run.triggers / "exit").touch()  # the job begins no attempt
    cluster.sbatch([run.job_script])
    wait_for_end(cluster, run, plan)
    end = ends(run)[0]
    assert end.cause == "cancelled"
    assert end.end_time == parse_timestamp(cluster.job(job)["EndTime"])


@pytest.mark.parametrize("ended", ["by stop", "by the comment of the job alone", "by the trigger"])
def test_a_job_that_cannot_begin_on_a_full_disk_is_stopped(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    small_disk: Path,
    ended: str,
) -> None:
    """It would queue itself again and again, each time with nodes."""
    run, plan = make_run("--steps=10", folder="disk/run", total_steps=10, **ONE_NODE)
    quick(run, BEGIN_BACKOFF=600 if ended == "by stop" else 1)
    (run.path.parent.parent / "logs").mkdir()
    fill(small_disk)
    job = cluster.sbatch(["--hold", run.job_script])
    if ended == "by the comment of the job alone":
        cluster.run(["scontrol", "update", f"JobId={job}", "Comment=relayrun:stopped-by=ada"])
    elif ended == "by the trigger":
        (run.triggers / "exit").touch()
    cluster.run(["scontrol", "release", job])
    if ended == "by stop":
        cluster.wait_until(lambda: cluster.job(job).get("Restarts") == "1", what="a try")
        cluster.wait_until(lambda: cluster.job(job)["JobState"] == "PENDING", what="the next one")
        assert f"cancelled {job}" in relayrun(cluster, "stop", run.path)
    wait_for_end(cluster, run, plan)
    assert cluster.job(job)["Restarts"] == ("1" if ended == "by stop" else "0"), logs(run)
    if ended == "by the comment of the job alone":
        assert cluster.job(job)["Comment"] == "relayrun:stopped-by=ada"


def test_the_guard_leaves_a_job_whose_chain_a_person_has_ended(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run("--steps=100000", total_steps=100_000, mode="requeue", **ONE_NODE)
    job = start(cluster, run)
    cluster.wait_until(lambda: "guarding" in logs_of_guard(run), timeout=240, what="the guard")
    cluster.run(["scontrol", "update", f"JobId={job}", "Comment=relayrun:stopped-by=ada"])
    cluster.run(["scancel", "--signal=KILL", "--batch", job])
    wait_for_end(cluster, run, plan)
    assert cluster.job(job)["Restarts"] == "0"
    assert "the chain ends: stopped by ada" in logs_of_guard(run)


def logs_of_guard(run: Run) -> str:
    log = run.attempt(1).guard_log
    return log.read_text() if log.exists() else ""
