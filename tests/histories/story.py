"""What happens in one history, all of it drawn from its seed."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from relayrun.control.chain import failure_reason, job_script, jobs, quota
from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import RelayrunError
from relayrun.slurmtime import format_time
from tests.history import history_plan
from tests.plans import plan_with

from .clock import Clock
from .commands import Commands
from .controller import FREE_LIMIT, OPERATOR, REMEMBERED, Controller, MemoryJob
from .laws import Laws
from .nodes import BEAT_SECONDS, STEPS_PER_BEAT, ChainWork, FallbackWork, Fate, Site, Work

HOUR = 3600.0
HORIZON = 30 * HOUR
"""Time in which things go wrong; then all is well, and the chain comes to its end."""
PEACE = 40 * 24 * HOUR
RESERVATION = "week"
LAUNCHER_TEXT = cache(job_script._launcher_text)
FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass
class Outcome:
    """How a history went."""

    seed: int
    broken: list[str]
    lines: list[str]
    jobs: int
    ended: str
    durable: int
    events: list[str] = field(default_factory=list)


class History:
    """One history: a run, a Slurm, and a fate."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.dice = seed, random.Random(seed)
        self.lines: list[str] = []
        self.events: list[str] = []
        self.clock = Clock(lambda line: self.lines.append(_without_names(line, folder)))
        self.run = Run(folder / "run")
        self.plan = self._plan()
        nodes = [f"n{number}" for number in range(self.plan.nodes_of_job + self.dice.choice([1, 1, 3]))]
        self.slurm = Controller(self.clock, nodes, self._begin_work)
        if "reservation" in self.plan.sbatch_options:
            self.slurm.reservations[RESERVATION] = self.clock.now + 2 * PEACE
        self.commands = Commands(self.slurm)
        self.operator = Commands(self.slurm, user=OPERATOR)
        self.full_until = self.unread_until = 0.0
        self.fault = errno.ENOSPC
        """Error of the file system until then."""
        full = lambda: self.clock.now < self.full_until  # noqa: E731
        self.laws = Laws(self.clock, self.slurm, self.run, self.plan, full)
        self.slurm.watchers += [self.laws.job, self._wake_watches]
        self.works: dict[int, Work] = {}
        self.clock.on_write, self.clock.on_read = self._on_write, self._on_read
        self.bad_nodes: set[str] = set()
        self.site = Site(
            clock=self.clock,
            slurm=self.slurm,
            run=self.run,
            plan=self.plan,
            commands=self.commands,
            fate=self._fate,
            disk_full=full,
            told=self.laws.ranks,
        )
        self.trouble = self.dice.choice([0.0, 0.1, 0.3, 0.6])
        """How often something goes wrong in a job."""

    def _plan(self) -> Plan:
        dice = self.dice
        plan = history_plan(self.run, total_steps=dice.choice([100, 200, 500]))
        options: dict[str, str | None] = {"partition": dice.choice(["main", "long"])}
        if dice.random() < 0.2:
            options["exclude"] = "n0"
        if dice.random() < 0.15:
            options["reservation"] = RESERVATION
        limit = dice.choice([3600, 2 * 3600, 3 * 3600])
        return plan_with(
            plan,
            scheduler="slurm",
            hang_timeout=900,
            start_timeout=900,
            mode=dice.choice(["singleton", "singleton", "requeue"]),
            fallback_job=dice.random() < 0.7,
            max_failed_attempts=dice.choice([2, 3]),
            nodes=dice.choice([1, 2]),
            time_limit=limit,
            sbatch_options=options,
            signal_seconds=dice.choice([30, 120]),
        )

    # the fates of jobs

    def _begin_work(self, job: MemoryJob) -> Work:
        kind = FallbackWork if job.name == self.plan.fallback_job_name else ChainWork
        self.works[job.id] = work = kind(self.site, job)
        return work

    def _wake_watches(self, what: str, _job: MemoryJob) -> None:
        """The real watch looks once a minute, and Slurm remembers a job for five."""
        if what.startswith("ended"):
            for work in self.works.values():
                for child in work.children:
                    if child.name.endswith("watch") and not child.over:
                        self.clock.after(61.0, child.poke)

    def _fate(self, job: MemoryJob) -> Fate:
        fate = Fate()
        fate.begin_fails = job.batch_host in self.bad_nodes
        if self.clock.now - self._began > HORIZON or self.dice.random() >= self.trouble:
            return fate
        dice = self.dice
        kind = dice.choice(["crash", "crash", "hang", "fatal", "begin", "script", "kill", "kill", "nosave"])
        after = dice.choice([5.0, 700.0, dice.uniform(0, 2 * HOUR)])
        self.events.append(kind)
        if kind in ("crash", "hang", "fatal"):
            fate.crash_after, fate.hangs, fate.fatal = after, kind == "hang", kind == "fatal" and dice.random() < 0.2
            fate.crash_code = dice.choice([1, 7, 137, 139])
        elif kind == "begin":
            fate.begin_fails = True
        elif kind == "script" and job.name == self.plan.job_name:
            fate.script_killed_after = dice.choice([0.5, after])
        elif kind == "nosave":
            fate.saves = False
        elif kind == "kill":
            fate.kill_writes = {dice.choice(["begin", "end", "watch", "fallback"]): dice.randrange(25)}
        return fate

    def _on_write(self, path: str) -> None:
        if self.clock.now < self.full_until and path.startswith(str(self.run.path)):
            raise OSError(self.fault, os.strerror(self.fault), path)

    def _on_read(self, path: str) -> None:
        if self.clock.now < self.unread_until and path.startswith(str(self.run.path)):
            raise OSError(self.fault, os.strerror(self.fault), path)

    # what happens outside

    def play(self) -> Outcome:
        """Let it happen; return how it went."""
        self.run.path.mkdir()
        triggers.create_trigger_folder(self.run)
        self.plan.write(self.run.plan)
        with (
            mock.patch.object(job_script, "_launcher_text", LAUNCHER_TEXT),
            self.clock.installed(self.commands.run, self._start_program),
            mock.patch.object(failure_reason, "stderr_file", return_value=None),
            mock.patch.object(quota, "measure_quotas"),  # how full this machine's disks are is no part of a history
        ):
            try:
                self._write_scripts()
                self._began = self.clock.now
                self.clock.start("submit", self._submit)
                self.clock.run(self.clock.now + 10.0)
                self._surroundings()
                self.clock.run(self._began + HORIZON)
                self._peace()
                self.clock.run(self.clock.now + PEACE)
                self.laws.quiet(calm=not self.events, work=self.work)
            finally:
                self.clock.end()
        stop = self.run.stop.read_text().splitlines()[:2] if self.run.stop.exists() else ["-"]
        return Outcome(
            seed=self.seed,
            broken=self.laws.broken,
            lines=self.lines,
            jobs=self.laws.jobs,
            ended=" ".join(stop),
            durable=self.laws.durable,
            events=self.events,
        )

    @property
    def work(self) -> float:
        """Seconds of all iterations."""
        return (self.plan.total_steps or 0) * BEAT_SECONDS / STEPS_PER_BEAT

    def _write_scripts(self) -> None:
        self.run.job_script.write_text(job_script.job_script(self.plan, self.run))
        self.run.fallback_script.write_text(job_script.fallback_script(self.plan, self.run))

    def _submit(self) -> int:
        scheduler = scheduler_for_plan(self.plan, self.run)
        jobs.queue_first_job(self.run, self.plan, scheduler)
        return 0

    def _start_program(self, command: list[str], **_more: Any) -> None:
        running = self.clock.running
        assert running is not None
        work = self.works[int(running.environment["SLURM_JOB_ID"])]
        assert isinstance(work, ChainWork)
        work.start_step(command)

    def _surroundings(self) -> None:
        dice = self.dice
        self.slurm.chance = dice.random
        if dice.random() < 0.3:
            self.slurm.latency = lambda: dice.choice([0.01, 0.1, 3.0])
        if dice.random() < 0.4:
            self.slurm.queue_wait = lambda: dice.choice([0.0, 60.0, HOUR])
        if dice.random() < 0.2:
            self.slurm.accounting = False
        acts = [
            self.controller_away,
            self.controller_away,
            self.answers_lost,
            self.disk_is_full,
            self.disk_is_full,
            self.file_system_fails,
            self.clock_skewed,
            self.maintenance,
            self.plugin_rewrites,
            self.node_lost,
            self.node_lost,
            self.preempted,
            self.preempted,
            self.requeued_by_operator,
            self.job_limit,
            self.bad_node,
            self.held_and_released,
            self.limit_extended,
            self.waiting_job_changed,
            self.waiting_job_changed,
            self.site_forbids_changes,
            self.exit_trigger,
            self.cancel_command,
            self.running_job_cancelled,
            self.successor_cancelled,
            self.stop_by_hand,
        ]
        if "reservation" in self.plan.sbatch_options:
            acts += 3 * [self.reservation_ends, self.reservation_vanishes]
        expected = 1.2 * self.work
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            act = dice.choice(acts)
            self.clock.after(dice.uniform(0, expected), lambda act=act: self._act(act))  # type: ignore[misc]

    def _act(self, act: Callable[[], None]) -> None:
        self.clock.note(act.__name__, who="STORY")
        self.events.append(act.__name__)
        if self.clock.now < self.slurm.away_until and act not in (
            self.disk_is_full,
            self.file_system_fails,
            self.clock_skewed,
            self.exit_trigger,
            self.stop_by_hand,
        ):
            self.clock.note("nothing: the controller is away", who="STORY")
            return
        act()

    def _peace(self) -> None:
        """Everything works again."""
        self.slurm.away_until = self.full_until = self.unread_until = 0.0
        self.slurm.lost_answers, self.slurm.submit_limit, self.slurm.closed = 0.0, FREE_LIMIT, False
        self.laws.works_since = self.clock.now
        self.slurm.queue_wait = self.slurm.latency = lambda: 0.0
        self.bad_nodes.clear()
        self.clock.note("from here on everything works", who="STORY")

    def _chain(self, *, running: bool) -> MemoryJob | None:
        found = [job for job in self.slurm.jobs.values() if job.name == self.plan.job_name and job.live]
        wanted = [job for job in found if (job.state == "RUNNING" if running else job.state == "PENDING")]
        return self.dice.choice(wanted) if wanted else None

    def controller_away(self) -> None:
        self.slurm.away_until = self.clock.now + self.dice.choice([60.0, 300.0, 900.0, 2 * HOUR])
        self.laws.works_since = max(self.laws.works_since, self.slurm.away_until)
        self.laws.clean = False

    def answers_lost(self) -> None:
        self.slurm.lost_answers = self.dice.choice([0.1, 0.4])
        self.laws.clean = False

        def answers() -> None:
            self.slurm.lost_answers, self.laws.works_since = 0.0, max(self.laws.works_since, self.clock.now)

        self.clock.after(self.dice.uniform(60.0, 5 * HOUR), answers)

    def disk_is_full(self) -> None:
        self.fault = errno.ENOSPC
        self.full_until = self.clock.now + self.dice.choice([60.0, HOUR, 5 * HOUR])
        self.laws.clean = False

    def file_system_fails(self) -> None:
        """It takes no changes, and perhaps gives nothing to read."""
        self.fault = self.dice.choice([errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE])
        self.full_until = self.clock.now + self.dice.choice([60.0, HOUR, 5 * HOUR])
        if self.dice.random() < 0.5:
            self.unread_until = self.full_until
        self.laws.clean = False

    def clock_skewed(self) -> None:
        """The clock of a node is wrong, and right again at the next start of a job there, or later."""
        node, ahead = self.dice.choice(list(self.slurm.nodes)), self.dice.choice([-HOUR, -250.0, -4.0, 50.0, HOUR])
        if self.slurm.nodes[node] != "idle":  # a step of the clock under a program is another story
            node = next((name for name, state in self.slurm.nodes.items() if state == "idle"), "")
        if node:
            self.clock.skews[node] = ahead

    def maintenance(self) -> None:
        seconds = self.dice.choice([60.0, HOUR, 10 * HOUR])
        begin = self.clock.now + seconds
        self.clock.after(seconds, lambda: self.laws.announced_end("a maintenance begins", seconds))
        self.laws.excuses += len(self.slurm.nodes)
        self.slurm.maintain(f"maintenance-{begin:.0f}", begin, begin + 4 * HOUR)

    def plugin_rewrites(self) -> None:
        name, value = self.dice.choice(
            [("partition", "site"), ("qos", "site"), ("account", "site"), ("time", "00:55:00")]
        )
        self.slurm.plugin = lambda options: options.update({name: value})

    def reservation_ends(self) -> None:
        if RESERVATION in self.slurm.reservations:
            seconds = self.dice.choice([60.0, HOUR, 5 * HOUR])
            self.slurm.reservations[RESERVATION] = end = self.clock.now + seconds
            self.clock.after(seconds, partial(self._reservation_over, end, seconds))

    def _reservation_over(self, end: float, seconds: float) -> None:
        if self.slurm.reservations.get(RESERVATION) == end:  # nobody has changed it since
            self.laws.announced_end("its reservation ends", seconds)
            self.slurm.end_reservation(RESERVATION)

    def reservation_vanishes(self) -> None:
        """An operator deletes it as soon as no job runs in it: before, Slurm refuses that."""
        if any(job.state in ("RUNNING", "COMPLETING") for job in self.slurm.jobs.values()):
            self.clock.after(0.9, self.reservation_vanishes)
        else:
            self.slurm.delete_reservation(RESERVATION)

    def node_lost(self) -> None:
        job = self._chain(running=True)
        name = self.dice.choice(job.nodes if job is not None else list(self.slurm.nodes))
        self.laws.excuses += 1
        self.slurm.lose_node(name, self.dice.choice([600.0, 10 * HOUR]))

    def preempted(self) -> None:
        if job := self._chain(running=True):
            self.laws.excuses += 1
            self.slurm.preempt(job)

    def requeued_by_operator(self) -> None:
        if job := self._chain(running=True):
            self.laws.excuses += 1
            self.operator.run(["scontrol", "requeue", str(job.id)])

    def job_limit(self) -> None:
        self.slurm.submit_limit = self.dice.choice([1, 2])

    def bad_node(self) -> None:
        self.bad_nodes.add(self.dice.choice(list(self.slurm.nodes)))

    def held_and_released(self) -> None:
        if job := self._chain(running=False):
            job.held = "JobHeldUser"
            self.clock.after(self.dice.uniform(60, 9 * HOUR), lambda: self._release(job))

    def _release(self, job: MemoryJob) -> None:
        job.held = ""
        self.slurm.kick()

    def limit_extended(self) -> None:
        if job := self._chain(running=True):
            longer = format_time(int(job.limit + HOUR))
            self.operator.run(["scontrol", "update", f"JobId={job.id}", f"TimeLimit={longer}"])

    def waiting_job_changed(self) -> None:
        job = self._chain(running=False)
        if job is None:
            return
        field, option, value = self.dice.choice(
            [("Partition", "partition", "big"), ("QOS", "qos", "high"), ("TimeLimit", "time", "00:50:00")]
        )
        self.commands.run(["scontrol", "update", f"JobId={job.id}", f"{field}={value}"])
        if job.options.get(option) == value:  # the answer may be lost
            self.laws.changed[option] = value

    def site_forbids_changes(self) -> None:
        self.slurm.closed = True
        self.laws.clean = False

    def _ended_by_person(self) -> None:
        self.laws.person_stopped = True

    def exit_trigger(self) -> None:
        self._ended_by_person()
        triggers.touch_trigger(self.run, "exit")

    def cancel_command(self) -> None:
        self._ended_by_person()

        def cancel() -> int:
            try:
                jobs.cancel_chain(self.run, scheduler_for_plan(self.plan, self.run, ordered=False), user="ann")
            except RelayrunError as error:
                self.clock.note(f"cancel: {error.message}")
                return 1
            self.laws.person_ended = 0
            return 0

        self.clock.start("relayrun cancel", cancel)

    def running_job_cancelled(self) -> None:
        if job := self._chain(running=True):
            self._ended_by_person()
            self.laws.person_ended = job.id
            self.slurm.cancel(job, 1000)

    def successor_cancelled(self) -> None:
        if job := self._chain(running=False):
            self._ended_by_person()
            self.laws.person_ended = job.id
            self.slurm.cancel(job, 1000)
            runs = any(each.live and not each.waits for each in self.slurm.jobs.values())
            if not self.slurm.accounting and not runs:
                self.clock.after(REMEMBERED, partial(self._forgotten, len(self.works)))

    def _forgotten(self, started: int) -> None:
        """Without accounting a fallback job cannot know of a cancelled job if none has started while Slurm did."""
        if len(self.works) == started and any(each.live for each in self.slurm.jobs.values()):
            self.laws.person_ended = None

    def stop_by_hand(self) -> None:
        self._ended_by_person()
        self.run.stop.write_text("by hand\n")


def _without_names(line: str, folder: Path) -> str:
    """A line without what differs between two plays: the folder and the process in names of files."""
    return re.sub(r"\.tmp-[\w-]+", ".tmp", line.replace(str(folder), ""))


def history_with(*stories: str) -> type[History]:
    """Histories in which these stories happen one after the other, at a time of the seed's."""

    class Told(History):
        def _plan(self) -> Plan:
            plan = super()._plan()
            reserved = any(name.startswith("reservation") for name in stories)
            options = plan.sbatch_options | ({"reservation": RESERVATION} if reserved else {})
            return plan_with(plan, sbatch_options=options, total_steps=500)

        def _surroundings(self) -> None:
            super()._surroundings()
            moment = self.dice.uniform(0.0, self.work)
            for number, name in enumerate(stories):
                self.clock.after(moment + 2.0 * number, lambda name=name: self._act(getattr(self, name)))  # type: ignore[misc]

    return Told


class KilledScript(History):
    """A job that queues itself, without a fallback job; the batch script of its first start is killed."""

    def _plan(self) -> Plan:
        return plan_with(super()._plan(), mode="requeue", fallback_job=False, time_limit=2 * 3600)

    def _fate(self, job: MemoryJob) -> Fate:
        return Fate(script_killed_after=1000.0 if job.restarts == 0 else -1.0)


class PassingLimit(History):
    """No second job may be queued in the first half hour of the first job."""

    def _plan(self) -> Plan:
        return plan_with(super()._plan(), mode="singleton", fallback_job=False, time_limit=3 * 3600)

    def _begin_work(self, job: MemoryJob) -> Work:
        if job.id == 1 and job.restarts == 0:
            self.slurm.submit_limit = 1
            self.clock.after(HOUR / 2, self._limit_ends)
        return super()._begin_work(job)

    def _limit_ends(self) -> None:
        self.slurm.submit_limit, self.laws.works_since = FREE_LIMIT, self.clock.now


def play(seed: int, kind: type[History] = History) -> Outcome:
    """Play the history of a seed."""
    folder = Path(tempfile.mkdtemp(prefix="history-", dir=FOLDER))
    try:
        return kind(seed, folder).play()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
