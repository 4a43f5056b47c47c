"""A real checkout of Megatron-LM whose ranks are killed and started again inside their job; see `tests.checkouts`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir import restarts
from relayrun.control.rundir.checkpoint_records import Lineage, quarantined_checkpoints, resume_point
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.checkpoint_hashes import recorded_hashes
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from tests.chain.test_local_chain import ends, logs, run_chain
from tests.checkouts import as_one_attempt, checkout_of, plan
from tests.checkpoints import raw, whole_tensors
from tests.plans import plan_with
from tests.trainers.test_checkpoint_hashes import flip, hashed
from tests.waiting import wait_for
from tests.workspace import steps

from .conftest import MakeRun
from .test_local_megatron import reached, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),  # to read the weights takes imports that warn
]


def rank_pids(run: Run) -> dict[int, int]:
    """The ranks that an agent's server has started, and not what they spawned."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = dict(item.partition(b"=")[::2] for item in (entry / "environ").read_bytes().split(b"\0"))
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            server = b"relayrun.control.agent.spawn_server" in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if server and str(run.checkpoints).encode() in words:
            found[int(variables[b"RANK"])] = int(entry.name)
    return found


def test_ranks_of_swiss_ai_that_are_killed_start_again_in_their_job(make_run: MakeRun, tmp_path: Path) -> None:
    """One is killed, and the newest checkpoint has lost a byte, so the tracker goes back; then one is killed again, and
    one bit of the newest checkpoint, which is hashed, has changed."""
    checkout = checkout_of(MegatronDialect.SWISS_AI)
    whole, whole_plan = make_run(folder="whole", **plan(checkout, tmp_path, steps=20, interval=5))
    run_chain(whole, whole_plan)
    values = plan(checkout, tmp_path, steps=20, interval=5, slow="6:3")
    run, made = make_run(**values, recovery="node", auto_requeue=False)
    server = [sys.executable, "-P", "-m", "relayrun.control.agent.spawn_server", f"--run-dir={run.path}"]
    made = plan_with(made, fork_server=server)
    made.write(run.plan)
    with running(run, made):
        wait_for(lambda: resume_point(run).iteration >= 10 and reached(run, 11), 600)
        torn = next(run.checkpoint(10).glob("__1_*.distcp"))
        os.truncate(torn, torn.stat().st_size - 1)
        os.kill(rank_pids(run)[1], signal.SIGKILL)
        wait_for(
            lambda: len(restarts.read_failed_restarts(run.attempt(1))) == 1 and resume_point(run).iteration >= 10, 600
        )
        newest = next(Lineage(run).backwards()).commit
        wait_for(lambda: recorded_hashes(run, newest), 120)
        flip(run.checkpoint(10))
        os.kill(rank_pids(run)[0], signal.SIGKILL)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [(each.rank, each.words, each.next_iteration) for each in found] == [
        (1, "killed by SIGKILL", 5),
        (0, "killed by SIGKILL", 5),
    ]
    assert "names 5 now" in logs(run)
    whys = [broken.why for broken in quarantined_checkpoints(run)]
    assert len(whys) == 2
    assert any(why.endswith("is not the one that was saved") for why in whys)
    assert hashed(run)[-1] == 20, "the last one is hashed before the job ends"
    assert as_one_attempt(run, whole) == steps(whole)
    assert sorted(steps(run)) == list(range(1, 21))
    expected, got = whole_tensors(whole.checkpoint(20)), whole_tensors(run.checkpoint(20))
    assert expected.keys() == got.keys()
    assert len(expected) > 20
    for name, tensor in expected.items():
        assert raw(tensor) == raw(got[name]), name
