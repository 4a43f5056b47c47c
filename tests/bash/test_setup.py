"""scripts/tools/setup.sh: which build of torch it takes, with pip as a stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from relayrun.places import CODE as ROOT

PYTHON = """#!/usr/bin/env bash
case "$*" in
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
    python, log = tmp_path / "venv/bin/python", tmp_path / "log"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = os.environ | {"BUILD": build, "PIP_LOG": str(log), "PIP_HAS": " ".join(offered)}
    done = subprocess.run(
        ["bash", ROOT / "scripts/tools/setup.sh", tmp_path / "venv"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert log.read_text().split() == asked, done.stderr
    assert words in done.stdout + done.stderr
    ready = (tmp_path / "venv/.ready").exists()
    assert (done.returncode == 0) == ready == (asked[-1] in offered)
