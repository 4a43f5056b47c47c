#!/usr/bin/env python3
"""Build a release: sdist, wheel and relayrun.pyz, from what git knows, with the same bytes at every build.

    make_release.py dist

Times are SOURCE_DATE_EPOCH, by default the time of the last commit. It builds twice and compares,
and checks the metadata; with `twine` at hand, `twine check` looks, too.
"""

from __future__ import annotations

import email
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "Name",
    "Version",
    "Summary",
    "License-Expression",
    "License-File",
    "Classifier",
    "Requires-Python",
    "Keywords",
)
BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"


def source_date() -> str:
    """Return SOURCE_DATE_EPOCH, or the time of the last commit."""
    command = ["git", "log", "-1", "--format=%ct"]
    return (
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    )


def build(folder: Path, epoch: str) -> list[Path]:
    """Build sdist, wheel and relayrun.pyz into a new folder; return them."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place, "tree")
        _copy_tracked(tree)
        environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
        code = [sys.executable, "-c", BUILD, str(folder)]
        subprocess.run(code, cwd=tree, env=environment, umask=0o022, check=True, stdout=subprocess.DEVNULL)
        pyz = [sys.executable, str(tree / "scripts/tools/make_pyz.py"), str(folder / "relayrun.pyz")]
        subprocess.run(pyz, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    _repack(sdist, int(epoch))
    return sorted(folder.iterdir())


def _copy_tracked(target: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        source, copy = ROOT / name, target / name
        if not name.startswith("tests/") and source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _repack(sdist: Path, epoch: int) -> None:
    """Write an sdist again in the order of names, with one time and without an owner."""
    with tarfile.open(sdist) as given:
        entries = [(each, given.extractfile(each)) for each in sorted(given.getmembers(), key=lambda each: each.name)]
        with (
            sdist.with_suffix(".new").open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as made,
        ):
            for entry, data in entries:
                entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
                entry.mode, entry.pax_headers = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644, {}
                made.addfile(entry, data)
    sdist.with_suffix(".new").replace(sdist)


def missing_metadata(wheel: Path) -> list[str]:
    """Return what the metadata of a wheel lacks: fields, a licence file, or the text of the README."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (each for each in file.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(name))
        lacks = [field for field in NEEDED if not metadata.get_all(field)]
        texts = [f"{Path(name).parent}/licenses/{each}" for each in metadata.get_all("License-File") or ()]
        lacks += [each for each in texts if each not in file.namelist()]
    return lacks if str(metadata.get_payload()).startswith("# relayrun") else [*lacks, "the README"]


def main() -> int:
    """Build twice, compare, check, and put the files into the folder that was given."""
    target, epoch = Path(sys.argv[1] if len(sys.argv) > 1 else "dist"), source_date()
    with tempfile.TemporaryDirectory() as place:
        built = build(Path(place, "one"), epoch)
        for one, other in zip(built, build(Path(place, "two"), epoch), strict=True):
            if one.read_bytes() != other.read_bytes():
                print(f"error: two builds of {one.name} differ", file=sys.stderr)
                return 1
        if lacks := [each for path in built if path.suffix == ".whl" for each in missing_metadata(path)]:
            print(f"error: the metadata lack {', '.join(lacks)}", file=sys.stderr)
            return 1
        if twine := shutil.which("twine"):
            subprocess.run([twine, "check", "--strict", *(path for path in built if path.suffix != ".pyz")], check=True)
        target.mkdir(parents=True, exist_ok=True)
        for path in built:
            shutil.copy(path, target)
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {target / path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
