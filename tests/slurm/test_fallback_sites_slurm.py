"""The fallback job on clusters that make it hard: what sites demand of a job, and what happens to the job itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import stop_reason
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture

from .cluster import TestCluster
from .conftest import MakeCluster
from .test_chain import ends, hurry, logs, wait_for_end, wait_for_iteration
from .test_fallback_slurm import (
    WITH_FALLBACK,
    fallback_jobs,
    killed_in_begin,
    next_job,
    no_fallback_job,
    start,
)
from .test_law_slurm import begin_of, host_python, pending, program, small_disk

__all__ = ["small_disk"]

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SITE = """
function slurm_job_submit(job, partitions, uid)
  if %s then
    slurm.log_user("this site demands more of a job")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, known, partitions, uid)
  if %s then
    slurm.log_user("this site lets nobody change a job")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
"""


def demand(cluster: TestCluster, *, submit: str = "false", modify: str = "false") -> None:
    """What a site's job_submit.lua refuses, as conditions in Lua; Slurm reads a newer file again."""
    file = cluster.conf.parent / "job_submit.lua"
    newer = file.stat().st_mtime + 2 if file.exists() else None
    file.write_text(SITE % (submit, modify))
    if newer is not None:
        os.utime(file, (newer, newer))


def waiting_jobs(cluster: TestCluster, plan: Plan, killed: str) -> list[str]:
    """The jobs of the chain that wait when one has been killed."""
    cluster.wait_until(lambda: cluster.job(killed)["JobState"] == "FAILED", what=f"the death of job {killed}")
    return cluster.wait_until(lambda: pending(cluster, plan), what="the next job")


@pytest.fixture(scope="module")
def demanding(make_cluster: MakeCluster) -> TestCluster:
    """A cluster whose jobs a script of the site accepts or refuses."""
    cluster = make_cluster()
    demand(cluster)
    with cluster.conf.open("a") as conf:
        conf.write("JobSubmitPlugins=lua\n")
    cluster.stop_ctld()
    cluster.start_ctld()
    cluster.wait_until(
        lambda: all(cluster.node_state(f"n{number}") == "IDLE" for number in range(4)), what="idle nodes"
    )
    cluster.run(["scontrol", "create", "PartitionName=large", "Nodes=ALL", "MinNodes=2", "MaxTime=5"])
    return cluster


@pytest.mark.parametrize(
    ("refused", "options", "has"),
    [
        ("job.tres_per_node == nil", {"gres": "gpu:2"}, {"TresPerNode": "gres:gpu:2"}),
        ("job.features == nil", {"constraint": "test"}, {"Features": "test"}),
        ("job.min_nodes < 2", {}, {"NumNodes": "2"}),
        ("false", {"partition": "large"}, {"NumNodes": "2", "Partition": "large", "TimeLimit": "00:05:00"}),
    ],
    ids=["gres", "constraint", "nodes", "partition"],
)
def test_a_site_that_demands_something_of_every_job(
    demanding: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    options: dict[str, str],
    has: dict[str, str],
) -> None:
    """The fallback job has it too, and goes on with a chain whose first batch script is killed in `begin`."""
    demand(demanding, submit=refused)
    changes = WITH_FALLBACK | {"nodes": 2, "time_limit": 300, "sbatch_options": options}
    python = killed_in_begin(tmp_path, numbers="1")
    run, plan = make_run("--steps=10", total_steps=10, host_python=python, **changes)
    first = start(demanding, run, plan, monkeypatch)
    (waiting,) = fallback_jobs(demanding, plan)
    known = demanding.job(waiting.id)
    assert {name: known.get(name, "").split("-")[0].replace("gres/", "gres:") for name in has} == has
    waiting_jobs(demanding, plan, killed=first)
    hurry(demanding, plan)
    wait_for_end(demanding, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    no_fallback_job(demanding, plan)


@pytest.mark.parametrize("mode", ["REQUEUE", "CANCEL"])
def test_a_fallback_job_whose_node_goes_to_another_job_comes_back(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    here, begun = tmp_path / "here", tmp_path / "begun"
    text = (
        f'if [[ " $* " == *" relayrun.control.chain begin "* && ! -e "{begun}" ]]; then\n'
        f'  touch "{begun}"\n  kill -KILL "${{PPID}}"\n  sleep 1000\nfi\n'
        f'if [[ " $* " == *" relayrun.control.chain fallback "* && ! -e "{here}" ]]; then\n'
        f'  touch "{here}"; sleep 1000\nfi\n'
        f'exec "{sys.executable}" "$@"'
    )
    python = str(program(tmp_path, "host-python", text))
    options = {"partition": "low"}
    cluster.run(["scontrol", "update", "PartitionName=low", f"PreemptMode={mode}"])
    run, plan = make_run("--steps=10", total_steps=10, host_python=python, **WITH_FALLBACK, sbatch_options=options)
    start(cluster, run, plan, monkeypatch)
    (waiting,) = fallback_jobs(cluster, plan)
    cluster.wait_until(here.exists, what="the fallback job")
    other = cluster.sbatch(["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"])
    cluster.wait_job(other)

    def over() -> bool:  # Slurm 24.11 shows PREEMPTED also after the second start's own end
        known = cluster.job(waiting.id)
        return known["Restarts"] != "0" and known["JobState"] in ("COMPLETED", "PREEMPTED")

    cluster.wait_until(over, what="its second start")
    assert stop_reason(run) is None
    cluster.wait_until(lambda: hurry(cluster, plan) or stop_reason(run), what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)


def test_a_fallback_job_that_cannot_write_to_the_run_directory_says_so_in_its_comment(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither can it read what it needs; and it says so before its time limit, at which Slurm takes no comment."""
    gone = tmp_path / "gone"
    python = host_python(tmp_path, 'kill -KILL "${PPID}"; sleep 1000')
    run, plan = make_run(folder="disk/run", host_python=python, **WITH_FALLBACK)
    text = Path(python).read_text()
    (tmp_path / "bin/host-python").write_text(
        text.replace("#!/bin/bash\n", f'#!/bin/bash\n[[ " $* " != *" fallback "* ]] || {{ touch "{gone}"; exit 9; }}\n')
    )
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    start(cluster, run, plan, monkeypatch)
    (waiting,) = fallback_jobs(cluster, plan)
    cluster.wait_until(gone.exists, what="the fallback job")
    cluster.run(["scancel", "--signal=USR2", "--batch", waiting.id])
    cluster.wait_until(lambda: cluster.job(waiting.id)["JobState"] == "FAILED", what="its end")
    assert cluster.job(waiting.id)["Comment"] == "relayrun:fallback-failed"
    said = "".join(path.read_text() for path in (tmp_path / "logs").glob("*-fallback-*.err"))
    assert f"the fallback job {waiting.id} could not queue another one" in said
    assert not pending(cluster, plan)


@pytest.fixture
def slow_epilog(make_cluster: MakeCluster, tmp_path: Path) -> Iterator[tuple[TestCluster, Path]]:
    """A cluster on which a job stays COMPLETING as long as a file with its id is in the folder."""
    cluster, folder = make_cluster(), tmp_path / "slow"
    folder.mkdir()
    epilog = program(tmp_path, "epilog", f'while [[ -e "{folder}/${{SLURM_JOB_ID}}" ]]; do sleep 0.5; done')
    with cluster.conf.open("a") as conf:
        conf.write(f"Epilog={epilog}\n")
    cluster.run(["scontrol", "reconfigure"])  # since Slurm 23.11 the nodes register again
    cluster.wait_until(
        lambda: {cluster.node_state(f"n{number}") for number in range(4)} == {"IDLE"}, what="idle nodes again"
    )
    yield cluster, folder
    for file in folder.iterdir():
        file.unlink()


def test_a_job_that_stays_completing_is_nobody_who_goes_on(
    slow_epilog: tuple[TestCluster, Path],
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, slow = slow_epilog
    python = killed_in_begin(tmp_path, numbers="2")
    run, plan = make_run("--steps=60", total_steps=60, host_python=python, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    (slow / first).touch()
    wait_for_iteration(cluster, run)
    (waiting,) = cluster.wait_until(lambda: pending(cluster, plan), what="a successor")
    cluster.wait_until(
        lambda: f"job={waiting}-" in cluster.job(fallback_jobs(cluster, plan)[0].id)["Comment"], what="its move"
    )
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    next_job(cluster, plan, killed=waiting)
    assert cluster.job(first)["JobState"] == "COMPLETING"
    (slow / first).unlink()
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)


def test_a_cluster_on_which_nobody_may_change_a_job(
    demanding: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another fallback job takes the place of the one that cannot be moved, and tries are counted."""
    cluster = demanding
    demand(cluster, modify="true")
    python = killed_in_begin(tmp_path, numbers="2")
    run, plan = make_run("--steps=60", total_steps=60, host_python=python, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    (former,) = fallback_jobs(cluster, plan)
    wait_for_iteration(cluster, run)
    (waiting,) = pending(cluster, plan)
    cluster.wait_until(lambda: cluster.job(former.id)["JobState"] == "CANCELLED", what="the end of the former one")
    (only,) = fallback_jobs(cluster, plan)
    assert f"job={waiting}-" in cluster.job(only.id)["Comment"]
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    (following,) = waiting_jobs(cluster, plan, killed=waiting)
    counted = f"relayrun:starts-only-if-job={following}-fails,failed-begins=1"
    cluster.wait_until(
        lambda: counted in [cluster.job(job.id)["Comment"] for job in fallback_jobs(cluster, plan)], what="the count"
    )
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    no_fallback_job(cluster, plan)


def test_the_whole_chain_cancelled_by_name_ends_with_a_reason(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback job has another name, and starts; it must not go on."""
    run, plan = make_run("--steps=1000", total_steps=1000, **WITH_FALLBACK)
    start(cluster, run, plan, monkeypatch)
    wait_for_iteration(cluster, run)
    cluster.wait_until(lambda: pending(cluster, plan), what="a successor")
    cluster.run(["scancel", f"--name={plan.job_name}"])
    wait_for_end(cluster, run, plan)
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    assert "cancelled" in (stop_reason(run) or "")
    no_fallback_job(cluster, plan)
    assert not [job for job in cluster.queue() if job.name == plan.job_name]


def test_a_held_job_behind_which_the_fallback_job_waits_stays_held(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, plan = make_run("--steps=60", total_steps=60, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    wait_for_iteration(cluster, run)
    (waiting,) = cluster.wait_until(lambda: pending(cluster, plan), what="a successor")
    cluster.run(["scontrol", "hold", waiting])
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    cluster.wait_until(lambda: cluster.job(first)["JobState"] == "COMPLETED", what="the end of the first job")
    assert cluster.job(waiting)["Reason"].startswith("JobHeld")
    assert [job.state for job in fallback_jobs(cluster, plan)] == ["PENDING"]
    assert stop_reason(run) is None
    cluster.run(["scontrol", "release", waiting])
    wait_for_iteration(cluster, run, attempt=2)
    assert begin_of(run, 2).job_id == waiting
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, plan)
    assert ends(run)[0].cause == "saved"
    no_fallback_job(cluster, plan)


def test_a_limit_of_two_submitted_jobs(
    accounting: None,
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback job stands behind the first job, and gives its place to the successor."""
    cluster = make_cluster(accounting=True)
    for order in (
        ["add", "user", "root", "account=team"],
        ["modify", "qos", "normal", "set", "MaxSubmitJobsPerUser=2"],
    ):
        cluster.run(["sacctmgr", "--immediate", *order])
    run, plan = make_run("--steps=60", total_steps=60, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    known = cluster.run(["scontrol", "show", "job", "-o"]).stdout  # also after it gave its place
    assert known.count(f" JobName={plan.fallback_job_name} ") == 1
    wait_for_iteration(cluster, run)
    (waiting,) = cluster.wait_until(lambda: pending(cluster, plan), what="a successor")
    assert not fallback_jobs(cluster, plan)
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert begin_of(run, 2).job_id == waiting
