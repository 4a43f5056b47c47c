"""docs/reference/run-directory.md names every file of a run and of an attempt that the package knows by a path."""

from __future__ import annotations

from pathlib import Path

from relayrun.control.rundir.attempt import Attempt, PathIn
from relayrun.control.rundir.run import Run

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/run-directory.md").read_text(encoding="utf-8")


def test_every_file_of_a_run_is_on_its_page() -> None:
    tree = PAGE.partition("```\n")[2].partition("\n```")[0]
    paths = [
        getattr(owner, name)
        for owner, cls in ((Run(Path("/run")), Run), (Attempt("/run"), Attempt))
        for name, value in vars(cls).items()
        if isinstance(value, PathIn)
    ]
    assert len(paths) > 40
    assert [path.name for path in paths if path.name not in tree] == []
