"""Writes the records of an attempt for a foreign program, from its log and its files.

The native trainer's rank 0 leaves `metrics.jsonl`, heartbeats, `commits.jsonl` and `outcome.json`. For a foreign
program the observer writes them, so hang detection, the grace period, status and the chain's decisions work as for
the native one. The watch calls `look` once a second. If the ranks are restarted inside the job each restart has an
observer of its own; each record has one writer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from relayrun.control.job_log import job_output_files, log_line
from relayrun.control.rundir import restarts, triggers
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import (
    AttemptOutcome,
    AttemptOutcomeName,
    AttemptStart,
    CheckpointCommit,
    Heartbeat,
    StartTimes,
)
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.time_limit import GRACE_SAVES, GRACE_STEPS, current_grace_period, percentile
from relayrun.control.trainers.base import AttemptObserver, FoundCheckpoint, ObservedStep, TrainerProgram
from relayrun.control.trainers.checkpoint_cleanup import CheckpointRetention, ResumeGuard
from relayrun.control.trainers.checkpoint_hashes import useless_saves
from relayrun.files import append_line, file_size, file_sizes, write_atomic, write_json


class CurrentRestartObserver:
    """The observer of the newest restart.

    Args:
        begin: of the attempt.
        follow: makes the observer of a restart from the begin that holds for it.
    """

    def __init__(
        self, attempt: Attempt, begin: AttemptStart, *, follow: Callable[[AttemptStart], AttemptObserver | None]
    ) -> None:
        self._attempt, self._begin, self._follow = attempt, begin, follow
        self._observer: AttemptObserver | None = None
        """None before the first look since the restart or this process began."""

    def look(self) -> None:
        """Record new facts of the running restart, or, once, the remaining facts of a restart that is over."""
        over = restarts.RestartHandOver.read(self._attempt.hand_over)
        if over is None:
            if (observer := self._of_restart()) is not None:
                observer.look()
        elif not over.recorded:
            self.conclude(over.exit_code)
            output, log = [file_size(path) for path, _ in job_output_files(self._begin)] or (0, 0)
            replace(over, recorded=True, log_offset=log, output_offset=output).write(self._attempt.hand_over)
            self._observer = None  # the next restart has another base and another log

    def conclude(self, exit_code: int | None) -> None:
        if (observer := self._of_restart()) is not None:
            observer.conclude(exit_code)

    def _of_restart(self) -> AttemptObserver | None:
        if self._observer is None:
            self._observer = self._follow(restarts.attempt_start_of_restart(self._attempt, self._begin))
        return self._observer


LOOK_SECONDS = 1.0
"""Interval of looks; a save that begins and ends between two of them takes less."""

SAVE_STEPS = 2
"""A program that makes this many steps after a request to leave has not received it."""


@dataclass(eq=False)
class ProgramObserver:
    """Observes one attempt."""

    run: Run
    attempt: Attempt
    begin: AttemptStart
    program: TrainerProgram
    leave: Callable[[], None]
    """Asks the program to save and leave. `attempts/N/stop` is written after it, so that a kill in between asks again.
    """
    retention: CheckpointRetention | None = None
    """Removes old checkpoints; None: they all stay, or the program removes them itself."""
    guard: ResumeGuard | None = None
    """Keeps the checkpoints until the program is known to have resumed; None: nothing does."""
    end: Callable[[], None] | None = None
    """Kills the ranks; None: nothing does."""
    ask_again: bool = False
    """Repeat a request while the program trains on: a signal is lost before the program has a handler, or while Slurm's
    controller is away. For programs that bear a second signal."""

    def __post_init__(self) -> None:
        self._asked_at: int | None = None
        """Iteration at which the request to leave was first seen."""
        self._files: dict[str, dict[str, int]] = {}
        """Files of a checkpoint at the look before, as long as more may come."""
        self._iteration = self.begin.base_iteration
        self._said: tuple[int, float] | None = None
        """The last reported iteration, and the time at which it was seen (monotonic); None before the first."""
        self._heard: list[int] = []
        """The iterations reported in this attempt, until it is known whether the program resumed; 0 is none."""
        self._looks_with_steps = 0
        self._resumed: bool | None = None
        """Whether the program went on from its base, see `has_resumed`."""
        self._anew: list[str] = []
        """Checkpoints before the base that the program wrote again."""
        self._samples: dict[int, int] = {}
        """Samples consumed at iterations whose checkpoints may still come."""
        self._steps: deque[float] = deque(maxlen=GRACE_STEPS)
        self._saves: deque[float] = deque(maxlen=GRACE_SAVES)
        self._committed = self.begin.base_iteration
        self._save_begun: tuple[int, float] | None = None
        """Iteration of the current save, and the time at which it was first seen (monotonic)."""
        self._beat: Heartbeat | None = None
        self._save_asked: triggers.Trigger | None = None
        self._unmatched: Sequence[str] = []
        self._take_up()

    def look(self) -> None:
        try:
            self._record()
            if self._began_anew:
                self._refuse()
                return
            if (useless := useless_saves(self.attempt)) is not None:
                self._end_fatally(useless)
                return
            self._obey_save()
        finally:  # whatever of its files cannot be read
            if not self._began_anew:
                self._obey_leave()
        if self.retention is not None:  # last: what cannot be removed keeps nothing else from being done
            self.retention.look(self.program.checkpoints(), saving=self.program.saving() is not None)

    def conclude(self, exit_code: int | None) -> None:
        self._record(gone=True)
        if self.attempt.outcome.exists():
            return
        if self._began_anew:
            self._refuse(gone=True)
            return
        ending = self.program.ending(exit_code)
        if ending is None:
            return
        exit_trigger = triggers.read_trigger(self.run, "exit")
        outcome: AttemptOutcomeName
        if ending.outcome == "left":
            if self._committed < self._iteration:
                return  # it says that it saved, and what it saved is not whole: no outcome, the law judges
            outcome, words = ("saved", ending.words)
            if exit_trigger is not None:
                outcome, words = "exit", f"exit trigger by {exit_trigger.user}"
            elif self.attempt.stop.exists():
                words = self.attempt.stop.read_text(encoding="utf-8", errors="replace").strip() or words
        else:
            outcome, words = ending.outcome, ending.words
        now = time.time()
        AttemptOutcome(outcome=outcome, reason=words, iteration=self._committed, time=now).write(self.attempt.outcome)
        if exit_trigger is not None:  # after the outcome: an acknowledgement reports a fact
            result = f"{outcome}: {words}"
            triggers.acknowledge_trigger(self.run, exit_trigger, iteration=self._committed, result=result)
        if outcome == "done" and self.retention is not None:
            self.retention.finish(self.program.checkpoints())

    def _take_up(self) -> None:
        """Continue after an observer that was killed."""
        for line in self.attempt.metrics_backwards():
            self._iteration = max(self._iteration, int(line["iteration"]))
            break
        start = restarts.RestartBase.read(self.attempt.restart_base)
        for number, commit in enumerate(self.attempt.read_commits()):
            if start is None or number >= start.commits:  # those of earlier restarts that count are not behind the base
                self._committed = max(self._committed, commit.iteration)
            self._saves.append(commit.seconds)

    def _record(self, *, gone: bool = False) -> None:
        """Record new facts. `gone`: the ranks have gone, and nothing more can come."""
        steps = self.program.steps()
        self._hear(steps, gone=gone)
        if gone or self._resumed:
            self._release(resumed=bool(self._resumed))
        if self._began_anew:
            return
        moved = self._record_steps(steps)
        saving = self.program.saving()
        self._time_save(saving)
        for checkpoint in self.program.checkpoints():
            if checkpoint.iteration <= self._committed or (self._heard and self._resumed is None):
                continue
            if self.guard is not None and not self._heard:  # what it overwrote tells whether it resumed
                self._anew = self.guard.replaced()
                if self._anew:
                    self._resumed = False
                    return
                self._release(resumed=True)
            if gone or self._is_settled(checkpoint):
                self._commit(checkpoint)
            else:
                saving = checkpoint.iteration
                self._time_save(saving)
        if saving is None:
            self._save_begun = None
        moved = moved or self.program.is_printing()
        self._heartbeat("save" if saving is not None else "step" if self._said else "start", moved=moved)
        self._say_unmatched()

    def _say_unmatched(self) -> None:
        """Record settings that fit nothing, and say in the log which ones are new."""
        found = self.program.unmatched()
        if found != self._unmatched:
            write_atomic(self.attempt.unmatched, "".join(f"{words}\n" for words in found))
            for words in found:
                if words not in self._unmatched:
                    log_line(f"nothing fits so far: {words}")
            self._unmatched = found

    @property
    def _began_anew(self) -> bool:
        """The program did not resume from its base: it would overwrite its old files, and all would look well."""
        return self._resumed is False

    def _hear(self, steps: Sequence[ObservedStep], *, gone: bool) -> None:
        if self._resumed is not None:
            return
        before = len(self._heard)
        for step in steps:
            if step.iteration and step.iteration not in self._heard[-1:]:
                self._heard.append(step.iteration)
        self._looks_with_steps += len(self._heard) > before
        base = self.begin.base_iteration
        self._resumed = has_resumed(self._heard, base, looks=self._looks_with_steps)
        if gone and self._heard and self._resumed is None:
            self._resumed = max(self._heard) >= base

    def _release(self, *, resumed: bool) -> None:
        """Give checkpoints back; as they were, unless the program is known to have resumed."""
        if self.guard is not None:
            for line in self.guard.release(restore=not resumed, attempt=self.attempt.number):
                log_line(line)
        self.guard = None

    def _refuse(self, *, gone: bool = False) -> None:
        """End ranks that began anew, and the chain with them: the next attempt would do the same. Raises OSError."""
        base = self.begin.base_iteration
        did = f"says iteration {self._heard[0]} first" if self._heard else f"wrote {', '.join(self._anew)} anew"
        reason = (
            f"the program {did}, and was to go on from iteration {base} "
            f"({self.begin.base_path}): it has not loaded that checkpoint, or counts anew; let it load what it is "
            "given, and say iterations counted from the beginning of the run"
        )
        self._end_fatally(reason, gone=gone)

    def _end_fatally(self, reason: str, *, gone: bool = False) -> None:
        if self.attempt.outcome.exists():
            return
        if not gone and self.end is not None:
            self.end()
        fatal = AttemptOutcome(outcome="fatal", reason=reason, iteration=self._committed, time=time.time())
        fatal.write(self.attempt.outcome)

    def _record_steps(self, steps: Sequence[ObservedStep]) -> bool:
        """Return whether the program moved: whether it reported another iteration than before, even a lower one. A
        repeated iteration is no sign of life: a progress bar redraws itself without progress."""
        moved = False
        now = time.monotonic()
        rising = sum(step.iteration > self._iteration for step in steps)
        measured = None if self._said is None or not rising else (now - self._said[1]) / rising
        for step in steps:
            self._record_step(step, measured)
            if self._said is None or self._said[0] != step.iteration:
                moved, self._said = True, (step.iteration, now)
        if self._said is not None and not self.attempt.started.exists():
            begun = self.begin.start_time  # nothing is known of the start's parts
            over = StartTimes(process=begun, imported=begun, initialised=begun, loaded=time.time())
            over.write(self.attempt.started)
        return moved

    def _time_save(self, saving: int | None) -> None:
        if saving is not None and (self._save_begun is None or self._save_begun[0] != saving):
            self._save_begun = (saving, time.monotonic())

    def _is_settled(self, checkpoint: FoundCheckpoint) -> bool:
        """Return whether no file of a checkpoint has come or grown since the look before. Ranks write side by side: the
        last file of one rank need not be the last of all."""
        if not checkpoint.may_change:
            return True
        now = file_sizes(checkpoint.path)
        before, self._files[checkpoint.path] = self._files.get(checkpoint.path), now
        return before == now

    def _record_step(self, step: ObservedStep, measured: float | None) -> None:
        """`measured`: observed seconds between two steps, for a program that does not report them."""
        seconds = step.seconds if step.seconds is not None else measured
        if seconds is not None and (step.seconds is not None or step.iteration > self._iteration):
            self._steps.append(seconds)
        if step.consumed_samples is not None:
            self._samples[step.iteration] = step.consumed_samples
        if step.iteration <= self._iteration:  # recorded by the observer before
            return
        record = {"iteration": step.iteration, **step.metrics, "time": time.time()}
        if step.seconds is not None:
            record["step_seconds"] = step.seconds
        if step.consumed_samples is not None:
            record["consumed_samples"] = step.consumed_samples
        append_line(self.attempt.metrics, record, durable=False)
        self._iteration = step.iteration

    def _commit(self, checkpoint: FoundCheckpoint) -> None:
        begun = self._save_begun
        seen = begun is not None and begun[0] == checkpoint.iteration
        seconds = time.monotonic() - begun[1] if begun is not None and seen else LOOK_SECONDS
        commit = CheckpointCommit(
            iteration=checkpoint.iteration,
            path=checkpoint.path,
            consumed_samples=self._samples.get(checkpoint.iteration, -1),
            time=time.time(),
            seconds=seconds,
            files=file_sizes(checkpoint.path),
        )
        self.attempt.append_commit(commit)
        self._committed = checkpoint.iteration
        self._saves.append(seconds)
        self._samples = {n: samples for n, samples in self._samples.items() if n > checkpoint.iteration}
        self._files.pop(checkpoint.path, None)
        if self._save_asked is not None:
            result = f"saved iteration {checkpoint.iteration}"
            triggers.acknowledge_trigger(self.run, self._save_asked, iteration=checkpoint.iteration, result=result)
            self._save_asked = None

    def _heartbeat(self, phase: str, *, moved: bool) -> None:
        """Write a heartbeat if the program moved: a program that hangs must look as if it did."""
        beat = self._beat
        if beat is not None and not moved and (beat.iteration, beat.phase) == (self._iteration, phase):
            return
        self._beat = Heartbeat(
            node="program",
            iteration=self._iteration,
            phase=phase,
            time=time.time(),
            step_p95=percentile(self._steps, 0.95) if self._steps else None,
            save_p95=percentile(self._saves, 0.95) if self._saves else None,
        )
        self.attempt.heartbeats.mkdir(exist_ok=True)
        write_json(self.attempt.heartbeats / "program.json", asdict(self._beat), durable=False)

    def _obey_save(self) -> None:
        asked = triggers.read_trigger(self.run, "save")
        if asked is None or asked == self._save_asked:
            return
        why_not = self.program.ask_to_save()
        if why_not is None:
            self._save_asked = asked  # answered when a checkpoint has come
        else:
            triggers.acknowledge_trigger(self.run, asked, iteration=self._committed, result=f"refused: {why_not}")

    def _obey_leave(self) -> None:
        """Ask the program to leave if that is due; `attempts/N/stop` records the request."""
        if self.attempt.stop.exists():
            if self._asked_at is None:
                self._asked_at = self._iteration
            elif self.ask_again and self._iteration >= self._asked_at + SAVE_STEPS:
                self.leave()
                self._asked_at = self._iteration
            return
        exit_trigger = triggers.read_trigger(self.run, "exit")
        if exit_trigger is not None:
            why = f"exit trigger by {exit_trigger.user}"
        elif (end := self.attempt.job_end_time(self.begin)) is not None and time.time() >= end - self._grace_period():
            why = "time limit near"
        else:
            return
        self.leave()
        write_atomic(self.attempt.stop, f"{why}\n")

    def _grace_period(self) -> float:
        under_way = None if self._save_begun is None else time.monotonic() - self._save_begun[1]
        return current_grace_period(self.begin, self._steps, self._saves, under_way=under_way)


def has_resumed(heard: Sequence[int], base: int, *, looks: int) -> bool | None:
    """Return whether a program went on from its base, by the iterations it reported so far; None: not known yet.

    Some programs report only every tenth iteration, others count from 0: any first iteration from the base on is right.
    A log may name an older one first, the last evaluation or the history of the run, and jumps from there; a program
    that begins anew comes to its base, or past it, in steps of one size. `looks`: in which there was a new iteration.
    """
    if not heard or heard[0] >= base:
        return True if heard else None
    later = next((at for at, iteration in enumerate(heard) if iteration >= base), None)
    if later is None:
        return None if looks < 2 else False
    jump = heard[later] - heard[later - 1]
    around = [heard[later - 1] - heard[later - 2]] if later >= 2 else []
    around += [heard[later + 1] - heard[later]] if len(heard) > later + 1 else []
    return jump > max(around) if around else None
