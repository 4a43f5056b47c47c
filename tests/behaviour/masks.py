"""Texts without what differs from tree to tree: folders, module paths, hashes of paths."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .names import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]

DOTTED = re.compile(r"(?<![\w./-])relayrun(?:\.[A-Za-z_]\w*)+")
"""A dotted name of the package."""

FILE = re.compile(r"(?<![\w./-])relayrun/(?:\w+/)*\w+\.py")
"""A module of the package as a file, in a comment for example."""

_SUFFIXES = ("toml", "def", "sif", "sqsh", "pth", "yaml", "yml", "json", "sh")


def masked(text: str, folders: Mapping[str, Path] | None = None) -> str:
    """Return a text with words in the place of folders and of module paths. `folders`: further ones, by their words."""
    known = {"PYTHON": Path(sys.executable), "ROOT": ROOT, **(folders or {})}
    for word, folder in sorted(known.items(), key=lambda item: -len(str(item[1]))):
        text = text.replace(str(folder), f"/{word}")
    return FILE.sub("<file>", DOTTED.sub(_role, text))


def _role(found: re.Match[str]) -> str:
    if found[0] in PROGRAMS:
        return f"<{PROGRAMS[found[0]]}>"
    return found[0] if found[0].endswith(tuple(f".{end}" for end in _SUFFIXES)) else "<module>"


def masked_values(value: Any, volatile: Mapping[str, Any]) -> Any:
    """Return JSON with fixed values in the place of those whose key is in `volatile`; None, 0 and False stay."""
    if isinstance(value, dict):
        return {
            key: volatile[key] if key in volatile and each else masked_values(each, volatile)
            for key, each in value.items()
        }
    return [masked_values(each, volatile) for each in value] if isinstance(value, list) else value


def machine(text: str) -> str:
    """Return a text without this machine's and this user's name."""
    host = re.escape(socket.gethostname())  # a short name may stand within an id by chance
    text = re.sub(rf"(?<![A-Za-z0-9]){host}(?![A-Za-z0-9])", "HOST", text)
    return re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text) if getpass.getuser() != "relayrun" else text


def write_json(path: Path, value: Any) -> None:
    """Write JSON with a line for each value, so that a difference names it."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, default=repr, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def environment(**changes: str) -> dict[str, str]:
    """Return a small environment for programs of this tree."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return (
        kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "RELAYRUN_CACHE": "", "CUDA_VISIBLE_DEVICES": ""} | changes
    )
