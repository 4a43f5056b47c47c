"""How an agent learns how its own node is, without waiting: before the first ranks, and behind those of a round."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from relayrun.control.agent import node_facts
from relayrun.control.agent.background_work import BackgroundWork
from relayrun.control.agent.node_facts import NodeFacts, TimedProgram
from relayrun.control.agent.node_findings import MEMORY_OF_RANKS
from relayrun.control.rundir.node_health import HealthPlan

FACTS_SECONDS = 10.0
"""How much longer than the site's own check the whole look may take: a disk may hang."""
BETWEEN_SECONDS = 5.0
"""How long GPUs may take to answer between two rounds."""
FOLDERS_SECONDS = 10.0
"""How long the file systems may take to answer between two rounds."""
MARGIN_SECONDS = 2.0
"""How much longer a program is waited for than it has itself."""


class LocalNodeHealth:
    """The health of this node.

    Args:
        arguments: of a program of this run and attempt.
        attempt: the folder of the attempt.
        aside: where programs and file systems are waited for.
    """

    def __init__(self, plan: HealthPlan, arguments: list[str], attempt: Path, *, aside: BackgroundWork) -> None:
        self._plan, self._arguments, self._attempt, self._aside = plan, arguments, attempt, aside
        self._running = False
        """Whether a program is waited for; and which it is, when it has been started."""
        self._program: TimedProgram | None = None
        self._then: Callable[[NodeFacts], None] | None = None
        """What is told what is found, once the program has answered."""
        self._found: Callable[[int | None, str], NodeFacts] = _facts_of_answer
        self._early: NodeFacts = {}
        """What was found before anybody was to be told."""
        self._unknown = False
        """Whether nothing is known of GPUs here; it has been said once."""
        self._most = self._least = 0
        """Free memory when ranks were started, and the least since then."""

    def look(self, then: Callable[[NodeFacts], None]) -> None:
        """Look at all, and call `then` with it."""
        command = [sys.executable, "-P", "-m", "relayrun.control.agent.node_facts", *self._arguments]
        self._found, self._then = _facts_of_answer, then
        self._begin(command, FACTS_SECONDS + self._plan.command_seconds * bool(self._plan.command))

    def ranks_start(self) -> None:
        """Ranks are about to take memory."""
        self._most = self._least = node_facts.available_memory() or 0

    def ranks_run(self) -> None:
        """Now and then: see how much they have taken."""
        if self._most:
            self._least = min(self._least, node_facts.available_memory() or self._least)

    def ranks_end(self) -> None:
        """Ranks are being ended: GPUs can be asked meanwhile."""
        if self._plan.gpus and self._plan.gpu_program and not self._running and not self._unknown:
            self._found, self._early = node_facts.gpu_facts, {}
            self._begin(self._plan.gpu_program, BETWEEN_SECONDS)

    def look_between(self, then: Callable[[NodeFacts], None], *, copies: Path | None) -> None:
        """No rank is left: look at what takes milliseconds, and call `then` with it when GPUs have answered, too.

        `copies`: the folder of ranks' copies in memory, which the next ranks take over.
        """
        taken, self._most, self._least = self._most - self._least, 0, 0

        def look(found: NodeFacts) -> None:
            if found["memory"] is not None and copies is not None:
                with contextlib.suppress(OSError):
                    found["memory"] += sum(path.stat().st_size for path in copies.glob("*"))
            if taken > 0:
                found[MEMORY_OF_RANKS] = taken
            if self._running:
                self._then = lambda of_gpus: then(found | of_gpus)
            else:
                early, self._early = self._early, {}
                then(found | early)

        self._aside.start(
            lambda: node_facts.quick_facts(self._attempt),
            look,
            seconds=FOLDERS_SECONDS,
            otherwise=lambda words: {
                "memory": node_facts.available_memory(),
                "answer": f"its folders cannot be looked at: {words}",
            },
        )

    def end(self) -> None:
        """Wait for nothing any more."""
        if self._program is not None:
            self._program.end()

    def _begin(self, command: Sequence[str], seconds: float) -> None:
        """Start a program, aside: what it is loaded from may hang, too."""
        self._running = True

        def run() -> tuple[int | None, str]:
            self._program = TimedProgram(command, seconds)
            return self._program.wait()

        self._aside.start(run, self._ended, seconds=seconds + MARGIN_SECONDS, otherwise=lambda words: (None, words))

    def _ended(self, answer: tuple[int | None, str]) -> None:
        """It has said something, or its time is over."""
        self._running, self._program = False, None
        found, then, self._then = self._found(*answer), self._then, None
        self._unknown = self._unknown or "gpu_error" in found
        if then is None:
            self._early = found
        else:
            then(found)


def _facts_of_answer(code: int | None, output: str) -> NodeFacts:
    """What `agent.node_facts` printed; `answer` in words where it did not."""
    try:
        found = json.loads(output.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        found = None
    if isinstance(found, dict):
        return found
    words = " ".join(output.split())[-node_facts.OUTPUT_CHARACTERS :]
    return {"answer": f"its own look did not end well: {words or f'exit code {code}'}"}
