"""Errors of the data and the checkpoint: fatal, in one sentence, since another attempt would meet them again."""

from __future__ import annotations

import contextlib
import pickle
import socket
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter

from .conftest import RANKS, VOCABULARY, Attempt, Harness

pytestmark = pytest.mark.slow

MakeHarness = Callable[..., Harness]


def assert_fatal(attempt: Attempt, *words: str) -> None:
    codes = attempt.wait()
    assert 3 in codes, attempt.output()
    assert set(codes) <= {1, 3}, attempt.output()
    said = [failure.error for failure in attempt.failures() if failure.repeats]
    assert said, attempt.output()
    assert all(word in said[0] for word in words), said
    assert attempt.outcome is None or attempt.outcome.outcome == "fatal"


def shard(folder: Path, ids: np.ndarray, lengths: list[int]) -> str:  # type: ignore[type-arg]
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(str(folder / "shard"), np.uint16)
    writer.add(ids, np.array(lengths))
    writer.finish()
    return str(folder / "shard")


def with_data(made: Harness, prefix: str, *, held_out: str | None = None) -> Harness:
    Manifest.build(
        {"train": [prefix]},
        {"held-out": [held_out]} if held_out else {},
        vocabulary_size=VOCABULARY,
        eod=0,
        tokenizer="none",
    ).write(made.run.manifest)
    return made


def test_no_rank_trains_on_cpus_where_its_job_asks_for_gpus(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without its driver is the node's fault; another attempt may have a good one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    attempt = harness(job={"gpus_per_node": RANKS}, training={"precision": "fp32"}).start()
    assert set(attempt.wait()) == {1}, attempt.output()
    for failure in attempt.failures():
        assert "the job asks for GPUs, and torch" in failure.error
        assert f"finds none on node {socket.gethostname()}" in failure.error
        assert not failure.repeats
    assert [failure.rank for failure in attempt.failures()] == [*range(RANKS)]
    assert not attempt.directory.metrics.exists()


@pytest.mark.parametrize(
    "asks",
    [
        "job.gpus_per_node=4",
        "job.sbatch={gpus: 4}",
        'job.sbatch={tres-per-task: "cpu=4,gres/gpu:1"}',
        'job.sbatch={gres: "gres/gpu=4"}',
        'cluster.srun_options=["--gpus-per-task=1"]',
        'cluster.srun_options=["--mpi=none", "--gres=gpu:4"]',
        'cluster.srun_options=["--gpus-per-node=4"]',
    ],
)
def test_gpus_are_asked_for_in_any_way(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of megatron-core's imports
        from relayrun.train import distributed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = Path(__file__).resolve().parents[2] / "configs/runs/demo-slurm.yaml"
    others = ("chain.recovery=job", "training.precision=bf16")
    for given, refused in ((asks, True), ("cluster.srun_options=[--mpi=none]", False)):
        config = resolve.load_run_config(file, (*others, given))
        assert isinstance(config, RunConfig)
        with pytest.raises(distributed.NoGpuFound) if refused else contextlib.nullcontext():
            distributed.require_gpu(config)


def test_too_few_tokens_for_one_window(harness: MakeHarness, tmp_path: Path) -> None:
    made = with_data(harness(), shard(tmp_path, np.ones(50, dtype=np.int64), [50]))
    assert_fatal(made.start(), "50 tokens", "seq_length 64")


def test_ids_beyond_the_vocabulary(harness: MakeHarness, tmp_path: Path) -> None:
    """Those that the padding of the embedding would take too."""
    ids = np.ones(64 * 100, dtype=np.int64)
    ids[64 * 50] = VOCABULARY + 1
    made = with_data(harness(), shard(tmp_path, ids, [len(ids)]))
    assert_fatal(made.start(), f"token id {VOCABULARY + 1}", f"vocabulary of {VOCABULARY}", "verify_dataset")


def test_ids_beyond_the_vocabulary_in_a_validation_set(harness: MakeHarness, tmp_path: Path) -> None:
    good = shard(tmp_path / "good", np.ones(64 * 100, dtype=np.int64), [6400])
    bad = shard(tmp_path / "bad", np.full(64 * 10, VOCABULARY, dtype=np.int64), [640])
    made = with_data(harness(training={"steps": 4}), good, held_out=bad)
    assert_fatal(made.start(), f"token id {VOCABULARY}", "held-out")


def without_checksums(run: Run, folder: Path) -> None:
    """As an earlier version saved it."""
    for path in folder.glob("*checksums.json*"):
        path.unlink()
    commits = run.attempt(1).read_commits()
    run.attempt(1).commits.unlink()
    for commit in commits:
        run.attempt(1).append_commit(replace(commit, checksum=None, files={}))


@pytest.mark.parametrize("key", ["layout", "progress", "a tensor"])
def test_a_checkpoint_with_a_missing_key(harness: MakeHarness, key: str) -> None:
    """One that was saved so, by an earlier version: where hashes tell otherwise it is damage."""
    made = harness(training={"steps": 4}, checkpoint={"interval": 2})
    made.train()
    folder = made.run.checkpoint(4)
    without_checksums(made.run, folder)
    if key == "a tensor":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        victim = next(name for name in metadata.state_dict_metadata if "exp_avg" in name)
        del metadata.state_dict_metadata[victim]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        common = torch.load(folder / "common.pt", weights_only=False)
        del common[key]
        torch.save(common, folder / "common.pt")
    made.config["training"]["steps"] = 6
    attempt = made.start(made.begin(base_iteration=4, base_path=str(folder)))
    assert_fatal(attempt, "this checkpoint cannot be loaded", key if key != "a tensor" else "exp_avg", str(folder))
    assert attempt.wait() == [3] * RANKS


@pytest.mark.long
def test_what_libraries_say_to_their_own_authors_does_not_hide_what_a_rank_says(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody's environment asks for every warning, an import alone makes twenty lines of them."""
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    attempt = harness(training={"steps": 3}, checkpoint={"interval": 2}).train(imported=False)
    assert "Warning" not in attempt.output(), attempt.output()
