"""Every fault of the drill's table on a real Slurm, with the real training program on two nodes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relayrun.drill.table import FAULTS, Fault
from relayrun.files import read_lines
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from tests import warm
from tests.checkpoints import assert_same_bytes
from tests.slurm.cluster import ROOT, TestCluster
from tests.slurm.conftest import MakeCluster
from tests.workspace import Workspace, ends, steps

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 40
FAULTS_HOOK = "relayrun.drill.inject:Faults"


@dataclass
class SlurmStage:
    """A `relayrun.drill.table.Stage` on a test cluster, whose nodes are all this machine."""

    cluster: TestCluster
    run: Run

    def wait(self, condition: Callable[[], object], seconds: float = 60) -> None:
        self.cluster.wait_until(condition, timeout=4 * seconds, interval=0.05)

    def wait_iteration(self, iteration: int, *, attempt: int = 1) -> None:
        metrics = self.run.attempt(attempt).metrics
        self.wait(lambda: any(line["iteration"] >= iteration for line in read_lines(metrics)), 90)

    def rank_pids(self) -> dict[int, int]:
        """The ranks' own processes, not the shells, srun's children or what stands in for them."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = dict(item.partition(b"=")[::2] for item in (entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if f"--run-dir={self.run.path}".encode() in words and b"python" in words[0] and b"RANK" in variables:
                found[int(variables[b"RANK"])] = int(entry.name)
        return found

    def step_daemons(self) -> list[int]:
        """The slurmstepd above each rank."""
        found = set()
        for pid in self.rank_pids().values():
            while pid > 1 and Path(f"/proc/{pid}/comm").read_text().strip() != "slurmstepd":
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.add(pid)
        return sorted(found)

    def batch_pid(self) -> int:
        """The shell that runs the job script: Slurm names its copy in the spool slurm_script."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes()
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            mine = f"SLURM_JOB_NAME={Plan.load(self.run).job_name}".encode() in variables
            if b"slurm_script" in words and b"bash" in words and mine:
                return int(entry.name)
        raise AssertionError("no batch script runs")

    def job_id(self) -> str:
        name = Plan.load(self.run).job_name
        return next(job.id for job in self.cluster.queue() if job.name == name and job.state == "RUNNING")

    def command(self, *words: str) -> str:
        return self.cluster.run(words).stdout

    def kill_node(self) -> None:
        hosts = self.command("scontrol", "show", "hostnames", self.cluster.job(self.job_id())["NodeList"]).split()
        self.cluster.kill_node(hosts[1])

    def stop_controller(self, seconds: float) -> None:
        self.cluster.stop_ctld()
        time.sleep(seconds)
        self.cluster.start_ctld()

    def hurry(self) -> None:
        name = Plan.load(self.run).job_name

        def delayed() -> list[str]:
            jobs = [job.id for job in self.cluster.queue() if job.name == name and job.state == "PENDING"]
            return [job for job in jobs if self.cluster.job(job).get("Reason") == "BeginTime"]

        self.wait(lambda: delayed() or not [job for job in self.cluster.queue() if job.name == name], 90)
        for job in delayed():
            self.cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.make(tmp_path_factory.mktemp("drill"))


def configure(workspace: Workspace, folder: str, fault: Fault | None) -> Path:
    inject = ",".join(filter(None, ["step-delay=0.05", fault.inject if fault else ""]))
    python = (
        sys.executable if fault and fault.long else warm.python()
    )  # the long rows look at Slurm's tree of processes
    sections = {
        "training": {"steps": STEPS, "hooks": [{"hook": FAULTS_HOOK, "options": {"faults": inject}}]},
        "checkpoint": {"interval": 10},
        "job": {"nodes": 2, "ntasks_per_node": 1, "time": "10"},
        "chain": {"auto_requeue": True},
        "cluster": {
            "name": "test",
            "scheduler": "slurm",
            "environment": {"MASTER_ADDR": "127.0.0.1"},
            "python": python,
        },
    }
    for section, changes in (fault.config if fault else {}).items():
        sections[section] = sections[section] | dict(changes)
    return workspace.config(folder, **sections)


def submit(cluster: TestCluster, config: Path) -> None:
    cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config], cwd=ROOT)


def wait_for_end(cluster: TestCluster, run: Run, timeout: float) -> None:
    name = Plan.load(run).job_name

    def over() -> bool:
        states = [job.state for job in cluster.queue() if job.name == name]
        assert states.count("PENDING") <= 1, states
        return not states

    cluster.wait_until(over, timeout=timeout, interval=0.5)


@pytest.fixture(scope="session")
def reference(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run, of the first worker that needs it, for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "drill-reference"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = Run(folder / "reference")
        if not (folder / "done").exists():
            workspace = Workspace.make(folder)
            cluster = TestCluster(tmp_path_factory.mktemp("slurm"))
            cluster.up()
            try:
                submit(cluster, configure(workspace, "reference", None))
                wait_for_end(cluster, run, timeout=400)
            finally:
                cluster.down()
            assert [end.cause for end in ends(run)] == ["done"]
            (folder / "done").touch()
    return run


@pytest.fixture
def small_disk(workspace: Workspace, request: pytest.FixtureRequest) -> Iterator[None]:
    """For the full disk: the run's checkpoints on a file system of 40 MB."""
    folder = workspace.run("disk-full").checkpoints
    if request.node.callspec.id != "disk-full":
        yield
        return
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], check=True)
    yield
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=[pytest.mark.long] * fault.long) for fault in FAULTS]
)
@pytest.mark.usefixtures("small_disk")
def test_a_chain_survives_or_stops_with_a_reason(
    fault: Fault, make_cluster: MakeCluster, workspace: Workspace, reference: Run
) -> None:
    cluster = make_cluster(grace=30, node_timeout=10 if fault.name == "node-lost" else 120)
    run = workspace.run(fault.name)
    submit(cluster, configure(workspace, fault.name, fault))
    try:
        fault.act(SlurmStage(cluster, run))
        wait_for_end(cluster, run, timeout=800)
    finally:
        cluster.down()
    records = ends(run)
    said = "\n".join([record.reason for record in records] + [run.stop.read_text() if run.stop.exists() else ""])
    causes = [record.cause for record in records]
    assert len(causes) == len(fault.causes), said
    assert all(cause in wanted.split("|") for cause, wanted in zip(causes, fault.causes, strict=True)), said
    assert fault.says in said
    if fault.expect == "resumed":
        assert steps(run) == steps(reference)
        assert sorted(steps(run)) == list(range(1, STEPS + 1))
        assert assert_same_bytes(reference.checkpoint(STEPS), run.checkpoint(STEPS)) > 50
    else:
        assert run.stop.exists()
    assert not any(entry.name.startswith("iter") for entry in (run.checkpoints / ".staging").rglob("*"))
