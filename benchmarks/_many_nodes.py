#!/usr/bin/env python3
"""What a chain's own programs cost on a real Slurm with 1,000 nodes, beside four: CPU seconds with Slurm's commands.

    benchmarks/_many_nodes.py [--nodes 1000] [--attempts 5] [--quick]

All daemons are real and run on this machine, 4 MB for each node; a job of 1,000 nodes starts 1,000 ranks, of which one
takes steps. `begin` and `end` run in the job, `check`, `status` and `sentinel` beside it. Needs minutes.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' cluster

import _results  # noqa: E402

from relayrun import places  # noqa: E402
from relayrun.control.chain.excluded_nodes import record_node_failures  # noqa: E402
from relayrun.control.rundir.run import Run, is_stopped  # noqa: E402
from tests.campaigns import words, write_config  # noqa: E402
from tests.slurm.cluster import TestCluster  # noqa: E402
from tests.slurm.test_chain import ends  # noqa: E402

PORTS = 28_000
"""The first of a port for each node, below those that the system gives out."""
STEPS = 20
"""Steps that an attempt takes before it is asked to leave."""

PYTHON = """#!/bin/bash
# the host's Python: writes down what `begin` and `end` cost, with all that they start
shopt -s extglob
case " $* " in
  *" relayrun.control.chain "@(begin|end)" "*)
    TIMEFORMAT="$3 %U %S"
    {{ time "{python}" "$@" 2>&3; }} 3>&2 2>>"{costs}"
    ;;
  *) exec "{python}" "$@" ;;
esac
"""
RANK = """#!/bin/sh
# rank 0 takes steps; the others wait until it is done
done="{folder}/done.$SLURM_JOB_ID"
if [ "$RANK" = 0 ]; then
  "$@"
  code=$?
  touch "$done"
  exec 3<>"{folder}/fifo"
  sleep 5
  exit $code
fi
[ -e "$done" ] || read -r _ <"{folder}/fifo"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--attempts", type=int, default=5, help="of each chain; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="20 nodes, three attempts; writes no result")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.attempts = 20, 3
    figures: dict[str, Any] = {"nodes": options.nodes}
    for name, nodes, jobs in (("few", 4, {"few": 4}), ("many", options.nodes, {"few": 4, "many": options.nodes})):
        place = Path(tempfile.mkdtemp(prefix="many-", dir="/tmp"))  # short: sockets lie below it
        cluster = TestCluster(place / "c", nodes=nodes, cpus=2, gpus=1, node_timeout=3600)
        cluster.settings.append(f"--port-base={PORTS}")
        try:
            began = time.monotonic()
            cluster.up()
            print(f"{nodes} nodes are up after {time.monotonic() - began:.0f} s", flush=True)
            for job, job_nodes in jobs.items():
                found = measure(cluster, place / job, job_nodes, options.attempts)
                figures[f"{name}_nodes_{job}_in_the_job"] = found
                print(name, job, found, flush=True)
        finally:
            cluster.down()
            shutil.rmtree(place)
    figures |= {"slurm": subprocess.check_output(["slurmctld", "-V"], text=True).strip()}
    figures |= {"memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    figures |= {"load_average": os.getloadavg()[0]}
    print(figures if options.quick else _results.write("many_nodes", figures))


def measure(cluster: TestCluster, folder: Path, nodes: int, attempts: int) -> dict[str, dict[str, float]]:
    """A chain whose jobs have so many nodes; what each of its programs costs."""
    (folder / "runs").mkdir(parents=True)
    (folder / places.PROJECT_MARKER).touch()
    os.mkfifo(folder / "fifo")
    python, rank, costs = folder / "python", folder / "rank.sh", folder / "costs"
    installed = _results.installed_python(folder / "venv")
    python.write_text(PYTHON.format(python=installed, costs=costs))
    rank.write_text(RANK.format(folder=folder))
    python.chmod(0o755)
    rank.chmod(0o755)
    site = {"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}}
    config = write_config(
        folder,
        "run",
        run_dir=str(folder / "runs/run"),
        cluster=site | {"host_python": str(python)},
        job={"time": "60", "nodes": nodes},
        chain={"grace_period": 10},
        command={"steps": 100_000, "run": [str(rank), *words(folder, 100_000, seconds=0.5, every=STEPS)]},
    )
    run = Run(folder / "runs/run")
    found: dict[str, list[float]] = {}

    def spent(name: str, *arguments: str | Path) -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [installed, "-m", "relayrun.cli", *arguments]
        cluster.run(command, cwd=folder, env=_results.as_installed() | cluster.env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cost = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.setdefault(name, []).append(cost)

    for _ in range(attempts + 1):
        spent("check", "check", config)
    spent("submit", "submit", config, "--yes")
    for number in range(1, attempts + 1):
        attempt = run.attempt(number)
        cluster.wait_until(attempt.metrics.exists, 600, what=f"attempt {number} takes steps")
        job = attempt.started_record().job_id
        time.sleep(5)
        for name in ("status", "sentinel"):
            spent(name, name, run.path if name == "status" else folder / "runs")
        if number == attempts:
            spent("stop", "stop", run.path)
        elif number == attempts - 1:  # from now on a node is to be left out
            record_node_failures(run, number, {"n1": "a health check"}, now=time.time(), sick=True)
            cluster.run(["scancel", "--signal=USR2", "--batch", job])
        else:
            cluster.run(["scancel", "--signal=USR2", "--batch", job])
        cluster.wait_until(attempt.end.exists, 600, what=f"attempt {number} ends")
    cluster.wait_until(lambda: is_stopped(run) and not cluster.queue(), 600, what="the chain ends")
    assert [end.cause for end in ends(run)] == ["saved"] * (attempts - 1) + ["exit"], ends(run)
    for verb, sick in (("begin", attempts), ("end", attempts - 1)):
        lines = [line.split() for line in costs.read_text().splitlines() if line.startswith(verb)]
        for number, (_, user, system) in enumerate(lines, 1):
            name = f"{verb}_with_a_bad_node" if number == sick else verb
            found.setdefault(name, []).append(float(user) + float(system))
    return {name: _results.spread(values[1:] or values) for name, values in found.items()}


if __name__ == "__main__":
    main()
