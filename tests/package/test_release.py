"""`make release`: the same bytes twice, metadata, and a first run from the wheel and from the sdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.tools import make_release
from tests.wheel import install

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of a release by their suffix."""
    folder = tmp_path_factory.mktemp("release")
    return {path.suffix: path for path in make_release.build(folder / "one", "1700000000")}


def test_two_builds_have_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    assert set(built) == {".gz", ".whl", ".pyz"}
    mask = os.umask(0o077)
    try:
        again = make_release.build(tmp_path / "two", "1700000000")
    finally:
        os.umask(mask)
    assert {path.name: path.read_bytes() for path in again} == {path.name: path.read_bytes() for path in built.values()}


def test_the_metadata_are_whole(built: dict[str, Path], tmp_path: Path) -> None:
    assert make_release.missing_metadata(built[".whl"]) == []
    bare = tmp_path / "bare.whl"
    shutil.copy(built[".whl"], bare)
    subprocess.run([sys.executable, "-c", DROP, bare], check=True)
    assert make_release.missing_metadata(bare) == ["License-Expression"]


DROP = """
import sys, zipfile
path = sys.argv[1]
with zipfile.ZipFile(path) as given:
    files = {name: given.read(name) for name in given.namelist()}
with zipfile.ZipFile(path, "w") as made:
    for name, data in files.items():
        made.writestr(name, data.replace(b"License-Expression: Apache-2.0\\n", b""))
"""


@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_a_first_run_is_checked_from_an_empty_environment(built: dict[str, Path], form: str, tmp_path: Path) -> None:
    wheel = built[".whl"]
    if form == "sdist":
        subprocess.run(["tar", "-xzf", built[".gz"], "-C", tmp_path], check=True)
        (tree,) = tmp_path.iterdir()
        code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, tmp_path], cwd=tree, check=True, stdout=subprocess.DEVNULL)
        wheel = next(tmp_path.glob("*.whl"))
        with zipfile.ZipFile(wheel) as own, zipfile.ZipFile(built[".whl"]) as other:
            assert sorted(own.namelist()) == sorted(other.namelist())
    made = install(wheel, tmp_path / "installed")
    relayrun = made.folder / "bin/relayrun"
    made.run(relayrun, "init", "p", "--cluster", "local", cwd=tmp_path)
    ranks = ["--set", "data.mock_data=true", "--set", f"cluster.python={sys.executable}"]
    assert "0 errors" in made.run(relayrun, "check", "configs/runs/my-run.yaml", *ranks, cwd=tmp_path / "p").stdout
    assert "# The data order" in made.run(relayrun, "help", "data-order", cwd=tmp_path / "p").stdout
    search = ["help", "resume", "with", "fewer", "nodes"]
    assert "spare-nodes" in made.run(relayrun, *search, cwd=tmp_path).stdout
