"""Places: the code, the files that belong to it (launchers, configs, scripts), and the person's project.

In a checkout all three are the checkout. An installed package carries its files in `relayrun/share/`, and the project
is the folder that `relayrun init` made: the nearest one, at or above the working directory, with a file `.relayrun`.
Nothing else in relayrun looks for a file relative to a root.
"""

from __future__ import annotations

from pathlib import Path

CODE_ROOT = Path(__file__).resolve().parents[1]
"""The folder that `import relayrun` needs on its path: a checkout, a snapshot of the code, or site-packages."""

PROJECT_MARKER = ".relayrun"
"""The file that makes a folder a project."""


def is_checkout() -> bool:
    """Return whether the code lies beside its launchers, as in a checkout and in a snapshot of the code."""
    return (CODE_ROOT / "launchers" / "lib" / "job.sh").is_file()


def shared_file(name: str) -> Path:
    """Return a file or folder that belongs to the code: `launchers`, `configs` or `scripts`, or something below."""
    return (CODE_ROOT if is_checkout() else CODE_ROOT / "relayrun" / "share") / name


def project_folder(start: Path | None = None) -> Path:
    """Return the folder at which relative paths start, and below which runs and logs lie.

    It is the nearest project or checkout at or above `start`; else the one at or above the working directory; else
    the checkout that the code lies in; else the working directory.
    """
    if start is not None and (found := nearest_root(start.expanduser().absolute())) is not None:
        return found
    here = Path.cwd()
    of_pyz = (CODE_ROOT / ".unpacked").exists()  # relayrun.pyz is laid out as a checkout, but no project
    return nearest_root(here) or (CODE_ROOT if is_checkout() and not of_pyz else here)


def nearest_root(start: Path) -> Path | None:
    """Return the nearest project or checkout at or above a folder."""
    for folder in (start, *start.parents):
        if (folder / PROJECT_MARKER).is_file() or (folder == CODE_ROOT and is_checkout()):
            return folder
    return None
