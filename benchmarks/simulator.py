"""A chain on 16,384 GPUs, simulated: the real coordinator and decisions in a time that jumps (`_simulated_chain.py`).

    python benchmarks/simulator.py [--draws 8] [--days 54] [--quick]

1. The drills of this repository (`results/kills*.json`) with their own rates of failures and seconds of a restart:
   `reproduced` compares the simulated part of the time in steps that count with the measured one. (Beside it stands the
   time of an undisturbed run over the run's own, which the load of the machine changes, too.)
2. Published runs at their rate of failures, with costs of a restart as their systems had them. What a restart cost
   there is not published in full, so each draw takes it from a range (`assumed`); `allowed_minutes` is what a failure
   may have cost at most for the published share.
3. Our costs at the same rate of failures: measured ones from the results, the others from ranges.

Every figure of 2 and 3 is a simulation: smallest, median and largest of the draws, each with its own failures and its
own values from the ranges. The result file lists all ranges and where they come from.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' made run directories

import _results  # noqa: E402
from _simulated_chain import Outcome, Setup, SimulatedChain  # noqa: E402

DAY = 86400.0
LLAMA_3: dict[str, Any] = {"gpus": 16384, "days": 54, "unexpected": 419, "planned": 47, "effective_at_least": 0.90}
"""arXiv 2407.21783, section 3.3.4 and table 5."""
BYTEROBUST: dict[str, Any] = {"gpus": 9600, "days": 90, "effective": 0.97}
"""arXiv 2509.16293, abstract: three months."""
PER_GPU_DAY = LLAMA_3["unexpected"] / LLAMA_3["days"] / LLAMA_3["gpus"]
FAULTS = {"node": 0.78, "rank": 0.12, "hang": 0.10}
"""Kinds of failures: 78% of Llama 3's are of hardware, and cost a node here; hangs are its network and NCCL rows."""
STEP_SECONDS = 6.2
"""Llama 3 405B: 6 x 405e9 FLOP x 16.8 million tokens on 16,384 GPUs of 400 TFLOP/s."""

Range = tuple[float, float]

THEIR_RESTARTS: dict[str, dict[str, Range]] = {
    "llama_3": {
        "notice": (30.0, 120.0),
        "next_job": (180.0, 480.0),
        "minutes_between_saves": (5.0, 15.0),
        "save_stall": (5.0, 30.0),
    },
    "byterobust": {
        "notice": (10.0, 120.0),
        "hang": (600.0, 3600.0),
        "restart": (60.0, 300.0),
        "further_restarts": (0.1, 0.3),
        "copy_share_of_a_step": (0.001, 0.01),
    },
}
"""Seconds, assumed, and chosen so that the published share lies inside: the papers' abstracts and tables do not give
them, so this shows no more than that costs of this size fit. Llama 3: each failure starts a job again, from a
checkpoint. ByteRobust: warm standby machines, a copy of the state after each step, long diagnosis of hangs alone, and
restarts by people (changes of the code) as a share of the failures."""

OUR_RESTARTS: dict[str, tuple[Range, str]] = {
    "notice_rank": ((0.02, 1.0), "measured on 8 ranks: 0.02 s (kills.json); more at scale is assumed"),
    "notice_node": ((0.02, 20.0), "a closed connection at once, a silent node after 20 beats (the code)"),
    "notice_hang": ((300.0, 320.0), "chain.hang_timeout's default, and two looks (the code)"),
    "end": ((0.1, 10.0), "measured on 8 ranks: 0.1 s; freeing GPUs is assumed"),
    "coordinator": ((0.3, 3.0), "orders and answers of 2,048 agents (coordinator.json)"),
    "groups": ((20.0, 90.0), "assumed: process groups of 16,384 ranks, NCCL's start, the model"),
    "load": ((0.1, 5.0), "346 MB a rank; 28 GB/s measured on an H200 (gpu-h200-first.json)"),
    "first_step": ((0.0, 30.0), "assumed: what the first step takes longer"),
    "neighbour": ((0.5, 5.0), "assumed: copies of eight ranks over the network"),
    "disk": ((30.0, 180.0), "assumed: 5.7 TB from a file system at 32 to 190 GB/s"),
    "copy_stall": ((0.02, 0.12), "346 MB a rank and its hash at 28 GB/s measured; steps beside it are assumed"),
    "save_stall": ((0.1, 2.0), "measured 0.14 s for 1.1 GB on a CPU (checkpoint.json); agreement is assumed"),
    "commit": ((30.0, 180.0), "assumed: 5.7 TB to a file system"),
    "minutes_between_saves": ((10.0, 30.0), "assumed"),
    "job_days": ((1.0, 4.0), "assumed: a site's limit"),
    "grace": ((60.0, 200.0), "assumed: a save and the end of all ranks"),
    "queue": ((5.0, 900.0), "assumed: nodes are reserved, and jobs go before others"),
    "job_start": (
        (120.0, 360.0),
        "assumed: srun on 2,064 nodes, imports, groups, a load; relay.json: 10 s on two ranks",
    ),
}
"""Seconds of our costs: the range of each draw, and where it comes from."""
SPARES = (4, 24)
"""Spare nodes of a job, as many as its days need: nodes lost in the mean, and three standard deviations."""


def failures(generator: random.Random, per_day: float) -> Iterator[tuple[float, str, int]]:
    """Failures of a Poisson process."""
    now = 0.0
    while True:
        now += generator.expovariate(per_day / DAY)
        kind = generator.choices([*FAULTS], [*FAULTS.values()])[0]
        yield now, kind, generator.randrange(1 << 30)


def drawn(generator: random.Random, ranges: dict[str, Range]) -> dict[str, float]:
    """A value of each range, all equally likely."""
    return {name: generator.uniform(*ends) for name, ends in ranges.items()}


def llama_3(generator: random.Random, days: float) -> SimulatedChain:
    values = drawn(generator, THEIR_RESTARTS["llama_3"])
    setup = Setup(
        nodes=LLAMA_3["gpus"] // 8,
        in_job=False,
        max_failed_attempts=1000,  # people looked after it
        seconds=days * DAY,
        step=STEP_SECONDS,
        save_steps=round(60 * values["minutes_between_saves"] / STEP_SECONDS),
        save_stall=values["save_stall"],
        noticed=dict.fromkeys(FAULTS, values["notice"]),
        restart=0.0,
        job_start=values["next_job"],
    )
    return SimulatedChain(setup, failures(generator, PER_GPU_DAY * LLAMA_3["gpus"]))


def byterobust(generator: random.Random, days: float) -> SimulatedChain:
    values = drawn(generator, THEIR_RESTARTS["byterobust"])
    nodes = BYTEROBUST["gpus"] // 8
    setup = Setup(
        nodes=nodes,
        spare_nodes=nodes // 2,
        seconds=days * DAY,
        step=STEP_SECONDS,
        save_steps=300,
        copy_steps=1,
        copy_stall=values["copy_share_of_a_step"] * STEP_SECONDS,
        noticed={"rank": values["notice"], "node": values["notice"], "hang": values["hang"]},
        restart=values["restart"],
    )
    per_day = PER_GPU_DAY * BYTEROBUST["gpus"] * (1 + values["further_restarts"])
    return SimulatedChain(setup, failures(generator, per_day))


def ours(generator: random.Random, days: float, *, gpus: int) -> SimulatedChain:
    values = drawn(generator, {name: ends for name, (ends, _) in OUR_RESTARTS.items()})
    lost = PER_GPU_DAY * gpus * FAULTS["node"] * values["job_days"]
    # the rule of docs/explanation/recovery.md: copies cost at most 2% of the time, and none waits for the one before
    each = 1 + math.floor(values["copy_stall"] / (0.02 * STEP_SECONDS))
    copy_steps = max(2, each, math.ceil(2 * values["neighbour"] / STEP_SECONDS))
    setup = Setup(
        nodes=gpus // 8,
        spare_nodes=min(max(round(lost + 3 * lost**0.5), SPARES[0]), SPARES[1]),
        seconds=days * DAY,
        step=STEP_SECONDS,
        save_steps=round(60 * values["minutes_between_saves"] / STEP_SECONDS),
        save_stall=values["save_stall"],
        commit=values["commit"],
        copy_steps=copy_steps,
        copy_stall=values["copy_stall"],
        noticed={kind: values[f"notice_{kind}"] for kind in FAULTS},
        end=values["end"],
        restart=values["coordinator"] + values["groups"] + values["load"] + values["first_step"],
        disk=values["disk"],
        neighbour=values["neighbour"],
        job_limit=values["job_days"] * DAY,
        grace=values["grace"],
        queue=values["queue"],
        job_start=values["job_start"],
    )
    return SimulatedChain(setup, failures(generator, PER_GPU_DAY * gpus))


def reproduce(name: str, draws: int) -> dict[str, Any]:
    """Simulate a drill of this repository from its result: its clock of failures, the seconds of a restart, and a step
    of the undisturbed run. Copies are as far apart as the steps that a restart lost say."""
    figures = json.loads((_results.RESULTS / f"{name}.json").read_text())["figures"]
    turns = [turn["spares"] for turn in figures["turns"]]
    found: list[float] = []
    seconds, counted, effective = (
        statistics.median(turn[key] for turn in turns)
        for key in ("seconds", "counted_share", "effective_training_time")
    )
    restart = statistics.median(turn["restart_seconds"]["all"]["median"] for turn in turns)
    end = statistics.median(turn["restart_seconds"]["end"]["median"] for turn in turns)
    lost = sum(turn["steps_lost"] for turn in turns) / sum(turn["restarts"] for turn in turns)
    step = figures["undisturbed"]["seconds"]["median"] / figures["undisturbed"]["steps"]["median"]
    setup = Setup(
        nodes=figures["nodes"],
        spare_nodes=max(1, int(turns[0]["nodes_lost"])),
        ranks_per_node=figures["ranks"] // figures["nodes"],
        seconds=seconds,
        step=step,
        save_steps=200,
        copy_steps=max(1, round(2 * lost)),
        noticed={"rank": 0.022, "node": 0.017, "hang": 0.0},
        end=end,
        restart=restart - end - 0.022,
    )
    kills, nodes = figures["kill_every_seconds"], figures["lose_every_seconds"]
    for seed in range(draws):
        generator = random.Random(seed)
        times = [(kills * number, "rank") for number in range(1, int(seconds / kills) + 1)]
        times += [(nodes * number - kills / 2, "node") for number in range(1, int(seconds / nodes) + 1)]
        clock = sorted((at + generator.uniform(-1, 1), kind, generator.randrange(1 << 30)) for at, kind in times)
        found.append(SimulatedChain(setup, iter(clock)).play().effective)
    return {
        "measured": counted,
        "measured_over_undisturbed": effective,
        "simulated": _results.spread(found),
        "difference": _results.spread([abs(one - counted) / counted for one in found]),
        "step_seconds": step,
        "restart_seconds": restart,
        "steps_lost_in_a_restart": lost,
    }


def simulate(make: Any, draws: int, days: float, **more: Any) -> dict[str, Any]:
    """Play a scenario so many times."""
    outcomes: list[Outcome] = []
    for seed in range(draws):
        outcomes.append(make(random.Random(seed), days, **more).play())
        print(
            f"  {make.__name__} {seed}: {outcomes[-1].effective:.4f}, {outcomes[-1].stopped or 'goes on'}", flush=True
        )
    seconds = days * DAY
    parts = sorted({part for outcome in outcomes for part in outcome.parts})
    return {
        "days": days,
        "draws": draws,
        "effective": _results.spread([outcome.effective for outcome in outcomes]),
        "failures": _results.spread([outcome.faults.total() for outcome in outcomes]),
        "jobs": _results.spread([outcome.jobs for outcome in outcomes]),
        "share_of_the_time": {
            part: _results.spread([outcome.parts[part] / seconds for outcome in outcomes]) for part in parts
        },
        "restarts_from": dict(sum((outcome.restarts for outcome in outcomes[1:]), outcomes[0].restarts)),
        "stopped": [outcome.stopped for outcome in outcomes if outcome.stopped],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=8, help="of each scenario; default: %(default)s")
    parser.add_argument("--days", type=float, default=LLAMA_3["days"], help="simulated; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="two draws of a day; writes no result")
    options = parser.parse_args()
    if options.quick:
        options.draws, options.days = 2, 1.0
    used = time.process_time()
    figures: dict[str, Any] = {
        "reproduced": {name: reproduce(name, 4 * options.draws) for name in ("kills", "kills_often")},
        "published": {"llama_3": LLAMA_3, "byterobust": BYTEROBUST},
        "assumed": {
            "failures_per_gpu_and_day": PER_GPU_DAY,
            "kinds_of_failures": FAULTS,
            "step_seconds": STEP_SECONDS,
            "theirs": THEIR_RESTARTS,
            "ours": {name: {"range": ends, "from": words} for name, (ends, words) in OUR_RESTARTS.items()},
            "spare_nodes": SPARES,
            "nodes_of_the_next_job": "all healthy",
            "silent_corruption, loss spikes, planned interruptions": "none",
        },
    }
    figures["allowed_minutes"] = {
        "llama_3": (1 - LLAMA_3["effective_at_least"]) * 24 * 60 / (PER_GPU_DAY * LLAMA_3["gpus"]),
        "byterobust": (1 - BYTEROBUST["effective"]) * 24 * 60 / (PER_GPU_DAY * BYTEROBUST["gpus"]),
    }
    for name, what in figures["reproduced"].items():
        print(f"{name}: measured {what['measured']:.4f}, simulated {what['simulated']['median']:.4f}")
    figures["llama_3"] = simulate(llama_3, options.draws, options.days)
    figures["byterobust"] = simulate(byterobust, options.draws, options.days)
    figures["ours_16384"] = simulate(ours, options.draws, options.days, gpus=LLAMA_3["gpus"])
    figures["ours_9600"] = simulate(ours, options.draws, options.days, gpus=BYTEROBUST["gpus"])
    figures["cpu_seconds"] = time.process_time() - used
    for name in ("llama_3", "byterobust", "ours_16384", "ours_9600"):
        print(name, {end: round(value, 4) for end, value in figures[name]["effective"].items()})
    if not options.quick:
        print(_results.write("simulator", figures))


if __name__ == "__main__":
    main()
