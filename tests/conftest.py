"""The order in which tests run, and which of them share a worker of pytest-xdist."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
from collections.abc import Generator, Iterator
from itertools import chain, zip_longest
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from relayrun.errors import log_to_stderr
from tests import warm
from tests.pages import tab  # noqa: F401 - a fixture
from tests.receivers import mail, web  # noqa: F401 - fixtures

ROOT = Path(__file__).resolve().parents[1]
os.environ["RELAYRUN_CACHE"] = ""  # no test passes for what another one has proven
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # `nohup make test &` hands on that they are ignored
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
log_to_stderr()  # warnings go to standard error in tests too, as in every program

# how long an example takes says how busy the machine is; what a test says of its own settings holds as before
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

WAITING = ("faults", "slurm", "chain")
"""Folders whose tests mostly wait: they go side by side with those of COMPUTING, before all others."""
COMPUTING = ("training", "export", "e2e", "gpucheck")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in the random order of this seed")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--shuffle")
    return f"random order: --shuffle={seed}" if seed else None


SHARING = "test_training_(recompute|optimizer|loss_mean|attention)"
APART = re.compile(rf"tests/(faults/|gpucheck/|chain/test_local_chain|training/(?!{SHARING}))")
"""Modules whose tests share no fixture that takes long: each goes to any worker. The others stay together."""


def group_of(nodeid: str) -> str:
    """Tests of one group run on one worker."""
    return nodeid if APART.match(nodeid) else nodeid.partition("::")[0]


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """pytest-xdist's own marks of groups are lost with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    return Groups(config, log)


def weight_order(groups: dict[str, list[pytest.Item]]) -> list[list[pytest.Item]]:
    """What takes long first: a test that waits beside one that computes."""
    kinds: dict[str, list[list[pytest.Item]]] = {"waiting": [], "computing": [], "other": []}
    for items in groups.values():
        folder = Path(items[0].nodeid).parts[1]
        kind = "waiting" if folder in WAITING else "computing" if folder in COMPUTING else "other"
        slow = any(item.get_closest_marker("slow") or item.get_closest_marker("slurm") for item in items)
        kinds[kind if slow else "other"].append(items)
    pairs = zip_longest(kinds["waiting"], kinds["computing"], fillvalue=[])
    return [items for items in (*chain.from_iterable(pairs), *kinds["other"]) if items]


def grouped(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    return groups


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: what is imported stays, and the search takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@pytest.fixture(autouse=True)
def _signals_stay_as_they_were() -> Iterator[None]:
    """Or the programs of the next test inherit a mask, and wait for what never reaches them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, []), [signal.getsignal(number) for number in SIGNALS]
    yield
    after = signal.pthread_sigmask(signal.SIG_BLOCK, []), [signal.getsignal(number) for number in SIGNALS]
    signal.pthread_sigmask(signal.SIG_SETMASK, before[0])
    assert after == before


def pytest_sessionfinish(session: pytest.Session) -> None:
    warm.end()


def pytest_runtest_setup(item: pytest.Item) -> None:
    warm.wanted = any(item.get_closest_marker(name) for name in ("slow", "slurm", "long"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    yield
    groups = grouped(items)  # of those that are selected
    ordered = weight_order(groups)
    seed = config.getoption("--shuffle")
    if seed:
        generator = random.Random(seed)
        generator.shuffle(ordered)
        for group in ordered:
            generator.shuffle(group)
    items[:] = chain.from_iterable(ordered)
