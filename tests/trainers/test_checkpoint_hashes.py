"""Checkpoints of Megatron-LM are vouched for: hashed beside the ranks, compared before the next attempt begins."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from relayrun.control.agent.restart import ForeignRestart
from relayrun.control.chain.background import PassAfterSave, hash_checkpoints, hash_last_checkpoint
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint, quarantined_checkpoints
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import checkpoint_hashes
from relayrun.control.trainers.checkpoint_hashes import hash_new_checkpoints, intact_base, useless_saves
from relayrun.errors import RunDirError
from relayrun.files import file_sizes, read_json_lines
from tests.history import began, history_plan
from tests.waiting import wait_for


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    began(run, 1)
    return run


def saved(run: Run, iteration: int, *, weights: int | None = None) -> Attempt:
    """Save tensors that only `weights` decides, and an object that the iteration decides."""
    attempt, folder = run.attempt(1), run.checkpoint(iteration)
    state = {"embedding.weight": torch.full((64, 8), float(weights or iteration)), "rng": b"of %d" % iteration}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, that one process saves
        save(state, checkpoint_id=folder, no_dist=True)
    attempt.append_commit(
        CheckpointCommit(
            iteration=iteration,
            path=str(folder),
            consumed_samples=-1,
            time=time.time(),
            seconds=1.0,
            files=file_sizes(folder),
        )
    )
    return attempt


def plan_of(run: Run, trainer: str = "megatron-lm") -> Plan:
    settings = {"run": ["true"]} | ({"dialect": "swiss-ai", "total_steps": 100} if trainer == "megatron-lm" else {})
    made = history_plan(run, total_steps=100)
    return replace(made, trainer=trainer, trainer_settings=settings, host_python=sys.executable)


def flip(folder: Path) -> None:
    """Change one bit of a weight; no size changes."""
    path = max(folder.glob("*.distcp"), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def base_of(run: Run) -> ResumePoint:
    line = Lineage(run)
    return intact_base(run, line, line.durable(), attempt=2)


def test_a_bit_that_changes_after_the_save_is_found_before_the_next_attempt(run: Run) -> None:
    for iteration in (10, 20, 30):
        hash_new_checkpoints(run, saved(run, iteration))
    assert [line["iteration"] for line in read_json_lines(run.attempt(1).hashes)] == [10, 20, 30]
    assert base_of(run).iteration == 30
    flip(run.checkpoint(30))
    assert base_of(run) == ResumePoint(iteration=20, path=str(run.checkpoint(20)))
    (broken,) = quarantined_checkpoints(run)
    assert broken.iteration == 30
    assert broken.why.endswith(".distcp is not the one that was saved")


def test_what_was_hashed_stays_as_it_was_recorded(run: Run) -> None:
    """A later pass hashes new checkpoints only: it takes no damage for the truth."""
    hash_new_checkpoints(run, saved(run, 10))
    flip(run.checkpoint(10))
    hash_new_checkpoints(run, saved(run, 20))
    flip(run.checkpoint(20))
    with pytest.raises(RunDirError, match="no checkpoint before iteration 10 is whole"):
        base_of(run)


def test_three_damaged_ones_in_a_row_are_more_likely_the_file_system(run: Run) -> None:
    for iteration in (10, 20, 30, 40):
        hash_new_checkpoints(run, saved(run, iteration))
        flip(run.checkpoint(iteration))
    with pytest.raises(RunDirError, match="3 checkpoints in a row"):
        base_of(run)


def test_a_checkpoint_without_hashes_is_taken_as_it_is(run: Run) -> None:
    saved(run, 10)
    flip(run.checkpoint(10))
    assert base_of(run).iteration == 10


def test_files_for_which_no_time_is_left_are_taken_as_they_are(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_new_checkpoints(run, saved(run, 10))
    flip(run.checkpoint(10))
    monkeypatch.setattr(checkpoint_hashes, "BASE_SECONDS", -1.0)
    assert base_of(run).iteration == 10


def test_a_save_of_an_earlier_state_is_a_failed_save(run: Run) -> None:
    """The object of the iteration differs, and so does common.pt of Megatron-LM."""
    hash_new_checkpoints(run, saved(run, 10))
    attempt = saved(run, 20, weights=10)
    hash_new_checkpoints(run, attempt)
    (failed,) = read_json_lines(attempt.failed_saves)
    assert failed["iteration"] == 20
    assert "every tensor is that of iteration 10" in failed["error"]
    assert Lineage(run).durable().iteration == 10
    assert [broken.iteration for broken in quarantined_checkpoints(run)] == [20]
    assert useless_saves(attempt) is None
    hash_new_checkpoints(run, saved(run, 30, weights=10))
    assert (useless_saves(attempt) or "").startswith("the save of iteration 30 is useless, as was the one before")


def test_reads_that_differ_are_a_failed_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter(range(1000))
    monkeypatch.setattr(checkpoint_hashes, "_hash_file", lambda path, until: str(next(values)))
    attempt = saved(run, 10)
    hash_new_checkpoints(run, attempt)
    (failed,) = read_json_lines(attempt.failed_saves)
    assert failed["error"] == "two reads of its files gave different bytes"
    assert useless_saves(attempt) is None


def test_the_step_beside_the_ranks_hashes_checkpoints_of_megatron_lm_alone(run: Run) -> None:
    saved(run, 10)
    for trainer, lines in (("command", 0), ("megatron-lm", 1)):
        made = PassAfterSave(hash_checkpoints, run, plan_of(run, trainer))
        made.look(1)
        if made._process is not None:
            assert made._process.wait(60) == 0
        assert len(list(read_json_lines(run.attempt(1).hashes))) == lines


def hashed(run: Run) -> list[int]:
    return [line["iteration"] for line in read_json_lines(run.attempt(1).hashes)]


def test_the_last_checkpoint_of_an_attempt_is_hashed_before_its_job_ends(run: Run) -> None:
    """Unless the job has no time left."""
    saved(run, 10)
    hash_last_checkpoint(run, plan_of(run), job_end=time.time() + 30)
    assert hashed(run) == []
    hash_last_checkpoint(run, plan_of(run, "native"), job_end=None)
    assert hashed(run) == []
    hash_last_checkpoint(run, plan_of(run), job_end=None)
    assert hashed(run) == [10]


def compared(between: ForeignRestart) -> None:
    wait_for(between.compared, 20)


def test_a_restart_inside_the_job_does_not_load_a_damaged_checkpoint(run: Run) -> None:
    """Bytes that differ from their hashes are found before the ranks start, and not only sizes."""
    for iteration in (10, 20):
        hash_new_checkpoints(run, saved(run, iteration))
    between = ForeignRestart(run, plan_of(run), run.attempt(1), say=print)
    compared(between)
    assert restarts.restart_checkpoint(run, run.attempt(1)).iteration == 20
    flip(run.checkpoint(20))
    between.ended()
    compared(between)
    assert restarts.restart_checkpoint(run, run.attempt(1)).iteration == 10
    assert [broken.iteration for broken in quarantined_checkpoints(run)] == [20]
    flip(run.checkpoint(10))
    between.ended()
    with pytest.raises(RunDirError, match="no checkpoint before iteration 10 is whole"):
        compared(between)


def test_ranks_that_leave_wait_for_no_comparison(run: Run) -> None:
    hash_new_checkpoints(run, saved(run, 10))
    flip(run.checkpoint(10))
    run.attempt(1).stop.touch()
    assert ForeignRestart(run, plan_of(run), run.attempt(1), say=print).compared()
    assert quarantined_checkpoints(run) == []
