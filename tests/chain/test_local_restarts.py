"""Ranks that are started again inside their job: the real job script, supervisor, agent and fork server.

The program of the ranks is a stand-in (`forked_ranks.py`); `test_local_recovery.py` has the real one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relayrun.control.rundir import restarts, triggers
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.files import read_json_lines
from tests.plans import plan_with
from tests.waiting import wait_for

from .conftest import MakeRun
from .test_local_chain import ends, logs, run_chain

pytestmark = pytest.mark.slow  # they wait for real clocks

FORKED = Path(__file__).with_name("forked_ranks.py")


def make(make_run: MakeRun, *faults: str, **changes: object) -> tuple[Run, Plan]:
    """A run of 20 iterations, saved at every fifth, whose ranks are forked."""
    values: dict[str, object] = {
        "recovery": "node",
        "fork_server": [sys.executable, str(FORKED), *faults],
        "auto_requeue": False,
        "time_limit": 300,
    }
    run, plan = make_run(**(values | changes))
    plan = plan_with(plan, program=[sys.executable, "-m", "relayrun.train", f"--run-dir={run.path}"])
    plan.write(run.plan)
    return run, plan


def starts(run: Run, rank: int) -> list[tuple[int, int]]:
    """Restart and base of each start of a rank in the first attempt."""
    lines = read_json_lines(run.attempt(1).path / f"starts-{rank}.jsonl")
    return [(line["restart"], line["base"]) for line in lines]


def told(failed: FailedRestart) -> tuple[int, int | None, str, int, int, int]:
    return failed.restart, failed.rank, failed.words, failed.iteration, failed.durable_iteration, failed.steps_lost


def run_with(run: Run, plan: Plan, poll: Callable[[], None]) -> None:
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    scheduler.run_queue(lambda _event: None, poll)


def test_what_a_rank_has_forked_ends_with_its_round_and_hides_no_end_of_the_server(make_run: MakeRun) -> None:
    """It keeps the agent's socket open, and has the environment of the server, which lives on."""
    run, plan = make(make_run, "1:1:7:worker+SIGKILL", "2:0:12:worker+server")
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    assert [told(failed) for failed in restarts.read_failed_restarts(run.attempt(1))] == [
        (1, 1, "killed by SIGKILL", 7, 5, 2),
        (2, None, "the server that forks ranks ended (-9)", 12, 10, 2),
    ]
    for name in ("worker-1-1", "worker-2-0"):
        assert not lives(int((run.attempt(1).path / name).read_text()))
    assert logs(run).count("a process that the ranks left behind is ended: ") == 2


def test_ranks_that_die_are_started_again_inside_their_job(make_run: MakeRun) -> None:
    faults = ("1:1:7:SIGKILL", "2:0:5:SIGKILL", "3:1:12:OSError: stale file handle", "4:0:12:server")
    run, plan = make(make_run, *faults)
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    assert run.attempt_numbers() == [1]
    assert starts(run, 0) == starts(run, 1) == [(1, 0), (2, 5), (3, 5), (4, 10), (5, 10)]
    assert [line["iteration"] for line in read_json_lines(run.metrics_view)] == list(range(1, 21))
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [told(failed) for failed in found] == [
        (1, 1, "killed by SIGKILL", 7, 5, 2),
        (2, 0, "killed by SIGKILL", 5, 5, 0),
        (3, 1, "OSError: stale file handle", 12, 10, 2),
        (4, None, "the server that forks ranks ended (-9)", 12, 10, 2),
    ]
    assert all(failed.again for failed in found)
    assert found[0].seconds.keys() == {"end"}  # the restart behind it was killed before its first step
    for failed in found[1:]:
        assert failed.seconds.keys() == {"end", "records", "fork", "groups", "load", "step", "all"}
        assert 0 < failed.seconds["all"] < 300
    assert [path.name for path in run.attempt(1).failures.rglob("*.json")] == ["rank-0001.json"]
    assert (run.attempt(1).failures / "restart-0003/rank-0001.json").exists()


def test_the_same_error_at_the_same_iteration_ends_the_attempt_at_its_second_time(make_run: MakeRun) -> None:
    run, plan = make(make_run, "0:1:7:RuntimeError: no room on port 4711")
    run_chain(run, plan)
    (record,) = ends(run)
    assert (record.cause, record.exit_code, record.durable_iteration) == ("failed", 1, 5)
    words = "RuntimeError: no room on port 4711; the same failure as before, at the same iteration 7"
    node = restarts.read_failed_restarts(run.attempt(1))[0].node
    assert record.reason.startswith(f"rank 1 on {node}: {words}")
    assert [failed.again for failed in restarts.read_failed_restarts(run.attempt(1))] == [True, False]


@pytest.mark.long
def test_restarts_without_a_later_state_to_start_from_end_the_attempt(make_run: MakeRun) -> None:
    """The second one brings iteration 5."""
    run, plan = make(make_run, "1:0:5:SIGKILL", "2:0:7:SIGKILL", "0:0:8:SIGKILL", max_failed_restarts=2)
    run_chain(run, plan)
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [(failed.base_iteration, failed.next_iteration) for failed in found] == [(0, 0), (0, 5), (5, 5), (5, 5)]
    (record,) = ends(run)
    assert record.cause == "failed"
    assert record.exit_code == 128 + signal.SIGKILL
    assert "killed by SIGKILL; 2 restarts in a row without a later state to start from" in record.reason


@pytest.mark.long
@pytest.mark.parametrize(("what", "cause"), [("repeats: KeyError: 'layout'", "fatal"), ("exit3", "failed")])
def test_what_every_start_would_meet_starts_nobody_again(make_run: MakeRun, what: str, cause: str) -> None:
    run, plan = make(make_run, f"0:1:7:{what}")
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == cause
    again = [failed.again for failed in restarts.read_failed_restarts(run.attempt(1))]
    assert again == ([False] if cause == "fatal" else [True, False])  # an exit code alone is known the second time


@pytest.mark.long
def test_imports_that_fail_are_said_by_every_rank(make_run: MakeRun) -> None:
    run, plan = make(make_run, "imports:No module named 'torch'")
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "fatal"
    assert record.reason.startswith("fatal: every rank: ModuleNotFoundError: No module named 'torch'")


@pytest.mark.long
def test_ranks_that_are_asked_to_leave_are_not_started_again(make_run: MakeRun) -> None:
    run, plan = make(make_run, "0:0:7:told")

    def ask_and_kill() -> None:
        attempt = run.attempt(1)
        if (attempt.path / "at-1-7-0").exists() and not attempt.stop.exists():
            pid = next(read_json_lines(attempt.path / "starts-1.jsonl"))["pid"]
            os.kill(pid, signal.SIGSTOP)
            attempt.stop.write_text("SIGUSR2")
            os.kill(pid, signal.SIGKILL)

    run_with(run, plan, ask_and_kill)
    (record,) = ends(run)
    assert (
        len(restarts.read_failed_restarts(run.attempt(1))) <= 1
    )  # rank 0 may have left before its neighbour's end was noticed
    assert starts(run, 0) == [(1, 0)]
    assert record.cause in ("failed", "saved")


@pytest.mark.long
@pytest.mark.parametrize("how", ["limit", "signal", "exit", "cancel"])
def test_what_asks_ranks_to_leave_reaches_them(make_run: MakeRun, how: str) -> None:
    changes: dict[str, object] = {}
    if how in ("limit", "signal"):  # they wait at iteration 7 until they are asked
        changes |= {
            "time_limit": 25,
            "grace_period": 5.0 if how == "limit" else 0.0,
            "signal_seconds": 1 if how == "limit" else 8,
        }
    run, plan = make(make_run, *([] if how == "limit" else ["0:0:7:told"]), **changes)
    scheduler = LocalScheduler(run)
    job = scheduler.submit(plan, run.job_script, options={})
    done: list[str] = []

    def act() -> None:
        if not done and (run.attempt(1).path / "at-1-7-0").exists():
            done.append(how)
            if how == "cancel":
                scheduler.cancel(job)
            elif how == "exit":
                triggers.touch_trigger(run, "exit")
                run.attempt(1).stop.touch()  # the stand-in waits for this file alone

    scheduler.run_queue(lambda _event: None, act)
    (record,) = ends(run)
    assert record.cause == {"limit": "done", "signal": "saved", "exit": "exit", "cancel": "cancelled"}[how], logs(run)
    assert not run.attempt(1).failed_restarts.exists()


@pytest.mark.long
def test_an_agent_that_is_killed_takes_its_ranks_with_it(make_run: MakeRun) -> None:
    run, plan = make(make_run, "0:0:7:told")
    pids: list[int] = []

    def kill_the_agent() -> None:
        if not pids and (run.attempt(1).path / "at-1-7-1").exists():
            pids.extend(pids_of(run))
            pids.extend([parent(pids[0]), parent(parent(pids[0]))])
            os.kill(pids[-1], signal.SIGKILL)

    run_with(run, plan, kill_the_agent)
    (record,) = ends(run)
    assert record.cause == "failed", logs(run)
    wait_for(lambda: not any(lives(pid) for pid in pids), words="one dies with the other")


@pytest.mark.long
def test_ranks_that_hang_are_started_again_after_they_were_asked_for_their_stacks(make_run: MakeRun) -> None:
    run, plan = make(make_run, "1:0:7:told", hang_timeout=5)
    stopped: list[int] = []

    def stop_a_rank() -> None:
        if not stopped and (run.attempt(1).path / "at-1-7-1").exists():
            stopped.append(pids_of(run)[1])
            os.kill(stopped[0], signal.SIGSTOP)  # the others wait, and nothing moves

    run_with(run, plan, stop_a_rank)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    failed = restarts.read_failed_restarts(run.attempt(1))[0]
    assert (failed.rank, failed.iteration, failed.durable_iteration, failed.again) == (1, 7, 5, True)
    assert failed.words.startswith("hang: no progress for ")
    assert failed.words.endswith("ranks 1 did not answer")
    assert not run.attempt(1).hang.exists()
    assert (run.attempt(1).failures / "restart-0001/hang.json").exists()
    assert 'File "' in (run.stacks(1) / "restart-0001/rank-0000.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("with_its_rank", [True, False])
def test_an_agent_that_stands_still_holds_no_node_to_the_time_limit(make_run: MakeRun, with_its_rank: bool) -> None:
    run, plan = make(make_run, "1:0:7:told", hang_timeout=5, time_limit=3000)
    stopped: list[float] = []

    def stop_the_agent() -> None:
        if not stopped and (run.attempt(1).path / "at-1-7-1").exists():
            rank = pids_of(run)[1]
            os.kill(parent(parent(rank)), signal.SIGSTOP)
            stopped.append(time.monotonic())
            if with_its_rank:
                os.kill(rank, signal.SIGSTOP)

    run_with(run, plan, stop_the_agent)
    assert time.monotonic() - stopped[0] < 240
    (record,) = ends(run)
    assert record.cause == "hang", logs(run)


@pytest.mark.long
def test_a_server_that_hangs_holds_up_no_round(make_run: MakeRun) -> None:
    run, plan = make(make_run, "1:0:7:told", hang_timeout=5)
    stopped: list[int] = []

    def stop_the_server() -> None:
        if not stopped and (run.attempt(1).path / "at-1-7-1").exists():
            stopped.append(parent(pids_of(run)[1]))
            os.kill(stopped[0], signal.SIGSTOP)

    run_with(run, plan, stop_the_server)
    (record,) = ends(run)
    assert record.cause == "done", logs(run)
    failed = restarts.read_failed_restarts(run.attempt(1))[0]
    assert failed.again
    assert failed.words.startswith("hang: no progress for ")
    assert "the server that forks ranks did not end them within 30 s; it is killed" in logs(run)
    assert not lives(stopped[0])


@pytest.mark.long
def test_a_server_that_hangs_in_its_imports_ends_the_attempt_with_words(make_run: MakeRun) -> None:
    run, plan = make(make_run, "imports:hang", start_timeout=8, max_failed_restarts=2)
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause != "done", logs(run)
    assert [(failed.words, failed.again) for failed in restarts.read_failed_restarts(run.attempt(1))] == [
        ("the server that forks ranks has not done its imports within 4 s", True),
        ("the server that forks ranks has not done its imports within 4 s", False),
    ]


@pytest.mark.long
def test_ranks_that_hang_at_one_iteration_again_and_again_end_the_attempt(make_run: MakeRun) -> None:
    run, plan = make(make_run, "0:0:7:told", hang_timeout=5)
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "hang"
    assert record.reason.startswith("hang: no progress for ")
    assert [failed.again for failed in restarts.read_failed_restarts(run.attempt(1))] == [True, False]


def pids_of(run: Run) -> list[int]:
    """Processes of the ranks of the first start."""
    return [next(read_json_lines(run.attempt(1).path / f"starts-{rank}.jsonl"))["pid"] for rank in (0, 1)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def lives(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
