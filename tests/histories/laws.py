"""What must hold of every history."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from relayrun.control.chain_state import CLOCK_TOLERANCE
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, read_stop
from relayrun.control.scheduler.base import MAX_FAILED_BEGINS
from relayrun.control.scheduler.slurm_states import is_blocked
from relayrun.errors import RelayrunError
from relayrun.watch.status import summary
from relayrun.watch.status.queue import QueueStatus

from .clock import START, Clock
from .controller import FREE_LIMIT, Controller, MemoryJob
from .nodes import BEAT_SECONDS, ChainWork

GUARD_SECONDS = 2 * BEAT_SECONDS + 60.0
"""From the start of the ranks until the guard of a job without a successor must run."""
HEARD_SECONDS = 2000.0
"""From the announcement of a job's earlier end until its ranks must have left: looks of the watch, and a save."""
QUEUE_SECONDS = 3600.0
"""From the start of a job, or from the time when Slurm answers again, until a successor must wait behind it."""
CHAIN_OPTIONS = {"dependency", "comment", "begin", "job-name"}
"""Options that the chain itself gives to its jobs."""


@dataclass
class Laws:
    """Watches a history, and keeps what broke a law."""

    clock: Clock
    slurm: Controller
    run: Run
    plan: Plan
    disk_full: Callable[[], bool]
    broken: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    """Options that a person changed in a waiting job of the chain, with the value."""
    binding: dict[str, str] = field(default_factory=dict)
    """Those of them that every later job must ask for."""
    clean: bool = True
    """No fault keeps a record from being written or Slurm from answering."""
    works_since: float = 0.0
    """Since then Slurm answers, as far as is known now."""
    person_ended: int | None = None
    """A person ended the chain: no job with this id or a later one may train."""
    person_stopped: bool = False
    jobs: int = 0
    """Starts of jobs of the chain."""
    _barren: int = 0
    """Starts of jobs since ranks started."""
    _unfollowed: bool = False
    """The batch script of the newest job was killed while no program could queue another job."""
    excuses: int = 0
    """Starts that Slurm took back before they could save: node failures, preemptions, requeues by an operator."""
    owners: dict[int, int] = field(default_factory=dict)
    """By job: the attempt whose ranks live."""
    durable: int = 0
    only_log: bool = False
    """The chain ended on a full disk: its log and the comment of its last job have the reason."""
    failed_nodes: set[str] = field(default_factory=set)
    """Nodes on which a batch script could not do its part."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Attempt and durable iteration when its ranks started."""

    def fault(self, law: str, words: str) -> None:
        text = f"{law}: {words} (at {self.clock.now - START:.1f})"
        self.clock.note(text, who="LAW")
        self.broken.append(text)

    # what happens

    def ranks(self, what: str, number: int, job: int) -> None:
        """Ranks start, commit a checkpoint, or are gone."""
        if what == "gone":
            self.owners.pop(job, None)
        elif what == "failed":
            self.failed_nodes |= set(self.slurm.jobs[number].nodes[:1])
            self._barren -= self.disk_full()  # such a try costs seconds, and the next may find room
        elif what == "script killed":
            self.failed_nodes |= set(self.slurm.jobs[number].nodes[:1])
            self._unfollowed = self._nobody_can_follow(self.slurm.jobs[number])
        elif what == "only the log":
            self.only_log = True
        elif what == "commit":
            self.durable = max(self.durable, number)
            self._uses_the_queue(self.slurm.jobs[job])
        else:
            self._ranks_start(number, job)

    def _ranks_start(self, number: int, job: int) -> None:
        if self.owners:
            self.fault("at most one owner", f"job {job} trains beside {self.owners}")
        self.owners[job] = number
        self._barren = 0
        base = self.run.attempt(number).started_record().base_iteration
        if base < self.durable:
            self.fault("nothing durable lost", f"attempt {number} starts from {base}, and {self.durable} was durable")
        self._ends_with_job(number, self.slurm.jobs[job])
        if self.person_ended is not None and job >= self.person_ended:
            self.fault("a person's word stands", f"job {job} trains on after a person ended the chain")
        if self.run.stop.exists():
            self.fault("a person's word stands", f"job {job} trains though STOP is there")
        self.starts.append((number, self.durable))
        row = self.plan.chain.max_failed_attempts + 1
        last = [durable for _, durable in self.starts[-row:]]
        if len(last) == row and len(set(last)) == 1:
            self.fault("never spinning", f"{row} attempts in a row start from {self.durable}")

    def _uses_the_queue(self, job: MemoryJob) -> None:
        """A successor waits while a job trains: what it waits for in the queue is no time without training."""
        refused = self.slurm.submit_limit < FREE_LIMIT or "reservation" in self.plan.sbatch_options
        if self.plan.chain.mode != "singleton" or self.person_stopped or refused or self.slurm.lost_answers:
            return
        since = max(job.start or 0.0, self.works_since)
        waiting = [each for each in self.slurm.jobs.values() if each.name == self.plan.job_name and each.waits]
        if self.clock.now > since + QUEUE_SECONDS and not waiting:
            self.fault("the queue is used", f"no job waits behind job {job.id}")

    def _ends_with_job(self, number: int, job: MemoryJob) -> None:
        """An attempt leaves before the end of its job, whatever the clock of its node says."""
        begin, true = self.run.attempt(number).started_record(), self.slurm.known_end_of(job)
        ahead = self.clock.skews.get(job.batch_host, 0.0)
        known = None if begin.job_end_time is None else begin.job_end_time - ahead
        low, high = (-CLOCK_TOLERANCE - 1, CLOCK_TOLERANCE / 10 + 1) if ahead else (-1.0, 1.0)
        answers = self.clock.now > self.slurm.away_until and not self.slurm.lost_answers
        if known is None or not (low <= known - true <= high or not answers):
            self.fault("the end is Slurm's", f"attempt {number} believes in {known}, and job {job.id} ends at {true}")

    def announced_end(self, what: str, seconds: float) -> None:
        """The end of a reservation, or the begin of a maintenance, has come, which was known for so many seconds."""
        for job in self.slurm.jobs.values():
            ranks = job.work.ranks if isinstance(job.work, ChainWork) else None
            known = min(seconds, self.clock.now - ranks.started) if ranks is not None else 0.0
            if self.clean and ranks is not None and known > HEARD_SECONDS and ranks.live and not ranks.still:
                self.fault("the end is Slurm's", f"job {job.id} trains on when {what}")

    def job(self, what: str, job: MemoryJob) -> None:
        """Slurm does something with a job."""
        if job.name != self.plan.job_name:
            return
        if what == "submitted":
            self._submitted(job)
        elif what.startswith("started"):
            self.jobs += 1
            self._barren += 1
            self._unfollowed = False
            if self._barren > 2 * MAX_FAILED_BEGINS + self.excuses:
                self.fault("never spinning", f"{self._barren} starts of jobs in a row without ranks")

    def _submitted(self, job: MemoryJob) -> None:
        blamed = self.run.node_failures.exists()
        for name in job.asked.keys() - CHAIN_OPTIONS:
            value = job.asked[name]
            if name == "exclude" and (blamed or self._tried(value)):
                continue
            if self.changed.get(name) != value:
                self.fault("wish kept", f"job {job.id} asks for {name}={value}, which nobody wished")
        for name, value in self.binding.items():
            if job.asked.get(name) != value:
                self.fault("wish kept", f"job {job.id} does not ask for {name}={value}, as a person wished")

    def _tried(self, value: str) -> bool:
        """Nodes on which `begin` failed may be left out."""
        given = f"{self.changed.get('exclude', '')},{self.plan.sbatch_options.get('exclude', '')}"
        return set(value.split(",")) <= self.failed_nodes | set(given.split(","))

    # what stands at a quiet moment

    def quiet(self, *, calm: bool, work: float) -> None:
        """Nothing fails any more, and time enough has passed for everything that was under way. `calm`: nothing ever
        failed; `work`: seconds of all iterations."""
        ended = read_stop(self.run)
        if calm and (ended is None or ended.state != "done"):
            self.fault("a calm chain is done", f"it is {ended}")
        if calm and self.jobs > 1 + work / (self.plan.time_limit / 2):
            self.fault("a calm chain uses its time", f"{self.jobs} jobs for {work:.0f} s")
        chain = [job for job in self.slurm.jobs.values() if job.name == self.plan.job_name and job.live]
        behind = [job for job in self.slurm.jobs.values() if job.name == self.plan.fallback_job_name and job.live]
        if ended is None and not chain and not behind and not self._is_told():
            self.fault("never silent", "no job, no STOP")
        for job in chain:
            if job.waits and self._never_starts(job) and not is_blocked(job.state, job.reason):
                self.fault("never silent", f"job {job.id} never starts ({job.reason}), and status does not say so")
        if ended is not None:
            self._ended(ended.state, ended.reason, chain)
        for error in self.clock.errors:
            if not isinstance(error, (RelayrunError, OSError)):
                self.fault("no defect", f"{type(error).__name__}: {error}")

    def _is_told(self) -> bool:
        """A person cancelled everything, or the log has the reason, or `relayrun status` says what it was."""
        if self.only_log or self.person_ended is not None or not self.plan.chain.auto_requeue:
            return True
        return self._unfollowed and self._status_tells()

    def _nobody_can_follow(self, killed: MemoryJob) -> bool:
        """Return whether nothing is left when the batch script of this job is killed: no job that waits, no
        guard, which starts after the first heartbeats, and a fallback job neither wished nor possible."""
        names = (self.plan.job_name, self.plan.fallback_job_name)
        if any(job.name in names and job.live and job is not killed for job in self.slurm.jobs.values()):
            return False
        ranks = killed.work.ranks if isinstance(killed.work, ChainWork) else None
        guarded = ranks is not None and self.clock.now - ranks.started > GUARD_SECONDS
        refused = self.slurm.refused >= killed.submit  # the job before queues the fallback job
        return not (guarded and self.clean) and (refused or not self.plan.fallback_job)

    def _status_tells(self) -> bool:
        newest = self.run.newest_begun()
        begin, end = (newest.read_begin(), newest.read_end()) if newest is not None else (None, None)
        words = summary.explain_broken_chain(self.run, self.plan, QueueStatus(), begin, end)
        owed = newest is not None and newest.retry_successor.exists() and end is None
        return ("could be queued behind it: " if owed else "is queued") in words

    def _never_starts(self, job: MemoryJob) -> bool:
        return self.clock.now - max(job.submit, job.begin) > 7 * 86_400

    def _ended(self, state: str, reason: str, chain: list[MemoryJob]) -> None:
        if state == "done" and self.durable < (self.plan.total_steps or 0):
            self.fault("the reason is true", f"done at {self.durable} of {self.plan.total_steps}")
        said = re.search(r"cancel|stopped by|exit trigger|by hand", reason)
        if said and not self.person_stopped:
            self.fault("the reason is true", f"STOP says {reason!r}, and no person did anything")
        for job in chain:
            if job.state == "RUNNING":
                self.fault("a person's word stands", f"job {job.id} still runs after STOP: {reason}")
