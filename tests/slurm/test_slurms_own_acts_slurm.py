"""What a real Slurm does by itself or for an operator: it moves a job's end, holds a successor, ends a reservation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relayrun.control.rundir.run import stop_reason
from relayrun.control.scheduler.slurm import Slurm
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture

from .cluster import TestCluster
from .conftest import MakeCluster, installed_version
from .test_chain import ends, logs, wait_for_end, wait_for_iteration
from .test_law_slurm import ONE_NODE, begin_of, pending, program, start
from .test_sentinel_slurm import look_twice
from .test_status_slurm import status

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

LATE = {"time_limit": 120, "grace_period": 20.0, "signal_seconds": 15}
"""A job of two minutes whose ranks leave 20 s before its end."""


def order(cluster: TestCluster, *words: str) -> None:
    """An operator's command; a controller that is busy with the job takes it a little later."""
    cluster.wait_until(
        lambda: cluster.run(["scontrol", *words], check=False).returncode == 0, timeout=60, what=words[0]
    )


def test_a_job_whose_time_is_extended_uses_it(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run("--steps=280", "--step-seconds=0.5", total_steps=280, **ONE_NODE | LATE)
    job = start(cluster, run, "--time=2")
    wait_for_iteration(cluster, run)
    order(cluster, "update", f"JobId={job}", "TimeLimit=10")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    begin, (end,) = begin_of(run, 1), ends(run)
    assert begin.job_end_time is not None
    assert end.end_time is not None
    assert end.end_time > begin.job_end_time
    changed = run.attempt(1).job_end_time(begin)
    assert changed is not None
    assert changed == pytest.approx(begin.job_end_time + 480, abs=5)


def test_ranks_save_before_a_maintenance_that_is_announced_while_they_train(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    run, plan = make_run("--steps=400", "--step-seconds=0.5", total_steps=400, **ONE_NODE | {"grace_period": 20.0})
    job = start(cluster, run)
    wait_for_iteration(cluster, run)
    upkeep = ["reservationname=upkeep", "starttime=now+150seconds", "duration=60", "nodes=ALL", "users=root"]
    order(cluster, "create", "reservation", *upkeep, "flags=maint,ignore_jobs")
    begins = re.search(r" StartTime=(\S+)", cluster.run(["scontrol", "show", "reservation", "-o", "upkeep"]).stdout)
    assert begins is not None
    cluster.wait_until(run.attempt(1).end.exists, timeout=240, what="the end of the attempt")
    (end,) = ends(run)
    assert end.cause == "saved", logs(run)
    assert end.durable_iteration > 0
    assert "maintenance upkeep begins" in logs(run)
    cluster.wait_job(job)
    assert cluster.job(job)["JobState"] == "COMPLETED"
    assert cluster.job(job)["EndTime"] < begins[1]
    order(cluster, "delete", "reservationname=upkeep")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)


def test_a_successor_that_slurm_holds_after_a_failed_prolog_is_released(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    cluster, sick = make_cluster(), tmp_path / "sick"
    with cluster.conf.open("a") as conf:
        conf.write(f"Prolog={program(tmp_path, 'prolog', f'[[ ! -e {sick} ]] || {{ rm -f {sick}; exit 1; }}')}\n")
    cluster.run(["scontrol", "reconfigure"])
    run, plan = make_run("--steps=60", total_steps=60, **ONE_NODE)
    first = start(cluster, run)
    wait_for_iteration(cluster, run)
    (second,) = pending(cluster, plan)
    sick.touch()
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    cluster.wait_until(lambda: "held" in cluster.job(second)["Reason"].lower(), what="Slurm holds the successor")
    found = status(cluster, run)
    assert (found.state, found.go_on) == ("blocked", f"scontrol release {second}")
    assert f"Slurm held job {second} since its launch failed on a node; it was released" in look_twice(cluster, run)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert begin_of(run, 2).job_id == second


def test_a_successor_whose_reservation_is_gone_is_blocked_and_not_waited_for(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    run, plan = make_run("--steps=1000", "--step-seconds=0.2", total_steps=1000, **ONE_NODE)
    first = start(cluster, run)
    wait_for_iteration(cluster, run)
    (second,) = pending(cluster, plan)
    where = ["reservationname=camp", "starttime=now", "duration=120", "users=root", "nodes=n3"]
    order(cluster, "create", "reservation", *where)
    order(cluster, "update", f"JobId={second}", "ReservationName=camp")
    order(cluster, "update", "reservationname=camp", "endtime=now+5seconds")
    cluster.wait_until(
        lambda: [job.state for job in cluster.queue() if job.id == second] == ["RESV_DEL_HOLD"],
        timeout=200,
        what="hold",
    )
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    cluster.wait_until(lambda: stop_reason(run), timeout=300, what="STOP")
    reason = stop_reason(run) or ""
    assert second in reason or "reservation camp ended" in reason, reason
    assert "reservation" in reason
    assert "cancelled" not in reason
    assert [end.cause for end in ends(run)] == ["saved"], logs(run)
    cluster.wait_until(lambda: not cluster.queue(), timeout=200, what="an empty queue")


def test_who_ended_a_job_is_known_while_its_batch_script_lives(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer Slurm says it in JSON; 22.05 by the reason alone."""
    deaf = "trap '' TERM; for each in $(seq 200); do sleep 1; done"
    limited, killed = (cluster.sbatch(["--output=/dev/null", "--time=1", f"--wrap={deaf}"]) for _ in range(2))
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    slurm = Slurm(patience=30.0)
    for job, word in ((killed, "CANCELLED"), (limited, "TIMEOUT")):
        cluster.wait_running(job)
        if job == killed:
            cluster.run(["scancel", job])
        cluster.wait_until(lambda job=job: cluster.job(job)["JobState"] == "COMPLETING", 200, 0.1, "its end")  # type: ignore[misc]
        monkeypatch.setenv("SLURM_JOB_ID", job)
        beside = slurm._states_beside_completing(job)
        assert slurm.cancelled(job, nodes=cluster.job(job)["NodeList"]) is (job == killed)
        assert beside == ([] if " 22.05." in installed_version() else [word])


@pytest.mark.skipif(
    " 22.05." in installed_version(), reason="this version refuses --cpus-per-gpu where no GPU is bound"
)
def test_processors_may_be_asked_for_by_the_gpu(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    options = {"cpus-per-gpu": "2", "gpus-per-node": "1"}
    run, plan = make_run("--steps=10", total_steps=10, cpus_per_task=2, sbatch_options=options, **ONE_NODE)
    job = start(cluster, run)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    assert "value exceeds that of job" not in logs(run)
    assert cluster.job(job)["NumCPUs"] == "2"
