"""Slurm of another version than the machine's: the script says what it lacks, and no test passes on a wrong version."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .cluster import ROOT
from .conftest import version_complaint

SCRIPT = ROOT / "scripts/tools/slurm_version.sh"


def asked(*words: str, roots: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"RELAYRUN_SLURM_ROOTS": str(roots)} | ({"PATH": path} if path else {})
    return subprocess.run([SCRIPT, *words], env=env, capture_output=True, text=True, check=False, timeout=600)


def tools(folder: Path, *names: str) -> str:
    """A PATH with these programs alone."""
    folder.mkdir()
    for name in names:
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        (folder / name).symlink_to(found)
    return str(folder)


@pytest.mark.parametrize("verb", ["build", "check", "run"])
def test_an_unknown_version_is_refused_with_the_known_ones(tmp_path: Path, verb: str) -> None:
    done = asked(verb, "19.05", *(["true"] if verb == "run" else []), roots=tmp_path)
    assert done.returncode == 1
    assert "there are 22.05, 24.11 and 26.05" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_machine_that_cannot_build_a_root_says_why(tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", "bash", "dirname", "paste", "sed", "head", "unshare", "true")
    script = SCRIPT.read_text().replace(
        'source "$here/lib/slurm.sh"', f'source "{SCRIPT.parent}/lib/slurm.sh"\nPATH={path}'
    )
    script = script.replace('source "$here/lib/packages.sh"', f'source "{SCRIPT.parent}/lib/packages.sh"')
    copy = tmp_path / "slurm_version.sh"
    copy.write_text(script)
    env = os.environ | {"RELAYRUN_SLURM_ROOTS": str(tmp_path / "roots")}
    command = ["bash", str(copy), "run", "26.05", "true"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert "Slurm 26.05: " in done.stderr
    assert "debootstrap is not installed" in done.stderr
    assert not (tmp_path / "roots").exists()


def test_a_slurm_built_from_source_is_the_machines_own_with_the_plugins_beside_it(tmp_path: Path) -> None:
    daemon, plugin = tmp_path / "slurm/sbin/slurmctld", tmp_path / "slurm/lib/slurm/select_cons_tres.so"
    for file in (daemon, plugin):
        file.parent.mkdir(parents=True)
        file.touch()
    daemon.write_text("#!/bin/sh\necho slurm 23.11.11\n")
    daemon.chmod(0o755)
    path = f"{daemon.parent}:{os.environ['PATH']}"
    done = asked("run", "23.11", "echo", "runs", roots=tmp_path / "roots", path=path)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr
    command = ["bash", "-c", f"source {SCRIPT.parent}/lib/slurm.sh; slurm_plugin_dir"]
    found = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False, timeout=600)
    assert found.stdout == f"{plugin.parent}\n"


def test_usage_names_the_verbs(tmp_path: Path) -> None:
    done = asked(roots=tmp_path)
    assert done.returncode == 2
    assert "build VERSION" in done.stderr


@pytest.mark.parametrize(
    ("wanted", "installed", "complains"),
    [
        ("", "slurm-wlm 22.05.8\n", False),
        ("22.05", "slurm-wlm 22.05.8\n", False),
        ("24.11", "slurm-wlm 22.05.8\n", True),
        ("26.05", "", True),
    ],
)
def test_tests_of_one_version_never_run_on_another(wanted: str, installed: str, complains: bool) -> None:
    complaint = version_complaint(wanted, installed)
    assert bool(complaint) is complains
    assert not complains or f"SLURM_VERSION={wanted}" in complaint
