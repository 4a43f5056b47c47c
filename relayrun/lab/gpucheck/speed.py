"""The part `speed`: a Llama of 1B parameters in bf16, as fast as it gets here, and where its time and memory go.

The micro-batch is found by trying. Then one training run: iterations that warm up, iterations that are timed as they
are (from the end of one to the end of another, so that nothing between them is forgotten), some that are timed by
part, one that is traced. A second run has `training.deterministic`, which says what the switch costs.
"""

from __future__ import annotations

import statistics
from typing import Any

from relayrun.config.compose import compose
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck import runs, trace
from relayrun.lab.gpucheck.ranks import run_program
from relayrun.lab.gpucheck.setup import TRACE_FILE, CheckFailed, CheckSetup, PartFigures
from relayrun.train.model.size import flops_per_token, memory_bytes, peak_flops

SEARCH_PROGRAM = "relayrun.lab.gpucheck.programs.batch"
STEP_PARTS_HOOK = "relayrun.lab.gpucheck.programs.parts:StepPartsHook"
DETERMINISTIC_STEPS = (2, 4)
"""Iterations of the second run: to warm up, and timed."""


def measure_speed(setup: CheckSetup, figures: PartFigures) -> None:
    """Find the batch, train, and note what came of it. Raises CheckFailed."""
    sizes = setup.sizes
    memory = setup.memory_bytes or None
    searched = large_run_sections(setup, micro_batch=1, steps=1) | {
        "parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "job": {"ntasks_per_node": 1},
    }
    config = runs.checked_config(setup, "search", searched)
    first = first_micro_batch(config, sizes.vocabulary, memory, sizes.largest_batch)
    found = run_batch_search(setup, config, first)
    figures.add("search", found)
    fitting = [entry for entry in found["tries"] if entry["fits"]]
    if not fitting:
        raise CheckFailed("not even one sequence of the model fits into the memory of this device")
    micro_batch = max(fitting, key=lambda entry: entry["tokens_per_second"])["micro_batch"]

    last = sizes.warm_up + sizes.measured + sizes.by_part + 1
    parts = {"first": last - sizes.by_part, "last": last - 1}

    def timed(micro_batch: int) -> tuple[Run, RunConfig]:
        asked = large_run_sections(setup, micro_batch=micro_batch, steps=last)
        asked["training"]["hooks"] = [{"hook": STEP_PARTS_HOOK, "options": parts}]
        asked["debug"] = {"profile": "torch", "profile_step_start": last, "profile_step_end": last}
        return runs.train_until(setup, "speed", asked, steps=last), runs.checked_config(setup, "speed", asked)

    try:
        run, config = timed(micro_batch)
    except CheckFailed as error:  # a run has a little more in memory than the search had
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
    figures.add("by_part", seconds_by_part(runs.read_notes(run, "parts")))
    figures.add("trace", keep_trace(setup, run))

    warm_up, measured = DETERMINISTIC_STEPS
    again = large_run_sections(setup, micro_batch=micro_batch, steps=warm_up + measured)
    again["training"]["deterministic"] = True
    try:
        run = runs.train_until(setup, "speed-deterministic", again, steps=warm_up + measured)
    except CheckFailed as error:  # it may need more memory; whether the switch works, the part `resume` says
        figures.add("deterministic", {"not_measured": error.message})
    else:
        config = runs.checked_config(setup, "speed-deterministic", again)
        figures.add("deterministic", training_speed(setup, config, runs.iteration_lines(run, 1), warm_up, measured))


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
    """Return the micro-batch to begin with: half of the largest power of two that fits by the estimate."""
    fits = 1
    while memory is not None and 2 * fits <= largest:
        training = config.training.model_copy(update={"micro_batch_size": 2 * fits})
        if memory_bytes(config.model_copy(update={"training": training}), vocabulary).total > 0.9 * memory:
            break
        fits *= 2
    return max(1, fits // 2)


def run_batch_search(setup: CheckSetup, config: RunConfig, first: int) -> dict[str, Any]:
    """Try micro-batches; what was tried before the program died counts, too, if one of them fits."""
    file = setup.path / "configs" / "search-resolved.yaml"
    file.write_text(compose.dump_run_config(config), encoding="utf-8")
    found: dict[str, Any]
    try:
        found = run_program(setup, SEARCH_PROGRAM, config=file, first=first)
    except CheckFailed as error:
        if not any(entry["fits"] for entry in (error.found or {}).get("tries", [])):
            raise
        found = error.found | {"ended": error.message}
    return {"first": first, **found}


def training_speed(
    setup: CheckSetup, config: RunConfig, lines: list[dict[str, Any]], warm_up: int, measured: int
) -> dict[str, Any]:
    """Return tokens per second and MFU of `measured` iterations after `warm_up` ones, by the clock on the wall."""
    began, ended = lines[warm_up - 1], lines[warm_up + measured - 1]
    seconds = (ended["time"] - began["time"]) / measured
    training = config.training
    tokens = training.global_batch_size * training.seq_length
    flops = (
        flops_per_token(config.model, setup.sizes.vocabulary, training.seq_length)
        * tokens
        / seconds
        / config.world_size
    )
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


def seconds_by_part(notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median seconds of each part of an iteration. Raises CheckFailed where the hook noted none."""
    if not notes:
        raise CheckFailed("the hook that times an iteration by part noted nothing")
    return {
        "iterations": len(notes),
        "seconds": {name: statistics.median(note["seconds"][name] for note in notes) for name in notes[0]["seconds"]},
        "total": statistics.median(note["total"] for note in notes),
    }


def keep_trace(setup: CheckSetup, run: Run) -> dict[str, Any]:
    """Sum the trace up and keep it, packed, in the folder of the check. Raises CheckFailed where there is none."""
    files = sorted((run.debug_of(1) / "profile").glob("rank-*.json"))
    if not files:
        raise CheckFailed(f"the profiler left no trace in {run.debug_of(1) / 'profile'}")
    packed = setup.path / TRACE_FILE
    return {**trace.summarize_trace(files[0]), "file": packed.name, "file_bytes": trace.pack_trace(files[0], packed)}
