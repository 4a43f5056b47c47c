"""Beside the ranks: keeps the merged metrics up to date, ends an attempt that stands still, looks after the successor.

No duty that fails keeps it from the others, and none asks the scheduler for long: a rank that hangs must be seen.

An attempt stands still when no node's heartbeat has changed for `hang_timeout` seconds, or ten times what a
step (while saving: a save) usually takes, if that is longer. Time is this process's own clock, from the last
change it saw, so that clocks of nodes need not agree. Before it is ended, every rank is asked for its Python
stacks; who does not answer is named.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from relayrun.control.chain import campaign, evaluation_jobs, failure_reason, successor
from relayrun.control.chain.copier import CheckpointCopier
from relayrun.control.chain.guard import is_process_alive
from relayrun.control.chain.messenger import NoticeSender
from relayrun.control.chain.quota import QuotaMonitor
from relayrun.control.log import log_line
from relayrun.control.rundir.merged_metrics import MergedViews
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Hang, Heartbeat
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.stacks import late_ranks, ranks_with_stacks
from relayrun.control.scheduler.base import Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.control.signs import longest_heartbeat_interval
from relayrun.control.trainers.base import AttemptObserver
from relayrun.control.trainers.by_rounds import RestartObserver
from relayrun.control.trainers.choose import trainer_of
from relayrun.errors import RunDirError, SchedulerError
from relayrun.files import write_atomic

POLL_SECONDS = 1.0
LEAVE_SECONDS = 60.0
"""How long ranks have at least, behind their outcome, to go."""
ANSWER_SECONDS = 5.0
"""How long ranks have to write their stacks."""
RETRY_SECONDS = 60.0
RETRY_CEILING = 1800.0
"""Between two tries to queue a successor; each failed one doubles it."""
AGENTS_FIRST_SECONDS = 30.0
"""Where agents look for hangs, too, and know more, they have so many seconds more than the supervisor's limit."""
AGENT_SECONDS = 60.0
"""How long agents have to end ranks that hang, before the whole step is ended."""
PATIENCE = 10.0
"""Seconds for which a controller that does not answer is asked again."""
UNWRITABLE_FACTOR = 5
"""Ranks whose signs of life cannot be written, for a full disk, may be silent for this many times as long."""
RESERVATION_SECONDS = 15.0
"""Between two questions when the reservation ends; a person may move that."""
RARE_HEARTBEAT_LOOKS = 10
"""Looks for another heartbeat between two that are rare: there is a file for each node."""
USUAL_STEPS = 10
"""A step that takes this many times the usual one hangs."""


def stall_limit(beats: Sequence[Heartbeat], *, hang_timeout: float, start_timeout: float) -> float:
    """Seconds without a change after which an attempt with these heartbeats stands still."""
    rare = longest_heartbeat_interval(beats)
    if not beats or all(beat.phase == "start" for beat in beats):
        return max(start_timeout, hang_timeout) + rare
    return max([hang_timeout, *(USUAL_STEPS * beat.usual for beat in beats)]) + rare


class Watch:
    """The supervisor's part beside one attempt."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.plan = Plan.load(run)
        self.attempt = run.attempt(number)
        self.begin = self.attempt.read_begin()
        self.scheduler: Scheduler = scheduler_for_plan(self.plan, run, patience=PATIENCE)
        self._trainer = trainer_of(self.plan, run)
        self._observer = self._observing()
        self._views = MergedViews(run)
        self._messenger = NoticeSender(run, self.plan)
        self._copier = CheckpointCopier(run, self.plan)
        self._quota = QuotaMonitor(run, self.plan)
        self._complaints: dict[str, str] = {}
        """What was last said about each duty that fails."""
        self._seen: list[Heartbeat] = []
        self._changed = self._next_beats = time.monotonic()
        self._next_try = time.monotonic() + RETRY_SECONDS
        self._pause = RETRY_SECONDS
        self._ended_hang = False
        self._handed_over: float | None = None
        """When a hang was left to the agents, which end the ranks and may start them again."""
        self._left: float | None = None
        """When the ranks' outcome was first seen."""
        self._guarded = False
        self._commits = 0
        """Bytes of commits.jsonl when evaluations and the campaign were last looked after."""
        self._next_look = self._next_reservation = 0.0

    def loop(self, batch_pid: int) -> None:
        """Until SIGTERM, or until the batch script, this process of this node, has gone."""
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        leaving, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)  # a sleep would go on after the signal, and the end of the job with it
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a mask is handed down, and the job waits for it
        while is_process_alive(batch_pid):
            self.look(batch_pid)
            if select.select([leaving], [], [], POLL_SECONDS)[0] and signal.SIGTERM in os.read(leaving, 1024):
                break  # another signal is a duty's own
        self._messenger.finish()
        self._copier.finish()
        self._try("the merged views", self._follow_to_the_end)

    def look(self, batch_pid: int) -> None:
        """Do every duty once."""
        if self._observer is not None:
            self._try("what the program says", self._observer.look)
        self._try("the merged views", self._follow)
        self._try("the look for ranks that hang", self._look_for_hang)
        self._try("the guard", lambda: self._guard(batch_pid))
        self._try("the end of the reservation", lambda: self._look_at_reservation(batch_pid))
        self._try("the successor", self._look_after_successor)
        self._try("evaluations, and the runs behind this one", self._look_at_saves)
        saved = failure_reason.log_size(str(self.attempt.commits))
        self._try("the copies of checkpoints", lambda: self._copier.look(saved))
        self._try("how full the disk is", lambda: self._quota.look(saved))
        self._messenger.look()

    def _observing(self) -> AttemptObserver | None:
        """Who writes the records of a foreign program; None where it writes them itself."""
        if self.begin is None:
            return None

        def signal_ranks(number: signal.Signals) -> None:
            self.scheduler.signal_ranks(self.scheduler.current_job_id(), number)

        follow = partial(self._trainer.follow, signal_ranks=signal_ranks)
        if self.plan.recovery == "node" and self.plan.trainer != "native":
            return RestartObserver(self.attempt, self.begin, follow=follow)
        return follow(self.begin)

    def _try(self, what: str, duty: Callable[[], None]) -> None:
        """Do one duty; what fails is said once and tried again with the next look."""
        try:
            duty()
        except Exception as error:  # a defect in one duty must not end the others either
            words = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            if self._complaints.get(what) != words:
                log_line(f"{what}: left for later: {words}")
            self._complaints[what] = words
        else:
            self._complaints.pop(what, None)

    def _follow(self) -> None:
        """Append what is new and whole in the attempt's metrics to the merged view."""
        self._views.update(attempt=self.attempt.number)

    def _follow_to_the_end(self) -> None:
        self._follow()
        self._views.note()

    def _look_for_hang(self) -> None:
        if self._ended_hang:
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
        limit = stall_limit(beats, hang_timeout=self.plan.hang_timeout, start_timeout=self.plan.start_timeout)
        limit += AGENTS_FIRST_SECONDS if self.plan.recovery == "node" else 0.0
        if still > limit and (self._writable() or still > UNWRITABLE_FACTOR * limit):
            self._end_hang(beats, still)

    def _look_for_agents(self, since: float) -> None:
        """See whether the agents have taken the hang: its record is put aside where another round begins."""
        if not self.attempt.hang.exists():
            self._handed_over, self._changed = None, time.monotonic()
        elif time.monotonic() - since > AGENT_SECONDS:
            self._end_step()

    def _writable(self) -> bool:
        """Whether signs of life can be written; where not, the ranks' silence says little."""
        probe = self.attempt.heartbeats / ".watch"
        try:
            probe.touch()
            probe.unlink()
        except OSError:
            return False
        return True

    def _look_for_leaving(self) -> None:
        """End ranks that said how they leave and then do not go; what they said holds."""
        now = time.monotonic()
        self._left = self._left or now
        if now - self._left > max(self.plan.hang_timeout, LEAVE_SECONDS):
            log_line(f"the ranks left {now - self._left:.0f} s ago and are still there; ending them")
            self._end_step()

    def _end_hang(self, beats: Sequence[Heartbeat], seconds: float) -> None:
        """End the ranks, whatever else fails: only that is tried again. Raises SchedulerError where it fails."""
        job_id = self.scheduler.current_job_id()
        if not self.attempt.hang.exists():
            stacks = self.run.stacks(self.attempt.number)
            asked = self._observer is None  # a foreign program may take the signal for something else
            try:
                if asked:
                    self.scheduler.signal_ranks(job_id, signal.SIGUSR1)
                    time.sleep(ANSWER_SECONDS)
            except SchedulerError as error:
                log_line(f"the ranks could not be asked for their stacks: {error.message}")
            if self._goes_on(beats):
                return
            hang = Hang(
                iteration=max((beat.iteration for beat in beats), default=0),
                phase=beats[0].phase if beats else "start",
                seconds=seconds,
                silent=sorted(set(range(self._ranks())) - ranks_with_stacks(stacks)) if asked else [],
                asked=asked,
                late={str(rank): place for rank, place in late_ranks(stacks).items()} if asked else {},
                time=time.time(),
            )
            log_line(f"{hang.words}; {f'Python stacks in {stacks}; ' if asked else ''}ending the ranks")
            try:
                hang.write(self.attempt.hang)
            except OSError as error:  # its words stand in the log
                log_line(f"{self.attempt.hang.name} not written: {error}")
        if self.plan.recovery == "node" and self.attempt.hang.exists():
            self._handed_over = time.monotonic()
        else:
            self._end_step()

    def _goes_on(self, beats: Sequence[Heartbeat]) -> bool:
        """Whether something has moved since: while ranks were asked, agents may have begun another round."""
        try:
            return self.attempt.read_heartbeats() != beats
        except (OSError, RunDirError):
            return False

    def _end_step(self) -> None:
        self.scheduler.signal_ranks(self.scheduler.current_job_id(), signal.SIGKILL)
        self._ended_hang = True

    def _guard(self, batch_pid: int) -> None:
        """Start the guard of a job behind which no other waits, once its ranks have their step.

        Before that it could take their place in the job.
        """
        if self._guarded or not self._seen or not self.plan.auto_requeue:
            return
        if self.plan.mode == "singleton" and not self.attempt.retry_successor.exists():
            return
        root = Path(self.plan.package_root)
        command = [
            "env",
            f"PYTHONPATH={root}",
            "bash",
            str(root / "launchers/lib/rank.sh"),
            self.plan.host_python,
            "-m",
            "relayrun.control.chain",
            "guard",
            f"--run-dir={self.run.path}",
            f"--attempt={self.attempt.number}",
            f"--batch-pid={batch_pid}",
        ]
        self.scheduler.guard(self.scheduler.current_job_id(), command, log=self.attempt.guard_log)
        self._guarded = True

    def _look_at_reservation(self, batch_pid: int) -> None:
        """Have the ranks leave before a reservation ends that was made shorter since the attempt began."""
        if self.begin is None or "reservation" not in self.begin.options or self.attempt.stop.exists():
            return
        if time.monotonic() < self._next_reservation:
            return
        self._next_reservation = time.monotonic() + RESERVATION_SECONDS
        end, known = self.scheduler.reservation_end(self.begin.options["reservation"]), self.begin.job_end_time
        if end is None or (known is not None and end > known - 1):  # the ranks know of it
            return
        if time.time() + RESERVATION_SECONDS >= end - self.begin.lead:
            log_line(
                f"reservation {self.begin.options['reservation']} ends in {end - time.time():.0f} s: the ranks leave"
            )
            write_atomic(self.attempt.stop, "the reservation ends\n")
            os.kill(batch_pid, signal.SIGUSR2)  # as Slurm does before the time limit

    def _ranks(self) -> int:
        nodes = int(self.begin.options.get("nodes", self.plan.nodes)) if self.begin else self.plan.nodes
        return self.plan.training_nodes(nodes) * self.plan.ntasks_per_node

    def _look_at_saves(self) -> None:
        """Submit the evaluation of a new checkpoint, begin runs that waited for it; also without one, now and then."""
        size = failure_reason.log_size(str(self.attempt.commits))
        if size == self._commits and time.monotonic() < self._next_look:
            return
        self._commits, self._next_look = size, time.monotonic() + RETRY_SECONDS
        evaluation_jobs.submit_due_evaluations(self.run, self.plan, scheduler_for_plan(self.plan, self.run, patience=0))
        campaign.start_due_members_of(self.run)

    def _look_after_successor(self) -> None:
        """Queue the successor that could not be queued when the attempt began; note it when somebody cancels it."""
        if time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + self._pause
        if not self.attempt.retry_successor.exists():
            successor.record_cancelled_successor(self.attempt, self.scheduler)
            return
        self._pause = min(2 * self._pause, RETRY_CEILING)
        own = self.scheduler.current_job_id()
        if successor.stop_reason_of_job(self.scheduler.query(own)) is not None:
            return
        options = self.begin.options if self.begin else {}
        successor.ensure_successor(self.run, self.plan, self.scheduler, self.attempt, own=own, options=options)
        self._pause = RETRY_SECONDS
        job = self.scheduler.query(own)
        if job is not None:
            self.scheduler.settle(job, followed=not self.plan.outlives_nodes, log=failure_reason.stderr_file())
