"""Names that users write, imported from a wheel in a bare folder: each with its signature and its public members."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .masks import environment, write_json
from .names import USERS
from .wheel import installed

LOOK = """
import dataclasses, importlib, inspect, json, re, sys

def plain(value):
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"relayrun[.][\\w.]*[.]", "", str(value)))

def signature(value):
    try:
        return plain(inspect.signature(value))
    except (TypeError, ValueError):
        return None

def members(cls):
    found = {}
    for name in sorted(dir(cls)):
        own = not name.startswith("_") and any(
            name in vars(base) for base in cls.__mro__ if base.__module__.startswith("relayrun"))
        if own:
            value = inspect.getattr_static(cls, name)
            inner = getattr(value, "__func__", value)
            callable_ = inspect.isfunction(inner)
            found[name] = f"{type(value).__name__}{signature(inner)}" if callable_ else type(value).__name__
    return found

def fields(cls):
    if not dataclasses.is_dataclass(cls):
        return None
    return {field.name: [plain(field.type), plain(field.default) if field.default is not dataclasses.MISSING
            else plain(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"]
            for field in dataclasses.fields(cls)}

def described(value):
    if inspect.isclass(value):
        parts = {"bases": [base.__name__ for base in value.__mro__[1:-1]], "signature": signature(value),
                 "members": members(value), "fields": fields(value)}
        return {"kind": "class", **{name: part for name, part in parts.items() if part}}
    if callable(value) and hasattr(value, "__name__"):
        return {"kind": "function", "signature": signature(value)}
    return {"kind": type(value).__name__, "value": plain(repr(value))}

found = {}
for name in json.load(sys.stdin):
    module, _, attribute = name.partition(":")
    try:
        value = importlib.import_module(module)
        where = value.__file__
        if not where.startswith(sys.argv[1]):
            raise ImportError(f"{module} is imported from elsewhere: {where}")
        found[name] = described(getattr(value, attribute))
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
json.dump(found, sys.stdout)
"""
"""Runs in a process of its own, where nothing is on the path but the bare folder and what the package asks for."""


def imported(target: Path, names: Mapping[str, str] = USERS) -> dict[str, Any]:
    """Import names from the package in the folder `target`; return what each is, or why it cannot be imported."""
    with tempfile.TemporaryDirectory(prefix="record-users-") as elsewhere:
        done = subprocess.run(
            [sys.executable, "-P", "-c", LOOK, str(target)],
            input=json.dumps(list(names)),
            env=environment(PYTHONPATH=str(target)),
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: {"use": names[name], **found[name]} for name in names}


def record(folder: Path) -> None:
    """Write what each name is."""
    found = imported(installed())
    if errors := {name: each["error"] for name, each in found.items() if "error" in each}:
        raise RuntimeError(f"users' names that cannot be imported: {errors}")
    write_json(folder / "names.json", found)
