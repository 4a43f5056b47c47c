"""Jobs that tokenize the dumps of a data set: local processes or Slurm jobs, both through submitit.

A job tokenizes one dump, adds a row to the CSV and moves the dump's paths file to `completed-dumps`. A killed job is
submitted again, and makes the missing shards.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from relayrun.config.sections.job_script import sbatch_script_options
from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.errors import (
    InputError,
    RelayrunError,
    SchedulerError,
    did_you_mean_path,
    on_interrupt,
    refuse_unwritable,
)
from relayrun.files import write_atomic
from relayrun.leftovers import owner_may_live, process_identity
from relayrun.progress import Progress, clear_line, has_terminal
from relayrun.slurmtime import parse_time
from relayrun.tokens.readers.inputs import read_paths_file
from relayrun.tokens.readers.inventory import add_rows, refuse_wrong_checksums
from relayrun.tokens.stores.urls import join_path, try_store
from relayrun.tokens.tokenize import processes
from relayrun.tokens.tokenize.dump_status import ERROR_FILE, count_finished_shards, input_bytes, read_status
from relayrun.tokens.tokenize.dumps import DumpsFolder, replace_link
from relayrun.tokens.tokenize.job_config import TokenizationConfig, TokenizationSettings
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.shard_folder import PROGRESS_VARIABLE

_LOCAL_LIMIT_MINUTES = 60 * 24 * 30  # submitit's default kills local jobs after two minutes
POLL_SECONDS = 0.2
_READ_FIRST = 8
"""Files of which a reader of datatrove reads the first document before a job is queued."""


def prepare_submission(settings: TokenizationSettings) -> list[int]:
    """Check all inputs before any job starts, make the folders, and return the dumps to tokenize. Folders for logs are
    made here because a Slurm job whose output folder is missing dies without a log. Raises InputError if no dump is
    left, finished dumps of this metadata folder went elsewhere, a folder is not writable, or the tokenizer or the
    column is missing."""
    from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer

    metadata = DumpsFolder(settings.metadata_folder)
    indices = metadata.pending()
    if not indices:
        raise InputError(
            "there is no dump to tokenize", where=metadata.dumps, hint="`relayrun dumps prepare` makes them"
        )
    load_tokenizer(settings)
    output = settings.dataset_output
    refuse_unwritable(metadata.path, metadata.completed, output, settings.job_output_files, settings.csv)
    refuse_unwritable(*(place(index) for index in indices for place in (settings.dump_output, settings.dump_logs)))
    _check_inputs(metadata, indices, settings)
    if store := settings.dump_store(indices[0]):
        try_store(store)
    _refuse_other_output(metadata, output)
    output.mkdir(parents=True, exist_ok=True)
    settings.job_output_files.mkdir(parents=True, exist_ok=True)
    for index in indices:
        settings.dump_logs(index).mkdir(parents=True, exist_ok=True)
        (settings.dump_output(index) / ERROR_FILE).unlink(missing_ok=True)
    replace_link(metadata.tokenized_link, str(output))
    return indices


def _refuse_other_output(metadata: DumpsFolder, output: Path) -> None:
    link = metadata.tokenized_link
    if not metadata.finished() or not link.is_symlink():
        return
    if os.readlink(link) != str(output):
        words = f"finished dumps of this folder went to {os.readlink(link)}, not to {output}"
        raise InputError(words, where=link, hint="use another metadata folder, or the same output folder and names")
    if not output.is_dir():
        hint = "bring the folder back, or make the dumps anew: `relayrun dumps prepare` into another metadata folder"
        raise InputError("the finished dumps of this metadata folder are gone", where=output, hint=hint)


def _check_inputs(metadata: DumpsFolder, indices: Sequence[int], options: TokenizeOptions) -> None:
    from relayrun.tokens.readers.columns import check_files  # on demand: a login node may lack pyarrow

    dataset = metadata.dataset()
    names = [name for index in indices for name in read_paths_file(metadata.paths_file(index))]
    if options.reader is not None:
        from relayrun.tokens.tokenize.step_task import read_texts

        for name in names[:: len(names) // _READ_FIRST + 1]:
            with contextlib.suppress(*([InputError] if options.skips_files else [])):
                next(read_texts(options, dataset, name, batch_bytes=1))
        return
    paths = [join_path(dataset, name) for name in names]
    check_files(paths, options.column, skip_lines=options.skips_lines, skip_files=options.skips_files)


@contextlib.contextmanager
def noting_error(file: Path) -> Iterator[None]:
    """Write the message of a RelayrunError or OSError into `file`, for the status."""
    try:
        yield
    except processes.JobRequeued:
        raise
    except (RelayrunError, OSError) as error:
        with contextlib.suppress(OSError):
            write_atomic(file, f"{error}\n".encode("utf-8", "backslashreplace"))
        raise


def tokenize_dump(settings: TokenizationSettings, index: int) -> dict[str, Any]:
    """Tokenize dump `index`, add its row to the CSV, and move its paths file to the finished ones; return the row. The
    message of a RelayrunError or OSError is written beside the dump's shards, too. dataset_total_size: bytes of the
    dump's files; processed_total_size: bytes of its .bin files; time: seconds; bw: MB (10^6 bytes) of input per second;
    throughput: tokens per second."""
    processes.use_one_thread()
    from relayrun.tokens.tokenize.pipeline import tokenize_paths_file

    metadata, output = DumpsFolder(settings.metadata_folder), settings.dump_output(index)
    for folder in (settings.dump_logs(index), output):
        folder.mkdir(parents=True, exist_ok=True)
    (output / ERROR_FILE).unlink(missing_ok=True)
    with noting_error(output / ERROR_FILE), metadata.in_use():
        start = datetime.now()
        paths_file = metadata.paths_file(index)
        with processes.requeue_before_time_limit(lambda: count_finished_shards(output)):
            result = tokenize_paths_file(
                settings,
                output_folder=output,
                dataset=metadata.dataset(),  # messages name files of the data set, not of the link
                paths_file=paths_file,
                logging_dir=settings.dump_logs(index),
                store=settings.dump_store(index),
            )
        refuse_wrong_checksums(metadata.inventory, metadata.dataset(), result.rows)
        print(result.summary(), flush=True)
        seconds = max(result.seconds, 1e-3)
        row = {
            "slurm_job_id": processes.slurm_job_id() or "local",
            "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "start": start.isoformat(timespec="seconds"),
            "end": datetime.now().isoformat(timespec="seconds"),
            "paths_file": str(metadata.completed / paths_file.name),
            "output_folder": settings.dump_store(index) or str(output),
            "dataset_total_size": result.input_bytes,
            "processed_total_size": result.output_bytes,
            "number_of_workers_per_node": result.workers,
            "time": round(seconds, 3),
            "bw": round(result.input_bytes / 1e6 / seconds, 3),
            "total_tokens_processed": result.tokens,
            "throughput": round(result.tokens / seconds, 1),
        }
        with processes.file_lock(metadata.path / ".inventory.lock"):
            add_rows(metadata.inventory, metadata.dataset(), result.rows)
        append_csv_row(settings.csv, row)  # before the move: a kill in between adds a second row, but loses none
        metadata.finish(index)
    return row


def append_csv_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row under a lock, in one synced write; a new file gets the header."""
    with processes.file_lock(path), open(path, "rb+") as file:
        text = io.StringIO()
        writer = csv.DictWriter(text, row, lineterminator="\n")
        if file.seek(0, os.SEEK_END) == 0:
            writer.writeheader()
        else:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a killed writer's torn line stays alone
                text.write("\n")
        writer.writerow(row)
        file.write(text.getvalue().encode("utf-8", "backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def submit_dumps(config: TokenizationConfig, *, wait: bool = True) -> list[int]:
    """Tokenize all dumps of a metadata folder, `max_parallel` at a time; return their numbers. The executor `local`
    runs local processes and waits for them; `slurm` submits job arrays, one node per dump, and waits if `wait`. Raises
    RelayrunError that names the failed dumps, with the first message; SchedulerError if Slurm refuses."""
    settings = config.absolute(os.getcwd())
    settings.check()
    metadata = DumpsFolder(settings.metadata_folder)
    if not metadata.path.is_dir():
        hint = did_you_mean_path(metadata.path) or "`relayrun dumps prepare` makes it"
        raise InputError("there is no such metadata folder", where=metadata.path, hint=hint)
    if not metadata.pending() and (finished := metadata.finished()):
        _refuse_other_output(metadata, settings.dataset_output)
        print(f"all {len(finished)} dumps are done")
        return []
    failed: set[int] = set()
    if config.executor == "local":
        with metadata.in_use():
            indices = prepare_submission(settings)
            failed = _run_local(settings, indices, config.max_parallel)
    else:
        with metadata.hold():
            metadata.refuse_live_jobs()
            indices = prepare_submission(settings)
            _submit_slurm(settings, indices)
        if not wait:
            return indices
        going_on = on_interrupt(lambda: f"the jobs go on: relayrun dumps status {metadata.path}")
        with going_on, _progress(metadata.path) as show:
            while metadata.live_jobs():
                show()
                time.sleep(50 * POLL_SECONDS)  # each look asks Slurm for the jobs of all users
    if failed := failed | set(indices) & set(metadata.pending()):
        _raise_failures(settings, sorted(failed), len(indices))
    return indices


def _run_local(settings: TokenizationSettings, indices: Sequence[int], max_parallel: int) -> set[int]:
    """Run the dumps in local processes; return those that failed, even if another process has made them since."""
    import submitit

    executor = submitit.LocalExecutor(settings.job_output_files / "submitit")
    executor.update_parameters(timeout_min=_LOCAL_LIMIT_MINUTES)
    running: dict[int, Any] = {}
    waiting, failed, pending = list(indices), set(), DumpsFolder(settings.metadata_folder).pending

    def kept() -> str:
        done = len(indices) - len(set(indices) & set(pending()))
        return f"{done} of {len(indices)} dumps are done and kept; the same command goes on"

    with on_interrupt(kept), contextlib.ExitStack() as ending, _progress(settings.metadata_folder) as show:
        ending.callback(lambda: [(job.cancel(), job._process.wait()) for job in running.values()])
        while waiting or running:
            while waiting and len(running) < max_parallel:
                index = waiting.pop(0)
                with _silent_children():
                    running[index] = executor.submit(_tokenize_for, process_identity(), settings, index)
            for index in [index for index, job in running.items() if job.done()]:
                job = running.pop(index)
                job._process.wait()  # submitit leaves reaping to the garbage collector
                failed |= {index} & set(pending())
                state = "failed" if index in failed else "done"
                clear_line()
                print(f"dump {index} {state} ({len(indices) - len(waiting) - len(running)}/{len(indices)})", flush=True)
            show()
            time.sleep(POLL_SECONDS)
    return failed


@contextlib.contextmanager
def _progress(folder: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """Yield a function that shows on a terminal how much of the input of all dumps is read, without what was before."""
    before, whole = input_bytes(read_status(folder)) if has_terminal() else (0, 0)
    with Progress("tokenizing", whole - before if whole > before else None) as progress:
        yield lambda: progress.follow(lambda: input_bytes(read_status(folder))[0] - before)


@contextlib.contextmanager
def _silent_children() -> Iterator[None]:
    """Keep the traceback of a child of submitit that is interrupted while it starts off the terminal."""
    ours = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def _tokenize_for(owner: str, settings: TokenizationSettings, index: int) -> dict[str, Any]:
    """Tokenize a dump in a process that ends with `owner`, whose grandchild it is, however that ends."""

    def look(*_: object) -> None:
        if not owner_may_live(owner, settings.metadata_folder):
            os._exit(1)

    look()
    os.environ.setdefault(PROGRESS_VARIABLE, "1")
    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    return tokenize_dump(settings, index)


def _submit_slurm(config: TokenizationConfig, indices: Sequence[int]) -> None:
    """Submit and record a job for every dump: one array, or consecutive ones of the largest size that Slurm accepts."""
    # the pickle holds no site: a worker of another version need not know its settings
    settings = TokenizationSettings.model_validate(config.model_dump(include=set(TokenizationSettings.model_fields)))
    executor = slurm_executor(config, settings)
    metadata = DumpsFolder(settings.metadata_folder)
    size = max(1, slurm_scheduler().max_array_size())
    arrays: list[str] = []
    for first in range(0, len(indices), size):
        part = indices[first : first + size]
        # else all arrays would run at once, `max_parallel` dumps each
        wait = [config.job.dependency, f"afterany:{arrays[-1]}" if arrays else None]
        executor.update_parameters(additional_parameters=sbatch_parameters(config, settings, wait))
        hint = f"{first} of {len(indices)} dumps are submitted; submit the others when these are done"
        jobs = submit_array(executor, tokenize_dump, [settings] * len(part), part, hint=hint if arrays else None)
        for job, index in zip(jobs, part, strict=True):
            metadata.record_job(str(job.job_id), index)
        arrays.append(str(jobs[0].job_id).split("_")[0])
    print(
        f"submitted {len(indices)} dumps as Slurm job {', '.join(arrays)}; logs: {settings.job_output_files}",
        flush=True,
    )


def submit_array(executor: Any, function: Callable[..., Any], *arguments: Sequence[Any], hint: str | None) -> Any:
    """Submit an array with a job for each tuple of arguments; return submitit's jobs. Raises SchedulerError."""
    import submitit

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit also prints the error that it raises
            return executor.map_array(function, *arguments)
    except submitit.core.utils.UncompletedJobError as error:
        lines = str(error).splitlines()
        said = "; ".join(line.partition("error: ")[2] for line in lines if line.startswith("sbatch: error: "))
        raise SchedulerError(f"sbatch refused: {said or error}", hint=hint) from None


def slurm_executor(config: TokenizationConfig, settings: TokenizationSettings) -> Any:
    """Return submitit's executor with the parameters that all arrays share. Raises SchedulerError without a Slurm."""
    import submitit

    try:
        executor = submitit.SlurmExecutor(settings.job_output_files / "submitit", python=shlex.join(config.command))
    except RuntimeError as error:
        raise SchedulerError(
            f"Slurm is not installed here: {error}", hint="submit from a login node, or use the local executor"
        ) from None
    direct = {"account", "partition", "qos", "constraint", "exclude", "mem", "cpus_per_task"}
    executor.update_parameters(
        **config.job.model_dump(include=direct, exclude_none=True),
        exclusive=config.job.exclusive or None,
        job_name=settings.name,
        time=math.ceil(parse_time(config.job.time) / 60),
        nodes=1,
        ntasks_per_node=1,
        setup=config.preparation,
        array_parallelism=config.max_parallel,
        use_srun=False,  # one task: without srun the job's own output files hold everything
    )
    return executor


def sbatch_parameters(
    config: TokenizationConfig, settings: TokenizationSettings, wait: Sequence[str | None]
) -> dict[str, Any]:
    """Return options of sbatch for which submitit has no parameters."""
    log = settings.job_output_files / "R-%x-%j"
    found: dict[str, Any] = {"output": f"{log}.out", "error": f"{log}.err"}
    if config.job.reservation is not None:
        found["reservation"] = config.job.reservation
    for name, value in sbatch_script_options(config.job.sbatch).items():
        found[name] = True if value is None else value  # as submitit writes an option without a value
    return found | ({"dependency": ",".join(filter(None, wait))} if any(wait) else {})


def _raise_failures(settings: TokenizationSettings, failed: Sequence[int], total: int) -> None:
    message = "its job was killed, or died before it began"
    with contextlib.suppress(FileNotFoundError):
        message = (settings.dump_output(failed[0]) / ERROR_FILE).read_text(encoding="utf-8").strip()
    numbers = ", ".join(map(str, failed))
    words = f"{len(failed)} of {total} dumps failed (dump {numbers}). Dump {failed[0]}: {message}"
    raise RelayrunError(
        words, hint=f"logs: {settings.job_output_files}; submit again when it is mended: what is done is kept"
    )
