"""The wheel: what is in it but Python, its metadata, and a bare folder that it is installed in."""

from __future__ import annotations

import atexit
import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from .masks import ROOT, masked, write_json

APART = ("tests/", "benchmarks/")
"""Folders that no wheel is built from."""


@cache
def built() -> Path:
    """Build the wheel of this tree, once for all parts of a record."""
    place = Path(tempfile.mkdtemp(prefix="record-wheel-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=600).stdout.decode()
    for name in filter(None, names.split("\0")):
        if not name.startswith(APART) and (ROOT / name).is_file():
            (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / "tree" / name)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(place / "tree"))
    return next(place.glob("*.whl"))


@cache
def installed() -> Path:
    """Install the wheel into a folder with nothing else in it."""
    target = built().parent / "target"
    _pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(built()))
    return target


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    subprocess.run(command, check=True, timeout=600, env=kept, stdout=subprocess.DEVNULL)


def contents(wheel: Path) -> dict[str, dict[str, Any]]:
    """Return every file of a wheel that is no module of the package: its mode, and what is in it as a hash."""
    found = {}
    with zipfile.ZipFile(wheel) as file:
        for entry in file.infolist():
            name = entry.filename
            if (name.endswith(".py") and "/share/" not in name) or ".dist-info/" in name:
                continue
            text = masked(file.read(entry).decode())  # a job text that names another module is the same text
            found[name if "/share/" in name else Path(name).name] = {
                "executable": bool(entry.external_attr >> 16 & 0o100),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
    return found


def metadata(wheel: Path) -> dict[str, Any]:
    """Return what a wheel says of itself: requirements, extras, programs, license."""
    with zipfile.ZipFile(wheel) as file:
        own = {
            re.sub(r"^.*\.dist-info/", "", name): file.read(name) for name in file.namelist() if ".dist-info/" in name
        }
    message = email.message_from_bytes(own["METADATA"])
    names = sorted(set(message.keys()) - {"Description", "Description-Content-Type"})
    return {
        "metadata": {name: message.get_all(name) for name in names},
        "programs": own["entry_points.txt"].decode().splitlines(),
        "files": sorted(own),
    }


def record(folder: Path) -> None:
    """Write the files and the metadata of the wheel."""
    write_json(folder / "files.json", contents(built()))
    write_json(folder / "metadata.json", metadata(built()))
