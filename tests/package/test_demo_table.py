"""The table in docs/explanation/chain.md is one that `make demo` prints: it is rendered again from its numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from relayrun.config.compose import resolve
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.places import CODE_ROOT as ROOT
from relayrun.terminal import format_table
from relayrun.watch.report import report_data
from relayrun.watch.report.report_data import AttemptRow, RunReportData, attempts_table
from scripts.demo import __main__ as demo

PAGE = (ROOT / "docs/explanation/chain.md").read_text(encoding="utf-8")


def shown() -> str:
    (text,) = re.findall(r"^```\n(attempts of .*?)^```$", PAGE, re.M | re.S)
    return str(text)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def rows() -> list[AttemptRow]:
    """The attempts in the lines of the table."""
    found = []
    for line in shown().splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) == 1 and found:  # the rest of a reason that takes two lines
            found[-1] = replace(found[-1], reason=f"{found[-1].reason} {cells[0]}")
        elif cells[0].isdecimal():
            attempt, cause, why, iterations, durable, tokens, wall, speed = cells
            first, last = iterations.split("–")
            found.append(
                AttemptRow(
                    number=int(attempt),
                    cause=cause,
                    reason=why,
                    steps=(int(first), int(last)),
                    durable_iteration=number(durable),
                    tokens=number(tokens),
                    seconds=float(wall),
                    tokens_per_second=float(number(speed)),
                )
            )
    return found


def test_its_form_is_that_of_the_report() -> None:
    told = SimpleNamespace(run=Run(Path("demo")), attempts=rows())
    title, columns, cells = attempts_table(cast(RunReportData, told))
    assert format_table(columns, cells, title=title, width=110) == shown().rstrip()


def test_its_numbers_are_those_of_one_exact_relay() -> None:
    attempts, training = rows(), resolve.load_run_config(ROOT / "configs/runs/demo.yaml").training
    steps = [row.steps or (0, 0) for row in attempts]
    assert steps[0][0] == 1
    for (row, (_, last)), (_, (first, _)) in pairwise(zip(attempts, steps, strict=True)):
        assert first == last + 1 == (row.durable_iteration or 0) + 1
    for row, (first, last) in zip(attempts, steps, strict=True):
        assert row.tokens == (last - first + 1) * training.global_batch_size * training.seq_length
    assert (attempts[-1].cause, steps[-1][1]) == ("done", training.steps)


def test_a_demo_that_was_stopped_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = resolve.load_run_config(ROOT / "configs/runs/demo.yaml")
    stopped = SimpleNamespace(run=Run(tmp_path), attempts=[], validation={})
    monkeypatch.setattr(report_data, "read_report_data", lambda run: stopped)
    with pytest.raises(RelayrunError, match="ended before its last iteration"):
        demo.print_results(Run(tmp_path), config, seconds=1.0)
