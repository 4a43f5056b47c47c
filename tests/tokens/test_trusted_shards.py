"""A finished shard is trusted as long as its inputs and its own bytes are known to be the same."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from relayrun.tokens.tokenize.shard_folder import is_unchanged
from tests.tokenization_corpus import expected_ids, shard_documents
from tests.tokens.test_preprocess import Run, data, out, run, tokenizer, write_jsonl

__all__ = ["data", "out", "run", "tokenizer"]

LONG = ["0" * 100_000, "middle", "1" * 100_000]
"""More than the ends of a file that were compared once."""


def edit(file: Path) -> None:
    """Change a file in its middle; its size and both ends stay."""
    content = file.read_bytes()
    assert content.count(b"middle") == 1
    file.write_bytes(content.replace(b"middle", b"puddle"))


@pytest.mark.slow
def test_a_file_that_was_edited_in_its_middle_is_tokenized_again(
    run: Run, data: Path, out: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(data / "a.jsonl", LONG)
    write_jsonl(data / "b.jsonl", LONG)
    run(["a.jsonl", "b.jsonl"])
    edit(data / "a.jsonl")
    os.utime(data / "b.jsonl", (1, 1))  # copied again
    assert run(["a.jsonl", "b.jsonl"]).tasks_run == 1
    assert "00000_tokens is made again: a.jsonl is not what it was" in capsys.readouterr().err
    assert shard_documents(out / "00000_tokens") == expected_ids(tokenizer, [LONG[0], "puddle", LONG[2]])
    assert run(["a.jsonl", "b.jsonl"]).tasks_run == 0


class Timeless(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """A store that does not tell when a file changed."""

    protocol = "timeless"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("timeless://", "memory://")))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        return {"name": found["name"], "size": found["size"], "type": "file"}


@pytest.mark.slow
def test_below_a_url_another_time_or_other_ends_are_another_file(run: Run, tmp_path: Path) -> None:
    fsspec.register_implementation("timeless", Timeless, clobber=True)
    for scheme in ("timeless", "memory"):
        url = f"{scheme}://trust-{tmp_path.name}"

        def put(text: str, *, url: str = url) -> None:
            with fsspec.open(f"{url}/a.jsonl", "wb") as file:
                file.write(b'{"text": "%b"}\n' % text.encode())

        put("one")
        place: dict[str, Any] = {"dataset": url, "output_folder": tmp_path / scheme}
        assert [run(["a.jsonl"], **place).tasks_run for _ in range(2)] == [1, 0]
        put("two")
        assert [run(["a.jsonl"], **place).tasks_run for _ in range(2)] == [1, 0]


def test_what_is_the_same() -> None:
    then = ("a", 10, 5)
    assert is_unchanged("nowhere", then, then, "")
    assert not is_unchanged("nowhere", ("a", 11, 5), then, "")
    assert not is_unchanged("nowhere", ("a", 10, 6), then, "")
    assert not is_unchanged("nowhere", ("a", 10, 6), then, "xxh3-128:" + "0" * 32)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_shard_that_was_damaged_is_made_again(
    run: Run, data: Path, out: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(data / name, LONG)
    run(["a.jsonl", "b.jsonl"])
    whole = {file.name: file.read_bytes() for file in out.glob("*_tokens.*")}
    damaged = out / f"00001_tokens.{suffix}"
    times = damaged.stat()
    ids = np.fromfile(damaged, np.uint8)
    ids[-20] ^= 1  # an index keeps its size and its last sequence
    ids.tofile(damaged)
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run(["a.jsonl", "b.jsonl"]).tasks_run == 1
    said = capsys.readouterr().err
    assert re.search(rf"00001_tokens is made again: \S+/00001_tokens.{suffix} is not what its record says", said)
    assert {file.name: file.read_bytes() for file in out.glob("*_tokens.*")} == whole
    assert run(["a.jsonl", "b.jsonl"]).tasks_run == 0


def test_the_time_of_a_web_server_counts() -> None:
    from relayrun.tokens.stores.urls import modified_time

    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert modified_time({"Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}) == round(moment.timestamp() * 1e9)
    assert modified_time({"LastModified": moment}) == round(moment.timestamp() * 1e9)
    assert modified_time({"updated": "2026-01-02T03:04:05.000Z"}) == round(moment.timestamp() * 1e9)
    assert modified_time({"mtime": 7.5}) == 7_500_000_000
    assert modified_time({"ETag": '"abc"'}) == modified_time({"ETag": '"abc"'}) != modified_time({"ETag": '"abd"'})
    assert 0 < modified_time({"ETag": '"abc"'}) < time.time_ns() * 8
    assert modified_time({}) == modified_time({"mtime": None}) == 0
