"""One paths file to one folder of shards."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from relayrun.errors import InputError, RelayrunError
from relayrun.files import write_atomic
from relayrun.tokenization.executor import KillAwareExecutor
from relayrun.tokenization.locks import locked
from relayrun.tokenization.metadata import InputFile, paths_file_bytes, read_paths_file, stat_inputs
from relayrun.tokenization.readers import LiteralPathsReader
from relayrun.tokenization.record import ShardFolder, TaskRecord
from relayrun.tokenization.tokenizer import load_tokenizer
from relayrun.tokenization.writer import MegatronTokenWriter, shard_name


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a folder of shards holds, and what this run did for it."""

    files: int
    input_bytes: int
    documents: int
    tokens: int
    empty_documents: int
    null_documents: int
    output_bytes: int
    """Of all .bin files."""
    workers: int
    tasks_run: int
    """Tasks that were not done before."""
    seconds: float

    def summary(self) -> str:
        """One paragraph for the terminal."""
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens from {self.files:,} files "
            f"({self.input_bytes / 1e9:.3f} GB) in {self.seconds:.1f} s\n"
            f"dropped: {self.empty_documents:,} empty and {self.null_documents:,} null documents"
        )


def tokenize(
    *,
    tokenizer_name_or_path: str,
    output_folder: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    paths_file: str | os.PathLike[str],
    n_tasks: int = 8,
    n_workers: int = -1,
    column: str = "text",
    eos_token: str | None = None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> Result:
    """Tokenize the files of `paths_file`, which are paths below the folder `dataset`, into `output_folder`.

    `n_tasks` (at most one per file) is the number of shards, `n_workers` how many are made at a time (-1: all).
    `logging_dir` (default: `logs` in the output folder) gets datatrove's logs and a copy of the tokenizer.
    What an earlier run has finished is kept (see `record.py`). Raises InputError or OSError for what a
    person can mend; then every shard under a final name is whole.
    """
    started = time.monotonic()
    if n_tasks < 1 or (n_workers < 1 and n_workers != -1):
        raise InputError("--n-tasks is at least 1, and --n-workers at least 1 or -1 for as many as tasks")
    names = read_paths_file(paths_file)
    inputs = stat_inputs(dataset, names)
    tokenizer = load_tokenizer(tokenizer_name_or_path, eos_token=eos_token)
    tasks = min(n_tasks, len(names))
    workers = tasks if n_workers == -1 else min(n_workers, tasks)
    output = Path(os.path.abspath(output_folder))
    output.mkdir(parents=True, exist_ok=True)
    logs = Path(os.path.abspath(logging_dir)) if logging_dir is not None else output / "logs"
    with locked(output / ".lock", wait=False) as held:
        if not held:
            raise RelayrunError("another process is writing shards here", where=output)
        folder = ShardFolder(output, {
            "tokenizer": tokenizer.fingerprint,
            "eos": tokenizer.eos_id,
            "token type": tokenizer.dtype.__name__,
            "column": column,
            "paths": hashlib.sha256(paths_file_bytes(names)).hexdigest(),
            "shards": [shard_name(rank) for rank in range(tasks)],
        })  # fmt: skip
        todo = [rank for rank in range(tasks) if not folder.is_done(shard_name(rank), inputs[rank::tasks])]
        for rank in todo:
            folder.drop(shard_name(rank))
        if todo:
            folder.write()
            logs.mkdir(parents=True, exist_ok=True)
            # workers read this copy: no hub, no transformers, and no change under way
            write_atomic(logs / "tokenizer.json", tokenizer.tokenizer.to_str())
            executor = KillAwareExecutor(
                [
                    LiteralPathsReader(os.fspath(dataset), names, column),
                    MegatronTokenWriter(output, str(logs / "tokenizer.json"), eos_token=tokenizer.eos_token),
                ],
                tasks=tasks,
                workers=workers,
                logging_dir=str(logs),
            )

            def on_task_done(rank: int, totals: dict[str, int]) -> None:
                task = TaskRecord(
                    inputs=inputs[rank::tasks],
                    documents=totals.get("documents", 0),
                    tokens=totals.get("tokens", 0),
                    empty_documents=totals.get("empty documents", 0),
                    null_documents=totals.get("null documents", 0),
                )
                folder.add(shard_name(rank), task)
                print(f"task {rank} done: {task.documents:,} documents, {task.tokens:,} tokens", flush=True)

            try:
                executor.run_ranks(todo, on_task_done)
            finally:
                folder.drop_temporary()
    result = _result(folder, inputs, workers=workers, tasks_run=len(todo), seconds=time.monotonic() - started)
    if not result.documents:
        raise InputError(f"no document with text in {len(names):,} files, so there is no shard: "
                         f"{result.empty_documents:,} empty and {result.null_documents:,} null documents",
                         where=paths_file, hint=f"is {column!r} the column of the text?")  # fmt: skip
    return result


def _result(folder: ShardFolder, inputs: list[InputFile], *, workers: int, tasks_run: int, seconds: float) -> Result:
    tasks = list(folder.tasks.values())
    return Result(
        files=len(inputs),
        input_bytes=sum(size for _, size, _ in inputs),
        documents=sum(task.documents for task in tasks),
        tokens=sum(task.tokens for task in tasks),
        empty_documents=sum(task.empty_documents for task in tasks),
        null_documents=sum(task.null_documents for task in tasks),
        output_bytes=sum(file.stat().st_size for file in folder.path.glob("*.bin")),
        workers=workers,
        tasks_run=tasks_run,
        seconds=seconds,
    )
