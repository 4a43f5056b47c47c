"""The fallback job on a real Slurm: it goes on with a chain whose batch script is killed inside `begin`."""

from __future__ import annotations

import getpass
import shutil
import sys
import time
from pathlib import Path

import pytest

from relayrun.control.chain import jobs
from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.watch.status import queue
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.readme import ROOT, blocks

from .cluster import QueuedJob, TestCluster
from .conftest import MakeCluster
from .test_chain import SLURM, ends, hurry, logs, wait_for_end, wait_for_iteration
from .test_law_slurm import begin_of, host_python, pending, program

pytestmark = pytest.mark.slurm

OPERATORS = (ROOT / "docs/reference/operators.md").read_text(encoding="utf-8")
WITH_FALLBACK = SLURM | {"nodes": 1, "fallback_job": True}


def start(cluster: TestCluster, run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> str:
    """Queue the first job as a submit does; return its id."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    return jobs.queue_first_job(run, plan, scheduler_for_plan(plan, run))


def fallback_jobs(cluster: TestCluster, plan: Plan) -> list[QueuedJob]:
    return [job for job in cluster.queue() if job.name == plan.fallback_job_name]


def no_fallback_job(cluster: TestCluster, plan: Plan) -> None:
    cluster.wait_until(lambda: not fallback_jobs(cluster, plan), what="the end of the fallback job")


def killed_in_begin(folder: Path, *, numbers: str) -> str:
    """A host Python that kills the batch script instead of these of all the chain's calls of `begin`."""
    count = f"{folder}/begins"
    return host_python(
        folder,
        f'echo x >>"{count}"\n'
        f'if [[ " {numbers} " == *" $(wc -l <"{count}") "* ]]; then kill -KILL "${{PPID}}"; sleep 1000; fi',
    )


def next_job(cluster: TestCluster, plan: Plan, killed: str) -> str:
    """The job that the fallback job queues for the one that was killed; it starts without delay."""
    cluster.wait_until(lambda: cluster.job(killed)["JobState"] == "FAILED", what=f"the death of job {killed}")
    assert cluster.job(killed)["ExitCode"] == "0:9"
    (found,) = cluster.wait_until(lambda: pending(cluster, plan), what="the next job")
    assert cluster.job(found)["ExcNodeList"] == cluster.job(killed)["NodeList"]
    hurry(cluster, plan)
    return found


@pytest.mark.parametrize("numbers", ["2", pytest.param("1 3", marks=pytest.mark.long)])
def test_a_batch_script_that_is_killed_inside_begin_does_not_end_the_chain(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: str,
) -> None:
    """That of the job behind the one that trains; and that of the first job."""
    python = killed_in_begin(tmp_path, numbers=numbers)
    run, plan = make_run("--steps=60", total_steps=60, host_python=python, **WITH_FALLBACK)
    first = start(cluster, run, plan, monkeypatch)
    if numbers == "1 3":
        first = next_job(cluster, plan, killed=first)
    wait_for_iteration(cluster, run)
    listed = blocks("bash operator", OPERATORS)[0].replace("--user=ada", "--me")
    assert cluster.run(["bash", "-c", listed]).stdout == f"{run.path}\n"
    assert begin_of(run, 1).job_id == first
    assert "exclude" not in begin_of(run, 1).options
    cluster.wait_until(lambda: len(fallback_jobs(cluster, plan)) == 1, what="one fallback job")
    (waiting,) = pending(cluster, plan)
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    following = next_job(cluster, plan, killed=waiting)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert begin_of(run, 2).job_id == following
    assert begin_of(run, 2).base_iteration == ends(run)[0].durable_iteration > 0
    assert resume_point(run).iteration == 60
    no_fallback_job(cluster, plan)
    said = "".join(path.read_text() for path in (tmp_path / "logs").glob("*-fallback-*.err"))
    assert said.count("failed and left no successor; job ") == len(numbers.split()), said


def test_a_waiting_job_that_is_cancelled_while_nothing_runs_ends_the_chain(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, plan = make_run(**WITH_FALLBACK)
    other = cluster.sbatch(["--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 100"])
    job = start(cluster, run, plan, monkeypatch)
    (waiting,) = fallback_jobs(cluster, plan)
    found = queue.query_queue(run)
    assert [job.id for job in found.jobs] == [job]
    assert [job.id for job in found.fallback_jobs] == [waiting.id]
    known = cluster.job(waiting.id)
    assert (known["Comment"], known["NumCPUs"]) == (f"relayrun:starts-only-if-job={job}-fails,failed-begins=0", "1")
    cluster.run(["scancel", job])
    cluster.run(["scancel", other])
    cluster.wait_until(lambda: stop_reason(run), what="STOP")
    assert (stop_reason(run) or "").startswith(f"job {job}, which was to go on, was cancelled")
    no_fallback_job(cluster, plan)
    assert not pending(cluster, plan)


@pytest.mark.long
@pytest.mark.usefixtures("accounting")
def test_a_cancelled_job_that_slurm_has_forgotten_ends_the_chain(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback job waits for a node meanwhile; accounting knows who cancelled the job."""
    cluster = make_cluster(nodes=1, accounting=True)
    cluster.conf.write_text(cluster.conf.read_text().replace("MinJobAge=3600", "MinJobAge=2"))
    cluster.run(["scontrol", "reconfigure"])
    run, plan = make_run(**WITH_FALLBACK)
    other = cluster.sbatch(["--exclusive", "--output=/dev/null", "--wrap=sleep 1000"])
    cluster.wait_running(other)
    job = start(cluster, run, plan, monkeypatch)
    cluster.run(["scancel", job])

    def forgotten() -> bool:
        return "Invalid job id" in cluster.run(["scontrol", "show", "job", job], check=False).stderr

    cluster.wait_until(forgotten, what=f"Slurm's forgetting of job {job}")
    assert len(fallback_jobs(cluster, plan)) == 1
    assert stop_reason(run) is None
    cluster.run(["scancel", other])
    no_fallback_job(cluster, plan)
    assert stop_reason(run) == f"job {job}, which was to go on, was cancelled by {getpass.getuser()}", logs(run)
    assert not pending(cluster, plan)


@pytest.mark.long
def test_a_batch_script_that_is_killed_before_the_fallback_job_is_moved(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The successor is queued. The fallback job finds it, and another one stands behind it then."""
    scontrol, once = shutil.which("scontrol", path=cluster.env["PATH"]), tmp_path / "once"
    kill = f'touch "{once}"; kill -KILL "$(ps -o ppid= -p "${{PPID}}" | tr -d " ")" "${{PPID}}"; sleep 1000'
    text = f'if [[ "$*" == *Dependency=afternotok* && ! -e "{once}" ]]; then {kill}; fi\nexec "{scontrol}" "$@"'
    program(tmp_path, "scontrol", text)
    run, plan = make_run("--steps=400", total_steps=400, **WITH_FALLBACK)
    monkeypatch.setitem(cluster.env, "PATH", f"{tmp_path / 'bin'}:{cluster.env['PATH']}")
    start(cluster, run, plan, monkeypatch)
    (first,) = fallback_jobs(cluster, plan)
    wait_for_iteration(cluster, run, attempt=2)
    cluster.wait_until(lambda: cluster.job(first.id)["JobState"] == "COMPLETED", what="the end of the fallback job")
    (waiting,) = pending(cluster, plan)
    cluster.wait_until(
        lambda: (
            [cluster.job(job.id)["Dependency"] for job in fallback_jobs(cluster, plan)]
            == [f"afternotok:{waiting}(unfulfilled)"]
        ),
        what="one fallback job behind the newest job",
    )
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["unknown", "exit"], logs(run)
    no_fallback_job(cluster, plan)


@pytest.mark.long
def test_it_is_there_for_each_job_and_gone_with_the_chain(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not start where a job is followed by the next one, nor where a chain is stopped or cancelled whole."""
    run, plan = make_run("--steps=1000", total_steps=1000, **WITH_FALLBACK)
    start(cluster, run, plan, monkeypatch)
    wait_for_iteration(cluster, run)
    (only,) = fallback_jobs(cluster, plan)
    cluster.wait_until(lambda: f"job={pending(cluster, plan)[0]}-" in cluster.job(only.id)["Comment"], what="its move")
    cluster.run(["scancel", "--signal=USR2", "--batch", begin_of(run, 1).job_id])
    wait_for_iteration(cluster, run, attempt=2)
    assert [job.id for job in fallback_jobs(cluster, plan)] == [only.id]
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, plan)
    no_fallback_job(cluster, plan)
    assert cluster.job(only.id)["JobState"] == "CANCELLED"
    assert cluster.job(only.id)["StartTime"] in ("Unknown", cluster.job(only.id)["EndTime"])

    everything, plan = make_run("--steps=1000", folder="everything", total_steps=1000, **WITH_FALLBACK)
    start(cluster, everything, plan, monkeypatch)
    wait_for_iteration(cluster, everything)
    cluster.run(["scancel", "--me"])
    wait_for_end(cluster, everything, plan)
    cluster.wait_until(lambda: stop_reason(everything), what="STOP")
    no_fallback_job(cluster, plan)


@pytest.mark.long
def test_a_controller_that_is_away_when_it_is_needed(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback job has started, and asks until it has an answer."""
    cluster = make_cluster()
    here, go = tmp_path / "here", tmp_path / "go"
    text = (
        f'if [[ " $* " == *" relayrun.control.chain begin "* && ! -e "{here}" ]]; then\n'
        f'  kill -KILL "${{PPID}}"; sleep 1000\nfi\n'
        f'if [[ " $* " == *" relayrun.control.chain fallback "* ]]; then\n'
        f'  touch "{here}"; until [[ -e "{go}" ]]; do sleep 0.2; '
        f'done; fi\nexec "{sys.executable}" "$@"'
    )
    python = str(program(tmp_path, "host-python", text))
    run, plan = make_run("--steps=10", total_steps=10, host_python=python, **WITH_FALLBACK)
    start(cluster, run, plan, monkeypatch)
    cluster.wait_until(here.exists, what="the fallback job")
    cluster.stop_ctld()
    go.touch()
    time.sleep(20)
    cluster.start_ctld()
    cluster.wait_until(lambda: hurry(cluster, plan) or stop_reason(run), timeout=600, what="STOP")
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    no_fallback_job(cluster, plan)
