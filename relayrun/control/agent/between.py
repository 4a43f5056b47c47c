"""What the coordinator does between two rounds of a foreign program, which writes no records itself.

The watch writes them (`trainers.by_rounds`), from the program's log and files. So before anybody judges:

1. The log is whole: each agent has said in it, behind all that its ranks said, that none of them is left. It is the
   task starter that carries those words, and it may take its time.
2. The watch has recorded what there is (`rundir.hand_over`). It touches nothing until it is told to go on.

Then what lies beyond the next round's start is moved, as before an attempt, and the watch goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from relayrun.control.logs import file_size, job_logs
from relayrun.control.new_lines import LogFollower
from relayrun.control.rundir import hand_over
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.hand_over import RestartBase, RestartHandOver
from relayrun.control.rundir.lineage import ResumePoint
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import Trainer
from relayrun.control.trainers.choose import trainer_of
from relayrun.errors import RunDirError
from relayrun.files import read_lines

RECORD_PAUSE = 0.1
"""Seconds between two looks while the watch is waited for."""
LOG_COMPLETE_SECONDS = 10.0
"""How long the words of the agents may take into the log; a lost node's never come."""
WATCH_RECORD_SECONDS = 60.0
"""How long the watch may take to record what a round left; it is started again where it is killed."""


def ranks_gone_line(number: int) -> str:
    """What an agent says when no rank of round `number` is left on its node."""
    return f"round {number}: no rank is left here"


def foreign_restart_of(
    run: Run, plan: Plan, attempt: Attempt, begin: AttemptStart, *, say: Callable[[str], None]
) -> ForeignRestart | None:
    """Return what is to be done between the rounds of this run; None where its ranks write their records themselves."""
    if plan.trainer == "native":
        return None
    last = min((step for step in (plan.total_steps, plan.stop_after) if step is not None), default=None)
    return ForeignRestart(attempt, begin, trainer_of(plan, run), last=last, say=say)


class ForeignRestart:
    """The records and files of a foreign program, between its rounds.

    Args:
        trainer: makes the program start from the next round's base.
        last: the last iteration of the run; None: the program knows itself.
        say: writes a line into the job's log.
    """

    def __init__(
        self, attempt: Attempt, begin: AttemptStart, trainer: Trainer, *, last: int | None, say: Callable[[str], None]
    ) -> None:
        self._attempt, self._begin, self._trainer, self._say = attempt, begin, trainer, say
        self._last = last
        self._logs: list[tuple[LogFollower, set[str]]] = []
        """What has been written since the round was ended, and whose last words were found in it."""
        self._since = 0.0
        self._asked: RestartHandOver | None = None

    def ended(self) -> None:
        """The agents are told to end a round: from here on their words are looked for."""
        self._logs = [(LogFollower(path, offset=file_size(path)), set()) for path, _ in job_logs(self._begin)]
        self._asked, self._since = None, time.monotonic()

    def recorded(self, number: int, *, exit_code: int, nodes: Collection[str]) -> bool:
        """Return whether all that round `number` left is on record; ask again soon where not.

        No rank lives. `nodes`: those whose agents have said so. Raises OSError, and RunDirError where nobody records.
        """
        if self._asked is None:
            if not self._log_is_whole(number, nodes):
                return False
            self._asked = RestartHandOver(round=number, exit_code=exit_code)
            self._asked.write(self._attempt.hand_over)
            self._since = time.monotonic()
        found = hand_over.pending_hand_over(self._attempt)
        if found is not None and found.round == number and found.recorded:
            self._asked = found
            return True
        if time.monotonic() - self._since > WATCH_RECORD_SECONDS:
            raise RunDirError(
                f"the watch has not recorded for {WATCH_RECORD_SECONDS:.0f} s what round {number} left",
                where=self._attempt.hand_over,
            )
        return False

    def _log_is_whole(self, number: int, nodes: Collection[str]) -> bool:
        wanted = {node: f" {node}] {ranks_gone_line(number)}" for node in nodes}
        for lines, found in self._logs:
            for line in lines.read():
                found |= {node for node, words in wanted.items() if words in line}
        missing = sorted({node for _, found in self._logs for node in wanted.keys() - found})
        if missing and time.monotonic() - self._since > LOG_COMPLETE_SECONDS:
            self._say(
                f"the last words of {', '.join(missing)} are not in the log; what else its ranks said may be lost"
            )
            return True
        return not missing

    def complete(self, base: ResumePoint) -> bool:
        """Whether nothing is left to train behind this checkpoint."""
        return self._last is not None and base.iteration >= self._last

    def prepare(self, base: ResumePoint, *, number: int) -> list[str]:
        """Make the program start from `base` in round `number`, and from nothing else; return what was done, in words.

        The round's start goes on record first: whoever concludes the attempt from here on must not take words of the
        round before for its own.
        """
        assert self._asked is not None
        RestartBase(
            round=number,
            base_iteration=base.iteration,
            base_path=base.path,
            log_offset=self._asked.log_offset,
            output_offset=self._asked.output_offset,
            commits=sum(1 for _ in read_lines(self._attempt.commits)),
        ).write(self._attempt.round)
        return self._trainer.prepare(base, attempt=self._attempt.number)

    def go_on(self) -> None:
        """Let the watch follow the next round."""
        self._attempt.hand_over.unlink(missing_ok=True)

    def first_step(self, *, after: int) -> float | None:
        """When the program was seen to have done an iteration behind `after`, in seconds since 1970; None: not yet."""
        for line in self._attempt.metrics_backwards():
            if "round" not in line and int(line.get("iteration", 0)) > after:
                return float(line["time"])
            break
        return None
