"""The parts `environment`, `speed` and `save`: the device and its speed."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from relayrun import __version__, places
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.model import ModelSection
from relayrun.control.rundir.records import StartTimes
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm import checkout_state
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import TRACE_FILE, CheckFailed, CheckSetup, PartFigures, run_program
from relayrun.lab.small_run import merge_sections
from relayrun.train.model.size import count_parameters, flops_per_token, memory_bytes, pad_to_multiple, peak_flops
from relayrun.train.reporting.environment import node_gpus

PROBE_BYTES = 1 << 28
SAVES = 3
DISK_SECONDS = 15.0
"""Time limit for all saves and the load, by the speed of the disk; a slow disk gets a model with fewer layers."""
OUT_OF_MEMORY_WORDS = ("out of memory", "alloc_failed")
"""Texts of errors of torch, and of cuBLAS and cuDNN, that mean out of memory."""
LONGEST_KERNELS = 12


def measure_environment(setup: CheckSetup, figures: PartFigures) -> None:
    """Record machine and device. Raises CheckFailed if torch sees no GPU, unless the check is tiny."""
    commit, difference = checkout_state(places.CODE_ROOT)
    commit += ", and changes" if difference and not commit.startswith("unknown") else ""
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "relayrun": __version__, "commit": commit}
    figures.add("machine", machine)
    figures.add("nvml", node_gpus())  # at rest
    found = run_program(setup, "device:measure_device", record=figures.update)
    if not setup.tiny and not found["gpus"]:
        raise CheckFailed("torch sees no GPU here; --tiny (TINY=1) walks the same way on CPUs")


def measure_save(setup: CheckSetup, figures: PartFigures) -> None:
    """Save a few times, kill the run, load. Raises CheckFailed."""
    sizes = setup.sizes
    write_speed = disk_speed(setup.path)
    free = shutil.disk_usage(setup.path).free
    layers = affordable_layers(setup, write_speed, free)
    figures.add("disk", {"write_bytes_per_second": write_speed, "free_bytes": free})
    cuts = [{"signal": "SIGKILL", "saves": SAVES}, {"signal": "SIGKILL", "iteration": 0}]
    pace = {"hook": f"{runs.HOOKS_MODULE}:SavePaceHook", "options": {"interval": sizes.interval}}
    changes: dict[str, dict[str, Any]] = {
        "model": {"num_layers": layers},
        "training": {"global_batch_size": setup.ranks, "hooks": [pace, runs.cut_hook(cuts)]},
        "checkpoint": {"interval": sizes.interval, "keep_last": 1, "async_save": True},
    }
    large = large_run_sections(setup, micro_batch=1, steps=sizes.interval * (SAVES + 2))
    sections = merge_sections(large, changes)
    chain = runs.start_run(setup, "save", sections)
    chain.process.wait()
    commits = chain.run.attempt(1).read_commits()
    lines = runs.iteration_lines(chain.run, 1)
    if len(commits) < SAVES:
        raise CheckFailed(f"{len(commits)} of {SAVES} saves are durable: {chain.why()}", where=chain.log)
    size = sum(commits[-1].files.values())
    held = {line["iteration"]: line["save_seconds"] for line in lines}
    found = [
        {"stall_seconds": held[commit.iteration + 1], "durable_after_seconds": commit.seconds}
        for commit in commits[:SAVES]
    ]
    about = {"layers": layers, "layers_of_the_model": sizes.model["num_layers"], "bytes": size}
    figures.add("saves", {**about, "saves": found})

    copy = run_program(setup, "device:measure_host_copy", bytes=size // setup.ranks)
    # each rank copies its part at the same time
    figures.add("copy", {**copy, "seconds_of_a_save": size / setup.ranks / copy["bytes_per_second"]})

    started = StartTimes.read(chain.run.attempt(2).started) if len(chain.run.attempt_numbers()) > 1 else None
    if started is None or not runs.iteration_lines(chain.run, 2):
        raise CheckFailed(f"the successor of the killed run did not train: {chain.why()}", where=chain.log)
    load = started.loaded - started.initialised
    times = {
        "import_seconds": started.imported - started.process,
        "set_up_seconds": started.initialised - started.imported,
    }
    figures.add("load", {"seconds": load, "bytes_per_second": size / load, **times})
    runs.remove_checkpoints(chain.run)


def affordable_layers(setup: CheckSetup, write_speed: float, free: int) -> int:
    """Return the number of layers of a model whose saves fit disk space and time; at least one layer. Raises
    CheckFailed if the disk has no room for two checkpoints of that."""
    sizes = setup.sizes
    layers = int(sizes.model["num_layers"])
    while True:
        model = ModelSection.model_validate({**sizes.model, "num_layers": layers})
        count = count_parameters(model, pad_to_multiple(sizes.vocabulary, model.make_vocab_size_divisible_by))
        size = count * (14 if setup.precision == "bf16" else 12)
        fits = 2.3 * size < free
        if fits and ((SAVES + 1) * size / write_speed < DISK_SECONDS or layers == 1):
            return layers
        if layers == 1:
            raise CheckFailed(f"the disk has {free:,} bytes free; two checkpoints of one layer have {2 * size:,}")
        layers //= 2


def disk_speed(folder: Path) -> float:
    """Return the bytes per second of writing and syncing a file in this folder."""
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


def summarize_trace(path: Path) -> dict[str, Any]:
    """Return the seconds of a Chrome trace's longest kernels; on a CPU its operations. `busy_seconds`: time in which at
    least one ran. `seconds`: from the first begin to the last end. `waits`: seconds of each wait of the host for the
    GPU."""
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    chosen = kernels or [event for event in events if event.get("cat") == "cpu_op"]
    spent: Counter[str] = Counter()
    for event in chosen:
        spent[event["name"][:160]] += event["dur"] / 1e6
    busy, end = 0.0, float("-inf")
    spans = sorted((float(event["ts"]), float(event["ts"] + event["dur"])) for event in chosen)
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    waits = [event for event in events if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]]
    return {
        "waits": [event["dur"] / 1e6 for event in waits],
        "seconds": (end - spans[0][0]) / 1e6 if spans else 0.0,
        "busy_seconds": busy / 1e6,
        "longest": [{"name": name, "seconds": seconds} for name, seconds in spent.most_common(LONGEST_KERNELS)],
    }


def measure_speed(setup: CheckSetup, figures: PartFigures) -> None:
    """Train with the micro-batch that fits, and record the figures. Raises CheckFailed."""
    sizes = setup.sizes
    memory = setup.memory_bytes or None
    last = sizes.warm_up + sizes.measured + 1
    smallest = runs.checked_config(setup, "speed", large_run_sections(setup, micro_batch=1, steps=last))
    micro_batch = estimated_micro_batch(smallest, sizes.vocabulary, memory)
    while True:
        asked = large_run_sections(setup, micro_batch=micro_batch, steps=last)
        asked["debug"] = {"profile": "torch", "profile_step_start": last, "profile_step_end": last}
        try:
            run = runs.train_until(setup, "speed", asked, steps=last)
            break
        except CheckFailed as error:
            if micro_batch == 1 or not any(word in error.message.lower() for word in OUT_OF_MEMORY_WORDS):
                raise
            figures.add("halved", error.message)
            micro_batch //= 2
    config, lines = runs.checked_config(setup, "speed", asked), runs.iteration_lines(run, 1)
    figures.add("training", training_speed(setup, config, lines, sizes.warm_up, sizes.measured))
    peak, estimate = max(line["memory_bytes"] for line in lines), memory_bytes(config, sizes.vocabulary).total
    figures.add("memory", {"device_bytes": memory, "peak_bytes": peak, "estimate_bytes": estimate})
    figures.add("trace", keep_trace(setup, run))


def large_run_sections(setup: CheckSetup, *, micro_batch: int, steps: int) -> dict[str, dict[str, Any]]:
    """Return the sections of a run of the large model."""
    sizes = setup.sizes
    return {
        "model": dict(sizes.model),
        "training": {
            "steps": steps,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * sizes.micro_batches * setup.ranks,
            "seq_length": sizes.seq_length,
            "manual_gc_interval": 1000,
        },
        "optimizer": {"lr": 1e-4, "lr_warmup_steps": 0},
    }


def estimated_micro_batch(config: RunConfig, vocabulary: int, memory: int | None) -> int:
    """Return the largest power of two that fits into the memory of a GPU by the estimate; 1 without a GPU."""
    fits = 1
    while memory is not None:
        training = config.training.model_copy(update={"micro_batch_size": 2 * fits})
        if memory_bytes(config.model_copy(update={"training": training}), vocabulary).total > 0.9 * memory:
            break
        fits *= 2
    return fits


def training_speed(
    setup: CheckSetup, config: RunConfig, lines: list[dict[str, Any]], warm_up: int, measured: int
) -> dict[str, Any]:
    """Return tokens per second and MFU of `measured` iterations after `warm_up` ones, in wall time."""
    seconds = (lines[warm_up + measured - 1]["time"] - lines[warm_up - 1]["time"]) / measured
    training = config.training
    speed = training.global_batch_size * training.seq_length / seconds / config.world_size
    flops = flops_per_token(config.model, setup.sizes.vocabulary, training.seq_length) * speed
    peak = peak_flops(setup.device) if training.resolved_precision == "bf16" else None
    return {
        "precision": training.resolved_precision,
        "micro_batch_size": training.micro_batch_size,
        "seq_length": training.seq_length,
        "tokens_per_second_per_gpu": speed,
        "mfu": None if peak is None else flops / peak,
    }


def keep_trace(setup: CheckSetup, run: Run) -> dict[str, Any]:
    """Summarize the trace and keep it, packed, in the folder of the check. Raises CheckFailed without a trace."""
    files = sorted((run.debug_of(1) / "profile").glob("rank-*.json"))
    if not files:
        raise CheckFailed(f"the profiler left no trace in {run.debug_of(1) / 'profile'}")
    packed = setup.path / TRACE_FILE
    with files[0].open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:  # trace viewers open it
        shutil.copyfileobj(source, target)
    return {**summarize_trace(files[0]), "file": packed.name, "file_bytes": packed.stat().st_size}
