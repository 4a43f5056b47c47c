"""A run: the names of the files in its directory, its attempts, and STOP, the file that ends its chain.

    config/0001.yaml ...         resolved config, one file per revision
    plan.json                    the settings that the supervisor needs
    job.sbatch                   the rendered job, submitted by every attempt
    fallback.sbatch              the small job that starts if one of these fails
    manifest.json                the frozen, ordered list of shards
    overlap.txt                  overlap of validation sets with training data, by the newest submit's check
    attempts/0007/               see `attempt`
    attempts.jsonl metrics.jsonl merged views, written by the supervisor
    checkpoints/iter_0000100/    published by rename from .staging/<attempt>/
    streams.json wandb/ tensorboard/   see `tracker_runs`; written by the trackers and by rank 0
    loader/000000000001200.json  states of `relayrun.loader`, in a program of one's own
    evaluations/  evaluations.jsonl  evaluation.sbatch    see `evaluations`
    notices/                     see `control.notify.notices`
    membership.json              see `campaign`
    requests.json                see `control.chain.requested_options`
    quota.json                   see `storage_limits`
    triggers/  debug/<attempt>/  code/  owners.jsonl
    STOP                         its existence ends the chain; its head gives the state and the reason

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from relayrun.control.rundir.attempt import Attempt, PathIn
from relayrun.control.rundir.records import ChainEnd, ChainEndState
from relayrun.errors import RunDirError
from relayrun.files import names_in, path_exists, read_bytes, write_atomic
from relayrun.leftovers import exclusive_lock, open_lock

PLAN_NAME, ATTEMPTS_NAME, STOP_NAME = "plan.json", "attempts", "STOP"
"""Names for readers of a thousand runs: a path as text takes a fraction of the time of a `Path`."""


@dataclass(frozen=True)
class Run:
    """One run directory: its file names, and its attempts, each as one object, which reads a record once."""

    path: Path
    opened_attempts: dict[int, Attempt] = field(default_factory=dict, init=False, repr=False, compare=False)

    config = PathIn("config")
    plan = PathIn(PLAN_NAME)
    job_script = PathIn("job.sbatch")
    fallback_script = PathIn("fallback.sbatch")
    """The rendered fallback job, see `chain.jobs`."""
    manifest = PathIn("manifest.json")
    overlap = PathIn("overlap.txt")
    data_cache = PathIn("data_cache")
    """Indices of the data sets, if the config names no folder for them."""
    attempts = PathIn(ATTEMPTS_NAME)
    attempts_view = PathIn("attempts.jsonl")
    metrics_view = PathIn("metrics.jsonl")
    views = PathIn("views.json")
    """Progress of the merged views; see `rundir.merged_metrics`."""
    streams = PathIn("streams.json")
    """Ids of the run in W&B and TensorBoard; see `rundir.tracker_runs`."""
    loader_states = PathIn("loader")
    """States of the data of a program of one's own, by their samples; see `relayrun.loader`."""
    tensorboard = PathIn("tensorboard")
    """One folder of event files per tracker run."""
    evaluations = PathIn("evaluations")
    """One folder per evaluated checkpoint; see `rundir.evaluations`."""
    evaluations_view = PathIn("evaluations.jsonl")
    evaluation_policy = PathIn("evaluations/policy.json")
    """The checkpoints that are evaluated, by the newest submit."""
    evaluation_script = PathIn("evaluation.sbatch")
    """The job that evaluates one checkpoint, given its iteration and attempt."""
    notices = PathIn("notices")
    notice_policy = PathIn("notices/policy.json")
    """Who is told of what, by the newest submit; see `control.notify.notices`."""
    mirror = PathIn("mirror")
    mirror_policy = PathIn("mirror/policy.json")
    """The folder that gets copies of the checkpoints, by the newest submit; see `rundir.mirror`."""
    mirror_pass = PathIn("mirror/last.json")
    quota = PathIn("quota.json")
    requests = PathIn("requests.json")
    """The options that Slurm accepted for the newest jobs, and a person's changes; see `chain.requested_options`."""
    node_failures = PathIn("nodes.jsonl")
    """One line per node that was blamed for a failed attempt."""
    checkpoints = PathIn("checkpoints")
    tracker = PathIn("checkpoints/latest_checkpointed_iteration.txt")
    """The newest published iteration as a number, under Megatron's file name."""
    progress = PathIn("progress.txt")
    """Starts of jobs and checkpoints, one line each, in the format of Megatron-LM's progress.txt; by rank 0."""
    owners = PathIn("owners.jsonl")
    """One line per user who took the run over, including the first."""
    triggers = PathIn("triggers")
    debug = PathIn("debug")
    code = PathIn("code")
    """Snapshots of the code; see `relayrun.submit.code_snapshot`."""
    stop = PathIn(STOP_NAME)
    """Its existence ends the chain; its first line is the reason."""

    def debug_of(self, attempt: int) -> Path:
        """Return the folder of an attempt's stacks, traces, NCCL log and environment."""
        return self.debug / f"{attempt:04}"

    def stacks(self, attempt: int) -> Path:
        """Return the folder for the Python stacks (`rank-0012.txt`) that an attempt's ranks write on SIGUSR1."""
        return self.debug_of(attempt) / "stacks"

    def config_revision(self, revision: int) -> Path:
        return self.config / f"{revision:04}.yaml"

    def revisions(self) -> list[int]:
        """Return the numbers of the config revisions, rising."""
        return _numbers(self.config, re.compile(r"(\d{4,})\.yaml"))

    def attempt(self, number: int) -> Attempt:
        """Return the attempt with this number, existing or not."""
        found = self.opened_attempts.get(number)
        if found is None:
            found = self.opened_attempts[number] = Attempt(f"{self.path}/{ATTEMPTS_NAME}/{number:04}")
        return found

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts that have a directory, rising."""
        return _numbers(f"{self.path}/{ATTEMPTS_NAME}", _ATTEMPT_NAME)

    def newest_begun(self) -> Attempt | None:
        """Return the newest attempt that has begun; a killed `begin` does not count. Raises RunDirError."""
        every = (self.attempt(number) for number in reversed(self.attempt_numbers()))
        return next((attempt for attempt in every if attempt.read_begin() is not None), None)

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iter_{iteration:07}"

    def staging(self, attempt: int) -> Path:
        return self.checkpoints / ".staging" / f"{attempt:04}"


def stream_positions_path(folder: Path) -> Path:
    """Return the file with the positions of streams in a checkpoint's folder; it is missing without streams."""
    return folder / "data.json"


_ATTEMPT_NAME = re.compile(r"(\d{4,})")


def _numbers(folder: Path | str, pattern: re.Pattern[str]) -> list[int]:
    return sorted(int(match[1]) for name in names_in(folder) if (match := pattern.fullmatch(name)))


STOP_IS_A_DIRECTORY = ChainEnd("stopped", "STOP is there, as a directory")
_STOP_HEAD = re.compile(r"state: (done|stopped|failed)\r?\nreason: (.*?)\r?(?:\n|\Z)")


def parse_stop(text: str) -> tuple[ChainEnd, str]:
    """Return the end of the chain, and the rest of the text of STOP. Without the head `state: ...`, `reason: ...`, as
    written by a person, the first line is the reason and the state `stopped`."""
    if (head := _STOP_HEAD.match(text)) is not None:
        return ChainEnd(cast(ChainEndState, head[1]), head[2]), text[head.end() :]
    first, _, rest = text.partition("\n")
    return ChainEnd("stopped", first.rstrip("\r")), rest


def read_stop(run: Run) -> ChainEnd | None:
    """Return how and why the chain ended; None if STOP is missing. Not cached: anybody may write and remove STOP."""
    try:
        return parse_stop(read_bytes(f"{run.path}/{STOP_NAME}").decode())[0]
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return STOP_IS_A_DIRECTORY


def stop_reason(run: Run) -> str | None:
    """Return the reason in STOP, for people; None if STOP is missing."""
    ended = read_stop(run)
    return None if ended is None else ended.reason


def is_stopped(run: Run) -> bool:
    """Return whether the chain has ended. Raises OSError if the run directory cannot be read."""
    return path_exists(f"{run.path}/{STOP_NAME}")


def write_stop(run: Run, ended: ChainEnd, *, words: str = "") -> None:
    """End the chain, unless it has ended already: the first reason stays. `words`: the last lines of its log."""
    if read_stop(run) is None:
        head = f"state: {ended.state}\nreason: {ended.reason.replace(chr(10), ' ')}\n"
        text = f"{head}\nThe chain has ended. To go on all the same: submit with --resume.\n"
        write_atomic(run.stop, text + (f"\nThe last lines of its log:\n{words}\n" if words else ""))


@contextmanager
def submit_lock(run: Run) -> Iterator[list[Path]]:
    """Hold the lock of the run's submits; yield the folders that this submit made, the innermost first."""
    made = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
    for folder in reversed(made):
        try:
            folder.mkdir(0o755 if folder == run.path else 0o777)
        except FileExistsError:  # another submit's
            made.remove(folder)
    refusal = RunDirError("another submit of this run is under way", where=run.path)
    with exclusive_lock(open_lock(run.path / ".submit.lock"), refusal):
        yield made
