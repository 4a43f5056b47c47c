"""A rank raises its limit of open files, and says so where the node's own is too low for so many ranks."""

from __future__ import annotations

import resource

import pytest

from relayrun.train import distributed


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard limit of a process that is made up."""
    found = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (found[0], found[1]))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: found.__setitem__(slice(None), pair))
    return found


def test_the_soft_limit_becomes_the_hard_one(limits: list[int]) -> None:
    distributed.raise_file_limit(0, 500)
    assert limits == [4096, 4096]


def test_a_hard_limit_below_the_sockets_is_said_with_the_numbers(limits: list[int]) -> None:
    distributed.raise_file_limit(1, 4000)
    with pytest.raises(
        distributed.OpenFileLimitTooLow, match=r"rank 0 of 4000 opens 80\d\d files at least.* allows 4096"
    ):
        distributed.raise_file_limit(0, 4000)
    with pytest.raises(distributed.OpenFileLimitTooLow, match="LimitNOFILE of slurmd"):
        distributed.raise_file_limit(1, 5000)


def test_no_limit_is_never_too_low(limits: list[int]) -> None:
    limits[:] = [1024, resource.RLIM_INFINITY]
    distributed.raise_file_limit(0, 1_000_000)
    assert limits == [resource.RLIM_INFINITY] * 2
