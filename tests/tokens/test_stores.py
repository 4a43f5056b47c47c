"""Data sets below URLs, from prepare_dumps.py to the shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from relayrun.errors import InputError
from relayrun.tokens.readers.inputs import read_paths_file
from relayrun.tokens.stores import urls
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import (
    DumpsFolder,
    dump_size,
    prepare_dumps,
)
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.tune import run_trials
from tests.tokenization_corpus import EOS, TEXTS, taken_files, train_tokenizer, write_parquet
from tests.tokens.test_preprocess import write_jsonl

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"a.parquet": 50, "b/C.JSONL": 40, "b/x y*?'.jsonl.gz": 30, "e.jsonl.zst": 20, "b/notes.md": 5}


@pytest.fixture(autouse=True)
def _memory_is_empty() -> Iterator[None]:
    """fsspec's memory is one store for the whole process: what a test leaves there, another one would list."""
    memory = fsspec.filesystem("memory")
    yield
    for entry in memory.ls("/", detail=False):
        memory.rm(entry, recursive=True)


def place(scheme: str, folder: Path) -> str:
    url = f"file://{folder}/da ta" if scheme == "file" else f"memory://{uuid.uuid4().hex}"
    for name, size in SIZES.items():
        with fsspec.open(f"{url}/{name}", "wb", auto_mkdir=True) as file:
            file.write(b"x" * size)
    return url


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_files_below_a_url_are_found_as_below_a_folder(scheme: str, tmp_path: Path) -> None:
    url, local = place(scheme, tmp_path / "far"), place("file", tmp_path / "near").removeprefix("file://")
    here, there = taken_files(local), taken_files(url + "/")
    assert [(file.path, file.size) for file in there] == [(file.path, file.size) for file in here]
    for filters in ({"filter_in": ["b/", "a.p"]}, {"filter_out": ["b/"]}, {"filter_in": ["b"], "filter_out": ["C"]}):
        kept = [file.path for file in taken_files(local, **filters)]
        assert [file.path for file in taken_files(url, **filters)] == kept != []


def test_the_root_of_a_store_is_a_data_set_too() -> None:
    name = uuid.uuid4().hex
    with fsspec.open(f"memory://{name}.jsonl", "wb") as file:
        file.write(b"{}")
    assert f"{name}.jsonl" in [file.path for file in taken_files("memory://")]
    assert urls.stat_url(urls.join_path("memory://", f"{name}.jsonl"))[0] == 2


def test_a_file_url_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert urls.absolute_path("file://da ta/") == f"file://{tmp_path}/da ta"


def test_dumps_below_a_url_have_its_text_as_their_link(tmp_path: Path) -> None:
    url, metadata = place("memory", tmp_path), tmp_path / "meta"
    prepare_dumps(url + "/", metadata, n_dumps=2)
    assert os.readlink(metadata / "raw-dataset-link") == DumpsFolder(metadata).dataset() == url
    assert urls.absolute_path(metadata / "raw-dataset-link") == url
    assert taken_files(metadata / "raw-dataset-link") == taken_files(url)
    (metadata / "again").symlink_to("raw-dataset-link")
    (tmp_path / "further").symlink_to(metadata / "again")
    assert urls.absolute_path(tmp_path / "further") == urls.absolute_path(f"{metadata}/raw-dataset-link/") == url
    (metadata / "loop").symlink_to("loop")
    assert urls.resolve_url_link(metadata / "loop") == str(metadata / "loop")
    assert read_paths_file(metadata / "dumps/paths_file_0.txt") == ["a.parquet", "e.jsonl.zst"]
    assert dump_size(metadata / "dumps/paths_file_0.txt") == 70
    DumpsFolder(metadata).finish(0)
    assert [dump.index for dump in prepare_dumps(url, metadata)] == [1]
    with pytest.raises(InputError, match="one metadata folder per dataset"):
        prepare_dumps(place("memory", tmp_path), metadata)


class Locked(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    protocol = "locked"

    def find(self, path: str, **options: Any) -> Any:
        raise PermissionError("Access Denied")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://x", r"^nowhere://x: fsspec cannot use this: Protocol not known: nowhere"),
        (
            "s3://bucket/web",
            r"^s3://bucket/web: the package of this scheme cannot be imported: Install s3fs to access S3",
        ),
        ("file:///there/is/none", r"^file:///there/is/none: there is no such dataset folder"),
        ("memory://there-is-none", r"^memory://there-is-none: there is no (such dataset folder|file below this)"),
        ("locked://x", r"^locked://x: fsspec cannot use this: Access Denied"),
        ("ftp://me:secret@host/x", r"^ftp://\.\.\.: a URL with a password"),
        ("memory://[x", r"^memory://\[x: there is no (such dataset folder|file below this)"),
    ],
)
def test_what_cannot_be_listed_is_one_clear_error(
    url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("locked", Locked, clobber=True)
    monkeypatch.setitem(sys.modules, "s3fs", None)  # also where it is installed, and after a test that used it
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(InputError, match=message):
        prepare_dumps(url, tmp_path / "meta")
    assert not (tmp_path / "meta").exists()


def test_a_folder_below_a_url_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    url = place("file", tmp_path)
    fsspec.filesystem("file").touch(f"{url}/b/later.parquet")

    class Unreadable(type(fsspec.filesystem("file"))):  # type: ignore[misc]  # root may read every folder
        protocol = "unreadable"

        def ls(self, path: str, **options: Any) -> Any:
            if path.endswith("/b"):
                raise PermissionError(13, "Permission denied", path)
            return super().ls(path, **options)

    fsspec.register_implementation("unreadable", Unreadable, clobber=True)
    with pytest.raises(InputError, match=r"cannot use this: .*Permission denied"):
        taken_files(url.replace("file://", "unreadable://"))


def test_a_name_that_fsspec_would_take_for_a_chain_is_refused() -> None:
    name = uuid.uuid4().hex
    url, store = f"memory://{name}", fsspec.filesystem("memory")
    store.pipe_file(f"/{name}/a::b.jsonl", b"{}")
    with pytest.raises(InputError, match=r"a::b\.jsonl: fsspec cannot open a name with `::`"):
        taken_files(url)
    store.pipe_file(f"/{name}/c.jsonl", b"{}")
    assert [file.path for file in taken_files(url, filter_out=["::"])] == ["c.jsonl"]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=True, timeout=600)


@pytest.mark.slow
def test_a_data_set_below_a_url_gives_the_shards_of_the_folder_by_every_door(tmp_path: Path) -> None:
    data, metadata = tmp_path / "da ta", tmp_path / "far" / "meta"
    data.mkdir()
    write_parquet(data / "a '.parquet", list(TEXTS))
    for times, name in enumerate(("b.jsonl", "c.jsonl.gz", "d.jsonl.zst"), start=2):
        write_jsonl(data / name, list(TEXTS) * times)
    common = {
        "tokenizer": str(train_tokenizer(tmp_path / "tok/tokenizer.json").parent),
        "tokenizer_name": "T",
        "dataset_name": "D",
        "tasks": 2,
        "workers": 1,
        "eos_token": EOS,
    }

    def settings(work: Path) -> dict[str, Any]:
        folders = {"metadata_folder": work / "meta", "output_folder": work / "out", "logs": work / "logs"}
        return common | {name: str(folder) for name, folder in folders.items()}

    def shards(work: Path) -> dict[Path, bytes]:
        return {path.relative_to(work): path.read_bytes() for path in (work / "out").rglob("*_tokens.*")}

    prepare_dumps(data, tmp_path / "near" / "meta", n_dumps=2)
    near = TokenizationSettings(**settings(tmp_path / "near"))
    for index in prepare_submission(near):
        tokenize_dump(near, index)

    run(
        ROOT / "scripts/tokenization/prepare_dumps.py",
        "--dataset-folder",
        f"file://{data}",
        "--preprocessing-metadata-folder",
        metadata,
        "--n-dumps",
        2,
    )
    size = run(ROOT / "scripts/tokenization/compute_dump_size.py", metadata / "dumps/paths_file_0.txt")
    assert int(size.stdout) == json.loads((metadata / "dump-sizes.json").read_text())["0"]
    (tmp_path / "config.yaml").write_text(json.dumps(settings(tmp_path / "far")))
    run(ROOT / "launchers/submit_tokenization.py", tmp_path / "config.yaml", "--executor", "local")
    status = run("-m", "relayrun.cli", "dumps", "status", metadata).stdout
    assert next(line.split()[1:3] for line in status.splitlines() if line.startswith("total")) == ["2/2", "done"]
    assert len(shards(tmp_path / "far")) == 8
    assert shards(tmp_path / "far") == shards(tmp_path / "near")


@pytest.mark.slow
def test_tune_reads_below_a_url(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in "ab":
        write_parquet(tmp_path / "data" / f"{name}.parquet", list(TEXTS) * 20)
    prepare_dumps(f"file://{tmp_path}/data", tmp_path / "meta", n_dumps=1)
    tokenizer = train_tokenizer(tmp_path / "tok/tokenizer.json").parent
    options = TokenizeOptions(tokenizer=str(tokenizer))
    (trial,) = run_trials(
        tmp_path / "meta", options=options, workers=[1], batch_bytes=[4000], seconds=600
    )  # it ends before
    assert trial.tokens_per_second > 0
