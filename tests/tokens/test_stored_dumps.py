"""Dumps whose shards go to a store: the bytes of a local dump, after kills and faults of the store; a real S3 server."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs  # noqa: F401 - imported before forks, and quickly in them
import yaml

from relayrun.cli import main
from relayrun.errors import InputError
from relayrun.tokens.stores import urls
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from relayrun.tokens.tokenize.shard_folder import FolderRecord
from tests.object_server import BUCKET, ObjectServer
from tests.tokens.test_dump_steps import HERE, Workplace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    found = ObjectServer(tmp_path_factory.mktemp("server"))
    yield found
    found.close()


class Place(Workplace):
    """A data set of six files, and a config for each place that its shards go to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [[f"a text {file} {row} " * 5 for row in range(400)] for file in range(6)])

    def config(self, output: str, name: str, **settings: Any) -> Path:
        """Prepare the dump of metadata folder `name`, and write its config."""
        if not (self.folder / name).exists():
            prepare_dumps(self.data, self.folder / name)
        values = {
            "tokenizer": str(self.tokenizer),
            "tokenizer_name": "t",
            "dataset_name": "d",
            "metadata_folder": str(self.folder / name),
            "output_folder": output,
            "scratch_folder": str(self.folder / "scratch"),
            "logs": str(self.folder / "logs" / name),
            "tasks": 6,
            "workers": 1,
            "executor": "local",
            "engine": "huggingface",
            "pipeline": [{"lambda": {"filter_function": f"{HERE}.is_even"}}],
            **settings,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def local(self) -> dict[str, bytes]:
        """Return the files of the dump in a folder, by their names in it."""
        submit(self.config(str(self.folder / "tokens"), "local"))
        dump = self.folder / "tokens/t/d/dump-0"
        files = [*dump.glob("*.bin"), *dump.glob("*.idx"), *dump.glob("exclusions/*")]
        return {str(file.relative_to(dump)): file.read_bytes() for file in files}


def submit(config: Path) -> None:
    """Check and tokenize the dump here, as a job does."""
    settings = load_tokenization_config(config)
    prepare_submission(settings)
    tokenize_dump(settings, 0)


@pytest.fixture
def place(tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Place:
    server.environment(monkeypatch)
    server.fail({})
    monkeypatch.setattr(urls, "RETRY_PAUSES", (0.05,) * 5)
    return Place(tmp_path)


def stored(server: ObjectServer, name: str) -> dict[str, bytes]:
    return server.objects(f"{name}/t/d/dump-0")


def begin(config: Path) -> Any:
    """Start the work in a process of its own, and return it."""

    def work() -> None:
        with open(os.devnull, "w") as sys.stdout:
            submit(config)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def test_killed_at_any_moment_it_ends_with_the_bytes_of_a_local_dump(place: Place, server: ObjectServer) -> None:
    whole, kills, random_, took, seen = place.local(), 0, random.Random(48), 0.0, set[int]()
    for number in itertools.count():
        name = f"kills-{number}"
        config, done = place.config(f"s3://{BUCKET}/{name}", name), False
        while not done:
            process, began = begin(config), time.monotonic()
            if took and kills < 10:
                time.sleep(random_.uniform(0, 0.8 * took))
                process.kill()
                kills += 1
            process.join(120)
            done = process.exitcode == 0
            there = stored(server, name)
            seen.add(len(there))
            for shard in {file[:-4] for file in there if file.endswith(".idx")}:
                assert there[f"{shard}.bin"] == whole[f"{shard}.bin"]  # a reader takes the two for a shard
                assert there[f"{shard}.idx"] == whole[f"{shard}.idx"]
        took = took or time.monotonic() - began
        record = there.pop("tokenization.json")
        assert there == whole
        assert record == (place.folder / f"{name}/s3/{BUCKET}/{name}/t/d/dump-0/tokenization.json").read_bytes()
        if kills == 10:
            break
    assert len(seen) > 3, "the kills came between the shards, too"
    assert not any((place.folder / "scratch").iterdir())
