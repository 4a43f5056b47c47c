"""The accounts of a chain that ran on one machine, with delays that were planted from outside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_queue import LocalQueue
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND
from tests.workspace import Workspace, ends

from .conftest import MakeRun
from .test_local_chain import CUT, logs, run_chain
from .test_local_training import ROOT, submit

pytestmark = [pytest.mark.slow, pytest.mark.long]  # it waits for real clocks


def test_the_parts_of_a_chain_sum_to_what_its_queue_says(make_run: MakeRun) -> None:
    planted = 2.0
    program = ("--steps=40", "--step-seconds=0.35", "--start-seconds=0.5", "--save-seconds=0.5")
    run, plan = make_run(*program, total_steps=40, setup=[f"sleep {planted}"], **CUT)
    run_chain(run, plan)
    found = account_for_run(Run(run.path))
    jobs = LocalQueue(run.path / "local").every_job()
    times = [(job.start_time, job.end_time) for job in jobs if job.start_time is not None]
    assert len(found.allocations) == len(times) >= 2, logs(run)
    for stay, (start, end) in zip(found.allocations, times, strict=True):
        assert stay.allocated == round((end or 0.0) * MICROSECONDS_PER_SECOND) - round(
            (start or 0.0) * MICROSECONDS_PER_SECOND
        )
        assert stay.allocation.source == "the local queue"
        assert stay.parts["launch"] >= planted * MICROSECONDS_PER_SECOND
        assert stay.parts["init"] >= 0.5 * MICROSECONDS_PER_SECOND
        assert stay.parts["save"] >= 0.5 * MICROSECONDS_PER_SECOND
        assert stay.parts["prolog"] > 0
        assert stay.parts["supervisor"] > 0
    assert found.parts["step"] >= 40 * 0.35 * MICROSECONDS_PER_SECOND
    assert (found.parts["unknown"], found.work.redone_iterations, found.work.iterations) == (0, 0, 40)


def test_a_hang_is_booked_until_it_is_noticed_and_what_was_not_saved_is_redone(make_run: MakeRun) -> None:
    timeout = 3
    changes = {"hang_timeout": timeout, "max_failed_attempts": 1}
    run, plan = make_run("--steps=20", "--stop-at=5", "--stop-rank=1", "--start-seconds=0.1", **changes)
    run_chain(run, plan)
    found = account_for_run(Run(run.path))
    (stay,) = found.allocations
    assert stay.cause == "hang", logs(run)
    assert stay.parts["hang"] >= timeout * MICROSECONDS_PER_SECOND
    assert (found.work.iterations, found.work.redone_iterations) == (0, 5)
    assert sum(found.parts.values()) == found.allocated
    assert [(loss.cause, loss.times) for loss in found.losses] == [("hang", 1)]


DELAY = 40.0
"""Seconds of each planted delay: long enough that a twentieth of it is more than chance."""


@pytest.mark.alone
def test_delays_that_come_from_outside_land_in_their_parts(tmp_path: Path) -> None:
    """Slow imports, slow reads and a slow file system, which our own programs know nothing of."""
    workspace = Workspace.make(tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text((ROOT / "tests/chain/planted_delays.py").read_text())

    def variables(delay: float) -> dict[str, str]:
        folder = tmp_path / f"delayed-{delay:g}"
        folder.mkdir(exist_ok=True)
        delays = ",".join(f"{name}={delay}" for name in ("import", "read", "save"))
        return {"PYTHONPATH": str(site), "PLANTED_DELAYS": delays, "PLANTED_FOLDER": str(folder)}

    settings = {"training": {"steps": 30}, "checkpoint": {"interval": 20, "async_save": False}}
    parts = {}
    # the first run reads the packages from the disk, and is compared with nothing; both others are looked at alike
    for name, delay in (("first", 0), ("whole", 0), ("planted", DELAY)):
        cluster = {"python": sys.executable, "environment": variables(delay)}
        done = submit(workspace.config(name, **settings, cluster=cluster))
        assert [end.cause for end in ends(workspace.run(name))] == ["done"], done.stderr
        found = account_for_run(workspace.run(name))
        assert found.parts["unknown"] == 0
        parts[name] = {part: amount / MICROSECONDS_PER_SECOND for part, amount in found.parts.items()}
    assert {path.name for path in (tmp_path / f"delayed-{DELAY:g}").iterdir()} >= {"import", "read", "save"}
    beyond = {part: amount - parts["whole"][part] for part, amount in parts["planted"].items()}
    print({part: round(seconds, 2) for part, seconds in beyond.items()})
    for part in ("import", "data", "save"):
        assert beyond[part] == pytest.approx(DELAY, rel=0.05), beyond
    for part in beyond.keys() - {"import", "data", "save"}:
        assert abs(beyond[part]) < 0.05 * DELAY, (part, beyond)
