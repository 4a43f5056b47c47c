"""What can be known of an export before torch is imported: the folder that it makes, and the size of its files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from relayrun.errors import ConfigError, InputError, refuse_unwritable

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def check_target(target: Path) -> None:
    """Raise InputError if there is something at `target`, or this user may not make it."""
    refuse_existing(target)
    refuse_unwritable(target)


def refuse_existing(target: Path) -> None:
    """Raise InputError if there is something at `target`."""
    if os.path.lexists(target):
        raise InputError("this exists already", where=target, hint="give another --output, or move it away")


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `200MB`, `1GiB`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+) ?([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise ConfigError(f"{text!r} is no size", where="--max-shard-size", hint="write for example 5GB, or 500MB")
    return int(match[1]) * unit
