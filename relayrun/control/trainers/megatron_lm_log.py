"""Megatron-LM's program, seen from outside: the lines of its log, and its folder of checkpoints.

    checkpoints/latest_checkpointed_iteration.txt     the tracker: the newest complete iteration, or `release`
    checkpoints/iter_0000010/                         .metadata common.pt metadata.json *.distcp   (torch_dist)
                                                      mp_rank_00/model_optim_rng.pt                (torch)

Megatron-LM writes the tracker last. `.metadata` is read without torch and without running anything.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from signal import Signals

from relayrun.control.job_log import LogFollower, log_size
from relayrun.control.trainers.base import FoundCheckpoint, ObservedStep, ProgramEnding, finite_number
from relayrun.control.trainers.checkpoint_cleanup import quarantine_checkpoints
from relayrun.control.trainers.pickle_records import CorruptPickle, read_records
from relayrun.control.trainers.torch_files import METADATA_FILE, blocks_of, read_bounded
from relayrun.files import fsync_directory, names_in, stat_of, text_of, write_atomic

TRACKER_FILE = "latest_checkpointed_iteration.txt"

TORCH_DIST_FILES = ("metadata.json", METADATA_FILE, "common.pt")
"""Files without which a folder of the format torch_dist cannot be loaded; metadata.json is written last."""

_FOLDER_NAME = re.compile(r"iter_(\d{7,})")


def iteration_of_folder(name: str) -> int | None:
    """Return the iteration in a folder's name; None if it is no checkpoint's."""
    match = _FOLDER_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def tracked_iteration(folder: Path) -> int | None:
    """Return the iteration that the tracker names; None without one."""
    text = (text_of(folder / TRACKER_FILE) or "").strip()
    return int(text) if text.isdecimal() else None


def write_tracker(folder: Path, iteration: int) -> None:
    """Let Megatron resume from this iteration; 0: from the beginning."""
    if iteration:
        write_atomic(folder / TRACKER_FILE, str(iteration))
    else:
        (folder / TRACKER_FILE).unlink(missing_ok=True)
        fsync_directory(folder)


def checkpoint_fault(checkpoint: Path) -> str | None:
    """Return the defect of a checkpoint's folder, as far as names and sizes show; None without one. Raises OSError if
    it cannot be examined: a file system that is away for a moment tears nothing."""
    ranks = sorted(checkpoint.glob("mp_rank_*"))
    if ranks:
        empty = next((rank for rank in ranks if not _is_not_empty(rank / "model_optim_rng.pt")), None)
        return None if empty is None else f"{empty.name}/model_optim_rng.pt is missing"
    if not (checkpoint / "common.pt").exists() and not (checkpoint / "metadata.json").exists():
        needed: tuple[str, ...] = (METADATA_FILE,)  # torch's own format, as of NVIDIA's torch_dcp and fsdp_dtensor
    else:
        needed = TORCH_DIST_FILES
    missing = next((name for name in needed if not _is_not_empty(checkpoint / name)), None)
    return f"{missing} is missing" if missing is not None else _short_file(checkpoint)


def _short_file(checkpoint: Path) -> str | None:
    """Return the file of `.metadata` that is missing or shorter than its blocks; None without one."""
    try:
        sizes = least_file_sizes(checkpoint / METADATA_FILE)
    except CorruptPickle as error:
        return f"{METADATA_FILE} cannot be read ({error})"
    for name, least in sorted(sizes.items()):
        found = stat_of(checkpoint / name)
        if found is None:
            return f"{name} is missing"
        if found.st_size < least:
            return f"{name} has {found.st_size} bytes, not {least}"
    return None


def whole_checkpoints(folder: Path, *, known: Container[int] = ()) -> list[FoundCheckpoint]:
    """Return all complete checkpoints up to the tracker, rising. `known`: iterations found complete in an earlier look;
    they are not examined again."""
    newest = tracked_iteration(folder)
    if newest is None:
        return []
    return [
        FoundCheckpoint(iteration=iteration, path=str(path))
        for iteration, path in all_checkpoints(folder)
        if iteration <= newest and (iteration in known or checkpoint_fault(path) is None)
    ]


def all_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return iteration and folder of everything with a checkpoint's name, rising."""
    found = ((iteration_of_folder(name), folder / name) for name in names_in(folder))
    return sorted((iteration, path) for iteration, path in found if iteration is not None and path.is_dir())


def prepare_checkpoints(folder: Path, *, base: int, attempt: int) -> list[str]:
    """Make Megatron start from iteration `base`, which is complete; 0: from the beginning. Returns one line per action.

    Folders of later iterations are saves that a kill cut off: Megatron would write into them, or load one. They are
    moved to `.quarantine`; nothing is deleted.
    """
    beyond = [path for iteration, path in all_checkpoints(folder) if iteration > base]
    done = quarantine_checkpoints(folder, beyond, attempt=attempt, fault=checkpoint_fault)
    if (named := tracked_iteration(folder) or 0) != base:
        write_tracker(folder, base)
        done.append(f"{folder / TRACKER_FILE} named iteration {named}; it names {base or 'none'} now")
    return done


def _is_not_empty(path: Path) -> bool:
    found = stat_of(path)
    return found is not None and found.st_size > 0


def least_file_sizes(metadata: Path) -> dict[str, int]:
    """Return the minimum bytes of each file beside `.metadata`, by name. Raises CorruptPickle, and OSError. Records in
    an unknown form, as of a later torch, name no file here."""
    records, _ = read_records(read_bounded(metadata))
    found: dict[str, int] = {}
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        for _, file, offset, length in blocks_of(records):
            found[file] = max(found.get(file, 0), offset + length)
    return found


METRIC_NAMES = {
    "lm loss": "loss",
    "grad norm": "grad_norm",
    "learning rate": "lr",
    "global batch size": "global_batch_size",
    "throughput per GPU (TFLOP/s/GPU)": "model_tflops_per_gpu",
    "tokens/sec/gpu": "tokens_per_second_per_gpu",
}
"""Megatron's names of metrics that have another name in `metrics.jsonl`."""

_ITERATION = re.compile(r"\biteration +(\d+)/ *(\d+) \|")
_FIELD = re.compile(r" ([^|:]+): +([^|]*?) \|")
_SAVING = re.compile(r"saving checkpoint at iteration +(\d+) to ")


def parse_iteration(line: str) -> ObservedStep | None:
    """Return the iteration in a line of the log; None without one."""
    if (found := _ITERATION.search(line)) is None:
        return None
    metrics: dict[str, float] = {}
    seconds: float | None = None
    samples: int | None = None
    for name, text in _FIELD.findall(line[found.end() - 1 :]):
        value = finite_number(text)
        if value is None:
            continue
        if name == "elapsed time per iteration (ms)":
            seconds = value / 1000
        elif name == "consumed samples":
            samples = int(value)
        else:
            plain = METRIC_NAMES.get(name) or re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
            metrics[plain] = int(value) if name == "global batch size" else value
    return ObservedStep(iteration=int(found[1]), seconds=seconds, consumed_samples=samples, metrics=metrics)


def parse_save(line: str) -> int | None:
    """Return the iteration whose save begins in this line; None without one."""
    found = _SAVING.search(line)
    return None if found is None else int(found[1])


class MegatronDialect(Enum):
    """The two families of checkouts, as far as a chain sees them."""

    SWISS_AI = "swiss-ai"
    """It has `--trigger-path`, and leaves on SIGUSR2."""
    NVIDIA = "nvidia"
    """It has no triggers, and leaves on SIGTERM, or what `--exit-signal` says."""

    def leave_signal(self, flags: Sequence[str]) -> Signals:
        """Return the signal on which a program with these flags saves and leaves, with `--exit-signal-handler`."""
        if self is MegatronDialect.SWISS_AI:
            return Signals.SIGUSR2
        told = [flags[at + 1] for at, flag in enumerate(flags[:-1]) if flag == EXIT_SIGNAL]
        told += [flag.partition("=")[2] for flag in flags if flag.startswith(f"{EXIT_SIGNAL}=")]
        return Signals[told[-1]] if told else Signals.SIGTERM


EXIT_SIGNAL = "--exit-signal"

LONG_STEP = 10.0
"""Seconds from which on the end of a step need only be known to a second or two."""
STEP_EDGE = 2.0
"""Seconds at either end of such a step in which its end may lie."""

_LEFT_LINE = re.compile(r"exiting program (after receiving \w+|after [\d.]+ minutes|at iteration \d+)")
"""Line of both after a save for the signal, for --exit-duration-in-mins, or for --exit-interval."""

_FLAGS_REFUSED_LINE = re.compile(
    r"\.py: error: ((?:unrecognized arguments|argument --|ambiguous option|the following arguments are required).*)"
)
"""Line of argparse about flags that it does not know, or whose values it cannot read, at the end of each rank."""


def megatron_dialect_of(checkout: Path) -> MegatronDialect:
    """Return the dialect of a checkout, by the text of its arguments. Raises OSError."""
    arguments = checkout / "megatron" / "training" / "arguments.py"
    text = arguments.read_text(encoding="utf-8", errors="replace")
    return MegatronDialect.SWISS_AI if "--trigger-path" in text else MegatronDialect.NVIDIA


@dataclass(kw_only=True, eq=False)
class MegatronProgram:
    """Reports and files of Megatron-LM."""

    dialect: MegatronDialect
    logs: Sequence[tuple[str, int]]
    """Logs of the ranks, each with its bytes before the attempt."""
    folder: Path
    """`--save` and `--load`, with the tracker."""
    trigger_folder: Path
    """`--trigger-path`, of this attempt alone."""
    total_steps: int
    """`--train-iters`."""

    def __post_init__(self) -> None:
        self._lines = [LogFollower(path, offset=offset) for path, offset in self.logs]
        self._newest = 0
        self._step_seconds: float | None = None
        self._step_seen = 0.0
        """Time at which the newest line of progress was read (monotonic)."""
        self._whole: set[int] = set()
        """Iterations of the checkpoints that were found complete."""
        self._said_to_save: int | None = None
        self._ending: ProgramEnding | None = None

    def steps(self) -> list[ObservedStep]:
        found = []
        for lines in self._lines:
            for line in lines.read():
                if (step := parse_iteration(line)) is not None:
                    if step.iteration > self._newest:
                        found.append(step)
                        self._newest, self._step_seen = step.iteration, time.monotonic()
                        self._step_seconds = step.seconds
                elif (iteration := parse_save(line)) is not None:
                    self._said_to_save = iteration
                else:
                    self._ending = _ending_of_line(line) or self._ending
        return found

    def checkpoints(self) -> list[FoundCheckpoint]:
        found = whole_checkpoints(self.folder, known=self._whole)
        self._whole = {checkpoint.iteration for checkpoint in found}
        return found

    def saving(self) -> int | None:
        begun = self._said_to_save
        return begun if begun is not None and begun > (tracked_iteration(self.folder) or 0) else None

    def is_printing(self) -> bool:
        return False

    def unmatched(self) -> list[str]:
        return []

    def ask_to_save(self) -> str | None:
        if self.dialect is not MegatronDialect.SWISS_AI:
            return "this Megatron-LM has no way to be asked for a checkpoint; set checkpoint.interval"
        self.trigger_folder.mkdir(parents=True, exist_ok=True)
        self.wait_inside_step()
        (self.trigger_folder / "save").touch()
        return None

    def wait_inside_step(self) -> None:
        """Return when the ranks of swiss-ai are inside a step, not at its end, as far as the log shows.

        After each step every rank looks for the signal and the trigger by itself. A request that comes during these
        looks is found by some ranks, which then save, while the others train on without end. It takes at most one and a
        half short steps, or a few seconds.
        """
        seconds = self._step_seconds
        if self.dialect is not MegatronDialect.SWISS_AI or seconds is None:
            return
        if seconds >= LONG_STEP:
            into = (time.monotonic() - self._step_seen) % seconds
            if not STEP_EDGE <= into <= seconds - STEP_EDGE:
                time.sleep(STEP_EDGE - into if into < STEP_EDGE else seconds - into + STEP_EDGE)
            return
        lines = [LogFollower(path, offset=log_size(path)) for path, _ in self.logs]
        deadline = time.monotonic() + 2 * seconds + 1
        while time.monotonic() < deadline:
            if any(parse_iteration(line) is not None for each in lines for line in each.read()):
                break
            time.sleep(0.02)
        time.sleep(seconds / 2)

    def leave_by_files(self) -> None:
        """Make swiss-ai save and leave by its own triggers: after a step it looks for `save` first, then `exit`."""
        self.trigger_folder.mkdir(parents=True, exist_ok=True)
        self.wait_inside_step()
        for name in ("save", "exit"):
            (self.trigger_folder / name).touch()

    def ending(self, exit_code: int | None) -> ProgramEnding | None:
        """Return its end by its log and checkpoints; the exit codes of the forks show nothing."""
        durable = self.checkpoints()
        if durable and durable[-1].iteration >= self.total_steps:
            return ProgramEnding(outcome="done", words=f"the last iteration, {durable[-1].iteration}, is saved")
        if self._ending is None and exit_code == 0 and (self.trigger_folder / "exit").exists():
            return ProgramEnding(outcome="left", words="its own exit file")
        return self._ending


def _ending_of_line(line: str) -> ProgramEnding | None:
    if (left := _LEFT_LINE.search(line)) is not None:
        return ProgramEnding(outcome="left", words=left[1].removeprefix("after receiving "))
    if (refused := _FLAGS_REFUSED_LINE.search(line)) is not None:
        return ProgramEnding(outcome="fatal", words=f"Megatron-LM refuses its flags: {refused[1]}")
    return None
