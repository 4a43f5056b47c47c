"""What runs on the nodes: the batch scripts of `launchers/lib` in Python, and ranks that iterate and save.

The supervisor's programs are relayrun's own, unchanged. The scripts are told again here; `test_again` and the tests of
the local chain hold the shell to the same.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from relayrun.control.chain import failover, supervisor, watch
from relayrun.control.chain.job_script import FALLBACK_GIVE_UP_SECONDS
from relayrun.control.rundir import triggers
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptOutcome, AttemptOutcomeName, CheckpointCommit, Heartbeat
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import BEGIN_BACKOFF, MAX_FAILED_BEGINS
from relayrun.files import append_line, write_atomic

from .clock import Clock, Program
from .commands import Commands
from .controller import Controller, MemoryJob

BEAT_SECONDS = 400.0
"""Interval between two heartbeats, and between two looks of the watch."""
SAVE_BEATS = 3
STEPS_PER_BEAT = 10
LEAVE_SECONDS = 20.0
"""From the wish to leave to the last checkpoint and the end."""
CHAIN_ENDS, FAILED = 10, 12


@dataclass
class Fate:
    """What happens to the ranks of one job, and to its batch script."""

    crash_after: float = -1.0
    """Seconds after their start at which a rank dies; negative: never."""
    crash_code: int = 1
    hangs: bool = False
    """Instead of dying the ranks stand still."""
    fatal: bool = False
    """Instead of dying rank 0 records a fatal error."""
    begin_fails: bool = False
    """Python does not start on the node."""
    script_killed_after: float = -1.0
    kill_writes: dict[str, int] = field(default_factory=dict)
    """By program: the number of changes of files after which it is killed."""
    saves: bool = True
    """False: the file system takes no checkpoint."""


@dataclass
class Site:
    """All that a job needs to know."""

    clock: Clock
    slurm: Controller
    run: Run
    plan: Plan
    commands: Commands
    fate: Callable[[MemoryJob], Fate]
    disk_full: Callable[[], bool]
    told: Callable[[str, int, int], None]
    """Told of `ranks` (attempt, job) that start, that are `gone` (attempt, job), of a `commit` (iteration, job); of a
    batch script (job, 0) that `failed`, of a `script killed`, of one that ends the chain in `only the log`."""


class Ranks:
    """The ranks of an attempt: iterations, heartbeats, checkpoints, and an end."""

    def __init__(self, site: Site, job: MemoryJob, attempt: Attempt, fate: Fate, over: Callable[[], None]) -> None:
        self.site, self.job, self.attempt, self.fate, self._over = site, job, attempt, fate, over
        self.begin = attempt.started_record()
        self.iteration = self.begin.base_iteration
        self.saved = self.iteration
        self.live, self.code = True, 0
        self._leaving = self.still = False
        self._beats = 0
        self.started = site.clock.now
        self._ahead = site.clock.skews.get(job.batch_host, 0.0)
        site.told("ranks", attempt.number, job.id)
        site.clock.after(30.0, self._beat)
        if fate.crash_after >= 0:
            site.clock.after(fate.crash_after, self._fate)

    def ask(self, reason: str) -> None:
        """Ask them to save and leave."""
        if self.live and not self.still:
            self._leave("saved", reason)

    def kill(self, code: int = 137) -> None:
        if self.live:
            self.live, self.code = False, code
            self.site.told("gone", self.attempt.number, self.job.id)
            self._over()

    def _fate(self) -> None:
        if not self.live or self._leaving:
            return
        if self.fate.hangs:
            self.still = True
            self.site.clock.note("the ranks stand still", who=f"ranks {self.attempt.number}")
        elif self.fate.fatal:
            self._record("fatal", "the loss is NaN")
            self.kill(3)
        else:
            self.kill(self.fate.crash_code)

    def _beat(self) -> None:
        if not self.live or self._leaving or self.still:
            return
        site = self.site
        if trigger := triggers.read_trigger(site.run, "exit"):
            self._leave("exit", f"exit trigger by {trigger.user}")
        elif self.attempt.stop.exists():
            self._leave("saved", "stop file")
        elif self._seconds_left() < 0:
            self._leave("saved", "time limit near")
        elif site.plan.total_steps is not None and self.iteration >= site.plan.total_steps:
            self._leave("done", "last step")
        else:
            self._step()
            site.clock.after(self._next_beat(), self._beat)

    def _seconds_left(self) -> float:
        """Seconds until they leave, by the clock of their node."""
        end = self.attempt.job_end_time(self.begin)
        return math.inf if end is None else end - self.begin.grace_period - self.site.clock.now - self._ahead

    def _next_beat(self) -> float:
        return min(BEAT_SECONDS, max(self._seconds_left(), 0.0) + 1.0)

    def _step(self) -> None:
        self._beats += 1
        if self._beats > 1:
            self.iteration += STEPS_PER_BEAT
            if self.site.plan.total_steps is not None:
                self.iteration = min(self.iteration, self.site.plan.total_steps)
        if self.site.disk_full():
            return
        now, step = self.site.clock.now, BEAT_SECONDS / STEPS_PER_BEAT
        line = {"iteration": self.iteration, "attempt": self.attempt.number, "step_seconds": step, "time": now}
        append_line(self.attempt.metrics, line, durable=False)
        beat = Heartbeat(node="n", iteration=self.iteration, phase="step", time=now, step_p95=step, save_p95=None)
        beat.write(self.attempt.heartbeats / "n.json")
        if self._beats % SAVE_BEATS == 0:
            self._save()

    def _save(self) -> None:
        if self.iteration == self.saved or self.site.disk_full() or not self.fate.saves:
            return
        folder = self.site.run.checkpoint(self.iteration)
        folder.mkdir(parents=True, exist_ok=True)
        now, taken = self.site.clock.now, self.iteration
        commit = CheckpointCommit(iteration=taken, path=str(folder), consumed_samples=taken, time=now, seconds=5.0)
        self.attempt.append_commit(commit)
        self.saved = self.iteration
        self.site.told("commit", self.iteration, self.job.id)

    def _leave(self, outcome: AttemptOutcomeName, reason: str) -> None:
        if self._leaving:
            return
        self._leaving = True

        def gone() -> None:
            if not self.live:
                return
            self._save()
            if outcome == "done" and self.saved < self.iteration:
                self.kill(1)  # the last checkpoint could not be written
                return
            self._record(outcome, reason)
            trigger = triggers.read_trigger(self.site.run, "exit")
            if outcome == "exit" and trigger is not None and not self.site.disk_full():
                triggers.acknowledge_trigger(self.site.run, trigger, iteration=self.iteration, result="saved")
            self.kill(0)

        self.site.clock.after(LEAVE_SECONDS, gone)

    def _record(self, outcome: AttemptOutcomeName, reason: str) -> None:
        if not self.site.disk_full():
            record = AttemptOutcome(outcome=outcome, reason=reason, iteration=self.iteration, time=self.site.clock.now)
            record.write(self.attempt.outcome)


class Work:
    """The programs of one job: its batch script, what the script started, and the ranks."""

    def __init__(self, site: Site, job: MemoryJob) -> None:
        self.site, self.job = site, job
        self.fate = site.fate(job)
        self.environment = {
            "SLURM_JOB_ID": str(job.id),
            "SLURM_RESTART_COUNT": str(job.restarts),
            "SLURMD_NODENAME": job.batch_host,
            "RELAYRUN_SCRIPT_TIME": str(site.clock.now + site.clock.skews.get(job.batch_host, 0.0)),
        }
        self.ranks: Ranks | None = None
        self.children: list[Program] = []
        self.steps: list[Program] = []
        self.script = site.clock.start(f"{job.id}.{job.restarts} batch", self.program, self.environment)
        self.script.on_end.append(self._script_ended)
        if self.fate.script_killed_after >= 0:
            site.clock.after(self.fate.script_killed_after, lambda: self.script.send(signal.SIGKILL))

    def program(self) -> int:
        """The batch script; returns its exit code."""
        raise NotImplementedError

    def _script_ended(self) -> None:
        for child in self.children:
            child.send(signal.SIGKILL)
        if self.script.code is None:
            self.site.told("script killed", self.job.id, 0)
        self.site.slurm.script_ended(self.job, 137 if self.script.code is None else self.script.code)

    def signal(self, number: signal.Signals, *, batch: bool, steps: bool) -> None:
        if steps:
            for step in self.steps:
                step.send(number)
            if self.ranks is not None:
                self.ranks.kill() if number == signal.SIGKILL else self.ranks.ask(number.name)
        if batch:
            self.script.send(number)
            if number == signal.SIGKILL:
                for child in self.children:
                    child.send(number)

    def gone(self) -> bool:
        ranks = self.ranks is not None and self.ranks.live
        return not ranks and all(program.over for program in [self.script, *self.children, *self.steps])

    def child(self, name: str, target: Callable[[], int]) -> Program:
        """Start a program of the batch script's."""
        started = self.site.clock.start(f"{self.job.id}.{self.job.restarts} {name}", target, self.environment)
        started.kill_after_writes = self.fate.kill_writes.pop(name, -1)
        started.on_end.append(self.script.poke)
        self.children.append(started)
        return started

    def finished(self, program: Program) -> int:
        """Wait for a child whatever signals come; return its exit code."""
        while not program.over:
            self.script.wait(None)
        return 137 if program.code is None else program.code

    def slurm(self, *command: str, lines: str = "") -> str | None:
        """One of Slurm's commands; None if it failed."""
        done = self.site.commands.run(list(command), input=lines)
        return done.stdout.strip() if done.returncode == 0 else None

    def asked(self, *command: str) -> str:
        """Slurm's answer to a question, which is repeated."""
        while (said := self.slurm(*command)) is None:
            self.script.wait(30.0)
        return said

    def warn(self, seconds: float) -> None:
        """Slurm's warning before the limit."""
        job, allocation, slurm = self.job, self.job.allocation, self.site.slurm

        def look() -> None:
            if job.allocation != allocation or job.state != "RUNNING":
                return
            left = slurm.end_of(job) - self.site.clock.now - seconds
            if left > 0:
                self.site.clock.after(min(left, 300.0), look)
            else:
                self.script.send(signal.SIGUSR2)

        look()

    def give_up(self, state: str, reason: str, comment: str) -> int:
        self.slurm("scontrol", "update", f"JobId={self.job.id}", f"Comment={comment}")
        self.site.clock.note(f"the chain ends: {reason}")
        run = self.site.run
        if self.site.disk_full():
            self.site.told("only the log", self.job.id, 0)
        elif not run.stop.exists():
            write_atomic(run.stop, f"state: {state}\nreason: {reason}\n\nThe chain has ended.\n")
        return 1


class ChainWork(Work):
    """`job.sh` and `again.sh`."""

    attempt: Attempt | None = None
    leaving = ""
    """The signal that came before there were ranks."""

    def program(self) -> int:
        self.script.heeds = frozenset({signal.SIGTERM, signal.SIGUSR2})
        self.warn(self.site.plan.signal_seconds)
        code = self._begin()
        if code == CHAIN_ENDS:
            return 0
        if code or self.attempt is None:
            return self._again("begin", code)
        code = self._run_ranks()
        number = self.attempt.number
        self.script.heeds = frozenset()
        for pause in (2.0, 10.0, 30.0, 0.0):
            ended = self.finished(
                self.child("end", lambda: supervisor.end_attempt(Run(self.site.run.path), number, code))
            )
            if ended in (0, FAILED):
                return ended and 1
            self.script.wait(pause)
        return self._again("end", ended)

    def _begin(self) -> int:
        if self.fate.begin_fails:
            self.script.wait(1.0)
            return 127
        child = self.child("begin", lambda: supervisor.begin_attempt(Run(self.site.run.path)))
        while not child.over:
            self.script.wait(None)
            if self.script.signals:
                self.leaving = self.script.signals.pop().name
                self.script.heeds = frozenset()
                self.script.wait(5.0)
                child.send(signal.SIGKILL)
                self.script.wait(0.0)
                if child.code is None:
                    return 137
        if child.code == 0:
            self.attempt = self.site.run.attempt(int(child.said.strip().rpartition("/")[2]))
        return 137 if child.code is None else child.code

    def _run_ranks(self) -> int:
        attempt = self.attempt
        assert attempt is not None
        found = re.search(r"^leave_from=(\d+)", (attempt.path / "job.env").read_text(), re.M)
        leave_from = float(found[1]) if found else 0.0
        ahead = self.site.clock.skews.get(self.job.batch_host, 0.0)
        self.ranks = ranks = Ranks(self.site, self.job, attempt, self.fate, self.script.poke)
        self._start_watch(attempt.number)
        if self.leaving:
            self._ask(attempt, self.leaving)
        while ranks.live:
            self.script.wait(None)
            while self.script.signals:
                asked = self.script.signals.pop(0).name
                if asked == "SIGUSR2" and not attempt.stop.exists() and self.site.clock.now + ahead < leave_from:
                    leave_from = 0.0
                    continue
                self._ask(attempt, asked)
        for child in self.children:
            child.send(signal.SIGKILL)
        return ranks.code

    def _ask(self, attempt: Attempt, asked: str) -> None:
        if not self.site.disk_full():
            attempt.stop.write_text(f"{asked}\n")
        if self.ranks is not None:
            self.ranks.ask(asked)

    def _start_watch(self, number: int) -> None:
        """`keep_watching`: a watch that is killed starts again."""

        def again() -> None:
            if self.ranks is not None and self.ranks.live and not self.script.over:
                self._start_watch(number)

        watcher = self.child("watch", lambda: self._watch(number))
        watcher.on_end.append(lambda: self.site.clock.after(5.0, again))

    def _watch(self, number: int) -> int:
        own = self.site.clock.running
        assert own is not None
        looking = watch.Watch(Run(self.site.run.path), number)
        while True:
            looking.look(self.script.pid)
            own.wait(BEAT_SECONDS)

    def start_step(self, command: list[str]) -> None:
        """`srun` beside the ranks: the guard."""
        assert "guard" in command, command
        number = int(command[command.index("guard") + 2].partition("=")[2])
        pid = int(command[command.index("guard") + 3].partition("=")[2])
        guard = lambda: watch.run_guard(Run(self.site.run.path), number, batch_pid=pid)  # noqa: E731
        step = self.site.clock.start(f"{self.job.id}.{self.job.restarts} guard", guard, self.environment)
        step.heeds = frozenset({signal.SIGTERM})
        self.steps.append(step)

    def _requeued(self) -> bool:
        found = re.search(r" Restarts=(\d+)", self.asked("scontrol", "show", "job", "--oneliner", str(self.job.id)))
        return found is not None and int(found[1]) > int(self.environment["SLURM_RESTART_COUNT"])

    def _again(self, what: str, code: int) -> int:
        """`again.sh`: queue this job again, later each time."""
        self.script.heeds = frozenset()
        run, job = self.site.run, str(self.job.id)
        self.site.told("failed", self.job.id, 0)
        what = f"{what} failed in job {job} on {self.job.batch_host} (exit code {code})"
        self.site.clock.note(what)
        if run.stop.exists():
            return 1
        failed, nodes = 0, []
        comment = self.asked("squeue", "--noheader", f"--jobs={job}", "--format=%k")
        if found := re.fullmatch(r"relayrun:begin-failed=(\d+)@(.*)", comment):
            failed, nodes = int(found[1]), [name for name in found[2].split(",") if name]
        if comment.startswith("relayrun:stopped-by="):
            return self.give_up("stopped", f"stopped by {comment.partition('=')[2]}", comment)
        if (run.triggers / "exit").exists():
            return self.give_up("stopped", f"exit trigger, and {what}", comment)
        failed += 1
        delay = BEGIN_BACKOFF << (failed - 1)
        nodes += [self.job.batch_host] if self.job.batch_host not in nodes else []
        comment = f"relayrun:begin-failed={failed}@{','.join(nodes)}"
        given = self.asked("squeue", "--noheader", f"--jobs={job}", "--format=%x").replace("(null)", "")
        changes = self._where_next(given, nodes)
        return self._queue_again(what, failed, comment, f"StartTime=now+{delay} Comment={comment}{changes}")

    def _where_next(self, given: str, nodes: list[str]) -> str:
        kept = ",".join(name for name in given.split(",") if name not in nodes)
        for exclude in (",".join(filter(None, [given, *nodes])), given, *([kept] if given else [])):
            options = [f"--exclude={exclude}"] if exclude else []
            if not exclude or self.slurm("sbatch", "--test-only", *options, self.job.script) is not None:
                return "" if exclude == given else f" ExcNodeList={exclude}"
        return ""

    def _queue_again(self, what: str, failed: int, comment: str, changes: str) -> int:
        job, refused = str(self.job.id), 0
        while True:
            question = ["squeue", "--noheader", "--me", f"--name={self.site.plan.job_name}", "--states=PENDING"]
            if self.asked(*question, "--format=%i"):
                return 1
            if (successor := self._cancelled_successor()) is not None:
                return self.give_up("stopped", f"the successor, job {successor}, was cancelled", comment)
            if self._requeued():
                return 1
            state = self.asked("squeue", "--noheader", f"--jobs={job}", "--format=%T %L")
            if not re.search(r"^RUNNING| (0:00|INVALID)$", state):
                return self.give_up("stopped", f"{what}, while Slurm ended the job", comment)
            if failed >= MAX_FAILED_BEGINS:
                return self.give_up("failed", f"{what}, {failed} times in a row", comment)
            first = f"update JobId={job} Requeue=1\nupdate JobId={job} Comment={comment}\n"
            self.slurm("scontrol", lines=first)
            taken = comment
            if state.startswith("RUNNING"):
                taken = self.asked("squeue", "--noheader", f"--jobs={job}", "--format=%k")
            if taken == comment:
                self.slurm("scontrol", lines=f"requeue {job}\nupdate JobId={job} {changes}\n")
                if self._requeued():
                    return 1
            refused += 1
            if refused >= 10:
                return self._not_taken(what, comment)
            self.script.wait(2.0 if refused < 3 else 30.0)

    def _cancelled_successor(self) -> str | None:
        if self.attempt is None or not self.attempt.successor.exists():
            return None
        text = self.attempt.successor.read_text()
        found = re.search(r'"job_id": "(\d+)"', text)
        if found is None:
            return None
        question = ["squeue", "--noheader", "--states=all", f"--jobs={found[1]}", "--format=%T"]
        if '"cancelled": true' in text or self.slurm(*question) == "CANCELLED":
            return found[1]
        return None

    def _not_taken(self, what: str, comment: str) -> int:
        name = f"{self.site.plan.job_name}-fallback"
        if self.asked("squeue", "--noheader", "--me", f"--name={name}", "--states=PENDING", "--format=%i"):
            return 1
        return self.give_up("failed", f"{what}, and Slurm does not queue the job again", comment)


class FallbackWork(Work):
    """`fallback.sh`."""

    def program(self) -> int:
        self.script.heeds = frozenset({signal.SIGTERM, signal.SIGUSR2})
        self.warn(FALLBACK_GIVE_UP_SECONDS)
        pause = 5.0
        while True:
            child = self.child("fallback", lambda: failover.run_fallback_job(Run(self.site.run.path)))
            while not child.over and not self.script.signals:
                self.script.wait(None)
            if child.over and child.code == 0:
                return 0
            if not self.script.signals:
                self.script.wait(pause)
            if self.script.signals:
                return self._ended()
            pause = min(2 * pause, 60.0)

    def _ended(self) -> int:
        self.script.heeds = frozenset()
        shown = self.slurm("scontrol", "show", "job", "--oneliner", str(self.job.id)) or ""
        if re.search(r" PreemptTime=\d", shown):
            self.slurm("scontrol", "requeue", str(self.job.id))
            return 1
        words = "a job of the chain failed, and the fallback job could not queue another one"
        return self.give_up("failed", words, "relayrun:fallback-failed")
