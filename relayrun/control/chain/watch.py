"""The watch and the guard: two programs that run beside the ranks of an attempt.

The watch updates the merged metrics, ends an attempt that hangs, and queues a missing successor. A duty that fails does
not keep the watch from the others, and none waits long for the scheduler. An attempt hangs if no node's heartbeat
changes for `hang_timeout` seconds, or for ten times the usual duration of a step (while saving: of a save), if that is
longer, by the watch's own clock. Before it ends the ranks it asks each one for its Python stacks.

The guard is a step of its own in a job that has no successor. If the batch script is killed, or the time limit comes,
Slurm sends the guard SIGTERM and waits KillWait seconds; in that time the guard requeues the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

from relayrun.config.sections.chain import ChainSection
from relayrun.control.chain import campaign, evaluation_jobs, excluded_nodes, failure_reason, jobs, requested_options
from relayrun.control.chain.background import NoticeSender, PassAfterSave, copy_checkpoints, hash_checkpoints
from relayrun.control.chain.budget import BudgetEnd, budget_end
from relayrun.control.chain.quota import QuotaMonitor
from relayrun.control.chain_state import longest_heartbeat_interval
from relayrun.control.job_log import log_line, log_size, logged
from relayrun.control.rundir.merged_metrics import MergedViews
from relayrun.control.rundir.node_health import late_ranks, ranks_with_stacks, unfinished_collectives
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChangedJobEnd, Hang, Heartbeat
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan, slurm_scheduler
from relayrun.control.trainers.base import AttemptObserver
from relayrun.control.trainers.observer import CurrentRestartObserver
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RunDirError, SchedulerError
from relayrun.files import write_atomic
from relayrun.leftovers import is_process_alive

POLL_SECONDS = 1.0
LEAVE_SECONDS = 60.0
"""Minimum seconds for ranks to exit after their outcome."""
ANSWER_SECONDS = 5.0
"""Seconds for ranks to write their stacks."""
RETRY_SECONDS = 60.0
RETRY_CEILING = 1800.0
"""Maximum interval between two tries to queue a successor; each failure doubles it."""
AGENTS_FIRST_SECONDS = 30.0
"""Additional seconds before the watch ends ranks if agents, which know more, look for hangs too."""
AGENT_SECONDS = 60.0
"""Seconds for agents to end ranks that hang; then the watch ends the whole step."""
STARTER_SECONDS = 60.0
"""Seconds for the program that started the ranks to end after them; then it is killed, and later the batch script."""
PATIENCE = 10.0
"""Seconds for which a question to a controller that does not answer is repeated."""
UNWRITABLE_FACTOR = 5
"""Factor on the hang limit if a full disk keeps ranks from writing heartbeats."""
JOB_END_SECONDS, RESERVATION_SECONDS = 60.0, 15.0
"""Interval between two questions for the end of the job, and of one in a reservation: a person may move it."""
RARE_HEARTBEAT_LOOKS = 10
"""Looks per interval of rare heartbeats: there is one file per node."""
USUAL_STEPS = 10
"""A step hangs if it takes this many times the usual duration."""
KILL_WAIT_SHARE = 2 / 3
"""The part of KillWait in which the batch script may still close the attempt itself."""


class Watch:
    """The watch beside one attempt."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.plan = Plan.load_in_job(run)
        self.attempt = run.attempt(number)
        self.begin = self.attempt.read_begin()
        self.scheduler: Scheduler = scheduler_for_plan(self.plan, run, patience=PATIENCE)
        self._trainer = trainer_of(self.plan, run)
        self._observer = self._observing()
        self._views = MergedViews(run)
        self._notices = NoticeSender(run, self.plan)
        self._copier = PassAfterSave(copy_checkpoints, run, self.plan)
        self._hasher = PassAfterSave(hash_checkpoints, run, self.plan)
        self._quota = QuotaMonitor(run, self.plan)
        self._complaints: dict[str, str] = {}
        """The last error that was logged for each duty that fails."""
        self._seen: list[Heartbeat] = []
        self._changed = self._next_beats = time.monotonic()
        self._next_try = time.monotonic() + RETRY_SECONDS
        self._pause = RETRY_SECONDS
        self._ended: float | None = None
        """Time at which the ranks were killed."""
        self._handed_over: float | None = None
        """Time at which a hang was left to the agents, which end the ranks and may restart them."""
        self._left: float | None = None
        """Time at which the ranks' outcome was first seen."""
        self._guarded = False
        self._commits = 0
        """Bytes of commits.jsonl at the last look at evaluations and the campaign."""
        self._next_look = self._next_job_end = 0.0
        self._latest_end = self.begin.job_end_time if self.begin else None
        """The latest end of the job that the ranks may know."""

    def loop(self, batch_pid: int) -> None:
        """Run until SIGTERM, or until the batch script, a process of this node, has gone."""
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        leaving, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)  # a sleep would continue after the signal and delay the end of the job
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        # a blocked signal is inherited, and the job waits for this process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while is_process_alive(batch_pid):
            self.look(batch_pid)
            if select.select([leaving], [], [], POLL_SECONDS)[0] and signal.SIGTERM in os.read(leaving, 1024):
                break  # other signals belong to a duty
        self._notices.finish()
        self._copier.finish()
        self._hasher.finish()
        self._try("the merged views", self._follow)
        self._try("the merged views", self._views.note)

    def look(self, batch_pid: int) -> None:
        """Do every duty once."""
        if self._observer is not None:
            self._try("what the program says", self._observer.look)
        self._try("the merged views", self._follow)
        self._try("the look for ranks that hang", self._look_for_hang)
        self._try("the starter of the ranks", lambda: self._look_for_starter(batch_pid))
        self._try("the guard", lambda: self._guard(batch_pid))
        self._try("the end of the job", lambda: self._look_at_job_end(batch_pid))
        self._try("the budget", self._look_at_budget)
        self._try("the successor", self._look_after_successor)
        self._try("evaluations, and the runs behind this one", self._look_at_saves)
        saved = log_size(self.attempt.commits)
        self._try("the copies of checkpoints", lambda: self._copier.look(saved))
        self._try("the hashes of checkpoints", lambda: self._hasher.look(saved))
        self._try("how full the disk is", lambda: self._quota.look(saved))
        self._notices.look()

    def _observing(self) -> AttemptObserver | None:
        """Return the writer of a foreign program's records; None if the program writes them itself."""
        if self.begin is None:
            return None

        def signal_ranks(number: signal.Signals) -> None:
            self.scheduler.signal_ranks(self.scheduler.current_job_id(), number)

        follow = partial(self._trainer.follow, signal_ranks=signal_ranks)
        if self.plan.chain.recovery == "node" and self.plan.trainer != "native":
            return CurrentRestartObserver(self.attempt, self.begin, follow=follow)
        return follow(self.begin)

    def _try(self, what: str, duty: Callable[[], None]) -> None:
        """Do one duty; an error is logged once, and the next look tries again."""
        try:
            duty()
        except Exception as error:  # a defect in one duty must not end the others
            words = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            if self._complaints.get(what) != words:
                log_line(f"{what}: left for later: {words}")
            self._complaints[what] = words
        else:
            self._complaints.pop(what, None)

    def _follow(self) -> None:
        self._views.update(attempt=self.attempt.number)

    def _look_for_hang(self) -> None:
        if self._ended is not None:
            return
        if self.attempt.outcome.exists():
            self._look_for_leaving()
            return
        if self._handed_over is not None:
            self._look_for_agents(self._handed_over)
            return
        if time.monotonic() < self._next_beats:
            return
        beats = self.attempt.read_heartbeats()
        self._next_beats = time.monotonic() + longest_heartbeat_interval(beats) / RARE_HEARTBEAT_LOOKS
        if beats != self._seen:
            self._seen, self._changed = beats, time.monotonic()
            return
        still = time.monotonic() - self._changed
        limit = stall_limit(beats, self.plan.chain)
        limit += AGENTS_FIRST_SECONDS if self.plan.chain.recovery == "node" else 0.0
        if still > limit and (self._writable() or still > UNWRITABLE_FACTOR * limit):
            self._end_hang(beats, still)

    def _look_for_agents(self, since: float) -> None:
        """Check whether the agents handle the hang: they move its record away when another restart begins."""
        if not self.attempt.hang.exists():
            self._handed_over, self._changed = None, time.monotonic()
        elif time.monotonic() - since > AGENT_SECONDS:
            self._end_step()

    def _writable(self) -> bool:
        """Return whether heartbeats can be written; if not, silent ranks prove little."""
        probe = self.attempt.heartbeats / ".watch"
        try:
            probe.touch()
            probe.unlink()
        except OSError:
            return False
        return True

    def _look_for_leaving(self) -> None:
        """End ranks that recorded an outcome and do not exit; the outcome holds."""
        now = time.monotonic()
        self._left = self._left or now
        if now - self._left > max(self.plan.chain.hang_timeout, LEAVE_SECONDS):
            log_line(f"the ranks left {now - self._left:.0f} s ago and are still there; ending them")
            self._end_step()

    def _end_hang(self, beats: Sequence[Heartbeat], seconds: float) -> None:
        """End the ranks even if other steps fail: only that is retried. Raises SchedulerError if it fails."""
        job_id = self.scheduler.current_job_id()
        if not self.attempt.hang.exists():
            stacks = self.run.stacks(self.attempt.number)
            asked = self._observer is None  # the signal may mean something else to a foreign program
            with logged("the ranks could not be asked for their stacks", SchedulerError):
                if asked:
                    self.scheduler.signal_ranks(job_id, signal.SIGUSR1)
                    time.sleep(ANSWER_SECONDS)
            if self._goes_on(beats):
                return
            ranks = self.plan.rank_count(self.begin.options if self.begin else {})
            hang = Hang(
                iteration=max((beat.iteration for beat in beats), default=0),
                phase=beats[0].phase if beats else "start",
                seconds=seconds,
                silent=sorted(set(range(ranks)) - ranks_with_stacks(stacks)) if asked else [],
                asked=asked,
                late={str(rank): place for rank, place in late_ranks(stacks).items()} if asked else {},
                collectives=unfinished_collectives(stacks) if asked else {},
                time=time.time(),
            )
            log_line(f"{hang.words}; {f'Python stacks in {stacks}; ' if asked else ''}ending the ranks")
            with logged(f"{self.attempt.hang.name} not written", OSError):  # the log has its words
                hang.write(self.attempt.hang)
        if self.plan.chain.recovery == "node" and self.attempt.hang.exists():
            self._handed_over = time.monotonic()
        else:
            self._end_step()

    def _goes_on(self, beats: Sequence[Heartbeat]) -> bool:
        """Return whether a heartbeat has changed since: while ranks were asked, agents may have restarted them."""
        try:
            return self.attempt.read_heartbeats() != beats
        except (OSError, RunDirError):
            return False

    def _end_step(self) -> None:
        self.scheduler.signal_ranks(self.scheduler.current_job_id(), signal.SIGKILL)
        self._ended = time.monotonic()

    def _look_for_starter(self, batch_pid: int) -> None:
        """End the starter of the ranks (srun, `agent.step_per_node`) if it outlives them, or else the batch script: it
        waits for the starter, and a stopped one would hold the nodes to the time limit."""
        seconds = 0.0 if self._ended is None else time.monotonic() - self._ended
        if seconds > 2 * STARTER_SECONDS:
            log_line("the starter of the ranks cannot be ended; ending the batch script")
            os.kill(batch_pid, signal.SIGKILL)
        elif seconds > STARTER_SECONDS:
            for pid in other_children(batch_pid):
                log_line(f"process {pid}, which started the ranks, is still there; ending it")
                os.kill(pid, signal.SIGKILL)

    def _guard(self, batch_pid: int) -> None:
        """Start the guard of a job without successor, after the ranks, whose place in the job it could take."""
        if self._guarded or not self._seen or not self.plan.chain.auto_requeue:
            return
        if self.plan.chain.mode == "singleton" and not self.attempt.retry_successor.exists():
            return
        root = Path(self.plan.package_root)
        start = ["env", f"PYTHONPATH={root}", "bash", str(root / "launchers/lib/rank.sh")]
        where = [f"--run-dir={self.run.path}", f"--attempt={self.attempt.number}", f"--batch-pid={batch_pid}"]
        command = [*start, *self.plan.host_command("relayrun.control.chain"), "guard", *where]
        self.scheduler.guard(self.scheduler.current_job_id(), command, log=self.attempt.guard_log)
        self._guarded = True

    def _look_at_job_end(self, batch_pid: int) -> None:
        """Record an end of the job that has moved; ask the ranks to leave if they know a later one only."""
        if self.begin is None or self.attempt.stop.exists() or time.monotonic() < self._next_job_end:
            return
        pause = RESERVATION_SECONDS if "reservation" in self.begin.options else JOB_END_SECONDS
        self._next_job_end = time.monotonic() + pause
        job = self.scheduler.query(self.scheduler.current_job_id())
        if job is None or job.state != "RUNNING":
            return
        vars(self).pop("_budget", None)  # other runs of its sweep use it, too, and its owner may raise it
        (end, why), known = self._budget.cap(*self.scheduler.job_end(job)), self.attempt.job_end_time(self.begin)
        end = None if end is None else end + self.begin.clock_ahead
        if _is_later(end, known) or _is_later(known, end):
            log_line(f"the job ends {_when(end)}, not {_when(known)}{why and f': {why}'}")
            ChangedJobEnd(time=end, why=why).write(self.attempt.job_end)
            self._latest_end = end if _is_later(end, self._latest_end) else self._latest_end
        if end is None or not _is_later(self._latest_end, end) or time.time() + pause < end - self.begin.grace_period:
            return
        log_line(f"{why or 'the job ends'} in {end - time.time():.0f} s: the ranks leave")
        write_atomic(self.attempt.stop, f"{why or 'the time limit was lowered'}\n")
        os.kill(batch_pid, signal.SIGUSR2)  # as Slurm does before the time limit

    @cached_property
    def _budget(self) -> BudgetEnd:
        begin, plan = self.attempt.started_record(), Plan.load_in_job(self.run)
        nodes, start = int(begin.options.get("nodes", plan.nodes_of_job)), begin.job_start_time or begin.start_time
        return budget_end(self.run, plan, nodes=nodes, start=start, before=begin.attempt)

    def _look_at_budget(self) -> None:
        """End ranks that have not left by the end of the budget: Slurm would end them at the time limit only."""
        if self.begin is not None and self._ended is None and time.time() > self._budget.time + self.begin.clock_ahead:
            log_line(f"the ranks are still there, and the budget is over: {self._budget.words}; ending them")
            self._end_step()

    def _look_at_saves(self) -> None:
        """Submit evaluations and start waiting runs after a save, and from time to time without one."""
        size = log_size(self.attempt.commits)
        if size == self._commits and time.monotonic() < self._next_look:
            return
        self._commits, self._next_look = size, time.monotonic() + RETRY_SECONDS
        evaluation_jobs.submit_due_evaluations(self.run, self.plan, scheduler_for_plan(self.plan, self.run, patience=0))
        campaign.start_due_members_of(self.run)

    def _look_after_successor(self) -> None:
        """Queue the successor that could not be queued when the attempt began; record when somebody cancels it."""
        if time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + self._pause
        if not self.attempt.retry_successor.exists():
            note = partial(requested_options.note_changes, self.run, self.plan)
            if jobs.record_cancelled_successor(self.attempt, self.scheduler, note_waiting=note) is None:
                jobs.queue_owed_fallback_job(self.run, self.plan, self.attempt)
            return
        self._pause = min(2 * self._pause, RETRY_CEILING)
        own = self.scheduler.current_job_id()
        if jobs.read_chain_end_from_comment(self.scheduler.query(own)) is not None:
            return
        jobs.ensure_successor(self.run, self.plan, self.scheduler, self.attempt, own=own)
        self._pause = RETRY_SECONDS
        job = self.scheduler.query(own)
        if job is not None:
            self.scheduler.confirm_begin(job, followed=not self.plan.outlives_nodes, log=failure_reason.stderr_file())


def stall_limit(beats: Sequence[Heartbeat], chain: ChainSection) -> float:
    """Return the seconds without a change after which an attempt with these heartbeats hangs."""
    rare = longest_heartbeat_interval(beats)
    if not beats or all(beat.phase == "start" for beat in beats):
        return max(chain.start_timeout, chain.hang_timeout) + rare
    return max([chain.hang_timeout, *(USUAL_STEPS * beat.usual for beat in beats)]) + rare


def _is_later(one: float | None, other: float | None) -> bool:
    """Return whether one end of a job is later than another by a second or more; None: without a limit."""
    return other is not None and (one is None or one > other + 1)


def _when(end: float | None) -> str:
    return "without a limit" if end is None else time.strftime("at %Y-%m-%dT%H:%M:%S", time.localtime(end))


def other_children(parent: int) -> list[int]:
    """Return the children of a process of this node that are not this process or its parents."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_bytes().rpartition(b")")[2].split()[1])
    own = os.getpid()
    while parents.get(own, parent) != parent:
        own = parents[own]
    return [pid for pid, above in parents.items() if above == parent and pid != own]


def run_guard(run: Run, number: int, *, batch_pid: int) -> int:
    """Wait for SIGTERM, then requeue the job if needed. `batch_pid`: the batch script's process on the batch host."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return _guard_job(run, number, batch_pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _guard_job(run: Run, number: int, batch_pid: int) -> int:
    plan = Plan.load_in_job(run)  # refuses the run directory of a newer version
    scheduler = slurm_scheduler()
    attempt = run.attempt(number)
    own = scheduler.current_job_id()
    patience = KILL_WAIT_SHARE * scheduler.kill_wait()
    here, job = os.environ.get("SLURMD_NODENAME"), scheduler.query(own)
    beside = job is not None and job.batch_host == here  # on another node the id names another process or none
    log_line(f"guarding attempt {number}, job {own}{'' if beside else f', from {here}: this is not the batch host'}")
    signal.sigwait({signal.SIGTERM})
    # a job that is cancelled or at its limit still has its batch script
    killed = beside and not is_process_alive(batch_pid)
    deadline = time.monotonic() + patience
    while not attempt.end.exists() and not (beside and not is_process_alive(batch_pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if attempt.end.exists() or (plan.chain.mode == "singleton" and not attempt.retry_successor.exists()):
        return 0  # the batch script closed the attempt, or a successor is queued
    begin = attempt.read_begin()
    if not killed and scheduler.cancelled(own, nodes=begin.nodes if begin else ""):
        return 0
    with contextlib.suppress(SchedulerError):  # asks once: only seconds may be left
        if stopped := jobs.read_chain_end_from_comment(slurm_scheduler(patience=0).query(own)):
            log_line(f"the chain ends: {stopped.reason}")
            return 0
    log_line(
        f"the batch script of attempt {number} {'was killed' if killed else 'does not end'}; job {own} is queued again"
    )
    scheduler.requeue(own)  # first: only seconds may be left
    with logged(f"job {own} asks for as many nodes as before", SchedulerError, OSError):
        if (minimum := excluded_nodes.requeue_node_count(run, plan, scheduler, own)) is None:
            return 0
        if excluded_nodes.would_wait_for_nodes(run, minimum):
            job_id = jobs.ensure_replacement(run, plan, scheduler, attempt, own=own, delay=0)
            jobs.cancel_replaced_job(attempt, scheduler, own=own, job_id=job_id)
        else:
            scheduler.nodes.allow_fewer(own, minimum)
    return 0
