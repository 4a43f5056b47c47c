"""scripts/tools/setup.sh: which build of torch it takes, with pip as a stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from relayrun.places import CODE_ROOT as ROOT

PYTHON = """#!/usr/bin/env bash
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
