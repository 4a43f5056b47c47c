"""What a save costs training: beside it (`checkpoint.async_save`) against standing still for it.

    python benchmarks/checkpoint.py [--saves 10] [--folder DIR]

The real training program on one rank with one thread, fp32, the distributed optimizer: a state of more than 1 GB
(weights, fp32 parameters and both moments of Adam). Every eighth iteration is saved, alternately beside training
and standing still, after one of each for warming up. The time lost to a save is the sum over the iterations from
its begin to its commit of (iteration - median iteration), by the wall clock; the median is that of all iterations
without a save. Beside it: a copy of as many bytes in memory, what the disk takes (two files, synced), and the CPU
time that the main thread spends on a save beside training, which other programs on the machine do not change.
About three minutes on two idle cores: the second core does the writing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import _results
import numpy as np

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import triggers
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError, run_main
from relayrun.files import read_json, read_json_lines, write_json
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter

INTERVAL = 8
VOCABULARY = 16384
SEED = 28
HELD = "held.json"
"""CPU seconds that the main thread spent on each save, by iteration."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=10, help="of each kind")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary folder")
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program is not None:
        return program(Run(options.program))
    folder = Path(tempfile.mkdtemp(prefix="relayrun-checkpoint-", dir=options.folder))
    try:
        figures = measure(folder, options.saves)
    finally:
        shutil.rmtree(folder)
    path = _results.write("checkpoint", figures)
    print(json.dumps(figures, indent=2))
    print(f"written to {path}")
    return 0


def train(run: Run, script: str) -> None:
    """Run the training program of a benchmark's script to its end."""
    command = [sys.executable, script, "--program", str(run.path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RelayrunError(f"the training program failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def measure(folder: Path, saves: int) -> dict[str, Any]:
    run = make_run(folder, steps=INTERVAL * (2 * saves + 2) + INTERVAL - 1)
    train(run, __file__)
    attempt = run.attempt(1)
    committed = {commit.iteration: commit for commit in attempt.read_commits()}
    bytes_ = sum(committed[INTERVAL].files.values())
    lost, usual = losses(
        [line for line in read_json_lines(attempt.metrics) if "loss" in line],
        {iteration: commit.time for iteration, commit in committed.items()},
    )
    measured = [iteration for iteration in sorted(lost) if iteration > 2 * INTERVAL][: 2 * saves]
    beside = [iteration for iteration in measured if is_beside(iteration)]
    still = [iteration for iteration in measured if not is_beside(iteration)]
    held = read_json(run.path / HELD)
    ratios = [lost[one] / lost[other] for one, other in zip(beside, still, strict=True)]
    return {
        "seed": SEED,
        "checkpoint_bytes": bytes_,
        "step_seconds": _results.spread(usual),
        "saves_of_each_kind": len(beside),
        "lost_seconds_async": _results.spread([lost[iteration] for iteration in beside]),
        "lost_seconds_sync": _results.spread([lost[iteration] for iteration in still]),
        "lost_async_over_sync": _results.spread(ratios),
        "main_thread_cpu_seconds_of_a_save_async": _results.spread([held[str(iteration)] for iteration in beside]),
        "save_to_commit_seconds_async": _results.spread([committed[iteration].seconds for iteration in beside]),
        "save_to_commit_seconds_sync": _results.spread([committed[iteration].seconds for iteration in still]),
        "memcpy_seconds": _results.spread(repeated(copier(bytes_), 10)),
        "disk_bytes_per_second": bytes_ / statistics.median(repeated(lambda: write_raw(folder, bytes_), 3)),
        "load_average": os.getloadavg()[0],
    }


def is_beside(iteration: int) -> bool:
    """Every other save is asynchronous."""
    return iteration // INTERVAL % 2 == 1


def losses(steps: list[dict[str, Any]], committed: dict[int, float]) -> tuple[dict[int, float], list[float]]:
    """Seconds lost to the save of each iteration, and the seconds of the iterations without one."""
    seconds = {after["iteration"]: after["time"] - before["time"] for before, after in pairwise(steps)}
    ends = {line["iteration"]: line["time"] for line in steps}
    windows: dict[int, list[int]] = {}
    for saved, durable in committed.items():
        if saved % INTERVAL:
            continue  # the last one, when leaving
        window = [saved + 1]
        while ends[window[-1]] < durable and window[-1] + 1 in ends:
            window.append(window[-1] + 1)
        windows[saved] = window
    touched = {iteration for window in windows.values() for iteration in window}
    usual = [value for iteration, value in seconds.items() if iteration not in touched and iteration > INTERVAL]
    median = statistics.median(usual)
    return {saved: sum(seconds[i] - median for i in window) for saved, window in windows.items()}, usual


def repeated(action: Callable[[], None], times: int) -> list[float]:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return found


def copier(size: int) -> Callable[[], None]:
    """A copy between two arrays whose pages are there already."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return lambda: np.copyto(target, source)


def write_raw(folder: Path, size: int) -> None:
    """Write and sync `size` bytes, in two files at a time."""
    block = np.random.default_rng(SEED).bytes(16 << 20)

    def write(name: str) -> None:
        with (folder / name).open("wb", buffering=0) as file:
            for _ in range(size // 2 // len(block)):
                file.write(block)
            os.fsync(file.fileno())

    threads = [threading.Thread(target=write, args=(f"raw-{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make_run(folder: Path, *, steps: int, interval: int = INTERVAL) -> Run:
    """A run directory with random tokens and a begun attempt."""
    run = Run(folder / "run")
    for path in (run.config, run.checkpoints, run.attempt(1).path):
        path.mkdir(parents=True)
    triggers.create_trigger_folder(run)
    writer = ShardWriter(folder / "shard", np.uint16)
    writer.add(np.random.default_rng(SEED).integers(0, VOCABULARY, 200_000), [1000] * 200)
    writer.finish()
    shards = {"train": [folder / "shard"]}
    Manifest.build(shards, {}, vocabulary_size=VOCABULARY, eod=0, tokenizer="none").write(run.manifest)
    config = RunConfig.model_validate(
        {
            "project": "benchmark",
            "name": "checkpoint",
            "model": {
                "num_layers": 8,
                "hidden_size": 768,
                "ffn_hidden_size": 2048,
                "num_attention_heads": 12,
                "num_query_groups": 12,
                "untie_embeddings_and_output_weights": False,
            },
            "data": {"tokenizer": "none", "datasets": ["none"]},
            "training": {
                "steps": steps,
                "micro_batch_size": 1,
                "global_batch_size": 1,
                "seq_length": 64,
                "threads": 1,
                "seed": SEED,
            },
            "optimizer": {"lr": 1e-4},
            "parallel": {"use_distributed_optimizer": True},
            "checkpoint": {"interval": interval, "keep_last": 1},
            "job": {"time": "60"},
            "cluster": {"name": "benchmark", "scheduler": "local"},
        }
    )
    run.config_revision(1).write_text(yaml_file.dump_yaml(config.model_dump(mode="json")))
    AttemptStart(
        attempt=1,
        job_id="1",
        job_name="benchmark",
        nodes="localhost",
        config_revision=1,
        base_iteration=0,
        base_path=None,
        start_time=time.time(),
        job_end_time=None,
        grace_period=0.0,
    ).write(run.attempt(1).begin)
    return run


def program(run: Run) -> int:
    """The training program as every rank runs it; only that every other save stands still."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "WANDB_MODE": "disabled",
    }
    from relayrun.train import __main__ as training
    from relayrun.train.checkpoint import save_and_restore
    from relayrun.train.requests import SignalFlag

    due = save_and_restore.Saver.due
    held = {}

    def alternating(self: save_and_restore.Saver, position: Any) -> None:
        self._asynchronous = is_beside(position.iteration)
        started = time.thread_time()
        due(self, position)
        held[position.iteration] = time.thread_time() - started

    save_and_restore.Saver.due = alternating  # type: ignore[method-assign]
    sys.argv = ["relayrun.train", f"--run-dir={run.path}", "--attempt=1"]
    code = training.main(SignalFlag())
    write_json(run.path / HELD, held)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(run_main(main))
