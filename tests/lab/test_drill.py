"""The drill without a cluster: what is refused, what it would cost, how a run is judged, what its page says."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main, parse
from relayrun.cli.site.lab import DEFAULT_FAULTS as DEFAULT
from relayrun.cli.site.lab import read_cluster
from relayrun.config.compose import resolve
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError, InputError
from relayrun.lab.compare_runs import checkpoint_differences
from relayrun.lab.faults import session
from relayrun.lab.faults.experiment import FaultResult, FaultSite
from relayrun.lab.faults.session import FaultSession
from relayrun.lab.faults.table import FAULTS, FAULTS_BY_NAME, UNDISTURBED
from relayrun.train.checkpoint import checksums
from tests.faults.cluster_faults import wrapper_marker, write_wrappers
from tests.readme import ROOT

CLUSTERS = sorted(path.stem for path in (ROOT / "configs/clusters").glob("*.yaml") if path.stem != "local")


def drill(folder: Path, names: str = "rank-killed,cancelled", **values: Any) -> FaultSession:
    site = FaultSite(folder=folder, cluster=read_cluster("test"), nodes=2, slurm=Slurm(patience=0), **values)
    faults = session.select_faults(names)
    return FaultSession(site, faults)


def done(name: str, **values: Any) -> FaultResult:
    return FaultResult(name=name, what="w", expect="resumed", **({"passed": True} | values))


def put(found: FaultSession, *results: FaultResult) -> None:
    (found.folder / "results").mkdir(parents=True, exist_ok=True)
    for result in results:
        result.write(found.folder / "results" / f"{result.name}.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "test", "--faults", "rank-kiled"], "error: --faults: unknown fault 'rank-kiled'"),
        (["--cluster", "test", "--faults", ","], "error: --faults: no fault is named"),
        (["--cluster", "nowhere"], "error: --cluster: unknown cluster 'nowhere'"),
        (["--cluster", "local"], "error: --cluster: cluster local has no Slurm"),
        (["--cluster", "test", "--nodes", "0"], "error: --nodes: 0 is less than 1"),
    ],
)
def test_bad_input_is_one_error(words: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relayrun.cli", "drill", "--directory", str(tmp_path / "d"), *words]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(said)
    assert found.stderr.count("error:") == 1
    assert not (tmp_path / "d").exists()


def blocks(kind: str) -> list[str]:
    text = (ROOT / "docs/how-to/drill.md").read_text(encoding="utf-8")
    return re.findall(rf"^```bash {kind}\n(.*?)^```$", text, re.M | re.S)


def test_the_page_lists_the_faults(capsys: pytest.CaptureFixture[str]) -> None:
    (look,) = blocks("look")
    assert main(shlex.split(look)[1:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(FAULTS_BY_NAME)


def test_the_page_asks_before_it_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultSession, "check", lambda self: None)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (command,) = blocks("drill")
    options = parse([*shlex.split(command)[1:], "--directory", str(tmp_path)])
    with pytest.raises(InputError, match="nobody can be asked whether to queue this\n  -> add --yes"):
        options.run(options)
    assert not (tmp_path / "runs").exists()


def test_the_default_faults_are_six_of_the_table() -> None:
    faults = session.select_faults(DEFAULT)
    assert len(faults) == 6
    assert session.select_faults("all") == list(FAULTS)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_runs_of_a_drill_can_be_written_for_every_site(cluster: str, tmp_path: Path) -> None:
    site = FaultSite(folder=tmp_path, cluster=read_cluster(cluster), slurm=Slurm(patience=0))
    config = resolve.load_run_config(site.write_config("rank-stopped", FAULTS_BY_NAME["rank-stopped"]))
    assert config.chain.hang_timeout == 5
    assert config.job.nodes == 2
    for fault in FAULTS:
        resolve.load_run_config(site.write_config(fault.name, fault))


def test_few_nodes_and_one_rank_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayrun.control.scheduler.slurm.SlurmNodes.all_nodes", lambda self: {"n0", "n1"})
    found = drill(tmp_path)
    with pytest.raises(ConfigError, match="--nodes: the cluster has 2 nodes, and the drill needs 3"):
        FaultSession(replace(found.site, nodes=3), []).check()
    with pytest.raises(ConfigError, match="--nodes: a drill needs two ranks"):
        FaultSession(replace(found.site, nodes=1), []).check()


def test_a_folder_of_another_drill_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayrun.control.scheduler.slurm.SlurmNodes.all_nodes", lambda self: {"n0", "n1", "n2"})
    monkeypatch.setattr(
        "relayrun.submit.submission.check_submission", lambda *a, **k: type("R", (), {"findings": Quiet()})()
    )
    found = drill(tmp_path)
    found.check()
    found.check()
    with pytest.raises(InputError, match="another cluster or other nodes"):
        FaultSession(replace(found.site, nodes=3), []).check()


class Quiet:
    """Findings without one."""

    def raise_errors(self) -> None:
        pass


def test_rows_that_are_done_are_kept_and_the_reference_comes_first(tmp_path: Path) -> None:
    found = drill(tmp_path, "rank-killed,cancelled")
    assert found.pending_tests() == [UNDISTURBED.name, "rank-killed", "cancelled"]
    cost = found.cost(found.pending_tests())
    assert f": {1 + 2 + 1} jobs, " in cost
    assert f"(at most {4 * 2 * 10})" in cost
    put(found, done(UNDISTURBED.name), done("rank-killed", passed=False, wrong=["no"]))
    assert found.pending_tests() == ["cancelled"]
    with found.locked(), pytest.raises(InputError, match="another drill"), drill(tmp_path).locked():
        pass
    put(found, done("cancelled"))
    assert found.pending_tests() == []
    found.forget_results()
    assert found.pending_tests() == ["rank-killed", "cancelled"]
    put(found, done(UNDISTURBED.name, passed=False))
    assert found.pending_tests()[0] == UNDISTURBED.name


def test_the_page_says_what_failed_and_what_is_not_done(tmp_path: Path) -> None:
    found = drill(tmp_path, "rank-killed,cancelled")
    bad = done("rank-killed", passed=False, wrong=["a | <b>worse</b> end"], bit_for_bit=False, steps_lost=5)
    put(found, done(UNDISTURBED.name), bad)
    text = session.markdown_report(found)
    assert "drill on test: 0 of 1 faults passed" in text
    assert "| rank-killed | w | – | 0 | 5 | NO | FAILED |" in text
    assert "a \\| &lt;b>worse&lt;/b> end" in text
    assert "Not done yet: cancelled." in text
    values = session.session_as_json(found)
    assert json.loads(json.dumps(values)) == values
    assert (values["passed"], values["not_done"]) == (False, ["cancelled"])
    assert values["rows"][1] == asdict(bad)


def write_checkpoint(folder: Path, values: bytes, common: bytes = b"common") -> None:
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(values)
    (folder / "common.pt").write_bytes(common)
    sums = checksums.checksum_of_bytes(values).xxh3_128
    empty = checksums.checksum_of_bytes(b"").xxh3_128
    assert sums is not None
    assert empty is not None
    block = checksums.ChecksumBlock(
        key="w",
        offset=[0],
        shape=[4],
        dtype="f",
        file="__0_0.distcp",
        at=0,
        bytes=len(values),
        values_bytes=len(values),
        values=sums,
        frame=empty,
    )
    files = checksums.write_block_checksums(folder, 0, 40, [block], {"__0_0.distcp": len(values)})
    files |= {"common.pt": checksums.checksum_of_bytes(common)}
    checksums.write_checksum_index(folder, 40, files)


def test_one_other_bit_and_one_damaged_byte_of_a_checkpoint_are_found(tmp_path: Path) -> None:
    one, same, other = tmp_path / "one", tmp_path / "same", tmp_path / "other"
    write_checkpoint(one, b"abcd")
    write_checkpoint(same, b"abcd")
    write_checkpoint(other, b"abce")
    assert checkpoint_differences(one, same) == (1, [])
    assert checkpoint_differences(one, other) == (1, ["w at [0] differs"])
    write_checkpoint(tmp_path / "common", b"abcd", common=b"commoN")
    assert checkpoint_differences(one, tmp_path / "common") == (1, ["common.pt at [] differs"])
    assert checkpoint_differences(one, tmp_path / "common", tensors_only=True) == (1, [])
    (same / "common.pt").write_bytes(b"commoN")
    assert "common.pt is not the one that was saved" in checkpoint_differences(one, same)[1][0]
    shutil.rmtree(other)
    assert "checksums.json is missing" in checkpoint_differences(other, one)[1][0]


def test_a_command_before_slurms_own_acts_inside_jobs_alone(tmp_path: Path) -> None:
    write_wrappers({"sh": 'touch "${provoked}"; exit 3'}, tmp_path, search="/bin:/usr/bin", real={})
    outer = ["bash", "-c", f'"{tmp_path}/bin/sh" -c "exit 0"; echo $?']
    for job, code, harm in ((None, "0", False), ("7", "3", True)):
        environment = {"PATH": "/bin:/usr/bin"} | ({"SLURM_JOB_ID": job} if job else {})
        said = subprocess.run(outer, env=environment, capture_output=True, text=True, check=True, timeout=600).stdout
        assert (said.strip(), wrapper_marker(tmp_path).exists()) == (code, harm)
    with pytest.raises(InputError, match="no-such-command is not on PATH"):
        write_wrappers({"no-such-command": ""}, tmp_path, search="/bin", real={})
