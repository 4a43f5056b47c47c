"""Every fault of the drill's table on a real Slurm, with the real training program on two nodes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from relayrun.drill.table import FAULTS, Fault
from relayrun.files import read_lines
from relayrun.rundir import rounds
from relayrun.rundir.plan import Plan, job_name
from relayrun.rundir.run import Run
from relayrun.submit.submission import log_folder
from tests import warm
from tests.checkpoints import assert_same_bytes
from tests.slurm.cluster import ROOT, TestCluster
from tests.slurm.conftest import MakeCluster
from tests.slurm.test_law_slurm import job_processes, program
from tests.workspace import CONFIG, Workspace, ends, steps

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 40
FAULTS_HOOK = "relayrun.drill.inject:Faults"


@dataclass
class SlurmStage:
    """A `relayrun.drill.table.Stage` on a test cluster, whose nodes are all this machine."""

    cluster: TestCluster
    run: Run
    commands: Path

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
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if f"--run-dir={self.run.path}".encode() not in words or b"python" not in words[0]:
                continue
            if name.startswith("rank-"):  # one that a server of an agent forked
                found[int(name.removeprefix("rank-"))] = int(entry.name)
            elif b"RANK" in variables and b"relayrun.training" in words:
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

    def watch_pid(self) -> int:
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"watch" in words and b"relayrun.chain" in words and str(self.run.path).encode() in words:
                    return int(entry.name)
        raise AssertionError("no watch runs")

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

    def waiting_jobs(self) -> list[str]:
        name = Plan.load(self.run).job_name
        return [job.id for job in self.cluster.queue() if job.name == name and job.state == "PENDING"]

    def command(self, *words: str) -> str:
        return self.cluster.run(words).stdout

    def kill_node(self) -> None:
        hosts = self.command("scontrol", "show", "hostnames", self.cluster.job(self.job_id())["NodeList"]).split()
        self.cluster.kill_node(hosts[1])

    def lose_node(self) -> None:
        job = self.job_id()
        self.cluster.kill_node(self.cluster.job(job)["BatchHost"])
        for pid in job_processes(job):
            os.kill(pid, signal.SIGKILL)

    @contextmanager
    def slow_epilogs(self) -> Iterator[None]:
        slow = self.commands / "slow"
        slow.touch()
        epilog = program(self.commands, "epilog", f'while [[ -e "{slow}" ]]; do sleep 0.5; done')
        with self.cluster.conf.open("a") as conf:
            conf.write(f"Epilog={epilog}\n")
        self.command("scontrol", "reconfigure")
        yield
        slow.unlink()

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.run.path)], check=True)

    def stop_controller(self, seconds: float) -> None:
        self.cluster.stop_ctld()
        time.sleep(seconds)
        self.cluster.start_ctld()

    def hurry(self) -> None:
        name = Plan.load(self.run).job_name

        def delayed() -> list[str]:
            return [job for job in self.waiting_jobs() if self.cluster.job(job).get("Reason") == "BeginTime"]

        self.wait(lambda: delayed() or not [job for job in self.cluster.queue() if job.name == name], 90)
        for job in delayed():
            # Slurm kills one that was queued again and starts in the second in which it was: its credential is revoked
            start = "now" if self.cluster.job(job).get("Restarts") == "0" else "now+2"
            self.cluster.run(["scontrol", "update", f"JobId={job}", f"StartTime={start}"], check=False)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.make(tmp_path_factory.mktemp("drill"))


def configure(workspace: Workspace, folder: str, fault: Fault | None, *, recovery: str = "job") -> Path:
    inject = ",".join(filter(None, ["step-delay=0.05", fault.inject if fault else ""]))
    python = (
        sys.executable if fault and fault.long else warm.python()
    )  # the long rows look at Slurm's tree of processes
    sections = {
        "training": {"steps": STEPS, "hooks": [{"hook": FAULTS_HOOK, "options": {"faults": inject}}]},
        "checkpoint": {"interval": 10},
        "job": {"nodes": 2, "ntasks_per_node": 1, "time": "10"},
        "chain": {"auto_requeue": True, "recovery": recovery},
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


def submit(cluster: TestCluster, config: Path, commands: Path | None = None) -> None:
    """`commands`: a folder of commands that stand before Slurm's own."""
    env = {"PATH": f"{commands}:{cluster.env['PATH']}"} if commands else None
    cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config], cwd=ROOT, env=env)


def write_commands(cluster: TestCluster, fault: Fault, folder: Path) -> None:
    """Each acts only where the process above it is a part of a job: the supervisor or the batch script."""
    for name, text in fault.commands.items():
        real = shutil.which(name, path=cluster.env["PATH"])
        inside = f"if grep -qz '^SLURM_JOB_ID=' /proc/${{PPID}}/environ; then\n{text.strip()}\nfi"
        program(folder, name, f'real="{real}" provoked="{folder / "provoked"}"\n{inside}\nexec "${{real}}" "$@"')


def wait_for_end(cluster: TestCluster, run: Run, timeout: float) -> None:
    plan = Plan.load(run)

    def over() -> bool:
        queue = cluster.queue()
        states = [job.state for job in queue if job.name == plan.job_name]
        assert states.count("PENDING") <= 1, states
        return not states and all(job.name != plan.fallback_job_name for job in queue)

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


def logs(run: Run) -> list[Path]:
    """What the jobs of the run said."""
    return sorted(log_folder().glob(f"{job_name(CONFIG['project'], CONFIG['name'], run.path)}-*"))


@pytest.fixture
def small_disk(workspace: Workspace, request: pytest.FixtureRequest) -> Iterator[None]:
    """For faults of the disk: the run directory, or a folder of it, on a file system of 40 MB."""
    fault: Fault = request.node.callspec.params["fault"]
    if not fault.small_disk:
        yield
        return
    folder = workspace.run(fault.name).path / fault.small_disk
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], check=True)
    yield
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=[pytest.mark.long] * fault.long) for fault in FAULTS]
)
@pytest.mark.usefixtures("small_disk")
def test_a_chain_survives_or_stops_with_a_reason(
    fault: Fault, make_cluster: MakeCluster, workspace: Workspace, reference: Run, tmp_path: Path
) -> None:
    drill(fault, make_cluster, workspace, reference, tmp_path)


AGAIN = ("rank-killed", "rank-stopped", "killed-while-staging", "latest-torn", "tracker-missing")
"""Rows whose ranks agents start again inside their job."""
AS_WITHOUT = (
    "batch-script-killed",
    "crash-loop",
    "crash-after-progress",
    "loss-nan",
    "rank-asleep",
    "setup-fails",
    "python-missing",
    "cancelled",
    "preempted",
    "node-lost",
    "controller-down-at-exit",
)
"""Rows that end with agents as they do without."""


@pytest.mark.long
@pytest.mark.parametrize("name", [*AGAIN, *AS_WITHOUT])
def test_a_chain_with_agents_survives_or_stops_with_a_reason(
    name: str, make_cluster: MakeCluster, workspace: Workspace, reference: Run, tmp_path: Path
) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    if name in AGAIN:
        fault = replace(fault, causes=("done",), says="")
    run = drill(fault, make_cluster, workspace, reference, tmp_path, recovery="node")
    assert any(failed.again for failed in rounds.read(run.attempt(1))) or name not in AGAIN


def drill(
    fault: Fault,
    make_cluster: MakeCluster,
    workspace: Workspace,
    reference: Run,
    tmp_path: Path,
    *,
    recovery: str = "job",
) -> Run:
    """Let the fault happen to a chain, and see that it ends as the table says."""
    folder = fault.name if recovery == "job" else f"{fault.name}-{recovery}"
    cluster = make_cluster(grace=30, node_timeout=10 if fault.name.startswith("node-lost") else 120)
    run = workspace.run(folder)
    for log in logs(run):
        log.unlink()  # of an earlier run of the same name
    write_commands(cluster, fault, tmp_path)
    submit(cluster, configure(workspace, folder, fault, recovery=recovery), tmp_path / "bin")
    try:
        fault.act(SlurmStage(cluster, run, tmp_path))
        wait_for_end(cluster, run, timeout=800)
    finally:
        cluster.down()
    records = ends(run)
    said = "\n".join([record.reason for record in records] + [run.stop.read_text() if run.stop.exists() else ""])
    causes = [record.cause for record in records]
    assert len(causes) == len(fault.causes), said
    assert all(cause in wanted.split("|") for cause, wanted in zip(causes, fault.causes, strict=True)), said
    assert fault.says in said
    assert fault.logged in "".join(log.read_text() for log in logs(run))
    assert (tmp_path / "provoked").exists() is bool(fault.commands)
    if fault.expect == "resumed":
        assert steps(run) == steps(reference)
        assert sorted(steps(run)) == list(range(1, STEPS + 1))
        assert assert_same_bytes(reference.checkpoint(STEPS), run.checkpoint(STEPS)) > 50
    else:
        assert run.stop.exists()
    assert not any(entry.name.startswith("iter") for entry in (run.checkpoints / ".staging").rglob("*"))
    return run
