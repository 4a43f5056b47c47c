"""Reads below URLs go on after failures that pass, from where they stood; a real web server on the loopback fails."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from relayrun.errors import InputError
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.inputs import stat_inputs
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import RemoteFile, StoreError
from tests.tokenization_corpus import write_parquet
from tests.tokens.test_preprocess import Run, data, out, run, tokenizer, write_jsonl

__all__ = ["data", "out", "run", "tokenizer"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "RETRY_PAUSES", (0.0, 0.0, 0.0))


def page(folder: Path) -> bytes:
    """A listing of a folder, as servers of web pages give it."""
    names = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
    return "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode()


class Server:
    """A web server of one folder; `faults` says what becomes of the requests that come: None, a status, or `cut`."""

    def __init__(self, folder: Path, *, ranges: bool = True) -> None:
        self.faults: list[int | str | None] = []
        self.requests = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                server.requests += 1
                fault = server.faults.pop(0) if server.faults else None
                file = folder / self.path.lstrip("/")
                if isinstance(fault, int) or not file.exists():
                    self.send_error(fault if isinstance(fault, int) else 404)
                    return
                content, status = page(file) if file.is_dir() else file.read_bytes(), 200
                total = len(content)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                if wanted and ranges:
                    first, last = int(wanted[1]), int(wanted[2] or total - 1)
                    content, status = content[first : last + 1], 206
                self.send_response(status)
                if ranges:
                    self.send_header("Accept-Ranges", "bytes")
                if status == 206:
                    self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{total}")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
                self.end_headers()
                if body:
                    with contextlib.suppress(ConnectionError):
                        self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
                if fault == "cut":
                    self.close_connection = True

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join(300)
        self.http.server_close()


@pytest.fixture
def server(data: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    found = Server(data)
    yield found
    found.close()


FAULTS = [500, 503, 429, "cut"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.filterwarnings("ignore")  # of aiohttp, about connections that a test has cut
def test_a_failure_that_passes_costs_a_pause(server: Server, data: Path, fault: int | str, at: int) -> None:
    texts = [f"{number} " * 40_000 for number in range(100)]
    write_jsonl(data / "a.jsonl", texts)
    server.faults = [None] * at + [fault, fault]
    arrays = read_column(f"{server.url}/a.jsonl", "text", batch_bytes=100_000)
    assert [text for array in arrays for text in array.to_pylist()] == texts
    assert server.faults == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_parquet_below_a_url_is_read_through_failures(server: Server, data: Path, run: Run, out: Path) -> None:
    texts = [f"{number} " * 300 for number in range(100)]
    write_parquet(data / "a.parquet", texts)
    server.faults = [None, 500, None, "cut", 503, None, "cut"]
    assert run(["a.parquet"], dataset=server.url).documents == 100
    assert server.faults == []
    assert run(["a.parquet"], dataset=server.url).tasks_run == 0


def test_a_server_without_ranges_sends_it_once_more(data: Path) -> None:
    pytest.importorskip("aiohttp")
    server = Server(data, ranges=False)
    try:
        write_jsonl(data / "a.jsonl", ["x" * 9_000_000, "y"])
        with RemoteFile(f"{server.url}/a.jsonl") as file:
            begin = file.read(5_000_000)
            file._drop()
            assert begin + file.read() == (data / "a.jsonl").read_bytes()
    finally:
        server.close()


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_down_is_no_missing_file(server: Server, data: Path) -> None:
    write_jsonl(data / "a.jsonl", ["x"])
    server.faults = [503] * 100
    with pytest.raises(StoreError, match=r"a\.jsonl: the store does not answer: 503.*\(tried 4 times\)"):
        stat_inputs(server.url, ["a.jsonl"], missing_ok=True)
    server.faults = []
    assert stat_inputs(server.url, ["b.jsonl"], missing_ok=True) == [("b.jsonl", 0, -1)]
    before = server.requests
    with pytest.raises(InputError, match=r"b\.jsonl: this file of the paths file is missing"):
        stat_inputs(server.url, ["b.jsonl"])
    assert server.requests - before <= 2  # what comes again is not tried again
    server.faults = [None, *[503] * 100]
    with pytest.raises(StoreError, match=r"a\.jsonl: the store does not answer: 503"):
        list(read_column(f"{server.url}/a.jsonl", "text", batch_bytes=1000))


class Flaky(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """A store whose reads fail: the n-th one, for every n in `at`."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    at: ClassVar[set[int]] = set()
    reads = 0
    error: ClassVar[Exception] = TimeoutError()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode != "rb":
            return file
        content = file.getvalue()

        class Reads(type(file)):  # type: ignore[misc]
            def read(self, size: int = -1) -> bytes:
                Flaky.reads += 1
                if Flaky.reads in Flaky.at:
                    raise Flaky.error
                return bytes(super().read(min(size, 1000) if size > 0 else size))

        opened = Reads(self, path, content)
        opened.seek(0)
        return opened


@pytest.fixture
def flaky() -> Iterator[str]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.at, Flaky.reads = set(), 0
    lines = b"".join(json.dumps({"text": f"line {n}"}).encode() + b"\n" for n in range(2000))
    with fsspec.open("flaky://far/a.jsonl", "wb") as file:
        file.write(lines)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": [f"line {n}" for n in range(2000)]}), sink, row_group_size=100)
    with fsspec.open("flaky://far/a.parquet", "wb") as file:
        file.write(sink.getvalue().to_pybytes())
    yield "flaky://far"
    Flaky.store.clear()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("error", [TimeoutError(), OSError(5, "Input/output error"), Exception("botocore's own")])
def test_every_read_may_fail(flaky: str, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flaky, "error", error)
    Flaky.at = {n for n in range(1, 500) if n % 4}  # three failures, and one read that works
    arrays = read_column(f"{flaky}/{name}", "text", batch_bytes=1000)
    assert [text for array in arrays for text in array.to_pylist()] == [f"line {n}" for n in range(2000)]
    assert Flaky.reads > 40


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_store_that_stays_away_is_one_error(flaky: str, name: str) -> None:
    Flaky.at = set(range(10, 100))
    with pytest.raises(StoreError, match=r"the store does not answer: TimeoutError \(tried 4 times\)"):
        list(read_column(f"{flaky}/{name}", "text", batch_bytes=1000))
    assert Flaky.reads == 13


def test_no_file_is_left_out_because_its_store_was_away(flaky: str, run: Run, out: Path) -> None:
    with fsspec.open(f"{flaky}/b.jsonl", "wb") as file:
        file.write(b'{"text": "it"}\n')
    names = ["a.jsonl", "b.jsonl"]
    Flaky.at = set(range(12, 16))
    with pytest.raises(StoreError, match=r"a\.jsonl: the store does not answer"):
        run(names, dataset=flaky, on_error="skip-file")
    Flaky.at = set()
    result = run(names, dataset=flaky, on_error="skip-file")
    assert (result.documents, result.skipped_files) == (2001, 0)


def test_a_file_that_is_another_one_when_it_is_opened_again_is_an_error(flaky: str) -> None:
    file = urls.open_input(f"{flaky}/a.jsonl")
    file.read(10)
    with fsspec.open(f"{flaky}/a.jsonl", "wb") as other:
        other.write(b"short")
    Flaky.at = {Flaky.reads + 1}
    with pytest.raises(InputError, match=r"a\.jsonl: this file was changed while it was read"):
        file.read(10)
    file.close()
