"""What a rank measures of itself: its grace period, its heartbeat, its stacks, its last words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.node_health import unfinished_collectives
from relayrun.control.rundir.records import AttemptStart, Heartbeat, RankFailure
from relayrun.control.rundir.run import Run
from relayrun.train.__main__ import record_failure
from relayrun.train.reporting import liveness
from relayrun.train.reporting.liveness import NodeHeartbeatWriter, RankTimings, node_name
from tests.waiting import read_line, wait_for


def begin(**changes: Any) -> AttemptStart:
    values: dict[str, Any] = {
        "attempt": 1,
        "job_id": "1",
        "job_name": "x",
        "nodes": "n",
        "config_revision": 1,
        "base_iteration": 0,
        "base_path": None,
        "start_time": 0.0,
        "job_end_time": 1000.0,
        "grace_period": 60.0,
    }
    return AttemptStart(**(values | changes))


def after_saves(timings: RankTimings, seconds: list[float]) -> RankTimings:
    for each in seconds:
        timings.save(each)
    return timings


def test_the_lead_is_what_the_attempt_began_with_until_a_step_and_a_save_are_measured() -> None:
    timings = RankTimings(begin())
    assert timings.grace_period() == 60
    timings.step(2.0, 8)
    assert (timings.grace_period(), timings.steps_within(0.95), timings.save_p95) == (60, 2.0, None)
    timings.save(4.0)
    assert timings.grace_period() == 2 * 2 + 1.5 * 4 + 10


def test_a_slow_save_moves_the_lead_by_more_than_its_delay_and_within_the_bounds() -> None:
    timings = after_saves(RankTimings(begin(min_grace_period=5.0, max_grace_period=100.0)), [2.0] * 10)
    timings.step(0.5, 8)
    before = timings.grace_period()
    timings.save(22.0)
    assert timings.grace_period() - before >= 20
    timings.save(500.0)
    assert timings.grace_period() == 100


def test_what_is_left_of_a_save_under_way_is_part_of_the_grace_period() -> None:
    timings = after_saves(RankTimings(begin()), [20.0])
    timings.step(1.0, 8)
    alone = timings.grace_period()
    assert timings.grace_period(under_way=0.0) == alone + 20
    assert timings.grace_period(under_way=15.0) == alone + 5
    assert timings.grace_period(under_way=50.0) == alone


def test_a_lead_with_one_bound_for_both_is_fixed() -> None:
    timings = RankTimings(begin(grace_period=12.0, min_grace_period=12.0, max_grace_period=12.0))
    timings.step(100.0, 8)
    timings.save(100.0)
    assert timings.grace_period() == 12


def test_an_evaluation_that_may_be_under_way_is_counted_in() -> None:
    timings = after_saves(RankTimings(begin()), [2.0])
    timings.step(0.5, 8)
    before = timings.grace_period()
    timings.evaluation(40.0)
    assert timings.grace_period() == before + 40
    later = after_saves(RankTimings(begin(evaluation_seconds=40.0)), [2.0])  # before the first one of this attempt
    later.step(0.5, 8)
    assert later.grace_period() == before + 40
    for _ in range(10):
        later.evaluation(4.0)
    assert later.grace_period() == before + 4


def test_an_evaluation_that_was_never_measured_is_counted_with_half_a_step_for_each_batch() -> None:
    timings = RankTimings(begin(max_grace_period=300.0))
    timings.expect_evaluation(samples=800)
    assert timings.grace_period() == 60, "nothing is known before the first step"
    timings.step(2.0, 16)
    assert (timings.estimates_evaluation, timings.grace_period()) == (True, 60 + 800 / 16 * 2.0 / 2)
    timings.save(4.0)
    assert timings.grace_period() == 2 * 2 + 800 / 16 * 2.0 / 2 + 1.5 * 4 + 10
    timings.step(30.0, 16)
    assert timings.grace_period() == 300, "within the bounds"
    timings.evaluation(20.0)
    assert (timings.estimates_evaluation, timings.grace_period()) == (False, 2 * 30 + 20 + 1.5 * 4 + 10)
    fixed = RankTimings(begin(grace_period=12.0, min_grace_period=12.0, max_grace_period=12.0))
    fixed.expect_evaluation(samples=800)
    fixed.step(2.0, 16)
    assert fixed.grace_period() == 12
    known = RankTimings(begin(evaluation_seconds=40.0))
    known.expect_evaluation(samples=800)
    known.step(2.0, 16)
    assert (known.estimates_evaluation, known.grace_period()) == (False, 60)


def test_only_the_newest_saves_count() -> None:
    timings = after_saves(RankTimings(begin()), [500.0, *[2.0] * 10])
    assert timings.save_p95 == 2.0


def test_steps_of_smaller_batches_count_as_if_they_had_been_of_the_size_of_now() -> None:
    timings = after_saves(RankTimings(begin()), [2.0])
    timings.step(0.5, 8)
    timings.step(2.0, 32)
    assert (timings.steps_within(0.95), timings.grace_period()) == (2.0, 2 * 2.0 + 1.5 * 2 + 10)
    timings.step(3.0, 64)
    assert timings.steps_within(0.95) == 4.0


def read(folder: Path) -> Heartbeat:
    found = Heartbeat.read(folder / "n1.json")
    assert found is not None
    return found


def test_a_heartbeat_is_written_at_every_new_phase_and_at_most_once_a_second_within_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "heartbeat"
    clock = [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: clock[0])
    timings = RankTimings(begin())
    pulse = NodeHeartbeatWriter(folder=folder, node="n1", active=True, iteration=7, timings=timings)
    pulse.beat()
    assert (read(folder).phase, read(folder).iteration, read(folder).step_p95) == ("start", 7, None)
    timings.step(0.25, 8)
    pulse.enter("step", 8)
    assert (read(folder).phase, read(folder).iteration, read(folder).step_p95) == ("step", 8, 0.25)
    clock[0] += 0.5
    pulse.enter("step", 9)
    assert read(folder).iteration == 8
    clock[0] += 0.5
    pulse.beat()
    assert read(folder).iteration == 9
    assert abs(read(folder).time - time.time()) < 60
    pulse.enter("save", 9)
    assert read(folder).phase == "save"


def test_a_heartbeat_beside_an_agent_comes_once_a_minute_and_where_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = tmp_path / "heartbeat", [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: clock[0])
    pulse = NodeHeartbeatWriter(
        folder=folder, node="n1", active=True, iteration=7, timings=RankTimings(begin()), rare=True
    )
    pulse.beat()
    assert (read(folder).phase, read(folder).interval) == ("start", 60.0)
    pulse.enter("step", 7)
    assert (read(folder).phase, read(folder).iteration) == ("step", 7)
    for _ in range(59):
        clock[0] += 1.0
        for phase in ("step", "save", "evaluation", "step"):
            pulse.enter(phase, 8)  # type: ignore[arg-type]
    assert (read(folder).phase, read(folder).iteration) == ("step", 7)
    clock[0] += 1.0
    pulse.enter("evaluation", 9)
    assert (read(folder).phase, read(folder).iteration) == ("evaluation", 9)
    pulse.enter("start", 5)  # a rollback
    assert (read(folder).phase, read(folder).iteration) == ("start", 5)
    pulse.enter("step", 5)
    assert (read(folder).phase, read(folder).iteration) == ("step", 5)


def test_only_the_first_rank_of_a_node_writes_its_heartbeat(tmp_path: Path) -> None:
    NodeHeartbeatWriter(
        folder=tmp_path / "heartbeat", node="n1", active=False, iteration=0, timings=RankTimings(begin())
    ).beat()
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heartbeat").write_text("no folder")
    pulse = NodeHeartbeatWriter(
        folder=tmp_path / "heartbeat", node="n1", active=True, iteration=0, timings=RankTimings(begin())
    )
    pulse.enter("step", 0)
    pulse.enter("save", 0)
    assert capsys.readouterr().err.count("warning: heartbeat of n1 not written") == 1


def test_the_node_is_named_as_slurm_names_it() -> None:
    assert node_name({"SLURMD_NODENAME": "nid001"}) == "nid001"
    assert node_name({}) == os.uname().nodename


def test_sigusr1_dumps_the_stacks_of_all_threads_and_the_process_goes_on(tmp_path: Path) -> None:
    stacks = tmp_path / "debug" / "rank-0003.txt"
    program = f"""
import pathlib, sys, threading, time
from relayrun.train.requests import dump_stacks_on_request
dump_stacks_on_request(pathlib.Path({str(stacks)!r}))
def a_thread_that_waits(): time.sleep(600)
threading.Thread(target=a_thread_that_waits, daemon=True).start()
def the_main_thread_waits(): sys.stdin.read()
print("ready", flush=True)
the_main_thread_waits()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    read_line(process)

    def dumped() -> bool:  # the signal may come before the read does
        process.send_signal(signal.SIGUSR1)
        return "the_main_thread_waits" in stacks.read_text()

    wait_for(dumped, step=0.05)
    assert "a_thread_that_waits" in stacks.read_text()
    process.communicate(timeout=300)
    assert process.returncode == 0


@pytest.mark.slow
def test_sigusr1_dumps_the_collective_in_which_a_rank_hangs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = f"""
import os, pathlib, sys
from relayrun.train.requests import dump_stacks_on_request
rank = int(sys.argv[1])
dump_stacks_on_request(pathlib.Path({str(tmp_path)!r}) / f"rank-{{rank:04}}.txt")
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
tensor = torch.ones(3)
group = dist.new_group(group_desc="PAIR")
for _ in range(3):
    dist.all_reduce(tensor, group=group)
print("ready", flush=True)
if rank:
    sys.stdin.read()
dist.all_reduce(tensor, group=group)
os._exit(0)  # as a rank ends: Python would end the thread that dumps in the midst of torch's C++, and abort
"""
    command, environment = [sys.executable, "-c", program], os.environ | {"TORCH_FR_BUFFER_SIZE": "2000"}
    ranks = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for rank in range(2)
    ]
    for process in ranks:
        read_line(process)

    def dumped() -> bool:
        for process in ranks:
            process.send_signal(signal.SIGUSR1)
        return unfinished_collectives(tmp_path) == {"0": "all_reduce 4 of PAIR"}

    wait_for(dumped, step=0.1)
    assert "all_reduce" in (tmp_path / "rank-0000.txt").read_text()
    for process in reversed(ranks):  # both go on
        process.communicate(timeout=300)
    assert [process.returncode for process in ranks] == [0, 0]


def test_a_failure_names_rank_node_and_error(tmp_path: Path) -> None:
    attempt = Run(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    record_failure(attempt, 12, "n3", RuntimeError("out of memory"))
    found = RankFailure.of(json.loads((attempt.failures / "rank-0012.json").read_text()))
    assert (found.rank, found.node, found.error) == (12, "n3", "RuntimeError: out of memory")
