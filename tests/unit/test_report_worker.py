"""The pages of `relayrun report --serve` where the process that makes one is killed, or a file is away for a while."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.watch.report import live_server
from relayrun.watch.report.live_server import ReportWorker
from tests.history import make_history
from tests.unit.test_report_server import asked
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")  # without Slurm's commands
    run = make_history(tmp_path / "runs/ada/llama3-1b", lines=30, attempts=3)
    shutil.rmtree(run.path / "local")
    return run


@pytest.fixture
def worker() -> Iterator[ReportWorker]:
    worker = ReportWorker(nothing)
    yield worker
    worker.end()
    assert not multiprocessing.active_children()


def test_an_end_may_come_while_it_begins(worker: ReportWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does, while a page is asked for."""
    real, enders = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", real)
        enders.append(threading.Thread(target=worker.end))
        enders[0].start()
        time.sleep(0.5)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    made = worker.begin(fails, "KeyError")
    enders[0].join(300)
    assert not enders[0].is_alive()
    assert isinstance(made.exception(300), (KeyError, RelayrunError))
    with pytest.raises(RelayrunError, match="the server has ended"):
        worker.begin(fails, "KeyError").result(300)


def nothing() -> None:
    """Prepare nothing."""


def fails(kind: str) -> str:
    raise {"OSError": OSError(5, "away"), "KeyError": KeyError("x")}[kind]


def sleeps(path: str) -> str:
    """Write who it is, and stay."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
    return ""


def pid_in(path: Path) -> int:
    return int(wait_for(lambda: path.exists() and path.read_text(), words=f"{path} is written"))


def test_a_process_that_is_killed_ends_what_it_made_and_the_next_one_is_made(
    worker: ReportWorker, tmp_path: Path
) -> None:
    first = worker.begin(sleeps, str(tmp_path / "pid"))
    second = worker.begin(str, 2)
    os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RelayrunError, match=r"the process that made it has ended \(killed by SIGKILL\)"):
        first.result(300)
    assert second.result(300) == "2"
    assert time.monotonic() - began < 500
    (child,) = multiprocessing.active_children()
    child.kill()  # while it has nothing to do
    child.join(300)
    assert worker.begin(str, 3).result(300) == "3"


def test_what_fails_there_is_raised_here(worker: ReportWorker) -> None:
    with pytest.raises(OSError, match="away"):
        worker.begin(fails, "OSError").result(300)
    with pytest.raises(KeyError) as error:
        worker.begin(fails, "KeyError").result(300)
    assert any("in fails" in note for note in error.value.__notes__)  # where it happened


def test_an_end_does_not_wait(tmp_path: Path) -> None:
    worker = ReportWorker(nothing)
    under_way, waiting = worker.begin(sleeps, str(tmp_path / "pid")), worker.begin(str, 2)
    pid_in(tmp_path / "pid")
    began = time.monotonic()
    worker.end()
    assert time.monotonic() - began < 300
    for each in (under_way, waiting):
        with pytest.raises(RelayrunError):
            each.result(300)
    assert not multiprocessing.active_children()


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, live_server.ReportGallery]]:
    with live_server.serve_reports(folder, port=0) as (address, serving):
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield address, serving.gallery
        finally:
            serving.shutdown()
            thread.join(300)


def test_a_report_whose_process_is_killed_is_answered_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_server, "SUMMARY_SECONDS", 0.0)
    with served(tmp_path / "runs") as (address, gallery):
        real = gallery._reporter.begin
        monkeypatch.setattr(gallery._reporter, "begin", lambda *_: real(sleeps, str(tmp_path / "pid")))
        answers: list[tuple[int, str]] = []
        asking = threading.Thread(target=lambda: answers.append(asked(address, "/KEY/run/ada/llama3-1b")), daemon=True)
        asking.start()
        os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)
        asking.join(300)
        ((status, text),) = answers
        assert status == 500
        assert "killed by SIGKILL" in text
        monkeypatch.setattr(gallery._reporter, "begin", real)
        assert asked(address, "/KEY/run/ada/llama3-1b")[0] == 200


def made(value: str | Exception) -> Future[str]:
    found: Future[str] = Future()
    if isinstance(value, str):
        found.set_result(value)
    else:
        found.set_exception(value)
    return found


def test_an_error_that_passes_is_no_answer_for_ever(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has ended and changes no more; its file system was away for a moment."""
    gallery = live_server.ReportGallery(tmp_path / "runs")
    answers: list[Any] = [OSError(116, "Stale file handle"), "a page"]
    for worker in ("_reporter", "_reckoner"):
        left = list(answers)
        monkeypatch.setattr(getattr(gallery, worker), "begin", lambda *_, left=left: made(left.pop(0)))
    with pytest.raises(OSError, match="Stale"):
        gallery.report("ada/llama3-1b")
    with pytest.raises(OSError, match="Stale"):
        gallery.report("ada/llama3-1b")  # not tried again at once for all who ask
    monkeypatch.setattr(live_server, "SUMMARY_SECONDS", 0.0)
    assert gallery.report("ada/llama3-1b") == "a page"
    assert gallery.report("ada/llama3-1b") == "a page"
    _, names = gallery.overview(1) or ("", [])
    gallery.reckon(names)
    assert "a page" not in (gallery.overview(1) or ("", []))[0]
    gallery.reckon(names)
    assert "a page" in (gallery.overview(1) or ("", []))[0]


def test_goodput_says_what_passes_from_what_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live_server._goodput_of(str(run.path)).endswith("%")
    monkeypatch.setattr(Run, "attempt_numbers", lambda _: fails("OSError"))
    with pytest.raises(OSError, match="away"):
        live_server._goodput_of(str(run.path))
    run.plan.write_text("{")
    assert live_server._goodput_of(str(run.path)) == ""


def test_the_folder_of_one_run_is_served_too(run: Run) -> None:
    with served(run.path) as (address, _):
        status, text = asked(address, "/KEY/")
        assert status == 200
        assert 'href="run/llama3-1b"' in text
        assert asked(address, "/KEY/run/llama3-1b")[0] == 200


def test_a_run_may_be_named_as_elsewhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "runs").rename(tmp_path / "logs/runs")
    (tmp_path / ".relayrun").touch()
    monkeypatch.chdir(tmp_path)
    shown: list[Path] = []
    monkeypatch.setattr(live_server, "serve_reports", lambda folder, **_: shown.append(folder) or raises())
    assert main(["report", "ada/llama3-1b", "--serve"]) == 1
    assert shown == [tmp_path / "logs/runs/ada/llama3-1b"]


def raises() -> None:
    raise RelayrunError("not here")
