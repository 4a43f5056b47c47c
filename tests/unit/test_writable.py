"""Nothing is written below `read_only_paths`: every output of every job and tool is looked at first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config import sites, writable
from relayrun.errors import ConfigError
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


def test_what_lies_below_is_found_through_links_and_dots(tmp_path: Path) -> None:
    store, other = tmp_path / "store", tmp_path / "storehouse"
    (store / "deep").mkdir(parents=True)
    other.mkdir()
    (tmp_path / "link").symlink_to(store / "deep")
    (tmp_path / "way").symlink_to(tmp_path)
    below = [store, store / "x/y", tmp_path / "link" / "new", other / ".." / "store" / "x"]
    for path in below:
        assert writable.protected(path, [str(store)]) == str(store)
        assert writable.protected(path, ["/nowhere", str(tmp_path / "way/store")]) == str(tmp_path / "way/store")
    for path in (other, tmp_path, "s3://store/x", store / ".." / "x"):
        assert writable.protected(path, [str(store)]) is None


@pytest.mark.parametrize("name", ["run_dir", "data.data_cache_dir"])
@pytest.mark.parametrize("dry", [False, True])
def test_a_run_that_would_write_there_is_refused_before_anything_is_made(
    tmp_path: Path, name: str, dry: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace, store = Workspace.make(tmp_path), tmp_path / "store"
    store.mkdir()
    path = workspace.config("a")
    overrides = [f"--set=cluster.read_only_paths=[{store}]", f"--set={name}={store}/deep/x"]
    assert main(["submit", str(path), *overrides, *(["--dry-run"] if dry else [])]) == 1
    said = capsys.readouterr().err
    assert f"allows no writing below {store}, and {name} is {store}/deep/x" in said
    assert not list(store.iterdir())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that cluster `strict` protects, and another cluster that protects nothing."""
    folder = tmp_path / "clusters"
    folder.mkdir()
    (folder / "strict.yaml").write_text(f"name: strict\nscheduler: slurm\nread_only_paths: [{tmp_path}/store]\n")
    (folder / "free.yaml").write_text("name: free\nscheduler: slurm\n")
    monkeypatch.setattr(sites, "folders", lambda config=None: [folder])
    monkeypatch.delenv("CLUSTER", raising=False)
    return tmp_path / "store"


def test_a_tool_without_a_config_asks_for_the_cluster_of_the_environment_or_all(store: Path) -> None:
    for environment in ({}, {"CLUSTER": "strict"}):
        with pytest.raises(ConfigError, match=f"--output: {store}/x lies below {store}, where cluster 'strict'"):
            writable.check_outputs({"--output": store / "x", "--other": None}, environment)
    writable.check_outputs({"--output": store / "x"}, {"CLUSTER": "free"})
    with pytest.raises(ConfigError, match=r"CLUSTER=none: unknown cluster 'none'; there are: free, strict"):
        writable.check_outputs({"--output": store / "x"}, {"CLUSTER": "none"})


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["import", "hf", "/nowhere", "--output", "STORE/ckpt"], marks=pytest.mark.slow),  # imports torch
        pytest.param(["export", "hf", "no/run", "--output", "STORE/hf"], marks=pytest.mark.slow),
        pytest.param(["export", "torch", "no/run", "--output", "STORE/torch"], marks=pytest.mark.slow),
        ["gpu-check", "--tiny", "--folder", "STORE/check"],
    ],
)
def test_commands_refuse(command: Sequence[str], store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command[0] == "gpu-check":
        file = store.parent / "strict-local.yaml"
        file.write_text(f"name: strict\nscheduler: local\nread_only_paths: [{store}]\n")
        command = [*command, f"--cluster={file}"]
    assert main([word.replace("STORE", str(store)) for word in command]) == 1
    assert f"lies below {store}, where cluster 'strict' allows no writing" in capsys.readouterr().err
    assert not store.exists()


TOOLS = {
    "tools/merge_datasets.py": ["--input", "/nowhere", "--output-prefix", "STORE/m"],
    "tools/create_data_mixture.py": ["--folders", "/nowhere", "--weights", "1", "--output", "STORE/mix", "--dry-run"],
    "tokenization/reshard.py": ["--dataset-folder", "/nowhere", "--output-folder", "STORE/r"],
    "tokenization/preprocess_megatron.py": [
        *("--output-folder", "STORE/t", "--dataset", "/nowhere", "--paths-file", "/nowhere"),
        *("--tokenizer-name-or-path", "x"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_scripts_refuse(tool: str) -> None:
    """With the file of a real site: nothing of it is there, and nothing is made."""
    arguments = [word.replace("STORE", "/capstor/store/x") for word in TOOLS[tool]]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / tool), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1, done
    assert "lies below /capstor/store, where cluster 'alps' allows no writing" in done.stderr
    assert not Path("/capstor").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["submit_merge.sh", "submit_reshard.sh"])
def test_bash_scripts_refuse_before_a_job_is_queued(script: str, tmp_path: Path) -> None:
    """An sbatch that would tell: it is never called."""
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\ntouch {tmp_path}/called\n")
    (tmp_path / "sbatch").chmod(0o755)
    arguments = {
        "submit_merge.sh": [str(tmp_path)],  # its logs are meant to go there
        "submit_reshard.sh": ["--dataset-folder", "/x", "--output-folder", "/capstor/store/y"],
    }[script]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environment["PATH_TO_LOGS"] = "/capstor/store/logs" if script == "submit_merge.sh" else str(tmp_path)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/tokenization" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode != 0
    assert "where cluster 'alps' allows no writing" in done.stderr, done
    assert not (tmp_path / "called").exists()
