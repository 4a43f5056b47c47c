"""Real checkouts of Megatron-LM under the chain, on one machine: two ranks over gloo; see `tests.checkouts`."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.rundir.tracker_runs import read_tracker_runs
from relayrun.control.trainers import megatron_lm_log
from relayrun.control.trainers.megatron_lm_log import MegatronDialect, least_file_sizes
from relayrun.files import read_json_lines
from relayrun.train.reporting import trackers
from tests.chain.test_local_chain import ends, logs, run_chain
from tests.checkouts import as_one_attempt, checkout_of, plan
from tests.waiting import wait_for
from tests.workspace import steps

from .conftest import MakeRun

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("dialect", list(MegatronDialect), ids=lambda dialect: dialect.value)
CUT = {"time_limit": 240, "grace_period": 60.0, "signal_seconds": 1}
"""180 s for the start and twelve quick iterations, however busy the machine is, and no more than 28 slow ones; then
60 s for the save."""


def kept(run: Run) -> list[int]:
    return [iteration for iteration, _ in megatron_lm_log.all_checkpoints(run.checkpoints)]


def named_and_there(checkpoint: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of its files as its `.metadata` has them, and on disk."""
    return least_file_sizes(checkpoint / ".metadata"), {
        path.name: path.stat().st_size for path in checkpoint.glob("*.distcp")
    }


def reached(run: Run, iteration: int, attempt: int = 1) -> bool:
    return any(line["iteration"] >= iteration for line in read_json_lines(run.attempt(attempt).metrics))


@contextmanager
def running(run: Run, made: Plan) -> Iterator[None]:
    """The chain beside the test; it is over at the end."""
    chain = threading.Thread(target=run_chain, args=(run, made))
    chain.start()
    try:
        yield
    finally:
        chain.join(1200)
    assert not chain.is_alive()


def job_pid(run: Run, number: int = 1) -> int:
    return int(json.loads((run.path / "local" / f"job-{number:04}.json").read_text())["pid"])


def rank_pids(run: Run) -> dict[int, int]:
    """The ranks' own processes, not what they spawned."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = dict(item.partition(b"=")[::2] for item in (entry / "environ").read_bytes().split(b"\0"))
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            starter = b"relayrun.control.scheduler.local_srun" in Path(f"/proc/{parent}/cmdline").read_bytes().split(
                b"\0"
            )
        except OSError:
            continue
        if str(run.checkpoints).encode() in words and b"RANK" in variables and starter:
            found[int(variables[b"RANK"])] = int(entry.name)
    return found


@pytest.mark.parametrize(
    "dialect",
    [
        pytest.param(MegatronDialect.SWISS_AI, id="swiss-ai"),  # in `make test`
        pytest.param(MegatronDialect.NVIDIA, id="nvidia", marks=pytest.mark.long),
    ],
)
def test_a_run_in_two_jobs_gives_every_printed_digit_of_the_uncut_one(
    make_run: MakeRun, tmp_path: Path, dialect: MegatronDialect
) -> None:
    """Losses, gradient norms, what is kept, the files that `.metadata` names, the trigger folder, the record."""
    checkout = checkout_of(dialect)
    whole, whole_plan = make_run(folder="whole", **plan(checkout, tmp_path, steps=12))
    run, made = make_run(**plan(checkout, tmp_path, steps=12, slow="5:2", settings={"keep_last": 1}))
    run_chain(whole, whole_plan)
    with running(run, made):
        wait_for(lambda: reached(run, 6), 600)
        os.kill(job_pid(run), signal.SIGUSR2)
    assert [end.cause for end in ends(whole)] == ["done"], logs(whole)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    assert as_one_attempt(run, whole) == steps(whole)
    assert sorted(steps(run)) == list(range(1, 13))
    assert "Traceback" not in logs(run)
    assert kept(run) == [12]
    named, there = named_and_there(run.checkpoint(12))
    assert named == there
    assert len(named) == 4
    line = next(read_json_lines(run.metrics_view))
    assert {"loss", "grad_norm", "lr", "step_seconds", "consumed_samples", "global_batch_size"} <= line.keys()
    text = (run.debug_of(2) / "compute_environment.txt").read_text()
    assert str(checkout) in text


@pytest.mark.long
@pytest.mark.timeout(3000)
@BOTH
def test_three_attempts_cut_by_a_real_time_limit(make_run: MakeRun, tmp_path: Path, dialect: MegatronDialect) -> None:
    checkout = checkout_of(dialect)
    whole, whole_plan = make_run(folder="whole", **plan(checkout, tmp_path, steps=100))
    run_chain(whole, whole_plan)
    flags = ["--wandb-project", "tests", "--wandb-exp-name", "chain"]
    run, made = make_run(
        **plan(
            checkout,
            tmp_path,
            *flags,
            steps=100,
            interval=7,
            slow="12:6",
            settings={"keep_last": 2},
            environment={"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
            **CUT,
        )
    )
    run_chain(run, made)
    assert [end.cause for end in ends(whole)] == ["done"], logs(whole)
    records = ends(run)
    assert len(records) >= 3, logs(run)
    assert [end.cause for end in records] == ["saved"] * (len(records) - 1) + ["done"], logs(run)
    assert records[0].reason.partition(";")[0] == "time limit near"  # and, on a busy machine, that the limit is short
    assert as_one_attempt(run, whole) == steps(whole)
    assert sorted(steps(run)) == list(range(1, 101))
    assert resume_point(run).iteration == 100
    assert kept(run) == [98, 100]
    named, there = named_and_there(run.checkpoint(98))
    assert named == there
    assert named
    (stream,) = read_tracker_runs(run)
    files = trackers.offline_wandb_files(run.path / "wandb", stream.id)
    assert len(files) == len(records)  # one run there
    told = [row["_step"] for path in files for row in trackers.wandb_history(path) if "lm loss" in row]
    assert told == list(range(1, 101))


@pytest.mark.long
@pytest.mark.timeout(1800)
@BOTH
def test_triggers_save_and_exit(make_run: MakeRun, tmp_path: Path, dialect: MegatronDialect) -> None:
    checkout = checkout_of(dialect)
    run, made = make_run(**plan(checkout, tmp_path, steps=10_000, slow="5:2"))
    with running(run, made):
        wait_for(lambda: reached(run, 6), 600)
        triggers.touch_trigger(run, "save")
        wait_for((run.triggers / "save.done").exists, 600)
        answer = json.loads((run.triggers / "save.done").read_text())["result"]
        saved = resume_point(run).iteration
        triggers.touch_trigger(run, "exit")
    if dialect is MegatronDialect.SWISS_AI:
        assert answer == f"saved iteration {saved}"
        assert saved > 5
    else:
        assert answer.startswith("refused: this Megatron-LM has no way")
    assert [end.cause for end in ends(run)] == ["exit"], logs(run)
    assert "exit trigger by" in run.stop.read_text()
    assert resume_point(run).iteration > saved
    assert (run.triggers / "exit.done").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_swiss_ai_with_its_profiler_saves_and_leaves_by_its_own_files(make_run: MakeRun, tmp_path: Path) -> None:
    """--profile switches its signal handler off; what it would profile never comes here, for want of CUDA."""
    checkout = checkout_of(MegatronDialect.SWISS_AI)
    flags = ["--profile", "--profile-step-start", "9000", "--profile-step-end", "9001"]
    run, made = make_run(**plan(checkout, tmp_path, *flags, steps=10_000, slow="5:2"))
    with running(run, made):
        wait_for(lambda: reached(run, 6), 600)
        triggers.touch_trigger(run, "exit")
    assert [end.cause for end in ends(run)] == ["exit"], logs(run)
    assert resume_point(run).iteration >= 6


def assert_goes_on_from_5(run: Run, whole: Run) -> None:
    """The checkpoint of iteration 10 was no good: the second attempt began with the one before, to the same digits."""
    assert [end.cause for end in ends(run)] == ["failed", "done"], logs(run)
    begin = run.attempt(2).read_begin()
    assert begin is not None
    assert begin.base_iteration == 5
    assert as_one_attempt(run, whole) == steps(whole)


@pytest.mark.long
@pytest.mark.timeout(1800)
@BOTH
def test_a_rank_killed_and_a_torn_checkpoint_that_the_tracker_names(
    make_run: MakeRun, tmp_path: Path, dialect: MegatronDialect
) -> None:
    """The chain goes on from the checkpoint before, to the same digits; the torn one is in quarantine."""
    checkout = checkout_of(dialect)
    whole, whole_plan = make_run(folder="whole", **plan(checkout, tmp_path, steps=20))
    run_chain(whole, whole_plan)
    run, made = make_run(**plan(checkout, tmp_path, steps=20, interval=5, slow="11:2"))
    with running(run, made):
        wait_for(lambda: resume_point(run).iteration >= 10 and reached(run, 12), 600)
        os.kill(rank_pids(run)[1], signal.SIGKILL)
        torn = next(run.checkpoint(10).glob("__1_*.distcp"))
        os.truncate(torn, torn.stat().st_size - 1)
    assert_goes_on_from_5(run, whole)
    assert "names 5 now" in logs(run)
    assert [path.name for path in (run.checkpoints / ".quarantine").iterdir()] == ["iter_0000010-0002"]


@pytest.mark.long
@pytest.mark.timeout(1800)
@BOTH
def test_a_crash_loop_stops(make_run: MakeRun, tmp_path: Path, dialect: MegatronDialect) -> None:
    checkout = checkout_of(dialect)
    failing = {"MEGATRON_ON_CPU_FAIL": "2"}
    run, made = make_run(**plan(checkout, tmp_path, steps=20, environment=failing, max_failed_attempts=2))
    run_chain(run, made)
    assert [end.cause for end in ends(run)] == ["failed", "failed"], logs(run)
    assert (stop_reason(run) or "").startswith("2 attempts in a row without a new checkpoint")
    assert "the test wants this program to fail" in run.stop.read_text()


@pytest.mark.long
@pytest.mark.timeout(1800)
@BOTH
def test_a_rank_that_stands_still_is_ended_and_followed(
    make_run: MakeRun, tmp_path: Path, dialect: MegatronDialect
) -> None:
    checkout = checkout_of(dialect)
    run, made = make_run(**plan(checkout, tmp_path, steps=20, interval=5, slow="11:2", hang_timeout=20))
    with running(run, made):
        wait_for(lambda: reached(run, 12), 600)
        os.kill(rank_pids(run)[1], signal.SIGSTOP)
    assert [end.cause for end in ends(run)] == ["hang", "done"], logs(run)
    assert "no progress for" in ends(run)[0].reason
    assert resume_point(run).iteration == 20


@pytest.mark.long
@pytest.mark.timeout(1800)
@BOTH
def test_a_flipped_bit_is_found_before_the_next_attempt(
    make_run: MakeRun, tmp_path: Path, dialect: MegatronDialect
) -> None:
    """Names and sizes stay: only the hashes that were made beside the ranks show it."""
    checkout = checkout_of(dialect)
    whole, whole_plan = make_run(folder="whole", **plan(checkout, tmp_path, steps=20))
    run_chain(whole, whole_plan)
    run, made = make_run(**plan(checkout, tmp_path, steps=20, interval=5, slow="11:2"))
    with running(run, made):
        wait_for(lambda: {line["iteration"] for line in read_json_lines(run.attempt(1).hashes)} == {5, 10}, 600)
        torn = next(run.checkpoint(10).glob("__1_*.distcp"))
        data = bytearray(torn.read_bytes())
        data[len(data) // 2] ^= 1
        torn.write_bytes(data)
        os.kill(rank_pids(run)[1], signal.SIGKILL)
    assert_goes_on_from_5(run, whole)
    assert f"{torn.name} is not the one that was saved" in logs(run)
