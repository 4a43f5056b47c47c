"""Find the workers and batches that suit this node, by short runs over a sample of the user's own files.

A trial starts the real program (`preprocess_megatron.py`) on links to the files (below a URL: on the first files, each
once), in a temporary folder, waits until every worker tokenizes, counts the reported progress for some seconds, and
ends the program. Start-up, which a dump pays once, is not counted.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun import places
from relayrun.control.rundir.plan import cost_words
from relayrun.errors import InputError, RelayrunError
from relayrun.files import read_json
from relayrun.publishing import work_folder
from relayrun.tokens.readers.file_ranges import file_of_range
from relayrun.tokens.readers.inputs import paths_file_bytes, read_paths_file
from relayrun.tokens.shards.shard import FOLDER_RECORD
from relayrun.tokens.stores import urls
from relayrun.tokens.tokenize import shard_folder
from relayrun.tokens.tokenize.dumps import DumpsFolder
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from relayrun.tokens.tokenize.options import TokenizeOptions, options_to_flags

TRIED_BATCH_BYTES = tuple(int(TokenizeOptions.default("batch_bytes") * part) for part in (0.25, 1, 4))
"""Default limits of a batch to try."""

GOOD_ENOUGH = 0.97
"""Share of the best rate: among settings at least so good, the one with the fewest workers is recommended."""

_LINKS = 20_000
_BYTES_PER_SECOND = 100_000_000
"""Upper bound of a worker's reading speed."""
_START_SECONDS = 180.0


@dataclass(frozen=True, kw_only=True)
class TuningTrial:
    """Result of one setting."""

    workers: int
    batch_bytes: int
    tokens_per_second: float
    """Rate of the node."""
    worker_bytes: int
    """Memory of the largest worker (resident set)."""
    tokens_per_byte: float = 0.0
    """Tokens per byte of the files that have been read to their end; 0 without such files."""


def default_workers() -> list[int]:
    """Return one, a quarter, half, and all of the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, max(1, cores // 4), max(1, cores // 2), cores})


def run_trials(
    metadata_folder: str | os.PathLike[str],
    options: TokenizeOptions,
    *,
    workers: Sequence[int],
    batch_bytes: Sequence[int],
    seconds: float,
    temp_dir: str | None = None,
    steps: str | None = None,
    report: Callable[[TuningTrial], None] = lambda trial: None,
) -> list[TuningTrial]:
    """Try `options` with every pair of `workers` and `batch_bytes`, for `seconds` each. `temp_dir` should lie on the
    dumps' file system; `steps`: a YAML with a reader and a pipeline. Raises InputError for missing dumps and invalid
    numbers, RelayrunError for a failing run."""
    if not workers or not batch_bytes or min(*workers, *batch_bytes) < 1 or seconds <= 0:
        raise InputError("workers, bytes of a batch and seconds are positive numbers")
    metadata = DumpsFolder(metadata_folder)
    dataset = metadata.dataset()
    names = [*map(file_of_range, read_paths_file(metadata.paths_files()[0]))]
    trials = []
    for count in workers:
        for size in batch_bytes:
            tried = options.model_copy(update={"tasks": count, "workers": count, "batch_bytes": size})
            with work_folder(temp_dir) as place:
                trials.append(_run_trial(place, dataset, names, tried, seconds, steps))
            report(trials[-1])
    return trials


def recommend_trial(trials: Sequence[TuningTrial]) -> TuningTrial:
    """Return the trial with the fewest workers, then the smallest batch, that is about as fast as the best."""
    best = max(trial.tokens_per_second for trial in trials)
    good = [trial for trial in trials if trial.tokens_per_second >= GOOD_ENOUGH * best]
    return min(good, key=lambda trial: (trial.workers, trial.batch_bytes))


def forecast(trial: TuningTrial, metadata_folder: str | os.PathLike[str], steps: str | None = None) -> str:
    """Describe the time, memory and cost of all dumps with the settings of a trial. The cost is that of the site in
    `steps`, a YAML as in `run_trials`."""
    size, memory = sum(DumpsFolder(metadata_folder).sizes().values()), trial.workers * trial.worker_bytes / 1e9
    hours = size * trial.tokens_per_byte / trial.tokens_per_second / 3600 if trial.tokens_per_second else 0
    site = None if steps is None else load_tokenization_config(steps).cluster
    cost = cost_words(hours, site) if site is not None else ""
    said = f"about {hours:,.2g} hours of one node{cost}"
    if not hours:
        said = "hours unknown, as no file ended: give more --seconds"
    return f"all dumps, {size / 1e9:,.1f} GB of files: {said}, {memory:,.1f} GB of memory on each"


def trial_row(trial: TuningTrial | None) -> str:
    """Format a line of the table; None: its head."""
    cells = ("workers", "batch bytes", "Mtok/s node", "Mtok/s core", "GB a worker")
    if trial is not None:
        rate, memory = trial.tokens_per_second / 1e6, trial.worker_bytes / 1e9
        speed = f"{rate:.2f}", f"{rate / trial.workers:.2f}"
        cells = (f"{trial.workers}", f"{trial.batch_bytes:,}", *speed, f"{memory:.2f}")
    return "  ".join(cell.rjust(11) for cell in cells)


def _run_trial(
    place: Path, dataset: str, names: Sequence[str], options: TokenizeOptions, seconds: float, steps: str | None
) -> TuningTrial:
    output, log, workers = place / "tokens", place / "log", options.workers
    most = len(names) if urls.is_url(dataset) else max(_LINKS, workers)  # below a URL nothing can be linked
    names = _files_to_read(dataset, names, most=most, least=workers, most_bytes=workers * seconds * _BYTES_PER_SECOND)
    if not urls.is_url(dataset):
        files, dataset = [os.path.join(dataset, name) for name in names], str(place / "data")
        os.mkdir(dataset)
        # an ending says how a file is read
        names = [f"{number:06d}-{os.path.basename(file)[-40:]}" for number, file in enumerate(files)]
        for source, name in zip(files, names, strict=True):
            os.symlink(source, os.path.join(dataset, name))
    (place / "paths").write_bytes(paths_file_bytes(names))
    program = [sys.executable, str(places.shared_file("scripts/tokenization/preprocess_megatron.py"))]
    given = ["--output-folder", str(output), "--dataset", dataset, "--paths-file", str(place / "paths")]
    given += [] if steps is None else ["--steps", os.path.abspath(steps)]
    command = [*program, *given, *options_to_flags(options)]
    environment = os.environ | {shard_folder.PROGRESS_VARIABLE: "0.5"}
    with open(log, "wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            rate, memory, density = _measure(process, output, workers, seconds)
        finally:
            _end_program(process)
    if process.returncode > 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        first = next((n for n, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
        raise RelayrunError("\n".join(lines[first:]).removeprefix("error: "))
    if rate is None:  # the program finished within the time
        tasks = read_json(output / FOLDER_RECORD)["shards"].values()
        busy = max(task["started"] + task["seconds"] for task in tasks) - min(task["started"] for task in tasks)
        tokens = sum(task["tokens"] for task in tasks)
        rate, density = tokens / busy, tokens / sum(file[1] for task in tasks for file in task["inputs"])
    sizes = {"workers": workers, "batch_bytes": options.batch_bytes, "worker_bytes": memory}
    return TuningTrial(tokens_per_second=rate, tokens_per_byte=density, **sizes)


def _files_to_read(dataset: str, names: Sequence[str], *, most: int, least: int, most_bytes: float) -> list[str]:
    """Return files in order, repeatedly: as many as the trial can read, `least` or more, and `most` or fewer."""
    total, chosen = 0, list[str]()
    for name in itertools.islice(itertools.cycle(names), most):
        if len(chosen) >= least and total >= most_bytes:
            break
        chosen.append(name)
        total += urls.stat_file(urls.join_path(dataset, name))[0]
    return chosen


def _measure(
    process: subprocess.Popen[bytes], output: Path, workers: int, seconds: float
) -> tuple[float | None, int, float]:
    """Return tokens per second (None if the program ended by itself), the memory of the largest worker, and tokens per
    byte of the files that have ended."""
    first: dict[str, shard_folder.RunningTask] = {}
    last: dict[str, shard_folder.RunningTask] = {}
    ended: dict[str, shard_folder.RunningTask] = {}
    begun, counting, memory = time.monotonic(), 0.0, 0
    while process.poll() is None:
        for task in shard_folder.read_progress(output):
            if task.tokens:
                first.setdefault(task.shard, task)
                last[task.shard] = task
                if task.bytes_read > ended.get(task.shard, first[task.shard]).bytes_read:
                    ended[task.shard] = task
        now = time.monotonic()
        memory = max([memory, *_process_memory(process.pid)])
        if len(first) >= workers:
            counting = counting or now
            if now - counting >= seconds:
                pairs = [(task, last[name]) for name, task in first.items()]
                rate = sum((b.tokens - a.tokens) / (b.at - a.at) for a, b in pairs if b.at > a.at)
                read = sum(task.bytes_read for task in ended.values())
                return rate, memory, sum(task.tokens for task in ended.values()) / max(read, 1)
        elif now - begun > _START_SECONDS:
            words = f"not all of {workers} workers tokenized anything within {_START_SECONDS:.0f} s"
            raise RelayrunError(words, hint="give fewer --workers; is the file system slow?")
        time.sleep(0.2)
    return None, memory, 0.0


def _process_memory(pid: int) -> list[int]:
    import psutil

    try:
        process = psutil.Process(pid)
        return [int(each.memory_info().rss) for each in (process, *process.children(recursive=True))]
    except psutil.Error:  # one of them has just ended
        return []


def _end_program(process: subprocess.Popen[bytes]) -> None:
    import psutil

    try:
        workers = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        workers = []
    if process.poll() is None:
        process.kill()
    process.wait()
    psutil.wait_procs(workers, timeout=30)
