"""A take-over against a job of the former owner that begins at the same time, in every order of their calls.

One of both wins, and the other says why. Each stands still before one of its calls while the other one runs; near the
writes that decide, both do, in every pair of places and in both orders.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from relayrun.control import chain_state
from relayrun.control.chain import supervisor
from relayrun.control.rundir.plan import Plan
from relayrun.submit import submission
from relayrun.submit.check import existing_run
from tests.waiting import wait_for

from .exhaustion import PAUSE, Child, start_child
from .test_exhaustion import EVERYTHING, Stage, stage, todays  # noqa: F401 - a fixture

OTHER = 4242
"""The number of a user that nobody has."""

Places = tuple[tuple[int, ...], tuple[int, ...], str]
"""Where the submit stands still, once or twice; where `begin` does; and who runs in turn, till it stands still."""


class Meeting:
    """One take-over and one begin, on a stage that is put back first."""

    def __init__(self, stage: Stage) -> None:  # noqa: F811
        self.stage = stage
        scratch = stage.slurm.file.parent
        self.waits, self.submitted = scratch / "waits", scratch / "submitted"

    def submit(self, at: tuple[int, ...]) -> Child:
        run = self.stage.run

        def program() -> int:
            os.geteuid = lambda: OTHER
            plan = replace(Plan.load(run), owner=OTHER)
            with submission._undone_on_error(run, []):
                existing_run.claim_run(run, plan, take_over=True, now=time.time())
            return 0

        return self._start(program, at, "submit")

    def begin(self, at: tuple[int, ...]) -> Child:
        now = [0.0]

        def wait(_seconds: float) -> None:
            self.waits.touch()
            wait_for(self.submitted.exists, 600, step=0.002)
            now[0] = 1e9

        def program() -> int:
            clock = SimpleNamespace(sleep=wait, monotonic=lambda: now[0])
            vars(chain_state)["time"] = clock
            return supervisor.begin_attempt(self.stage.run)

        return self._start(program, at, "begin")

    def _start(self, program: object, at: tuple[int, ...], name: str) -> Child:
        first, second = (*at, -1, -1)[:2]
        fault = PAUSE if at else None
        folder, slurm = self.stage.run_path, self.stage.slurm
        return start_child(program, folder, slurm, at=first, also=second, fault=fault, name=name)  # type: ignore[arg-type]

    def until(self, child: Child, *, waits: bool = False) -> None:
        """Until it stands still or has ended, or, for `begin`, waits for the submit."""
        wait_for(lambda: child.paused or child.ended or (waits and self.waits.exists()), step=0.002)

    def complaint(self, places: Places) -> str:
        """What is wrong with this order; empty where nothing is."""
        self.stage.reset()
        for path in (self.waits, self.submitted):
            path.unlink(missing_ok=True)
        before = self.stage.run.plan.read_bytes()
        at_submit, at_begin, order = places
        started: dict[str, Child] = {}
        for name in order.split():
            if name in started:
                started[name].go_on()
            else:
                started[name] = self.submit(at_submit) if name == "submit" else self.begin(at_begin)
            self.until(started[name], waits=name == "begin")
        submitted = started["submit"].wait()
        self.submitted.touch()
        begun = started["begin"].wait()
        run = self.stage.run
        if submitted.code == 0:
            if begun.code != supervisor.EXIT_CHAIN_ENDS or f"taken over by {OTHER}" not in begun.output:
                return f"both win: {begun.output[-300:]}"
            newest = run.newest_begun()
            if newest is None or newest.number != 3 or Plan.load(run).owner != OTHER or self.stage.slurm.pending():
                return "the job that gave way left something"
            return ""
        if begun.code != 0:
            return f"both lose: {submitted.output[-300:]} {begun.output[-300:]}"
        if "gave a sign of life" not in submitted.output:
            return f"no reason: {submitted.output[-300:]}"
        return "" if run.plan.read_bytes() == before and len(self.stage.slurm.pending()) == 1 else "not put back"


def orders(submits: list[str], begins: list[str]) -> tuple[list[Places], list[Places]]:
    """The orders: those near the one that decides, and all others.

    Every place of one of both; and pairs of places around the writes and looks that decide.
    """
    written = next(number for number, call in enumerate(submits) if call.startswith("replace "))
    begun = next(number for number, call in enumerate(begins) if call.startswith("replace attempts/0004/"))
    last = len(submits) + 12  # who is refused undoes it with further calls
    near: list[Places] = [((at,), (), "submit begin") for at in range(written - 6, len(submits))]
    # it looks and sees nobody; the attempt begins; it sees that, and is slow to put the plan back
    slow = [(written - 1, at) for at in range(len(submits), last)]
    near += [(at, (begun + 4,), "submit begin submit begin") for at in slow[::3]]
    others: list[Places] = [((at,), (), "submit begin") for at in range(written - 6)]
    others += [((), (at,), "begin submit") for at in range(len(begins))]
    for at_begin in range(begun - 2, begun + 22, 2):
        others += [(at, (at_begin,), "submit begin submit begin") for at in slow]
        for at_submit in range(written - 3, last):
            for order in ("submit begin", "submit begin begin", "begin submit begin"):
                others.append(((at_submit,), (at_begin,), order))
    return near, others


@pytest.mark.slow
@EVERYTHING
def test_of_a_take_over_and_a_begin_one_wins_and_the_other_says_why(stage: Stage, everything: bool) -> None:  # noqa: F811
    plan = replace(Plan.load(stage.run), owner=os.geteuid())
    plan.write(stage.run.plan)
    stage.keep()
    meeting = Meeting(stage)
    submits = meeting.submit(()).wait()
    assert submits.code == 0, submits.output
    stage.reset()
    begins = meeting.begin(()).wait()
    assert begins.code == 0, begins.output
    print(len(submits.calls), "and", len(begins.calls), "calls")
    near, others = orders(submits.calls, begins.calls)
    chosen = near + (others if everything else others[todays(100) :: 100])
    wrong = [f"{places}: {complaint}" for places in chosen if (complaint := meeting.complaint(places))]
    print(f"{len(chosen)} cases")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(chosen)}", *wrong[:20]])
