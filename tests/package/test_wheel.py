"""The wheel: built from what git knows, installed where nothing else is but what it asks for, used far from here."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from relayrun import __version__
from relayrun.control.rundir.run import Run
from relayrun.errors import EXTRAS
from relayrun.submit import code_snapshot
from tests.wheel import ROOT, Installed, build, install

MODULES = {
    "megatron-core": "megatron",
    "lm_eval": "lm_eval",
    "splintr-rs": "splintr",
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
}
"""Packages whose modules have other names."""

APACHE = "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
"""SHA-256 of the Apache License, Version 2.0, with its appendix, with one blank between two words."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The base alone, with the `python3` of compute nodes on PATH."""
    return install(wheel, tmp_path_factory.mktemp("base"))


@pytest.mark.slow
def test_the_base_alone_submits_looks_and_makes_a_project_from_an_empty_folder(base: Installed, tmp_path: Path) -> None:
    relayrun = base.folder / "bin/relayrun"
    said = base.run(relayrun, "init", "my-project", "--cluster", "local", cwd=tmp_path).stdout
    next_three = [line.split() for line in said.splitlines() if line.startswith("  ")]
    assert next_three[0] == ["cd", "my-project"]
    project = tmp_path / "my-project"
    inside = project / "configs"
    # the base alone trains nothing, and says so before anything is queued; the ranks may have another Python
    refused = base.run(*next_three[2], cwd=project, code=1).stderr
    assert "torch" in refused
    assert "cluster.python" in refused
    assert "pip install 'relayrun[train]'" in refused
    ranks = f"cluster.python={sys.executable}"
    base.run(*next_three[1], "--set", ranks, cwd=project)
    mocked = ["--set", "data.mock_data=true", "--set", ranks, "--dry-run"]
    script = base.run(relayrun, "submit", project / "configs/runs/my-run.yaml", *mocked, cwd=tmp_path).stdout
    assert f"export RELAYRUN_RUN_DIR={project}/logs/runs/my-project/my-run\n" in script
    # nothing that an upgrade of the package replaces
    assert f"export RELAYRUN_ROOT={project}/logs/runs/my-project/my-run/code/0001\n" in script
    assert str(base.packages) not in script
    launcher = base.run("bash", project / "launchers/submit-my-run.sh", "--dry-run", cwd=tmp_path, code=1).stdout
    assert launcher == script
    assert "steps: 1000" in base.run(relayrun, "config", "runs/my-run.yaml", cwd=inside).stdout
    looked = base.run(base.folder / "bin/python", "-m", "relayrun", "status", cwd=inside).stdout
    assert f"no runs below {project}/logs/runs" in looked
    # what is missing has a name, and so has the way to get it
    shuffle = ["dumps", "shuffle", "--dataset-folder", "data", "--output-folder", "shuffled"]
    refused = base.run(relayrun, *shuffle, cwd=inside, code=1).stderr
    assert "error: this needs pyarrow" in refused
    assert "pip install 'relayrun[tokenize]'" in refused
    assert not any((project / "logs").rglob("*.yaml"))
    assert list(base.home.iterdir()) == []


@pytest.mark.slow
def test_jobs_run_a_copy_that_an_upgrade_does_not_touch(base: Installed, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    taken = code_snapshot.snapshot_code(run, base.packages)
    assert taken == code_snapshot.snapshot_code(run, base.packages)
    assert (taken / "launchers/lib/job.sh").read_bytes() == (ROOT / "launchers/lib/job.sh").read_bytes()
    assert sorted(path.name for path in taken.iterdir()) == ["configs", "container", "launchers", "relayrun", "scripts"]
    assert taken.with_suffix(".commit").read_text() == f"relayrun {__version__}, an installed package\n"
    alone = base.run(
        "env", f"PYTHONPATH={taken}", sys.executable, "-S", "-m", "relayrun.control.chain", "--help", cwd=tmp_path
    )
    assert "begin" in alone.stdout


@pytest.mark.slow
def test_the_wheel_has_the_files_that_jobs_need_and_types(base: Installed) -> None:
    package = base.packages / "relayrun"
    assert (package / "py.typed").is_file()
    names = {str(path.relative_to(package / "share")) for path in (package / "share").rglob("*") if path.is_file()}
    tracked = subprocess.run(
        ["git", "ls-files", "launchers", "configs", "scripts/tokenization"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert set(tracked) - {"configs/clusters/test.yaml"} <= names
    assert os.access(package / "share/launchers/submit-demo.sh", os.X_OK)


def test_the_wheel_has_the_license_and_names_it(base: Installed) -> None:
    own = importlib.metadata.Distribution.at(next(base.packages.glob("relayrun-*.dist-info")))
    assert own.metadata["License-Expression"] == "Apache-2.0"
    assert own.metadata.get_all("License-File") == ["LICENSE"]
    text = own.read_text("licenses/LICENSE") or ""
    assert text == (ROOT / "LICENSE").read_text(encoding="utf-8")
    whole = " ".join(text.split()).replace(
        "Copyright The relayrun authors", "Copyright [yyyy] [name of copyright owner]"
    )
    assert hashlib.sha256(whole.encode()).hexdigest() == APACHE


def test_every_extra_that_an_error_names_brings_what_is_missing(base: Installed) -> None:
    own = importlib.metadata.Distribution.at(next(base.packages.glob("relayrun-*.dist-info")))
    for module, extra in EXTRAS.items():
        parts = {
            MODULES.get(requirement.name, requirement.name)
            for text in own.requires or ()
            if (requirement := Requirement(text)).marker is not None and requirement.marker.evaluate({"extra": extra})
        }
        assert module in parts, (module, extra)


@pytest.mark.long
def test_a_chain_of_an_installed_package_trains_to_its_end(wheel: Path, tmp_path: Path) -> None:
    train = install(wheel, tmp_path, "train")
    relayrun = train.folder / "bin/relayrun"
    train.run(relayrun, "init", "p", "--cluster", "local", cwd=tmp_path)
    config = ["configs/runs/my-run.yaml", "--set", "data.mock_data=true", "--set", "training.steps=6"]
    config += [
        "--set",
        "optimizer.lr_warmup_steps=0",
        "--set",
        "checkpoint.interval=3",
        "--set",
        "tracking.tensorboard=false",
    ]
    train.run(relayrun, "submit", *config, cwd=tmp_path / "p")
    run = Run(tmp_path / "p/logs/runs/p/my-run")
    assert "the last iteration, 6, is saved" in run.stop.read_text()
    assert (run.code / "0001/launchers/lib/job.sh").is_file()
    status = train.run(relayrun, "status", "p/my-run", cwd=tmp_path / "p/configs").stdout
    assert "6 of 6" in status
