"""`relayrun dumps dedup` into a store, a real server of S3: the files of a local folder, after kills and faults."""

from __future__ import annotations

import fnmatch
import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from relayrun.cli import main
from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.curate.dedup_jobs import deduplicate
from relayrun.tokens.tokenize.dump_status import dedup_status
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import TokenizationConfig, load_tokenization_config
from tests.object_server import BUCKET, ObjectServer
from tests.tokens.test_dedup import PARAGRAPHS, Place, documents, parts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    found = ObjectServer(tmp_path_factory.mktemp("server"))
    yield found
    found.close()


@pytest.fixture
def place(tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Place:
    server.begin(monkeypatch)
    return Place(tmp_path, documents() + parts("\n"))


def config(place: Place, url: str, meta: str, **given: Any) -> TokenizationConfig:
    """Prepare the dumps of metadata folder `meta`; return the settings of its deduplication into `url`."""
    place.config(meta, minhash=None, sentences=PARAGRAPHS, **given)
    file = place.folder / f"{meta}.yaml"
    values = json.loads(file.read_text())
    values["dedup"]["output_folder"], values["metadata_folder"] = url, f"{place.folder}/{meta}"
    file.write_text(json.dumps(values))
    if not Path(values["metadata_folder"]).exists():
        prepare_dumps(place.data, values["metadata_folder"], n_dumps=2)
    return load_tokenization_config(file)


def local(place: Place) -> dict[str, bytes]:
    """Return the files of a deduplication into a folder that a store gets: what stays and what is dropped."""
    folder = place.folder / "local"
    deduplicate(place.config("local", minhash=None, sentences=PARAGRAPHS), wait=True)
    files = [*folder.glob("*.gz"), *folder.glob("_dedup/*/exclusions/*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def stored(server: ObjectServer, name: str) -> dict[str, bytes]:
    """Return the same files of a store."""
    return {key: data for key, data in server.objects(name).items() if key.endswith(".gz")}


def begin(settings: TokenizationConfig) -> Any:
    def work() -> None:
        with open(os.devnull, "w") as sys.stdout:
            deduplicate(settings, wait=True)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def test_killed_at_any_moment_it_ends_with_the_files_of_a_folder(place: Place, server: ObjectServer) -> None:
    whole, kills, random_, took, early = local(place), 0, random.Random(48), 0.0, 0
    assert len(whole) == 9
    for number in itertools.count():
        settings = config(place, f"s3://{BUCKET}/kills-{number}", f"kills-{number}")
        done = False
        while not done:
            process, began = begin(settings), time.monotonic()
            if took and kills < 10:
                process.join(random_.uniform(0.1, 0.95) * took)
                process.kill()
                kills += 1
            process.join(120)
            done = process.exitcode == 0
            there = stored(server, f"kills-{number}")
            assert there.items() <= whole.items()  # whole or not at all
            names = server.names(f"kills-{number}")
            if "_dedup/settings.json" in names and len(fnmatch.filter(names, "*/kept-*.json")) < 3:
                s3fs.S3FileSystem.clear_instance_cache()
                with pytest.raises(InputError, match="this deduplication is not complete"):
                    prepare_dumps(f"s3://{BUCKET}/kills-{number}", place.folder / "too-early")
                early += 1
        took = took or time.monotonic() - began
        assert there == whole
        if kills == 10:
            break
    assert early
    (dump,) = prepare_dumps(f"s3://{BUCKET}/kills-0", place.folder / "next", n_dumps=1)
    assert sorted(file.path for file in dump.files) == [f"0000{task}.jsonl.gz" for task in range(3)]


def test_an_incomplete_one_is_no_data_set(place: Place, server: ObjectServer) -> None:
    url = f"s3://{BUCKET}/part"
    deduplicate(config(place, url, "part"), wait=True)
    prepare_dumps(url, place.folder / "whole", n_dumps=1)
    server.client().delete_object(Bucket=BUCKET, Key="part/_dedup/records/kept-00001.json")
    with pytest.raises(InputError, match="this deduplication is not complete"):
        prepare_dumps(url, place.folder / "again")


def test_what_is_damaged_is_made_again_and_others_keep_away(
    place: Place, server: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, settings = local(place), config(place, f"s3://{BUCKET}/damaged", "damaged")
    server.fail({"PUT": [503, None, "short", 500], "GET": [None, 500]})
    deduplicate(settings, wait=True)
    assert server.faults_left() == 0
    assert stored(server, "damaged") == whole
    assert "dedup is done" in dedup_status(settings.metadata_folder)[-1]
    lines = gzip.decompress(whole["_dedup/kept/exclusions/00000.jsonl.gz"]).splitlines()
    dropped = next(line for line in map(json.loads, lines) if not line.get("cut"))
    capsys.readouterr()
    assert main(["data", "why", f"{dropped['file']}/{dropped['row']}", f"s3://{BUCKET}/damaged"]) == 0
    assert "dropped by" in capsys.readouterr().out
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="damaged/00001.jsonl.gz", Body=whole["00001.jsonl.gz"][:-3])
    client.delete_object(Bucket=BUCKET, Key="damaged/_dedup/kept/exclusions/00002.jsonl.gz")
    client.put_object(Bucket=BUCKET, Key="damaged/00000.jsonl.gz", Body=whole["00000.jsonl.gz"])  # at another time
    capsys.readouterr()
    s3fs.S3FileSystem.clear_instance_cache()  # a command is a process of its own
    deduplicate(settings, wait=True)
    made = re.findall(r"stage (\w+: task \d+) done", capsys.readouterr().out)
    assert sorted(made) == ["kept: task 1", "kept: task 2"]
    assert stored(server, "damaged") == whole
    with pytest.raises(InputError, match="another metadata folder made the documents here"):
        deduplicate(config(place, f"s3://{BUCKET}/damaged", "other"), wait=True)


def test_the_statistics_are_those_of_a_folder(place: Place, server: ObjectServer) -> None:
    stats = [{"DocStats": {"groups_to_compute": ["summary", "histogram"]}}]
    deduplicate(config(place, f"s3://{BUCKET}/stats", "stored", stats=stats), wait=True)
    deduplicate(place.config("local", minhash=None, sentences=PARAGRAPHS, stats=stats), wait=True)
    there = {key: data for key, data in server.objects("stats").items() if key.endswith("metric.json")}
    folder = place.folder / "local"
    here = {str(file.relative_to(folder)): file.read_bytes() for file in (folder / "_stats").rglob("*.json")}
    assert there == here
    assert "_stats/summary/length/metric.json" in here
    (dump,) = prepare_dumps(f"s3://{BUCKET}/stats", place.folder / "next", n_dumps=1)
    assert len(dump.files) == 3


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://nowhere/x", "s3://nowhere/x/_dedup/settings.json: there is no such bucket or folder"),
        (f"s3://{BUCKET}/forbidden", r"s3://mine/forbidden/_dedup/settings.json: fsspec cannot use this: Forbidden"),
        ("file:///x", "dedup.output_folder: file:///x is a URL, and only folders"),
        ("s3://me:secret@mine/x", r"s3://\.\.\.: a URL with a password in it"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused_before_any_stage(
    place: Place, server: ObjectServer, url: str, words: str
) -> None:
    server.fail({"PUT": [403]} if "forbidden" in url else {})
    with pytest.raises(RelayrunError, match=words):
        deduplicate(config(place, url, "refused"), wait=True)
    assert not list((place.folder / "refused").rglob("kept-*"))
