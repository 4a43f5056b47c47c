"""`relayrun metrics`: metrics of runs for Prometheus, as text, as a file, or over HTTP on this machine."""

from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from relayrun.control.rundir import find_runs
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RunDirError
from relayrun.files import write_atomic

KEY_BYTES = 32
CACHE_SECONDS = 10.0
"""Seconds for which an answer holds: several servers may scrape it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun metrics`."""
    parser.add_argument("names", nargs="*", metavar="RUN|FOLDER", help="runs, or folders of runs; default: all runs")
    words = "replace this file with the metrics, for the textfile collector of node_exporter"
    parser.add_argument("--output", type=Path, metavar="FILE.prom", help=words)
    words = "answer GET /metrics on 127.0.0.1 until Ctrl-C, to those who know the key"
    parser.add_argument("--serve", type=int, metavar="PORT", help=words)
    words = "file of the key for --serve, for your eyes alone; made if it is missing"
    parser.add_argument("--key-file", type=Path, metavar="FILE", default=None, help=words)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print, write or serve the metrics. Raises RelayrunError."""
    from relayrun.watch.prometheus import RunsCollector, metrics_text  # an extra brings its library

    if options.output is not None and options.serve is not None:
        raise InputError("--output and --serve do not go together", hint="leave one of them out")
    if (options.key_file is None) != (options.serve is None):
        raise InputError("--serve and --key-file go together", hint="give both")
    _runs(options.names)  # an error of a name before anything else
    collector = RunsCollector(lambda: _runs(options.names), now=time.time)
    if options.serve is not None:
        return _serve(options.serve, read_key(options.key_file), lambda: metrics_text(collector))
    text = metrics_text(collector)
    if options.output is None:
        sys.stdout.write(text.decode())
    else:
        write_atomic(options.output, text, mode=0o644, durable=False)
    return 0


def _runs(names: list[str]) -> list[Run]:
    """Return the runs of these names and below these folders."""
    if not names:
        return find_runs.all_run_folders()
    found: list[Run] = []
    for name in names:
        try:
            found.append(find_runs.find_run(name))
        except RunDirError:
            below = list(find_runs.find_runs_below(Path(name), depth=2)) if Path(name).is_dir() else []
            if not below:
                raise
            found += below
    return list({run.path: run for run in found}.values())


def read_key(path: Path) -> str:
    """Return the key in a file, which is made with a new key if it is missing. Raises InputError if another user could
    have read or written it."""
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(KEY_BYTES))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise InputError("the key is not a file of this user alone", where=path, hint=f"chmod 600 {path}")
        key = file.read().strip()
    if not key:
        raise InputError("this file has no key", where=path, hint="remove it: the next call makes one")
    return key


def _serve(port: int, key: str, read: Callable[[], bytes]) -> int:
    """Answer until Ctrl-C. `read`: returns the metrics."""
    expected, lock, answer = f"Bearer {key}", Lock(), (0.0, b"")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal answer
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), expected.encode()):
                return self.send_error(HTTPStatus.UNAUTHORIZED)
            if self.path != "/metrics":
                return self.send_error(HTTPStatus.NOT_FOUND)
            with lock:
                if answer[0] < time.monotonic():
                    answer = time.monotonic() + CACHE_SECONDS, read()
                text = answer[1]
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return None

        def log_message(self, format: str, *args: object) -> None:
            """Log no requests."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
        server.serve_forever()
    return 0
