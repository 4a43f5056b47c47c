"""Dumps whose shards go to a store, a real server of S3: the bytes of a local dump, after kills and faults."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import s3fs
import yaml

from relayrun.cli import main
from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.order.remote_shards import MIN_CACHE_BYTES, BlockCache, freeze_shards
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, submit_dumps, tokenize_dump
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from tests.object_server import BUCKET, ObjectServer
from tests.tokens.test_dump_steps import HERE, Workplace
from tests.waiting import wait_for


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
    server.begin(monkeypatch)
    return Place(tmp_path)


def stored(server: ObjectServer, name: str) -> dict[str, bytes]:
    return server.objects(f"{name}/t/d/dump-0")


def wait_for_objects(process: Any, server: ObjectServer, name: str, count: int) -> None:
    """Wait until so many objects are stored, or the work has ended."""
    wait_for(lambda: not process.is_alive() or len(server.names(f"{name}/t/d/dump-0")) >= count, 120)


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
            there = stored(server, name)
            process, began = begin(config), time.monotonic()
            if took and kills < 10:
                if kills % 2:  # between two objects, however long a start takes
                    more = len(there) + random_.randint(1, 4)
                    wait_for_objects(process, server, name, more)
                else:
                    process.join(random_.uniform(0, 0.8 * took))
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


def test_faults_of_the_store_pass_and_what_is_there_stays(
    place: Place, server: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, config = place.local(), place.config(f"s3://{BUCKET}/faults/", "faults")
    capsys.readouterr()
    # the probe passes; then a server that fails, loses half of a file, and is slow
    server.fail({"PUT": [None, 503, "short", None, 500, 1.5], "GET": [None, None, 500], "HEAD": [None, 500]})
    submit(config)
    assert server.faults_left() == 0
    assert "the store gives back other bytes than were written; tried again" in capsys.readouterr().err
    found = stored(server, "faults")
    assert {name: found[name] for name in whole} == whole
    row = (place.folder / "faults/tokenize-t-d.csv").read_text().splitlines()[1]
    assert f"s3://{BUCKET}/faults/t/d/dump-0" in row
    assert f",{sum(len(data) for name, data in whole.items() if name.endswith('.bin'))}," in row


def test_verify_finds_what_was_changed_and_the_next_submit_makes_that_alone(
    place: Place, server: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, config = place.local(), place.config(f"s3://{BUCKET}/changed", "changed")
    submit(config)
    metadata, client = place.folder / "changed", server.client()
    capsys.readouterr()
    assert main(["dumps", "verify", str(metadata), "--full", "--workers", "1"]) == 0
    assert capsys.readouterr().out == "dump 0: 6 shards, 1,200 documents tokenized again: no fault\n"
    assert "1/1 done" in (main(["dumps", "status", str(metadata)]), capsys.readouterr().out)[1]
    names = ("00001_tokens.bin", "exclusions/00002_tokens.jsonl.gz", "00003_tokens.idx")
    for name in names[:2]:
        data = bytearray(whole[name])
        data[len(data) // 2] ^= 1
        client.put_object(Bucket=BUCKET, Key=f"changed/t/d/dump-0/{name}", Body=bytes(data))
    client.delete_object(Bucket=BUCKET, Key=f"changed/t/d/dump-0/{names[2]}")
    again = whole["00004_tokens.bin"]  # the same bytes at another time are the same
    client.put_object(Bucket=BUCKET, Key="changed/t/d/dump-0/00004_tokens.bin", Body=again)
    assert main(["dumps", "verify", str(metadata), "--workers", "1"]) == 1
    said = capsys.readouterr().out
    url = f"s3://{BUCKET}/changed/t/d/dump-0"
    assert f"dump 0: {url}/{names[0]} is not what its record says (xxh3-128)\n" in said
    assert f"dump 0: {url}/{names[1]} is not what its record says (xxh3-128)\n" in said
    assert f"dump 0: {url}/{names[2]} is gone\n" in said
    assert "opened again: submit" in said
    submit(config)
    assert sorted(re.findall(r"(\d+)_tokens: \d+ documents", capsys.readouterr().out)) == ["00001", "00002", "00003"]
    found = stored(server, "changed")
    assert {name: found[name] for name in whole} == whole


def test_verify_takes_a_url_alone(place: Place, server: ObjectServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The shards of a store, or copies of them in another place, without the metadata folder that made them."""
    submit(place.config(f"s3://{BUCKET}/alone", "alone"))
    client, url = server.client(), f"s3://{BUCKET}/moved"
    for name, data in server.objects("alone/t/d").items():
        client.put_object(Bucket=BUCKET, Key=f"moved/{name}", Body=data)
    capsys.readouterr()
    for place_of_shards in (url, f"{url}/dump-0/"):
        assert main(["dumps", "verify", place_of_shards, "--full", "--workers", "1"]) == 0
        assert capsys.readouterr().out == "dump 0: 6 shards, 1,200 documents tokenized again: no fault\n"
    client.delete_object(Bucket=BUCKET, Key="moved/dump-0/00003_tokens.idx")
    s3fs.S3FileSystem.clear_instance_cache()
    assert main(["dumps", "verify", url, "--workers", "1"]) == 1
    said = capsys.readouterr().out
    assert f"dump 0: {url}/dump-0/00003_tokens.idx is gone\n" in said
    assert "stays finished (verify its metadata folder to have it made again)" in said
    client.delete_object(Bucket=BUCKET, Key="moved/dump-0/tokenization.json")
    s3fs.S3FileSystem.clear_instance_cache()
    assert main(["dumps", "verify", url]) == 1
    assert f"{url}: no dump is finished here" in capsys.readouterr().err


def test_a_submit_finds_what_was_changed_in_an_unfinished_dump(
    place: Place, server: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, config = place.local(), place.config(f"s3://{BUCKET}/open", "open")
    submit(config)
    DumpsFolder(place.folder / "open").reopen(0)
    prepare_dumps(place.data, place.folder / "open")  # knows that its shards are there
    key = "open/t/d/dump-0/00005_tokens.bin"
    server.client().put_object(Bucket=BUCKET, Key=key, Body=whole["00005_tokens.bin"][:-2])
    submit(config)
    said = capsys.readouterr()
    assert f"00005_tokens is made again: s3://{BUCKET}/{key} is not what its record says" in said.err
    found = stored(server, "open")
    assert {name: found[name] for name in whole} == whole
    other = place.config(f"s3://{BUCKET}/open", "other")
    with pytest.raises(InputError, match="another metadata folder made the shards here"):
        submit(other)


def test_other_commands_read_it_or_say_how_to_copy_it(
    place: Place, server: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(place.config(f"s3://{BUCKET}/read", "read"))
    url = f"s3://{BUCKET}/read/t/d"
    capsys.readouterr()
    assert main(["data", "why", "0.jsonl/1", url]) == 0
    assert "dropped by lambda: dropped (row 1 of 0.jsonl, shard 00000_tokens)" in capsys.readouterr().out
    copy = place.folder / "copy"
    for command in (
        ["dumps", "merge", "--input", url, "--output-prefix", str(place.folder / "merged")],
        ["mixture", "create", "--folders", url, "--weights", "1", "--output", str(place.folder / "mixture")],
        ["mixture", "verify", url],
    ):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert f"{url}: this is a URL, and shards are linked, merged and verified in folders" in said, command
    line = said.partition("copy them first: ")[2].replace("FOLDER", str(copy))
    subprocess.run(line.replace("python", sys.executable, 1), shell=True, check=True)
    assert main(["mixture", "verify", str(copy)]) == 0
    assert "6 shards" in capsys.readouterr().out
    assert Path(copy, "dump-0", "exclusions").is_dir()


def test_training_reads_the_samples_of_a_local_dump(place: Place, server: ObjectServer) -> None:
    place.local()
    submit(place.config(f"s3://{BUCKET}/train", "train"))
    frozen = freeze_shards([f"s3://{BUCKET}/train/t/d"])
    here = freeze_shards([str(place.folder / "tokens/t/d")])
    assert frozen.fingerprint == here.fingerprint
    blocks = BlockCache(place.folder / "cache", MIN_CACHE_BYTES)
    found, expected = (WindowOrder(each, seq_length=128, seed=1, blocks=blocks) for each in (frozen, here))
    assert len(found) == len(expected) > 50
    assert all(np.array_equal(found.read(0, i), expected.read(0, i)) for i in range(0, len(found), 9))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("s3://nowhere/x", r"s3://nowhere/x/t/d/dump-0/.relayrun-probe: there is no such bucket or folder"),
        ("s4://mine/x", r"s4://mine/x/t/d/dump-0/.relayrun-probe: fsspec cannot use this: Protocol not known: s4"),
        (
            f"s3://{BUCKET}/forbidden",
            r"s3://mine/forbidden/t/d/dump-0/.relayrun-probe: fsspec cannot use this: Forbidden",
        ),
        ("file:///x", r"output_folder: file:///x is a URL, and only folders"),
        ("s3://me:secret@mine/x", r"s3://\.\.\.: a URL with a password in it"),
        ("s3:/mine/x", r"output_folder: s3://mine/x is a URL"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused_before_anything_is_queued(
    place: Place, server: ObjectServer, output: str, words: str
) -> None:
    config = place.config(output, "refused")
    server.fail({"PUT": [403]} if "forbidden" in output else {})
    with pytest.raises(RelayrunError, match=words) as refused:
        submit_dumps(load_tokenization_config(config))
    assert "\n" not in refused.value.message
    assert not (place.folder / "refused/tokenized-dir-link").is_symlink()
    assert not list(server.objects("forbidden"))


def test_a_large_file_is_put_in_parts_whole_or_not_at_all(place: Place, server: ObjectServer) -> None:
    """Above 100 MB s3fs puts parts of 50 MB, and names the object when all are there."""
    file, url = place.folder / "00000_tokens.bin", f"s3://{BUCKET}/large/00000_tokens.bin"
    file.write_bytes(random.Random(0).randbytes(1 << 20) * 120)
    checksum, client = file_checksum(file), server.client()
    server.fail({"PUT": [None, 30.0, 30.0, 30.0]})
    killed = multiprocessing.get_context("fork").Process(target=urls.put_file, args=(file, url, checksum))
    killed.start()
    wait_for(lambda: client.list_multipart_uploads(Bucket=BUCKET).get("Uploads"), 60)
    wait_for(lambda: server.faults_left() < 3, 60)
    killed.kill()
    killed.join()
    assert server.names("large") == []
    server.fail({"PUT": [None, 500]})
    size, _ = urls.put_file(file, url, checksum)
    assert (size, server.names("large")) == (120 << 20, ["00000_tokens.bin"])
    assert urls.content_checksum(url) == checksum
    assert client.head_object(Bucket=BUCKET, Key="large/00000_tokens.bin")["ETag"].strip('"').endswith("-3")


def test_another_file_system_of_fsspec(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds for `memory:`, whose files this process alone sees, holds for `gs:` and `az:` as far as they do what
    fsspec promises: their packages are not needed here."""
    whole, config = place.local(), place.config("memory://mine/tokens", "memory")
    submit(config)
    store = fsspec.filesystem("memory")
    found = {name: store.cat_file(f"/mine/tokens/t/d/dump-0/{name}") for name in whole}
    assert found == whole
    store.pipe_file("/mine/tokens/t/d/dump-0/00002_tokens.bin", whole["00002_tokens.bin"][:-2])
    capsys.readouterr()
    for place_of_shards in (str(place.folder / "memory"), "memory://mine/tokens"):
        assert main(["dumps", "verify", place_of_shards, "--workers", "1"]) == 1
        assert "00002_tokens.bin is not what its record says (xxh3-128)" in capsys.readouterr().out
    submit(config)
    assert re.findall(r"(\d+)_tokens: \d+ documents", capsys.readouterr().out) == ["00002"]
    assert {name: store.cat_file(f"/mine/tokens/t/d/dump-0/{name}") for name in whole} == whole


def test_several_workers_put_side_by_side(place: Place, server: ObjectServer) -> None:
    """Two workers are processes of their own, which get the credentials."""
    whole, config = place.local(), place.config(f"s3://{BUCKET}/two", "two", workers=2)
    submit(config)
    found = stored(server, "two")
    assert {name: found[name] for name in whole} == whole
