"""Tokenize one paths file into one folder of shards."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from relayrun.errors import InputError, RelayrunError, refuse_urls
from relayrun.files import write_atomic
from relayrun.leftovers import remove_leftovers
from relayrun.progress import Progress, clear_line, count
from relayrun.publishing import blaming_output
from relayrun.tokens.readers.columns import sample_texts
from relayrun.tokens.readers.deal_files import SMALLEST_RANGE
from relayrun.tokens.readers.faults import describe_bad_lines
from relayrun.tokens.readers.file_ranges import file_of_range, range_of_file
from relayrun.tokens.readers.inputs import InputFile, read_paths_file, stat_inputs
from relayrun.tokens.stores.urls import absolute_path, is_url, join_path, resolve_url_link
from relayrun.tokens.tokenize import shard_folder
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.losses import describe_losses
from relayrun.tokens.tokenize.encode.tokenizer import DocumentTokenizer, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.processes import file_lock, hidden_secrets, run_tasks, use_one_thread
from relayrun.tokens.tokenize.shard_folder import ShardFolder, TaskRecord
from relayrun.tokens.tokenize.shard_task import ShardTask, TokenizeContext, process_engine, tokenize_shard
from relayrun.tokens.tokenize.step_task import read_texts
from relayrun.tokens.tokenize.steps import describe_steps

log = logging.getLogger(__name__)

SMALLEST_SAMPLE, LARGEST_SAMPLE = 250_000, 4_000_000
"""Bounds, in bytes, of the job's texts that prove an engine: a 2000th of the input, within them. The reference has
about a hundredth of the fastest engine's speed, and would take a third of the time for a 500th."""


@dataclass(frozen=True, kw_only=True)
class TokenizeResult:
    """Content of a folder of shards, and the work of this run."""

    files: int
    input_bytes: int
    documents: int
    tokens: int
    empty_documents: int
    null_documents: int
    routed_documents: int
    """Documents that went to the reference instead of the fast engine."""
    steps: str
    """Documents in and out of each step."""
    skipped_files: int
    bad_lines: dict[str, int]
    """Skipped lines by reason."""
    losses: dict[str, int]
    rows: dict[str, int]
    """Rows of each path of the paths file."""
    output_bytes: int
    """Bytes of all .bin files."""
    workers: int
    tasks_run: int
    """Tasks that were not done before."""
    seconds: float

    def summary(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens from {self.files:,} files "
            f"({self.input_bytes / 1e9:.3f} GB) in {self.seconds:.1f} s\n"
            f"dropped: {self.empty_documents:,} empty and {self.null_documents:,} null documents"
            + (f"\nsteps: {self.steps}" if self.steps else "")
            + (f"\nleft out: {self.skipped_files:,} files that cannot be read" if self.skipped_files else "")
            + (f"\nleft out: {describe_bad_lines(self.bad_lines)}" if self.bad_lines else "")
        )


def tokenize_paths_file(
    options: TokenizeOptions,
    *,
    output_folder: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    paths_file: str | os.PathLike[str],
    logging_dir: str | os.PathLike[str] | None = None,
    store: str = "",
) -> TokenizeResult:
    """Tokenize the files of `paths_file`, which are paths below the folder `dataset`, into `output_folder`; or to the
    URL `store`, and then `output_folder` gets the record alone.
    `logging_dir` (default: `logs` in the output folder) gets a copy of the tokenizer, which the workers read. Finished
    work of an earlier run is kept, and files added to the paths file since get shards of their own (see
    `shard_folder`). Raises InputError or OSError for faults that a user can repair; every shard under a final name is
    whole then."""
    started = time.monotonic()
    refuse_urls(output_folder, *([] if logging_dir is None else [logging_dir]))
    use_one_thread()
    names = read_paths_file(paths_file)
    source = resolve_url_link(dataset)
    inputs = {file_of_range(file[0]): file for file in stat_inputs(source, names, missing_ok=options.skips_files)}
    output = Path(os.path.abspath(output_folder))
    output.mkdir(parents=True, exist_ok=True)
    logs = Path(os.path.abspath(logging_dir)) if logging_dir is not None else output / "logs"
    with blaming_output(output), file_lock(output / ".lock", wait=False) as held:
        if not held:
            raise RelayrunError("another process is writing shards here", where=output)
        for folder_of_ours in (output, logs):
            remove_leftovers(folder_of_ours)
        with _hold_hub_cache(options.cache_dir):
            tokenizer = load_tokenizer(options)
        place = {"dataset": absolute_path(source), "tokenizer": str(logs / "tokenizer.json"), "store": store}
        known = {"ids": tokenizer.ids_fingerprint, "size": tokenizer.size}
        folder = ShardFolder(output, _settings(options, tokenizer), [*inputs.values()], tokenizer=known, source=place)
        parts = [
            ShardTask(shard, tuple(range_of_file(inputs[file_of_range(name)], name) for name in paths))
            for shard, paths in folder.parts.items()
        ]
        if len(parts) < options.tasks != TokenizeOptions.default("tasks"):
            words = "%d files make %d shards: a range of a large file has %d MB or more, and one row group or member"
            log.info(words, len(names), len(parts), SMALLEST_RANGE >> 20)
        workers = min(len(parts) if options.workers == -1 else options.workers, len(parts))
        todo = _unfinished_tasks(folder, parts, source, workers)
        for part in todo:
            folder.drop(part.name)
        shard_folder.clear_progress(output)
        if todo:
            # engines come from elsewhere; a store is read with credentials of the environment
            with contextlib.nullcontext() if is_url(source) or store else hidden_secrets():
                context = _begin_tasks(folder, todo, options, tokenizer, source, logs)
                del tokenizer  # else forks would inherit it
                process_engine(context.definition, context.fingerprint, context.selection)
                _run_tasks(folder, todo, context, workers)
        folder.publish()
    result = _result(folder, inputs.values(), workers=workers, tasks_run=len(todo), seconds=time.monotonic() - started)
    if (lost := describe_losses(result.losses, result.tokens)) is not None:
        log.warning("%s: %s", output, lost)
    if not result.documents:
        raise InputError(
            f"no document with text in {len(names):,} files, so there is no shard: "
            f"{result.empty_documents:,} empty and {result.null_documents:,} null documents"
            + (f"; {result.steps}" if result.steps else ""),
            where=paths_file,
            hint=lost or f"is {options.column!r} the column of the text?",
        )
    return result


def _settings(options: TokenizeOptions, tokenizer: DocumentTokenizer) -> dict[str, Any]:
    """Return what all shards of a folder share."""
    settings: dict[str, Any] = {
        "tokenizer": tokenizer.fingerprint,
        "eos": tokenizer.eos_id,
        "bos": tokenizer.bos_id,
        "token type": tokenizer.dtype.__name__,
        "column": options.column,
        "empty documents": "kept" if options.keep_empty else "dropped",
        "tasks": options.tasks,
    }
    if options.has_steps:
        settings |= describe_steps(options.pipeline, options.reader) | {"exclusions": options.exclusions}
    return settings


def _begin_tasks(
    folder: ShardFolder,
    todo: Sequence[ShardTask],
    options: TokenizeOptions,
    tokenizer: DocumentTokenizer,
    source: str,
    logs: Path,
) -> TokenizeContext:
    """Write the record and a copy of the tokenizer, and select the engine by a sample of the texts."""
    folder.write()
    logs.mkdir(parents=True, exist_ok=True)
    # workers read this copy: without hub and transformers, and safe from changes
    write_atomic(logs / "tokenizer.json", tokenizer.definition)
    files = [file for part in todo for file in part.inputs]
    size = min(max(sum(file[1] for file in files) // 2000, SMALLEST_SAMPLE), LARGEST_SAMPLE)
    top = join_path(source, "")
    paths = [top + file[0] for file in files]

    def read(path: str, _: str, **how: Any) -> Iterator[pa.Array]:
        return read_texts(options, *os.path.split(path), **how)

    texts = sample_texts(options.column, paths, most_bytes=size, scratch=str(folder.path), read=read)
    load, definition = functools.partial(getattr, tokenizer, "tokenizer"), tokenizer.definition
    selection = select_engine(options.engine, load, texts, log.warning, definition=definition)
    print(f"engine: {selection}", flush=True)
    return TokenizeContext(
        dataset=source,
        output=str(folder.path),
        store=folder.store,
        definition=str(logs / "tokenizer.json"),
        fingerprint=tokenizer.fingerprint,
        selection=selection,
        framing=tokenizer.framing(keep_empty=options.keep_empty),
        options=options,
    )


def _run_tasks(folder: ShardFolder, todo: Sequence[ShardTask], context: TokenizeContext, workers: int) -> None:
    def on_done(part: ShardTask, task: TaskRecord) -> None:
        folder.add(part.name, task)
        clear_line()
        print(f"{part.name}: {task.documents:,} documents, {task.tokens:,} tokens", flush=True)
        count(sum(size for _, size, _ in part.inputs))
        for skipped in task.skipped:
            log.warning("left out: %s", skipped.error)
        if task.bad_lines:
            lines, first = describe_bad_lines(task.bad_lines), task.bad_line_examples[0]
            log.warning("%s: left out: %s, the first is %s", part.name, lines, first)

    try:
        with Progress("tokenizing", sum(size for part in todo for _, size, _ in part.inputs)):
            run_tasks(functools.partial(tokenize_shard, context), todo, workers, on_done, where=folder.path)
    finally:
        folder.drop_temporary()
        shard_folder.clear_progress(folder.path)


def _unfinished_tasks(folder: ShardFolder, parts: Sequence[ShardTask], source: str, threads: int) -> list[ShardTask]:
    """Return the parts that are not done; warn why a part is made again. Reads every file of a finished shard."""
    with ThreadPoolExecutor(threads) as pool:
        faults = list(pool.map(lambda part: folder.fault(part.name, part.inputs, source), parts))
    for part, fault in zip(parts, faults, strict=True):
        if fault is not None and part.name in folder.tasks:
            log.warning("%s is made again: %s", part.name, fault)
    return [part for part, fault in zip(parts, faults, strict=True) if fault is not None]


def _hold_hub_cache(cache_dir: str | None) -> contextlib.AbstractContextManager[object]:
    """Serialize jobs that share a cache of the hub: the first fetches a tokenizer, the others find it."""
    if cache_dir is None:
        return contextlib.nullcontext()
    os.makedirs(cache_dir, exist_ok=True)
    return file_lock(os.path.join(cache_dir, ".relayrun-lock"))


_SUMS = ("documents", "tokens", "empty_documents", "null_documents", "routed_documents")


def _result(
    folder: ShardFolder, inputs: Collection[InputFile], *, workers: int, tasks_run: int, seconds: float
) -> TokenizeResult:
    tasks = list(folder.tasks.values())
    rows: Counter[str] = Counter()
    listed = {file_of_range(file[0]): file[0] for file in inputs}
    for task in tasks:
        for file, found in zip(task.inputs, task.file_rows, strict=False):
            rows[listed[file_of_range(file[0])]] += found
    return TokenizeResult(
        files=len(inputs),
        input_bytes=sum(size for _, size, _ in inputs),
        **{name: sum(getattr(task, name) for task in tasks) for name in _SUMS},
        steps=shard_folder.describe_step_counts((task.steps for task in tasks), sum(task.tokens for task in tasks)),
        skipped_files=sum(len(task.skipped) for task in tasks),
        bad_lines=dict(sum((Counter(task.bad_lines) for task in tasks), Counter())),
        losses=dict(sum((Counter(task.losses) for task in tasks), Counter())),
        rows=dict(rows),
        output_bytes=sum(task.tokens for task in tasks) * np.dtype(folder.settings["token type"]).itemsize,
        workers=workers,
        tasks_run=tasks_run,
        seconds=seconds,
    )
