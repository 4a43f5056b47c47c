"""Errors that every attempt would repeat, and those that a node may cause, through the real job script."""

from __future__ import annotations

import json

import pytest

from relayrun.control.chain.excluded_nodes import read_node_failures
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.local import LocalScheduler

from .conftest import MakeRun

pytestmark = pytest.mark.slow  # they wait for real processes


def run_chain(run: Run, plan: Plan) -> list[int]:
    """Run the chain without waiting for its back-off; return the delays in seconds that jobs were given."""
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    waits: dict[str, int] = {}  # by job: its own program may write the file once more, and the wait is lifted again

    def skip_backoff() -> None:
        for path in sorted((run.path / "local").glob("job-*.json")):
            job = json.loads(path.read_text())
            wait = round(job["eligible_time"] - path.stat().st_mtime)  # from when it was said
            if job["state"] == "PENDING" and wait > 1:
                waits.setdefault(path.name, wait)
                path.write_text(json.dumps(job | {"eligible_time": 0}))

    scheduler.run_queue(lambda _event: None, skip_backoff)
    return list(waits.values())


def ends(run: Run) -> list[AttemptEnd]:
    return [end for number in run.attempt_numbers() if (end := run.attempt(number).read_end())]


@pytest.mark.parametrize("python", ["/no/such/python", "/etc/passwd"])
def test_a_python_that_is_not_there_stops_the_chain_at_once(make_run: MakeRun, python: str) -> None:
    run, plan = make_run(program=[python, "-m", "relayrun.train"])
    run_chain(run, plan)
    assert [end.cause for end in ends(run)] == ["fatal"]
    stop = stop_reason(run) or ""
    assert stop.startswith("fatal: ")
    assert python in stop
    assert read_node_failures(run) == []


def test_an_error_of_another_rank_than_the_first_that_would_come_again_stops_the_chain(make_run: MakeRun) -> None:
    run, plan = make_run("--repeats-on=1")
    run_chain(run, plan)
    assert [(end.cause, "KeyError: 'layout'" in end.reason) for end in ends(run)] == [("fatal", True)]
    assert read_node_failures(run) == []


def define_module(run: Run, body: str) -> None:
    script = run.job_script.read_text()
    run.job_script.write_text(script.replace("set -euo pipefail\n", f"set -euo pipefail\nmodule() {{ {body}; }}\n", 1))


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ("", 127, "module load cuda/12 failed (exit code 127)"),
        ("exit 0", 1, "the batch script ended in module load cuda/12 (exit code 1)"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_tried_again_later_and_blames_nobody(
    make_run: MakeRun, body: str, code: int, reason: str
) -> None:
    run, plan = make_run(modules=["cuda/12"])
    if body:
        define_module(run, body)
    delays = run_chain(run, plan)
    assert delays == [30, 60]
    assert [(end.cause, end.exit_code) for end in ends(run)] == [("failed", code)] * 3
    assert all(reason in end.reason for end in ends(run))
    assert read_node_failures(run) == []
    assert reason.partition(" (")[0] in (stop_reason(run) or "")
    assert not run.attempt(1).metrics.exists()


def test_a_module_is_loaded_without_the_strictness_of_the_batch_script(make_run: MakeRun) -> None:
    """Lmod 9.2 and Environment Modules 4.1 read a variable that is not set."""
    run, plan = make_run(modules=["cuda/12"])
    define_module(
        run, 'if [ "$MODULES_SILENT_SHELL_DEBUG" = 1 ]; then set +x; fi; false | true; false; export LOADED=1'
    )
    run_chain(run, plan)
    assert {end.cause for end in ends(run)} <= {"saved", "done"}
