"""A server of objects (moto's S3) in a process of its own, with one bucket, which fails on demand."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from relayrun.files import write_atomic
from tests.waiting import wait_for

BUCKET = "mine"
Fault = int | str | float | None
"""A status; "short": half of what is put is kept; seconds to wait before the answer; None: no fault."""


class ObjectServer:
    """The server, and what the next requests of each method get."""

    def __init__(self, folder: Path) -> None:
        self._faults, port = folder / "faults.json", folder / "port"
        self.fail({})
        self._process = subprocess.Popen([sys.executable, "-m", "tests.object_server", str(folder)])
        wait_for(port.exists, 60, words="the server of objects answers")
        self.endpoint = f"http://127.0.0.1:{port.read_text()}"

    def fail(self, faults: Mapping[str, list[Fault]]) -> None:
        """Give the next requests of a method (PUT, GET, HEAD) these faults."""
        write_atomic(self._faults, json.dumps(faults))

    def faults_left(self) -> int:
        return sum(map(len, json.loads(self._faults.read_text()).values()))

    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let boto and s3fs find it, as a user does: by variables."""
        for name, value in {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer without faults from now on, to a client that finds it and retries soon."""
        import s3fs

        from relayrun.tokens.stores import urls

        self.environment(monkeypatch)
        s3fs.S3FileSystem.clear_instance_cache()
        self.fail({})
        monkeypatch.setattr(urls, "RETRY_PAUSES", (0.05,) * 5)

    def client(self) -> Any:
        """Return a client that starts no thread: tests fork beside it."""
        import boto3

        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint, **keys)

    def names(self, below: str) -> list[str]:
        """Return the name of every object below a folder of the bucket."""
        prefix = below.rstrip("/") + "/"
        found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [each["Key"].removeprefix(prefix) for each in found]

    def objects(self, below: str) -> dict[str, bytes]:
        """Return every object below a folder of the bucket, by its name there."""
        client, top = self.client(), below.rstrip("/")
        return {n: client.get_object(Bucket=BUCKET, Key=f"{top}/{n}")["Body"].read() for n in self.names(below)}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _serve(folder: Path) -> None:
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: Any) -> None:
            pass

    moto, lock, file = DomainDispatcherApplication(create_backend_app), threading.Lock(), folder / "faults.json"

    def next_fault(method: str) -> Fault:
        with lock:
            faults: dict[str, list[Fault]] = json.loads(file.read_text())
            if not faults.get(method):
                return None
            fault = faults[method].pop(0)
            write_atomic(file, json.dumps(faults))
            return fault

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = next_fault(environ["REQUEST_METHOD"])
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size) if size else b""
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "short":
            body = body[: size // 2]
        if isinstance(fault, int):
            start(f"{fault} Fault", [("Content-Length", "0")])
            return [b""]
        return moto({**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}, start)

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}", **keys).create_bucket(Bucket=BUCKET)
    (folder / "port.tmp").write_text(str(server.port))
    os.replace(folder / "port.tmp", folder / "port")
    wait_for(lambda: os.getppid() == 1, 3600, step=1)  # the tests were killed
    os._exit(0)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
