"""What W&B's own files say was written: the highest step of a run's offline folders.

The client keeps up to 32 KiB in memory and loses them with its process, so what was handed to it says nothing.
A .wandb file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md: blocks of 32 KiB,
records cut into fragments of crc32, length, kind) behind a header of 7 bytes, `:W&B`, two bytes and a version; a
record is a protobuf `wandb_internal.Record`. wandb 0.31 itself reads it in Go alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WANDB_BLOCK_BYTES = 32 * 1024
WANDB_HEADER_BYTES = 7
_FULL, _LAST = 1, 4


def offline_wandb_files(folder: Path, run_id: str) -> list[Path]:
    """The .wandb files that were written offline under this id, oldest first."""
    return sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def highest_wandb_step(folder: Path, run_id: str) -> int:
    """Highest step in the offline files of this id; 0 where there is none. Reads back from the newest file."""
    for path in reversed(offline_wandb_files(folder, run_id)):
        steps = [int(row["_step"]) for row in wandb_history(path)]
        if steps:
            return max(steps)
    return 0


def wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged, a dict per step, oldest first, up to where a killed client stopped."""
    from wandb.proto import wandb_internal_pb2

    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The whole records of a .wandb file."""
    if data[:4] != b":W&B":
        return
    at, record = WANDB_HEADER_BYTES, b""
    while at + WANDB_HEADER_BYTES <= len(data):
        if (
            WANDB_BLOCK_BYTES - at % WANDB_BLOCK_BYTES < WANDB_HEADER_BYTES
        ):  # the rest of a block that holds no fragment is filled with zeros
            at += WANDB_BLOCK_BYTES - at % WANDB_BLOCK_BYTES
            continue
        _checksum, size, kind = struct.unpack_from("<IHB", data, at)
        at += WANDB_HEADER_BYTES
        if not kind or at + size > len(data):
            return
        record += data[at : at + size]
        at += size
        if kind in (_FULL, _LAST):
            yield record
            record = b""
