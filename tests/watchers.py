"""What a test run must undo on the machine, undone however the run ends: SIGKILL runs no `finally`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

WAIT = 'trap "" HUP INT TERM; tail --pid="$1" -f /dev/null; shift; exec "$@"'
"""Waits for the end of a process, then becomes the command. `timeout` and Ctrl-C signal whole groups."""


@contextlib.contextmanager
def undone_by(*command: str | Path) -> Iterator[None]:
    """Run this command if this process ends inside the `with` block, and not behind it."""
    watcher = start_watcher(*command)
    try:
        yield
    finally:
        end_watcher(watcher)


def start_watcher(*command: str | Path) -> subprocess.Popen[bytes]:
    """Start a process that runs this command as soon as this process is gone."""
    environment = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    words = ["bash", "-c", WAIT, "bash", str(os.getpid()), *map(str, command)]
    return subprocess.Popen(words, start_new_session=True, env=environment, **quiet)  # type: ignore[call-overload,no-any-return]


def end_watcher(watcher: subprocess.Popen[bytes]) -> None:
    """End it, and `tail` with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(watcher.pid, signal.SIGKILL)
    watcher.wait(60)


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mount something at `folder`, with these arguments of `mount`."""
    with undone_by("umount", "--lazy", folder):
        subprocess.run(["mount", *options, str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
