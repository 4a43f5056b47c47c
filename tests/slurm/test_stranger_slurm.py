"""A user without rights connects to every port of a job of a real Slurm, from its start to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from relayrun.control.rundir.records import RefusedConnections
from relayrun.control.rundir.restarts import read_failed_restarts
from relayrun.control.rundir.run import Run
from relayrun.lab.faults.processes import job_processes
from tests.chain.test_local_recovery import assert_same_run
from tests.faults.cluster_faults import STRANGERS_WORDS, listening_addresses
from tests.workspace import Workspace, ends

from .cluster import TestCluster
from .test_spare_nodes_slurm import config, reference
from .test_training_chain import chain_jobs, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

NOBODY = 65_534
PROGRAM = """
import json, os, socket, sys

assert os.getresuid() == (65534,) * 3 and os.getgroups() == []
for line in sys.stdin:
    asked = json.loads(line)
    for host, port in asked["addresses"]:
        for words in asked["words"]:
            heard = b""
            try:
                with socket.create_connection((host, port), timeout=1) as connection:
                    connection.sendall(words.encode("latin-1"))
                    connection.settimeout(0.2)
                    while data := connection.recv(65536):
                        heard += data
            except OSError:
                pass
            print(json.dumps({"port": port, "heard": heard.decode("latin-1")}))
    for path in asked["files"]:
        try:
            print(json.dumps({"read": path, "heard": open(path, "rb").read().hex()}))
        except OSError as error:
            print(json.dumps({"refused": path, "error": type(error).__name__}))
    print("{}", flush=True)
"""
"""For each line of addresses, words and files: what is heard there, as the user 65534 without groups."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.make(tmp_path_factory.mktemp("workspace"))


@contextmanager
def stranger() -> Iterator[subprocess.Popen[str]]:
    ids = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with subprocess.Popen(
        [*ids, sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        assert process.stdin is not None
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str], **asked: object) -> list[dict[str, str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(asked), file=process.stdin, flush=True)
    return [json.loads(line) for line in iter(process.stdout.readline, "{}\n")]


def connections_of_a_job(run: Run, job_id: str, process: subprocess.Popen[str]) -> list[dict[str, str]]:
    """Connect to every port on which processes of the job listen now, and read the files of the attempt."""
    addresses = sorted(listening_addresses(pid for pid, _, _ in job_processes(job_id)))
    words = [each.replace(b"%s", job_id.encode()).decode("latin-1") for each in STRANGERS_WORDS]
    found = ask(process, addresses=addresses, words=words, files=[str(run.attempt(1).secret)])
    secret = run.attempt(1).secret.read_bytes() if run.attempt(1).secret.exists() else b""
    for _, line, _ in job_processes(job_id) if secret else ():
        assert secret.hex().encode() not in b" ".join(line)
    return found


def test_another_user_learns_and_changes_nothing_at_the_ports_of_a_job(
    cluster: TestCluster, workspace: Workspace
) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone becomes another user")
    whole = reference(cluster, workspace)
    submit(cluster, config(workspace, "visited"))
    run = workspace.run("visited")
    job_id = cluster.queue()[0].id
    for folder in (run.path, *run.path.parents):  # as on a cluster: everybody may pass through
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)
    found: list[dict[str, str]] = []
    with stranger() as process:
        while chain_jobs(cluster, run):
            found += connections_of_a_job(run, job_id, process)
    ports = {each["port"] for each in found if "port" in each}
    assert len(ports) > 3, "the coordinator, the agents and torch listen"
    heard = [line for each in found if "port" in each for line in each["heard"].splitlines()]
    assert {json.loads(line)["kind"] for line in heard} == {"challenge"}
    assert {json.loads(line).keys() == {"kind", "nonce"} for line in heard} == {True}
    read = [each for each in found if "read" in each or "refused" in each]
    assert {each.get("error") for each in read} <= {"PermissionError", "FileNotFoundError"}
    assert "PermissionError" in {each.get("error") for each in read}
    assert [end.cause for end in ends(run)] == ["done"]
    assert list(read_failed_restarts(run.attempt(1))) == []
    assert_same_run(run, whole)
    refused = RefusedConnections.read(run.attempt(1).refused_connections)
    assert refused is not None
    assert refused.count > 1
    shown = cluster.run([sys.executable, "-m", "relayrun.cli", "status", str(run.path)]).stdout
    assert "refused" in shown
