"""A short matrix product and an exchange with the neighbours, to be compared with the run's own history.

Where a server forks ranks it forks this, too, with all imports done (`measure_node`); elsewhere it is a program:

    python -m relayrun.train.node_benchmark --place 0 --nodes 4 --address n0 --port 21000 --gpus 8 --socket 5

Numbers are small integers, whose products are exact in every precision and order of sums: a wrong one is the device's.
Each node exchanges with both of its neighbours, one after the other, and its faster exchange counts: of two nodes that
are slow with each other, the one that is fast with its other neighbour is well. On GPUs torch computes; without any it
is numpy, where torch is not there already.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

SIZE, SIZE_OF_GPUS = 768, 4096
"""Rows and columns of the matrices: some ten milliseconds of a processor, one of a GPU."""
REPEATS = 5
"""The fastest of so many counts, so that what else runs for a moment does not."""
EXCHANGE_BYTES = 4 << 20
EXCHANGE_SECONDS = 1800.0
"""How long nodes wait for each other at most, since one may import for long; the coordinator waits less for numbers."""


def matrix_product(gpus: int) -> dict[str, Any]:
    """Seconds of a matrix product on the slowest device that trains (`matmul`), which that is (`on`), how many there
    are (`devices`), and what came out `wrong`.

    A processor's own time counts: what others take of it is no fault of it, and slow steps are found while they train.
    """
    if gpus or "torch" in sys.modules:
        return _with_torch(gpus)
    try:
        return _with_numpy()
    except ImportError:
        return {}


def _with_torch(gpus: int) -> dict[str, Any]:
    import torch

    if not gpus:
        seconds, wrong = _product_of_torch(torch.device("cpu"), SIZE, torch.float32)
        return {"matmul": seconds, "on": "cpu, torch"} | ({"wrong": wrong} if wrong else {})
    devices = torch.cuda.device_count()
    found = [
        (*_product_of_torch(torch.device("cuda", number), SIZE_OF_GPUS, torch.bfloat16), number)
        for number in range(devices)
    ]
    if not found:
        return {"devices": 0}
    wrong = "; ".join(f"GPU {number}: {words}" for _, words, number in found if words)
    name = torch.cuda.get_device_name(0)
    values = {"matmul": max(seconds for seconds, _, _ in found), "on": name, "devices": devices}
    return values | ({"wrong": wrong} if wrong else {})


def _product_of_torch(device: Any, size: int, kind: Any) -> tuple[float, str]:
    import torch

    numbers = torch.arange(size, device=device)
    first = ((numbers[:, None] * 3 + numbers[None, :]) % 7 - 3).to(kind)
    second = ((numbers[:, None] + numbers[None, :] * 5) % 5 - 2).to(kind)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    best, product = float("inf"), None
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = clock()
        product = first @ second
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - began)
    assert product is not None
    # bfloat16 holds no sum above 256 exactly: there two products must be the same, and rounded sums of rows near
    wanted = first.double() @ second.double().sum(dim=1)
    there = product.double().sum(dim=1)
    slack = 0.0 if kind == torch.float32 else product.double().abs().sum(dim=1) * 2**-8
    off = ((there - wanted).abs() > slack).sum().item()
    return best, f"{off} of {size} rows of a product" if off else ""


def _with_numpy() -> dict[str, Any]:
    import numpy

    numbers = numpy.arange(SIZE)
    first = ((numbers[:, None] * 3 + numbers[None, :]) % 7 - 3).astype(numpy.float32)
    second = ((numbers[:, None] + numbers[None, :] * 5) % 5 - 2).astype(numpy.float32)
    best, product = float("inf"), first
    for _ in range(REPEATS):
        began = time.process_time()
        product = first @ second
        best = min(best, time.process_time() - began)
    wanted = first.astype(float) @ second.astype(float).sum(axis=1)
    off = int((product.astype(float).sum(axis=1) != wanted).sum())
    found: dict[str, Any] = {"matmul": best, "on": "cpu, numpy"}
    return found | ({"wrong": f"{off} of {SIZE} rows of a product"} if off else {})


def exchange_pairs(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Which nodes exchange at the same time: each has a turn with both neighbours in the ring."""
    if nodes == 2:
        yield [(0, 1)]
        return
    ring = [(node, (node + 1) % nodes) for node in range(nodes)]
    even = ring[0 : nodes - nodes % 2 : 2]
    yield even
    yield ring[1 : nodes - nodes % 2 : 2]
    if nodes % 2:
        yield ring[-1:]


def exchange_with_neighbours(place: int, nodes: int, *, address: str, port: int, gpus: int) -> dict[str, Any]:
    """Sum over all nodes, which must be right, and exchange with each neighbour; return the seconds of the faster one.

    Raises RuntimeError and other errors of torch where nodes do not reach each other.
    """
    import torch
    from torch import distributed

    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    distributed.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=place,
        world_size=nodes,
        timeout=timedelta(seconds=EXCHANGE_SECONDS),
    )
    total = torch.full((EXCHANGE_BYTES // 4,), float(place + 1), device=device)
    distributed.all_reduce(total)
    wanted = nodes * (nodes + 1) / 2
    wrong = int((total != wanted).sum().item())
    own, other = torch.full_like(total, float(place)), torch.empty_like(total)
    best = float("inf")
    for turn in exchange_pairs(nodes):
        mine = [pair for pair in turn if place in pair]
        for first, second in mine:
            with_whom = second if place == first else first
            for _ in range(REPEATS + 1):  # the first one connects
                began = time.perf_counter()
                asked = [
                    distributed.P2POp(distributed.isend, own, with_whom),
                    distributed.P2POp(distributed.irecv, other, with_whom),
                ]
                for work in distributed.batch_isend_irecv(asked):
                    work.wait()
                if gpus:
                    torch.cuda.synchronize(device)
                best = min(best, time.perf_counter() - began)
            wrong += int((other != with_whom).sum().item())
    distributed.destroy_process_group()
    found: dict[str, Any] = {"exchange": best}
    return found | ({"wrong": f"{wrong} numbers that came from other nodes"} if wrong else {})


def measure_node(*, place: int, nodes: int, address: str, port: int, gpus: int) -> dict[str, Any]:
    """Measure this node beside the others; what fails is an `error` among the values."""
    found: dict[str, Any] = {}
    try:
        found = matrix_product(gpus)
        if nodes > 1 and "torch" in sys.modules:
            other = exchange_with_neighbours(place, nodes, address=address, port=port, gpus=gpus)
            wrong = "; ".join(words for each in (found, other) if (words := each.get("wrong")))
            found |= other | ({"wrong": wrong} if wrong else {})
    except Exception as error:
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return found


def main() -> int:
    """Measure this node, and tell the agent at the other end of the socket."""
    from relayrun.control.agent.messages import MessageSocket

    parser = argparse.ArgumentParser(prog="relayrun.train.node_benchmark", description="Measures a node.")
    for name in ("place", "nodes", "port", "gpus", "socket"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args()
    where = {name: getattr(options, name) for name in ("place", "nodes", "address", "port", "gpus")}
    with closing(MessageSocket(socket.socket(fileno=options.socket))) as agent:
        agent.send("probing")
        agent.send("probed", **measure_node(**where))
    return 0


if __name__ == "__main__":
    sys.exit(main())
