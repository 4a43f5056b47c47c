"""Checkpoints that run a command where they are read without care."""

from __future__ import annotations

import io
import os
import pickle
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


PLACES = (in_metadata, in_common, in_object)
