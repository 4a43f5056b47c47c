from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun.errors import InputError, run_main
from relayrun.files import append_line, read_json_lines, write_atomic
from relayrun.leftovers import remove_leftovers, temporary_prefix
from tests.waiting import read_line, wait_for


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    write_atomic(target, "old")

    def fail(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_torn_last_line_is_ignored_and_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2')
    assert list(read_json_lines(path)) == [{"n": 1}]
    append_line(path, {"n": 3})
    assert list(read_json_lines(path)) == [{"n": 1}, {"n": 3}]
    assert list(read_json_lines(tmp_path / "missing")) == []


def test_errors_become_one_message_and_an_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def bad_input() -> int:
        raise InputError("it is torn", where="/x/y", hint="make it again")

    assert run_main(bad_input) == 1
    assert capsys.readouterr().err == "error: /x/y: it is torn\n  -> make it again\n"
    assert run_main(lambda: open(tmp_path / "none").close()) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: No such file or directory\n"
    assert run_main(lambda: None) == 0


@pytest.mark.parametrize("name", ["relayrun.somewhere", "__main__"])
def test_a_program_says_its_warnings_once_and_leaves_other_loggers_alone(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger(name)

    def main() -> None:
        log.warning("%s is slow", "disk")
        log.error("it is full")
        log.info("plain")
        log.debug("nobody wants to know")

    handlers = list(logging.getLogger().handlers)
    assert run_main(lambda: run_main(main)) == 0
    assert capsys.readouterr().err == "warning: disk is slow\nerror: it is full\nplain\n"
    assert logging.getLogger().handlers == handlers


KILLED = """
import os, signal, sys
from relayrun.files import atomic_file
with atomic_file(sys.argv[1]) as temporary:
    print(temporary, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def half_written(target: Path, number: str) -> tuple[subprocess.Popen[str], Path]:
    """A process inside `atomic_file` that a signal has ended, or stopped; and its temporary file."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, target, number], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        return process, Path(read_line(process).strip())


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    killed, left = half_written(tmp_path / "a", "SIGKILL")
    living, written = half_written(tmp_path / "b", "SIGSTOP")
    try:
        # it has ended, and nobody has asked how
        wait_for(lambda: os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
        (tmp_path / "mine").write_text("x")
        (tmp_path / ".tmp-notes").write_text("x")
        assert left.exists()
        assert written.exists()
        assert remove_leftovers(tmp_path) == [left.name]
        killed.wait(300)
        assert sorted(os.listdir(tmp_path)) == sorted([".tmp-notes", "mine", written.name])
    finally:
        living.kill()
        killed.wait(300)
        living.wait(300)
    assert remove_leftovers(tmp_path, shared=True) == [written.name]
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_a_number_that_another_process_has_got_since_is_no_owner(tmp_path: Path) -> None:
    ours = temporary_prefix()
    _, boot, namespace, pid, started, _ = ours.split("-")
    assert pid == str(os.getpid())
    reused = f".tmp-{boot}-{namespace}-{pid}-{int(started) - 1}-reused"
    for name in (f"{ours}living", reused):
        (tmp_path / name).mkdir()
    assert remove_leftovers(tmp_path) == [reused]


def test_what_may_belong_to_another_node_stays_for_a_day(tmp_path: Path) -> None:
    name = ".tmp-01234567-4026531836-1-2-there"
    (tmp_path / name).mkdir()
    (tmp_path / name / "part").write_text("x")
    day = 86_400
    long_ago, lately = time.time() - day - 100, time.time() - day + 1000
    for path in (tmp_path / name / "part", tmp_path / name):
        os.utime(path, (long_ago, long_ago))
    os.utime(tmp_path / name / "part", (lately, lately))
    assert remove_leftovers(tmp_path) == []
    os.utime(tmp_path / name / "part", (long_ago, long_ago))
    assert remove_leftovers(tmp_path, shared=True) == [name]
    assert remove_leftovers(tmp_path) == ([] if "-" in name[5:] else [name])
    assert os.listdir(tmp_path) == []
