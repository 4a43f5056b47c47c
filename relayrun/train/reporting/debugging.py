"""Debugging of a rank (`debug:`): NCCL's log, profilers, the environment file, a node's memory log.

torch is imported late: nsys must wrap the process before its first CUDA call. A thread of the node's first rank writes
the memory log; a failure ends the thread with one log line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.config.compose.schema import DebugSection, RunConfig
from relayrun.control.rundir.records import AttemptOutcome, AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.tools import nsys_command
from relayrun.errors import ConfigError, warned
from relayrun.files import write_atomic
from relayrun.train.hooks import Hook, Step, StepStart
from relayrun.train.reporting import environment
from relayrun.train.reporting.environment import node_gpus

log = logging.getLogger(__name__)


def write_surroundings(
    run: Run, begin: AttemptStart, config: RunConfig, *, rank: int, node: str, first_of_node: bool
) -> None:
    """Write compute_environment.txt (rank 0) and memory_logging-<node>.txt (first rank of a node) in threads.

    Training does not wait: git and the driver may be slow.
    """
    folder = run.debug_of(begin.attempt)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("nothing is noted of this attempt's surroundings: %s", error)
        return
    if rank == 0:
        path = folder / "compute_environment.txt"
        threading.Thread(target=_write_environment, args=(path, run, begin, config), daemon=True).start()
    if first_of_node and config.debug.memory_interval:
        path = folder / f"memory_logging-{node}.txt"
        arguments = (path, config.debug.memory_interval)
        threading.Thread(target=_write_memory_log, args=arguments, name="memory", daemon=True).start()


def _write_environment(path: Path, run: Run, begin: AttemptStart, config: RunConfig) -> None:
    try:
        text = environment.describe_environment(
            config, begin, root=places.CODE_ROOT, job_script=run.job_script, environment=os.environ
        )
        content = text.encode(errors="surrogateescape")
        write_atomic(path, content, mode=0o600, durable=False)  # it holds the difference to the commit
    except Exception as error:
        log.warning("%s not written: %s", path.name, error)


GIB = 1 << 30


def memory_sample() -> str:
    """Return the memory in use as one line: `host 12.3 of 95.0 GiB`, then `gpu 0: 1.2 of 94.0 GiB` per GPU."""
    import psutil

    memory = psutil.virtual_memory()
    used = [f"host {(memory.total - memory.available) / GIB:.1f} of {memory.total / GIB:.1f} GiB"]
    used += [
        f"gpu {gpu['index']}: {_gib(gpu['memory_used'])} of {_gib(gpu['memory_total'])} GiB" for gpu in node_gpus()
    ]
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {', '.join(used)}"


def _gib(mebibytes: str) -> str:
    """Some devices do not report their memory."""
    return f"{int(mebibytes) / 1024:.1f}" if mebibytes.isdecimal() else "?"


def _write_memory_log(path: Path, interval: float) -> None:
    """Append a line now and every `interval` seconds, until this process ends."""
    with warned(log, "memory is no longer logged"):
        while True:
            with path.open("a", encoding="utf-8") as file:
                file.write(memory_sample() + "\n")
            time.sleep(interval)


UNDER_NSYS = "RELAYRUN_UNDER_NSYS"


def enter_nsys(debug: DebugSection, folder: Path, rank: int) -> None:
    """Replace this process by nsys, which restarts the program, if this rank is to be profiled by nsys.

    Raises ConfigError on every rank if nsys is missing.
    """
    if debug.profile != "nsys" or UNDER_NSYS in os.environ:
        return
    if shutil.which("nsys") is None:
        raise ConfigError(
            "debug.profile=nsys (NSYS_PROFILER=true), but there is no nsys on the PATH of the ranks",
            hint="install Nsight Systems in the ranks' environment, or use debug.profile=torch",
        )
    if rank in debug.profile_ranks:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[UNDER_NSYS] = "1"
        command = [*nsys_command(f"{folder}/rank-{rank:04}", debug.nsys_options), *sys.orig_argv]
        sys.stdout.flush()
        os.execvp(command[0], command)


def log_nccl(folder: Path, *, node: str, rank: int) -> None:
    """Send NCCL's log to a file of this rank; call it before the first communicator."""
    with warned(log, "NCCL's log goes to the job's"):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("NCCL_DEBUG", "INFO")
        os.environ["NCCL_DEBUG_FILE"] = str(folder / f"{node}-rank-{rank:04}.log")


class Profiler(Hook):
    """Profiles the configured iterations on the chosen ranks."""

    def __init__(self, debug: DebugSection, *, rank: int, folder: Path, say: Callable[[str], None]) -> None:
        self._debug = debug
        self._active = debug.profile is not None and rank in debug.profile_ranks
        self._trace = folder / f"rank-{rank:04}.json"
        self._say = say
        self._profile: contextlib.ExitStack | None = None

    def before_step(self, start: StepStart) -> None:
        first, last = self._debug.profile_step_start, self._debug.profile_step_end
        if self._active and self._profile is None and first <= start.iteration <= last:
            self._profile = contextlib.ExitStack()
            self._profile.enter_context(_nsys_range() if self._debug.profile == "nsys" else _torch_profile(self._trace))

    def after_step(self, step: Step) -> None:
        if self._profile is not None and step.iteration >= self._debug.profile_step_end:
            self._stop()

    def at_end(self, outcome: AttemptOutcome) -> None:
        self._stop()

    def _stop(self) -> None:
        """End a profile. A trace that cannot be written must not stop training."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._active = False
        try:
            profile.close()
            self._say(f"profiled by {self._debug.profile}; traces in {self._trace.parent}")
        except (OSError, RuntimeError) as error:
            log.warning("no profile: %s", error)


@contextlib.contextmanager
def _torch_profile(trace: Path) -> Iterator[None]:
    """Profile CPU and GPU operations by `torch.profiler`, and write the trace."""
    import torch

    with torch.profiler.profile(record_shapes=True) as profile:
        yield
    trace.parent.mkdir(parents=True, exist_ok=True)
    temporary = trace.with_name(f".tmp-{trace.name}")
    profile.export_chrome_trace(str(temporary))
    os.replace(temporary, trace)


@contextlib.contextmanager
def _nsys_range() -> Iterator[None]:
    """Mark the capture range of the nsys around this process; NVTX ranges name the operations. Needs CUDA."""
    import torch
    from torch.autograd import profiler

    if not torch.cuda.is_available():
        yield
        return
    ranges: Any = profiler.emit_nvtx
    cuda: Any = torch.cuda
    cuda.synchronize()
    cuda.profiler.start()
    with ranges(record_shapes=True):
        yield
        cuda.synchronize()
    cuda.profiler.stop()
