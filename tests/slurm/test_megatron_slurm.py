"""Real checkouts of Megatron-LM as chains of real Slurm jobs, two ranks on two of four nodes; see `tests.checkouts`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.trainers import megatron_lm_log
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.files import read_json_lines
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.checkouts import as_one_attempt, checkout_of, plan
from tests.workspace import steps

from .cluster import TestCluster
from .test_chain import SLURM, ends, hurry, logs, start, wait_for_end
from .test_triggers_uids import MEMBER, OTHER, TEAM, touch_by_hand

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(3000)]

BOTH = pytest.mark.parametrize("dialect", list(MegatronDialect), ids=lambda dialect: dialect.value)
ON_SLURM = {name: SLURM[name] for name in ("scheduler", "nodes", "ntasks_per_node")}
ADDRESS = {"MASTER_ADDR": "127.0.0.1"}
"""Pretended nodes have no addresses."""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can pass, which those of pytest are not."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o711)
    try:
        yield top
    finally:
        shutil.rmtree(top)


def wait_for_step(cluster: TestCluster, run: Run, iteration: int, attempt: int = 1) -> None:
    metrics = run.attempt(attempt).metrics
    cluster.wait_until(
        lambda: any(line["iteration"] >= iteration for line in read_json_lines(metrics)), timeout=600, interval=0.2
    )


def ranks(run: Run) -> dict[int, int]:
    """The ranks' own processes by rank: children of slurmstepd."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = dict(item.partition(b"=")[::2] for item in (entry / "environ").read_bytes().split(b"\0"))
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            stepd = Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd"
        except OSError:
            continue
        if str(run.checkpoints).encode() in words and b"RANK" in variables and stepd:
            found[int(variables[b"RANK"])] = int(entry.name)
    return found


@BOTH
def test_three_attempts_cut_by_a_real_time_limit(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    dialect: MegatronDialect,
) -> None:
    checkout = checkout_of(dialect)
    whole, whole_plan = make_run(folder="whole", **plan(checkout, tmp_path, steps=100, environment=ADDRESS, **ON_SLURM))
    start(cluster, whole)
    wait_for_end(cluster, whole, whole_plan, timeout=1200)
    assert [end.cause for end in ends(whole)] == ["done"], logs(whole)
    # 180 of the 240 s are for the start and twelve quick iterations, and no more than 28 slow ones
    cut = {"time_limit": 240, "grace_period": 60.0, "signal_seconds": 1}
    run, made = make_run(
        **plan(checkout, tmp_path, steps=100, interval=7, slow="12:6", environment=ADDRESS, **ON_SLURM, **cut)
    )
    start(cluster, run)
    wait_for_end(cluster, run, made, timeout=2000)
    records = ends(run)
    assert len(records) >= 3, logs(run)
    assert [end.cause for end in records] == ["saved"] * (len(records) - 1) + ["done"], logs(run)
    assert {end.reason.partition(";")[0] for end in records[:-1]} == {"time limit near"}
    assert sorted(steps(run)) == list(range(1, 101))
    assert as_one_attempt(run, whole) == steps(whole)


@BOTH
def test_triggers_by_another_member_of_the_group(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    open_folder: Path,
    tmp_path: Path,
    dialect: MegatronDialect,
) -> None:
    checkout = checkout_of(dialect)
    values = plan(checkout, tmp_path, steps=10_000, interval=4, slow="5:2", environment=ADDRESS, **ON_SLURM)
    run, made = make_run(folder=str(open_folder / "run"), log_folder=str(open_folder / "logs"), **values)
    triggers.create_trigger_folder(run, str(TEAM))
    start(cluster, run)
    wait_for_step(cluster, run, 6)
    assert touch_by_hand(OTHER, run.triggers / "exit") != 0
    assert touch_by_hand(MEMBER, run.triggers / "save") == 0
    cluster.wait_until((run.triggers / "save.done").exists, timeout=300)
    answer = json.loads((run.triggers / "save.done").read_text())
    saved = resume_point(run).iteration
    assert touch_by_hand(MEMBER, run.triggers / "exit") == 0
    wait_for_end(cluster, run, made, timeout=600)
    assert answer["user"] == str(MEMBER.uid)
    if dialect is MegatronDialect.SWISS_AI:
        assert answer["result"].startswith("saved iteration ")
    else:
        assert answer["result"].startswith("refused: this Megatron-LM has no way")
    assert [end.cause for end in ends(run)] == ["exit"], logs(run)
    assert (stop_reason(run) or "").startswith(f"exit trigger by {MEMBER.uid}")
    assert resume_point(run).iteration > saved
    assert json.loads((run.triggers / "exit.done").read_text())["user"] == str(MEMBER.uid)


@BOTH
def test_a_rank_killed_and_a_torn_checkpoint_that_the_tracker_names(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    dialect: MegatronDialect,
) -> None:
    checkout = checkout_of(dialect)
    values = plan(checkout, tmp_path, steps=20, interval=5, slow="11:2", environment=ADDRESS, **ON_SLURM)
    run, made = make_run(**values)
    start(cluster, run)
    cluster.wait_until(lambda: resume_point(run).iteration >= 10, timeout=600)
    wait_for_step(cluster, run, 12)
    os.kill(ranks(run)[1], signal.SIGKILL)
    torn = next(run.checkpoint(10).glob("__1_*.distcp"))
    os.truncate(torn, torn.stat().st_size - 1)
    cluster.wait_until(run.attempt(1).end.exists, timeout=600)
    hurry(cluster, made)
    wait_for_end(cluster, run, made, timeout=900)
    assert [end.cause for end in ends(run)] == ["failed", "done"], logs(run)
    begin = run.attempt(2).read_begin()
    assert begin is not None
    assert begin.base_iteration == 5
    assert [path.name for path in (run.checkpoints / ".quarantine").iterdir()] == ["iter_0000010-0002"]
    assert megatron_lm_log.tracked_iteration(run.checkpoints) == resume_point(run).iteration == 20


@BOTH
def test_a_crash_loop_stops(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    dialect: MegatronDialect,
) -> None:
    checkout = checkout_of(dialect)
    failing = ADDRESS | {"MEGATRON_ON_CPU_FAIL": "2"}
    run, made = make_run(**plan(checkout, tmp_path, steps=20, environment=failing, max_failed_attempts=2, **ON_SLURM))
    start(cluster, run)
    cluster.wait_until(run.attempt(1).end.exists, timeout=600)
    hurry(cluster, made)
    wait_for_end(cluster, run, made, timeout=600)
    assert [end.cause for end in ends(run)] == ["failed", "failed"], logs(run)
    assert (stop_reason(run) or "").startswith("2 attempts in a row without a new checkpoint")
