"""A run: the names of the files in its directory, its attempts, and STOP, the file that ends its chain.

    config/0001.yaml ...         resolved config, one file per revision
    plan.json                    the settings that the supervisor needs
    job.sbatch                   the rendered job, submitted by every attempt
    fallback.sbatch              the small job that starts if one of these fails
    manifest.json                the frozen, ordered list of shards
    attempts/0007/               begin.json end.json            written by the supervisor
                                 outcome.json data.json commits.jsonl metrics.jsonl failed_saves.jsonl
                                 rewinds.jsonl memory_intervals.jsonl   by rank 0
                                 rounds.jsonl node_health.jsonl by the agents
                                 stop                           asks the ranks to save and leave
    attempts.jsonl metrics.jsonl merged views, written by the supervisor
    checkpoints/iter_0000100/    published by rename from .staging/<attempt>/
    streams.json wandb/ tensorboard/   see `tracker_runs`; written by the trackers and by rank 0
    evaluations/  evaluations.jsonl  evaluation.sbatch    see `evaluations`
    notices/                     see `control.notify.notices`
    membership.json              see `campaign`
    quota.json                   see `storage_limits`
    triggers/  debug/<attempt>/  code/  owners.jsonl
    STOP                         its existence ends the chain; its head gives the state and the reason

Standard library only.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import ChainEnd, ChainEndState, foreign_owner
from relayrun.files import path_exists, read_bytes, write_atomic

PLAN_NAME, ATTEMPTS_NAME, STOP_NAME = "plan.json", "attempts", "STOP"
"""Names for who reads them of a thousand runs, where a path as text takes a fraction of the time of a `Path`."""


@dataclass(frozen=True)
class Run:
    """One run directory: the names of its files, and its attempts.

    The same object answers for an attempt each time, so that a program reads a record once that never changes.
    """

    path: Path
    _attempts: dict[int, Attempt] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def config(self) -> Path:
        return self.path / "config"

    @cached_property
    def plan(self) -> Path:
        return self.path / PLAN_NAME

    @property
    def job_script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def fallback_script(self) -> Path:
        """The rendered fallback job, see `chain.fallback`."""
        return self.path / "fallback.sbatch"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def data_cache(self) -> Path:
        """Indices of the data sets, where the config names no folder for them."""
        return self.path / "data_cache"

    @cached_property
    def attempts(self) -> Path:
        return self.path / ATTEMPTS_NAME

    @property
    def attempts_view(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def metrics_view(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def views(self) -> Path:
        """How far the merged views are; see `rundir.merged_metrics`."""
        return self.path / "views.json"

    @property
    def streams(self) -> Path:
        """Under which ids the run is told to W&B and TensorBoard; see `rundir.tracker_runs`."""
        return self.path / "streams.json"

    @property
    def tensorboard(self) -> Path:
        """A folder of event files per stream."""
        return self.path / "tensorboard"

    @cached_property
    def evaluations(self) -> Path:
        """A folder per evaluated checkpoint; see `rundir.evaluations`."""
        return self.path / "evaluations"

    @property
    def evaluations_view(self) -> Path:
        """A line per result."""
        return self.path / "evaluations.jsonl"

    @property
    def evaluation_policy(self) -> Path:
        """Which checkpoints are evaluated, by the newest submit."""
        return self.evaluations / "policy.json"

    @property
    def evaluation_script(self) -> Path:
        """The job that evaluates one checkpoint, given its iteration and attempt."""
        return self.path / "evaluation.sbatch"

    @property
    def strikes(self) -> Path:
        """A line per node that was blamed for a failed attempt."""
        return self.path / "nodes.jsonl"

    @cached_property
    def node_health(self) -> Path:
        """What was measured on the run's nodes, a line each; see `rundir.node_health`."""
        return self.path / "node_health.jsonl"

    @cached_property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tracker(self) -> Path:
        """The newest published iteration as a number, under the name that Megatron gives it."""
        return self.checkpoints / "latest_checkpointed_iteration.txt"

    @property
    def progress(self) -> Path:
        """Starts of jobs and checkpoints, a line each, in the form of Megatron-LM's file of this name; by rank 0."""
        return self.path / "progress.txt"

    @property
    def owners(self) -> Path:
        """A line per user who took the run over, the first one's included."""
        return self.path / "owners.jsonl"

    @cached_property
    def triggers(self) -> Path:
        return self.path / "triggers"

    @property
    def debug(self) -> Path:
        return self.path / "debug"

    def debug_of(self, attempt: int) -> Path:
        """What an attempt leaves for a person: stacks, traces, NCCL's log, its surroundings."""
        return self.debug / f"{attempt:04}"

    def stacks(self, attempt: int) -> Path:
        """Where the ranks of an attempt write their Python stacks (`rank-0012.txt`) when they get SIGUSR1."""
        return self.debug_of(attempt) / "stacks"

    @property
    def code(self) -> Path:
        """Snapshots of the code; see `relayrun.submit.code_snapshot`."""
        return self.path / "code"

    @cached_property
    def stop(self) -> Path:
        """Its existence ends the chain; see `parse_stop`."""
        return self.path / STOP_NAME

    def config_revision(self, revision: int) -> Path:
        return self.config / f"{revision:04}.yaml"

    def revisions(self) -> list[int]:
        """Numbers of the config revisions there are, rising."""
        return _numbers(self.config, re.compile(r"(\d{4,})\.yaml"))

    def attempt(self, number: int) -> Attempt:
        """The attempt of this number, whether it is there or not."""
        found = self._attempts.get(number)
        if found is None:
            found = self._attempts[number] = Attempt(f"{self.path}/{ATTEMPTS_NAME}/{number:04}")
        return found

    def attempt_numbers(self) -> list[int]:
        """Numbers of the attempts that have a directory, rising."""
        return _numbers(f"{self.path}/{ATTEMPTS_NAME}", _ATTEMPT_NAME)

    def newest_begun(self) -> Attempt | None:
        """The newest attempt that has begun: one whose `begin` was killed has a directory, and owns nothing.

        Raises RunDirError if its record is damaged.
        """
        every = (self.attempt(number) for number in reversed(self.attempt_numbers()))
        return next((attempt for attempt in every if attempt.read_begin() is not None), None)

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iter_{iteration:07}"

    def staging(self, attempt: int) -> Path:
        return self.checkpoints / ".staging" / f"{attempt:04}"


def is_owned_by_this_user(run: Run) -> bool:
    """Whether the run directory and plan.json belong to this user, as the file system says and no file's content.

    A command that looks at another run starts nothing of it, and sends nothing. Raises OSError.
    """
    return all(foreign_owner(path) is None for path in (os.path.realpath(run.path), run.plan))


def stream_positions_path(folder: Path) -> Path:
    """Where the lanes of streams stood at a checkpoint, beside its other files; there is none without streams."""
    return folder / "data.json"


_ATTEMPT_NAME = re.compile(r"(\d{4,})")


def _numbers(folder: Path | str, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


STOP_IS_A_DIRECTORY = ChainEnd("stopped", "STOP is there, as a directory")
_STOP_HEAD = re.compile(r"state: (done|stopped|failed)\r?\nreason: (.*?)\r?(?:\n|\Z)")


def parse_stop(text: str) -> tuple[ChainEnd, str]:
    """Return how and why the chain ended, and the rest of the text of STOP.

    STOP begins with the lines `state: ...` and `reason: ...`. If a person writes STOP without this head, its first
    line is the reason, and the state is `stopped`.
    """
    if (head := _STOP_HEAD.match(text)) is not None:
        return ChainEnd(cast(ChainEndState, head[1]), head[2]), text[head.end() :]
    first, _, rest = text.partition("\n")
    return ChainEnd("stopped", first.rstrip("\r")), rest


def read_stop(run: Run) -> ChainEnd | None:
    """How and why the chain ended; None if STOP is missing. Not cached: anybody may write and remove STOP."""
    try:
        return parse_stop(read_bytes(f"{run.path}/{STOP_NAME}").decode())[0]
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return STOP_IS_A_DIRECTORY


def stop_reason(run: Run) -> str | None:
    """The reason in STOP, for people; None if STOP is missing."""
    ended = read_stop(run)
    return None if ended is None else ended.reason


def is_stopped(run: Run) -> bool:
    """Whether the chain has ended. Raises OSError where the run directory may not be looked into."""
    return path_exists(f"{run.path}/{STOP_NAME}")


def write_stop(run: Run, ended: ChainEnd, *, words: str = "") -> None:
    """End the chain, unless it has ended already: the first reason stays. `words`: the last ones of its log."""
    if read_stop(run) is None:
        head = f"state: {ended.state}\nreason: {ended.reason.replace(chr(10), ' ')}\n"
        text = f"{head}\nThe chain has ended. To go on all the same: submit with --resume.\n"
        write_atomic(run.stop, text + (f"\nThe last lines of its log:\n{words}\n" if words else ""))
