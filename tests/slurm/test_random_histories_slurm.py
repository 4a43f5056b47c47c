"""Random histories of chains on a real Slurm: what the Slurm in memory plays by the thousand, at the pace of clocks.

`pytest -m long -k "histories and 12"` plays one group again: its seeds are its number times the size of a group.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from relayrun.control.chain import jobs
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import SuccessorJob
from relayrun.control.rundir.run import Run, read_stop
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.control.scheduler.slurm_states import is_blocked
from relayrun.files import read_json_lines
from relayrun.slurmtime import parse_time
from tests.chain.conftest import make_relay

from .cluster import TestCluster
from .conftest import MakeCluster
from .test_chain import logs
from .test_fallback_slurm import WITH_FALLBACK

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(1200)]

GROUPS, AT_ONCE = 10, 5
ALONE_ON_A_NODE = WITH_FALLBACK | {"ntasks_per_node": 1, "cpus_per_task": 7, "max_failed_attempts": 10}
HISTORY_SECONDS = 50.0
"""Seconds in which things happen to a chain; then everything works again."""
QUIET_SECONDS = 240.0
"""Time in which a chain must then train, or have said why not: pauses of Slurm and of the chain lie within."""


@dataclass
class History:
    """One chain, and what a person, a site or a fault does to it."""

    cluster: TestCluster
    run: Run
    plan: Plan
    seed: int
    told: list[str] = field(default_factory=list)
    partition: str = "debug"
    ended_by_person: bool = False
    drained: list[str] = field(default_factory=list)
    broken: int = 0
    """Attempts that a fault ended."""
    shortened: set[str] = field(default_factory=set)
    """Waiting jobs whose own limit a person changed."""

    def of_chain(self, state: str) -> list[str]:
        return [job.id for job in self.cluster.queue() if job.name == self.plan.job_name and job.state == state]

    def slurm(self, *argv: str) -> None:
        """A command of Slurm's; that the job has just gone is no fault of the test."""
        done = self.cluster.run(argv, check=False)
        self.told.append(f"{' '.join(argv)}: {done.returncode} {done.stderr.strip()}")

    def processes(self, word: str) -> Iterator[int]:
        """Processes of this run whose command line has the word."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes()
                if word.encode() in line and f"{self.run.path}".encode() in line:
                    yield int(path.parent.name)

    def kill(self, word: str) -> None:
        for pid in self.processes(word):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.told.append(f"killed {word} {pid}")
                self.broken += 1

    # what happens; each takes the jobs that run and those that wait

    def limit_of_running(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            self.slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={random.Random(self.seed).choice([1, 20])}")

    def limit_of_waiting(self, running: list[str], waiting: list[str]) -> None:
        for job in waiting:
            self.slurm("scontrol", "update", f"JobId={job}", "TimeLimit=2")
            self.shortened.add(job)

    def partition_of_waiting(self, running: list[str], waiting: list[str]) -> None:
        for job in waiting[:1]:
            self.slurm("scontrol", "update", f"JobId={job}", "Partition=high")
            if self.cluster.run(["scontrol", "show", "job", "-o", job], check=False).stdout.find("Partition=high") >= 0:
                self.partition = "high"

    def hold_and_release(self, running: list[str], waiting: list[str]) -> None:
        for job in waiting:
            self.slurm("scontrol", "hold", job)
            time.sleep(3)
            self.slurm("scontrol", "release", job)

    def requeue(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            self.slurm("scontrol", "requeue", job)
            self.broken += 1

    def requeue_held(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            self.slurm("scontrol", "requeuehold", job)
            self.broken += 1
            time.sleep(5)
            self.slurm("scontrol", "release", job)

    def leave(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            self.slurm("scancel", "--signal=USR2", "--batch", job)

    def suspend(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            self.slurm("scontrol", "suspend", job)
            time.sleep(4)
            self.slurm("scontrol", "resume", job)

    def kill_a_rank(self, running: list[str], waiting: list[str]) -> None:
        self.kill("relay_program.py")

    def kill_batch_script(self, running: list[str], waiting: list[str]) -> None:
        for path in Path("/proc").glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                if path.read_text().strip() != "slurm_script":
                    continue
                variables = (path.parent / "environ").read_bytes().split(b"\0")
                if any(f"SLURM_JOB_ID={job}".encode() in variables for job in running):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    self.told.append(f"killed the batch script {path.parent.name}")
                    self.broken += 1

    def kill_watch(self, running: list[str], waiting: list[str]) -> None:
        broken = self.broken
        self.kill("relayrun.control.chain\0watch")
        self.broken = broken

    def node_down(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            node = self.cluster.job(job).get("NodeList", "")
            if node.startswith("n"):
                self.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
                self.broken += 1
                time.sleep(2)
                self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def drain(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            node = self.cluster.job(job).get("NodeList", "")
            if node.startswith("n"):
                self.slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
                self.drained.append(node)

    def cancel_running(self, running: list[str], waiting: list[str]) -> None:
        for job in running:
            self.slurm("scancel", job)
            self.ended_by_person = True

    def cancel_waiting(self, running: list[str], waiting: list[str]) -> None:
        for job in waiting if running else []:
            self.slurm("scancel", job)
            self.ended_by_person = True

    def play(self) -> None:
        dice = random.Random(self.seed)
        usual: list[Callable[[list[str], list[str]], None]] = [
            self.limit_of_running,
            self.limit_of_waiting,
            self.partition_of_waiting,
            self.hold_and_release,
            self.requeue,
            self.requeue_held,
            self.leave,
            self.suspend,
            self.kill_a_rank,
            self.kill_batch_script,
            self.kill_watch,
            self.node_down,
            self.drain,
        ]
        happenings = dice.sample(usual, k=dice.randint(2, 4))
        if dice.random() < 0.2:
            happenings.append(dice.choice([self.cancel_running, self.cancel_waiting]))
        began = time.monotonic()
        for moment, happens in zip(
            sorted(dice.uniform(5, HISTORY_SECONDS) for _ in happenings), happenings, strict=True
        ):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            self.told.append(f"{time.monotonic() - began:.1f} s: {happens.__name__}")
            happens(self.of_chain("RUNNING"), self.of_chain("PENDING"))
            if self.ended_by_person:
                break
        for node in self.drained:
            self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")

    # what must hold

    def iterations(self) -> int:
        lines = [
            line for number in self.run.attempt_numbers() for line in read_json_lines(self.run.attempt(number).metrics)
        ]
        return len(lines)

    def settled(self, before: int) -> bool:
        """The chain has ended and no job is left, or it trains on with a successor behind it."""
        live = [job for job in self.cluster.queue() if job.name == self.plan.job_name]
        if self.run.stop.exists():
            return not live
        return self.iterations() > before and {job.state for job in live} == {"RUNNING", "PENDING"}

    def judge(self) -> None:
        before = self.iterations()
        if self.ended_by_person and (running := self.of_chain("RUNNING")):  # its successor was cancelled
            newest = self.run.attempt(max(self.run.attempt_numbers()))
            self.cluster.wait_until(
                lambda: self.run.stop.exists() or getattr(SuccessorJob.read(newest.successor), "cancelled", False),
                timeout=QUIET_SECONDS,
                interval=1,
                what=f"a person's word is noted: {self.words()}",
            )
            self.slurm("scancel", "--signal=USR2", "--batch", *running)
        self.cluster.wait_until(
            lambda: self.settled(before), timeout=QUIET_SECONDS, interval=1, what=f"never silent: {self.words()}"
        )
        attempts = len(list(self.run.attempt_numbers()))
        left = sum(": leave" in each or "limit_of" in each for each in self.told)
        assert attempts <= 2 + 2 * (self.broken + left), f"never spinning: {attempts} attempts; {self.words()}"
        stop = read_stop(self.run)
        if self.ended_by_person:
            assert stop is not None, f"a person ended it; {self.words()}"
            assert stop.state != "done", f"a person ended it: {stop}; {self.words()}"
            return
        assert stop is None or stop.state == "failed", f"nobody ended it: {stop}; {self.words()}"
        for job in self.of_chain("PENDING"):
            known = self.cluster.job(job)
            assert not is_blocked(known["JobState"], known["Reason"]), f"blocked: {known['Reason']}; {self.words()}"
            limit = self.plan.time_limit if job in self.shortened else parse_time(known["TimeLimit"])
            wish = (limit, known["Partition"], known["NumNodes"].split("-")[0])
            assert wish == (self.plan.time_limit, self.partition, "1"), f"the wish: {wish}; {self.words()}"

    def words(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.told, logs(self.run)[-6000:]])


@pytest.fixture(scope="module")
def cluster(make_cluster: MakeCluster) -> TestCluster:
    return make_cluster(nodes=AT_ONCE + 2)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_histories(cluster: TestCluster, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    histories = []
    for seed in range(group * AT_ONCE, (group + 1) * AT_ONCE):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        (folder / "logs").mkdir()
        steps = ["--steps=1000000", "--save-every=10"]
        run, plan = make_relay(folder, *steps, total_steps=1_000_000, **ALONE_ON_A_NODE)
        jobs.queue_first_job(run, plan, scheduler_for_plan(plan, run))
        histories.append(History(cluster, run, plan, seed))

    def played(history: History) -> str:
        try:
            history.cluster.wait_until(lambda: history.iterations() > 0, timeout=240, what="the first iteration")
            history.play()
            history.judge()
        except AssertionError as error:
            return f"{error}"
        finally:
            for state in ("PENDING", "RUNNING"):
                for job in history.of_chain(state):
                    history.slurm("scancel", job)
        return ""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        faults = [words for words in pool.map(played, histories) if words]
    assert not faults, "\n\n".join(faults)
