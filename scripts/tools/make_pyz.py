#!/usr/bin/env python3
"""Make relayrun.pyz: one file for a host's own Python 3.10, which wraps a batch script and looks after its chain.

    make_pyz.py dist/relayrun.pyz
    python3 relayrun.pyz wrap --checkpoints 'out/step-{iteration}.pt' train.sbatch

Jobs need files, so it unpacks itself once below ~/.local/share/relayrun (or RELAYRUN_PYZ_DIR), under a name that
follows from its content. Every node must see that folder.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cli", "control", "watch", "config/sections")
"""Folders of the package that are taken whole."""
MODULES = (
    "tokens/__init__.py",
    "tokens/streams/__init__.py",
    "tokens/streams/lane_cursor.py",
    "submit/__init__.py",
    "submit/sbatch_header.py",
    "submit/wrap.py",
    "config/__init__.py",
)
OWN = ROOT / "scripts/pyz/wrap_without_config.py"
COMMANDS = ("wrap", "status", "why", "logs", "save", "stop", "cancel")

MAIN = """
import os, shutil, sys, tempfile, zipfile
if sys.version_info < (3, 10):
    sys.exit("relayrun.pyz needs Python 3.10 or newer; this is " + sys.version.split()[0])
base = os.environ.get("RELAYRUN_PYZ_DIR") or os.path.expanduser("~/.local/share/relayrun")
root = os.path.join(base, "DIGEST")
if not os.path.isdir(root):
    os.makedirs(base, mode=0o755, exist_ok=True)
    unpacked = tempfile.mkdtemp(dir=base)
    os.chmod(unpacked, 0o755)
    before = os.umask(0o022)
    with zipfile.ZipFile(os.path.dirname(os.path.abspath(__file__))) as archive:
        archive.extractall(unpacked)
    os.umask(before)
    try:
        os.rename(unpacked, root)
    except OSError:  # another one was faster
        shutil.rmtree(unpacked)
found = os.lstat(root)
if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
    sys.exit(root + ": other users may have written this, so none of it runs; name a folder of yours: RELAYRUN_PYZ_DIR")
sys.path[0] = root
from relayrun import cli
cli.COMMANDS = {name: cli.COMMANDS[name] for name in COMMANDS_HERE}
from relayrun.cli.run import wrap
import wrap_without_config
wrap.submit = wrap_without_config.submit
sys.exit(cli.main())
"""


def files() -> list[Path]:
    """Return the files of the archive, in order."""
    package = ROOT / "relayrun"
    found = {*package.glob("*.py"), *(package / name for name in MODULES)}
    for room in ROOMS:
        found |= {*(package / room).rglob("*.py"), *(package / room).rglob("*.json")}
    return sorted(found | {*(ROOT / "launchers/lib").iterdir()} - {*(ROOT / "launchers/lib").glob("__pycache__")})


def make(target: Path) -> None:
    """Write the archive."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (OWN, *files()))).hexdigest()[:16]
    main = MAIN.replace("DIGEST", digest).replace("COMMANDS_HERE", repr(COMMANDS))
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in files():
                _add(archive, str(path.relative_to(ROOT)), path.read_bytes(), executable=os.access(path, os.X_OK))
            for name, data in ((OWN.name, OWN.read_bytes()), ("__main__.py", main.encode()), (".unpacked", b"")):
                _add(archive, name, data)
    target.chmod(0o755)
    print(f"{target}: {target.stat().st_size:,} bytes")


def _add(archive: zipfile.ZipFile, name: str, data: bytes, *, executable: bool = False) -> None:
    """Add a file without what differs between two builds: its time, and the umask."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o100755 if executable else 0o100644) << 16
    archive.writestr(entry, data, compresslevel=9)


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "dist/relayrun.pyz"))
