"""Where ranks stand: what they write, what their agent reads, and what is judged a hang."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

from relayrun.control.agent import hang_detection as pages
from relayrun.control.agent.hang_detection import ActivityPage, HangDetector, RankActivity, hang_record
from relayrun.control.rundir.records import Hang
from relayrun.train.reporting import liveness
from relayrun.train.reporting.liveness import RankTimings, SectionReporter
from tests.train.test_training_timings import begin
from tests.waiting import wait_for

HANG = 300.0


def stands(
    rank: int, *, entered: int = 9, section: str = "forward", seconds: float = 61.0, **other: object
) -> RankActivity:
    values = {"iteration": 4, "limit": 60.0, "state": ""} | other
    return RankActivity(rank=rank, entered=entered, section=section, seconds=seconds, **values)  # type: ignore[arg-type]


def judged(*found: RankActivity) -> bool:
    """Two nodes with two ranks each."""
    hangs = HangDetector()
    hangs.hear(0, [tuple(one) for one in found[:2]])
    hangs.hear(5, [tuple(one) for one in found[2:]])
    return hangs.judge([0, 5], ranks=4) is not None


def test_ranks_that_stand_still_for_longer_than_the_limit_hang() -> None:
    assert judged(*(stands(rank) for rank in range(4)))


@pytest.mark.parametrize(
    "other",
    [
        stands(3, seconds=59.0),  # it came further
        stands(3, seconds=61.0, section="data", limit=120.0),  # the others wait for it, and it may read for longer
    ],
)
def test_one_that_may_still_come_further_is_waited_for(other: RankActivity) -> None:
    assert not judged(*(stands(rank) for rank in range(3)), other)


def test_a_rank_of_which_nothing_is_known_is_waited_for() -> None:
    hangs = HangDetector()
    hangs.hear(0, [stands(0), stands(1)])
    hangs.hear(5, [stands(2)])
    assert hangs.judge([0, 5], ranks=4) is None
    hangs.hear(5, [stands(2), stands(3)])
    assert hangs.judge([0, 5], ranks=4) is not None
    hangs.hear(5, None)
    assert hangs.judge([0, 5], ranks=4) is None
    assert hangs.judge([0], ranks=2) is not None, "a spare node has no say"


@pytest.mark.parametrize(
    ("found", "culprit", "words"),
    [
        ([stands(0), stands(1, state="stopped")], 1, "others wait for rank 1 in forward, stopped"),
        (
            [stands(0), stands(1, entered=8, section="data")],
            1,
            "in data after iteration 4; all ranks answered, others",
        ),
        (
            [stands(0, entered=8), stands(1, state="waiting in the kernel")],
            1,
            "rank 1 in forward, waiting in the kernel",
        ),
        ([stands(0), stands(1)], None, "in forward after iteration 4; all ranks answered"),
    ],
)
def test_the_late_rank_is_named(tmp_path: Path, found: list[RankActivity], culprit: int | None, words: str) -> None:
    for one in found:
        (tmp_path / f"rank-{one.rank:04}.txt").write_text("answered")
    hang = hang_record(found, tmp_path)
    assert hang.culprit == culprit
    assert words in hang.words


def test_the_collectives_that_ranks_wait_in_are_named_with_the_file(tmp_path: Path) -> None:
    found = [stands(rank) for rank in range(3)]
    for rank in range(3):
        (tmp_path / f"rank-{rank:04}.txt").write_text("answered")
        entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 57, "is_p2p": False}
        entries = [] if rank == 1 else [entry | {"process_group": ["3", "TP"]}]
        (tmp_path / f"collectives-{rank:04}.json").write_text(json.dumps(entries))
    hang = hang_record(found, tmp_path)
    hang.write(tmp_path / "hang.json")
    assert Hang.read(tmp_path / "hang.json") == hang
    assert hang.words.endswith("; by stacks/collectives-RANK.json ranks 0, 2 wait in all_reduce 57 of TP")


def test_ranks_that_do_not_answer_are_named(tmp_path: Path) -> None:
    (tmp_path / "rank-0000.txt").write_text("answered")
    hang = hang_record([stands(0), stands(1)], tmp_path)
    assert (hang.silent, hang.culprit) == ([1], 1)


def test_a_page_says_where_its_rank_is_and_whether_its_process_does_anything(tmp_path: Path) -> None:
    assert pages.read_activity(tmp_path, range(2)) == []
    page = ActivityPage(tmp_path, 1)
    assert pages.read_activity(tmp_path, range(2)) == [], "it has entered nothing yet"
    page.enter("data", 7, 120.0)
    page.enter("forward", 7, 60.0)
    (one,) = pages.read_activity(tmp_path, range(2))
    assert (one.rank, one.entered, one.section, one.iteration, one.limit, one.state) == (1, 2, "forward", 7, 60.0, "")
    assert 0 <= one.seconds < 60
    time.sleep(0.02)
    before = pages.read_activity(tmp_path, [1])[0].seconds
    page.touch()
    (one,) = pages.read_activity(tmp_path, [1])
    assert before >= 0.02
    assert (one.entered, one.section) == (2, "forward")
    pages.remove_pages(tmp_path)
    assert pages.read_activity(tmp_path, [1]) == []


def test_a_stopped_process_is_seen(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        ActivityPage(tmp_path, 0).enter("forward", 1, 60.0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    wait_for(lambda: os.waitpid(pid, os.WUNTRACED | os.WNOHANG)[0])
    assert pages.read_activity(tmp_path, [0])[0].state == "stopped"
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0])
    assert pages.read_activity(tmp_path, [0])[0].state == "dead"


@pytest.mark.parametrize("section", [pages.SET_UP, "start", "forward"])
def test_a_rank_that_is_stopped_before_its_first_step_hangs_after_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    """Those that wait for it may wait for as long as they like; its own program has entered no section yet."""
    monkeypatch.setattr(pages, "STOPPED_SECONDS", 0.2)
    pid = os.fork()
    if pid == 0:
        ActivityPage(tmp_path, 1).enter(section, 0, math.inf)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    wait_for(lambda: os.waitpid(pid, os.WUNTRACED | os.WNOHANG)[0])
    ActivityPage(tmp_path, 0).enter(section, 0, math.inf)
    stopped, hangs = pages.StoppedProcesses(), HangDetector()

    def judge() -> bool:
        hangs.hear(0, json.loads(json.dumps(pages.read_activity(tmp_path, [0, 1], stopped))))
        return hangs.judge([0], ranks=2) is not None

    assert not judge()
    time.sleep(0.3)
    assert judge() == (section != "forward")
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0])


def test_a_rank_that_runs_or_takes_cpu_time_now_and_then_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopped = pages.StoppedProcesses()
    waits = "waiting in the kernel"
    seen = [(0, "", 5), (50, waits, 5), (40, waits, 5), (1, waits, 6), (80, waits, 6), (40, "", 6)]
    found = []
    for seconds, state, ticks in seen:
        now[0] += seconds
        found.append(stopped.seconds(7, state, ticks))
    assert found == [0, 50, 90, 0, 80, 0]


def test_a_page_that_the_process_has_made_before_goes_on(tmp_path: Path) -> None:
    ActivityPage(tmp_path, 0).enter(pages.SET_UP, 0, math.inf)
    page = ActivityPage(tmp_path, 0)
    (one,) = pages.read_activity(tmp_path, [0])
    assert (one.section, one.entered, one.limit) == (pages.SET_UP, 1, math.inf)
    page.enter("data", 7, 120.0)
    (one,) = pages.read_activity(tmp_path, [0])
    assert (one.section, one.entered, one.limit) == ("data", 2, 120.0)


def measured(step_seconds: float, save_seconds: float | None, *, steps: int = 40) -> RankTimings:
    timings = RankTimings(begin())
    for _ in range(steps):
        timings.step(step_seconds, 8)
    if save_seconds is not None:
        timings.save(save_seconds)
    return timings


@pytest.mark.parametrize(
    ("section", "step", "save", "limit"),
    [
        ("forward", 0.2, None, 60.0),
        ("optimizer", 20.0, None, 200.0),
        ("data", 0.2, None, 120.0),
        ("triggers", 0.2, None, 120.0),
        ("evaluation", 30.0, None, 300.0),
        ("save", 0.2, 3.0, 120.0),
        ("save", 0.2, 60.0, 600.0),
        ("save", 0.2, None, HANG),  # none is measured
        ("hooks", 0.2, 3.0, HANG),
        ("start", 0.2, 3.0, float("inf")),
    ],
)
def test_each_section_has_its_limit(section: str, step: float, save: float | None, limit: float) -> None:
    found = SectionReporter(None, 0, timings=measured(step, save), hang_timeout=HANG)
    assert found.limit(section) == limit


def test_limits_begin_with_measured_steps_and_follow_them() -> None:
    timings = measured(0.2, None, steps=liveness.MEASURED_STEPS - 1)
    found = SectionReporter(None, 0, timings=timings, hang_timeout=HANG)
    assert found.limit("forward") == HANG
    timings.step(0.2, 8)
    assert found.limit("forward") == 60.0
    for _ in range(liveness.MEASURED_STEPS):
        timings.step(12.0, 8)
    assert found.limit("forward") == 120.0
    assert SectionReporter(None, 0, timings=timings, hang_timeout=5.0).limit("data") == 120.0, "ten usual steps"
    assert SectionReporter(None, 0, timings=measured(0.1, None), hang_timeout=5.0).limit("data") == 5.0


def test_a_section_within_another_gives_it_back(tmp_path: Path) -> None:
    found = SectionReporter(tmp_path, 0, timings=measured(0.2, 1.0), hang_timeout=HANG)
    found.enter("optimizer", 6)
    with found.within("save"):
        assert pages.read_activity(tmp_path, [0])[0].section == "save"
    (one,) = pages.read_activity(tmp_path, [0])
    assert (one.section, one.iteration, one.entered) == ("optimizer", 6, 3)


def test_no_page_where_there_is_no_room_or_no_agent(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "missing"):
        found = SectionReporter(folder, 0, timings=measured(0.2, 1.0), hang_timeout=HANG)
        found.enter("data", 1)
        found.touch()
    assert list(tmp_path.iterdir()) == []
