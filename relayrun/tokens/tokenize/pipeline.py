"""One paths file to one folder of shards."""

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

from relayrun.errors import InputError, RelayrunError, refuse_urls
from relayrun.files import remove_leftovers, write_atomic
from relayrun.tokens.readers.inputs import InputFile, describe_bad_lines, read_paths_file, stat_inputs
from relayrun.tokens.stores.urls import absolute_path, join_path, resolve_url_link
from relayrun.tokens.tokenize import shard_folder
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.processes import file_lock, run_tasks, use_one_thread
from relayrun.tokens.tokenize.shard_folder import ShardFolder, TaskRecord
from relayrun.tokens.tokenize.shard_task import ShardTask, TokenizeContext, process_engine, sample_texts, tokenize_shard

log = logging.getLogger(__name__)

SMALLEST_SAMPLE, LARGEST_SAMPLE = 250_000, 4_000_000
"""Bounds, in bytes, of the job's texts that engines are proven with: a 2000th of the input, within them.
At a hundredth of the fastest engine's speed, the reference would need a third of the time for a 500th."""


@dataclass(frozen=True, kw_only=True)
class TokenizeResult:
    """What a folder of shards holds, and what this run did for it."""

    files: int
    input_bytes: int
    documents: int
    tokens: int
    empty_documents: int
    null_documents: int
    routed_documents: int
    """Documents that the fast engine was not trusted with."""
    skipped_files: int
    bad_lines: dict[str, int]
    """Lines that were left out, by reason."""
    output_bytes: int
    """Bytes of all .bin files."""
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
) -> TokenizeResult:
    """Tokenize the files of `paths_file`, which are paths below the folder `dataset`, into `output_folder`.

    `logging_dir` (default: `logs` in the output folder) gets a copy of the tokenizer, which the workers read.
    What an earlier run has finished is kept, and files that the paths file lists since then get shards of
    their own (see `shard_folder.py`).
    Raises InputError or OSError for what a person can mend; then every shard under a final name is whole.
    """
    started = time.monotonic()
    refuse_urls(output_folder, *([] if logging_dir is None else [logging_dir]))
    use_one_thread()
    names = read_paths_file(paths_file)
    source = resolve_url_link(dataset)
    inputs = {file[0]: file for file in stat_inputs(source, names, missing_ok=options.skips_files)}
    output = Path(os.path.abspath(output_folder))
    output.mkdir(parents=True, exist_ok=True)
    logs = Path(os.path.abspath(logging_dir)) if logging_dir is not None else output / "logs"
    with file_lock(output / ".lock", wait=False) as held:
        if not held:
            raise RelayrunError("another process is writing shards here", where=output)
        for folder_of_ours in (output, logs):
            remove_leftovers(folder_of_ours)
        with _hold_hub_cache(options.cache_dir):
            tokenizer = load_tokenizer(options)
        framing = tokenizer.framing(keep_empty=options.keep_empty)
        folder = ShardFolder(
            output,
            {
                "tokenizer": tokenizer.fingerprint,
                "eos": tokenizer.eos_id,
                "bos": tokenizer.bos_id,
                "token type": framing.dtype,
                "column": options.column,
                "empty documents": "kept" if options.keep_empty else "dropped",
                "tasks": options.tasks,
            },
            names,
            tokenizer={"ids": tokenizer.ids_fingerprint, "size": tokenizer.size},
            source={"dataset": absolute_path(source), "tokenizer": str(logs / "tokenizer.json")},
        )
        parts = [
            ShardTask(name=name, inputs=tuple(inputs[file] for file in files)) for name, files in folder.parts.items()
        ]
        workers = min(len(parts) if options.workers == -1 else options.workers, len(parts))
        todo = _unfinished_tasks(folder, parts, source, workers)
        for part in todo:
            folder.drop(part.name)
            folder.tasks.pop(part.name, None)
        shard_folder.clear_progress(output)
        if todo:
            folder.write()
            logs.mkdir(parents=True, exist_ok=True)
            # workers read this copy: no hub, no transformers, and no change under way
            write_atomic(logs / "tokenizer.json", tokenizer.definition)
            files = [file for part in todo for file in part.inputs]
            size = min(max(sum(file[1] for file in files) // 2000, SMALLEST_SAMPLE), LARGEST_SAMPLE)
            texts = sample_texts(
                options.column, [join_path(source, file[0]) for file in files], most_bytes=size, scratch=str(output)
            )
            selection = select_engine(
                options.engine,
                functools.partial(getattr, tokenizer, "tokenizer"),
                texts,
                log.warning,
                definition=tokenizer.definition,
            )
            print(f"engine: {selection}", flush=True)
            job = TokenizeContext(
                dataset=source,
                output=str(output),
                definition=str(logs / "tokenizer.json"),
                fingerprint=tokenizer.fingerprint,
                selection=selection,
                framing=framing,
                options=options,
            )

            del tokenizer, texts  # forks would carry them
            process_engine(job.definition, job.fingerprint, selection)

            def on_done(part: ShardTask, task: TaskRecord) -> None:
                folder.add(part.name, task)
                print(f"{part.name}: {task.documents:,} documents, {task.tokens:,} tokens", flush=True)
                for skipped in task.skipped:
                    log.warning("left out: %s", skipped.error)
                if task.bad_lines:
                    first = task.bad_line_examples[0]
                    log.warning(
                        "%s: left out: %s, the first is %s", part.name, describe_bad_lines(task.bad_lines), first
                    )

            try:
                run_tasks(functools.partial(tokenize_shard, job), todo, workers, on_done, where=output)
            finally:
                folder.drop_temporary()
                shard_folder.clear_progress(output)
    result = _result(folder, inputs.values(), workers=workers, tasks_run=len(todo), seconds=time.monotonic() - started)
    if not result.documents:
        raise InputError(
            f"no document with text in {len(names):,} files, so there is no shard: "
            f"{result.empty_documents:,} empty and {result.null_documents:,} null documents",
            where=paths_file,
            hint=f"is {options.column!r} the column of the text?",
        )
    return result


def _unfinished_tasks(folder: ShardFolder, parts: Sequence[ShardTask], source: str, threads: int) -> list[ShardTask]:
    """The parts that are not done; says why one is made again. Every file of a finished shard is read once."""
    with ThreadPoolExecutor(threads) as pool:
        faults = list(pool.map(lambda part: folder.fault(part.name, part.inputs, source), parts))
    for part, fault in zip(parts, faults, strict=True):
        if fault is not None and part.name in folder.tasks:
            log.warning("%s is made again: %s", part.name, fault)
    return [part for part, fault in zip(parts, faults, strict=True) if fault is not None]


@contextlib.contextmanager
def _hold_hub_cache(cache_dir: str | None) -> Iterator[None]:
    """Jobs that share a cache of the hub fetch a tokenizer one after another: the first fetches, the others find it."""
    if cache_dir is None:
        yield
        return
    os.makedirs(cache_dir, exist_ok=True)
    with file_lock(os.path.join(cache_dir, ".relayrun-lock")):
        yield


def _result(
    folder: ShardFolder, inputs: Collection[InputFile], *, workers: int, tasks_run: int, seconds: float
) -> TokenizeResult:
    tasks = list(folder.tasks.values())
    return TokenizeResult(
        files=len(inputs),
        input_bytes=sum(size for _, size, _ in inputs),
        documents=sum(task.documents for task in tasks),
        tokens=sum(task.tokens for task in tasks),
        empty_documents=sum(task.empty_documents for task in tasks),
        null_documents=sum(task.null_documents for task in tasks),
        routed_documents=sum(task.routed_documents for task in tasks),
        skipped_files=sum(len(task.skipped) for task in tasks),
        bad_lines=dict(sum((Counter(task.bad_lines) for task in tasks), Counter())),
        output_bytes=sum(file.stat().st_size for file in folder.path.glob("*.bin")),
        workers=workers,
        tasks_run=tasks_run,
        seconds=seconds,
    )
