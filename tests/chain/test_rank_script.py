"""launchers/lib/rank.sh: a program that cannot be started is said by every rank before the first of them ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RANK = Path(__file__).parents[2] / "launchers" / "lib" / "rank.sh"


def start(tmp_path: Path, program: str | Path) -> tuple[int, bool]:
    """Start one rank: its exit code, and whether it waited before it ended.

    Its `sleep` takes no time, and another rank's end ends it there: srun sends SIGTERM to those that are left.
    """
    slept = tmp_path / "slept"
    sleep = tmp_path / "bin" / "sleep"
    sleep.parent.mkdir()
    sleep.write_text(f'#!/bin/sh\ntouch "{slept}"\nkill -TERM "$PPID"\n')
    sleep.chmod(0o755)
    environment = {
        "PATH": f"{sleep.parent}:{os.environ['PATH']}",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
    }
    rank = subprocess.run([RANK, program], env=environment, stderr=subprocess.PIPE, text=True, check=False, timeout=600)
    return rank.returncode, slept.exists()


@pytest.mark.parametrize("name", ["/no/such/python", "no-such-python"])
def test_a_program_that_is_missing_is_waited_for(tmp_path: Path, name: str) -> None:
    assert start(tmp_path, name) == (127, True)


@pytest.mark.parametrize("text", [None, "no program"])
def test_a_program_that_cannot_be_executed_is_waited_for(tmp_path: Path, text: str | None) -> None:
    """`None`: a folder."""
    program = tmp_path / "program"
    program.mkdir() if text is None else program.write_text(text)
    assert start(tmp_path, program) == (126, True)


def test_a_program_whose_interpreter_is_missing_is_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    code, waited = start(tmp_path, program)
    assert code in (126, 127)  # another bash, another code
    assert waited


def test_a_program_that_starts_ends_at_once_with_its_own_code(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    assert start(tmp_path, program) == (7, False)
