"""What is already tokenized: `tokenization.json` in a folder of shards.

    settings   what the shards were made with and of; a folder holds shards of one choice alone
    shards     by task: the input files with size and time of change, documents, tokens, dropped documents

A task counts as done if its inputs are unchanged and its shard opens with the tokens noted here. So a run
that was cut goes on where it was, and a file that was mended is tokenized again alone.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relayrun.errors import InputError
from relayrun.files import read_json, write_atomic
from relayrun.indexed import Shard
from relayrun.tokenization.metadata import InputFile

NAME = "tokenization.json"


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """One finished task; `tokens` is 0 where it has no shard."""

    inputs: list[InputFile]
    documents: int
    tokens: int
    empty_documents: int
    null_documents: int


class ShardFolder:
    """A folder of shards and its record. One process writes it."""

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        """Open or begin the record. Raises InputError if the folder holds shards made in another way."""
        self.path = Path(path)
        self.settings = settings
        self._file = self.path / NAME
        self.tasks: dict[str, TaskRecord] = {}
        hint = "use another output folder, or delete this one to begin again"
        try:
            record = read_json(self._file)
            known: dict[str, Any] = record["settings"]
            tasks = {
                name: TaskRecord(**{**task, "inputs": [tuple(file) for file in task["inputs"]]})
                for name, task in record["shards"].items()
            }
        except FileNotFoundError:
            known, tasks = settings, {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("not a record of tokenization", where=self._file, hint=hint) from None
        different = sorted(name for name in settings.keys() | known.keys() if settings.get(name) != known.get(name))
        shards = {file.name.rsplit(".", 1)[0] for suffix in ("bin", "idx") for file in self.path.glob(f"*.{suffix}")}
        if different and shards:
            raise InputError(f"this folder holds shards of another choice of {', '.join(different)}",
                             where=self.path, hint=hint)  # fmt: skip
        if strange := sorted(shards - set(settings["shards"])):
            raise InputError(f"this folder holds shards that are not of this run, for example {strange[0]}",
                             where=self.path, hint=hint)  # fmt: skip
        self.tasks = {} if different else tasks

    def is_done(self, name: str, inputs: list[InputFile]) -> bool:
        """Whether shard `name` is made of exactly these inputs, and whole."""
        task = self.tasks.get(name)
        if task is None or task.inputs != inputs:
            return False
        try:
            return task.tokens == 0 or Shard.open(self.path / name).tokens == task.tokens
        except InputError:
            return False

    def drop(self, name: str) -> None:
        """Remove what there is of shard `name`, the .idx first: a .bin alone is no shard."""
        for suffix in (".idx", ".bin", ".idx.tmp", ".bin.tmp"):
            (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def drop_temporary(self) -> None:
        """Remove what killed workers left."""
        for name in self.settings["shards"]:
            for suffix in (".idx.tmp", ".bin.tmp"):
                (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def add(self, name: str, task: TaskRecord) -> None:
        """Note a finished task."""
        self.tasks[name] = task
        self.write()

    def write(self) -> None:
        record = {"settings": self.settings, "shards": {name: asdict(task) for name, task in self.tasks.items()}}
        # ASCII: names that are not UTF-8 come back from JSON as they were
        write_atomic(self._file, json.dumps(record, indent=1) + "\n")
