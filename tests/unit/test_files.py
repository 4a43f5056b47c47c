from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from relayrun.errors import InputError, run_main
from relayrun.files import append_line, read_lines, write_atomic


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
    assert list(read_lines(path)) == [{"n": 1}]
    append_line(path, {"n": 3})
    assert list(read_lines(path)) == [{"n": 1}, {"n": 3}]
    assert list(read_lines(tmp_path / "missing")) == []


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
