"""What tests of tokenization need not wait for."""

from __future__ import annotations

import sysconfig
from functools import cache

import pytest

from relayrun.tokens.tokenize import processes

sysconfig.get_path = cache(sysconfig.get_path)  # loguru asks 36 times a logger, datatrove makes three a task


@pytest.fixture(autouse=True)
def _workers_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist's threads hold nothing that a worker needs; one that is spawned imports for half a second."""
    monkeypatch.setattr(processes, "_has_one_thread", lambda: True)
