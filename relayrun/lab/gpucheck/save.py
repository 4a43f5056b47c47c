"""The part `save`: how long an asynchronous save holds training, against a plain copy of as many bytes; and a load.

One micro-batch an iteration: the less there is to compute, the less a copy can hide behind it. A hook holds training
before a save until the one before it is durable, so that none waits for the disk of another. The run is killed when
enough saves are durable; its successor loads the newest of them.

A save holds training by `Step.save_seconds`: while its parts are listed, and before the first update while they are
copied. Beside that stands what it costs until it is durable, with the iterations that were slower because of it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from relayrun.config.sections.model import ModelSection
from relayrun.control.rundir.records import CheckpointCommit, StartTimes
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.ranks import run_program
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures
from relayrun.train.model.size import count_parameters, pad_to_multiple

SAVE_HOOKS_MODULE = "relayrun.lab.gpucheck.programs.hooks"
HOST_COPY_PROGRAM = "relayrun.lab.gpucheck.programs.host_copy"
PROBE_BYTES = 1 << 28
DISK_SECONDS = 75.0
"""How long all saves and the load of this part may keep the disk busy, by its speed; else the model gets fewer
layers."""


def measure_save(setup: CheckSetup, figures: PartFigures) -> None:
    """Save a few times, be killed, load. Raises CheckFailed."""
    sizes = setup.sizes
    write_speed = disk_speed(setup.path)
    free = shutil.disk_usage(setup.path).free
    layers, saves = affordable_sizes(setup, write_speed, free)
    figures.add("disk", {"write_bytes_per_second": write_speed, "free_bytes": free})
    cuts = [{"signal": "SIGKILL", "saves": saves}, {"signal": "SIGKILL", "iteration": 0}]
    sections = {
        "model": {**sizes.model, "num_layers": layers},
        "training": {
            "steps": sizes.interval * (saves + 2),
            "micro_batch_size": 1,
            "global_batch_size": setup.ranks,
            "seq_length": sizes.seq_length,
            "manual_gc_interval": 1000,
            "hooks": [
                {"hook": f"{SAVE_HOOKS_MODULE}:Pace", "options": {"interval": sizes.interval}},
                {"hook": f"{SAVE_HOOKS_MODULE}:Cut", "options": {"cuts": cuts}},
            ],
        },
        "optimizer": {"lr": 1e-4, "lr_warmup_steps": 0},
        "checkpoint": {"interval": sizes.interval, "keep_last": 1, "async_save": True},
    }
    chain = runs.start_run(setup, "save", sections)
    chain.process.wait()
    commits = chain.run.attempt(1).read_commits()
    lines = runs.iteration_lines(chain.run, 1)
    if len(commits) < saves:
        raise CheckFailed(f"{len(commits)} of {saves} saves are durable: {chain.why()}", where=chain.log)
    size = sum(commits[-1].files.values())
    found = save_stalls(lines, commits[:saves])
    about = {"layers": layers, "layers_of_the_model": sizes.model["num_layers"], "bytes": size}
    figures.add("saves", {**about, "saves": found, "step_seconds": usual_step_seconds(lines, commits)})

    copy = run_program(setup, HOST_COPY_PROGRAM, bytes=size // setup.ranks)
    # each rank copies its own part, at the same time as the others
    figures.add("copy", {**copy, "seconds_of_a_save": size / setup.ranks / copy["bytes_per_second"]})

    started = StartTimes.read(chain.run.attempt(2).started) if len(chain.run.attempt_numbers()) > 1 else None
    if started is None or not runs.iteration_lines(chain.run, 2):
        raise CheckFailed(f"the successor of the killed run did not train: {chain.why()}", where=chain.log)
    load = started.loaded - started.initialised
    figures.add(
        "load",
        {
            "seconds": load,
            "bytes_per_second": size / load,
            "import_seconds": started.imported - started.process,
            "set_up_seconds": started.initialised - started.imported,
        },
    )
    runs.remove_checkpoints(chain.run)


def save_stalls(lines: Sequence[dict[str, Any]], commits: Sequence[CheckpointCommit]) -> list[dict[str, Any]]:
    """Return of each save how long it held training, what it cost until it was durable, and how long that took."""
    durations = seconds_of_iterations(lines)
    ends = {line["iteration"]: line["time"] for line in lines}
    held = {line["iteration"]: line["save_seconds"] for line in lines}
    usual = usual_step_seconds(lines, commits)
    found = []
    for commit in commits:
        window = [commit.iteration + 1]
        while window[-1] + 1 in ends and ends[window[-1]] < commit.time:
            window.append(window[-1] + 1)
        found.append(
            {
                "iteration": commit.iteration,
                "stall_seconds": held[commit.iteration + 1],
                "lost_seconds": sum(durations[number] - usual for number in window),
                "durable_after_seconds": commit.seconds,
            }
        )
    return found


def usual_step_seconds(lines: Sequence[dict[str, Any]], commits: Sequence[CheckpointCommit]) -> float:
    """Return the median seconds of an iteration before the first save, from the end of one to the end of the next."""
    first = commits[0].iteration
    return statistics.median(value for number, value in seconds_of_iterations(lines).items() if 2 < number <= first)


def seconds_of_iterations(lines: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return how long each iteration took, from the end of the one before; without the waits of our own hooks."""
    return {
        after["iteration"]: after["time"] - before["time"] - (after.get("hooks_seconds") or 0.0)
        for before, after in pairwise(lines)
    }


def affordable_sizes(setup: CheckSetup, write_speed: float, free: int) -> tuple[int, int]:
    """Return how many layers the model has and how often it is saved, so that disk and time suffice."""
    sizes = setup.sizes
    layers, saves = int(sizes.model["num_layers"]), 3
    while True:
        model = ModelSection.model_validate({**sizes.model, "num_layers": layers})
        count = count_parameters(model, pad_to_multiple(sizes.vocabulary, model.make_vocab_size_divisible_by))
        size = count * (14 if setup.precision == "bf16" else 12)
        if 2.3 * size < free and (saves + 1) * size / write_speed < DISK_SECONDS:
            return layers, saves
        if saves > 2:
            saves -= 1
        elif layers > 1:
            layers = max(1, layers // 2)
        elif 2.3 * size < free:
            return layers, saves
        else:
            raise CheckFailed(f"the disk has {free:,} bytes free; two checkpoints of one layer have {2 * size:,}")


def disk_speed(folder: Path) -> float:
    """Return the bytes per second of a file that is written and synced there."""
    block = os.urandom(1 << 24)
    count = PROBE_BYTES // len(block)
    path = folder / "probe"
    try:
        with path.open("wb", buffering=0) as file:
            file.write(block)
            os.fsync(file.fileno())
            started = time.perf_counter()
            for _ in range(count):
                file.write(block)
            os.fsync(file.fileno())
            return count * len(block) / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
