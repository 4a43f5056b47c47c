"""The real training program as chains of real Slurm jobs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests import warm
from tests.checkpoints import assert_same_bytes
from tests.readme import break_code, copy_tracked
from tests.workspace import Workspace, ends, steps

from .cluster import ROOT, TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SLURM = {
    "name": "test",
    "scheduler": "slurm",
    "environment": {"MASTER_ADDR": "127.0.0.1"},  # pretended nodes have no addresses
    "host_python": getattr(sys, "_base_executable", "python3"),  # bare: without the project's packages
}
TWO_NODES = {"nodes": 2, "ntasks_per_node": 1}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.make(tmp_path_factory.mktemp("it's a workspace"))


def submit(cluster: TestCluster, config: Path, *arguments: str, check: bool = True) -> str:
    """`relayrun submit`; returns what it printed."""
    done = cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config, *arguments], check=check, cwd=ROOT)
    return done.stdout + done.stderr


def chain_jobs(cluster: TestCluster, run: Run) -> list[str]:
    """States of the chain's jobs; never more than one of them waits."""
    name = Plan.load(run).job_name
    states = [job.state for job in cluster.queue() if job.name == name]
    assert states.count("PENDING") <= 1, states
    return states


def wait_for_end(cluster: TestCluster, run: Run, timeout: float) -> None:
    cluster.wait_until(lambda: not chain_jobs(cluster, run), timeout=timeout, interval=0.5)


def wait_for_iteration(cluster: TestCluster, run: Run, attempt: int, timeout: float = 600) -> None:
    cluster.wait_until(lambda: any(read_json_lines(run.attempt(attempt).metrics)), timeout=timeout, interval=0.2)


def job_of(run: Run, attempt: int) -> str:
    begin = AttemptStart.read(run.attempt(attempt).begin)
    assert begin is not None
    return begin.job_id


def test_jobs_cut_by_their_time_limit_equal_the_uninterrupted_run(cluster: TestCluster, workspace: Workspace) -> None:
    count = 120
    training = {"steps": count}
    submit(cluster, workspace.config("whole", training=training, job=TWO_NODES | {"time": "10"}, cluster=SLURM))
    wait_for_end(cluster, workspace.run("whole"), timeout=600)
    reference = workspace.run("whole")
    assert [end.cause for end in ends(reference)] == ["done"]
    # A job makes 35 steps and then few, so that 120 take at least three, however fast the machine is; of its two
    # minutes, the least that Slurm's clock of whole minutes allows, it has 40 s: some steps, however slow it is
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "slow-after=35:3"}}
    submit(
        cluster,
        workspace.config(
            "pieces",
            training=training | {"hooks": [slow]},
            job=TWO_NODES | {"time": "2"},
            cluster=SLURM,
            chain={"grace_period": 80, "signal_seconds": 1},
            checkpoint={"interval": 211},
        ),
    )
    run = workspace.run("pieces")
    wait_for_end(cluster, run, timeout=900)
    records = ends(run)
    assert len(records) >= 3
    assert [record.cause for record in records] == ["saved"] * (len(records) - 1) + ["done"]
    # and, since two minutes are short, that the start and the save take much of them
    assert {record.reason.partition(";")[0] for record in records[:-1]} == {"time limit near"}
    assert steps(run) == steps(reference)
    assert sorted(steps(run)) == list(range(1, count + 1))
    assert assert_same_bytes(reference.checkpoint(count), run.checkpoint(count)) > 50
    assert "the chain of this run has ended" in submit(cluster, workspace.folder / "pieces.yaml", check=False)


@pytest.mark.long
def test_two_runs_share_a_node_and_a_signal_during_the_imports_harms_neither(
    cluster: TestCluster, workspace: Workspace
) -> None:
    job = {"nodes": 1, "ntasks_per_node": 2, "exclude": "n1,n2,n3"}
    training = {"steps": 60}
    submit(cluster, workspace.config("one", training=training, job=job, cluster=SLURM | {"python": None}))
    submit(cluster, workspace.config("two", training=training, job=job, cluster=SLURM))
    run = workspace.run("one")
    cluster.wait_until(lambda: run.attempt(1).begin.exists(), timeout=600, interval=0.05)
    cluster.run(["scancel", "--signal=USR2", "--full", job_of(run, 1)])  # everybody, most of them importing
    cluster.wait_until(run.attempt(1).end.exists, timeout=300)
    (first,) = ends(run)[:1]
    assert (first.cause, first.exit_code, first.progress) == ("saved", 0, False)

    def second_has_begun() -> bool:
        for job in cluster.queue():  # the one that waits 30 s; another may be on its way out at this moment
            if job.name == Plan.load(run).job_name and job.state == "PENDING":
                cluster.run(["scontrol", "update", f"JobId={job.id}", "StartTime=now"], check=False)
        return run.attempt(2).begin.exists()

    cluster.wait_until(second_has_begun, timeout=300)
    wait_for_end(cluster, run, timeout=600)
    wait_for_end(cluster, workspace.run("two"), timeout=600)
    assert [end.cause for end in ends(run)] == ["saved", "done"]
    assert [end.cause for end in ends(workspace.run("two"))] == ["done"]
    assert steps(run) == steps(workspace.run("two"))


@pytest.mark.long
def test_a_bash_launcher_from_anywhere_with_its_options_triggers_and_resume(
    cluster: TestCluster, workspace: Workspace, tmp_path: Path
) -> None:
    config = workspace.config("unused", job=TWO_NODES, cluster=SLURM, data={"max_epochs": 1e6})
    run = workspace.run("bash run")
    settings = {
        "CONFIG": str(config),
        "RUN_DIR": str(run.path),
        "DATASETS": str(workspace.folder / "data"),
        "MBS": "2",
        "GBS": "8",
        "SEQ_LEN": "64",
        "TRAINING_STEPS": "5000",
        "CHECKPOINT_STEPS": "4000",
        "PYTHON": warm.python(),
        "HOST_PYTHON": SLURM["host_python"],
        "EXP_NAME": "from-bash",
    }
    other = cluster.sbatch(["--job-name=relayrun-demo", "--wrap=sleep 300"])  # the launcher's own name
    first = cluster.sbatch(["--nodes=1", "--time=7", ROOT / "launchers/submit-demo.sh"], cwd=tmp_path, env=settings)
    cluster.wait_until(run.plan.exists, timeout=600)
    wait_for_iteration(cluster, run, 1)
    assert job_of(run, 1) == first
    assert sorted(chain_jobs(cluster, run)) == ["PENDING", "RUNNING"]
    name = Plan.load(run).fallback_job_name
    assert [job.state for job in cluster.queue() if job.name == name] == ["PENDING"]

    triggers.touch_trigger(run, "save")
    cluster.wait_until((run.triggers / "save.done").exists, timeout=600)
    saved = json.loads((run.triggers / "save.done").read_text())
    assert (saved["result"], run.checkpoint(saved["iteration"]).is_dir()) == ("saved", True)

    cluster.run(["scancel", "--signal=USR2", "--batch", first])  # the header's backstop
    wait_for_iteration(cluster, run, 2)
    assert "SIGUSR2" in ends_so_far(run)[0]
    job = cluster.job(job_of(run, 2))
    assert (job["NumNodes"], job["TimeLimit"]) == ("1", "00:05:00")  # nodes as in the command line, time as in the plan

    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, timeout=300)
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    assert json.loads((run.triggers / "exit.done").read_text())["result"] == "saved"
    at = resume_point(run).iteration

    refused = cluster.sbatch(["--nodes=1", ROOT / "launchers/submit-demo.sh"], cwd=tmp_path, env=settings)
    assert cluster.wait_job(refused, timeout=300) == "FAILED"
    errors = ROOT / "logs/slurm/training" / f"relayrun-demo-{refused}.err"
    assert "the chain of this run has ended: exit trigger by" in errors.read_text()

    triggers.touch_trigger(run, "exit")  # older than the submit that follows: stale
    time.sleep(0.1)
    resumed = cluster.sbatch(
        ["--nodes=1", ROOT / "launchers/submit-demo.sh"], cwd=tmp_path, env=settings | {"RESUME": "true"}
    )
    wait_for_iteration(cluster, run, 3)
    assert json.loads((run.triggers / "exit.done").read_text())["result"].startswith("stale")
    begin = AttemptStart.read(run.attempt(3).begin)
    assert begin is not None
    assert (begin.job_id, begin.base_iteration) == (resumed, at)
    cluster.run(["scancel", resumed])
    wait_for_end(cluster, run, timeout=300)
    assert ends(run)[-1].cause == "cancelled"
    assert cluster.job(other)["JobState"] == "RUNNING"
    cluster.run(["scancel", other])


@pytest.mark.long
def test_the_job_of_a_bash_launcher_that_queues_itself_again_goes_on(
    cluster: TestCluster, workspace: Workspace, tmp_path: Path
) -> None:
    """Slurm starts the launcher anew, which prepared the run the first time."""
    config = workspace.config(
        "unused-three", job=TWO_NODES, cluster=SLURM, chain={"mode": "requeue"}, data={"max_epochs": 1e6}
    )
    run = workspace.run("requeued bash run")
    settings = {
        "CONFIG": str(config),
        "RUN_DIR": str(run.path),
        "DATASETS": str(workspace.folder / "data"),
        "MBS": "2",
        "GBS": "8",
        "SEQ_LEN": "64",
        "TRAINING_STEPS": "50000",
        "CHECKPOINT_STEPS": "40000",
        "PYTHON": sys.executable,
        "HOST_PYTHON": SLURM["host_python"],
        "AUTO_JOB_REQUEUE": "true",
    }
    job = cluster.sbatch(["--nodes=1", "--time=7", ROOT / "launchers/submit-demo.sh"], cwd=tmp_path, env=settings)
    wait_for_iteration(cluster, run, 1)
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    wait_for_iteration(cluster, run, 2)
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, timeout=300)
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    assert (job_of(run, 2), run.revisions()) == (job, [1])


@pytest.mark.long
def test_a_bash_launcher_with_a_backup_survives_what_becomes_of_its_checkout(
    cluster: TestCluster, workspace: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "it's a checkout"
    copy_tracked(root)
    config = workspace.config("unused-either", job=TWO_NODES, cluster=SLURM, data={"mock_vocabulary_size": 300})
    run = workspace.run("backup")
    settings = {
        "CONFIG": str(config),
        "RUN_DIR": str(run.path),
        "DATASETS": "",
        "MOCK_DATA": "true",
        "BACKUP_CODEBASE": "true",
        "MBS": "2",
        "GBS": "8",
        "SEQ_LEN": "64",
        "TRAINING_STEPS": "50000",
        "CHECKPOINT_STEPS": "40000",
        "PYTHON": sys.executable,
        "HOST_PYTHON": SLURM["host_python"],
    }
    first = cluster.sbatch(["--time=7", root / "launchers/submit-demo.sh"], cwd=root, env=settings)
    wait_for_iteration(cluster, run, 1)
    break_code(root)
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_iteration(cluster, run, 2)
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, timeout=300)
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    begin = AttemptStart.read(run.attempt(2).begin)
    assert begin is not None
    assert begin.base_iteration > 0


def ends_so_far(run: Run) -> list[str]:
    return [end["reason"] for end in read_json_lines(run.attempts_view) if "reason" in end]
