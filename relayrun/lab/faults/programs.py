"""Small scripts that stand before a command inside the jobs of a drill."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from relayrun.errors import InputError


def write_wrapper(folder: Path, name: str, text: str) -> Path:
    """Write a Bash script `folder/bin/NAME`, and return its path."""
    path = folder / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def wrapper_marker(folder: Path) -> Path:
    """The file that a command leaves which has done harm."""
    return folder / "provoked"


def write_wrappers(commands: Mapping[str, str], folder: Path, *, search: str, real: Mapping[str, str]) -> None:
    """Write the commands of a fault.

    Each acts only where the process above it is a part of a job: the supervisor or the batch script. `search`: a PATH
    to find the commands in; `real`: which to take instead, by name. Raises InputError where one is not there.
    """
    for name, text in commands.items():
        found = shutil.which(real.get(name, name), path=search)
        if found is None:
            raise InputError(f"{real.get(name, name)} is not on PATH")
        inside = f"if grep -qz '^SLURM_JOB_ID=' /proc/${{PPID}}/environ; then\n{text.strip()}\nfi"
        write_wrapper(
            folder, name, f'real="{found}" provoked="{wrapper_marker(folder)}"\n{inside}\nexec "${{real}}" "$@"'
        )
