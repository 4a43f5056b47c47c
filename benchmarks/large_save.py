"""What a save of a large state costs one rank: seconds that training stands still, and seconds until it is committed.

    python benchmarks/large_save.py [--gigabytes 6] [--saves 4] [--folder DIR] [--quick]

The checkpointer of the training program with dummy tensors of 256 MB in place of a model and its optimizer, without a
GPU: the state is copied to host memory, which was reserved before, then written, synced and published beside training.
`stands_still`: until training may change its state. A save that stands still until the commit is beside it. All tensors
map one file, so it needs as much memory as the state has, for the copy; the bytes go past the page cache. The
checkpoint before is removed first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import _results
import torch
from checkpoint import SEED, make_run, repeated, write_raw
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train import distributed
from relayrun.train.checkpoint.checkpointer import Checkpointer
from relayrun.train.hook_list import Hooks

TENSOR_BYTES = 256 << 20


class DummyState(Checkpointer):
    """Saves tensors of no model."""

    def __init__(self, run: Run, tensors: list[torch.Tensor]) -> None:
        config = cast(RunConfig, resolve.read_resolved_config(run.config_revision(1)))
        ranks, nothing = distributed.start_process_groups(config), cast(Any, SimpleNamespace(lanes=None))
        hooks = Hooks([], [], ranks)
        super().__init__(run, 1, config, ranks=ranks, model=nothing, optimizer=nothing, order=nothing, hooks=hooks)
        self._tensors = tensors

    def _sharded_state(self, **_: Any) -> dict[str, Any]:
        return {
            f"tensor.{number}": ShardedTensor.from_rank_offsets(f"tensor.{number}", tensor)
            for number, tensor in enumerate(self._tensors)
        }

    def state(self, position: TrainingProgress) -> dict[str, Any]:
        return self._sharded_state() | self._common | {"data": {}, "progress": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of the state; default: %(default)s")
    parser.add_argument("--saves", type=int, default=4, help="of each kind, after one for warming up")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary folder")
    parser.add_argument("--quick", action="store_true", help="half a gigabyte; writes no result")
    options = parser.parse_args()
    if options.quick:
        options.gigabytes, options.saves = 0.5, 1
    folder = Path(tempfile.mkdtemp(prefix="large-save-", dir=options.folder))
    try:
        figures = measure(folder, round(options.gigabytes * 1e9 / TENSOR_BYTES), options.saves)
    finally:
        shutil.rmtree(folder)
    print(figures if options.quick else _results.write("large_save", figures), flush=True)
    os._exit(0)  # as the training program: threads of process groups may live


def measure(folder: Path, tensors: int, saves: int) -> dict[str, Any]:
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= names
    torch.manual_seed(SEED)
    content = folder / "content"
    torch.randint(256, (TENSOR_BYTES,), dtype=torch.uint8).numpy().tofile(content)
    state = [torch.from_file(str(content), size=TENSOR_BYTES, dtype=torch.uint8) for _ in range(tensors)]
    run = make_run(folder, steps=1)
    saver = DummyState(run, state)
    began = time.perf_counter()
    saver.reserve()
    reserve = time.perf_counter() - began
    found: dict[str, list[float]] = {"stands_still": [], "commit": [], "commit_without_copy": []}
    for iteration in range(1, 2 * saves + 3):
        shutil.rmtree(run.checkpoint(iteration - 1), ignore_errors=True)
        beside, began = iteration % 2 == 1, time.perf_counter()
        position = cast(TrainingProgress, SimpleNamespace(iteration=iteration, consumed_samples=iteration))
        save = saver.start_save(position, copy=beside, beside=beside)
        if beside:
            save.wait_for_copy()
        still = time.perf_counter() - began
        size = sum(save.result().files.values())
        if iteration > 2:
            found["commit" if beside else "commit_without_copy"].append(time.perf_counter() - began)
            found["stands_still"] += [still] if beside else []
    shutil.rmtree(run.checkpoint(iteration))
    return {
        "checkpoint_bytes": size,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "reserve_seconds": reserve,
        **{f"{name}_seconds": _results.spread(values) for name, values in found.items()},
        "commit_bytes_per_second": _results.spread([size / seconds for seconds in found["commit"]]),
        "disk_bytes_per_second": size / min(repeated(lambda: write_raw(folder, size), 2)),
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
