"""A program that knows nothing of relayrun, whose ranks are started again inside their job: records, files, bits."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from relayrun.control.rundir import restarts, triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.files import read_json_lines
from tests.chain.test_local_chain import ends, logs, run_chain
from tests.command_examples import left_over
from tests.plans import plan_with

from .conftest import MakeRun

pytestmark = pytest.mark.slow  # they wait for real clocks

PROGRAM = Path(__file__).with_name("restarted_program.py")
LAST = 20


def make(
    make_run: MakeRun, *faults: str, last: int = LAST, tracker: bool = False, **changes: object
) -> tuple[Run, Plan]:
    """A run on two ranks, saved at every fifth iteration."""
    settings: dict[str, object] = {
        "run": [sys.executable, str(PROGRAM), "{checkpoints}", str(last), *faults],
        "resume": ["--resume", "{checkpoint}"],
        "checkpoint": {
            "pattern": "step-{iteration}",
            **({"tracker": "newest"} if tracker else {"whole_when": "done"}),
        },
        "progress": r"^step (?P<iteration>\d+) loss (?P<loss>\S+)",
    }
    values: dict[str, object] = {
        "recovery": "node",
        "trainer": "command",
        "trainer_settings": settings,
        "total_steps": last,
        "auto_requeue": False,
        "time_limit": 600,
    }
    run, plan = make_run(**(values | changes))
    where = f"--run-dir={run.path}"
    plan = plan_with(plan, fork_server=[sys.executable, "-P", "-m", "relayrun.control.agent.spawn_server", where])
    plan.write(run.plan)
    return run, plan


def losses(run: Run) -> list[tuple[int, float]]:
    return [(line["iteration"], line["loss"]) for line in read_json_lines(run.metrics_view)]


def undisturbed(last: int) -> tuple[list[tuple[int, float]], str]:
    """The losses and the last weights of a run that nobody kills."""
    weights, found = 0.5, []
    for at in range(1, last + 1):
        weights = 3.9 * weights * (1 - weights)
        found.append((at, weights))
    return found, repr(weights)


def assert_undisturbed(run: Run, *, last: int = LAST) -> None:
    expected, weights = undisturbed(last)
    assert losses(run) == expected
    assert (run.checkpoints / f"step-{last}" / "weights").read_text() == weights
    assert resume_point(run).iteration == last
    assert left_over(run) == []


def starts(run: Run) -> list[tuple[int, int, int]]:
    """Rank, restart and first iteration of each start of a rank, in the order of restarts."""
    found = re.findall(r"rank (\d) of 2 begins restart (\d+) at (\d+), port (\d+)", logs(run))
    assert len({port for _, _, _, port in found}) == len({number for _, number, _, _ in found})
    return sorted((int(number), int(rank), int(at)) for rank, number, at, _ in found)


def test_ranks_that_die_start_again_in_their_job_from_the_newest_checkpoint(make_run: MakeRun) -> None:
    """One is killed, one ends by an error, one dies in the middle of a save and leaves it torn, one right behind it."""
    run, plan = make(make_run, "1:1:7:SIGKILL", "2:1:8:exit3", "3:0:10:torn", "4:0:10:whole")
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [(each.rank, each.words, each.durable_iteration, each.next_iteration) for each in found] == [
        (1, "killed by SIGKILL", 5, 5),
        (1, "ended with exit code 3", 5, 5),
        (0, "killed by SIGKILL", 5, 5),
        (0, "killed by SIGKILL", 10, 10),  # whole, and on record, although nobody looked before the kill
    ], logs(run)
    assert [each.iteration for each in found] == [7, 8, 10, 10]
    assert starts(run) == [(number, rank, at) for number, at in enumerate([0, 5, 5, 5, 10], 1) for rank in (0, 1)]
    assert_undisturbed(run)
    assert [path.name for path in (run.checkpoints / ".quarantine").iterdir()] == ["step-10-0001"]
    assert [commit.iteration for commit in run.attempt(1).read_commits()] == [5, 10, 15, 20]
    marks = [line for line in read_json_lines(run.attempt(1).metrics) if "restart" in line]
    assert marks == [{"iteration": at, "restart": number} for number, at in enumerate([5, 5, 5], 2)]
    named = {"end", "records", "step", "all"}
    assert all({"end"} <= each.seconds.keys() <= named for each in found)  # a restart may be over before anybody looks
    assert not run.attempt(1).hand_over.exists()


@pytest.mark.long
def test_the_same_end_at_the_same_iteration_ends_the_attempt_at_its_second_time(make_run: MakeRun) -> None:
    run, plan = make(make_run, "0:1:7:exit3")
    run_chain(run, plan)
    (record,) = ends(run)
    assert (record.cause, record.exit_code, record.durable_iteration) == ("failed", 3, 5)
    assert "ended with exit code 3; the same failure as before, at the same iteration 7" in record.reason


@pytest.mark.long
def test_restarts_without_a_later_checkpoint_end_the_attempt(make_run: MakeRun) -> None:
    run, plan = make(make_run, "0:0:3:SIGKILL", max_failed_restarts=2)
    run_chain(run, plan)
    (record,) = ends(run)
    assert (record.cause, record.exit_code) == ("failed", 128 + signal.SIGKILL)
    assert "2 restarts in a row without a later state to start from" in record.reason


@pytest.mark.long
def test_a_program_that_dies_behind_its_last_save_is_not_started_again(make_run: MakeRun) -> None:
    run, plan = make(make_run, "0:0:20:whole", auto_requeue=True)
    run_chain(run, plan)
    (record,) = ends(run)
    (failed,) = restarts.read_failed_restarts(run.attempt(1))
    assert (failed.again, failed.reason) == (False, "iteration 20 is the last one, and it is saved")
    assert (stop_reason(run) or "").startswith("the last iteration, 20, is saved"), record
    assert losses(run) == undisturbed(LAST)[0]


@pytest.mark.long
def test_a_hang_becomes_a_round_and_no_child_lives_on(make_run: MakeRun) -> None:
    run, plan = make(make_run, "1:0:7:held", "2:1:8:child", hang_timeout=10)
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [each.rank for each in found] == [None, 1]
    assert found[0].words.startswith("hang: ")
    assert_undisturbed(run)


@pytest.mark.long
def test_a_program_that_is_not_there_is_a_fatal_end(make_run: MakeRun) -> None:
    run, plan = make(make_run)
    settings = plan.trainer_settings | {"run": ["no-such-program", "{checkpoints}"]}
    plan_with(plan, trainer_settings=settings).write(run.plan)
    run_chain(run, plan)
    (record,) = ends(run)
    assert (record.cause, record.exit_code) == ("fatal", 127), logs(run)
    assert record.reason.startswith("fatal: no-such-program is not found on any rank")


@pytest.mark.long
def test_a_tracker_goes_back_with_its_round(make_run: MakeRun) -> None:
    """Its save of iteration 10 is whole and not named: the kill came before."""
    run, plan = make(make_run, "1:0:10:torn", tracker=True)
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    assert_undisturbed(run)


@pytest.mark.long
@pytest.mark.parametrize("how", ["limit", "exit"])
def test_what_asks_ranks_to_leave_reaches_those_of_a_later_round(make_run: MakeRun, how: str) -> None:
    changes = {"time_limit": 60, "grace_period": 30.0} if how == "limit" else {}
    run, plan = make(make_run, "1:1:7:SIGKILL", last=100_000, **changes)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    touched: list[float] = []

    def act() -> None:
        newest = [line["iteration"] for line in read_json_lines(run.metrics_view)][-1:]
        if how == "exit" and not touched and newest > [12]:
            touched.append(time.time())
            triggers.touch_trigger(run, "exit")

    scheduler.run_queue(lambda _event: None, act)
    (record,) = ends(run)
    assert record.cause == {"limit": "saved", "exit": "exit"}[how], logs(run)
    assert len(restarts.read_failed_restarts(run.attempt(1))) == 1
    assert record.durable_iteration % 5 == 0
    assert [at for at, _ in losses(run)] == list(range(1, record.durable_iteration + 1))


@pytest.mark.long
def test_kills_at_any_time_change_no_bit(make_run: MakeRun) -> None:
    """Also of the watch, between the end of a restart and the next one's begin."""
    run, plan = make(make_run, last=200, max_failed_restarts=1000)
    chain = threading.Thread(target=run_chain, args=(run, plan))
    chain.start()
    generator, killed = random.Random(7), 0
    while chain.is_alive() and killed < 8 and not (run.checkpoints / "step-150").exists():
        chain.join(generator.uniform(0.2, 3.0))
        pids = ranks_of(run)
        if killed % 3 == 2 and (watch := watch_of(run)):
            os.kill(watch, signal.SIGKILL)
        if pids:
            os.kill(generator.choice(pids), signal.SIGKILL)
            killed += 1
    chain.join(600)
    assert not chain.is_alive()
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    assert 3 <= len(restarts.read_failed_restarts(run.attempt(1))) <= killed
    assert_undisturbed(run, last=200)


def ranks_of(run: Run) -> list[int]:
    return _found(str(PROGRAM), str(run.checkpoints))


def watch_of(run: Run) -> int:
    return next(iter(_found("watch", f"--run-dir={run.path}")), 0)


def _found(*wanted: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if set(wanted) <= set(words):
            found.append(int(entry.name))
    return found
