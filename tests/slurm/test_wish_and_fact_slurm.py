"""What a real Slurm does to a job is no wish of the next one; what a person changed in a waiting job is."""

from __future__ import annotations

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.run import stop_reason
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.watch.status import queue, run_status
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture

from .cluster import TestCluster
from .conftest import MakeCluster
from .test_chain import ends, logs, wait_for_end, wait_for_iteration
from .test_fallback_slurm import WITH_FALLBACK, fallback_jobs, start
from .test_law_slurm import begin_of, pending

pytestmark = pytest.mark.slurm

FILLED_IN = """
function slurm_job_submit(job, partitions, uid)
  if job.partition ~= nil then
    slurm.log_user("Please do not give a partition: it follows from your request")
    return slurm.ERROR
  end
  job.partition = "debug"
  return slurm.SUCCESS
end

function slurm_job_modify(job, known, partitions, uid)
  return slurm.SUCCESS
end
"""


@pytest.mark.long
def test_a_site_that_chooses_the_partition_and_refuses_one_that_is_given(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = make_cluster()
    (cluster.conf.parent / "job_submit.lua").write_text(FILLED_IN)
    with cluster.conf.open("a") as conf:
        conf.write("JobSubmitPlugins=lua\n")
    cluster.stop_ctld()
    cluster.start_ctld()
    cluster.wait_until(lambda: all(cluster.node_state(f"n{each}") == "IDLE" for each in range(4)), what="idle nodes")
    run, plan = make_run("--steps=40", total_steps=40, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    wait_for_iteration(cluster, run)
    assert len(pending(cluster, plan)) == len(fallback_jobs(cluster, plan)) == 1, logs(run)
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)


def change(cluster: TestCluster, job: str, *fields: str) -> None:
    """26.05 says `Resource temporarily unavailable` while its controller is busy with a job."""
    command = ["scontrol", "update", f"JobId={job}", *fields]
    cluster.wait_until(
        lambda: cluster.run(command, check=False).returncode == 0, timeout=60, what="the change of a job"
    )


def test_a_change_of_the_waiting_job_is_kept_and_its_time_limit_is_not(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, plan = make_run("--steps=60", total_steps=60, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    wait_for_iteration(cluster, run)
    (second,) = pending(cluster, plan)
    given = cluster.job(second)["TimeLimit"]
    change(cluster, second, "Partition=low", "TimeLimit=1")
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_iteration(cluster, run, attempt=2)
    (third,) = cluster.wait_until(lambda: pending(cluster, plan), what="the third job")
    known = cluster.job(third)
    assert (known["Partition"], known["TimeLimit"]) == ("low", given)
    assert begin_of(run, 2).options["time"] == "00:01:00"
    found = run_status.read_run_status(run, queue.query_queue(run), now=0.0)
    assert found.changed_options == [f"partition is low instead of debug since job {second}"]
    change(cluster, third, "Partition=debug")
    cluster.run(["scancel", "--signal=USR2", "--batch", second])
    wait_for_iteration(cluster, run, attempt=3)
    found = run_status.read_run_status(run, queue.query_queue(run), now=0.0)
    assert found.changed_options == []
    wait_for_end(cluster, run, plan)
    assert (stop_reason(run) or "").endswith("is saved"), logs(run)


@pytest.mark.long
def test_a_requeued_job_does_not_keep_a_lowered_time_limit(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, plan = make_run("--steps=40", total_steps=40, mode="requeue", **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    wait_for_iteration(cluster, run)
    given = cluster.job(first)["TimeLimit"]
    change(cluster, first, "TimeLimit=2")
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    second = begin_of(run, 2).job_id
    assert second != first
    assert cluster.job(second)["TimeLimit"] == given


@pytest.mark.long
def test_a_job_that_was_queued_before_a_change_was_known_is_replaced(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, plan = make_run("--steps=100000", total_steps=100_000, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    wait_for_iteration(cluster, run)
    (second,) = pending(cluster, plan)
    change(cluster, second, "Partition=high")
    early = scheduler_for_plan(plan, run).submit(
        plan, run.job_script, options={}
    )  # as the end of a job in a hurry does
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_iteration(cluster, run, attempt=2)
    (third,) = cluster.wait_until(lambda: pending(cluster, plan), what="the third job")
    assert (third != early, cluster.job(third)["Partition"]) == (True, "high"), logs(run)
    assert cluster.job(early)["JobState"] == "CANCELLED"
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, plan)
    assert ends(run)[-1].cause == "exit", logs(run)
