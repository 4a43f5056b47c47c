"""The stages of a deduplication on this machine or as Slurm arrays, their memory and their status."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any

from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.errors import InputError, RelayrunError, on_interrupt
from relayrun.tokens.curate.dedup import DedupStages
from relayrun.tokens.readers.columns import inspect_files
from relayrun.tokens.readers.inputs import stat_inputs
from relayrun.tokens.stores.urls import join_path
from relayrun.tokens.tokenize import processes
from relayrun.tokens.tokenize.dump_jobs import (
    POLL_SECONDS,
    noting_error,
    sbatch_parameters,
    slurm_executor,
    submit_array,
)
from relayrun.tokens.tokenize.dump_status import ERROR_FILE, dedup_status
from relayrun.tokens.tokenize.dumps import DEDUPLICATION, DumpsFolder, replace_link
from relayrun.tokens.tokenize.job_config import TokenizationConfig, TokenizationSettings
from relayrun.tokens.tokenize.step_task import read_texts

_PROCESS_BYTES = 300 << 20
"""Python with datatrove's modules and the tokenizer of words."""
_HASH_BYTES, _CLUSTER_BYTES, _SENTENCE_BYTES = 180, 240, 50
"""Measured: a document of a task whose text is hashed; a document with a duplicate in the stage clusters; a sentence
or paragraph of a task."""
_NGRAM_BYTES = 110
"""An n-gram of an evaluation set in Python's dictionary."""
_SAMPLED_FILES, _SAMPLED_DOCUMENTS = 8, 100


def deduplicate(config: TokenizationConfig, *, wait: bool) -> None:
    """Do all stages of a data set: here, or as Slurm arrays of which each waits for the one before. A stage goes on
    where it stopped. Raises InputError for wrong settings and too little memory, RelayrunError if a stage fails."""
    settings, local = config.absolute(os.getcwd()), config.executor == "local"
    settings.check()
    stages, metadata = DedupStages(settings), DumpsFolder(settings.metadata_folder)
    if memory := node_memory() if local else config.job.mem_bytes:
        for stage in stages.stages:
            check_memory(stages, stage, memory)
    stages.output.mkdir(parents=True, exist_ok=True)
    with metadata.hold():
        metadata.refuse_live_jobs()
        stages.begin()
        if stages.store:  # in a process of its own: a store's package starts threads, which keep workers from forks
            processes.run_tasks(DedupStages.copy_settings, [stages], 2, lambda *_: None, where=stages.store)
        (stages.work / ERROR_FILE).unlink(missing_ok=True)
        replace_link(metadata.dedup_link, str(stages.output))
        if not local:
            _submit(config, stages, metadata)
    if local:
        with on_interrupt(lambda: "finished tasks are kept; the same command goes on"), metadata.in_use():
            for stage in stages.stages:
                run_part(settings, stage, 0, 1)
    elif not wait:
        return
    with on_interrupt(lambda: f"the jobs go on: relayrun dumps status {metadata.path}"):
        while metadata.live_jobs():
            time.sleep(10 * POLL_SECONDS)
    lines = dedup_status(metadata.path)
    if any(len(stages.records(stage)) < number for stage, number in stages.stages.items()):
        raise RelayrunError(lines[-1], where=stages.output, hint=f"logs: {settings.job_output_files}")
    print("\n".join(lines))


def run_part(settings: TokenizationSettings, stage: str, part: int, of: int) -> None:
    """Do every `of`-th task of a stage, from task `part` on: the work of one job. Done tasks are kept."""
    processes.use_one_thread()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # a block opens a file of each task before it
    stages = DedupStages(settings)
    stages.begin()  # refuses files that have changed since the submission
    progress = processes.requeue_before_time_limit(lambda: len(stages.records(stage)))
    with noting_error(stages.work / ERROR_FILE), progress:
        cores = len(os.sched_getaffinity(0)) if settings.workers == -1 else settings.workers
        workers = max(1, min(cores, node_memory() // check_memory(stages, stage, node_memory())))
        todo = stages.unfinished(stage, range(part, stages.stages[stage], of), workers)

        def on_done(task: int, record: dict[str, Any]) -> None:
            print(f"stage {stage}: task {task} done in {record['seconds']:.1f} s", flush=True)

        processes.run_tasks(functools.partial(stages.run_task, stage), todo, workers, on_done, where=stages.work)


def _submit(config: TokenizationConfig, stages: DedupStages, metadata: DumpsFolder) -> None:
    """Submit an array of at most `max_parallel` jobs for each stage."""
    known = stages.options.model_dump(include=set(TokenizationSettings.model_fields))
    settings, before = TokenizationSettings.model_validate(known), config.job.dependency
    executor = slurm_executor(config, settings)
    for stage, number in stages.stages.items():
        parts = min(number, config.max_parallel, max(1, slurm_scheduler().max_array_size()))
        options = sbatch_parameters(config, settings, [before]) | {"kill_on_invalid_dep": "yes"}
        executor.update_parameters(job_name=f"dedup-{stage}-{settings.dataset_name}", additional_parameters=options)
        arguments = [settings] * parts, [stage] * parts, range(parts), [parts] * parts
        jobs = submit_array(executor, run_part, *arguments, hint="cancel the jobs of the stages before it")
        for job in jobs:
            metadata.record_job(str(job.job_id), DEDUPLICATION)
        array = str(jobs[0].job_id).split("_")[0]
        before = f"afterok:{array}"
        print(f"stage {stage}: {number} tasks in {parts} jobs of Slurm array {array}", flush=True)


def node_memory() -> int:
    """Return the bytes that Slurm gave this job on its node, or those of this machine."""
    megabytes = int(os.environ.get("SLURM_MEM_PER_NODE") or 0)
    return megabytes << 20 or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(stages: DedupStages, stage: str, memory: int) -> int:
    """Return the bytes of a process of a stage, about. Raises InputError, with the number of tasks or of buckets that
    fits, if a node has less `memory`."""
    records = [record["documents"] for record in stages.records("documents")]
    if stage == "clusters":
        sizes = [file.stat().st_size for file in sorted((stages.work / "buckets").glob("*.dups"))]
        documents = [min(size // 8, sum(records)) for size in itertools.accumulate(sizes)]  # of 16 bytes a pair
        needs = [_PROCESS_BYTES + _CLUSTER_BYTES * number for number in documents] or [_PROCESS_BYTES]
        fits = f"dedup.minhash.num_buckets: {sum(need <= memory for need in needs)} fits"
    else:
        line = (stages.minhash.hashes_per_bucket + 1) * 8
        each = {"documents": _HASH_BYTES * stages.settings.exact, "signatures": 2 * line}.get(stage, 0)
        largest = max(records) if len(records) == stages.tasks else _largest_task(stages) if each else 0
        if stages.settings.sentences is not None and stage in ("sentences", "kept"):
            each, largest = _SENTENCE_BYTES, _largest_task(stages, stages.count_parts)
        index = sum(file.stat().st_size // 8 for file in (stages.work / "evaluations").glob("*.hashes"))
        needs = [_PROCESS_BYTES + each * largest + _NGRAM_BYTES * index * (stage == "documents")]
        room = max(memory - _PROCESS_BYTES, 1)
        fits = f"tasks: {math.ceil(stages.tasks * each * largest / room)} fits, of at least as many files"
    if needs[-1] > memory:
        words = f"one process of stage {stage} needs about {needs[-1] / 1e9:.1f} GB, a node has {memory / 1e9:.1f} GB"
        raise InputError(words, where=stages.output, hint=f"{fits}; or give the jobs more memory (job.mem)")
    return int(needs[-1])


def _largest_task(stages: DedupStages, parts: Callable[[str], int] | None = None) -> int:
    """Return the documents of the largest task, or their `parts`, estimated by the beginning of a few files."""
    inputs = stat_inputs(stages.dataset, stages.files, missing_ok=True)
    rows = size = 0.0
    for name, on_disk, _ in inputs[:: max(1, len(inputs) // _SAMPLED_FILES)]:
        with contextlib.suppress(InputError):  # the task of the file says what is wrong with it
            (file,) = inspect_files([(join_path(stages.dataset, name), on_disk)], stages.options.column)
            array = next(read_texts(stages.options, stages.dataset, name, batch_bytes=1 << 20), None)
            if array is not None and array.nbytes:
                texts = array.drop_null()[:_SAMPLED_DOCUMENTS].to_pylist()
                each = sum(map(parts, texts)) / len(texts) if parts else 1.0
                rows, size = rows + each * (file.rows or file.size * len(array) / array.nbytes), size + on_disk
    largest = max(sum(size for _, size, _ in inputs[task :: stages.tasks]) for task in range(stages.tasks))
    return int(largest * rows / size) if size else 0
