"""Jobs whose start eats the time limit go on, and say so where people look."""

from __future__ import annotations

import re

import pytest

from .conftest import MakeRun
from .test_local_chain import ends, logs, run_chain

pytestmark = pytest.mark.slow  # they wait for real clocks


def test_a_chain_whose_start_eats_the_time_limit_says_so(make_run: MakeRun) -> None:
    run, plan = make_run(
        "--steps=1000",
        "--step-seconds=0.2",
        "--start-seconds=22",
        total_steps=1000,
        time_limit=40,
        lead=4.0,
        auto_requeue=False,
    )
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "saved"
    assert re.search(r"of the time limit of \d+ s the start took [23]\d s", record.reason), record
    assert record.reason in logs(run)
