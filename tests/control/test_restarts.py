"""Restarts inside an attempt: what is judged, what is on record, and what the next restart finds."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.decisions import Death, RestartFacts, first_death, why_no_restart
from relayrun.control.rundir import restarts
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.merged_metrics import MergedViews, newest_valid_lines, valid_lines
from relayrun.control.rundir.records import CheckpointCommit, RankFailure
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, read_json_lines
from tests.history import began

KILLED = Death(rank=3, node="n1", code=-signal.SIGKILL)
RAISED = Death(rank=1, node="n0", code=1, error="RuntimeError: rank 4711 timed out after 30 s")
FACTS = RestartFacts(
    death=KILLED,
    iteration=45,
    next_iteration=40,
    base_iteration=30,
    left=False,
    asked="",
    lost="",
    earlier=[],
    chain=ChainSection(max_failed_restarts=3),
)


def failed(number: int, *, base: int, durable: int, **changes: Any) -> FailedRestart:
    values: dict[str, Any] = {"rank": 3, "node": "n1", "words": "killed by SIGKILL", "iteration": 45, "again": True}
    values |= {"base_iteration": base, "durable_iteration": durable, "next_iteration": durable}
    return FailedRestart(restart=number, time=1e9 + number, **(values | changes))


def test_a_kill_starts_the_ranks_again() -> None:
    assert why_no_restart(FACTS) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"left": True}, "rank 0 had said how it leaves"),
        ({"asked": "SIGUSR2"}, "the ranks had been asked to leave (SIGUSR2)"),
        ({"lost": "the agent of n1 is gone"}, "the agent of n1 is gone"),
        ({"death": replace(RAISED, repeats=True)}, "every start would meet this error"),
    ],
)
def test_what_ends_the_attempt_at_once(changes: dict[str, Any], reason: str) -> None:
    assert why_no_restart(replace(FACTS, **changes)) == reason


def test_the_same_error_at_the_same_iteration_ends_the_attempt_and_another_one_does_not() -> None:
    before = failed(1, base=20, durable=40, words="RuntimeError: rank 42 timed out after 30 s")
    facts = replace(FACTS, death=RAISED, earlier=[before])
    assert why_no_restart(facts) == "the same failure as before, at the same iteration 45"
    assert why_no_restart(replace(facts, iteration=46)) is None
    assert why_no_restart(replace(facts, death=replace(RAISED, error="OSError: away"))) is None


def test_a_crash_by_a_signal_is_the_same_failure_and_a_kill_never_is() -> None:
    crash = Death(rank=3, node="n1", code=-signal.SIGSEGV)
    before = [failed(1, base=20, durable=40), failed(2, base=40, durable=41, words="killed by SIGSEGV")]
    assert why_no_restart(replace(FACTS, earlier=before)) is None
    assert why_no_restart(replace(FACTS, death=crash, earlier=before)) is not None


def test_restarts_in_a_row_without_progress_end_the_attempt() -> None:
    stuck = replace(FACTS, base_iteration=40)
    progress, none = failed(1, base=20, durable=40), failed(2, base=40, durable=40)
    assert why_no_restart(replace(stuck, earlier=[none, progress, none])) is None
    reason = "3 restarts in a row without a later state to start from"
    assert why_no_restart(replace(stuck, earlier=[progress, none, none])) == reason
    assert why_no_restart(replace(FACTS, earlier=[none, none])) is None
    strict = replace(stuck, chain=ChainSection(max_failed_restarts=1))
    assert why_no_restart(strict) == "1 restart in a row without a later state to start from"


def test_the_rank_that_was_killed_comes_before_those_that_noticed_it() -> None:
    late = replace(RAISED, rank=0)
    assert first_death([RAISED, KILLED, late], {0: 1.0, 1: 2.0}) == KILLED
    assert first_death([RAISED, late], {0: 1.0, 1: 2.0}) == late
    assert first_death([RAISED, late], {}) == RAISED
    hang = Death(rank=-1, node="", code=1, error="hang: no progress for 310 s")
    assert first_death([hang, RAISED], {1: 1.0}) == hang


def test_words_and_exit_codes_of_deaths() -> None:
    assert [death.words for death in (KILLED, RAISED, Death(rank=0, node="n", code=7))] == [
        "killed by SIGKILL",
        RAISED.error,
        "ended with exit code 7",
    ]
    assert (KILLED.exit_code, RAISED.exit_code) == (137, 1)


def commit(run: Run, number: int, iteration: int) -> None:
    folder = run.checkpoint(iteration)
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"12345")
    run.attempt(number).append_commit(
        CheckpointCommit(
            iteration=iteration,
            path=str(folder),
            consumed_samples=iteration,
            time=1e9,
            seconds=1.0,
            files={"data": 5},
        )
    )


def train(run: Run, number: int, first: int, last: int) -> None:
    for iteration in range(first, last + 1):
        append_line(run.attempt(number).metrics, {"iteration": iteration, "loss": 1.0}, durable=False)


def test_the_records_of_a_failed_round_are_read_with_what_getting_back_took(tmp_path: Path) -> None:
    run = Run(tmp_path)
    began(run, 1)
    attempt = run.attempt(1)
    assert restarts.read_failed_restarts(attempt) == []
    one = failed(1, base=0, durable=40, seconds={"end": 0.5}, steps_lost=5)
    one.append(attempt.failed_restarts)
    assert one.told == "restart 1: rank 3 on n1: killed by SIGKILL, at iteration 45; again from iteration 40"
    restarts.amend_failed_restart(attempt, 1, seconds={"step": 1.0, "all": 2.04})
    two = failed(2, base=40, durable=40, again=False, reason="enough", rank=None, node="", words="the agent is gone")
    two.append(attempt.failed_restarts)
    assert [each.seconds for each in restarts.read_failed_restarts(attempt)] == [
        {"end": 0.5, "step": 1.0, "all": 2.04},
        {},
    ]
    assert restarts.read_failed_restarts(attempt)[0].told.endswith("again from iteration 40, 2.0 s to the next step")
    assert restarts.read_failed_restarts(attempt)[1].told == "restart 2: the agent is gone, at iteration 45; enough"


def test_a_round_goes_back_to_the_newest_whole_checkpoint_and_the_view_has_each_iteration_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    began(run, 1)
    attempt = run.attempt(1)
    attempt.failures.mkdir()
    assert restarts.restart_checkpoint(run, attempt) == ResumePoint(iteration=0, path=None)
    train(run, 1, 1, 22)
    commit(run, 1, 10)
    commit(run, 1, 20)
    (run.checkpoint(20) / "data").write_bytes(b"1")  # torn
    with attempt.metrics.open("a") as file:
        file.write('{"iteration": 23, "lo')  # its writer was killed
    views = MergedViews(run)
    views.update(attempt=1)
    RankFailure(rank=1, node="n", error="OSError: away", time=1.0).write(attempt.failures / "rank-0001.json")
    base = restarts.restart_checkpoint(run, attempt)
    assert base == ResumePoint(iteration=10, path=str(run.checkpoint(10)))
    failed(1, base=0, durable=10).append(attempt.failed_restarts)
    (moved,) = restarts.prepare_restart(run, attempt, base, next_restart=2)
    assert "iter_0000020" in moved
    assert not run.checkpoint(20).exists()
    assert list(attempt.failures.glob("*.json")) == []
    assert (attempt.failures / "restart-0001/rank-0001.json").exists()
    train(run, 1, 11, 15)
    failed(2, base=10, durable=10, next_iteration=13, source="memory").append(attempt.failed_restarts)
    restarts.prepare_restart(run, attempt, base, next_restart=3, next_iteration=13)
    assert restarts.read_failed_restarts(attempt)[-1].told.endswith("again from iteration 13 (memory)")
    train(run, 1, 14, 14)
    views.update(attempt=1)
    iterations = [line["iteration"] for line in read_json_lines(run.metrics_view)]
    assert iterations == list(range(1, 15))
    assert [line["iteration"] for line in valid_lines(run)] == iterations
    assert [line["iteration"] for line in newest_valid_lines(run)] == iterations[::-1]
    assert restarts.newest_recorded_iteration(attempt) == 14
    commit(run, 1, 20)  # computed again: the newer line counts
    assert restarts.restart_checkpoint(run, attempt).iteration == 20


def test_a_round_before_any_checkpoint_starts_where_its_attempt_did(tmp_path: Path) -> None:
    run, other = Run(tmp_path / "run"), Run(tmp_path / "other")
    began(other, 1)
    commit(other, 1, 40)
    began(run, 1, base=40, base_path=str(other.checkpoint(40)))
    assert restarts.restart_checkpoint(run, run.attempt(1)) == ResumePoint(iteration=40, path=str(other.checkpoint(40)))


def test_a_round_whose_attempts_base_is_torn_goes_back_further_and_begin_json_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    began(run, 1)
    commit(run, 1, 10)
    commit(run, 1, 20)
    began(run, 2, base=20)
    (run.checkpoint(20) / "data").unlink()
    base = restarts.restart_checkpoint(run, run.attempt(2))
    restarts.prepare_restart(run, run.attempt(2), base, next_restart=2)
    begin = run.attempt(2).read_begin()
    assert begin is not None
    assert (begin.base_iteration, begin.base_path) == (10, str(run.checkpoint(10)))


def test_a_rollback_whose_line_its_writer_could_not_leave_keeps_its_place_before_the_round(tmp_path: Path) -> None:
    run = Run(tmp_path)
    began(run, 1)
    attempt = run.attempt(1)
    train(run, 1, 1, 15)
    commit(run, 1, 10)
    rollback = restarts.Rollback(iteration=15, reason="nan", base_iteration=10, next_sample=15, time=2e9)
    rollback.append(attempt.rollbacks)  # and then it was killed
    failed(1, base=0, durable=10).append(attempt.failed_restarts)
    restarts.prepare_restart(run, attempt, restarts.restart_checkpoint(run, attempt), next_restart=2)
    assert [line.keys() & {"rollback", "restart"} for line in read_json_lines(attempt.metrics)][-1:] == [{"rollback"}]
    train(run, 1, 11, 18)
    failed(2, base=10, durable=10).append(attempt.failed_restarts)
    restarts.prepare_restart(run, attempt, restarts.restart_checkpoint(run, attempt), next_restart=3)
    assert list(read_json_lines(attempt.metrics))[-1] == {"iteration": 10, "restart": 3}
    train(run, 1, 11, 12)
    assert [line["iteration"] for line in valid_lines(run)] == list(range(1, 13))
    before = valid_lines(run, before=(1, 1))  # the stream of trackers that ended with the rollback
    assert [line["iteration"] for line in before] == list(range(1, 16))
