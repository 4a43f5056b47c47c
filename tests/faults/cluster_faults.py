"""Faults that no user of a cluster can plant: they end daemons, mount, need root, or know the code's own files.

The nodes of a test cluster are all this machine. `FAULTS` are those of `relayrun drill` and these.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from relayrun.control.rundir import triggers
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.errors import InputError, SchedulerError
from relayrun.lab.faults import experiment, processes, table
from relayrun.lab.faults.experiment import FaultResult, FaultSite
from relayrun.lab.faults.table import Fault, kill_batch_script, read_faults, signal_save_and_exit, stop_rank
from relayrun.lab.faults.target import ClusterUnderTest
from tests.slurm.cluster import TestCluster

HERE = Path(__file__).parent
STRANGER_SECONDS = 6.0


class LocalTarget(ClusterUnderTest):
    """Signals directly: all nodes of the cluster are this machine."""

    def send_signal(self, job_id: str, role: str, number: signal.Signals, only: Sequence[int]) -> list[str]:
        if role == "rank":
            named = processes.named_ranks(self.rank_pids(job_id), only)
        else:
            named = processes.role_processes(role, str(self.run.path), job_id)
        return [name for name, _ in processes.signal_processes(named, number)]

    def rank_pids(self, job_id: str) -> dict[int, int]:
        return processes.rank_processes(str(self.run.path), job_id)


def step_daemons(pids: list[int]) -> list[int]:
    """Return the slurmstepd above each of these processes; needs root."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # the process has ended
            while pid > 1 and processes.program_name(pid) != "slurmstepd":
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.add(pid)
    return sorted(found - {0, 1})


def write_wrappers(commands: Mapping[str, str], folder: Path, *, search: str, real: Mapping[str, str]) -> None:
    """Write the wrappers of a fault.

    A wrapper acts only if its parent process belongs to a job: the supervisor or the batch script. `search`: a PATH for
    the commands; `real`: other names to look up, by command. Raises InputError if a command is missing.
    """
    for name, text in commands.items():
        found = shutil.which(real.get(name, name), path=search)
        if found is None:
            raise InputError(f"{real.get(name, name)} is not on PATH")
        names = f'real="{found}" provoked="{wrapper_marker(folder)}"'
        inside = f"if grep -qz '^SLURM_JOB_ID=' /proc/${{PPID}}/environ; then\n{text.strip()}\nfi"
        write_wrapper(folder, name, f'{names}\n{inside}\nexec "${{real}}" "$@"')


def write_wrapper(folder: Path, name: str, text: str) -> Path:
    """Write a Bash script `folder/bin/NAME`, and return its path."""
    path = folder / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def wrapper_marker(folder: Path) -> Path:
    """Return the file that a wrapper creates when it does harm."""
    return folder / "provoked"


@dataclass(frozen=True)
class ClusterFault(Fault):
    """A row of `cluster_faults.yaml`."""

    _: KW_ONLY
    commands: Mapping[str, str] = field(default_factory=dict)
    """Bash by name of a scheduler's command or the supervisor's `python3`, run before it, inside jobs alone.

    `${real}` is the command; Bash that does harm creates the file `${provoked}`.
    """
    before_begin: bool = False
    """Call `act` right after the submit: it keeps the first attempt from beginning."""
    small_disk: str = ""
    """Folder of the run directory that becomes a small file system of its own; `.` is all of it."""


@dataclass(kw_only=True)
class ControlledTarget(LocalTarget):
    """A chain on a test cluster whose daemons may be ended."""

    control: TestCluster
    commands: Path
    """Folder with the wrappers of `ClusterFault.commands` and their marker."""
    before_begin: bool = False
    lost_nodes: list[str] = field(default_factory=list)
    """Nodes whose daemons the fault has stopped."""

    def wait_begin(self) -> None:
        if not self.before_begin:
            super().wait_begin()

    def _job(self, job_id: str) -> Job:
        job = self.slurm.query(job_id)
        assert job is not None
        return job

    def kill_node(self) -> None:
        """Stop the daemon of the node that rank 1 runs on."""
        self._lose(self.slurm.nodes.expand(self._job(self.job_id()).nodes)[1])

    def lose_node(self) -> None:
        """Kill the daemon of the batch script's node, the batch script, and all its processes."""
        job_id = self.job_id()
        self._lose(self._job(job_id).batch_host)
        pids = [pid for pid, _, _ in processes.job_processes(job_id)]
        for pid in {*pids, *step_daemons(pids)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _lose(self, node: str) -> None:
        self.control.kill_node(node)
        self.lost_nodes.append(node)

    def bring_back_nodes(self) -> None:
        """Restart the stopped daemons, and resume their nodes. Raises SchedulerError."""
        for node in self.lost_nodes:
            self.control.start_node(node)
            with suppress(SchedulerError):  # the node may be up
                self.order("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.lost_nodes.clear()

    @contextmanager
    def slow_epilogs(self) -> Iterator[None]:
        """Keep ended jobs COMPLETING inside the block."""
        slow = self.commands / "slow"
        epilog = write_wrapper(self.commands, "epilog", f'while [[ -e "{slow}" ]]; do sleep 0.5; done')
        slow.touch()
        before = self.control.conf.read_text(encoding="utf-8")
        self.control.conf.write_text(f"{before}Epilog={epilog}\n", encoding="utf-8")
        self.order("scontrol", "reconfigure")
        try:
            yield
        finally:
            slow.unlink()
            self.control.conf.write_text(before, encoding="utf-8")
            self.order("scontrol", "reconfigure")

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.run.path)], check=True)

    def stop_controller(self, seconds: float, *, tell: Path | None = None) -> None:
        """Stop the controller for some seconds; return when it is back. `tell`: file that says that it is away."""
        self.control.stop_ctld()
        try:
            if tell is not None:
                tell.touch()
            time.sleep(seconds)
        finally:
            self.control.start_ctld()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the ranks and their slurmstepd with SIGSTOP inside the block. Needs root."""
        ranks = list(self.rank_pids(self.job_id()).values())
        daemons = step_daemons(ranks)
        for pid in (*daemons, *ranks):
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in (*ranks, *daemons):
                os.kill(pid, signal.SIGCONT)


def run_fault(site: FaultSite, cluster: TestCluster, fault: Fault) -> FaultResult:
    """Do one test on a test cluster, and start its lost nodes again."""
    if not isinstance(fault, ClusterFault):
        return experiment.run_fault(site, fault)
    folder, search = site.folder / "commands" / fault.name, site.environment["PATH"]
    write_wrappers(fault.commands, folder, search=search, real={})
    targets: list[ControlledTarget] = []
    before_begin = fault.before_begin

    def target(**values: Any) -> ControlledTarget:
        targets.append(ControlledTarget(control=cluster, commands=folder, before_begin=before_begin, **values))
        return targets[-1]

    if "python3" in fault.commands:  # the wrapper is found by name on PATH
        fault = replace(fault, config={**fault.config, "cluster": {"host_python": "python3"}})
    path = site.environment | {"PATH": f"{folder / 'bin'}:{search}"}
    with small_file_system(site.run(fault.name), fault):
        try:
            result = experiment.run_fault(replace(site, target=target, environment=path), fault)
        finally:
            for each in targets:
                each.bring_back_nodes()
    if fault.commands and not wrapper_marker(folder).exists():
        result.wrong.append("the command that does harm was not called: the fault did not happen")
    return replace(result, passed=not result.wrong)


@contextmanager
def small_file_system(run: Run, fault: ClusterFault) -> Iterator[None]:
    """Mount a file system of 40 MB at the folder of a disk fault inside the block; keep its files afterwards."""
    if not fault.small_disk:
        yield
        return
    folder = run.path / fault.small_disk
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", str(folder)], check=True)
    kept = folder.with_name(f"{folder.name}.kept")
    try:
        yield
        shutil.copytree(folder, kept, symlinks=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
    kept.rename(folder)


STRANGERS_WORDS = (
    b"",
    b'{"kind": "hello", "job": "%s", "attempt": 1, "node": 0, "name": "n", "port": 1}\n',
    b'{"kind": "answer", "node": 1, "nonce": "%s", "proof": "0"}\n{"kind": "leave", "code": 1}\n',
    b'{"kind": "health", "facts": {"tmp": "%s"}}\n',
    b"GET /%s HTTP/1.1\r\n\r\n",
    b"\0" * 40,
)
"""Words of a process that knows the job and not the secret of its attempt."""


def try_ports(job_id: str, seconds: float) -> dict[tuple[str, int], int]:
    """Connect to every port on which processes of the job listen on this node, again and again, and say
    `STRANGERS_WORDS`; return the number of connections to each."""
    tried: dict[tuple[str, int], int] = {}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for address in listening_addresses(pid for pid, _, _ in processes.job_processes(job_id)):
            for words in STRANGERS_WORDS:
                with suppress(OSError), socket.create_connection(address, timeout=1) as connection:
                    tried[address] = tried.get(address, 0) + 1
                    connection.sendall(words.replace(b"%s", job_id.encode()))
                    connection.settimeout(0.05)
                    connection.recv(1 << 16)
    return tried


def listening_addresses(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return the addresses on which these processes listen."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            sockets |= {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    found = set()
    for family, kind in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # it listens
                address, _, port = fields[1].partition(":")
                words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
                host = socket.inet_ntop(family, b"".join(words))
                found.add(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)))
    return found


def let_stranger_try(target: ControlledTarget) -> None:
    """Let this process, without the attempt's secret, try all ports of the job for some seconds."""
    target.wait_iteration(5)
    target.require(try_ports(target.job_id(), STRANGER_SECONDS), "no process of the job listens")


def revive_replaced_attempt(target: ControlledTarget) -> None:
    """Stop the first attempt inside its save, out of Slurm's reach; continue it beside its successor."""
    staged = target.run.staging(1) / "iter_0000020"
    target.wait(lambda: (staged / "metadata.json").exists())
    with target.frozen():
        target.signal("batch", signal.SIGKILL)
        target.wait_iteration(15, attempt=2)


def fill_disk(target: ControlledTarget) -> None:
    """Fill the disk before the save of iteration 10; free the space before the end."""
    filler = target.run.checkpoints / "filler"
    free = shutil.disk_usage(target.run.checkpoints).free
    filler.write_bytes(b"\0" * max(0, free - 4096))
    target.wait_iteration(25)
    filler.unlink()


def kill_node(target: ControlledTarget) -> None:
    """Kill the slurmd of a node after iteration 15, as a crash of the node does."""
    target.wait_iteration(15)
    target.kill_node()


def controller_down_at_submission(target: ControlledTarget) -> None:
    """Stop the controller for 60 s, from before the first successor is queued: sbatch waits until it is away."""
    marker = wrapper_marker(target.commands)
    target.wait(marker.exists)
    target.stop_controller(60, tell=marker.with_name("away"))


def controller_down_at_exit(target: ControlledTarget) -> None:
    """Ask the job to save and exit after iteration 15, and stop the controller for 60 s meanwhile."""
    target.wait_iteration(15)
    target.order("scancel", "--signal=USR2", "--batch", target.job_id())
    target.stop_controller(60)


def preempt(target: ControlledTarget) -> None:
    """Submit a job to a partition of higher priority that needs all nodes; return when the second attempt has begun."""
    target.wait_iteration(15)
    target.order("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 5", "--output=/dev/null")
    target.wait(target.run.attempt(2).begin.exists)


def hold_job_in_completing(target: ControlledTarget) -> None:
    """Keep the first job COMPLETING while its successor runs, and kill the successor's batch script."""
    with target.slow_epilogs():
        signal_save_and_exit(target)
        target.wait_iteration(20, attempt=2)
        target.require("COMPLETING" in target.jobs().values(), "the first job does not stay COMPLETING")
        target.signal("batch", signal.SIGKILL)


def read_only_between_jobs(target: ControlledTarget) -> None:
    """Make the run directory read-only when the second job begins, and writable for its second try."""
    target.wait(target.run.attempt(1).successor.exists)
    waiting = target.waiting_job()
    target.order("scontrol", "update", f"JobId={waiting}", "StartTime=now+600")
    signal_save_and_exit(target)
    target.wait(lambda: list(target.jobs()) == [waiting])
    target.remount("ro")
    target.start_successor_now()
    target.wait(lambda: "begin-failed=1" in target.ask("scontrol", "show", "job", waiting))
    target.remount("rw")
    target.start_successor_now()


def lose_node_before_begin(target: ControlledTarget) -> None:
    """Lose the node of the batch script while `begin` runs, before anything is queued."""
    target.wait(wrapper_marker(target.commands).exists)
    target.lose_node()


def ask_to_exit(target: ControlledTarget) -> None:
    """Touch the exit trigger after iteration 15."""
    target.wait_iteration(15)
    triggers.touch_trigger(target.run, "exit")


def kill_begin(target: ControlledTarget) -> None:
    """Kill the batch script, and the next job's `begin` (by `Fault.commands`)."""
    kill_batch_script(target)
    target.wait(wrapper_marker(target.commands).exists)
    target.start_successor_now()


def disable_watch(target: ControlledTarget) -> None:
    """Put a directory where the watch writes the metrics, damage a heartbeat, and stop a rank."""
    target.wait_iteration(15)
    first, view = target.run.attempt(1), target.run.metrics_view
    (first.heartbeats / "torn.json").write_text('{"node": ')
    aside = view.rename(view.with_name("metrics.aside"))
    view.mkdir()
    stop_rank(target)
    target.wait(first.hang.exists)
    view.rmdir()
    aside.rename(view)


def kill_batch_script_at_begin(target: ControlledTarget) -> None:
    """Ask the first job to exit; `Fault.commands` kills the next batch script, and another job follows."""
    signal_save_and_exit(target)
    target.wait(wrapper_marker(target.commands).exists)
    killed = wrapper_marker(target.commands).read_text().strip()
    target.wait(lambda: [job for job in target.waiting_jobs() if job != killed])
    target.start_successor_now()


def block_metrics_view(target: ControlledTarget) -> None:
    """Put a directory where the merged metrics are, ask the attempt to exit, and remove it in the next attempt."""
    target.wait_iteration(15)
    view = target.run.metrics_view
    aside = view.rename(view.with_name("metrics.aside"))
    view.mkdir()
    signal_save_and_exit(target)
    target.wait_iteration(20, attempt=2)
    view.rmdir()
    aside.rename(view)


def _cluster_faults() -> Iterator[ClusterFault]:
    for fault in read_faults(HERE / "cluster_faults.yaml", vars(table) | globals(), kind=ClusterFault):
        assert isinstance(fault, ClusterFault)
        commands = {name: text.replace("FOLDER", str(HERE)) for name, text in fault.commands.items()}
        yield replace(fault, commands=commands)


FAULTS: tuple[Fault, ...] = (*table.FAULTS, *_cluster_faults())
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
