"""Rank 0 alone reads what attempts before this one left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import RANKS, Harness

pytestmark = pytest.mark.slow

LOOK = """
import os, sys
if "RANK" in os.environ:
    name = os.path.join(os.path.dirname(__file__), "opened-" + os.environ["RANK"])
    found = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def look(event, details):
        if event == "open" and "/attempts/" in str(details[0]):
            os.write(found, (str(details[0]) + "\\n").encode())
    sys.addaudithook(look)
"""


@pytest.mark.long
def test_rank_0_alone_reads_the_line_and_tells_the_others(
    harness: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = harness(training={"steps": 4}, checkpoint={"interval": 2})
    made.train()
    (tmp_path / "sitecustomize.py").write_text(LOOK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    made.config["training"]["steps"] = 6
    made.write_config()
    made.train(imported=False)  # sitecustomize is read where Python starts
    opened = [set((tmp_path / f"opened-{rank}").read_text().splitlines()) for rank in range(RANKS)]
    first, second = made.run.attempt(1), made.run.attempt(2)
    assert str(first.commits) in opened[0]
    for others in opened[1:]:
        assert str(second.begin) in others  # they were looked at
        assert {path for path in others if not Path(path).is_relative_to(second.path)} == set()
        assert str(second.commits) not in others
