"""`relayrun dumps download` against a stand-in for the hub: whole files, resumed, their checksums compared."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from relayrun.cli import main
from relayrun.tokens.stores import hub_download as module
from relayrun.tokens.stores import urls

NAME, COMMIT = "arcinstitute/opengenome2", "0123456789abcdef0123456789abcdef01234567"
FOLDER = "pretraining_or_both_phases/metagenomes"


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
                headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                if not body:
                    return self.say(content, headers=headers, body=False)
                wanted = self.headers.get("Range")
                hub.asked.append((path.rpartition("/")[2], wanted))
                fault = hub.faults.pop(0) if hub.faults else None
                if isinstance(fault, int):
                    return self.say(b"{}", status=fault)
                if fault == "wrong":
                    content = content[:-1] + b"?"
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
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    from huggingface_hub import constants, file_download

    files = {
        f"{FOLDER}/data_metagenomics_{split}_chunk{number}.jsonl.gz": f"{split} {number} ".encode() * 50_000
        for split, count in (("train", 3), ("valid", 1), ("test", 1))
        for number in range(1, count + 1)
    } | {"README.md": b"of the data set\n"}
    found = DatasetHub(files)
    monkeypatch.setenv("HF_ENDPOINT", found.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(file_download.logger, "disabled", True)
    monkeypatch.setattr(urls, "RETRY_PAUSES", (0.0, 0.0))
    yield found
    found.close()


def fetch(output: Path, *include: str, name: str = NAME) -> int:
    command = ["dumps", "download", name, "--include", *(include or (f"{FOLDER}/*_train_*.jsonl.gz",))]
    return main([*command, "--output-folder", str(output), "--workers", "1"])


def names(output: Path) -> list[str]:
    found = (path.relative_to(output) for path in output.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[0] != ".cache")


@pytest.mark.slow
def test_the_files_that_fit_arrive_once_and_checked(
    hub: DatasetHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch(tmp_path, f"{FOLDER}/*_train_*.jsonl.gz", "README.md") == 0
    assert "4 files in " in capsys.readouterr().out
    train = [f"{FOLDER}/data_metagenomics_train_chunk{number}.jsonl.gz" for number in (1, 2, 3)]
    assert names(tmp_path) == ["README.md", module.CHECKSUMS_FILE, *train]
    assert all((tmp_path / name).read_bytes() == hub.files[name] for name in train)
    subprocess.run(["sha256sum", "--check", "--quiet", module.CHECKSUMS_FILE], cwd=tmp_path, check=True)
    asked = len(hub.asked)
    assert fetch(tmp_path) == 0
    assert "0.00 GB to fetch" in capsys.readouterr().out
    assert len(hub.asked) == asked
    (tmp_path / train[0]).write_bytes(b"cut")  # another size than the hub's
    assert fetch(tmp_path) == 0
    assert (tmp_path / train[0]).read_bytes() == hub.files[train[0]]


@pytest.mark.slow
def test_a_connection_that_breaks_goes_on_where_it_stood(hub: DatasetHub, tmp_path: Path) -> None:
    hub.faults = ["cut", 503, None, "cut"]
    assert fetch(tmp_path) == 0
    ranges = [wanted for _, wanted in hub.asked if wanted]
    assert ranges
    assert all(0 < int(wanted[6:-1]) <= 200_000 for wanted in ranges)
    assert all((tmp_path / name).read_bytes() == hub.files[name] for name in hub.files if "_train_" in name)


@pytest.mark.slow
def test_a_run_that_ends_in_the_middle_is_gone_on_with(
    hub: DatasetHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults = [None, *[500] * 40]
    assert fetch(tmp_path) == 1
    assert "what is done is kept" in capsys.readouterr().err
    (first,) = [name for name in names(tmp_path) if name.endswith(".gz")]
    hub.faults, before = [], len(hub.asked)
    assert fetch(tmp_path) == 0
    assert Path(first).name not in [name for name, _ in hub.asked[before:]]


@pytest.mark.slow
def test_wrong_bytes_are_fetched_once_more_and_then_refused(
    hub: DatasetHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults = ["wrong"]
    assert fetch(tmp_path) == 0
    (tmp_path / "b").mkdir()
    hub.faults = ["wrong"] * 2
    assert fetch(tmp_path / "b") == 1
    assert "arrived twice with a checksum that is not the hub's" in capsys.readouterr().err
    assert len([name for name in names(tmp_path / "b") if name.endswith(".gz")]) == 2


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_one_clear_error(
    hub: DatasetHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch(tmp_path / "a", "*.fasta") == 1
    assert f"none of its 6 files fits *.fasta\n  -> its folders: ., {FOLDER}" in capsys.readouterr().err
    assert fetch(tmp_path / "a", name="no/such") == 1
    assert "the hub does not give this" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
