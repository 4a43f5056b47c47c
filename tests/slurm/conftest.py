"""Fixtures of the tests on a real Slurm: every test module has a cluster of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache

import pytest

from .cluster import ROOT, TestCluster

INSTALL = ROOT / "scripts/tools/install_slurm.sh"
VERSION_COMMAND = ("env", f"PATH={os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin", "slurmctld", "-V")

MakeCluster = Callable[..., TestCluster]


@cache
def slurm_complaint(*options: str) -> str:
    """What is missing for a cluster and how to install it; empty where all is there. Options of install_slurm.sh."""
    done = subprocess.run([INSTALL, "--check", *options], capture_output=True, text=True, check=False, timeout=600)
    return "" if done.returncode == 0 else done.stderr.strip()


@cache
def installed_version() -> str:
    """The words of `slurmctld -V`; empty where there is none."""
    try:
        return subprocess.run([*VERSION_COMMAND], capture_output=True, text=True, check=False, timeout=600).stdout
    except FileNotFoundError:
        return ""


def version_complaint(wanted: str, installed: str) -> str:
    """The way to the wanted version where these tests would run on another one; empty where none is wanted."""
    if not wanted or f" {wanted}." in installed:
        return ""
    return f"this is {installed.strip() or 'no Slurm'}, not {wanted}: make test-slurm SLURM_VERSION={wanted}"


def verdict(complaint: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """`run`, `skip` or `fail`, with the reason. In CI a Slurm test is never skipped."""
    if environ.get("RELAYRUN_NO_SLURM") == "1" and environ.get("CI") != "true":
        return "skip", f"RELAYRUN_NO_SLURM=1; {complaint or 'Slurm is installed'}"
    if complaint:
        hint = "" if environ.get("CI") == "true" else " (or set RELAYRUN_NO_SLURM=1 to go without these tests)"
        return "fail", complaint + hint
    return "run", ""


@pytest.fixture(scope="session")
def slurm() -> None:
    """Slurm is installed; otherwise the test is skipped or fails, see `verdict`."""
    judge(version_complaint(os.environ.get("SLURM_VERSION", ""), installed_version()) or slurm_complaint())


@pytest.fixture(scope="session")
def accounting() -> None:
    """Slurm is installed with slurmdbd and a database; otherwise as `slurm`."""
    judge(slurm_complaint("--accounting"))


def judge(complaint: str) -> None:
    """Skip or fail where something is missing."""
    action, reason = verdict(complaint, os.environ)
    if action == "skip":
        pytest.skip(reason)
    if action == "fail":
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="module")
def make_cluster(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCluster]:
    """Start a further cluster; keyword arguments are TestCluster's. All are down when the module's tests end."""
    clusters: list[TestCluster] = []

    def make(**settings: int) -> TestCluster:
        cluster = TestCluster(tmp_path_factory.mktemp("slurm"), **settings)
        clusters.append(cluster)
        cluster.up()
        return cluster

    try:
        yield make
    finally:
        for cluster in clusters:
            cluster.down()


@pytest.fixture(scope="module")
def cluster(make_cluster: MakeCluster) -> TestCluster:
    """The module's cluster: four nodes with 8 CPUs and 4 GPUs each."""
    return make_cluster()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the daemons' last words to the report of a failed test."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, TestCluster):
                report.sections.append((f"Slurm daemons in {value.path}", value.tail_logs()))
    return report
