"""`relayrun logs`: what the jobs of a chain wrote, and what they add."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun import files
from relayrun.cli import main
from relayrun.cli.watch import logs
from relayrun.control.rundir.records import ChainEnd, RankFailure
from relayrun.control.rundir.run import Run, write_stop
from relayrun.watch import follow
from tests.history import began
from tests.waiting import read_line

from .conftest import MakeRun
from .test_local_chain import run_chain

ROOT = Path(__file__).resolve().parents[2]


def write_log(run: Run, attempt: int, *, out: str = "", err: str = "") -> Path:
    """The two log files of an attempt that has begun; returns that of the standard error."""
    began(run, attempt, base=0)
    path = run.path.parent / f"job-{attempt}.err"
    record = run.attempt(attempt).begin
    record.write_text(record.read_text().replace('"log": null', f'"log": "{path}"'))
    path.write_text(err)
    path.with_suffix(".out").write_text(out)
    return path


@pytest.mark.slow
def test_the_jobs_of_a_chain_can_be_read_one_by_one(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run, plan = make_run("--fatal-at=3")
    run_chain(run, plan)
    run.stop.unlink()
    replace(plan, submitted_after_attempt=1).write(run.plan)  # as a submit does
    run_chain(run, plan)
    assert len(run.attempt_numbers()) > 1
    for number in (1, run.attempt_numbers()[-1]):
        capsys.readouterr()
        assert main(["logs", str(run.path), "--attempt", str(number)]) == 0
        begin = run.attempt(number).read_begin()
        assert begin is not None
        assert begin.log is not None
        shown = capsys.readouterr().out
        assert Path(begin.log).read_text() in shown
        assert f"==> {begin.log} <==" in shown
        assert f"==> {begin.log.removesuffix('.err')}.out <==" in shown
    assert main(["logs", str(run.path)]) == 0
    assert capsys.readouterr().out == shown
    assert main(["logs", str(run.path), "--attempt", "99"]) == 1
    assert "this run has no attempt 99; there are: 1 to" in capsys.readouterr().err


def test_a_job_that_died_before_it_began_has_a_log_too(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run, plan = make_run()
    assert main(["logs", str(run.path)]) == 1
    assert "no job of this run has written a log" in capsys.readouterr().err
    folder = Path(plan.log_folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{plan.job_name}-41.err").write_text("python3: not found\n")
    (folder / f"{plan.job_name}-evaluation-42.err").write_text("another job's\n")
    assert main(["logs", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "python3: not found" in shown
    assert "another job's" not in shown


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_the_last_lines_are_those_of_the_end(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_BLOCK", 7)
    lines = [f"line {number} {'x' * (number % 23)}\n" for number in range(40)]
    (tmp_path / "log").write_text("".join(lines) + "torn")
    text, size = files.last_lines(tmp_path / "log", count)
    assert text.decode() == "".join([*lines, "torn"][-count:] if count else [])
    assert size == (tmp_path / "log").stat().st_size


def test_a_line_of_a_progress_bar_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_BLOCK", 7)
    lines = [b"%d%%\r%d%%\n" % (number, number + 1) for number in range(50)]
    (tmp_path / "log").write_bytes(b"".join(lines))
    assert files.last_lines(tmp_path / "log", 3)[0] == b"".join(lines[-3:])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"loss 1\r\nloss 2\r\n", "loss 1\nloss 2\n"),
        (b"\r 1%\r 2%\r 3%\r\nsaved\n", " 3%\nsaved\n"),
        (b" 1%\r 2%\r", " 2%\n"),
        (b"a\r\r\n\nb", "a\n\nb"),
        (b"\x1b[31mstep: 12\x1b[0m \x1b[2K\x1b[1;32mloss\x1b[m\n", "step: 12 loss\n"),
        ("é\n".encode() + "chaîne\n".encode("latin-1"), "é\nchaîne\n"),
        (b"title \x1b]0;mine\x07\n", "title \x1b]0;mine\x07\n"),  # made visible by the stream
    ],
)
def test_a_log_reads_as_a_terminal_shows_it(text: bytes, shown: str) -> None:
    assert logs.readable_log(text) == shown


def test_a_bar_that_is_followed_shows_whole_states_each_on_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    log = write_log(run, 1, err=" 1%\r 2%\r 3")
    following, printer = follow.ChainLogFollower(run), logs.LogPrinter()
    for added in ("%\r 4%", "", "\r 5%\r", "\ndone", " it is\n"):
        for path, part in following.poll():
            printer.print(path, part)
        with open(log, "a") as file:
            file.write(added)
    for path, part in following.poll():
        printer.print(path, part)
    assert capsys.readouterr().out == f"==> {log} <==\n 2%\n 3%\n 4%\n 5%\ndone it is\n"


def test_a_terminal_without_unicode_shows_what_it_can(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    write_log(run, 1, err="épochs \u2013 fini\n")
    run.manifest.write_text("{}")
    command = [sys.executable, "-m", "relayrun", "logs", str(run.path)]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert "épochs \\u2013 fini\n".encode("latin-1") in done.stdout


@pytest.mark.parametrize("content", ["progress bar", "one line", "sparse"])
def test_a_log_without_lines_is_shown_in_bounded_time_and_memory(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of a log of 188 MB took more than 200 s, and of a sparse one of 10 GB more."""
    run = Run(tmp_path / "run")
    log = write_log(run, 1)
    run.manifest.write_text("{}")
    bar = b"\r 10%|####      | 1/10" if content == "progress bar" else b" 10%|####      | 1/10"
    with open(log, "wb") as file:  # a hole of 10 GB, or 300 MB, of which the last 100 MB are no hole
        file.truncate(10 << 30 if content == "sparse" else 200 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"" if content == "sparse" else bar * (100_000_000 // len(bar)))
    began = time.process_time()
    assert main(["logs", str(run.path)]) == 0
    assert time.process_time() - began < 1
    capsys.readouterr()
    tracemalloc.start()
    assert main(["logs", str(run.path)]) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20
    shown = capsys.readouterr().out
    assert len(shown.encode()) < 10 << 20
    if content == "progress bar":
        assert shown.count("10%|####      | 1/10") == 1  # its last state


def test_a_log_that_grows_much_is_followed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    log = write_log(run, 1, err="é" * 50 + "\x1b[1m")
    monkeypatch.setattr(follow, "MAX_POLL_BYTES", 9)
    following = follow.ChainLogFollower(run)
    parts = [part for _ in range(20) for _, part in following.poll()]
    assert b"".join(parts) == log.read_bytes()
    assert all(part.decode() and len(part) <= 9 for part in parts)  # whole characters


def test_following_goes_on_from_job_to_job_and_misses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    first = write_log(run, 1, out="a", err="b")
    following = follow.ChainLogFollower(run)
    assert following.poll() == [(first.with_suffix(".out"), b"a"), (first, b"b")]
    assert following.poll() == []
    with open(first, "a") as file:
        file.write("the last words\n")
    second = write_log(run, 2, out="c")
    assert following.poll() == [(first, b"the last words\n"), (second.with_suffix(".out"), b"c")]
    second.with_suffix(".out").write_text("")  # cut off
    assert following.poll() == []
    second.with_suffix(".out").write_text("d")
    assert following.poll() == [(second.with_suffix(".out"), b"d")]


@pytest.mark.slow
def test_following_ends_with_the_chain(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    log = write_log(run, 1, err="first\n")
    run.manifest.write_text("{}")
    run.plan.write_text('{"format": 2}')
    command = [sys.executable, "-m", "relayrun", "logs", "-f", str(run.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = iter(lambda: read_line(process), "")
        assert "first\n" in lines
        with open(log, "a") as file:
            file.write("second\n")
        write_stop(run, ChainEnd("done", "all 20 iterations are done"))
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert out.splitlines() == ["second"]
    assert err == "the chain has ended: all 20 iterations are done\n"


def test_one_ranks_last_words_and_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run")
    write_log(run, 3)
    run.attempt(3).failures.mkdir()
    run.manifest.write_text("{}")
    RankFailure(rank=12, node="n3", error="ValueError: no such token", time=1.0).write(
        run.attempt(3).failures / "rank-0012.json"
    )
    run.stacks(3).mkdir(parents=True)
    (run.stacks(3) / "rank-0012.txt").write_text("Thread 0x7f\n")
    assert main(["logs", str(run.path), "--rank", "12"]) == 0
    shown = capsys.readouterr().out
    assert "n3: ValueError: no such token" in shown
    assert "Thread 0x7f" in shown
    assert main(["logs", str(run.path), "--rank", "11"]) == 1
    assert "rank 11 of attempt 3 left no words" in capsys.readouterr().err
