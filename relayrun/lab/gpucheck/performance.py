"""The parts `environment`, `speed` and `save`: the device and its speed."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from relayrun import __version__, places
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.model import ModelSection
from relayrun.control.rundir.records import CheckpointCommit, StartTimes
from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import (
    TRACE_FILE,
    CheckFailed,
    CheckSetup,
    PartFigures,
    run_program,
)
from relayrun.train.model.size import count_parameters, flops_per_token, memory_bytes, pad_to_multiple, peak_flops
from relayrun.train.reporting.environment import code_version, node_gpus

PROBE_BYTES = 1 << 28
DISK_SECONDS = 15.0
"""Time limit for all saves and the load, by the speed of the disk; a slow disk gets a model with fewer layers."""
LONGEST_KERNELS = 12


def measure_environment(setup: CheckSetup, figures: PartFigures) -> None:
    """Record machine and device. Raises CheckFailed if torch sees no GPU, unless the check is tiny."""
    figures.add("machine", describe_machine(setup))
    figures.add("nvml", [asdict(gpu) for gpu in node_gpus()])  # at rest
    found = run_program(setup, "device:measure_device", record=figures.update)
    if not setup.tiny and not found["gpus"]:
        raise CheckFailed("torch sees no GPU here; --tiny (TINY=1) walks the same way on CPUs")


def describe_machine(setup: CheckSetup) -> dict[str, Any]:
    """Return processors, memory and disk in bytes, and the commit of the code."""
    import psutil  # an extra; a login node imports this module without it

    commit, difference = code_version(places.CODE_ROOT)
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "disk_free_bytes": shutil.disk_usage(setup.path).free,
        "relayrun": __version__,
        "commit": commit + ("" if not difference else ", and changes"),
    }


def measure_save(setup: CheckSetup, figures: PartFigures) -> None:
    """Save a few times, kill the run, load. Raises CheckFailed."""
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
                {"hook": f"{runs.HOOKS_MODULE}:SavePaceHook", "options": {"interval": sizes.interval}},
                runs.cut_hook(cuts),
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


def save_stalls(lines: Sequence[dict[str, Any]], commits: Sequence[CheckpointCommit]) -> list[dict[str, Any]]:
    """Return for each save its stall, the time lost until it is durable, and the time until then, in seconds."""
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
    """Return the median seconds of an iteration before the first save, from end to end."""
    first = commits[0].iteration
    return statistics.median(value for number, value in seconds_of_iterations(lines).items() if 2 < number <= first)


def seconds_of_iterations(lines: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the seconds of each iteration, from end to end, without the waits of the check's hooks."""
    return {
        after["iteration"]: after["time"] - before["time"] - (after.get("hooks_seconds") or 0.0)
        for before, after in pairwise(lines)
    }


def affordable_sizes(setup: CheckSetup, write_speed: float, free: int) -> tuple[int, int]:
    """Return number of layers and number of saves for which disk space and time suffice."""
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
    """Return the longest kernels of a Chrome trace with their seconds; on a CPU its operations. `busy_seconds`: time in
    which at least one ran. `seconds`: from the first begin to the last end. `waits`: seconds of each wait of the host
    for the GPU."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kind = "kernel" if any(event.get("cat") == "kernel" for event in events) else "cpu_op"
    chosen = [event for event in events if event.get("cat") == kind and event.get("ph") == "X"]
    spent: dict[str, list[float]] = {}
    for event in chosen:
        entry = spent.setdefault(str(event["name"]), [0.0, 0])
        entry[0] += float(event.get("dur", 0)) / 1e6
        entry[1] += 1
    longest = sorted(spent.items(), key=lambda item: -item[1][0])[:LONGEST_KERNELS]
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))) for event in chosen)
    busy, end = 0.0, float("-inf")
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    runtime = [event for event in events if event.get("cat") == "cuda_runtime"]
    return {
        "kind": kind,
        "waits": [float(event.get("dur", 0)) / 1e6 for event in runtime if "Synchronize" in event["name"]],
        "events": len(chosen),
        "seconds": (end - spans[0][0]) / 1e6 if spans else 0.0,
        "busy_seconds": busy / 1e6,
        "longest": [{"name": name[:160], "seconds": value, "calls": int(calls)} for name, (value, calls) in longest],
    }


def measure_speed(setup: CheckSetup, figures: PartFigures) -> None:
    """Find the micro-batch, train, and record the figures. Raises CheckFailed."""
    sizes = setup.sizes
    memory = setup.memory_bytes or None
    config = searched_config(setup)
    first = first_micro_batch(config, sizes.vocabulary, memory, sizes.largest_batch)
    found = run_batch_search(setup, config, first, largest=sizes.largest_batch)
    figures.add("search", found)
    fitting = [entry for entry in found["tries"] if entry["fits"]]
    if not fitting:
        raise CheckFailed("not even one sequence of the model fits into the memory of this device")
    micro_batch = max(fitting, key=lambda entry: entry["tokens_per_second"])["micro_batch"]

    last = sizes.warm_up + sizes.measured + 1

    def timed(micro_batch: int) -> tuple[Run, RunConfig]:
        asked = large_run_sections(setup, micro_batch=micro_batch, steps=last)
        asked["debug"] = {"profile": "torch", "profile_step_start": last, "profile_step_end": last}
        return runs.train_until(setup, "speed", asked, steps=last), runs.checked_config(setup, "speed", asked)

    try:
        run, config = timed(micro_batch)
    except CheckFailed as error:  # a run needs slightly more memory than the search
        if micro_batch == 1 or "out of memory" not in error.message.lower():
            raise
        figures.add("halved", error.message)
        micro_batch //= 2
        run, config = timed(micro_batch)
    lines = runs.iteration_lines(run, 1)
    figures.add("training", training_speed(setup, config, lines, sizes.warm_up, sizes.measured))
    estimate = memory_bytes(config, sizes.vocabulary)
    figures.add(
        "memory",
        {
            "device_bytes": memory,
            "peak_bytes": max(line["memory_bytes"] for line in lines),
            "estimate_bytes": estimate.total,
            "estimate": {"state": estimate.state, "activations": estimate.activations, "loss": estimate.loss},
        },
    )
    figures.add("trace", keep_trace(setup, run))


def searched_config(setup: CheckSetup) -> RunConfig:
    """Return the config of the large model whose micro-batch is searched."""
    sections = large_run_sections(setup, micro_batch=1, steps=1) | {
        "parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "job": {"ntasks_per_node": 1},
    }
    return runs.checked_config(setup, "search", sections)


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


def first_micro_batch(config: RunConfig, vocabulary: int, memory: int | None, largest: int) -> int:
    """Return the first micro-batch to try: half of the largest power of two that fits by the estimate."""
    fits = 1
    while memory is not None and 2 * fits <= largest:
        training = config.training.model_copy(update={"micro_batch_size": 2 * fits})
        if memory_bytes(config.model_copy(update={"training": training}), vocabulary).total > 0.9 * memory:
            break
        fits *= 2
    return max(1, fits // 2)


def run_batch_search(setup: CheckSetup, config: RunConfig, first: int, *, largest: int) -> dict[str, Any]:
    """Try micro-batches; tries before a crash of the program count if one of them fits."""
    file = setup.parts / "search-resolved.yaml"
    file.write_text(resolve.dump_run_config(config), encoding="utf-8")
    found: dict[str, Any]
    try:
        found = run_program(setup, "models:search_largest_batch", config=file, first=first, largest=largest)
    except CheckFailed as error:
        if not any(entry["fits"] for entry in (error.found or {}).get("tries", [])):
            raise
        found = error.found | {"ended": error.message}
    return {"first": first, **found}


def training_speed(
    setup: CheckSetup, config: RunConfig, lines: list[dict[str, Any]], warm_up: int, measured: int
) -> dict[str, Any]:
    """Return tokens per second and MFU of `measured` iterations after `warm_up` ones, in wall time."""
    began, ended = lines[warm_up - 1], lines[warm_up + measured - 1]
    seconds = (ended["time"] - began["time"]) / measured
    training = config.training
    tokens = training.global_batch_size * training.seq_length
    each = flops_per_token(config.model, setup.sizes.vocabulary, training.seq_length)
    flops = each * tokens / seconds / config.world_size
    peak = peak_flops(setup.device) if training.resolved_precision == "bf16" else None
    window = lines[warm_up : warm_up + measured]
    return {
        "precision": training.resolved_precision,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "seq_length": training.seq_length,
        "ranks": config.world_size,
        "iterations": measured,
        "step_seconds": seconds,
        "step_seconds_each": [line["step_seconds"] for line in window],
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_gpu": tokens / seconds / config.world_size,
        "tflops_per_gpu": flops / 1e12,
        "mfu": None if peak is None else flops / peak,
        "first_step_seconds": lines[0]["step_seconds"],
        "data_share": statistics.median(line["data_seconds"] / line["step_seconds"] for line in window),
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
