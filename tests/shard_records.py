"""The record of a folder of shards, as tokenization writes it, for shards that a test writes itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayrun.files import write_json
from relayrun.tokens.shards.shard import FOLDER_RECORD


def write_folder_record(
    folder: Path,
    shards: Mapping[str, Mapping[str, Any]],
    *,
    fingerprint: str = "f" * 64,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the record of shards by name, with the given fields of each; all by one tokenizer."""
    plain: dict[str, Any] = {"xxh3_128": {}, "largest_id": None, "inputs": [], "fingerprints": [], "file_documents": []}
    record = {
        "settings": {"tokenizer": fingerprint, "eos": 0} | dict(settings or {}),
        "tokenizer": {"ids": fingerprint, "size": 300},
        "source": {"dataset": "", "tokenizer": ""},
        "shards": {name: plain | dict(task) for name, task in shards.items()},
    }
    write_json(folder / FOLDER_RECORD, record)
