"""The wheel of the working tree, and clean environments with it: nothing is downloaded."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def build(folder: Path) -> Path:
    """Build the wheel from what git knows and does not ignore; `folder` gets it."""
    known = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, known.split("\0")):
        if not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    # what pip calls, without three starts of it
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, folder], cwd=folder / "tree", check=True, stdout=subprocess.DEVNULL, timeout=600
    )
    return next(folder.glob("*.whl"))


def closure(names: Iterable[str], extra: str = "") -> set[str]:
    """The distributions that some requirements bring, by the environment that the tests run in."""
    found: set[tuple[str, str]] = set()
    open_ = {(re.sub(r"[-_.]+", "-", name).lower(), extra) for name in names}
    while open_:
        found.add(part := open_.pop())
        name, wanted = part
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                own = re.sub(r"[-_.]+", "-", requirement.name).lower()
                open_ |= {(own, each) for each in (requirement.extras or {""})} - found
    return {name for name, _ in found}


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and what it asks for, and nothing else."""

    folder: Path
    home: Path

    @property
    def packages(self) -> Path:
        return self.folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

    def link_packages(self, extras: Iterable[str], *more: str) -> None:
        """Link what relayrun's base and these extras ask for, and more, from the environment that the tests run in."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        asked = [
            *project["dependencies"],
            *more,
            *(text for name in extras for text in project["optional-dependencies"][name]),
        ]
        wanted = [one for one in map(Requirement, asked) if one.marker is None or one.marker.evaluate()]
        found = {name for one in wanted for extra in one.extras or {""} for name in closure([one.name], extra)}
        for name in found - {"relayrun"}:
            distribution = importlib.metadata.distribution(name)
            site = Path(str(distribution.locate_file("")))
            old = {path.name for path in site.glob(f"{name.replace('-', '_')}-*.egg-info")}  # of a pip without `wheel`
            for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"} | old:
                there = site / top
                if there.exists() and not (self.packages / top).exists():  # two packages list a file that pip left out
                    (self.packages / top).symlink_to(there)

    def run(self, *command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment with nothing of the tests' own around it."""
        given = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.home), "COLUMNS": "200"}
        done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    subprocess.run(
        command,
        check=True,
        env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        timeout=600,
    )


def install(wheel: Path, folder: Path, extra: str = "") -> Installed:
    """A clean environment: the wheel, and links to the packages that it asks for."""
    installed = Installed(folder / "env", folder / "home")
    installed.home.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", installed.folder], check=True, timeout=600)
    pip(
        [
            f"--python={installed.folder / 'bin/python'}",
            "install",
            "--no-deps",
            "--no-index",
            "--no-compile",
            str(wheel),
        ]
    )
    installed.link_packages([extra] if extra else [])
    return installed
