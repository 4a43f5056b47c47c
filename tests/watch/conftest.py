"""Fixtures of the tests of `relayrun sentinel` and of goodput."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.control.chain import quota
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import slurm
from relayrun.watch import unsent_notices
from relayrun.watch.status import queue as asking
from tests import accounted
from tests.accounted import make_project
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.watch.goodput_parts import by_name, install
from tests.watch.sentinel_world import MakeWorld, World


@pytest.fixture
def make_world(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeWorld:
    monkeypatch.setattr(quota, "file_system_limit", lambda *_: [])  # of a machine on which other tests write

    def make(*, told: bool = True) -> World:
        world = World(make_run, tmp_path, told=told)
        monkeypatch.setattr(slurm, "jobs_by_name", world.jobs_of)
        monkeypatch.setattr(asking, "query_queue", world.ask)
        monkeypatch.setattr(unsent_notices, "_start", lambda *_: None)
        return world

    return make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    install(tmp_path / "bin", monkeypatch, sacct=by_name(accounted.SACCT))
    return make_project(tmp_path)
