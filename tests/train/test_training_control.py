"""What makes the ranks save or leave, as rank 0 sees it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.agent import requests
from relayrun.control.rundir import triggers
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart, ChangedJobEnd
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.train.hooks import Step
from relayrun.train.reporting.metrics import Metrics
from relayrun.train.requests import AgreedRequests, RequestPoller, SignalFlag
from tests.waiting import wait_for


class OneRank:
    """A world of one; `others` is what another rank would add to an agreement."""

    rank = 0

    def __init__(self) -> None:
        self.others: list[int] | None = None

    def maximum(self, flags: list[int]) -> list[int]:
        return [max(pair) for pair in zip(flags, self.others or flags, strict=True)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.attempt(1).path.mkdir(parents=True)
    triggers.create_trigger_folder(run)
    return run


def control(
    run: Run, ranks: Any = None, flag: SignalFlag | None = None, agent: Path | None = None, **changes: Any
) -> RequestPoller:
    values: dict[str, Any] = {
        "attempt": 1,
        "job_id": "1",
        "job_name": "x",
        "nodes": "n",
        "config_revision": 1,
        "base_iteration": 0,
        "base_path": None,
        "start_time": 0.0,
        "job_end_time": None,
        "grace_period": 0.0,
    }
    begin = AttemptStart(**(values | changes))
    return RequestPoller(run, begin, ranks or OneRank(), flag or SignalFlag(), agent=agent)


def test_without_a_reason_training_goes_on(run: Run) -> None:
    assert control(run).poll() == AgreedRequests()


def test_the_deadline_is_the_end_of_the_job_less_the_grace_period(run: Run) -> None:
    now = time.time()
    assert control(run, job_end_time=now + 100, grace_period=50.0).poll() == AgreedRequests()
    assert control(run, job_end_time=now + 100, grace_period=100.0).poll() == AgreedRequests(
        leave="saved", reason="time limit near"
    )


def test_a_job_that_was_extended_uses_its_time(run: Run) -> None:
    now = time.time()
    polled = control(run, job_end_time=now + 10, grace_period=50.0)
    for later in (now + 100, None):
        ChangedJobEnd(time=later, why="").write(run.attempt(1).job_end)
        assert polled.poll() == AgreedRequests()
    ChangedJobEnd(time=now + 20, why="").write(run.attempt(1).job_end)
    assert control(run, job_end_time=now + 10, grace_period=50.0).poll().leave == "saved"
    run.attempt(1).job_end.write_text("{")
    assert control(run, job_end_time=now + 10, grace_period=50.0).poll().leave == "saved"


def test_the_deadline_moves_with_the_grace_period(run: Run) -> None:
    watching = control(run, job_end_time=time.time() + 100, grace_period=50.0)
    assert watching.poll() == AgreedRequests()
    watching.grace_period = 101.0
    assert watching.poll() == AgreedRequests(leave="saved", reason="time limit near")


@pytest.mark.parametrize(("text", "reason"), [("asked\n", "stop file: asked"), ("", "stop file")])
def test_the_stop_file_says_why(run: Run, text: str, reason: str) -> None:
    run.attempt(1).stop.write_text(text)
    assert control(run).poll() == AgreedRequests(leave="saved", reason=reason)


def test_a_file_system_that_fails_hides_neither_the_deadline_nor_stops_training(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(triggers, "read_trigger", fail)
    assert control(run).poll() == AgreedRequests()
    assert control(run, job_end_time=1.0).poll() == AgreedRequests(leave="saved", reason="time limit near")
    assert capsys.readouterr().err.count("Stale file handle") == 2


def test_a_signal_to_any_rank_is_named(run: Run) -> None:
    ranks = OneRank()
    ranks.others = [signal.SIGTERM.value, 0, 0, 0, 0]
    assert control(run, ranks).poll() == AgreedRequests(leave="saved", reason="SIGTERM")


def test_the_exit_trigger_ends_the_chain_whatever_else_there_is(run: Run) -> None:
    run.attempt(1).stop.write_text("asked")
    triggers.touch_trigger(run, "exit")
    seen = control(run).poll()
    assert seen.leave == "exit"
    assert seen.reason.startswith("exit trigger by ")


def test_a_save_trigger_is_answered_once_although_it_cannot_be_removed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "save.done")

    watching = control(run)
    triggers.touch_trigger(run, "save")
    monkeypatch.setattr(triggers, "acknowledge_trigger", refuse)
    assert watching.poll() == AgreedRequests(save=True)
    watching.acknowledge(watching.take(), 5, "saved")
    assert "trigger save not acknowledged" in capsys.readouterr().err
    assert watching.poll() == AgreedRequests()
    os.utime(run.triggers / "save", (1, 1))  # touched again
    assert watching.poll() == AgreedRequests(save=True)


def test_a_save_is_over_when_it_is_over_on_every_rank(run: Run) -> None:
    ranks = OneRank()
    assert control(run, ranks).poll(saving=True) == AgreedRequests(saving=True)
    assert control(run, ranks).poll() == AgreedRequests()
    ranks.others = [0, 0, 0, 0, 1]
    assert control(run, ranks).poll() == AgreedRequests(saving=True)


def test_a_trigger_that_was_taken_is_not_seen_again_before_it_is_answered(run: Run) -> None:
    watching = control(run)
    triggers.touch_trigger(run, "save")
    assert watching.poll() == AgreedRequests(save=True)
    taken = watching.take()
    assert (run.triggers / "save").exists()
    assert watching.poll() == AgreedRequests()
    watching.acknowledge(taken, 5, "saved")
    assert not (run.triggers / "save").exists()


def test_beside_an_agent_files_are_left_alone_while_it_says_that_nothing_is_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, memory = [100.0], tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(requests.time, "monotonic", lambda: clock[0])
    watching = control(run, agent=memory)
    triggers.touch_trigger(run, "save")
    assert watching.poll() == AgreedRequests(save=True)  # without a word it looks itself
    requests.tell_ranks(memory, asked=False)
    assert watching.poll() == AgreedRequests()
    clock[0] += requests.MARK_VALID_SECONDS - 1
    assert watching.poll() == AgreedRequests()
    clock[0] += 1  # who looks for it stands still
    assert watching.poll() == AgreedRequests(save=True)
    requests.tell_ranks(memory, asked=False)
    assert watching.poll() == AgreedRequests()
    requests.tell_ranks(memory, asked=True)
    assert watching.poll() == AgreedRequests(), "it has just looked"
    clock[0] += requests.LOOK_SECONDS
    assert watching.poll() == AgreedRequests(save=True)
    assert watching.poll() == AgreedRequests(save=True), "what was seen holds until it is taken"
    watching.acknowledge(watching.take(), 5, "saved")
    assert watching.poll() == AgreedRequests()
    run.attempt(1).stop.write_text("asked")
    clock[0] += requests.LOOK_SECONDS
    assert watching.poll() == AgreedRequests(leave="saved", reason="stop file: asked")


def test_beside_an_agent_the_deadline_and_signals_need_no_files(run: Run, tmp_path: Path) -> None:
    flag = SignalFlag()
    watching = control(run, flag=flag, agent=tmp_path, job_end_time=time.time() + 100, grace_period=50.0)
    requests.tell_ranks(tmp_path, asked=False)
    assert watching.poll() == AgreedRequests()
    watching.grace_period = 101.0
    assert watching.poll() == AgreedRequests(leave="saved", reason="time limit near")
    watching.grace_period = 50.0
    flag.received = signal.SIGUSR2
    assert watching.poll() == AgreedRequests(leave="saved", reason="SIGUSR2")


def test_a_handler_does_nothing_in_a_forked_child() -> None:
    flag = SignalFlag()
    old = [(number, signal.getsignal(number)) for number in (signal.SIGUSR2, signal.SIGTERM)]
    flag.install()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0 if flag.received is None else 1)
        ended = wait_for(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found)
        assert ended == (child, 0)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert flag.received is signal.SIGUSR2
    finally:
        for number, handler in old:
            signal.signal(number, handler)


def step(iteration: int) -> Step:
    return Step(
        iteration=iteration,
        loss=1 / 3,
        grad_norm=0.1 + 0.2,
        lr=1e-3,
        consumed_samples=8 * iteration,
        consumed_tokens=512 * iteration,
        global_batch_size=8,
        tokens_per_second=1.0,
        step_seconds=1.0,
        data_seconds=0.0,
        forward_backward_seconds=0.5,
        optimizer_seconds=0.5,
        save_seconds=0.0,
        model_tflops_per_gpu=1.0,
        mfu=None,
        memory_bytes=1,
        time=0.0,
    )


def test_metrics_keep_every_bit_of_a_float(tmp_path: Path) -> None:
    metrics = Metrics(Attempt(str(tmp_path)), OneRank(), total_steps=1)  # type: ignore[arg-type]
    metrics.after_step(step(1))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"].hex() == (1 / 3).hex()
    assert line["grad_norm"].hex() == (0.1 + 0.2).hex()


def test_metrics_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(Attempt(str(tmp_path)), OneRank(), total_steps=3)  # type: ignore[arg-type]
    metrics.after_step(step(1))
    path.rename(tmp_path / "aside")
    path.mkdir()  # as good as a full disk
    metrics.after_step(step(2))
    metrics.after_failed_save(2, "no space")
    path.rmdir()
    (tmp_path / "aside").rename(path)
    metrics.after_step(step(3))
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert [line["error"] for line in read_json_lines(Attempt(str(tmp_path)).failed_saves)] == ["no space"]
