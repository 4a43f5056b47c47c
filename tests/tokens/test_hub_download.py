"""What `hf download` leaves beside the files of a data set, and what the inventory makes of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from relayrun.errors import InputError
from relayrun.tokens.readers import inventory
from tests.tokens.test_inventory import lines, prepared

NAME, COMMIT = "arcinstitute/opengenome2", "0123456789abcdef0123456789abcdef01234567"
FOLDER = "pretraining_or_both_phases/metagenomes"
TRAIN = f"{FOLDER}/*_train_*.jsonl.gz"


class DatasetHub:
    """A server of one data set: `faults` are the answers to requests for files, in turn: a status, `cut`, `wrong`."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.faults = files, list[Any]()
        self.asked: list[tuple[str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def do_POST(self) -> None:
                wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
                found = [entry for path in wanted for entry in hub.entries(path)]
                self.say(json.dumps(found).encode() if "/paths-info/" in self.path else b"{}")

            def answer(self, *, body: bool) -> None:
                path = unquote(self.path.partition("?")[0]).replace("/main", f"/{COMMIT}", 1)
                if path in (f"/api/datasets/{NAME}", f"/api/datasets/{NAME}/revision/{COMMIT}"):
                    return self.say(json.dumps({"id": NAME, "sha": COMMIT}).encode())
                if path.startswith(tree := f"/api/datasets/{NAME}/tree/{COMMIT}"):
                    return self.say(json.dumps(hub.below(path.removeprefix(tree).strip("/"))).encode())
                content = hub.files.get(path.removeprefix(f"/datasets/{NAME}/resolve/{COMMIT}/"))
                if content is None:
                    return self.say(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})
                entry = hub.entries(path.removeprefix(f"/datasets/{NAME}/resolve/{COMMIT}/"))[0]
                etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
                if not body:
                    return self.say(content, headers=headers, body=False)
                wanted = self.headers.get("Range")
                hub.asked.append((path.rpartition("/")[2], wanted))
                fault = hub.faults.pop(0) if hub.faults else None
                if isinstance(fault, int):
                    return self.say(b"{}", status=fault)
                if fault == "wrong":
                    content = content[: len(content) // 2] + b"?" + content[len(content) // 2 + 1 :]
                first, _, last = wanted[6:].partition("-") if wanted else ("0", "", "")
                start, end = int(first), int(last or len(content) - 1) + 1
                if wanted:
                    headers["Content-Range"] = f"bytes {start}-{min(end, len(content)) - 1}/{len(content)}"
                return self.say(content[start:end], 206 if wanted else 200, headers, cut=fault == "cut")

            def say(
                self,
                content: bytes,
                status: int = 200,
                headers: dict[str, str] | None = None,
                *,
                body: bool = True,
                cut: bool = False,
            ) -> None:
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                self.close_connection = self.close_connection or cut

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,))
        self.thread.start()

    def below(self, folder: str) -> list[dict[str, Any]]:
        """All files at and below a folder."""
        start = f"{folder}/" if folder else ""
        return [entry for name in self.files if name.startswith(start) for entry in self.entries(name)]

    def entries(self, path: str) -> list[dict[str, Any]]:
        """What the hub tells of a path: one entry, or none."""
        if path not in self.files:
            folder = any(name.startswith(f"{path}/") for name in self.files)
            return [{"type": "directory", "path": path, "oid": COMMIT}] if folder else []
        content = self.files[path]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
        if path.endswith((".gz", ".parquet")):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return [entry]

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join(300)
        self.http.server_close()


@pytest.fixture
def hub() -> Iterator[DatasetHub]:
    files = {
        f"{FOLDER}/data_metagenomics_{split}_chunk{number}.jsonl.gz": gzip.compress(b'{"text": "%d"}\n' % number * 9000)
        for split, count in (("train", 3), ("valid", 1), ("test", 1))
        for number in range(1, count + 1)
    } | {"notes.jsonl": b'{"text": "a small file, which is in git"}\n'}
    found = DatasetHub(files)
    yield found
    found.close()


def fetch(hub: DatasetHub, output: Path, *include: str) -> int:
    command = [str(Path(sys.executable).with_name("hf")), "download", NAME, "--repo-type", "dataset"]
    patterns = [word for pattern in include or (TRAIN,) for word in ("--include", pattern)]
    return subprocess.run(
        [*command, *patterns, "--local-dir", str(output), "--max-workers", "1"],
        env={"PATH": os.environ["PATH"], "HOME": str(output.parent), "HF_ENDPOINT": hub.url},
        check=False,
        timeout=600,
    ).returncode


def compare(data: Path) -> list[str]:
    """Prepare a data set, and compare its files as a dump does when it is done."""
    names = prepared(data)
    inventory.refuse_wrong_checksums(data.parent / "meta" / "inventory.jsonl", str(data), names)
    return names


@pytest.mark.slow
def test_what_arrived_is_the_hubs_and_its_folder_of_notes_is_named_once(
    hub: DatasetHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = tmp_path / "data"
    assert fetch(hub, data, TRAIN, "notes.jsonl") == 0
    assert compare(data) == ["notes.jsonl", *(f"{FOLDER}/data_metagenomics_train_chunk{n}.jsonl.gz" for n in (1, 2, 3))]
    (said,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert said.startswith("left out, hidden or temporary: ")
    assert said.endswith(": .cache/")
    assert not any(line["taken"] for path, line in lines(data).items() if path.startswith(".cache/"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["notes.jsonl", f"{FOLDER}/data_metagenomics_train_chunk1.jsonl.gz"])
def test_a_file_that_is_not_the_hubs_is_refused(hub: DatasetHub, tmp_path: Path, name: str) -> None:
    """`hf download` itself compares sizes alone."""
    hub.faults, data = ["wrong"], tmp_path / "data"
    assert fetch(hub, data, name) == 0
    note = rf"\.cache/huggingface/download/{name}\.metadata"
    with pytest.raises(InputError, match=rf"data/{name}: its checksum is not the one that {note} lists"):
        compare(data)
    prepared(data, filter_out=[".cache"])
    inventory.refuse_wrong_checksums(data.parent / "meta" / "inventory.jsonl", str(data), [name])


@pytest.mark.slow
def test_a_download_that_has_not_ended_is_named_and_goes_on(
    hub: DatasetHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.faults, data = [None, *[500] * 40], tmp_path / "data"
    assert fetch(hub, data) == 1
    (whole,) = prepared(data)
    names = {f"{FOLDER}/data_metagenomics_train_chunk{number}.jsonl.gz" for number in (1, 2, 3)}
    (said,) = [record.getMessage() for record in caplog.records if "a download has not ended" in record.getMessage()]
    assert {name for name in names if name in said} <= names - {whole} != set()
    hub.faults, before = [], len(hub.asked)
    caplog.clear()
    assert fetch(hub, data) == 0
    assert len(compare(data)) == 3
    assert Path(whole).name not in [name for name, _ in hub.asked[before:]]
    assert "WARNING" not in caplog.text


def test_the_notes_of_a_killed_download_and_of_several_below_one_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a kill leaves them: the bytes so far under a hash of the name; beside a file of an older commit, too."""
    for folder in ("train", "more"):
        place = tmp_path / "data" / folder
        notes = place / ".cache/huggingface/download/a"
        notes.mkdir(parents=True)
        (place / "a").mkdir()
        for name in ("whole.jsonl", "old.jsonl"):
            content = b'{"text": "%s"}\n' % f"{folder}/{name}".encode()
            (place / "a" / name).write_bytes(content)
            (notes / f"{name}.metadata").write_text(f"{COMMIT}\n{hashlib.sha256(content).hexdigest()}\n1795849785.3\n")
            (notes / f"{name}.lock").touch()
        (notes / "gone.jsonl.lock").touch()
        for name in ("old.jsonl", "gone.jsonl"):
            short = base64.urlsafe_b64encode(hashlib.sha1(f"{name}.metadata".encode()).digest()).decode()
            (notes / f"{short}.{'0' * 64}.12345678.incomplete").write_bytes(content[:5])
    assert len(compare(tmp_path / "data")) == 4
    assert "a download has not ended: more/a/gone.jsonl, more/a/old.jsonl, train/a/gone.jsonl and 1 more" in caplog.text
    (notes / "whole.jsonl.metadata").write_text(f"{COMMIT}\n{'1' * 64}\n1795849785.3\n")
    with pytest.raises(InputError, match=r"more/a/whole\.jsonl: its checksum is not the one"):
        compare(tmp_path / "data")
    for damaged in ("", "\n", f"{COMMIT}\n{'1' * 63}\n", f"{COMMIT}\n{'1' * 32}-7\n"):
        (notes / "whole.jsonl.metadata").write_text(damaged)
        assert len(compare(tmp_path / "data")) == 4
