"""What the checksums of a checkpoint cost: CPU time of saves with them, over that of saves without.

    python benchmarks/checksums.py [--pairs 10] [--folder DIR]

The program, model and state of `benchmarks/checkpoint.py`, more than 1 GB. Every iteration is saved: copied in host
memory, then written while training waits, by turns as it is and without any hash (the copy in one piece, as it was
before there were hashes). The CPU time is that of the whole process, and that of the copy alone, in which the values
are hashed. Beside it, the least that hashing as many bytes costs: of memory that the processor has in its own cache,
and of memory that it has to fetch. On a busy machine hashes look dearer than they are: other programs share the caches
and the processors. About a minute on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _results
import numpy as np
import xxhash
from checkpoint import HELD, make_run, train

from relayrun.control.rundir.run import Run
from relayrun.errors import run_main
from relayrun.files import read_json, write_json

WARM_UP = 2
"""Iterations whose saves do not count: the first allocates memory."""
IN_CACHE = 3 << 16
IN_MEMORY = 256 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary folder")
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program is not None:
        program(Run(options.program))
    folder = Path(tempfile.mkdtemp(prefix="relayrun-checksums-", dir=options.folder))
    try:
        figures = measure(folder, options.pairs)
    finally:
        shutil.rmtree(folder)
    path = _results.write("checksums", figures)
    print(json.dumps(figures, indent=2))
    print(f"written to {path}")
    return 0


def measure(folder: Path, pairs: int) -> dict[str, Any]:
    run = make_run(folder, steps=WARM_UP + 2 * pairs + 1, interval=1)  # the last one is saved when leaving
    train(run, __file__)
    spent = read_json(run.path / HELD)
    hashed = [spent[str(WARM_UP + 2 * pair + 1)] for pair in range(pairs)]
    bare = [spent[str(WARM_UP + 2 * pair + 2)] for pair in range(pairs)]
    with_hashes, without = ([save["save"] for save in saves] for saves in (hashed, bare))
    (newest,) = run.checkpoints.glob("iter_*")
    added = [one / other - 1 for one, other in zip(with_hashes, without, strict=True)]
    size = sum(path.stat().st_size for path in newest.iterdir())
    return {
        "checkpoint_bytes": size,
        "pairs": pairs,
        "save_cpu_seconds": _results.spread(with_hashes),
        "save_cpu_seconds_without_hashes": _results.spread(without),
        "hashing_over_save": _results.spread(added),
        "hashing_in_the_copy_over_save": _results.spread(
            [(one["copy"] - other["copy"]) / other["save"] for one, other in zip(hashed, bare, strict=True)]
        ),
        "copy_cpu_seconds": _results.spread([save["copy"] for save in hashed]),
        "copy_cpu_seconds_without_hashes": _results.spread([save["copy"] for save in bare]),
        "hash_in_cache_cpu_seconds": _results.spread([hashing(size, IN_CACHE) for _ in range(pairs)]),
        "hash_from_memory_cpu_seconds": _results.spread([hashing(size, IN_MEMORY) for _ in range(pairs)]),
        "load_average": os.getloadavg()[0],
    }


def hashing(size: int, buffer: int) -> float:
    """CPU seconds that it takes to hash `size` bytes, those of a buffer again and again."""
    data = np.ones(buffer, np.uint8)
    found = xxhash.xxh3_128(data.data)
    started = time.thread_time()
    for _ in range(0, size, buffer):
        found.update(data.data)
    return (time.thread_time() - started) * size / (math.ceil(size / buffer) * buffer)


def program(run: Run) -> None:
    """The training program as every rank runs it; only that every other save has no hashes."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "WANDB_MODE": "disabled",
    }
    from relayrun.train import __main__ as training
    from relayrun.train.checkpoint import async_writer, save_and_restore
    from relayrun.train.requests import SignalFlag

    class Nothing:
        def __init__(self, _data: object = b"") -> None: ...
        def update(self, _data: object) -> None: ...
        def reset(self) -> None: ...
        def hexdigest(self) -> str:
            return "0" * 32

    def copied(source: Any, target: Any) -> str:
        target.copy_(source)
        return "0" * 32

    with_hashes = (xxhash.xxh3_128, xxhash.xxh3_128_hexdigest, async_writer._copy_and_digest)
    without = (Nothing, lambda _data: "0" * 32, copied)
    spent: dict[int, dict[str, float]] = {}
    copying: list[float] = []
    fill = async_writer.HostCopy.fill

    def timed(self: async_writer.HostCopy, shards: Any, stream: Any) -> async_writer.HostMemoryStats:
        started = time.thread_time()
        late = fill(self, shards, stream)
        copying.append(time.thread_time() - started)
        return late

    def alternating(self: save_and_restore.Saver, position: Any) -> None:
        if position.iteration == self.saved_iteration:
            return
        kind = with_hashes if position.iteration % 2 else without
        xxhash.xxh3_128, xxhash.xxh3_128_hexdigest, async_writer._copy_and_digest = kind  # type: ignore[misc,assignment]
        started = time.process_time()
        self._begin(position, (), leaving=True)
        spent[position.iteration] = {"save": time.process_time() - started, "copy": copying.pop()}

    async_writer.HostCopy.fill = timed  # type: ignore[method-assign]
    save_and_restore.Saver.due = alternating  # type: ignore[method-assign]
    sys.argv = ["relayrun.train", f"--run-dir={run.path}", "--attempt=1"]
    code = training.main(SignalFlag())
    write_json(run.path / HELD, spent)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(run_main(main))
