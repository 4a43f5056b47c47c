"""The test cluster keeps its promises: what the other tests on Slurm stand on."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from .cluster import ROOT, SCRIPT, QueuedJob, TestCluster, job_fields, parse_fields
from .conftest import MakeCluster, verdict

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def other(make_cluster: MakeCluster) -> TestCluster:
    """A second, smaller cluster beside the first."""
    return make_cluster(nodes=2, gpus=2, grace=0)


def processes(cluster: TestCluster) -> dict[int, str]:
    """Pid and command line of all that names this cluster's configuration, in arguments or environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            texts = command.split(b"\0") + (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or is not ours
            continue
        conf = str(cluster.conf).encode()
        if conf in texts or b"SLURM_CONF=" + conf in texts:
            found[int(folder.name)] = command.replace(b"\0", b" ").decode()
    return found


def start_escaping_job(cluster: TestCluster) -> str:
    """A job with a step, and with a child that escapes Slurm's tracking in a session of its own."""
    job_id = cluster.sbatch(["--gpus-per-node=1", "--wrap=setsid sleep 300 & srun sleep 300"])

    def all_started() -> bool:
        lines = list(processes(cluster).values())
        sleeping = [line for line in lines if line.endswith("sleep 300 ") and not line.startswith("srun")]
        return len(sleeping) == 2 and sum(line.startswith("slurmstepd") for line in lines) == 2

    cluster.wait_until(all_started, what="the job, its step and its stray child")
    return job_id


def test_two_clusters_at_once_run_jobs_over_two_nodes_with_gpus(cluster: TestCluster, other: TestCluster) -> None:
    step = (
        "srun --ntasks-per-node=2 --gpus-per-task=1 bash -c 'echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
    )
    arguments = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", f"--wrap={step}"]
    jobs = [(cluster, cluster.sbatch(arguments)), (other, other.sbatch(arguments))]
    for its_cluster, job_id in jobs:
        assert its_cluster.wait_job(job_id) == "COMPLETED"
        assert sorted(its_cluster.output(job_id).splitlines()) == ["n0 0 0", "n0 1 1", "n1 2 0", "n1 3 1"]


@pytest.mark.alone
def test_singleton_successor_starts_within_seconds(cluster: TestCluster) -> None:
    arguments = ["--job-name=relay", "--dependency=singleton", "--wrap=sleep 1"]
    first, second = cluster.sbatch(arguments), cluster.sbatch(arguments)
    assert cluster.job(second)["JobState"] == "PENDING"
    assert cluster.wait_job(first) == "COMPLETED"
    began = time.monotonic()
    cluster.wait_running(second, timeout=10)
    assert time.monotonic() - began < 5
    assert cluster.wait_job(second) == "COMPLETED"


@pytest.mark.long
def test_killed_node_goes_down_with_its_job_and_comes_back(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(node_timeout=10)
    job_id = cluster.sbatch(["--no-requeue", "--nodelist=n3", "--wrap=sleep 300"])
    cluster.wait_running(job_id)
    cluster.kill_node("n3")
    assert cluster.wait_job(job_id, timeout=600) == "NODE_FAIL"
    assert cluster.node_state("n3").startswith("DOWN")
    cluster.start_node("n3")
    cluster.wait_until(lambda: cluster.node_state("n3") == "IDLE", what="n3 is idle again")


@pytest.mark.long
def test_queue_and_running_job_survive_the_controller(cluster: TestCluster) -> None:
    running = cluster.sbatch(["--job-name=runs on", "--wrap=srun sleep 4"])
    held = cluster.sbatch(["--job-name=held", "--hold", "--wrap=true"])
    cluster.wait_running(running)
    queue = cluster.queue()
    assert queue == [QueuedJob(running, "runs on", "RUNNING"), QueuedJob(held, "held", "PENDING")]
    cluster.stop_ctld()
    assert cluster.run(["scontrol", "ping"], check=False).returncode != 0
    cluster.start_ctld()
    assert cluster.queue() == queue
    assert cluster.wait_job(running) == "COMPLETED"
    cluster.run(["scancel", held])
    assert cluster.wait_job(held) == "CANCELLED"


def test_what_a_user_writes_forges_no_field() -> None:
    line = (
        "JobId=7 JobName=a JobState=FAILED UserId=u(1) GroupId=g(1) MCS_label=N/A JobState=RUNNING "
        "Reason=None NodeList=n0 Command=/w/x JobState=COMPLETED y WorkDir=/w NodeList=n9 "
        "Comment=it is JobState=CANCELLED  StdErr=/w/7.err StdIn=/dev/null StdOut=/w/7.out Power="
    )
    found = job_fields(line)
    assert (found["JobState"], found["NodeList"], found["StdOut"]) == ("RUNNING", "n0", "/w/7.out")
    assert parse_fields(line)["JobState"] != "RUNNING"


def test_job_in_high_takes_the_nodes_of_one_in_low_which_is_requeued(cluster: TestCluster, other: TestCluster) -> None:
    # Slurm looks only every 30 s whether a grace time has passed; so this cluster has none.
    partitions = [each.run(["scontrol", "show", "partition", "low"]).stdout for each in (cluster, other)]
    assert [parse_fields(text)["GraceTime"] for text in partitions] == ["10", "0"]
    wrap = "--wrap=echo $SLURM_RESTART_COUNT >>starts; sleep 60"
    low = other.sbatch(["--partition=low", "--nodes=2", "--exclusive", wrap])
    starts = other.work / "starts"
    other.wait_until(lambda: starts.exists() and starts.read_text() == "\n", what="the low job's first start")
    high = other.sbatch(["--partition=high", "--nodes=2", "--exclusive", "--wrap=true"])
    assert other.wait_job(high) == "COMPLETED"
    other.wait_until(lambda: starts.read_text() == "\n1\n", what="the low job's second start")
    assert other.job(low)["Restarts"] == "1"
    other.run(["scancel", low])


def test_up_on_a_running_cluster_starts_nothing(cluster: TestCluster) -> None:
    before = [line for line in processes(cluster).values() if line.startswith("slurm")]
    done = cluster.run([SCRIPT, "up", cluster.path])
    assert "already up" in done.stderr
    assert done.stdout == f"export SLURM_CONF={cluster.conf}\n"
    assert [line for line in processes(cluster).values() if line.startswith("slurm")] == before


def test_down_ends_all_of_one_cluster_and_nothing_of_another(cluster: TestCluster, make_cluster: MakeCluster) -> None:
    doomed = make_cluster(nodes=1)
    jobs = [start_escaping_job(each) for each in (doomed, cluster)]
    # A bystander merely uses the cluster.
    bystander = subprocess.Popen(["sleep", "300"], env=doomed.env)
    try:
        survivors = processes(cluster)
        # As after a crash: the controller is gone, its pid file names a stranger.
        doomed.stop_ctld()
        (doomed.path / "run/slurmctld.pid").write_text(f"{bystander.pid}\n")
        doomed.down()
        assert set(processes(doomed)) == {bystander.pid}
        assert bystander.poll() is None
        assert processes(cluster) == survivors
        doomed.down()
    finally:
        bystander.kill()
        bystander.wait(300)
    cluster.run(["scancel", jobs[1]])


def test_down_ends_a_cluster_whose_folder_was_deleted(make_cluster: MakeCluster) -> None:
    doomed = make_cluster(nodes=1)
    start_escaping_job(doomed)
    shutil.rmtree(doomed.path)
    doomed.down()
    assert processes(doomed) == {}


KILLED = """
import sys, time
from pathlib import Path
from tests.slurm.cluster import TestCluster
TestCluster(Path(sys.argv[1]), nodes=1).up()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_nothing_of_a_cluster_outlives_a_killed_run(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    cluster = TestCluster(tmp_path_factory.mktemp("slurm"), nodes=1)
    words = [sys.executable, "-c", KILLED, str(cluster.path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        assert processes(cluster)
        run.kill()
    cluster.wait_until(lambda: not processes(cluster), 120, what="the end of all daemons")


@pytest.mark.usefixtures("accounting")
def test_accounting_comes_and_goes_with_its_cluster(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(nodes=1, accounting=True)
    job_id = cluster.sbatch(["--wrap=exit 3"])
    sacct = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={job_id}"]
    cluster.wait_until(lambda: cluster.run(sacct).stdout == "FAILED|3:0\n", what="sacct knows how the job ended")
    daemons = {line.split()[0] for line in cluster.run([SCRIPT, "status", cluster.path]).stdout.splitlines()}
    assert {"mariadbd", "slurmdbd"} <= daemons
    cluster.down()
    assert processes(cluster) == {}
    assert not (cluster.path / "db").exists()


def test_clusters_that_start_at_the_same_moment_share_no_port(tmp_path_factory: pytest.TempPathFactory) -> None:
    clusters = [TestCluster(tmp_path_factory.mktemp("slurm"), nodes=1) for _ in range(4)]
    starts = [
        subprocess.Popen([SCRIPT, "up", each.path, "--nodes=1"], env=each.env, stdout=subprocess.DEVNULL)
        for each in clusters
    ]
    try:
        assert [start.wait(300) for start in starts] == [0, 0, 0, 0]
        bases = sorted(int(parse_fields(each.conf.read_text())["SlurmctldPort"]) for each in clusters)
        assert all(lower + 2 <= upper for lower, upper in pairwise(bases))
    finally:
        for each in clusters:
            each.down()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "with blank"], "path has a blank"),
        (["up", "x" * 73], "unix sockets allow 72"),
        (["up", "."], "holds files that are not a test cluster's"),
        (["up", "new", "--nodes=0"], "--nodes: '0' is not a number from 1 to 1024"),
        (["up", "new", "--nods=4"], "unknown option --nods"),
        (["start-node", "new", "n0"], "no cluster was started here"),
        (["frobnicate"], "unknown command: frobnicate"),
    ],
    ids=range(7),  # short: of the path that the second one measures
)
def test_bad_request(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [SCRIPT, *arguments], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("complaint", "environ", "action"),
    [
        ("", {}, "run"),
        ("missing: sbatch", {}, "fail"),
        ("missing: sbatch", {"RELAYRUN_NO_SLURM": "1"}, "skip"),
        ("missing: sbatch", {"RELAYRUN_NO_SLURM": "1", "CI": "true"}, "fail"),
        ("", {"RELAYRUN_NO_SLURM": "1", "CI": "true"}, "run"),
        ("", {"RELAYRUN_NO_SLURM": "1"}, "skip"),
    ],
)
def test_slurm_tests_are_skipped_only_on_request_and_never_in_ci(
    complaint: str, environ: dict[str, str], action: str
) -> None:
    assert verdict(complaint, environ)[0] == action
