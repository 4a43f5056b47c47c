"""Locks of outputs on file systems without locks: a dead holder is recognised, or the error says how to remove it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

import pytest

from relayrun.errors import InputError
from relayrun.leftovers import process_identity
from relayrun.publishing import output_lock

FAR = "01234567-1-2-3"
"""A process of another boot."""


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def left(folder: Path, **more: object) -> Path:
    """Return the lock of `made` that a process on another node has put there."""
    lock = folder / ".made.lock"
    record = {"owner": FAR, "command": "relayrun dumps", "pid": 2, "host": "node7", "since": time.time()}
    lock.write_text(json.dumps(record | more))
    return lock


def acquire(folder: Path) -> None:
    with output_lock(folder / "made"):
        pass
    assert not (folder / ".made.lock").exists()


def test_a_holder_on_another_node_is_named_with_the_way_to_take_the_lock(tmp_path: Path) -> None:
    lock = left(tmp_path, job="4711", start="0")
    with pytest.raises(InputError) as caught:
        acquire(tmp_path)
    assert "process 2 on 'node7'" in str(caught.value)
    assert f"if that process has ended (`squeue -j '4711'` shows no job), remove {lock}" in str(caught.value)
    lock.unlink()
    acquire(tmp_path)


def test_a_holder_of_this_machine_before_its_boot_is_dead(tmp_path: Path) -> None:
    left(tmp_path, host=socket.gethostname())
    acquire(tmp_path)


def test_a_holder_in_this_boot_is_examined(tmp_path: Path) -> None:
    lock = left(tmp_path, host=socket.gethostname(), owner=process_identity())
    with pytest.raises(InputError, match="another process makes this"):
        acquire(tmp_path)
    lock.write_text(lock.read_text().replace(process_identity(), process_identity().rpartition("-")[0] + "-1"))
    acquire(tmp_path)


def test_a_holder_in_an_earlier_start_of_this_job_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alps")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for other in ({"cluster": "elsewhere"}, {"start": "1"}, {"start": "2"}, {"job": "4712"}, {"start": "x"}):
        left(tmp_path, **{"job": "4711", "cluster": "alps", "start": "0"} | other)
        with pytest.raises(InputError, match="another process makes this"):
            acquire(tmp_path)
    left(tmp_path, job="4711", cluster="alps", start="0")
    acquire(tmp_path)


def test_a_torn_record_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / ".made.lock").write_text('{"owner": "')
    acquire(tmp_path)
