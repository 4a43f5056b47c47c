"""Failures of a program of one's own, through the real job script: the end, STOP, strikes, `status` and `why` agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.control.chain.excluded_nodes import read_node_failures
from relayrun.control.rundir.run import stop_reason
from relayrun.watch.status import queue, run_status
from relayrun.watch.why import explain

from .conftest import MakeRun
from .test_local_errors import ends, run_chain

pytestmark = [pytest.mark.slow, pytest.mark.long]

CASES = {
    "a script that is not there": ([sys.executable, "tran.py"], "script-missing", ["fatal"]),
    "a module that is not there": ([sys.executable, "-c", "import no_such_module"], "module-missing", ["fatal"]),
    "a wrong flag": (
        ["bash", "-c", "echo 'train.py: error: unrecognized arguments: --x' >&2; exit 2"],
        "flags",
        ["fatal"],
    ),
    "the same exception twice": ([sys.executable, "-c", "{}['layout']"], "exception", ["failed", "failed"]),
    "an exception in a pipe": (
        ["bash", "-c", f"{sys.executable} -c \"raise ValueError('rate')\" 2>&1 | tee /dev/null"],
        "unlisted",
        ["failed", "failed"],
    ),
    "nothing done": (["true"], "fatal", ["fatal"]),
    "a name that does not resolve": (
        [sys.executable, "-c", "import socket; socket.create_connection(('no-such-host.invalid', 1))"],
        "name-resolution",
        ["failed"] * 3,
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_the_cause_decides_and_is_told(make_run: MakeRun, tmp_path: Path, case: str) -> None:
    words, name, causes = CASES[case]
    run, plan = make_run(total_steps=None, trainer="command", trainer_settings={"run": words})
    waits = run_chain(run, plan)
    assert [end.cause for end in ends(run)] == causes, stop_reason(run)
    assert read_node_failures(run) == []
    found = explain(run)
    assert (found.name, found.certainty) == (name, "unknown" if name == "unlisted" else "seen")
    assert found.quote.split(" (")[0][:60] in (stop_reason(run) or "")
    assert waits == ([300, 600] if name == "name-resolution" else [30] * (len(causes) - 1))
    status = run_status.read_run_status(run, queue.query_queue(run), now=0.0)
    assert (f"({name};" in status.why) == (name != "fatal")  # `fatal`: by its outcome
    assert "job.time" not in (stop_reason(run) or "")
