"""How much of a run's time brought new steps, from the metrics of its attempts.

An iteration that was done more than once counts once, at its last time: what went before it was lost. Between two steps
of one round everything counts as training that an undisturbed run does there, too: saves, copies, evaluations.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from relayrun.control.rundir import rounds
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.ways_back import resets_iteration
from relayrun.files import read_lines


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What the time of a run went to. Times are seconds."""

    began: float
    """Begin of the first step, since 1970."""
    ended: float
    """End of the last step, since 1970."""
    effective: float
    """In which steps were done that count."""
    steps: int
    """That count."""
    steps_lost: int
    """That were done again, as far as they were on record."""
    step: float
    """Median of a step that counts, with all that stands between it and the one before."""

    @property
    def seconds(self) -> float:
        """From the begin of the first step to the end of the last one."""
        return self.ended - self.began

    @property
    def share(self) -> float:
        """The effective part of this time."""
        return self.effective / self.seconds


@dataclass(frozen=True)
class _FinishedSteps:
    iteration: int
    seconds: float
    """Since the step before it, where no start of the ranks lies between; else the step alone."""


def measure_timeline(run: Run) -> Timeline:
    """The timeline of a run that has done a step. Raises ValueError where it has done none."""
    done: list[_FinishedSteps] = []
    lost = 0
    began: float | None = None
    before = ended = 0.0
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        if (begin := attempt.read_begin()) is None:
            continue
        lost += _drop_steps_after(done, begin.base_iteration)
        failed = [(one.time, one.time + one.seconds.get("end", 0.0)) for one in rounds.read_failed_restarts(attempt)]
        first = True
        for line in read_lines(attempt.metrics):
            if resets_iteration(line):
                lost += _drop_steps_after(done, int(line["iteration"]))
            elif "loss" in line:
                now, own = float(line["time"]), float(line["step_seconds"]) + float(line.get("hooks_seconds") or 0.0)
                began = now - own if began is None else began
                # a round may begin behind the newest iteration, and then no line of the metrics says so
                alone = first or any(before < over and now > noticed for noticed, over in failed)
                done.append(_FinishedSteps(int(line["iteration"]), own if alone else now - before))
                before = ended = now
                first = False
    if began is None:
        raise ValueError(f"{run.path} has done no step")
    seconds = [step.seconds for step in done]
    return Timeline(
        began=began,
        ended=ended,
        effective=sum(seconds),
        steps=len(done),
        steps_lost=lost,
        step=statistics.median(seconds),
    )


def _drop_steps_after(done: list[_FinishedSteps], iteration: int) -> int:
    """Take away what lies beyond this iteration; return how many steps that were."""
    many = sum(step.iteration > iteration for step in done)
    if many:
        del done[-many:]
    return many
