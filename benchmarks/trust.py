"""What trust costs: HMACs of copies to a neighbour, the reader of pickles, and the judgement of a run's files.

    python benchmarks/trust.py [--pairs 20] [--quick]

`copies`: two ranks on this machine exchange copies of their states by gloo, by turns with the HMAC and without it; the
CPU time of a rank's process in seconds per GB. `metadata`, `common`: the reader of `.metadata` and `common.pt` over
what torch takes to unpickle the same bytes. `judged`: milliseconds to read the plan of a run with a snapshot of this
code as `begin`, a node and each process of a job do, and without any judgement. A pair is two turns behind each other;
the figures are its quotient or its turns, with their spread. About a minute on two idle cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' histories

import _results  # noqa: E402
import torch  # noqa: E402
from torch.distributed.checkpoint import metadata as dcp  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402

from relayrun.control.rundir.plan import Plan  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from relayrun.control.trainers.pickle_records import read_records  # noqa: E402
from relayrun.control.trainers.torch_files import read_torch_file  # noqa: E402
from relayrun.files import writable_by_owner_alone  # noqa: E402
from relayrun.submit.code_snapshot import snapshot_code  # noqa: E402
from tests.history import make_history  # noqa: E402

RANK = """
import json, os, sys, time, torch
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from relayrun.control.agent.memory_copies import MemorySlot
from relayrun.train.checkpoint.memory_replication import NeighbourReplica, write_copy
rank, store, folder, size, pairs = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:])
folder.mkdir()
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
ranks = SimpleNamespace(rank=rank, world_size=2, cpu_group=dist.group.WORLD)
replica = NeighbourReplica(folder, ranks, per_node=1, secret=b"s" * 32)
sealed, bare = replica._hmac, SimpleNamespace(update=lambda data: None, digest=lambda: bytes(32))
own = MemorySlot(folder, rank, 0)
own.reserve(size)
data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
copy = write_copy(own, [data], rank=rank, ranks=2, iteration=7, size=size, plain=0, layout="x")
spent = []
for turn in range(2 * pairs + 2):
    replica._hmac = sealed if turn % 4 in (0, 3) else lambda *_: bare
    dist.barrier()
    began = time.process_time()
    replica.send(copy)
    replica.wait()
    spent.append((turn % 4 in (0, 3), time.process_time() - began))
print(json.dumps(spent[2:]), flush=True)
os._exit(0)
"""
COPY_BYTES = 64 << 20
BLOCKS = 4_000
"""Blocks in the `.metadata`: a checkpoint of some ranks."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a few pairs, to see that it works; nothing is written")
    options = parser.parse_args()
    pairs = 3 if options.quick else options.pairs
    with tempfile.TemporaryDirectory(prefix="trust-") as name:
        figures: dict[str, Any] = {"pairs": pairs, "copy_bytes": COPY_BYTES, "blocks": BLOCKS}
        figures |= copies(Path(name), pairs) | readers(pairs) | judged(Path(name), pairs)
    figures["load_average"] = os.getloadavg()[0]
    print(json.dumps(figures, indent=2) if options.quick else _results.write("trust", figures))
    return 0


def copies(folder: Path, pairs: int) -> dict[str, Any]:
    """CPU seconds per GB that a rank sends and receives."""
    sizes = [str(COPY_BYTES), str(pairs)]
    commands = [
        [sys.executable, "-c", RANK, str(n), f"file://{folder}/store", str(folder / str(n)), *sizes] for n in (0, 1)
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(commands[1], stdout=subprocess.DEVNULL, env=environment) as other:
        done = subprocess.run(commands[0], capture_output=True, text=True, check=False, env=environment)
        other.kill()
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    turns = json.loads(done.stdout)
    both = [dict(map(tuple, turns[at : at + 2])) for at in range(0, len(turns), 2)]
    per_gb = COPY_BYTES / 1e9
    return {
        "copy_cpu_seconds_per_gb": _results.spread([pair[True] / per_gb for pair in both]),
        "copy_cpu_seconds_per_gb_without_hmac": _results.spread([pair[False] / per_gb for pair in both]),
        "hmac_cpu_seconds_per_gb": _results.spread([(pair[True] - pair[False]) / per_gb for pair in both]),
    }


def readers(pairs: int) -> dict[str, Any]:
    metadata, common = pickle.dumps(checkpoint_metadata(), 2), common_file()
    torch.serialization.add_safe_globals([Namespace])
    return {
        "metadata_bytes": len(metadata),
        "metadata": compared(pairs, lambda: read_records(metadata), lambda: pickle.loads(metadata)),
        "common_bytes": len(common),
        "common": compared(
            pairs, lambda: read_torch_file(common), lambda: torch.load(io.BytesIO(common), weights_only=True)
        ),
    }


def checkpoint_metadata() -> dcp.Metadata:
    """Metadata as torch writes it, of tensors in two blocks each."""
    properties = dcp.TensorProperties()
    tensors: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for number in range(BLOCKS // 2):
        name = f"decoder.layers.{number}.mlp.linear_fc1.weight"
        blocks = [dcp.ChunkStorageMetadata(torch.Size([half, 0]), torch.Size([512, 1024])) for half in (0, 512)]
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size([1024, 1024]), blocks)
        for at, block in enumerate(blocks):
            places[dcp.MetadataIndex(name, block.offsets, at)] = _StorageInfo(f"__{number}_0.distcp", at << 20, 1 << 20)
    return dcp.Metadata(tensors, storage_data=places)


def common_file() -> bytes:
    """A `common.pt` with arguments and a schedule."""
    made = io.BytesIO()
    arguments = Namespace(**{f"argument_{number}": [number, f"value {number}", None] for number in range(900)})
    torch.save({"args": arguments, "iteration": 7, "schedule": {"steps": torch.arange(1000)}}, made)
    return made.getvalue()


def compared(pairs: int, own: Callable[[], object], other: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of both, and how many times as long the first takes; the first pair does not count."""
    found = [(milliseconds(own), milliseconds(other)) for _ in range(pairs + 1)][1:]
    names = ("ours", "torch", "quotient")
    values = [(one, two, one / two) for one, two in found]
    return {name: _results.spread(column) for name, column in zip(names, zip(*values, strict=True), strict=True)}


def judged(folder: Path, pairs: int) -> dict[str, Any]:
    with writable_by_owner_alone():
        run = make_history(folder / "run", lines=10, attempts=1)
        root = snapshot_code(run, ROOT)
        replace(Plan.load(run), package_root=str(root)).write(run.plan)
    ways: dict[str, Callable[[Run], Plan]] = {
        "begin": Plan.load_trusted,
        "node": Plan.load_before_ranks,
        "process": Plan.load_in_job,
        "without": Plan.load,
    }
    turns = [{name: milliseconds(partial(load, run)) for name, load in ways.items()} for _ in range(pairs + 1)]
    found = {name: _results.spread([turn[name] for turn in turns[1:]]) for name in ways}
    return {"judged": found, "judged_files": sum(1 for _ in root.rglob("*"))}


def milliseconds(work: Callable[[], object]) -> float:
    """The median of three calls."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
