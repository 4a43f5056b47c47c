"""scripts/tools/setup.sh: which build of torch it takes, with pip as a stand-in."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from relayrun.places import CODE_ROOT as ROOT

PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$(dirname "$PIP_LOG")/calls"
case "$*" in
  *m.version*) printf '%s\\n' "$TORCH_HERE" ;;
  *torch==*) printf '%s\\n' "${@: -1}" >>"$PIP_LOG"; [[ " $PIP_HAS " == *" ${@: -1} "* ]] ;;
esac
"""
VERSION = next(
    line.removeprefix("torch==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("torch==")
)
PLAIN, CPU, ONLY_PLAIN = f"torch=={VERSION}", f"torch=={VERSION}+cpu", f"torch==={VERSION}"
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()


@pytest.mark.parametrize(
    ("build", "offered", "asked", "words"),
    [
        pytest.param("cpu", [CPU, ONLY_PLAIN], [CPU], "its build for CPUs", id="cpu"),
        pytest.param("cpu", [ONLY_PLAIN], [CPU], f"error: pip finds no torch {VERSION}+cpu", id="cpu-not-offered"),
        pytest.param("cuda", [CPU, ONLY_PLAIN], [ONLY_PLAIN], "built for CUDA it is", id="cuda"),
        pytest.param("cuda", [PLAIN], [ONLY_PLAIN, PLAIN], "built for CUDA it is", id="an-index-of-one-build"),
        pytest.param("", [CPU, ONLY_PLAIN], [ONLY_PLAIN] if HAS_DRIVER else [CPU], "set-up: done", id="by-the-driver"),
        pytest.param("", [ONLY_PLAIN], [ONLY_PLAIN] if HAS_DRIVER else [CPU, ONLY_PLAIN], "GB", id="plain-pip"),
    ],
)
def test_the_build_of_torch(tmp_path: Path, build: str, offered: list[str], asked: list[str], words: str) -> None:
    log = tmp_path / "log"
    done = set_up(tmp_path, build, offered)
    assert log.read_text().split() == asked, done.stderr
    assert words in done.stdout + done.stderr
    ready = (tmp_path / "venv/.ready").exists()
    assert (done.returncode == 0) == ready == (asked[-1] in offered)


@pytest.mark.parametrize("here", [VERSION, f"{VERSION}+cu128"])
def test_a_build_of_this_version_that_is_there_stays(tmp_path: Path, here: str) -> None:
    """On a login node without a GPU a second set-up took the build away that the nodes with GPUs need."""
    done = set_up(tmp_path, "", [CPU, ONLY_PLAIN], here=here)
    assert done.returncode == 0, done.stderr
    assert f"torch {here} is there, and stays" in done.stdout
    assert not (tmp_path / "log").exists()
    set_up(tmp_path, "cpu", [CPU], here=here)
    assert (tmp_path / "log").read_text().split() == [CPU]


def test_every_package_is_installed_by_its_hash_and_nothing_else_is_downloaded(tmp_path: Path) -> None:
    assert set_up(tmp_path, "cpu", [CPU]).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    installs = [call for call in calls if " install " in call]
    assert len(installs) == 4
    for call in installs:
        locked = "--require-hashes --no-deps --no-build-isolation" in call
        assert locked or "torch==" in call or "--no-index --no-build-isolation" in call
    assert "--require-hashes" in installs[1]
    assert installs[1].endswith(" constraints-hashes.txt")


def pins(name: str) -> dict[str, list[str]]:
    """Lines of a file of versions, by name and version as PEP 503 writes the name."""
    lines = [line.split() for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return {
        re.sub(r"[-_.]+", "-", first.lower().partition("==")[0]) + first.partition("==")[2]: rest
        for first, *rest in lines
    }


def test_hashes_are_those_of_the_versions() -> None:
    """After a change of constraints.txt: scripts/tools/write_hashes.py."""
    for name in ("constraints", "constraints-docs"):
        hashes, versions = pins(f"{name}-hashes.txt"), pins(f"{name}.txt")
        assert hashes.keys() == versions.keys() - {f"torch{VERSION}"}
        assert all(each and re.fullmatch("--hash=sha256:[0-9a-f]{64}", each[0]) for each in hashes.values())
        assert "://" not in (ROOT / f"{name}-hashes.txt").read_text(encoding="utf-8")


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    """As `make setup` asks pip, with a wheel that is not what was looked at."""
    wheel = tmp_path / "gigatoken-0.10.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("gigatoken.py", "")
        file.writestr(
            "gigatoken-0.10.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: gigatoken\nVersion: 0.10.0\n"
        )
        file.writestr("gigatoken-0.10.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("gigatoken-0.10.0.dist-info/RECORD", "")
    (line,) = (
        each for each in (ROOT / "constraints-hashes.txt").read_text().splitlines() if each.startswith("gigatoken=")
    )
    wanted = tmp_path / "wanted.txt"
    options = [
        "--no-index",
        f"--find-links={tmp_path}",
        "--require-hashes",
        "--no-deps",
        f"--target={tmp_path / 'site'}",
    ]
    for added, code in (("", 1), (f" --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}", 0)):
        wanted.write_text(line + added)
        command = [sys.executable, "-m", "pip", "install", *options, "--requirement", str(wanted)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, done.stderr
        assert ("DO NOT MATCH THE HASHES" in done.stderr) == bool(code)


def set_up(folder: Path, build: str, offered: list[str], *, here: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with an environment that is there, and has torch `here`; what is asked of pip stands in `log`."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {"BUILD": build, "PIP_LOG": str(folder / "log"), "PIP_HAS": " ".join(offered), "TORCH_HERE": here}
    return subprocess.run(
        ["bash", ROOT / "scripts/tools/setup.sh", folder / "venv"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
