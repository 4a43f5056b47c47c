from __future__ import annotations

import re
from pathlib import Path

from tests.faults.cluster_faults import FAULTS

TEXT = (Path(__file__).resolve().parents[2] / "docs/reference/failure-modes.md").read_text(encoding="utf-8")


def test_every_fault_of_the_drill_has_its_row_and_every_row_its_fault() -> None:
    assert sorted(re.findall(r"^\| `([a-z-]+)`: ", TEXT, re.M)) == sorted(fault.name for fault in FAULTS)


def test_every_row_says_all_four_things() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert all(len([cell for cell in row.strip("|").split(" | ") if cell.strip()]) == 4 for row in rows)
