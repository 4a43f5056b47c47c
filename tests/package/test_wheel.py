"""The wheel: built from what git knows, installed where nothing else is but what it asks for, used far from here."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from relayrun import __version__
from relayrun.errors import EXTRAS
from relayrun.rundir.run import Run
from relayrun.submit import code_snapshot

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"megatron-core": "megatron", "lm_eval": "lm_eval", "splintr-rs": "splintr", "nvidia-ml-py": "pynvml"}
"""Packages whose modules have other names."""


def closure(names: Iterable[str], extra: str = "") -> set[str]:
    """The distributions that some requirements bring, by the environment that the tests run in."""
    found: set[str] = set()
    open_ = {(re.sub(r"[-_.]+", "-", name).lower(), extra) for name in names}
    while open_:
        name, wanted = open_.pop()
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                own = re.sub(r"[-_.]+", "-", requirement.name).lower()
                parts = {(own, each) for each in (requirement.extras or {""})}
                open_ |= {part for part in parts if part[0] not in found}
    return found


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and what it asks for, and nothing else."""

    folder: Path
    home: Path

    @property
    def packages(self) -> Path:
        return self.folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

    def run(self, *command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment with nothing of the tests' own around it."""
        given = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.home), "COLUMNS": "200"}
        done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree, without a download."""
    folder = tmp_path_factory.mktemp("wheel")
    known = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, known.split("\0")):
        if not name.startswith(("tests/", "docs/", "benchmarks/")) and (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    pip(["wheel", "--no-deps", "--no-build-isolation", "--no-index", f"--wheel-dir={folder}", str(folder / "tree")])
    return next(folder.glob("*.whl"))


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    subprocess.run(command, check=True, env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ})


def install(wheel: Path, folder: Path, extra: str = "") -> Installed:
    """A clean environment: the wheel, and links to the packages that its own metadata ask for."""
    installed = Installed(folder / "env", folder / "home")
    installed.home.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", installed.folder], check=True)
    pip([f"--python={installed.folder / 'bin/python'}", "install", "--no-deps", "--no-index", str(wheel)])
    own = importlib.metadata.Distribution.at(next(installed.packages.glob("relayrun-*.dist-info")))
    asked = [Requirement(text) for text in own.requires or ()]
    names = {each.name for each in asked if each.marker is None or (extra and each.marker.evaluate({"extra": extra}))}
    for name in closure(names):
        distribution = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if not (installed.packages / top).exists():
                (installed.packages / top).symlink_to(source)
    return installed


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The base alone, with the `python3` of compute nodes on PATH."""
    return install(wheel, tmp_path_factory.mktemp("base"))


@pytest.mark.slow
def test_the_base_alone_submits_looks_and_makes_a_project_from_an_empty_folder(base: Installed, tmp_path: Path) -> None:
    relayrun = base.folder / "bin/relayrun"
    said = base.run(relayrun, "init", "my-project", "--cluster", "generic", cwd=tmp_path).stdout
    next_three = [line.split() for line in said.splitlines() if line.startswith("  ")]
    assert next_three[0] == ["cd", "my-project"]
    for command in next_three[1:]:
        base.run(*command, *({"--dry-run"} - set(command)), cwd=tmp_path / "my-project")
    project = tmp_path / "my-project"
    inside = project / "configs"
    config = "runs/my-run.yaml"
    script = base.run(relayrun, "submit", config, "--set", "data.mock_data=true", "--dry-run", cwd=inside).stdout
    assert f"export RELAYRUN_RUN_DIR={project}/logs/runs/my-project/my-run\n" in script
    # nothing that an upgrade of the package replaces
    assert f"export RELAYRUN_ROOT={project}/logs/runs/my-project/my-run/code/0001\n" in script
    assert str(base.packages) not in script
    launcher = base.run("bash", project / "launchers/submit-my-run.sh", "--dry-run", cwd=tmp_path).stdout
    assert launcher == base.run(relayrun, "submit", config, "--dry-run", cwd=inside).stdout
    assert "no runs below " + str(project / "logs/runs") in base.run(relayrun, "status", cwd=inside).stdout
    assert "steps: 1000" in base.run(relayrun, "config", config, cwd=inside).stdout
    # a checkpoint cannot be exported here: what is missing has a name, and so has the way to get it
    refused = base.run(relayrun, "export", "hf", "--help", cwd=inside, code=1).stderr
    assert "error: this needs torch" in refused
    assert "pip install 'relayrun[train]'" in refused
    assert "usage: relayrun" in base.run(base.folder / "bin/python", "-m", "relayrun", "--help", cwd=tmp_path).stdout
    assert not any((project / "logs").rglob("*.yaml"))
    assert list(base.home.iterdir()) == []


def test_jobs_run_a_copy_that_an_upgrade_does_not_touch(base: Installed, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    taken = code_snapshot.snapshot(run, base.packages)
    assert taken == code_snapshot.snapshot(run, base.packages)
    assert (taken / "launchers/lib/job.sh").read_bytes() == (ROOT / "launchers/lib/job.sh").read_bytes()
    assert sorted(path.name for path in taken.iterdir()) == ["configs", "launchers", "relayrun", "scripts"]
    assert taken.with_suffix(".commit").read_text() == f"relayrun {__version__}, an installed package\n"
    alone = base.run("env", f"PYTHONPATH={taken}", sys.executable, "-S", "-m", "relayrun.chain", "--help", cwd=tmp_path)
    assert "begin" in alone.stdout


def test_the_wheel_has_the_files_that_jobs_need_and_types(base: Installed) -> None:
    package = base.packages / "relayrun"
    assert (package / "py.typed").is_file()
    names = {str(path.relative_to(package / "share")) for path in (package / "share").rglob("*") if path.is_file()}
    tracked = subprocess.run(
        ["git", "ls-files", "launchers", "configs", "scripts/tokenization"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert set(tracked) - {"configs/clusters/test.yaml"} <= names
    assert os.access(package / "share/launchers/submit-demo.sh", os.X_OK)


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
    assert "the last iteration, 6, is durable" in run.stop.read_text()
    assert (run.code / "0001/launchers/lib/job.sh").is_file()
    status = train.run(relayrun, "status", "p/my-run", cwd=tmp_path / "p/configs").stdout
    assert "6 of 6" in status
