"""The pure decisions, over all facts: they never run away and never forget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayrun.config.sections.chain import ChainSection
from relayrun.control.decisions import (
    Decision,
    EndFacts,
    StartFacts,
    decide_at_end,
    decide_at_start,
    default_signal_seconds,
)
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.time_limit import first_grace_period, measured_grace_period

ITERATIONS = st.integers(0, 50)

BEGIN = st.builds(
    StartFacts,
    stopped=st.none() | st.just(ChainEnd("done", "")),
    durable_iteration=ITERATIONS,
    total_steps=st.integers(1, 50),
    stop_after=st.none() | st.integers(1, 50),
    exit_trigger=st.none() | st.just("ann"),
    predecessor_cancelled=st.booleans(),
    failed_attempts=st.integers(0, 10),
    chain=st.builds(ChainSection, max_failed_attempts=st.integers(1, 5)),
    verdict=st.none() | st.just(ChainEnd("failed", "fatal: nan")),
)
END = st.builds(
    EndFacts,
    outcome=st.none() | st.sampled_from(["done", "saved", "exit", "fatal"]),
    outcome_reason=st.text(max_size=5),
    exit_code=st.integers(-1, 255),
    hang=st.none() | st.just("hang"),
    cancelled=st.booleans(),
    base_iteration=ITERATIONS,
    durable_iteration=ITERATIONS,
    total_steps=st.integers(1, 50),
    stop_after=st.none() | st.integers(1, 50),
    failed_attempts=st.integers(0, 10),
    chain=st.builds(ChainSection, max_failed_attempts=st.integers(1, 5), auto_requeue=st.booleans()),
)

NOTHING = StartFacts(
    stopped=None,
    durable_iteration=9,
    total_steps=10,
    exit_trigger=None,
    predecessor_cancelled=False,
    failed_attempts=2,
    chain=ChainSection(max_failed_attempts=3),
    verdict=None,
)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, None),
        ({"stopped": ChainEnd("failed", "as STOP says")}, "failed"),
        ({"durable_iteration": 10}, "done"),
        ({"durable_iteration": 11}, "done"),
        ({"stop_after": 10}, None),
        ({"stop_after": 9}, "done"),
        ({"exit_trigger": "ann"}, "stopped"),
        ({"predecessor_cancelled": True}, "stopped"),
        ({"verdict": ChainEnd("failed", "as the attempt before says")}, "failed"),
        ({"failed_attempts": 3}, "failed"),
    ],
)
def test_each_reason_alone_keeps_the_ranks_from_starting(changes: dict[str, Any], state: str | None) -> None:
    """The property below meets a reason alone by chance only."""
    decision = decide_at_start(replace(NOTHING, **changes))
    assert (decision.action, decision.chain_end) == ("run" if state is None else "stop", state)


@pytest.mark.slow
@given(BEGIN)
def test_begin_stops_for_every_reason(facts: StartFacts) -> None:
    decision = decide_at_start(facts)
    must_stop = (
        facts.stopped is not None
        or facts.durable_iteration >= facts.total_steps
        or (facts.stop_after is not None and facts.durable_iteration >= facts.stop_after)
        or facts.exit_trigger is not None
        or facts.predecessor_cancelled
        or facts.verdict is not None
        or facts.failed_attempts >= facts.chain.max_failed_attempts
    )
    assert (decision.action == "stop") == must_stop == (decision.chain_end is not None)


FAILED = EndFacts(
    outcome=None,
    outcome_reason="",
    exit_code=1,
    hang=None,
    cancelled=False,
    base_iteration=5,
    durable_iteration=5,
    total_steps=10,
    failed_attempts=1,
    chain=ChainSection(max_failed_attempts=3, auto_requeue=True),
)
PROGRESS = {"durable_iteration": 6}


@pytest.mark.parametrize(
    ("changes", "action", "state"),
    [
        ({}, "retry", None),
        ({"failed_attempts": 2}, "stop", "failed"),
        (PROGRESS, "continue", None),
        ({"outcome": "saved", **PROGRESS}, "continue", None),
        ({"outcome": "saved", "durable_iteration": 10}, "stop", "done"),
        ({"outcome": "saved", "stop_after": 6, **PROGRESS}, "stop", "done"),
        ({"outcome": "done", "total_steps": None}, "stop", "done"),
        ({"outcome": "exit", **PROGRESS}, "stop", "stopped"),
        ({"outcome": "fatal", **PROGRESS}, "stop", "failed"),
        ({"cancelled": True, **PROGRESS}, "stop", "stopped"),
        ({"reservation": "it is over", **PROGRESS}, "stop", "stopped"),
        ({"chain": ChainSection(auto_requeue=False)}, "end", None),
        ({"chain": ChainSection(auto_requeue=False), **PROGRESS}, "end", None),
    ],
)
def test_each_cause_alone_decides_what_comes_behind_an_attempt(
    changes: dict[str, Any], action: str, state: str | None
) -> None:
    decision = decide_at_end(replace(FAILED, **changes))
    assert (decision.action, decision.chain_end) == (action, state)


@pytest.mark.slow
@given(END)
def test_end_lets_nothing_run_on_that_made_no_progress_too_often(facts: EndFacts) -> None:
    decision = decide_at_end(facts)
    if facts.outcome in ("exit", "fatal") or facts.cancelled:
        assert decision.action == "stop"
    assert (decision.action == "stop") == (decision.chain_end is not None)
    if decision.action in ("continue", "retry"):
        assert facts.chain.auto_requeue
    if decision.action == "continue":
        assert facts.durable_iteration > facts.base_iteration
    if decision.action == "retry":
        assert facts.failed_attempts + 1 < facts.chain.max_failed_attempts
        assert 30 <= decision.delay <= 1800
    assert isinstance(decision, Decision)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.none() | st.just("saved"), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_every_history_ends_in_progress_or_stop_within_k_attempts(
    attempts: list[tuple[str | None, int]], allowed: int
) -> None:
    durable = failed = 0
    for outcome, gained in attempts:
        begin = StartFacts(
            stopped=None,
            durable_iteration=durable,
            total_steps=1000,
            exit_trigger=None,
            predecessor_cancelled=False,
            failed_attempts=failed,
            chain=ChainSection(max_failed_attempts=allowed),
            verdict=None,
        )
        assert decide_at_start(begin).action == "run"
        end = EndFacts(
            outcome=outcome,
            outcome_reason="",
            exit_code=1,
            hang=None,
            cancelled=False,
            base_iteration=durable,  # type: ignore[arg-type]
            durable_iteration=durable + gained,
            total_steps=1000,
            failed_attempts=failed,
            chain=ChainSection(max_failed_attempts=allowed, auto_requeue=True),
        )
        action = decide_at_end(end).action
        failed = 0 if gained else failed + 1
        durable += gained
        assert (action == "continue") == (gained > 0)
        assert (action == "stop") == (failed >= allowed)
        if action == "stop":
            break


@pytest.mark.slow
@given(END)
def test_no_job_follows_where_the_reservation_has_ended(facts: EndFacts) -> None:
    decision = decide_at_end(replace(facts, reservation="reservation camp ended", cancelled=False))
    assert decision.action == ("stop" if facts.chain.auto_requeue or decision.action == "stop" else "end")
    last = min(facts.total_steps or 0, facts.stop_after or 50)
    if facts.outcome in (None, "saved") and facts.durable_iteration < last:
        assert decision.reason.startswith("reservation camp ended")


@given(st.integers(1, 10**6))
def test_leads_leave_room_for_work_and_for_the_save(time_limit: int) -> None:
    lead = first_grace_period(time_limit)
    assert 0 < lead <= min(600, time_limit / 4)
    assert 1 <= default_signal_seconds(lead) <= max(1, round(lead))


SECONDS = st.floats(0.001, 1000)


@given(st.lists(SECONDS, max_size=300), st.lists(SECONDS, max_size=20), st.floats(1, 100), st.floats(100, 5000))
def test_a_measured_lead_covers_a_slow_step_and_a_slow_save_within_its_bounds(
    steps: list[float], saves: list[float], floor: float, ceiling: float
) -> None:
    lead = measured_grace_period(steps, saves, floor=floor, ceiling=ceiling)
    if not steps or not saves:
        assert lead is None
        return
    assert lead is not None
    assert floor <= lead <= ceiling
    assert lead == ceiling or lead > sorted(steps[-200:])[len(steps[-200:]) // 2] + max(saves[-10:])


def test_a_save_that_takes_twenty_seconds_longer_moves_the_deadline_by_at_least_fifteen() -> None:
    before = measured_grace_period([0.5] * 50, [2.0] * 5, floor=10, ceiling=600)
    after = measured_grace_period([0.5] * 50, [2.0] * 5 + [22.0], floor=10, ceiling=600)
    assert before is not None
    assert after is not None
    assert after - before >= 15
