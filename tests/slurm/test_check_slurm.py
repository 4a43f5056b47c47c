"""What Slurm's own answer makes of a check: the partition's limits, refusals, a controller that is away."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.control.rundir.run import Run
from relayrun.errors import SchedulerError
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import CheckFinding
from tests.workspace import Workspace

from .cluster import ROOT, TestCluster

pytestmark = pytest.mark.slurm
GBS = "training.global_batch_size=16"


@pytest.fixture
def workspace(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Workspace:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.env[name])
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "logs")
    return Workspace.make(tmp_path / "workspace")


def looked(workspace: Workspace, *overrides: str, launcher: Path | None = None) -> list[CheckFinding]:
    path = workspace.config("run", cluster={"name": "test", "scheduler": "slurm"})
    config = resolve.load_run_config(path, overrides)
    found = submission.check_submission(config, intent=SubmitIntent(), launcher=launcher).findings.all
    return [finding for finding in found if finding.name.startswith("slurm.")]


def test_slurm_is_asked_about_the_very_job_and_nothing_is_queued(cluster: TestCluster, workspace: Workspace) -> None:
    cluster.run(["scontrol", "update", "PartitionName=debug", "MaxTime=60", "MaxNodes=3"])
    try:
        limits, answer = looked(workspace)
        assert (limits.level, limits.words) == ("ok", "partition debug: MaxTime 01:00:00, MaxNodes 3, 4 nodes")
        assert answer.level == "ok"
        assert "to start at" in answer.words  # sbatch's own words
        assert [job for job in looked(workspace, "job.time=2:00:00", "job.nodes=4", GBS) if job.level == "error"][
            :2
        ] == [
            CheckFinding(
                name="slurm.time",
                level="error",
                words="0-02:00:00 is more than partition debug allows, 01:00:00",
                setting="job.time",
                value="2:00:00",
                remedy="lower job.time: a chain goes on in the next job",
            ),
            CheckFinding(
                name="slurm.nodes",
                level="error",
                words="4 nodes are more than partition debug allows, 3",
                setting="job.nodes",
                value=4,
            ),
        ]
    finally:
        cluster.run(["scontrol", "update", "PartitionName=debug", "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED"])
    unknown, refused = looked(workspace, "job.partition=nope")
    assert unknown.words.startswith("there is no partition nope; there are: debug")
    assert (refused.level, "invalid partition" in refused.words) == ("error", True)
    (gpus,) = [
        each
        for each in looked(workspace, "job.gpus_per_node=5", "training.precision=bf16")
        if each.level in ("warning", "error")
    ]
    assert (gpus.name, gpus.level) == ("slurm.test", "error")
    assert cluster.queue() == []


def test_beside_a_drained_node_check_and_submit_refuse_what_no_state_of_the_nodes_lets_start(
    cluster: TestCluster, workspace: Workspace
) -> None:
    """`sbatch --test-only` refuses whatever waits for the node, and `sbatch` queues most of it (Slurm 22.05)."""
    cluster.run(["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=maintenance"])
    partition = ["scontrol", "update", "PartitionName=debug"]
    path = workspace.config("run", cluster={"name": "test", "scheduler": "slurm"})
    try:
        for settings, limits in (
            (["job.cpus_per_task=100"], []),
            (["job.cpus_per_task=5"], []),  # two ranks of 5
            (["job.nodes=5", "training.global_batch_size=20"], []),
            (["job.gpus_per_node=9", "training.precision=bf16"], []),
            (["job.mem=900G"], []),
            (["job.nodes=4", "job.exclude=n0", GBS], []),
            (["job.nodes=3", "training.global_batch_size=12"], ["MaxNodes=2"]),
            (["job.time=2:00:00"], ["MaxTime=60"]),
        ):
            cluster.run([*partition, *(limits or ["MaxTime=UNLIMITED", "MaxNodes=UNLIMITED"])])
            assert "error" in {found.level for found in looked(workspace, *settings)}, settings
            with pytest.raises(SchedulerError):
                submission.submit_run(resolve.load_run_config(path, settings))
            assert cluster.queue() == [], settings
        cluster.run([*partition, "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED"])
        four = ["job.nodes=4", "job.mem=1000M", GBS]
        (waits,) = [found for found in looked(workspace, *four) if found.level != "ok"]
        assert (waits.level, waits.words.endswith("the job waits for some of n3 (drained)")) == ("warning", True)
        submission.submit_run(resolve.load_run_config(path, four))
        assert {each.state for each in cluster.queue()} == {"PENDING"}  # with the fallback job
        cluster.run(["scancel", *[each.id for each in cluster.queue()]])
    finally:
        cluster.run(["scontrol", "update", "NodeName=n3", "State=RESUME"])
        cluster.run([*partition, "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED"])


def test_slurm_is_asked_about_the_job_of_an_evaluation_too(cluster: TestCluster, workspace: Workspace) -> None:
    """Its refusal would leave no word but in a log of the run, when training is over."""
    given = ("checkpoint.interval=10", "evaluation.interval=10", 'evaluation.command=[echo, "{results}"]')
    assert [(each.name, each.level) for each in looked(workspace, *given)][1:] == [
        ("slurm.test", "ok"),
        ("slurm.evaluation", "ok"),
    ]
    refused = looked(workspace, *given, "evaluation.job.partition=gpuu")[-1]
    assert (refused.name, refused.level) == ("slurm.evaluation", "error")
    assert "invalid partition specified: gpuu" in refused.words
    assert (refused.remedy or "").startswith("change evaluation.job")
    path = workspace.config("run", cluster={"name": "test", "scheduler": "slurm"})
    config = resolve.load_run_config(path, [*given, "evaluation.job.partition=gpuu"])
    with pytest.raises(SchedulerError, match=r"the job of an evaluation: sbatch: .*invalid partition"):
        submission.submit_run(config)
    assert not Run(Path(config.run_dir or "")).plan.exists()
    assert cluster.queue() == []


def test_a_launcher_is_asked_about_with_its_own_header(cluster: TestCluster, workspace: Workspace) -> None:
    done = cluster.run(
        ["bash", ROOT / "launchers/submit-llama3-8b.sh", "--check"],
        check=False,
        env={"MOCK_DATA": "true", "CLUSTER": "test", "PYTHON": sys.executable},
    )
    assert done.returncode == 1, done.stderr  # 16 nodes on a cluster of 4
    assert "16 nodes are more than partition debug has, 4" in done.stdout
    assert "error" in next(line for line in done.stdout.splitlines() if "slurm.test" in line)
    assert "8,030,261,248 with a vocabulary of 128,256" in done.stdout
    (_, answer) = looked(workspace, launcher=ROOT / "launchers/submit-demo.sh")
    assert answer.level == "ok"
    assert cluster.queue() == []


def test_a_slurm_that_does_not_answer_is_a_warning(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/no/such/slurm.conf")
    (away,) = looked(workspace)
    assert (away.level, away.name) == ("warning", "slurm.test")
    assert "whether Slurm takes the job is not known" in away.words
    monkeypatch.setenv("PATH", "/nowhere")
    (missing,) = looked(workspace, "cluster.host_python=/usr/bin/python3")
    assert "is not installed here" in missing.words


def test_a_launcher_that_cannot_begin_says_so_in_slurms_output_and_in_status(
    cluster: TestCluster, tmp_path: Path
) -> None:
    checkout, copy = tmp_path / "checkout", tmp_path / "mine.sh"
    for folder in ("launchers", "configs"):
        shutil.copytree(ROOT / folder, checkout / folder)
    (checkout / ".relayrun").touch()
    launcher = checkout / "launchers/submit-demo.sh"
    shutil.copy(launcher, copy)
    mistyped = {"MSB": "2", "PYTHON": sys.executable}
    jobs = [
        cluster.sbatch([launcher], cwd=tmp_path, env=mistyped),
        cluster.sbatch([copy], cwd=tmp_path),
        cluster.run(["bash", "-c", f"sbatch --parsable <{launcher}"], cwd=tmp_path).stdout.strip(),
        cluster.sbatch(["--array=1", launcher], cwd=tmp_path),
        cluster.sbatch([launcher, "--check"], cwd=tmp_path),
    ]
    told = [
        "refused: error: environment: MSB is no setting; did you mean MBS? -> rename it",
        f"error: {copy}: a launcher is given by its path",
        "error: standard input: a launcher is given by its path",
        "error: a launcher begins one run, not one for each task of an array",
        "error: sbatch hands --check to the job",
    ]
    for job, words in zip(jobs, told, strict=True):
        assert cluster.wait_job(job) == "FAILED"
        assert words in cluster.output(job)
    done = cluster.run([sys.executable, "-m", "relayrun", "status"], cwd=checkout)
    assert f"refused: job {jobs[0]} (relayrun-demo), " in done.stdout
    assert "environment: MSB is no setting" in done.stdout


def test_a_job_that_does_not_end_before_a_maintenance_waits_for_it(cluster: TestCluster, workspace: Workspace) -> None:
    """Nodes of a reservation that has not begun are idle, and sbatch, which queues the job, refuses to test it."""
    made = ["ReservationName=coming", "StartTime=now+300", "Duration=60", "Nodes=n2,n3", "Flags=MAINT", "Users=nobody"]
    cluster.run(["scontrol", "create", "reservation", *made])
    try:
        for nodes, level in ((3, "warning"), (2, "ok")):
            size = f"training.global_batch_size={4 * nodes}"
            found = looked(workspace, f"job.nodes={nodes}", "job.time=30", size)
            (answer,) = (each for each in found if each.name == "slurm.test")
            assert answer.level == level
            assert ("waits for some of n2 (reserved by coming), n3" in answer.words) is (nodes == 3)
    finally:
        cluster.run(["scontrol", "delete", "ReservationName=coming"])
