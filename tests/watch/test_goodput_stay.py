"""Every second of one stay of a job on its nodes is in the part where it belongs, by hand and by hypothesis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayrun.control import decisions
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, AttemptStart, CheckpointCommit, Hang, StartTimes
from relayrun.control.rundir.restarts import iteration_resets
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import job_history
from relayrun.control.scheduler.job_history import Allocation, join_resized
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.goodput.attribution import AttributedTime, attribute_time
from relayrun.watch.goodput.facts import AttemptFacts, NodeAllocation, join_allocations
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, PART_NAMES
from tests import accounted
from tests.accounted import make_accounted
from tests.watch.goodput_parts import by_name, failed, install, seconds, step, written

# --- one stay, by hand


def stay(**changes: Any) -> NodeAllocation:
    values: dict[str, Any] = {
        "job_id": "1",
        "nodes": 1,
        "submit": None,
        "eligible": None,
        "start": 0.0,
        "end": 100.0,
        "ended": True,
        "end_known": True,
        "source": "sacct",
    }
    return NodeAllocation(**(values | changes))


def facts(folder: Path = Path("/nowhere/0001"), **changes: Any) -> AttemptFacts:
    begin = AttemptStart(
        attempt=1,
        job_id="1",
        job_name="j",
        nodes="n0",
        config_revision=1,
        base_iteration=changes.pop("base", 0),
        base_path=None,
        start_time=2.0,
        job_end_time=None,
        script_time=1.0,
        grace_period=60.0,
    )
    values: dict[str, Any] = {
        "attempt": Attempt(str(folder)),
        "begin": begin,
        "started": StartTimes(process=3.0, imported=5.0, initialised=8.0, loaded=10.0),
        "end": None,
        "outcome": None,
        "hang": None,
        "failure_time": None,
        "last_sign": 2.0,
        "commits": [],
        "limit": float("inf"),
        "rollbacks": [],
        "blamed": [],
    }
    return AttemptFacts(**(values | changes))


def ended(at: float, *, cause: str = "failed", code: int = 1) -> AttemptEnd:
    fields: dict[str, Any] = {"reason": "", "durable_iteration": 0, "progress": False, "action": "retry"}
    return AttemptEnd(attempt=1, cause=cause, exit_code=code, end_time=at, **fields)


def booked(folder: Path, lines: list[dict[str, Any]], place: NodeAllocation) -> dict[str, float]:
    found = attribute_time(place, written(folder, lines))
    assert sum(found.parts.values()) == (found.end - found.start) * place.nodes
    return seconds(found.parts)


@pytest.mark.parametrize(
    ("state", "source", "ends"),
    [
        ("REQUEUE_FED", "sacct", True),  # accounting has ends of what is over alone
        ("STAGE_OUT", "sacct", True),
        ("CANCELLED by 1000", "sacct", True),
        ("RUNNING", "sacct", False),
        ("RUNNING", "squeue", False),  # a guess
        ("RESIZING", "squeue", False),
        ("EXPEDITING", "squeue", False),
        ("CANCELLED", "squeue", True),
    ],
)
def test_an_end_that_is_known_is_one_whatever_the_state_is_called(state: str, source: str, ends: bool) -> None:
    end = "Unknown" if (state, source) == ("RUNNING", "sacct") else "2026-11-20T08:03:30"
    row = job_history._allocation_of_row(
        ["41", state, "2", "2026-11-20T08:02:51", "2026-11-20T08:02:51", "2026-11-20T08:03:00", end], source=source
    )
    assert row is not None
    assert (row.end is not None) == ends


START = {"prolog": 1.0, "supervisor": 1.0, "launch": 1.0, "import": 2.0, "init": 3.0, "load": 2.0}
"""Up to second 10."""


def test_a_hang_is_told_from_the_step_before_it_and_from_what_follows(tmp_path: Path) -> None:
    hang = Hang(iteration=2, phase="step", seconds=30.0, silent=[1], time=60.0)
    place = stay(facts=facts(hang=hang, end=ended(64.0, cause="hang")))
    parts = booked(tmp_path, [step(1, 20.0, 10.0), step(2, 25.0, 5.0)], place)
    assert parts == START | {"step": 15.0, "redone": 5.0, "hang": 30.0, "recovery": 4.0, "end": 36.0}


def test_ranks_that_are_killed_without_a_word_stand_still_until_that_is_noticed(tmp_path: Path) -> None:
    place = stay(facts=facts(last_sign=26.0, end=ended(30.0)))
    assert booked(tmp_path, [step(1, 25.0, 15.0)], place) == START | {
        "step": 15.0,
        "redone": 1.0,
        "hang": 4.0,
        "end": 70.0,
    }


def test_where_nobody_saw_the_end_the_rest_is_unknown_and_slurm_knows_better(tmp_path: Path) -> None:
    closed = ended(500.0, cause="unknown", code=decisions.UNKNOWN_EXIT_CODE)
    place = stay(facts=facts(end=closed), end_known=False, source="the chain")
    assert booked(tmp_path, [step(1, 25.0, 15.0)], place) == START | {"step": 15.0, "unknown": 75.0}
    place = stay(facts=facts(end=closed))
    assert booked(tmp_path, [step(1, 25.0, 15.0)], place) == START | {"step": 15.0, "hang": 75.0}


def test_a_start_that_fails_is_a_part_of_its_own(tmp_path: Path) -> None:
    place = stay(facts=facts(started=None, failure_time=20.0, end=ended(22.0)))
    assert booked(tmp_path, [], place) == {
        "prolog": 1.0,
        "supervisor": 1.0,
        "failed start": 18.0,
        "recovery": 2.0,
        "end": 78.0,
    }


def test_a_rollback_makes_steps_lost_and_the_way_back_is_recovery(tmp_path: Path) -> None:
    base, back = 1, {"iteration": 3, "reason": "spike", "base_iteration": 1, "next_sample": 3, "time": 17.0}
    lines = [step(1, 12.0, 2.0), step(2, 14.0, 2.0), step(3, 16.0, 2.0), {"iteration": base, "rollback": back}]
    lines += [step(2, 24.0, 2.0), step(3, 26.0, 2.0)]
    outcome = AttemptOutcome(outcome="done", reason="", iteration=3, time=26.0)
    place = stay(facts=facts(rollbacks=[1], outcome=outcome, end=ended(26.0, cause="done", code=0)), end=30.0)
    assert booked(tmp_path, lines, place) == START | {
        "step": 6.0,
        "redone": 4.0,
        "between": 1.0,
        "recovery": 5.0,
        "end": 4.0,
    }


def test_ranks_that_start_again_inside_a_job_go_back_likewise(tmp_path: Path) -> None:
    lines = [step(1, 12.0, 2.0), step(2, 14.0, 2.0), {"iteration": 1, "restart": 2}, step(2, 24.0, 2.0)]
    outcome = AttemptOutcome(outcome="done", reason="", iteration=2, time=24.0)
    written(tmp_path, lines)
    assert iteration_resets(tmp_path / "metrics.jsonl", [5]) == [1, 5]  # a rollback is on record before its line
    place = stay(facts=facts(rollbacks=[1], outcome=outcome, end=ended(24.0, cause="done", code=0)), end=25.0)
    assert booked(tmp_path, lines, place) == START | {"step": 4.0, "redone": 2.0, "recovery": 8.0, "end": 1.0}


def together(*restarts: dict[str, float]) -> dict[str, Any]:
    """The parts of several starts of the ranks in one account."""
    names = dict.fromkeys(name for each in restarts for name in each)
    return {name: pytest.approx(sum(each.get(name, 0.0) for each in restarts)) for name in names}


def test_every_restart_is_booked(tmp_path: Path) -> None:
    lines = [step(1, 12.0, 2.0), step(2, 14.0, 2.0), {"iteration": 1, "restart": 2}, step(2, 24.0, 2.0)]
    outcome = AttemptOutcome(outcome="done", reason="", iteration=2, time=24.0)
    done = {"outcome": outcome, "end": ended(24.0, cause="done", code=0)}
    place = stay(facts=facts(rollbacks=[1], failed_restarts=[failed(1, 15.0)], **done), end=25.0)
    found = attribute_time(place, written(tmp_path, lines))
    assert seconds(found.parts) == together(
        START | {"step": 2.0, "redone": 2.0 + 1.0},  # the step that was under way
        {"recovery": 7.0, "step": 2.0, "end": 1.0},
    )
    assert found.work.redone_iterations == 1
    assert sum(found.parts.values()) == 25 * MICROSECONDS_PER_SECOND


def test_a_round_that_fails_at_its_checkpoint_leaves_no_line_and_one_that_fails_at_once_no_step(tmp_path: Path) -> None:
    lines = [step(1, 12.0, 2.0), step(2, 14.0, 2.0), step(3, 40.0, 4.0)]
    outcome = AttemptOutcome(outcome="done", reason="", iteration=3, time=40.0)
    hang = Hang(iteration=2, phase="step", seconds=5.0, silent=[1], time=20.0)
    restarts = [
        failed(1, 20.1, next_iteration=2, steps_lost=0),
        failed(2, 30.0, next_iteration=2, steps_lost=0),
    ]
    done = {"outcome": outcome, "end": ended(40.0, cause="done", code=0)}
    place = stay(facts=facts(failed_restarts=restarts, hangs={1: hang}, **done), end=41.0)
    found = attribute_time(place, written(tmp_path, lines))
    assert seconds(found.parts) == together(
        START | {"step": 4.0, "redone": 1.0, "hang": 5.0, "recovery": 0.1},
        {"recovery": 9.9},
        {"recovery": 6.0, "step": 4.0, "end": 1.0},
    )


def test_a_start_that_failed_is_not_told_by_the_times_of_the_next_restart(tmp_path: Path) -> None:
    started = StartTimes(process=13.0, imported=15.0, initialised=18.0, loaded=20.0)  # of restart 2
    outcome = AttemptOutcome(outcome="done", reason="", iteration=1, time=24.0)
    done = {"outcome": outcome, "end": ended(24.0, cause="done", code=0)}
    restarts = [failed(1, 12.0, iteration=0, next_iteration=0, steps_lost=0)]
    place = stay(facts=facts(started=started, failed_restarts=restarts, **done), end=25.0)
    found = attribute_time(place, written(tmp_path, [step(1, 24.0, 3.0)]))
    assert seconds(found.parts) == together(
        {"prolog": 1.0, "supervisor": 1.0, "failed start": 10.0},
        {"recovery": 9.0, "step": 3.0, "end": 1.0},
    )


def test_restarts_of_an_attempt_that_fails_in_the_end_are_recovery(tmp_path: Path) -> None:
    restarts = [failed(1, 15.0), failed(2, 20.0, again=False, reason="no")]
    place = stay(facts=facts(failed_restarts=restarts, failure_time=20.0, limit=1.0, end=ended(22.0)), end=23.0)
    found = attribute_time(place, written(tmp_path, [step(1, 12.0, 2.0), step(2, 14.0, 2.0)]))
    assert seconds(found.parts) == together(START | {"step": 2.0, "redone": 3.0}, {"recovery": 7.0, "end": 1.0})


@pytest.mark.parametrize("spare", [0, 1])
def test_a_job_that_has_lost_a_node_had_it(run: Run, spare: int) -> None:
    """Slurm takes a lost node out of a job that outlives it, and tells of the others while the job is there."""
    plan = replace(Plan.load(run), nodes=3 - spare, spare_nodes=spare)
    each = facts()
    each = replace(each, begin=replace(each.begin, options={"nodes": "3"}))
    known = Allocation(
        job_id=each.begin.job_id, nodes=2, submit=None, eligible=None, start=0.0, end=None, source="squeue"
    )
    (stay,) = join_allocations([each], [known], plan=plan, now=1e10)
    assert (stay.nodes, stay.spare_nodes) == ((3, 1) if spare else (2, 0))


def test_spare_nodes_wait_until_one_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    lines = [step(1, 12.0, 2.0), step(2, 14.0, 2.0), {"iteration": 1, "restart": 2}, step(2, 24.0, 2.0)]
    outcome = AttemptOutcome(outcome="done", reason="", iteration=2, time=24.0)
    done = {"outcome": outcome, "end": ended(24.0, cause="done", code=0)}
    restarts = [failed(1, 15.0, lost={"n1": "n3"})]
    place = stay(facts=facts(rollbacks=[1], failed_restarts=restarts, **done), end=25.0, nodes=4, spare_nodes=2)
    found = attribute_time(place, written(tmp_path, lines))
    assert seconds(found.parts) == together(
        {"prolog": 4.0, "supervisor": 4.0, "launch": 4.0, "import": 8.0, "init": 6.0, "load": 4.0}
        | {"step": 4.0, "redone": 6.0, "spare": 2 * (3.0 + 2.0 + 2.0 + 3.0)},
        {"recovery": 14.0, "step": 4.0, "end": 4.0, "spare": 9.0, "given up": 9.0},
    )
    assert sum(found.parts.values()) == 4 * 25 * MICROSECONDS_PER_SECOND


def test_nodes_that_slurm_has_taken_back_are_booked_no_more(tmp_path: Path) -> None:
    """It notices the loss of a node some seconds behind the agents, or before them."""
    lines = [step(1, 12.0, 2.0), step(2, 14.0, 2.0), {"iteration": 1, "restart": 2}, step(2, 24.0, 2.0)]
    outcome = AttemptOutcome(outcome="done", reason="", iteration=2, time=24.0)
    done = {"outcome": outcome, "end": ended(24.0, cause="done", code=0)}
    restarts = [failed(1, 15.0, lost={"n1": ""})]
    place = stay(facts=facts(rollbacks=[1], failed_restarts=restarts, **done), end=25.0, nodes=2, resized=[(20.0, 1)])
    found = attribute_time(place, written(tmp_path, lines))
    after = {"recovery": 7.0, "step": 2.0, "end": 1.0}
    both = {part: 2 * amount for part, amount in START.items()} | {"step": 4.0}
    assert seconds(found.parts) == together(both | {"redone": 6.0}, after | {"given up": 5.0})
    assert sum(found.parts.values()) == (2 * 20 + 5) * MICROSECONDS_PER_SECOND
    early = attribute_time(replace(place, resized=[(13.0, 1)]), written(tmp_path, lines))
    assert seconds(early.parts) == together(both | {"redone": 2.0 + 1.0 + 1.0}, after)
    assert sum(early.parts.values()) == (2 * 13 + 12) * MICROSECONDS_PER_SECOND
    one_block = attribute_time(replace(place, facts=facts(**done), resized=[(13.0, 1)]), written(tmp_path, lines[:2]))
    assert seconds(one_block.parts)["step"] == 2 * 2.0 + 2.0 + 1.0


def test_a_job_that_slurm_has_made_smaller_is_one_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its accounting then has a row for each number of nodes."""
    second = accounted.SACCT.splitlines()[1]
    row = "41|{}|{}|2026-11-20T08:0{}|2026-11-20T08:0{}|2026-11-20T08:0{}|2026-11-20T08:{}"
    rows = [
        row.format("RESIZING", 3, "0:00", "0:00", "1:00", "02:00"),
        row.format("RESIZING", 2, "2:00", "2:00", "2:00", "02:30"),
        row.format("FAILED", 1, "2:30", "2:30", "2:30", "02:51"),
    ]
    install(tmp_path / "bin", monkeypatch, sacct=by_name("\n".join([*rows, second])))
    run = make_accounted(tmp_path / "run")
    replace(Plan.load(run), nodes=1, spare_nodes=1).write(run.plan)
    found = account_for_run(Run(run.path))
    assert [(each.attempt, each.allocation.nodes) for each in found.allocations] == [(1, 3), (2, 2)]
    assert found.allocations[0].allocated == (60 * 3 + 30 * 2 + 21 * 1) * MICROSECONDS_PER_SECOND
    assert sum(found.parts.values()) == found.allocated
    assert found.waited["queued"] == (60 + 74) * MICROSECONDS_PER_SECOND


def test_a_job_that_was_made_smaller_and_runs_on_has_not_ended() -> None:
    """The row of what it has left comes some seconds later."""
    values = {"job_id": "1", "submit": 0.0, "eligible": 0.0, "source": "sacct"}
    first = Allocation(nodes=3, start=1.0, end=5.0, state="RESIZING", **values)
    assert join_resized([first]) == [replace(first, end=None)]
    other = Allocation(nodes=2, start=9.0, end=None, state="RUNNING", **values)  # queued again under its id
    assert join_resized([other, first]) == [replace(first, end=None), other]
    on = replace(other, start=5.0)
    assert join_resized([on, first]) == [replace(first, end=None, state="RUNNING", resized=[(5.0, 2)])]


def test_a_run_that_goes_on_is_booked_up_to_its_newest_sign(tmp_path: Path) -> None:
    place = stay(facts=facts(last_sign=26.0), ended=False)
    found = attribute_time(place, written(tmp_path, [step(1, 25.0, 15.0)]))
    assert (found.start, found.end) == (0, 26 * MICROSECONDS_PER_SECOND)
    assert seconds(found.parts) == START | {"step": 15.0, "between": 1.0}


def test_saves_while_leaving_and_beside_training(tmp_path: Path) -> None:
    commits = [
        CheckpointCommit(iteration=n, path="p", consumed_samples=n, time=at, seconds=8.0)
        for n, at in ((1, 26.0), (2, 44.0))
    ]
    outcome = AttemptOutcome(outcome="saved", reason="", iteration=2, time=45.0)
    place = stay(facts=facts(commits=commits, outcome=outcome, end=ended(46.0, cause="saved", code=0)), end=50.0)
    lines = [step(1, 20.0, 10.0), step(2, 32.0, 10.0, save_seconds=1.5)]
    assert booked(tmp_path, lines, place) == START | {"step": 20.0, "save": 9.5, "between": 5.5, "end": 5.0}


def test_a_program_that_says_little_is_booked_as_far_as_it_says(tmp_path: Path) -> None:
    """Another trainer's: seen from outside when its first step was over, without seconds of steps."""
    seen = StartTimes(process=2.0, imported=2.0, initialised=2.0, loaded=20.0)
    place = stay(facts=facts(started=seen, end=ended(30.0, cause="done", code=0), failure_time=30.0), end=30.0)
    lines = [{"iteration": 1, "loss": 1.0, "time": 20.0}, {"iteration": 2, "loss": 1.0, "time": 30.0}]
    assert booked(tmp_path, lines, place) == {"prolog": 1.0, "supervisor": 1.0, "init": 18.0, "step": 10.0}
    place = stay(facts=facts(started=None, end=ended(30.0), failure_time=30.0), end=30.0)
    lines = [step(1, 20.0, 4.0), step(2, 30.0, 10.0)]
    assert booked(tmp_path, lines, place) == {"prolog": 1.0, "supervisor": 1.0, "launch": 14.0, "step": 14.0}


TIMES = st.floats(-10, 120, allow_nan=False)

LINES = st.lists(
    st.fixed_dictionaries(
        {"iteration": st.integers(-1, 9)},
        optional={
            "loss": st.floats(allow_nan=True, allow_infinity=True),
            "time": TIMES | st.sampled_from([float("nan"), float("inf"), 1e300]),
            "step_seconds": st.floats(-5, 50) | st.sampled_from([float("nan"), 1e300]),
            "save_seconds": st.floats(-5, 50),
            "data_seconds": st.floats(-5, 50) | st.none(),
            "evaluation_seconds": st.floats(-5, 50),
            "rollback": st.fixed_dictionaries({"time": TIMES, "base_iteration": st.integers(0, 5)}),
        },
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    lines=LINES,
    times=st.lists(TIMES, min_size=12, max_size=12),
    there=st.lists(st.booleans(), min_size=6, max_size=6),
    code=st.sampled_from([0, 1, decisions.UNKNOWN_EXIT_CODE]),
    limit=st.sampled_from([0.0, 4.0, float("inf")]),
    losses=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=3),
)
def test_whatever_clocks_say_the_parts_sum_to_the_stay(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[dict[str, Any]],
    times: list[float],
    there: list[bool],
    code: int,
    limit: float,
    losses: list[tuple[float, float]],
) -> None:
    started = StartTimes(process=times[0], imported=times[1], initialised=times[2], loaded=times[3])
    found = facts(
        started=started if there[0] else None,
        hang=Hang(iteration=1, phase="step", seconds=times[4], silent=[], time=times[5]) if there[1] else None,
        failure_time=times[6] if there[2] else None,
        outcome=AttemptOutcome(outcome="saved", reason="", iteration=1, time=times[7]) if there[3] else None,
        end=ended(times[8], code=code) if there[4] else None,
        commits=[CheckpointCommit(iteration=1, path="p", consumed_samples=1, time=times[9], seconds=times[10])],
        last_sign=times[11],
        limit=limit,
        rollbacks=[entry["iteration"] for entry in lines if "rollback" in entry],
        failed_restarts=[failed(number, at, lost={"n": ""}) for number, (at, _) in enumerate(losses, 1)],
    )
    folder = tmp_path_factory.mktemp("lines")
    resized = [(at, 4 - number) for number, at in enumerate(sorted(at for _, at in losses), 1)]
    place = stay(facts=found, ended=there[5], end_known=code != decisions.UNKNOWN_EXIT_CODE, nodes=4, resized=resized)
    whole: AttributedTime = attribute_time(place, written(folder, lines))
    each_node = (
        [whole.end] + [min(whole.end, round(at * MICROSECONDS_PER_SECOND)) for at, _ in resized] + 3 * [whole.end]
    )
    assert sum(whole.parts.values()) == sum(each_node[:4]) - 4 * whole.start
    assert all(amount >= 0 for amount in whole.parts.values())
    assert set(whole.parts) <= set(PART_NAMES)
    assert whole.end == 100 * MICROSECONDS_PER_SECOND or not there[5]
