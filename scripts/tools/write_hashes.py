"""Write constraints-hashes.txt: the versions of constraints.txt with the hashes of their files, for `make setup`; and
constraints-docs-hashes.txt for `make docs`.

    python scripts/tools/write_hashes.py [FILE ...]        needs uv (pip install uv), and an index of packages

A line per package: the wheels for Linux on x86_64 and aarch64 with Python 3.11 and 3.12, or else the source. torch has
none: its builds for CPUs and for CUDA have one version, other files, and come from other indices.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
PINS = {"constraints.txt": "make setup", "constraints-docs.txt": "make docs"}
PYTHON = re.compile(r"py2|py3|py31[12]?|cp31[12]")
ABI3 = re.compile(r"cp3([2-9]|1[0-2])")
"""Pythons with whose stable ABI a wheel is built."""
PLATFORMS = re.compile(r"any|(many)?linux.*_(x86_64|aarch64)")
HEAD = "# Hashes of the files of {pins}, by scripts/tools/write_hashes.py; `{command}` installs no others.\n"


def is_wanted(wheel: str) -> bool:
    """Return whether a wheel of this name can be installed where relayrun runs."""
    python, abi, platform = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    if not any(PLATFORMS.fullmatch(each) for each in platform.split(".")):
        return False
    kinds = ABI3 if "abi3" in abi else PYTHON
    return any(kinds.fullmatch(each) for each in python.split("."))


def line(package: dict[str, Any]) -> str:
    """Return the line of one package of uv's lock file."""
    wheels = [each for each in package.get("wheels", []) if is_wanted(urlsplit(each["url"]).path.rsplit("/", 1)[-1])]
    hashes = sorted(each["hashes"]["sha256"] for each in wheels or [package["sdist"]])
    return " ".join([f"{package['name']}=={package['version']}", *(f"--hash=sha256:{each}" for each in hashes)]) + "\n"


def write(pins: Path) -> None:
    """Ask the index for every pinned version but torch's, and write the hashes beside the versions."""
    wanted = [each for each in pins.read_text(encoding="utf-8").splitlines() if re.match(r"(?!torch==)\w", each)]
    with tempfile.TemporaryDirectory() as folder:
        copy, lock = Path(folder, "pins.txt"), Path(folder, "pylock.toml")
        copy.write_text("\n".join(wanted), encoding="utf-8")
        options = ["--quiet", "--no-deps", "--universal", "--python-version=3.11", "--format=pylock.toml"]
        subprocess.run(["uv", "pip", "compile", *options, str(copy), f"--output-file={lock}"], check=True)
        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    hashes = pins.with_name(f"{pins.stem}-hashes.txt")
    head = HEAD.format(pins=pins.name, command=PINS[pins.name])
    hashes.write_text(head + "".join(map(line, packages)), encoding="utf-8")
    print(f"{hashes.name}: {len(packages)} packages")


def main() -> int:
    """Write the hashes of the named files of versions, or of all."""
    for name in sys.argv[1:] or PINS:
        write(ROOT / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
