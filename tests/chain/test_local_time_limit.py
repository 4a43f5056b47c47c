"""Jobs whose start eats the time limit go on, and say so where people look."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from relayrun.control import decisions
from relayrun.control.chain import failure_reason
from tests.history import began

from .conftest import MakeRun
from .test_local_chain import ends, logs, run_chain

pytestmark = pytest.mark.slow  # they wait for real clocks


def test_a_name_that_does_not_resolve_is_the_reason_and_not_the_time_limit(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run()
    log = tmp_path / "job.err"
    said = "[W1126 12:01:00.123 socket.cpp:697] [c10d] The IPv4 network addresses of (n0, 25007) cannot be retrieved "
    log.write_text(f"{said}(gai error: -2 - Name or service not known).\n")
    now = time.time()
    started = began(run, 1, start_time=now - 180, job_end_time=now - 1, log=str(log))
    failed = failure_reason.why_failed(run, plan, run.attempt(1), started, decisions.UNKNOWN_EXIT_CODE)
    assert failed.words.startswith(said)
    assert "job.time" not in failed.words
    assert failed.fatal is None


@pytest.mark.long
def test_a_chain_whose_start_eats_the_time_limit_says_so(make_run: MakeRun) -> None:
    run, plan = make_run(
        "--steps=1000",
        "--step-seconds=0.2",
        "--start-seconds=22",
        total_steps=1000,
        time_limit=40,
        grace_period=4.0,
        auto_requeue=False,
    )
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "saved"
    assert re.search(r"of the time limit of \d+ s the start took [23]\d s", record.reason), record
    assert record.reason in logs(run)
