"""Text from files, logs and jobs reaches a terminal inert."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest

from relayrun import errors, terminal
from relayrun.cli import main
from relayrun.control.job_log import AgentLog, log_line, log_node_line
from relayrun.control.rundir.records import ChainEnd, RankFailure
from relayrun.control.rundir.run import Run, write_stop
from relayrun.errors import RelayrunError, run_main
from relayrun.submit.check.findings import CheckFinding
from relayrun.submit.check.report_text import print_findings
from tests.history import began, ended, trained

from ..chain.conftest import make_run

__all__ = ["make_run"]

ACTIVE = [
    "\x1b",
    "\r",
    "\x07",
    "\x9b",
    "\x85",
    "\x7f",
    "\u202e",
    "\u2066",
    "\u061c",
    "\u200f",
    "\u2028",
    "\u2029",
    "\udc9b",
]
HOSTILE = "a\x1b]0;mine\x07b\x9b31mc\u202ed\u2066e\u2028f\x7fg\u061ch\r[relayrun] fine"
ESCAPED = r"a\u001b]0;mine\u0007b\u009b31mc\u202ed\u2066e\u2028f\u007fg\u061ch\u000d[relayrun] fine"
FOUND = re.compile("[" + "".join(ACTIVE) + "]")


def test_active_characters_are_escaped_and_others_stay() -> None:
    assert terminal.inert(HOSTILE) == ESCAPED
    assert terminal.inert(ESCAPED) == ESCAPED
    for each in ACTIVE:
        assert terminal.inert(f"a{each}b") == f"a\\u{ord(each):04x}b"
    kept = "tab\tnewline\nümlaut 漢字 \u200d\u200c emoji 👩\u200d💻 | \u00a0 \\x1b"
    assert terminal.inert(kept) == kept


@pytest.mark.parametrize("stream", ["out", "err"])
def test_a_program_prints_inert_text(stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    def say() -> int:
        print(HOSTILE, "\udcff", file=sys.stdout if stream == "out" else sys.stderr)
        sys.stderr.writelines([HOSTILE])
        logging.getLogger("relayrun.test").warning("%s", HOSTILE)
        return 0

    before = sys.stdout, sys.stderr
    assert run_main(say) == 0
    assert (sys.stdout, sys.stderr) == before
    said = capsys.readouterr()
    assert getattr(said, stream).startswith(f"{ESCAPED} \\udcff\n")
    assert f"warning: {ESCAPED}\n" in said.err
    assert not FOUND.search(said.out + said.err)


def test_an_error_and_a_traceback_are_inert(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> int:
        raise error

    assert run_main(lambda: fail(RelayrunError(HOSTILE, where=HOSTILE))) == 1
    assert capsys.readouterr().err == f"error: {ESCAPED}: {ESCAPED}\n"
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a defect ends the program: its streams stay as they are
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with pytest.raises(ValueError, match="mine"):
        run_main(lambda: fail(ValueError(HOSTILE)))
    assert isinstance(sys.stderr, terminal.InertStream)
    print(HOSTILE, file=sys.stderr)  # as the interpreter does it
    assert capsys.readouterr().err == f"{ESCAPED}\n"


def test_a_bar_of_a_library_may_go_to_the_beginning_of_its_line() -> None:
    inner = io.StringIO()
    print("\r 10%|#  |", end="", file=terminal.InertStream(inner))  # type: ignore[arg-type]
    assert inner.getvalue() == "\r 10%|#  |"


def test_lines_of_a_jobs_log_are_inert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = AgentLog(tmp_path / "log")
    log_line(HOSTILE)
    log_node_line("n0", HOSTILE, log=log)
    log.finish()
    said = capsys.readouterr().err + (tmp_path / "log").read_text()
    assert said.count(ESCAPED) == 3
    assert not FOUND.search(said)
    logger = logging.getLogger("relayrun.test")
    errors.log_to_stderr()  # in a rank, whose own streams stay as they are
    logger.warning("%s", HOSTILE)
    assert capsys.readouterr().err == f"warning: {ESCAPED}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_finding_has_our_colour_and_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal.InertStream(screen))  # type: ignore[arg-type]
    terminal.print_rows(["name"], [[HOSTILE]])
    print_findings([CheckFinding(level="warning", name="settings.owner", words=HOSTILE)])
    name, table, finding = screen.getvalue().splitlines()
    assert (name, table) == ("name", ESCAPED)
    assert finding.startswith("\x1b[33mwarning\x1b[0m  settings.owner  ")
    assert finding.endswith(ESCAPED)
    monkeypatch.setenv("NO_COLOR", "1")
    print_findings([CheckFinding(level="error", name="a", words="b")])
    assert screen.getvalue().splitlines()[-1] == "error  a  b"


@pytest.fixture
def hostile(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:  # type: ignore[no-untyped-def]
    """A run with active characters in every text that a command repeats."""
    made, _ = make_run(folder="logs/runs/test/chain")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relayrun.yaml").touch()
    began(made, 1, base=0, nodes=f"n0{HOSTILE}")
    log = tmp_path / "job.err"
    record = made.attempt(1).begin
    record.write_text(record.read_text().replace('"log": null', f'"log": "{log}"'))
    log.write_text(f"{HOSTILE}\nTraceback\n{HOSTILE.replace(chr(13), '')}\n")  # a return shows the last state
    log.with_suffix(".out").write_bytes(b"raw \x9b31m \xff bytes\n" + HOSTILE.encode())
    made.checkpoints.mkdir(exist_ok=True)
    trained(made, 1, 0, 10)
    made.attempt(1).failures.mkdir(exist_ok=True)
    failure = RankFailure(rank=0, node=HOSTILE, error=HOSTILE, time=1.0)
    failure.write(made.attempt(1).failures / "rank-0000.json")
    ended(made, 1, base=0, durable=10)
    end = made.attempt(1).end
    value = json.loads(end.read_text())
    end.write_text(json.dumps(value | {"reason": HOSTILE, "cause": "failed"}))
    write_stop(made, ChainEnd("failed", HOSTILE), words=HOSTILE)
    return made


@pytest.mark.parametrize(
    "command",
    [
        *("status RUN", "status", "status RUN --json", "status --json", "logs RUN", "logs RUN --rank 0"),
        *("report RUN --text", "goodput RUN", "goodput RUN --json", "runs list .", "runs list . --json"),
        *("save RUN", "stop RUN"),
    ],
)
def test_commands_over_a_hostile_run(command: str, hostile: Run, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        main([str(hostile.path) if word == "RUN" else word for word in command.split()])
    except SystemExit as error:
        raise AssertionError(capsys.readouterr().err) from error
    said = capsys.readouterr()
    assert not FOUND.search(said.out + said.err), said
    if command in ("status RUN", "logs RUN", "logs RUN --rank 0"):
        assert "\\u001b]0;mine" in said.out
    if "--json" in command:
        json.loads(said.out)
