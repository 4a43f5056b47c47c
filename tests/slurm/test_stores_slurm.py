"""Dumps and deduplication as Slurm jobs whose output goes to a store: the bytes of a folder, also after kills."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayrun.tokens.curate.dedup_jobs import deduplicate
from relayrun.tokens.tokenize.dump_jobs import submit_dumps
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from tests.object_server import BUCKET, ObjectServer
from tests.tokenization_corpus import train_tokenizer

from .cluster import TestCluster
from .test_dedup_slurm import cancel_arrays, data, kept, make_config

__all__ = ["data"]
pytestmark = [pytest.mark.slurm, pytest.mark.long]

RELAYRUN: list[str | Path] = [sys.executable, "-m", "relayrun", "dumps"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    found = ObjectServer(tmp_path)
    yield found
    found.close()


@pytest.fixture
def environment(server: ObjectServer, data: Path) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        variables: dict[str, str] = {"PYTHONPATH": str(data)}
        patch.setattr(patch, "setenv", variables.__setitem__)
        server.environment(patch)
    return variables


def dump_config(folder: Path, name: str, output: str, **given: Any) -> Path:
    values: dict[str, Any] = {
        "tokenizer": f"{folder}/tok/tokenizer.json",
        "tokenizer_name": "t",
        "dataset_name": "d",
        "metadata_folder": f"{folder}/meta-{name}",
        "output_folder": output,
        "logs": f"{folder}/logs-{name}",
        "tasks": 3,
        "workers": 2,
        "job": {"time": 5, "partition": "debug", "exclusive": False},
        **given,
    }
    prepare_dumps(folder / "data", values["metadata_folder"], n_dumps=2)
    (folder / f"{name}.yaml").write_text(json.dumps(values))
    return folder / f"{name}.yaml"


def submit(cluster: TestCluster, words: list[str | Path], environment: dict[str, str]) -> str:
    """Submit once the processes of cancelled jobs have ended, which Slurm no longer counts; return what was said."""

    def submitted() -> str | None:
        done = cluster.run([*RELAYRUN, *words], check=False, timeout=540, env=environment)
        assert done.returncode == 0 or "by another process" in done.stderr, done.stderr
        return done.stdout if done.returncode == 0 else None

    return cluster.wait_until(submitted, timeout=60) or ""


def test_shards_of_jobs_in_a_store(
    cluster: TestCluster, data: Path, server: ObjectServer, environment: dict[str, str]
) -> None:
    train_tokenizer(data / "tok/tokenizer.json")
    submit_dumps(load_tokenization_config(dump_config(data, "here", f"{data}/tokens", executor="local")))
    files = [file for file in (data / "tokens/t/d").rglob("*_tokens.*") if ".lock" not in file.name]
    whole = {str(file.relative_to(data / "tokens/t/d")): file.read_bytes() for file in files}
    assert len(whole) == 2 * 2 * 3
    config, generator = dump_config(data, "store", f"s3://{BUCKET}/tokens"), random.Random(1)
    for _ in range(3):
        submit(cluster, ["submit", config], environment)
        cancel_arrays(cluster, generator.uniform(2, 7))
        cluster.wait_until(lambda: not cluster.queue(), what="the queue is empty")
    submit(cluster, ["submit", config, "--wait"], environment)
    assert DumpsFolder(data / "meta-store").finished() == [0, 1]
    found = server.objects("tokens/t/d")
    assert {name: found[name] for name in whole} == whole
    assert found.keys() - whole.keys() == {"dump-0/tokenization.json", "dump-1/tokenization.json"}
    said = cluster.run([*RELAYRUN, "verify", f"s3://{BUCKET}/tokens"], env=environment).stdout
    assert said.count("no fault") == 2


def test_documents_of_stages_in_a_store(
    cluster: TestCluster, data: Path, server: ObjectServer, environment: dict[str, str]
) -> None:
    deduplicate(load_tokenization_config(make_config(data, "local", executor="local")), wait=True)
    config = make_config(data, "store")
    values = json.loads(config.read_text())
    values["dedup"]["output_folder"] = f"s3://{BUCKET}/clean"
    config.write_text(json.dumps(values))
    submit(cluster, ["dedup", config], environment)
    cancel_arrays(cluster, 8)
    cluster.wait_until(lambda: not cluster.queue(), what="the queue is empty")
    said = submit(cluster, ["dedup", config, "--wait"], environment)
    assert "dedup kept: 4/4 tasks" in said
    found = {name: text for name, text in server.objects("clean").items() if name.endswith(".gz")}
    assert found == kept(data / "local")
