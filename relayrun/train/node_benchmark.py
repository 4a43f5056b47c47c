"""Benchmark of a node: a short matrix product and an exchange with neighbours, compared with the run's own history.

A fork server forks it with all imports done (`measure_node`); elsewhere it is a program:

    python -m relayrun.train.node_benchmark --place 0 --nodes 4 --address n0 --port 21000 --gpus 8 --socket 5

The numbers are small integers, whose products are exact in every precision and order of summation: a wrong result is a
fault of the device. Each node exchanges with both neighbours in turn, and the faster exchange counts: a node that is
fast with one neighbour is healthy. torch computes on GPUs; without a GPU numpy computes unless torch is imported.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayrun.control.agent.messages import MessageSocket

SIZE, SIZE_OF_GPUS = 768, 4096
"""Rows and columns of the matrices: some ten milliseconds on a processor, one on a GPU."""
REPEATS = 5
"""Repetitions, of which the fastest counts, to exclude short disturbances."""
EXCHANGE_BYTES = 4 << 20
EXCHANGE_SECONDS = 1800.0
"""Longest wait of nodes for each other, since imports may take long; the coordinator waits less for results."""


def matrix_product(gpus: int) -> dict[str, Any]:
    """Return seconds of a matrix product on the slowest device that trains (`matmul`), its name (`on`), the number of
    `devices`, and `wrong` results.

    On a CPU the processor time counts, without time of other processes; slow steps show that while training runs.
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
    # bfloat16 is not exact above 256: the sums of rows must then be equal up to rounding
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


def ring_neighbour_pairs(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of node pairs for one exchange each; every node has a turn with both neighbours in the ring."""
    if nodes == 2:
        yield [(0, 1)]
        return
    ring = [(node, (node + 1) % nodes) for node in range(nodes)]
    yield ring[0 : nodes - nodes % 2 : 2]
    yield ring[1 : nodes - nodes % 2 : 2]
    if nodes % 2:
        yield ring[-1:]


def exchange_with_neighbours(place: int, nodes: int, *, address: str, port: int, gpus: int) -> dict[str, Any]:
    """Check a sum over all nodes, and exchange with each neighbour; return the seconds of the faster exchange.

    Raises RuntimeError and other errors of torch if nodes do not reach each other.
    """
    import torch
    from torch import distributed

    from relayrun.train.distributed import bind_to_job_network

    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    bind_to_job_network(address)
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
    for turn in ring_neighbour_pairs(nodes):
        mine = [pair for pair in turn if place in pair]
        for first, second in mine:
            with_whom = second if place == first else first
            for _ in range(REPEATS + 1):  # the first exchange connects
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
    """Measure this node together with the others; a failure becomes `error` in the result."""
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


def send_measurement(agent: MessageSocket, order: Mapping[str, Any], *, gpus: int) -> None:
    """Measure this node, and send the result to the agent. `order`: `place`, `nodes`, `address`, `port`."""
    agent.send("probing")
    agent.send(
        "probed", **measure_node(**{name: order[name] for name in ("place", "nodes", "address", "port")}, gpus=gpus)
    )


def main() -> int:
    """Measure this node for the agent at the other end of the socket."""
    from relayrun.control.agent.messages import MessageSocket

    parser = argparse.ArgumentParser(prog="relayrun.train.node_benchmark", description="Measures a node.")
    for name in ("place", "nodes", "port", "gpus", "socket"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args()
    with closing(MessageSocket(socket.socket(fileno=options.socket))) as agent:
        send_measurement(agent, vars(options), gpus=options.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
