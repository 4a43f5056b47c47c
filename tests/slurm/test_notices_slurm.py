"""Somebody is told of a chain on a real Slurm, whose jobs have the variable that the submit had."""

from __future__ import annotations

import json
import time

import pytest

from relayrun.control.notify import notices
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.chain.test_notices import tell
from tests.receivers import Mailbox, Web
from tests.waiting import wait_for

from .cluster import TestCluster
from .test_chain import SLURM, logs, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]


def test_a_chain_that_stops_sends_one_message_to_each_target(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    mail: Mailbox,
    web: Web,
) -> None:
    run, plan = make_run("--fatal-at=3", **SLURM)
    tell(
        run,
        f"mailto://127.0.0.1:{mail.port}?to=ada@example.org&from=runs@example.org",
        "${HOOK}",
        since=time.time() - 1,
    )
    cluster.sbatch([f"--export=ALL,HOOK=json://127.0.0.1:{web.port}/hook", run.job_script])
    wait_for_end(cluster, run, plan)
    wait_for(lambda: notices.pending_notices(run) == [])
    (letter,) = mail.letters
    assert "the chain has stopped: fatal: " in letter["Subject"], logs(run)
    begin = run.attempt(1).read_begin()
    assert begin is not None
    assert f"attempt:   1, job {begin.job_id}, {begin.nodes}" in letter.get_content()
    ((_, path, content),) = web.requests
    assert (path, json.loads(content)["event"]) == ("/hook", "stopped")
