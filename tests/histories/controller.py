"""A Slurm in memory: jobs, their states and limits, nodes, reservations, and its commands as of Slurm 22.05.

`tests.slurm.test_memory_answers_slurm` asks a real Slurm the same; where the two differ, this one is wrong.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

from relayrun.slurmtime import parse_time

from .clock import Clock

KILL_WAIT = 30.0
"""Seconds from SIGTERM to SIGKILL."""
REMEMBERED = 300.0
"""MinJobAge: seconds for which an ended job is known."""
SCHEDULE_SECONDS = 1.0
FREE_LIMIT = 99
"""Number of submitted jobs that no user reaches."""
USER, OPERATOR = 1000, 0
LIVE = ("PENDING", "RUNNING", "COMPLETING", "RESV_DEL_HOLD", "REQUEUE_HOLD", "SPECIAL_EXIT")
FIELDS = {
    "partition": "Partition",
    "account": "Account",
    "qos": "QOS",
    "reservation": "Reservation",
    "constraint": "Features",
    "exclude": "ExcNodeList",
    "cpus-per-task": "CPUs/Task",
}


@cache
def header_of(script: str) -> dict[str, str]:
    """The options in the header of a batch script."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", Path(script).read_text(), re.M))


class RefusedError(Exception):
    """Slurm's words for an order that it refuses."""


class Work(Protocol):
    """What a job does on its nodes."""

    def signal(self, number: signal.Signals, *, batch: bool, steps: bool) -> None:
        """Send a signal to the batch script, to the steps, or to both."""

    def gone(self) -> bool:
        """Whether no process of the job is left."""


@dataclass
class MemoryJob:
    """A job of the queue."""

    id: int
    name: str
    script: str
    options: dict[str, str]
    """Options as they are now, by sbatch's long names; `nodes` may be a range."""
    asked: dict[str, str]
    """Options of the command line of sbatch."""
    submit: float
    arguments: list[str] = field(default_factory=list)
    state: str = "PENDING"
    reason: str = "None"
    comment: str = ""
    requeue: bool = True
    no_kill: bool = False
    held: str = ""
    """Reason for which the job is held."""
    after: int = 0
    singleton: bool = False
    ready: float = 0.0
    """Time before which others stand in front of it in the queue."""
    begin: float = 0.0
    """Time before which it does not start."""
    start: float | None = None
    end: float | None = None
    nodes: list[str] = field(default_factory=list)
    batch_host: str = ""
    restarts: int = 0
    preempted: float | None = None
    exit_code: int = 0
    cancelled_by: int | None = None
    work: Work | None = None
    final: str = ""
    """State after COMPLETING; PENDING: it is queued again."""
    allocation: int = 0

    @property
    def limit(self) -> float:
        return float(parse_time(self.options["time"]))

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def waits(self) -> bool:
        return self.live and self.state not in ("RUNNING", "COMPLETING")

    def node_range(self) -> tuple[int, int]:
        least, _, most = self.options["nodes"].partition("-")
        return int(least), int(most or least)


class Controller:
    """Slurm's controller, and its commands."""

    def __init__(self, clock: Clock, nodes: list[str], begin_work: Callable[[MemoryJob], Work]) -> None:
        self.clock, self.begin_work = clock, begin_work
        self.jobs: dict[int, MemoryJob] = {}
        self.accounts: dict[int, MemoryJob] = {}
        """Every job, as accounting knows it for good."""
        self.nodes = dict.fromkeys(nodes, "idle")
        """State of each node: idle, alloc, or down."""
        self.reservations: dict[str, float] = {}
        """End of each reservation."""
        self.maintenance: dict[str, tuple[float, float]] = {}
        """Begin and end of reservations of all nodes for maintenance."""
        self.submit_limit = FREE_LIMIT
        self.refused = 0.0
        """When a limit last kept a job out of the queue."""
        self.away_until = 0.0
        """The controller does not answer before."""
        self.lost_answers = 0.0
        """Share of commands whose answer is lost."""
        self.chance: Callable[[], float] = lambda: 1.0
        self.latency: Callable[[], float] = lambda: 0.0
        self.accounting = True
        self.queue_wait: Callable[[], float] = lambda: 0.0
        self.plugin: Callable[[dict[str, str]], None] = lambda _: None
        """A submit plugin: it rewrites the options of a new job."""
        self.closed = False
        """A site lets nobody change a job."""
        self.watchers: list[Callable[[str, MemoryJob], None]] = []
        """Told of what happens to a job: submitted, started, ended, forgotten."""
        self._next = 1
        self._kicked = False

    def tell(self, what: str, job: MemoryJob) -> None:
        self.clock.note(f"job {job.id} {what}", who="slurm")
        for watcher in self.watchers:
            watcher(what, job)

    # the queue

    def submit(self, script: str, asked: dict[str, str], arguments: list[str]) -> MemoryJob:
        options = header_of(script) | asked
        self._check_new(options)
        self.plugin(options)
        dependency = options.pop("dependency", "")
        if dependency.startswith("afternotok:") and int(dependency[11:]) not in self.jobs:
            raise RefusedError("sbatch: error: Batch job submission failed: Job dependency problem")
        kept = {name: options[name] for name in ("time", "nodes", *FIELDS) if options.get(name)}
        job = MemoryJob(
            id=self._next,
            name=options["job-name"],
            script=script,
            options={"partition": "main", "qos": "normal", "account": "team"} | kept,
            asked=dict(asked),
            arguments=arguments,
            submit=self.clock.now,
            comment=options.get("comment", ""),
            requeue="requeue" in options,
            no_kill="no-kill" in options,
            after=int(dependency[11:]) if dependency.startswith("afternotok:") else 0,
            singleton=dependency == "singleton",
            begin=self.clock.now + float(options.get("begin", "now+0").removeprefix("now+")),
        )
        job.options["exclude"] = ",".join(self.expand(job.options.get("exclude", "")))
        if options.get("hold") is not None and "hold" in options:
            job.held = "JobHeldUser"
        job.reason = job.held or ("Dependency" if job.after else "None")
        self._next += 1
        self.jobs[job.id] = self.accounts[job.id] = job
        self.tell("submitted", job)
        self._queue(job)
        return job

    def _check_new(self, options: dict[str, str]) -> None:
        if sum(job.live for job in self.jobs.values()) >= self.submit_limit:
            self.refused = self.clock.now
            raise RefusedError(
                "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: "
                "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
            )
        excluded = self.expand(options.get("exclude", ""))
        if not set(excluded) <= set(self.nodes):
            raise RefusedError("sbatch: error: Batch job submission failed: Invalid node name specified")
        if len(set(self.nodes) - set(excluded)) < int(options.get("nodes", "1").partition("-")[0]):
            words = "Requested node configuration is not available"
            raise RefusedError(f"sbatch: error: Batch job submission failed: {words}")
        name = options.get("reservation", "")
        if name and name not in self.reservations:
            raise RefusedError("sbatch: error: Batch job submission failed: Requested reservation is invalid")

    def _queue(self, job: MemoryJob) -> None:
        job.ready = self.clock.now + max(SCHEDULE_SECONDS, self.queue_wait())
        self.clock.after(job.ready - self.clock.now, self.look)

    def kick(self) -> None:
        """Something changed: look at the waiting jobs soon."""
        if not self._kicked:
            self._kicked = True
            self.clock.after(SCHEDULE_SECONDS, self.look)

    def look(self) -> None:
        """Start the waiting jobs that can start."""
        self._kicked = False
        if self.clock.now < self.away_until:
            self.clock.after(self.away_until - self.clock.now, self.look)
            return
        for job in list(self.jobs.values()):
            if job.state != "PENDING" or job.ready > self.clock.now:
                continue
            job.reason = self._why_waits(job)
            if job.state == "PENDING" and not job.reason:
                self._start(job)
            elif job.reason == "BeginTime":
                self.clock.after(job.begin - self.clock.now, self.look)

    def _why_waits(self, job: MemoryJob) -> str:
        if job.held:
            return job.held
        if job.after and (word := self._why_waits_for(job)):
            return word
        if job.singleton and any(self._before(other, job) for other in self.jobs.values()):
            return "Dependency"
        if self.clock.now < job.begin:
            return "BeginTime"
        name = job.options.get("reservation")
        if (
            name
            and self.clock.now + job.limit > self.reservations.get(name, float("inf"))
            and name in self.reservations
        ):
            return "Reservation"
        if any(self.clock.now + job.limit > begin for begin, _ in self.maintenance.values()):
            return "ReqNodeNotAvail, Reserved for maintenance"
        if len(self._free(job)) < job.node_range()[0]:
            return "Resources"
        return ""

    def _why_waits_for(self, job: MemoryJob) -> str:
        other = self.jobs.get(job.after)
        if other is not None and other.live:
            return "Dependency"
        if other is not None and other.state == "COMPLETED":
            self.finish(job, "CANCELLED")
            return "DependencyNeverSatisfied"
        return ""

    @staticmethod
    def _before(other: MemoryJob, job: MemoryJob) -> bool:
        if other is job or other.name != job.name or not other.live:
            return False
        return not other.waits or other.id < job.id

    def _free(self, job: MemoryJob) -> list[str]:
        excluded = set(job.options.get("exclude", "").split(","))
        return [name for name, state in self.nodes.items() if state == "idle" and name not in excluded]

    def _start(self, job: MemoryJob) -> None:
        job.nodes = self._free(job)[: job.node_range()[1]]
        for name in job.nodes:
            self.nodes[name] = "alloc"
        job.options["nodes"] = str(len(job.nodes))
        job.batch_host = job.nodes[0]
        job.state, job.reason, job.start, job.end, job.after = "RUNNING", "None", self.clock.now, None, 0
        job.allocation += 1
        self.tell(f"started on {','.join(job.nodes)}", job)
        job.work = self.begin_work(job)
        self._watch_limit(job, job.allocation)

    def _watch_limit(self, job: MemoryJob, allocation: int) -> None:
        if job.allocation != allocation or job.state != "RUNNING" or job.start is None:
            return
        limit = self.end_of(job)
        over = limit - self.clock.now
        if self.clock.now < self.away_until:
            over = max(over, self.away_until - self.clock.now)
        if over > 0:
            self.clock.after(min(over, 300.0), lambda: self._watch_limit(job, allocation))
            return
        job.reason = "TimeLimit"
        self.terminate(job, "TIMEOUT")

    def end_of(self, job: MemoryJob) -> float:
        """When the limit, or the end of the reservation, is reached."""
        assert job.start is not None
        return min(job.start + job.limit, self.reservations.get(job.options.get("reservation", ""), float("inf")))

    def known_end_of(self, job: MemoryJob) -> float:
        """When a job ends, or maintenance of its nodes begins that was announced after its start."""
        assert job.start is not None
        return min([self.end_of(job), *(begin for begin, _ in self.maintenance.values() if begin > job.start)])

    def terminate(self, job: MemoryJob, final: str, *, at_once: bool = False) -> None:
        """End the processes of a running job; then it is in state `final`."""
        if job.state != "RUNNING":
            return
        job.restarts += final == "PENDING"
        job.state, job.final, job.end = "COMPLETING", final, self.clock.now
        allocation = job.allocation

        def kill() -> None:
            if job.state == "COMPLETING" and job.allocation == allocation and job.work is not None:
                job.work.signal(signal.SIGKILL, batch=True, steps=True)
                self.clock.after(1.0, lambda: self._completed(job, allocation))

        if at_once or job.work is None:
            kill()
            return
        job.work.signal(signal.SIGTERM, batch=True, steps=True)
        self.clock.after(KILL_WAIT, kill)
        self._completing(job, allocation)

    def _completing(self, job: MemoryJob, allocation: int) -> None:
        if job.state != "COMPLETING" or job.allocation != allocation:
            return
        if job.work is None or job.work.gone():
            self._completed(job, allocation)
        else:
            self.clock.after(1.0, lambda: self._completing(job, allocation))

    def script_ended(self, job: MemoryJob, code: int) -> None:
        """The batch script has ended by itself; the steps end with it."""
        if job.state != "RUNNING":
            return
        job.exit_code, job.end = code, self.clock.now
        job.state, job.final = "COMPLETING", "COMPLETED" if code == 0 else "FAILED"
        job.reason = "None" if code == 0 else "NonZeroExitCode"
        assert job.work is not None
        job.work.signal(signal.SIGTERM, batch=False, steps=True)
        allocation = job.allocation
        self.clock.after(KILL_WAIT, lambda: self._killed(job, allocation))
        self._completing(job, allocation)

    def _killed(self, job: MemoryJob, allocation: int) -> None:
        if job.state == "COMPLETING" and job.allocation == allocation and job.work is not None:
            job.work.signal(signal.SIGKILL, batch=True, steps=True)

    def _completed(self, job: MemoryJob, allocation: int) -> None:
        if job.state != "COMPLETING" or job.allocation != allocation:
            return
        for name in job.nodes:
            if self.nodes[name] == "alloc":
                self.nodes[name] = "idle"
        job.work = None
        if job.final == "PENDING":
            job.state, job.submit, job.start, job.end = "PENDING", self.clock.now, None, None
            job.nodes, job.preempted = [], None
            job.reason = "BeginTime"
            self.tell("queued again", job)
            self._queue(job)
            return
        self.finish(job, job.final)

    def finish(self, job: MemoryJob, state: str) -> None:
        """The end of a job."""
        job.state, job.end = state, self.clock.now
        self.kick()
        self.tell(f"ended: {state}", job)
        self.clock.after(REMEMBERED, lambda: self._forget(job))

    def _forget(self, job: MemoryJob) -> None:
        if self.clock.now < self.away_until:
            self.clock.after(self.away_until - self.clock.now, lambda: self._forget(job))
        elif not job.live:
            self.jobs.pop(job.id, None)

    def cancel(self, job: MemoryJob, by: int) -> None:
        if not job.live:
            return
        job.cancelled_by = by
        if job.waits:
            self.finish(job, "CANCELLED")
        elif job.state == "COMPLETING" and job.final == "PENDING":
            job.final = "CANCELLED"
        else:
            self.terminate(job, "CANCELLED")

    def order_requeue(self, job: MemoryJob) -> None:
        if job.waits or (job.state == "COMPLETING" and job.final == "PENDING"):
            raise RefusedError(f"Job is pending execution for job {job.id}")
        if not job.requeue:
            raise RefusedError(f"Requested operation is presently disabled for job {job.id}")
        if not job.live:
            job.state, job.start, job.nodes, job.restarts = "PENDING", None, [], job.restarts + 1
            self.tell("queued again", job)
            self._queue(job)
        elif job.state == "COMPLETING":
            job.restarts += 1
            job.final = "PENDING"
        else:
            self.terminate(job, "PENDING")

    def preempt(self, job: MemoryJob) -> None:
        """A job with more rights takes the nodes."""
        if job.state == "RUNNING":
            job.preempted = self.clock.now
            self.terminate(job, "PENDING" if job.requeue else "PREEMPTED")

    def lose_node(self, name: str, seconds: float) -> None:
        """A node is down for some time, with all its processes."""
        self.nodes[name] = "down"
        self.clock.note(f"node {name} is down for {seconds:.0f} s", who="slurm")
        for job in list(self.jobs.values()):
            if job.state in ("RUNNING", "COMPLETING") and name in job.nodes:
                self._lose(job, name)
        self.clock.after(seconds, lambda: self._node_returns(name))

    def _lose(self, job: MemoryJob, name: str) -> None:
        assert job.work is not None
        job.work.signal(signal.SIGKILL, batch=name == job.batch_host, steps=True)
        if job.state == "RUNNING":
            job.reason = "NodeDown"
            self.terminate(job, "PENDING" if job.requeue else "NODE_FAIL", at_once=name == job.batch_host)

    def _node_returns(self, name: str) -> None:
        busy = any(name in job.nodes for job in self.jobs.values() if job.state in ("RUNNING", "COMPLETING"))
        self.nodes[name] = "alloc" if busy else "idle"
        self.kick()

    def maintain(self, name: str, begin: float, end: float) -> None:
        """Announce maintenance of all nodes; they are down from its begin to its end."""
        self.maintenance[name] = (begin, end)

        def over() -> None:
            self.maintenance.pop(name, None)
            self.kick()

        def start() -> None:
            for node in self.nodes:
                self.lose_node(node, end - begin - 1.0)

        self.clock.after(begin - self.clock.now, start)
        self.clock.after(end - self.clock.now, over)

    def end_reservation(self, name: str) -> None:
        """The end of a reservation has come: its jobs end, and Slurm removes it."""
        for job in self.jobs.values():
            if job.options.get("reservation") == name and job.state == "RUNNING":
                job.reason = "TimeLimit"
                self.terminate(job, "TIMEOUT")
        self.delete_reservation(name)

    def delete_reservation(self, name: str) -> None:
        self.reservations.pop(name, None)
        for job in self.jobs.values():
            if job.options.get("reservation") == name and job.state == "PENDING":
                job.state = "RESV_DEL_HOLD"

    @staticmethod
    def expand(nodes: str) -> list[str]:
        """The names of a list of nodes: n[0-2,4], n7."""
        found = []
        for base, inside, plain in re.findall(r"([^,\[\]]+)\[([^\]]*)\]|([^,\[\]]+)", nodes):
            if plain:
                found.append(plain)
            for part in filter(None, inside.split(",")):
                low, _, high = part.partition("-")
                found += [f"{base}{number}" for number in range(int(low), int(high or low) + 1)]
        return found
