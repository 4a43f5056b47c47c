"""The chain on a real Slurm: real jobs, signals and time limits around the stand-in program."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from relayrun.control.chain.excluded_nodes import read_node_failures
from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptStart
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.error_lines import expand_nodelist
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import SchedulerError
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture

from .cluster import TestCluster

pytestmark = pytest.mark.slurm

SLURM = {
    "scheduler": "slurm",
    "nodes": 2,
    "ntasks_per_node": 1,
    "time_limit": 600,
    "environment": {"MASTER_ADDR": "127.0.0.1"},
}


def start(cluster: TestCluster, run: Run, *options: str) -> str:
    (run.path.parent / "logs").mkdir(exist_ok=True)
    return cluster.sbatch([*options, run.job_script])


def wait_for_end(cluster: TestCluster, run: Run, plan: Plan, timeout: float = 600) -> None:
    """Until no job of the chain is left; never more than one pending job on the way."""

    def over() -> bool:
        jobs = [job for job in cluster.queue() if job.name == plan.job_name]
        pending = [job for job in jobs if job.state == "PENDING"]
        assert len(pending) <= 1, jobs
        return not jobs

    cluster.wait_until(over, timeout=timeout, interval=0.5)


def ends(run: Run) -> list[AttemptEnd]:
    return [end for number in run.attempt_numbers() if (end := AttemptEnd.read(run.attempt(number).end)) is not None]


def logs(run: Run) -> str:
    return "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted((run.path.parent / "logs").glob("*")))


def wait_for_iteration(cluster: TestCluster, run: Run, attempt: int = 1) -> None:
    cluster.wait_until(lambda: run.attempt(attempt).metrics.exists(), timeout=600, interval=0.2)


def test_signals_carry_a_run_through_its_jobs_until_it_is_done(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run("--steps=60", total_steps=60, **SLURM)
    start(cluster, run)
    wait_for_iteration(cluster, run)
    time.sleep(1)
    cluster.run(["scancel", "--signal=USR2", "--batch", AttemptStart.read(run.attempt(1).begin).job_id])  # type: ignore[union-attr]
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert ends(run)[0].reason in ("SIGUSR2", "stop file")
    assert resume_point(run).iteration == 60
    assert (stop_reason(run) or "").startswith("the last iteration, 60, is saved")


def test_options_of_the_command_line_hold_for_successors(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run("--steps=1000", total_steps=1000, **SLURM)
    given = {
        "nodes": "1",
        "time": "5",
        "partition": "high",
        "exclude": "n3",
        "mem": "100M",
        "cpus-per-task": "2",
        "gpus-per-node": "3",
    }
    start(cluster, run, *(f"--{name}={value}" for name, value in given.items()))
    wait_for_iteration(cluster, run)
    for attempt in (1, 2):
        begin = AttemptStart.read(run.attempt(attempt).begin)
        assert begin is not None
        job = cluster.job(begin.job_id)
        limit = (
            "00:05:00" if attempt == 1 else "00:10:00"
        )  # the plan's: what Slurm gave a job is no wish of the next one
        assert (job["NumNodes"].split("-")[0], job["TimeLimit"], job["Partition"]) == ("1", limit, "high"), job
        assert (job["ExcNodeList"], job["MinMemoryNode"], job["CPUs/Task"]) == ("n3", "100M", "2"), job
        assert job["TresPerNode"] in ("gres:gpu:3", "gres/gpu:3"), job
        if attempt == 1:
            cluster.run(["scancel", "--signal=USR2", "--batch", begin.job_id])
            wait_for_iteration(cluster, run, attempt=2)
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, plan)
    assert ends(run)[-1].cause == "exit", logs(run)


def test_cancel_stops_the_chain_and_touches_nothing_else(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    other = cluster.sbatch(["--job-name=other", "--wrap=sleep 100"])
    run, plan = make_run("--steps=1000", total_steps=1000, **SLURM)
    twin, twin_plan = make_run("--steps=1000", folder="twin", total_steps=1000, **SLURM)
    assert twin_plan.job_name != plan.job_name
    start(cluster, run)
    start(cluster, twin)
    wait_for_iteration(cluster, run)
    wait_for_iteration(cluster, twin)
    cluster.run(["scancel", AttemptStart.read(run.attempt(1).begin).job_id])  # type: ignore[union-attr]
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["cancelled"], logs(run)
    # said by the job itself, or by its successor, which starts in the same second
    assert stop_reason(run) in ("the job was cancelled", "the job before this one was cancelled")
    assert not twin.stop.exists()
    assert [job.state for job in cluster.queue() if job.name == twin_plan.job_name] != []
    triggers.touch_trigger(twin, "exit")
    wait_for_end(cluster, twin, twin_plan)
    assert json.loads((twin.triggers / "exit.done").read_text())["result"] == "saved"
    assert cluster.job(other)["JobState"] == "RUNNING"
    cluster.run(["scancel", other])


@pytest.mark.parametrize("folder", ["with blank", "it's", 'double"quote', "dollar$HOME `id`", "ünï→code", "50%x"])
def test_any_run_directory_name_works(cluster: TestCluster, make_run: MakeRun, folder: str, tmp_path: Path) -> None:  # noqa: F811
    log_folder = tmp_path / folder / "logs"
    run, plan = make_run("--steps=2", folder=folder, total_steps=2, log_folder=str(log_folder), **SLURM)
    log_folder.mkdir()
    start(cluster, run)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], sorted(tmp_path.rglob("*"))
    assert any(path.suffix == ".err" and path.stat().st_size for path in log_folder.iterdir())


def dies_twice_on_n1(cluster: TestCluster, make_run: MakeRun, *, exclude: str) -> Run:  # noqa: F811
    """A chain whose first two attempts fail there, to its end."""
    run, plan = make_run("--steps=60", "--die-on=n1", total_steps=60, max_failed_attempts=5, **SLURM)
    start(cluster, run, f"--exclude={exclude}")
    for attempt in (1, 2):
        cluster.wait_until(run.attempt(attempt).end.exists, timeout=600)
        hurry(cluster, plan)
    wait_for_end(cluster, run, plan)
    return run


def test_a_node_that_is_blamed_twice_is_left_out_of_the_next_job(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run = dies_twice_on_n1(cluster, make_run, exclude="n3")
    causes = [end.cause for end in ends(run)]
    assert causes == ["failed", "failed", "done"], logs(run)
    assert [strike.node for strike in read_node_failures(run)] == ["n1", "n1"]
    begins = [AttemptStart.read(run.attempt(number).begin) for number in run.attempt_numbers()]
    # the third job waited behind the second one, and was changed: Slurm keeps such a list as it was given
    assert [begin.options.get("exclude") for begin in begins if begin] == ["n3", "n3", "n1,n3"]


@pytest.mark.long
def test_a_node_that_nobody_can_replace_is_used_again(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    """Without it the third job would wait for ever, with no word from Slurm but that it waits."""
    run = dies_twice_on_n1(cluster, make_run, exclude="n2,n3")
    assert [end.cause for end in ends(run)] == ["failed", "failed", "done"], logs(run)
    begin = AttemptStart.read(run.attempt(3).begin)
    assert begin is not None
    assert (begin.nodes, expand_nodelist(begin.options["exclude"])) == ("n[0-1]", ["n2", "n3"])
    assert "without n1 this job has too few nodes that are up" in logs(run)


@pytest.mark.long
def test_a_job_without_requeue_becomes_one_that_queues_itself_again(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run("--steps=60", total_steps=60, mode="requeue", **SLURM)
    job = start(cluster, run, "--no-requeue", "--job-name=from-a-header")  # as the first job of a Bash launcher
    wait_for_iteration(cluster, run)
    assert cluster.job(job)["Requeue"] == "1"
    assert cluster.job(job)["JobName"] == plan.job_name
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    cluster.wait_until(lambda: run.stop.exists() and not cluster.queue(), timeout=360)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert cluster.job(job)["Restarts"] == "1"


def test_cancel_stops_a_job_that_would_queue_itself_again(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run("--steps=1000", total_steps=1000, mode="requeue", **SLURM)
    job = start(cluster, run)
    guard = run.attempt(1).guard_log
    cluster.wait_until(guard.exists, timeout=600)
    time.sleep(1)
    cluster.run(["scancel", job])
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["cancelled"], logs(run)
    assert cluster.job(job)["Restarts"] == "0"
    assert "queued again" not in guard.read_text()


@pytest.mark.long
def test_a_job_with_less_time_than_its_lead_trains_and_the_next_one_has_the_plans(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    """As with `sbatch --time` on the command line, `--time-min`, or `scontrol update TimeLimit` of a waiting job."""
    run, plan = make_run(
        "--steps=10000", total_steps=10000, grace_period=600.0, signal_seconds=540, **SLURM | {"time_limit": 3600}
    )
    start(cluster, run, "--time=1")  # Slurm's warning comes within half a minute
    wait_for_iteration(cluster, run, attempt=2)
    begun = [AttemptStart.read(run.attempt(number).begin) for number in (1, 2)]
    assert [begin.grace_period for begin in begun if begin is not None] == [30.0, 600.0]
    assert cluster.job(begun[1].job_id)["TimeLimit"] == "01:00:00"  # type: ignore[union-attr]
    (record,) = ends(run)
    assert record.reason.startswith("time limit near"), logs(run)
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, plan)


@pytest.mark.long
def test_ranks_save_before_a_reservation_that_was_made_shorter_ends(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, _ = make_run("--steps=10000", total_steps=10000, fallback_job=True, **SLURM)
    camp, where = "reservationname=camp", "nodes=n2,n3"
    cluster.run(["scontrol", "create", "reservation", camp, "starttime=now", "duration=120", "users=root", where])
    start(cluster, run, "--reservation=camp")
    wait_for_iteration(cluster, run)
    cluster.run(["scontrol", "update", camp, "endtime=now+40seconds"])
    cluster.wait_until(lambda: run.stop.exists() and not cluster.queue(), timeout=240)
    (record,) = ends(run)
    assert record.cause == "saved", logs(run)
    assert record.durable_iteration > 0
    assert re.match(
        r"reservation camp (ended|ends at .*); to go on without it: relayrun resume", stop_reason(run) or ""
    )


@pytest.mark.long
def test_ranks_that_hang_until_the_time_limit_do_not_end_a_job_that_queues_itself_again(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    """The ranks stand still, and the batch script waits for them until Slurm kills all."""
    run, _ = make_run(
        "--stop-rank=1",
        "--stop-at=5",
        mode="requeue",
        max_failed_attempts=2,
        hang_timeout=600,
        **SLURM | {"time_limit": 60},
    )
    job = start(cluster, run)
    cluster.wait_until(lambda: run.stop.exists() and not cluster.queue(), timeout=400)
    assert len(ends(run)) == 2, logs(run)
    assert {end.cause for end in ends(run)} <= {"unknown", "failed"}, logs(run)  # SIGKILL may come to the ranks first
    assert (stop_reason(run) or "").startswith("2 attempts in a row without a new checkpoint")
    assert cluster.job(job)["Restarts"] in ("1", "2")


def test_a_job_that_is_queued_again_already_is_left_as_it_is(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard and the batch script may both ask for it."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    job = cluster.sbatch(["--requeue", "--begin=now+1000", "--wrap=true"])
    Slurm(patience=2).requeue(job)
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(["scancel", job])
    with pytest.raises(SchedulerError, match="Invalid job id"):
        Slurm(patience=2).requeue("987654")


def hurry(cluster: TestCluster, plan: Plan) -> None:
    """Let a successor that waits for its time start now."""
    for job in cluster.queue():
        if job.name == plan.job_name and job.state == "PENDING":
            cluster.run(["scontrol", "update", f"JobId={job.id}", "StartTime=now"], check=False)
