"""A throw-away Slurm for tests: `scripts/tools/test_cluster.sh` as a Python object.

Every command runs with a clean environment and a home of its own, so that nothing of the developer's (settings,
credentials, another cluster's SLURM_*) reaches a job.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

from relayrun.control.scheduler import slurm_commands
from tests.waiting import wait_for
from tests.watchers import end_watcher, start_watcher

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/tools/test_cluster.sh"

FINAL_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)

T = TypeVar("T")


def first_job_ids() -> Iterator[int]:
    """Numbers from which the clusters of this worker count their jobs, each far from the next.

    The MASTER_PORT of a GPU check follows from a job's id, and all clusters are one machine.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in count():
        yield 1 + worker % 8 * 2500 + number % 10 * 250


FIRST_JOB_IDS = first_job_ids()


class QueuedJob(NamedTuple):
    """One line of squeue; `id` as Slurm writes it, for an array element `12_3`."""

    id: str
    name: str
    state: str


class TestCluster:
    """One cluster in the folder `path`, at most 72 bytes long and without blanks; nodes n0, n1, ...

    Work happens in `path/work` (the default working directory, where job outputs land) with the home `path/home`.
    Jobs of another user than the caller's need a path that this user can pass through; pytest's folders are 0700.

    Args:
        path: the cluster's folder, empty or not there.
        nodes, cpus, gpus: count of nodes; CPUs and GPUs of each, all pretended.
        kill_wait: seconds between SIGTERM and SIGKILL at a job's time limit.
        grace: seconds that a preempted job of the partition `low` has.
        node_timeout: seconds without an answer after which a node counts as lost; few only where a test loses one.
        accounting: with slurmdbd and a database: sacct answers, limits hold, users need an association.
        apart: every node has process ids of its own, as a machine has.
        topology: with two switches, so that Slurm orders nodes otherwise than by their names.
    """

    __test__ = False  # not a class of tests, whatever its name

    def __init__(
        self,
        path: Path,
        *,
        nodes: int = 4,
        cpus: int = 8,
        gpus: int = 4,
        kill_wait: int = 3,
        grace: int = 10,
        node_timeout: int = 120,
        accounting: bool = False,
        apart: bool = False,
        topology: bool = False,
    ) -> None:
        self.path = path.resolve()
        self.conf = self.path / "etc/slurm.conf"
        self.work = self.path / "work"
        self._watcher: subprocess.Popen[bytes] | None = None
        self.settings = [
            f"--nodes={nodes}",
            f"--cpus={cpus}",
            f"--gpus={gpus}",
            f"--kill-wait={kill_wait}",
            f"--grace={grace}",
            f"--node-timeout={node_timeout}",
            f"--first-job-id={next(FIRST_JOB_IDS)}",
            f"--accounting={int(accounting)}",
            f"--apart={int(apart)}",
            f"--topology={int(topology)}",
        ]
        tools = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
        self.env = {
            "PATH": os.pathsep.join(tools),
            "HOME": str(self.path / "home"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.conf),
        }
        if "PYTHONPATH" in os.environ:  # the tree under test may be another one than the installed one
            self.env["PYTHONPATH"] = os.environ["PYTHONPATH"]

    def up(self) -> None:
        """Start the cluster and wait until its nodes are idle; after an error or an interrupt nothing of it runs, and
        nothing either once this process is gone."""
        self._watcher = start_watcher(SCRIPT, "down", self.path)
        try:
            self._script("up", *self.settings)
        except BaseException:
            self.down()
            raise
        self.work.mkdir(exist_ok=True)
        (self.path / "home").mkdir(exist_ok=True)

    def down(self) -> None:
        """End the cluster and every process of its jobs. Idempotent; its logs stay."""
        self._script("down")
        if self._watcher is not None:
            end_watcher(self._watcher)

    def kill_node(self, node: str) -> None:
        """SIGKILL the node's slurmd; Slurm notices after once or twice `node_timeout`. Processes of its jobs go on."""
        self._script("kill-node", node)

    def start_node(self, node: str) -> None:
        self._script("start-node", node)

    def stop_ctld(self) -> None:
        """End the controller; commands fail, running steps go on."""
        self._script("stop-ctld")

    def start_ctld(self) -> None:
        """Start the controller with the queue it had; returns when it answers."""
        self._script("start-ctld")

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = 240,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command beside the cluster.

        Args:
            check: raise AssertionError with the whole output when the exit status is not 0.
            timeout: seconds until subprocess.TimeoutExpired.
            cwd: default is `work`.
            env: variables on top of the clean environment.
            stdin: text for its standard input, by default empty.
        """
        done = subprocess.run(
            list(map(str, argv)),
            cwd=cwd or self.work,
            env=self.env | (env or {}),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"exit status {done.returncode} of {done.args}\nstdout: {done.stdout}\nstderr: {done.stderr}"
            )
        return done

    def sbatch(self, argv: Sequence[str | Path], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Submit with these arguments of sbatch; return the job's id."""
        return self.run(["sbatch", "--parsable", *argv], cwd=cwd, env=env).stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller knows of one job, also after its end: `JobState`, `Restarts`, `NodeList`, `StdOut`, ...

        A value with blanks is kept whole, unless it holds ` Word=` itself; what a user may write forges no other field.
        """
        return job_fields(self.run(["scontrol", "show", "job", "-o", job_id]).stdout)

    def allocations(self, *which: str, ids: Collection[str], columns: Sequence[str]) -> list[dict[str, str]]:
        """What sacct has of the jobs that ran, when it knows all of these jobs and every end.

        A job that was queued again, or had fewer nodes later on, has several rows. `which`: options that choose jobs.
        """
        names = ["JobID", "Start", "End", *columns]
        asked = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", "--allusers", *which]
        asked.append(f"--format={','.join(names)}")

        def ended() -> list[dict[str, str]]:
            rows = [dict(zip(names, line.split("|"), strict=True)) for line in self.run(asked).stdout.splitlines()]
            ran = [row for row in rows if row["Start"] not in ("Unknown", "None")]
            known = set(ids) <= {row["JobID"] for row in ran} and all(row["End"] != "Unknown" for row in ran)
            return ran if known else []

        return self.wait_until(ended, what=f"sacct knows the ends of {', '.join(ids)}")

    def output(self, job_id: str) -> str:
        """What the job wrote to its standard output so far."""
        path = Path(self.job(job_id)["StdOut"])
        return path.read_text() if path.exists() else ""

    def queue(self) -> list[QueuedJob]:
        """Jobs that pend or run, array elements one by one, in the order of their ids."""
        lines = self.run(["squeue", "--noheader", "--array", "--sort=i", "--format=%i %T %j"]).stdout.splitlines()
        fields = (line.split(" ", 2) for line in lines)
        return [QueuedJob(job_id, name, state) for job_id, state, name in fields]

    def node_state(self, node: str) -> str:
        """`IDLE`, `ALLOCATED`, `DOWN*`, ...; a star means that the node does not answer."""
        return parse_fields(self.run(["scontrol", "show", "node", "-o", node]).stdout)["State"]

    def wait_until(self, predicate: Callable[[], T], timeout: float = 600, interval: float = 0.2, what: str = "") -> T:
        """Call `predicate` every `interval` seconds until it returns something true; return that.

        After `timeout` seconds: AssertionError that says `what` did not happen, with the queue.
        """

        def words() -> str:
            queue = self.run(["squeue", "--all"], check=False)
            return f"{what or predicate}\n{queue.stdout}{queue.stderr}"

        return wait_for(predicate, timeout, step=interval, words=words)

    def wait_job(self, job_id: str, timeout: float = 600) -> str:
        """Wait until the job has ended for good; return its state. A controller that is down is waited for."""

        def final_state() -> str | None:
            shown = self.run(["scontrol", "show", "job", "-o", job_id], check=False)
            state = job_fields(shown.stdout).get("JobState") if shown.returncode == 0 else None
            return state if state in FINAL_STATES else None

        return self.wait_until(final_state, timeout, what=f"the end of job {job_id}") or ""

    def wait_running(self, job_id: str, timeout: float = 600) -> None:
        self.wait_until(
            lambda: self.job(job_id)["JobState"] == "RUNNING", timeout, 0.1, what=f"the start of job {job_id}"
        )

    def tail_logs(self, lines: int = 15) -> str:
        """The last lines of every daemon's log, for the report of a failed test."""
        parts = []
        for log in sorted((self.path / "log").glob("*.log")):
            text = log.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"== {log}", *text]))
        return "\n".join(parts)

    def _script(self, verb: str, *arguments: str) -> None:
        done = subprocess.run(
            [SCRIPT, verb, self.path, *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
        if done.returncode != 0:
            raise AssertionError(f"{SCRIPT.name} {verb}: exit status {done.returncode}\n{done.stderr}")


def job_fields(line: str) -> dict[str, str]:
    """The fields of a job, of which those that Slurm writes are never taken from a name, a path or a comment."""
    return parse_fields(line) | slurm_commands.job_fields(line)


def parse_fields(line: str) -> dict[str, str]:
    """The `Key=value Key=value` of `scontrol show -o`; keys are capitalised, values may hold blanks."""
    parts = re.split(r"(?:^|\s)([A-Z][\w:/]*)=", line.strip())
    return {key: value.strip() for key, value in zip(parts[1::2], parts[2::2], strict=True)}
