"""Processes of a real Slurm job that stand still, by SIGSTOP or a file system that hangs: no node waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run, stop_reason
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture

from .cluster import ROOT, TestCluster
from .test_chain import ends, logs, wait_for_end, wait_for_iteration
from .test_law_slurm import ONE_NODE, disk_that_hangs, job_processes, logs_of_guard, pending, quick, start  # noqa: F401

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

ENDED_WITHIN = 300.0
"""Seconds for the end of a job with a process that stands still; its time limit is 3000 s."""


def words_of(pid: int, run: Run) -> str:
    """The command line of a process of this run: another cluster's job may have the same id."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return words if str(run.path) in words else ""
    except OSError:
        return ""


def stop_processes(run: Run, job: str, words: Sequence[str]) -> list[int]:
    """SIGSTOP to the processes of a job whose command lines hold one of these words."""
    found = [pid for pid in job_processes(job) if any(word in words_of(pid, run) for word in words)]
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    return found


@pytest.mark.parametrize(
    ("words", "rank", "cause"),
    [
        (("srun --kill-on-bad-exit",), True, "hang"),
        (("srun --kill-on-bad-exit",), False, "done"),
        (("relayrun.control.chain watch",), True, "hang"),
        (("relayrun.control.chain guard",), False, "done"),
    ],
    ids=["srun-and-a-rank", "srun", "watch-and-a-rank", "guard"],
)
def test_a_process_that_is_stopped_holds_no_node_to_the_time_limit(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    words: Sequence[str],
    rank: bool,
    cause: str,
) -> None:
    steps = 1000 if rank else 60
    limits = {"hang_timeout": 10, "max_failed_attempts": 1, "mode": "requeue", "time_limit": 3000}
    run, plan = make_run(f"--steps={steps}", "--step-seconds=0.3", total_steps=steps, **ONE_NODE | limits)
    job = start(cluster, run)
    wait_for_iteration(cluster, run)
    cluster.wait_until(lambda: "guarding" in logs_of_guard(run), timeout=240, what="the guard")
    assert stop_processes(run, job, words)
    if rank:
        assert stop_processes(run, job, ["relay_program.py"])
    began = time.monotonic()
    wait_for_end(cluster, run, plan)
    cluster.wait_job(job)
    assert time.monotonic() - began < ENDED_WITHIN
    assert [end.cause for end in ends(run)] == [cause], logs(run)


def test_a_watch_that_starts_again_leaves_the_job_with_one_guard(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    """Two guards queue a job again twice, and each may queue another job in its place."""
    run, plan = make_run("--steps=100", "--step-seconds=0.3", total_steps=100, **ONE_NODE | {"mode": "requeue"})
    job = start(cluster, run)
    cluster.wait_until(lambda: "guarding" in logs_of_guard(run), timeout=240, what="the guard")
    (watch,) = [pid for pid in job_processes(job) if is_python(pid, run, "relayrun.control.chain watch")]
    os.kill(watch, signal.SIGKILL)
    cluster.wait_until(lambda: "it starts again" in logs(run), timeout=60, what="another watch")
    time.sleep(15)  # it starts after 5 s, and looks at once
    steps = cluster.run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i|%j"]).stdout
    wait_for_end(cluster, run, plan)
    assert steps.count("|relayrun-guard") == 1, steps
    assert logs_of_guard(run).count("guarding") == 1, logs_of_guard(run)


def is_python(pid: int, run: Run, word: str) -> bool:
    """True for a Python process of this run with this word; Bash keeps its words while it starts one."""
    return word in words_of(pid, run) and "python" in os.readlink(f"/proc/{pid}/exe")


@pytest.mark.parametrize("what", ["ranks", "end"])
def test_a_run_directory_that_hangs_while_ranks_train_or_leave_ends_the_job(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    disk_that_hangs: Path,  # noqa: F811
    tmp_path: Path,
    what: str,
) -> None:
    """Neither the watch nor `end` comes back from the file system, and not even SIGKILL ends them."""
    root = tmp_path / "root"
    (root / "launchers/lib").mkdir(parents=True)
    (root / "relayrun").symlink_to(ROOT / "relayrun")
    for script in (ROOT / "launchers/lib").iterdir():
        text = script.read_text().replace("5 * hang_seconds", "20 + hang_seconds").replace("SECONDS=1800", "SECONDS=60")
        (root / "launchers/lib" / script.name).write_text(text)
    changes = ONE_NODE | {"hang_timeout": 10, "package_root": str(root), "time_limit": 3000}
    run, plan = make_run("--steps=2000", "--step-seconds=0.1", folder="disk/run", total_steps=2000, **changes)
    quick(run)
    run.job_script.write_text(run.job_script.read_text().replace("within 150 ", "within 10 "))
    (run.path.parent.parent / "logs").mkdir()
    job = cluster.sbatch([run.job_script])
    wait_for_iteration(cluster, run)
    (second,) = cluster.wait_until(lambda: pending(cluster, plan), what="the successor")
    began = time.monotonic()
    if what == "end":
        cluster.run(["scancel", "--signal=USR2", "--batch", job])
        cluster.wait_until(run.attempt(1).outcome.exists, 60, 0.01, "the outcome")
    subprocess.run(["fsfreeze", "-f", str(disk_that_hangs)], check=True)
    cluster.wait_until(lambda: cluster.job(job)["JobState"] != "RUNNING", timeout=300, what="the end of the job")
    subprocess.run(["fsfreeze", "-u", str(disk_that_hangs)], check=True)
    assert time.monotonic() - began < ENDED_WITHIN
    (run.triggers / "exit").touch()
    wait_for_end(cluster, run, plan)
    assert stop_reason(run) is not None
    said = "".join(path.read_text() for path in (run.path.parent.parent / "logs").glob("*.err"))
    assert "the file system hangs" in said
    assert f"job {second} goes on" in said
