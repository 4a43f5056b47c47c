"""`relayrun init`: the next command that it prints passes as it is printed, for every site file."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.submit import project

FOLDER = "my first project"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", project.site_names())
def test_the_next_command_that_is_printed_passes(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No site's Slurm can be asked here, and the check says so: nothing else of it is left out."""
    for name in os.environ:
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("scontrol", "sbatch"):  # Slurm's own look for a controller for ten seconds
        (programs / name).write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    assert main(["init", FOLDER, "--cluster", cluster]) == 0
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    enter, check, submit = printed
    assert (enter, check[:2]) == (["cd", FOLDER], ["relayrun", "check"])
    assert submit[: len(check)] == ["relayrun", "submit", *check[2:]]
    monkeypatch.chdir(enter[1])
    assert main(check[1:]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "0 errors" in said
    warned = {line.split()[1] for line in said.splitlines() if line.startswith("warning")}
    site = Path(f"configs/clusters/{cluster}.yaml").read_text(encoding="utf-8")
    slurm = "scheduler: slurm" in site
    assert ("whether Slurm takes the job is not known" in said) == slurm
    assert warned == ({"slurm.test"} if slurm else set()) | ({"job.site"} if "not_checked:" in site else set())
