from __future__ import annotations

from pathlib import Path

from relayrun.control.job_log import LONGEST_LINE, LogFollower


def test_each_whole_line_comes_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = LogFollower(log)
    assert list(lines.read()) == []  # not there yet
    log.write_bytes(b"one\ntw")
    assert list(lines.read()) == ["one"]
    assert list(lines.read()) == []
    with log.open("ab") as file:
        file.write(b"o\r\nthree\n")
    assert list(lines.read()) == ["two", "three"]


def test_what_was_there_before_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"of the attempt before\nnew\n")
    assert list(LogFollower(log, offset=22).read()) == ["new"]


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (5 << 20))
    lines = LogFollower(log)
    assert list(lines.read()) == []
    with log.open("ab") as file:
        file.write(b"\nnext \xff\n")
    found = list(lines.read())
    assert [len(line) for line in found] == [LONGEST_LINE, 6]
    assert found[1] == "next \N{REPLACEMENT CHARACTER}"


def test_a_file_that_is_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\nthr")
    lines = LogFollower(log)
    assert list(lines.read()) == ["one", "two"]
    log.write_bytes(b"four\n")
    assert list(lines.read()) == ["four"]
