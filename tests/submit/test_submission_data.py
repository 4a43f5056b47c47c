"""A submit of a run whose data have changed: what it refuses leaves nothing behind, what it takes is a revision."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import InputError
from relayrun.submit import submission
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter
from tests.history import began
from tests.workspace import Workspace


@pytest.fixture
def trained(tmp_path: Path) -> Workspace:
    """A run that was submitted, has trained 100 samples, and has no job any more."""
    workspace = Workspace.make(tmp_path)
    submit(workspace, {"web": 1.0, "code": 1.0})
    run = workspace.run("run")
    began(run, 1, base=0)
    attempt = run.attempt(1)
    run.checkpoint(10).mkdir(parents=True)
    attempt.append_commit(
        CheckpointCommit(iteration=10, path=str(run.checkpoint(10)), consumed_samples=100, time=0.0, seconds=0.0)
    )
    return workspace


def config(workspace: Workspace, weights: dict[str, float]) -> Path:
    shards = {"web": "shard[01]", "code": "shard2", "books": "books*"}
    mixture = {
        name: {"path": f"{workspace.folder}/data/{shards[name]}", "weight": weight} for name, weight in weights.items()
    }
    data = {"tokenizer": f"{workspace.folder}/tokenizer.json", "datasets": [], "mixture": mixture}
    return workspace.config("run", data=data)


def submit(workspace: Workspace, weights: dict[str, float], *, accept: bool = False) -> None:
    """Queue a job, and take it out of the local queue again."""
    submission.submit_run(resolve.load_run_config(config(workspace, weights)), accept_data_change=accept)
    for job in (workspace.folder / "run").glob("local*"):
        shutil.rmtree(job)


def append_to(workspace: Workspace, shard: str) -> None:
    writer = ShardWriter(workspace.folder / "data" / shard, np.uint16)
    writer.add(np.arange(900) % 300, [900])
    writer.finish()


@pytest.mark.slow
def test_a_new_mixture_is_a_new_revision(trained: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    append_to(trained, "books0")
    submit(trained, {"web": 2.0, "code": 2.0})
    assert capsys.readouterr().err == ""  # the same ratio
    shutil.rmtree(trained.run("run").config)
    submit(trained, {"web": 1.0, "code": 1.0})
    submit(trained, {"web": 1.0, "books": 3.0})
    assert "the mixture changes: its phase begins where the next attempt resumes, now sample 100" in (
        capsys.readouterr().err
    )
    run = trained.run("run")
    assert run.revisions() == [1, 2]
    assert list(Manifest.read(run.manifest).datasets) == ["web", "code", "books"]
    assert resolve.read_resolved_config(run.config_revision(2)).data.mixture["books"].weight == 3.0
    submit(trained, {"web": 1.0, "books": 3.0})
    assert run.revisions() == [1, 2]


@pytest.mark.slow
def test_changed_files_are_refused_and_leave_the_run_as_it_was(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.run("run")
    manifest, script = run.manifest.read_bytes(), run.job_script.read_bytes()
    append_to(trained, "shard2")
    with pytest.raises(InputError, match=r"code: shard shard2 had 40 documents, .* now 1 documents, 900 tokens"):
        submit(trained, {"web": 1.0, "code": 1.0})
    assert main(["submit", str(config(trained, {"web": 1.0, "code": 1.0}))]) == 1
    assert "--accept-data-change: see `relayrun help data-order`" in capsys.readouterr().err
    assert run.revisions() == [1]
    assert run.manifest.read_bytes() == manifest
    assert run.job_script.read_bytes() == script
    submit(trained, {"web": 1.0, "code": 1.0}, accept=True)
    assert "accepted: code: shard shard2 had 40 documents" in capsys.readouterr().err
    assert resolve.read_resolved_config(run.config_revision(2)).data.mixture["code"].edition == 2
    assert list(Manifest.read(run.manifest).datasets) == ["web", "code", "code@2"]
    submit(trained, {"web": 1.0})
    submit(trained, {"web": 1.0, "code": 1.0})
    assert resolve.read_resolved_config(run.config_revision(4)).data.mixture["code"].edition == 2


def test_nothing_is_held_against_a_run_that_never_trained(trained: Workspace) -> None:
    shutil.rmtree(trained.run("run").attempts)
    append_to(trained, "shard2")
    with pytest.raises(InputError, match="it has not trained, and would begin anew"):
        submit(trained, {"web": 1.0, "code": 1.0})
    submit(trained, {"web": 1.0, "code": 1.0}, accept=True)
    run = trained.run("run")
    assert list(Manifest.read(run.manifest).datasets) == ["web", "code"]
    assert Manifest.read(run.manifest).datasets["code"].tokens == 900


def test_a_group_that_cannot_reach_its_triggers_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.make(tmp_path)
    tmp_path.chmod(0o700)
    shared = workspace.config("run", chain={"triggers_group": str(os.getgid())})
    submission.submit_run(resolve.load_run_config(shared))
    assert "cannot reach the triggers: " in capsys.readouterr().err
    submission.submit_run(resolve.load_run_config(workspace.config("alone")))
    assert "triggers" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_keeps_the_mean_of_its_loss_unless_a_submit_names_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.make(tmp_path)
    run, weights = workspace.run("run"), {"web": 1.0}

    def mean(revision: int) -> str | None:
        return resolve.read_resolved_config(run.config_revision(revision)).training.loss_mean

    submit(workspace, weights)
    assert mean(1) == "micro_batch"
    submit(workspace, weights)
    assert run.revisions() == [1]
    data = {"datasets": [], "mixture": {"web": {"path": f"{tmp_path}/data/shard[01]", "weight": 1.0}}}
    data |= {"tokenizer": f"{tmp_path}/tokenizer.json", "eod_mask_loss": True}
    for number, named in enumerate((None, "token", None), start=2):
        workspace.config("run", data=data, training={} if named is None else {"loss_mean": named})
        capsys.readouterr()
        submission.submit_run(resolve.load_run_config(tmp_path / "run.yaml"))
        for job in (tmp_path / "run").glob("local*"):
            shutil.rmtree(job)
        said = "training.loss_mean was micro_batch and is token from the next attempt on" in capsys.readouterr().err
        assert said == (named is not None)
        assert mean(min(number, 3)) == ("micro_batch" if number == 2 else "token")
    assert run.revisions() == [1, 2, 3]


@pytest.mark.slow
def test_a_list_of_shards_keeps_its_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = Workspace.make(tmp_path)
    manifest = workspace.run("run").manifest

    def submit_list(*numbers: int) -> list[int]:
        """Submit the list; return the order in which it is read."""
        paths = [f"{tmp_path}/data/shard{number}" for number in numbers]
        data = {
            "tokenizer": f"{tmp_path}/tokenizer.json",
            "datasets": [],
            "mixture": {"d": {"path": paths, "weight": 1.0}},
        }
        capsys.readouterr()
        submission.submit_run(resolve.load_run_config(workspace.config("run", data=data)))
        for job in (tmp_path / "run").glob("local*"):
            shutil.rmtree(job)
        return [int(shard.prefix[-1]) for shard in Manifest.read(manifest).datasets["d"].shards]

    assert submit_list(0, 2, 1) == [0, 2, 1]
    with pytest.raises(InputError, match="its shards stand in another order"):
        submit_list(0, 1, 2)
    assert submit_list(0, 2, 1) == [0, 2, 1]
    assert "sorted" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    assert submit_list(0, 1, 2) == [0, 1, 2]


@pytest.mark.slow
def test_the_list_of_a_validation_set_keeps_its_order(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    manifest = workspace.run("run").manifest
    for seed, name in enumerate("abc", start=2):
        shutil.move(Workspace.make(tmp_path / name, seed=seed).folder / "data", tmp_path / "held-out" / name)

    def submit_list(names: str) -> str:
        """Submit the list of folders; return the order in which they are read."""
        held_out = {"books": [f"{tmp_path}/held-out/{name}" for name in names]}
        data = {"tokenizer": f"{tmp_path}/tokenizer.json", "datasets": [f"{tmp_path}/data"], "validation": held_out}
        submission.submit_run(resolve.load_run_config(workspace.config("run", data=data)))
        for job in (tmp_path / "run").glob("local*"):
            shutil.rmtree(job)
        shards = Manifest.read(manifest).validation["books"].shards
        assert [Path(shard.prefix).name for shard in shards[:3]] == ["shard0", "shard1", "shard2"]
        return "".join(dict.fromkeys(Path(shard.prefix).parent.name for shard in shards))

    assert submit_list("bca") == "bca"
    with pytest.raises(InputError, match="validation 'books': its shards stand in another order"):
        submit_list("abc")
    shutil.rmtree(tmp_path / "run")
    assert submit_list("abc") == "abc"
