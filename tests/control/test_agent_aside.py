"""What an agent does beside its one thread, so that nothing that hangs stops its heartbeats."""

from __future__ import annotations

import os
import selectors
import threading
import time
from pathlib import Path

import pytest

from relayrun.control import job_log
from relayrun.control.agent.health import BackgroundWork
from relayrun.control.job_log import AgentLog
from tests.waiting import wait_for


def turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0.05):
        key.data()


def test_a_result_comes_in_the_thread_that_asked() -> None:
    selector = selectors.DefaultSelector()
    aside, found = BackgroundWork(selector), list[tuple[str, int]]()
    for number in range(3):
        aside.start(
            lambda: "done",
            lambda words: found.append((words, threading.get_ident())),
            seconds=60 + number,
            otherwise=lambda words: words,
        )
    wait_for(lambda: len(found) == 3 or turn(selector), step=0.0)
    assert found == [("done", threading.get_ident())] * 3


def test_what_raises_and_what_takes_too_long_are_told_in_words() -> None:
    selector, hung = selectors.DefaultSelector(), threading.Event()
    aside, found, threads = BackgroundWork(selector), list[str](), list[threading.Thread]()

    def wait() -> str:
        threads.append(threading.current_thread())
        hung.wait(600)
        return "late"

    def fail() -> str:
        raise OSError("Stale file handle")

    for work, seconds in ((fail, 300.0), (wait, 0.2)):
        aside.start(work, found.append, seconds=seconds, otherwise=lambda words: words)
    wait_for(lambda: len(found) == 2 or turn(selector) or aside.attend(), step=0.0)
    assert sorted(found) == ["OSError: Stale file handle", "no answer within 0.2 s"]
    wait_for(lambda: threads)
    hung.set()
    threads[0].join(300)
    turn(selector)
    assert len(found) == 2


def test_a_log_whose_file_system_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "hung")  # opening it waits for a reader
    log, began = AgentLog(tmp_path / "hung"), time.monotonic()
    for number in range(1000):
        log.write(str(number))
    log.finish()
    assert job_log.LOG_FINISH_SECONDS <= time.monotonic() - began < job_log.LOG_FINISH_SECONDS + 60
    monkeypatch.setattr(job_log, "LOG_FINISH_SECONDS", 300.0)
    whole = AgentLog(tmp_path / "log")
    for number in range(1000):
        whole.write(str(number))
    whole.finish()
    assert (tmp_path / "log").read_text().splitlines() == [str(number) for number in range(1000)]
