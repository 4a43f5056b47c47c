"""Checkpoints that run a command where they are read without care."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from relayrun.train.checkpoint.reader import read_metadata


class Command:
    """What runs a command where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._target),)


def in_metadata(folder: Path, target: Path) -> None:
    """Whole, but for what it does besides."""
    metadata = read_metadata(folder)
    metadata.planner_data = Command(target)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(folder: Path, target: Path) -> None:
    torch.save({"iteration": 0, "more": Command(target)}, folder / "common.pt")


def in_object(folder: Path, target: Path) -> None:
    """In an object that a rank loads, at the end of a file."""
    metadata = read_metadata(folder)
    index = next(index for index in metadata.storage_data if "_extra_state" in index.fqn)
    item = metadata.storage_data[index]
    data = io.BytesIO()
    torch.save([Command(target)], data)
    with (folder / item.relative_path).open("ab") as file:
        item.offset, item.length = file.tell(), len(data.getvalue())
        file.write(data.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@contextlib.contextmanager
def unchanged(data: bytes) -> Iterator[None]:
    """Check that the process has the same modules afterwards, and that all classes and functions of the modules that
    the data names have the same attributes."""
    named = {name.decode() for name in re.findall(rb"[a-z_][\w.]{2,}", data) if name.decode() in sys.modules}
    before, modules = _attributes(named), {*sys.modules}
    yield
    assert {*sys.modules} == modules
    assert _attributes(named) == before


def _attributes(modules: set[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for module in sorted(modules):
        for name, value in vars(importlib.import_module(module)).copy().items():
            if hasattr(value, "__dict__"):
                more = {"__defaults__": getattr(value, "__defaults__", None)} if callable(value) else {}
                found[f"{module}.{name}"] = {key: id(each) for key, each in {**vars(value), **more}.items()}
    return found


PLACES = (in_metadata, in_common, in_object)
