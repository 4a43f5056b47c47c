"""Streams from below URLs: a real web server on the loopback, that fails, cuts connections and lets tokens run out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from relayrun.config.sections.data import DataSource
from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.errors import InputError
from relayrun.tokens.order.batches import BatchReader
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import RemoteFile, StoreError
from relayrun.tokens.streams.files import find_text_files
from relayrun.tokens.streams.text_stream import TextStream
from tests import streaming
from tests.streaming import write
from tests.tokens.test_remote_files import Server, short_pauses
from tests.waiting import read_line, wait_for

__all__ = ["short_pauses"]

pytestmark = pytest.mark.filterwarnings("ignore")  # of aiohttp, about connections that a test has cut

LONG = {row: streaming.text_of(row) + "x" * 70_000 for row in range(100)}
"""Texts that do not fit into one read of a server."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    (tmp_path / "web").mkdir()
    found = Server(tmp_path)
    yield found
    found.close()


def stream(place: str, kind: str, **options: Any) -> TextStream:
    return streaming.stream(Path("unused"), kind, files=frozen(place, kind, **options), **options)


def frozen(place: str, kind: str, **options: Any) -> Any:
    source = DataSource.model_validate({"path": place, "weight": 1.0, "source": kind, "stream": options})
    return streaming.freeze_text_files("web", source, 0)


def samples(made: TextStream, count: int = 12) -> list[str]:
    opened = made.open_lanes(dict(enumerate(made.first_cursors())))
    try:
        return [streaming.digest(opened.take(lane)) for _ in range(count) for lane in range(made.lanes)]
    finally:
        opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow"])
@pytest.mark.parametrize("fault", [500, 503, 429, "cut"])
def test_a_stream_below_a_url_is_that_of_the_files_through_failures(
    server: Server, tmp_path: Path, kind: str, fault: int | str
) -> None:
    write(tmp_path / "web", kind, [40, 30], extra=LONG)
    made = stream(f"{server.url}/web/", kind)
    assert [file.size for file in made.files] == [
        os.path.getsize(path) for path in sorted((tmp_path / "web").iterdir())
    ]
    server.faults = [None, fault, None, None, fault, fault, None, None, None, fault]
    assert samples(made) == samples(stream(str(tmp_path / "web"), kind))
    assert server.faults == []


@pytest.mark.parametrize("refusal", [401, 403, 410])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_file_whose_token_has_run_out_is_opened_again(
    server: Server, tmp_path: Path, kind: str, refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "web", kind, [40], extra=LONG)
    expected = samples(stream(str(tmp_path / "web"), kind))
    made = stream(f"{server.url}/web", kind, nb_prefetch=0)
    refused = []
    read = RemoteFile._read

    def one_refusal(self: RemoteFile, size: int) -> bytes:
        if self._at > 100_000 and not refused:
            refused.append(self._at)
            self._drop()
            server.faults = [refusal]
        return read(self, size)

    monkeypatch.setattr(RemoteFile, "_read", one_refusal)
    assert samples(made) == expected
    assert refused
    assert server.faults == []


@pytest.mark.parametrize("on_error", ["fail", "skip-file", "skip-line"])
def test_a_store_that_refuses_or_stays_away_is_named_and_leaves_no_file_out(
    server: Server, tmp_path: Path, on_error: str
) -> None:
    write(tmp_path / "web", "jsonl", [40], extra=LONG)
    for faults, words in (
        ([None, *[403] * 100], r"/web/000\.jsonl: the store refuses this: 403"),
        ([None, *[503] * 100], r"/web/000\.jsonl: the store does not answer: 503"),
    ):
        made = stream(f"{server.url}/web", "jsonl", on_error=on_error)
        server.faults = [*faults]
        with pytest.raises(StoreError, match=words):
            samples(made)
        assert len(server.faults) > 80  # what is refused is not asked for minutes
        server.faults = []


def test_a_file_that_is_another_one_now_is_named(server: Server, tmp_path: Path) -> None:
    write(tmp_path / "web", "jsonl", [40])
    made = stream(f"{server.url}/web", "jsonl")
    with (tmp_path / "web" / "000.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(InputError, match=r"http://.*/web/000\.jsonl: this file has .* bytes, had"):
        samples(made)
    (tmp_path / "web" / "000.jsonl").unlink()
    with pytest.raises(InputError, match=r"http://.*/web/000\.jsonl: this file is missing"):
        samples(made)


def test_folders_patterns_and_files_below_a_url(server: Server, tmp_path: Path) -> None:
    write(tmp_path / "web" / "a", "jsonl", [3, 3])
    write(tmp_path / "web" / "b", "parquet", [3])

    def found(kind: str, *places: str) -> list[str]:
        paths = [place if place.startswith("/") else f"{server.url}/{place}" for place in places]
        source = {"path": paths, "weight": 1.0, "source": kind}
        return [
            file.path.removeprefix(server.url) for file in find_text_files(DataSource.model_validate(source), "web")
        ]

    lines = ["/web/a/000.jsonl", "/web/a/001.jsonl.gz"]
    assert found("jsonl", "web") == lines
    (tmp_path / "raw-dataset-link").symlink_to(f"{server.url}/web")  # as `prepare_dumps.py` leaves it
    assert found("jsonl", str(tmp_path / "raw-dataset-link")) == lines
    assert found("jsonl", f"{tmp_path}/raw*-link") == lines
    assert found("jsonl", "web/**/*.jsonl*") == lines
    assert found("jsonl", "web/a/001.jsonl.gz", "web/a/000.jsonl") == lines[::-1]
    assert found("parquet", "web/*/*.parquet") == ["/web/b/000.parquet"]
    with pytest.raises(InputError, match=r"http://.*/web/a: source: parquet finds no such file"):
        found("parquet", "web/a")
    with pytest.raises(InputError, match=r"http://.*/nowhere"):
        found("parquet", "nowhere")


@pytest.mark.parametrize("below", ["{folder}", "memory://{folder}"])
def test_what_exists_under_just_this_name_is_never_a_pattern(tmp_path: Path, below: str) -> None:
    store = fsspec.filesystem("memory")
    for name in ("web[24]", "web2", "web[24]-a", "web2-a"):
        write(tmp_path / name, "jsonl", [3, 3])
        for file in sorted((tmp_path / name).iterdir()):
            store.pipe(str(file), file.read_bytes())
    folder = below.format(folder=tmp_path)

    def found(place: str) -> list[str]:
        source = {"path": f"{folder}/{place}", "weight": 1.0, "source": "jsonl"}
        return [
            file.path.removeprefix(f"{folder}/") for file in find_text_files(DataSource.model_validate(source), "web")
        ]

    try:
        assert found("web[24]/*.jsonl") == found("web[24]/000.jsonl") == found("web[24]/[0]00.jsonl")
        assert found("web[24]/*.jsonl") == ["web[24]/000.jsonl"]
        assert found("web[24]") == ["web[24]/000.jsonl", "web[24]/001.jsonl.gz"]
        assert found("web[2]/*.jsonl") == found("web2/[0]00.jsonl") == ["web2/000.jsonl"]
        assert found("web[24]-*/000.jsonl") == ["web[24]-a/000.jsonl"]
        assert found("web[2]-*/000.jsonl") == ["web2-a/000.jsonl"]
        with pytest.raises(InputError, match="finds no such file"):
            found("web[24]/[2-9]*.jsonl")
    finally:
        store.rm(str(tmp_path), recursive=True)


@pytest.mark.parametrize("place", ["web", "web/a.jsonl", "web/*.jsonl"])
def test_a_password_in_a_url_is_refused_before_it_is_used(tmp_path: Path, place: str) -> None:
    url = f"http://me:secret@127.0.0.1:1/{place}"
    (tmp_path / "link").symlink_to(url)
    for path in (url, str(tmp_path / "link")):
        with pytest.raises(InputError, match="a URL with a password") as raised:
            find_text_files(DataSource.model_validate({"path": path, "weight": 1.0, "source": "jsonl"}), "web")
        assert "secret" not in str(raised.value)


def test_a_link_that_leads_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    """Its rows would never come."""
    write(tmp_path, "jsonl", [3])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "away.jsonl")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(InputError, match=r"b\.jsonl: this link leads nowhere"):
            find_text_files(DataSource.model_validate({"path": str(path), "weight": 1.0, "source": "jsonl"}), "web")


class Lanes:
    """The lanes of a stream as numbered samples of a `BatchReader`."""

    name = "web"

    def __init__(self, made: TextStream) -> None:
        self._opened, self._lanes = made.open_lanes(dict(enumerate(made.first_cursors()))), made.lanes

    def row(self, k: int) -> Any:
        return self._opened.take(k % self._lanes)

    def close(self) -> None:
        self._opened.close()


@pytest.mark.parametrize("nb_prefetch", [0, 2])
def test_a_reader_of_a_dead_server_ends_when_it_is_closed(
    server: Server, tmp_path: Path, nb_prefetch: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tried for five minutes, and `close` waited 10 s for its thread."""
    monkeypatch.setattr(urls, "RETRY_PAUSES", (60.0,) * 10)
    write(tmp_path / "web", "parquet", [40])
    made = stream(f"{server.url}/web", "parquet", nb_prefetch=nb_prefetch)
    server.close()
    before, lanes = {*threading.enumerate()}, Lanes(made)
    reader = BatchReader(
        lanes,
        data_parallel_rank=0,
        data_parallel_size=1,
        micro_batch_size=4,
        batch_sizes=GlobalBatchSizes(4),
        consumed_samples=0,
    )
    wait_for(lambda: "tried again in 60 s" in caplog.text, 60)
    began = time.monotonic()
    reader.close()
    assert time.monotonic() - began < 1
    wait_for(lambda: not any(each.name.startswith(("batches", "web")) for each in {*threading.enumerate()} - before), 1)


LEAVES_A_DEAD_SERVER = """
import sys, threading, time
from relayrun.tokens import streams
from relayrun.tokens.stores import urls

class Said(list):
    def warning(self, *words):
        self.append(words)

urls.log = Said()
urls.RETRY_PAUSES = (60.0,) * 10
tables = streams.open(sys.argv[1], nb_prefetch=int(sys.argv[2]), split_to_row_groups=bool(int(sys.argv[3])))
print("opened", flush=True)
input()
threading.Thread(target=list, args=[tables], daemon=True).start()
while not urls.log:
    time.sleep(0.02)
print("waits", flush=True)
"""


@pytest.mark.parametrize("options", ["0 0", "1 0", "1 1"])
def test_a_program_that_reads_tables_of_a_dead_server_may_end(server: Server, tmp_path: Path, options: str) -> None:
    """Its exit waited minutes for a thread of a pool."""
    write(tmp_path / "web", "parquet", [40])
    command = [sys.executable, "-c", LEAVES_A_DEAD_SERVER, f"{server.url}/web", *options.split()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert read_line(program) == "opened\n"
        server.close()
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
        assert read_line(program) == "waits\n"
        try:
            program.wait(3)
        finally:
            program.kill()
        assert program.returncode == 0
