#!/usr/bin/env python3
"""A toy that any launcher may start: data parallel over gloo, a checkpoint every fifth iteration, resumed exactly.

    _recovery_toy.py FOLDER LAST [--in-process]

Each rank writes a line for each start and each iteration into FOLDER/rank-N.jsonl. `--in-process`: the loop is wrapped
by nvidia-resiliency-ext, which calls it again in the same process.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEP_SECONDS = 0.05
INTERVAL = 5


def train(folder: Path, last: int, store: Any = None) -> None:
    """Train from the newest checkpoint of `folder` to iteration `last`."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = folder / "checkpoints"
    newest = max((int(path.stem.removeprefix("step-")) for path in checkpoints.glob("step-*.pt")), default=0)
    if newest:
        state = torch.load(checkpoints / f"step-{newest}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    with open(folder / f"rank-{int(os.environ.get('FIRST_RANK', rank))}.jsonl", "a", buffering=1) as said:
        print(json.dumps({"start": newest, "ranks": ranks, "pid": os.getpid(), "time": time.time()}), file=said)
        for iteration in range(newest + 1, last + 1):
            time.sleep(STEP_SECONDS)
            generator = torch.Generator().manual_seed(iteration * 1000 + rank)  # the data of this rank
            x = torch.randn(32, 64, generator=generator)
            loss = torch.nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
            optimizer.step()
            print(json.dumps({"iteration": iteration, "loss": loss.item().hex(), "time": time.time()}), file=said)
            if rank == 0:
                print(f"step {iteration} loss {loss.item()!r}", flush=True)
                if iteration % INTERVAL == 0 or iteration == last:
                    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(whole, checkpoints / "new")
                    os.replace(checkpoints / "new", checkpoints / f"step-{iteration}.pt")
    dist.destroy_process_group()


def in_process(folder: Path, last: int) -> None:
    """Wrap the loop as nvidia-resiliency-ext's own examples do, with its defaults."""
    from nvidia_resiliency_ext import inprocess

    os.environ["FIRST_RANK"] = os.environ["RANK"]
    port = int(os.environ["MASTER_PORT"])

    @inprocess.Wrapper(store_kwargs={"port": port + 1})
    def wrapped(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        ranks = int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], port + 2, ranks, int(os.environ["RANK"]) == 0, multi_tenant=True
        )
        train(folder, last, dist.PrefixStore(str(call_wrapper.iteration), store))

    wrapped()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("last", type=int)
    parser.add_argument("--in-process", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (in_process if options.in_process else train)(options.folder, options.last)
