"""Common code of all programs on ranks: arguments, device and timing."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(action: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Return the median seconds of a call after three warm-up calls."""
    found = []
    for _ in range(3 + repeats):
        wait_for(device)
        started = time.perf_counter()
        action()
        wait_for(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[3:])
