"""Which files a torch_dist checkpoint consists of, by its `.metadata`, without torch and without running anything.

`.metadata` is a pickle of torch's records: for every block of a tensor the file that it lies in, where it begins and
how many bytes it has. A pickle may name any function to be called. Here every name stands for an object that does
nothing and keeps what it is given, so that a file that somebody has made up runs nothing.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any


class UnreadableMetadataError(Exception):
    """The bytes are not those of a checkpoint's metadata; the text says why."""


class _InertObject:
    """Stands for whatever a pickle names."""

    def __init__(self, *args: Any) -> None:
        del args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take an entry, as an OrderedDict does."""

    def append(self, value: Any) -> None:
        """Take a value, as a list does."""


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        del module, name
        return _InertObject


def least_file_sizes(metadata: Path) -> dict[str, int]:
    """Bytes that each file beside `.metadata` must have at least, by name.

    Raises Unreadable where the pickle is torn, and OSError. Of records that a later torch may write in another way
    nothing is known: they name no file here.
    """
    data = metadata.read_bytes()
    try:
        records = _InertUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever a pickle of torn bytes makes of it
        raise UnreadableMetadataError(f"{type(error).__name__}: {error}") from None
    found: dict[str, int] = {}
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        for block in records.state["storage_data"].values():
            name, end = str(block.state["relative_path"]), int(block.state["offset"]) + int(block.state["length"])
            found[name] = max(found.get(name, 0), end)
    return found
