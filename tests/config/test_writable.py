"""Nothing is written below `read_only_paths`: every output of every job and tool is looked at first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve, sites, writable, yaml_file
from relayrun.errors import ConfigError, InputError
from relayrun.tokens.mixture.create_mixture import create_mixture
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.tokenize.datatrove_pipeline import MegatronTokenWriter
from relayrun.tokens.tokenize.encode.tokenizer_files import write_byte_tokenizer
from relayrun.tokens.tokenize.job_config import ENVIRONMENT_SETTINGS, settings_from_environment
from relayrun.tokens.tokenize.train_tokenizer import train_tokenizer
from tests.history import make_history
from tests.workspace import CONFIG, Workspace

ROOT = Path(__file__).resolve().parents[2]


def test_what_lies_below_is_found_through_links_and_dots(tmp_path: Path) -> None:
    store, other = tmp_path / "store", tmp_path / "storehouse"
    (store / "deep").mkdir(parents=True)
    other.mkdir()
    (tmp_path / "link").symlink_to(store / "deep")
    (tmp_path / "way").symlink_to(tmp_path)
    below = [store, store / "x/y", tmp_path / "link" / "new", other / ".." / "store" / "x"]
    for path in below:
        assert writable.read_only_path_of(path, [str(store)]) == str(store)
        assert writable.read_only_path_of(path, ["/nowhere", str(tmp_path / "way/store")]) == str(
            tmp_path / "way/store"
        )
    for path in (other, tmp_path, "s3://store/x", store / ".." / "x"):
        assert writable.read_only_path_of(path, [str(store)]) is None


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
    monkeypatch.setattr(sites, "site_folders", lambda config=None: [folder])
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


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://b", "hf://datasets/me/x", "file:///tmp/x"])
def test_a_url_is_no_place_to_write_to_whatever_became_of_its_slashes(url: str, store: Path) -> None:
    for given in (url, Path(url)):
        with pytest.raises(ConfigError, match=f"--output: {url} is a URL, and only folders of this machine"):
            writable.check_outputs({"--output": given})
    for path in ("a:/b", "/x/s3:/y", "s3:", "x/s3://y", store.parent / "s3:" / "y"):
        writable.check_outputs({"--output": path})


@pytest.mark.parametrize(
    "command",
    [
        "dumps example --output-folder URL",
        "dumps tokenizer --bytes --output-folder URL",
        "dumps shuffle --dataset-folder . --output-folder URL",
        "dumps shuffle --dataset-folder . --output-folder x --temp-dir URL",
        "dumps prepare --dataset-folder . --preprocessing-metadata-folder URL",
        "dumps tokenize --output-folder URL --dataset . --paths-file p --tokenizer-name-or-path t",
        "dumps tokenize --output-folder x --logging-dir URL --dataset . --paths-file p --tokenizer-name-or-path t",
        "dumps merge --input . --output-prefix URL",
        "dumps tune meta --tokenizer-name-or-path t --temp-dir URL",
        "dumps verify meta --temp-dir URL",
        "mixture create --folders . --weights 1 --output URL",
        "mixture verify . --temp-dir URL",
        "data lengths . --picture URL",
        "export hf run --output URL",
        "export torch run --output URL",
        "export megatron run --output URL",
        "import hf . --output URL",
        "import megatron . --output URL",
        "report run --html URL",
        "gpu-check --tiny --folder URL",
        "gpu-check --tiny --output URL",
        "runs move run URL",
        "runs archive run --to URL",
        "checkpoint restore run --to URL",
        "init URL",
    ],
)
def test_no_command_takes_a_url_for_a_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_history(tmp_path / "run", lines=2, attempts=1)
    before = sorted(tmp_path.rglob("*"))
    words = command.replace("URL", "s3://bucket/x").split()
    assert main(words) == 1
    name = next((option for option, word in pairwise(words) if "://" in word and option.startswith("-")), "")
    said = capsys.readouterr().err
    assert f"{name}: s3://bucket/x is a URL, and only folders of this machine are written to" in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["run_dir", "data.data_cache_dir", "data.shard_cache_dir", "cluster.environment.HF_HOME"]
)
def test_no_setting_of_a_run_takes_a_url_for_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Workspace.make(tmp_path).config("a")
    before = sorted(tmp_path.rglob("*"))
    assert main(["submit", str(path), f"--set={name}=s3://bucket/x"]) == 1
    said = capsys.readouterr().err
    assert name in said
    assert "s3://bucket/x is a URL, and only folders of this machine are written to" in said
    campaign = tmp_path / "sweep.yaml"
    campaign.write_text(path.read_text() + "sweep: {product: {optimizer.lr: [0.01, 0.02]}}\n")
    assert main(["sweep", "submit", str(campaign), f"--set={name}=s3://bucket/x"]) == 1
    assert "s3://bucket/x is a URL" in capsys.readouterr().err
    assert sorted({*tmp_path.rglob("*")} - {campaign}) == before


@pytest.mark.parametrize("name", ["save_file", "leave_file"])
def test_no_file_that_asks_a_program_is_a_url(name: str, tmp_path: Path) -> None:
    own = {"run": ["python3", "train.py"], name: "s3://bucket/x"}
    (tmp_path / "run.yaml").write_text(
        yaml_file.dump_yaml(
            {each: CONFIG[each] for each in ("project", "name", "job", "cluster")}
            | {"trainer": "command", "command": own}
        )
    )
    with pytest.raises(ConfigError, match=rf"command\.{name}: s3://bucket/x is a URL"):
        resolve.load_run_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("name", ["metadata_folder", "scratch_folder", "logs", "cache_dir"])
def test_no_setting_of_a_tokenization_takes_a_url_for_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {"tokenizer": "t", "tokenizer_name": "t", "dataset_name": "d", "metadata_folder": "m", "output_folder": "o"}
    (tmp_path / "dumps.yaml").write_text(yaml_file.dump_yaml(own | {name: "gs://bucket/x"}))
    assert main(["dumps", "submit", "dumps.yaml"]) == 1
    assert f"{name}: gs://bucket/x is a URL, and only folders" in capsys.readouterr().err
    if name.startswith(("cache", "scratch")):  # no variables of the launcher
        return
    variable = next(each for each, setting in ENVIRONMENT_SETTINGS.items() if setting == name)
    values = {each: own.get(setting, "") for each, setting in ENVIRONMENT_SETTINGS.items()}
    with pytest.raises(ConfigError, match="gs://bucket/x is a URL, and only folders of this machine"):
        settings_from_environment(values | {variable: "gs://bucket/x"})
    assert [path.name for path in tmp_path.iterdir()] == ["dumps.yaml"]


def test_a_url_without_its_slashes_is_no_folder_for_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {"tokenizer": "t", "tokenizer_name": "t", "dataset_name": "d", "metadata_folder": "m"}
    (tmp_path / "dumps.yaml").write_text(yaml_file.dump_yaml(own | {"output_folder": "hdfs:x/y"}))
    assert main(["dumps", "submit", "dumps.yaml"]) == 1
    assert "output_folder: is a URL without its slashes; write hdfs://..." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dumps.yaml"]


def test_no_step_of_a_pipeline_takes_a_url_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="s3://bucket/x is a URL, and only folders of this machine"):
        MegatronTokenWriter("s3://bucket/x", "t")


@pytest.mark.parametrize("url", ["s3://bucket/x", Path("S3://bucket/x"), "file:///tmp/x"])
@pytest.mark.parametrize(
    "call",
    [
        lambda url: merge_shards(["a"], url),
        lambda url: create_mixture([], [], url),
        lambda url: write_byte_tokenizer(Path(url)),
        lambda url: train_tokenizer(["."], Path(url), vocabulary_size=300),
    ],
    ids=["merge", "mixture", "bytes", "tokenizer"],
)
def test_no_function_takes_a_url_for_a_folder(
    call: Callable[[str | Path], object], url: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that was made absolute first is no URL any more."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is a URL, and only folders of this machine"):
        call(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["--to", "FOLDER"])
@pytest.mark.parametrize("of", ["site", "run"])
def test_a_run_is_moved_nowhere_where_nothing_may_be_written(
    word: str, of: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_history(tmp_path / "runs/p/run", lines=2, attempts=1)
    run.stop.write_text("done: all\n")
    store.mkdir()
    if of == "run":  # its config has a cluster of its own
        monkeypatch.setenv("CLUSTER", "free")
        run.config.mkdir(exist_ok=True)
        run.config_revision(1).write_text(f"cluster: {{name: own, read_only_paths: [{store}]}}\n")
    before = sorted(tmp_path.rglob("*"))
    arguments = (
        ["archive", str(run.path), "--to", str(store)] if word == "--to" else ["move", str(run.path), f"{store}/x"]
    )
    assert main(["runs", *arguments]) == 1
    whose = "strict" if of == "site" else "own"
    assert f"lies below {store}, where cluster {whose!r} allows no writing" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
