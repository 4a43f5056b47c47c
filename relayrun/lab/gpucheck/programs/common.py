"""Common code of all programs on ranks: arguments, device, timing, and the search for the largest micro-batch."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from relayrun.control.scheduler.local_srun import quiet_ports
from relayrun.files import write_json
from relayrun.lab.gpucheck.setup import CheckSetup


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """One rank of a program."""

    setup: CheckSetup
    output: Path
    rank: int
    device: torch.device
    options: argparse.Namespace

    @classmethod
    def begin(cls, *more: str) -> RankProgram:
        """Parse the arguments, `more` by name, and select this rank's device."""
        parser = argparse.ArgumentParser()
        for name in ("setup", "output", *more):
            parser.add_argument(f"--{name}", required=True)
        options = parser.parse_args()
        set_rendezvous(os.environ)
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(1)
        return cls(
            setup=CheckSetup.read(Path(options.setup)),
            output=Path(options.output),
            rank=int(os.environ["RANK"]),
            device=device,
            options=options,
        )

    def write(self, figures: dict[str, Any]) -> None:
        """Write the figures measured so far; on rank 0 only."""
        if self.rank == 0:
            write_json(self.output, figures, durable=False)


def run_measurement(*measurements: Callable[[], None]) -> None:
    """Run the function that the first argument names: `python -m MODULE NAME --setup=FILE --output=FILE ...`."""
    name = sys.argv.pop(1)
    next(each for each in measurements if each.__name__ == name)()


def set_rendezvous(environment: MutableMapping[str, str]) -> None:
    """Set MASTER_ADDR and MASTER_PORT for ranks started by srun: the batch host, where rank 0 runs."""
    host, job = environment.get("SLURM_LAUNCH_NODE_IPADDR"), environment.get("SLURM_JOB_ID", "")
    if host and job.isdecimal():
        environment.setdefault("MASTER_ADDR", host)
        ports = quiet_ports() or range(20_000, 40_000)  # each rank computes it: a port for each job
        environment.setdefault("MASTER_PORT", str(ports[int(job) % len(ports)]))


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def median_seconds(action: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Return the median seconds of a call after three warm-up calls, by CUDA events on a GPU."""
    for _ in range(3):
        action()
    wait_for(device)
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            action()
            found.append(time.perf_counter() - started)
        return statistics.median(found)
    marks: list[Any] = [cuda_event() for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        action()
        mark.record()
    wait_for(device)
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))) / 1000


OUT_OF_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Texts of out-of-memory errors that have no class of their own in torch."""


MicroBatchTry = dict[str, Any]


def search_micro_batch(first: int, largest: int, attempt: Callable[[int], MicroBatchTry]) -> list[MicroBatchTry]:
    """Try `first`, then double it while it fits and is at most `largest`, or halve it until it fits. Returns all tries
    in order. `attempt(micro_batch)` returns a record with `fits`."""
    tries = [attempt(first)]
    while tries[-1]["fits"] and 2 * tries[-1]["micro_batch"] <= largest:
        tries.append(attempt(2 * tries[-1]["micro_batch"]))
    if not tries[0]["fits"]:
        while not tries[-1]["fits"] and tries[-1]["micro_batch"] > 1:
            tries.append(attempt(tries[-1]["micro_batch"] // 2))
    return tries


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error of torch, or of a library below it, means out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word.lower() in str(error).lower() for word in OUT_OF_MEMORY_WORDS)
    )
