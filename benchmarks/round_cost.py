#!/usr/bin/env python3
"""What looks after training costs while nothing fails: heartbeats, copies of the state in memory, finding slow ranks.

    python benchmarks/round_cost.py [--quick]

A tiny Llama on two nodes with a rank each, all of them this machine, with node agents. In every second block of steps
the part is left out (`_toggled.py`), in the order on, off, off, on, so that what changes slowly counts for both. Each
figure is per cent of the time of a step, of pairs of neighbouring blocks: the median, and the quartiles as its bounds.
`memory`: a copy after each step; `memory_chosen`: as often as 2% of the steps' time allow by that figure, in blocks no
shorter. What does not grow with the model stands as microseconds of a step, too.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' workspace

import _results  # noqa: E402
from _toggled import is_on  # noqa: E402

from relayrun.control.rundir.records import AttemptOutcome  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from relayrun.files import read_json_lines  # noqa: E402
from tests.workspace import Workspace  # noqa: E402

FINER = 4
"""Times as many pairs for copies as often as chosen, whose part of a step is the smallest."""
WARM_BLOCKS = 8
"""That do not count: caches fill."""
PARTS = ("heartbeats", "stragglers", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="of blocks, for each part; default: %(default)s")
    parser.add_argument("--block", type=int, default=20, help="steps of one; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a few pairs, to see that it works; nothing is written")
    options = parser.parse_args()
    pairs = 6 if options.quick else options.pairs
    figures: dict[str, Any] = {"pairs": pairs, "block": options.block}
    with tempfile.TemporaryDirectory(prefix="round-cost-") as folder:
        workspace = Workspace.make(Path(folder))
        for side, what in (*zip(PARTS, PARTS, strict=True), ("memory_chosen", "memory")):
            chosen, interval, block = side == "memory_chosen", int(what == "memory"), options.block
            if chosen:
                interval = figures["chosen_interval"] = max(2, math.ceil(figures["memory"]["median"] / 2))
                block = math.ceil(block / interval) * interval
            steps = (WARM_BLOCKS + 2 * pairs * (FINER if chosen else 1)) * block
            run = trained(workspace, side, {"what": what, "block": block}, interval, steps=steps)
            figures[side] = cost(run, block)
            if not interval:
                step = 1e4 * median_step(run)
                figures[f"{side}_microseconds"] = {end: step * value for end, value in figures[side].items()}
            print(side, figures[side], flush=True)
    figures["load_average"] = os.getloadavg()[0]
    print(figures if options.quick else _results.write("round_cost", figures))


def trained(workspace: Workspace, side: str, toggle: dict[str, Any], interval: int, *, steps: int) -> Run:
    """A run of so many steps; `toggle`: options of the hook. Ends where it fails."""
    hooks = [{"hook": "_toggled:Toggle", "options": toggle}]
    config = workspace.config(
        side,
        training={"steps": steps, "hooks": hooks},
        data={"max_epochs": 10_000},
        checkpoint={"interval": 1_000_000, "memory_interval": interval},
        job={"nodes": 2, "ntasks_per_node": 1, "time": "600"},
        chain={"recovery": "node", "hang_timeout": 3600},
        cluster={"python": sys.executable, "environment": {"PYTHONPATH": str(Path(__file__).resolve().parent)}},
    )
    command = [sys.executable, "launchers/submit.py", str(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    run = workspace.run(side)
    outcome = AttemptOutcome.read(run.attempt(1).outcome)
    if outcome is None or outcome.outcome != "done" or run.attempt(1).failed_restarts.exists():
        raise SystemExit(f"{side}: it has not trained in one go\n{done.stdout}\n{done.stderr}")
    return run


def cost(run: Run, block: int) -> dict[str, float]:
    """Per cent by which a block with the part takes longer than the one beside it without."""
    times = {line["iteration"]: line["time"] for line in read_json_lines(run.attempt(1).metrics) if "time" in line}
    starts = range(WARM_BLOCKS * block, max(times) - 2 * block + 1, 2 * block)
    found = []
    for start in starts:  # in iterations done
        first, second = (times[start + (n + 1) * block] - times[start + n * block] for n in range(2))
        on, off = (first, second) if is_on(start + 1, block) else (second, first)
        found.append(100 * (on / off - 1))
    low, middle, high = statistics.quantiles(found, n=4)
    return {"min": low, "median": middle, "max": high}


def median_step(run: Run) -> float:
    """Seconds."""
    times = [line["time"] for line in read_json_lines(run.attempt(1).metrics) if "time" in line]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


if __name__ == "__main__":
    main()
