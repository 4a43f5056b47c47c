"""`relayrun metrics`: metrics of runs for Prometheus, as text, as a file, or over HTTP on this machine."""

from __future__ import annotations

import argparse
import os
import secrets
import stat
import sys
import time
from functools import partial
from pathlib import Path

from relayrun.control.rundir import find_runs
from relayrun.errors import InputError
from relayrun.files import write_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun metrics`."""
    parser.add_argument(
        "names", nargs="*", metavar="RUN|FOLDER", help="runs, projects, or folders of runs; default: all runs"
    )
    to = parser.add_mutually_exclusive_group()
    words = "replace this file with the metrics, for the textfile collector of node_exporter"
    to.add_argument("--output", type=Path, metavar="FILE.prom", help=words)
    words = "answer on 127.0.0.1 until Ctrl-C, to requests with the key alone"
    to.add_argument("--serve", type=int, metavar="PORT", help=words)
    words = "file of the key for --serve, readable by you alone; made if it is missing"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=words)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print, write or serve the metrics. Raises RelayrunError."""
    from relayrun.watch import prometheus  # an extra brings its library

    if (options.key_file is None) != (options.serve is None):
        raise InputError("--serve and --key-file go together", hint="give both")
    runs = partial(find_runs.find_runs_of, options.names)
    text = prometheus.metrics_text(runs(now=time.time()))
    if options.serve is not None:
        prometheus.serve(options.serve, read_key(options.key_file), lambda: runs(now=time.time()))
    elif options.output is not None:
        write_atomic(options.output, text, mode=0o644, durable=False)
    else:
        sys.stdout.write(text.decode())
    return 0


def read_key(path: Path) -> str:
    """Return the key in a file, which is made if it is missing. Raises InputError if others can read or write it."""
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(32), mode=0o600, new=True)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise InputError("the key is not a file of this user alone", where=path, hint=f"chmod 600 {path}")
        if not (key := file.read().strip()):
            raise InputError("this file has no key", where=path, hint="remove it: the next call makes one")
    return key
