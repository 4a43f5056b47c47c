"""Seconds from a signal to the successor's first new step, by phases, beside the same phases without a launcher.

The real training program (two CPU ranks, a tiny model) in a chain on a Slurm of this machine. A repetition:
SIGUSR2 to the batch script of the running job, until the next job has done a step; then the same checkpoint by
hand, two processes without Slurm and supervisor, until a step, then SIGUSR2 and the save; then Slurm alone: how
long a singleton waits whose predecessor, with a step on the same nodes, has ended.

| phase | from | to |
|---|---|---|
| step | the signal | the start of the save |
| save | | rank 0's last word |
| queue | | the supervisor has opened the next attempt; bare: Slurm alone |
| launch | | rank 0's process exists; bare: nothing |
| import | | torch, megatron-core and the program are imported |
| init | | ranks have met, model and optimizer are made |
| load | | the checkpoint is in place |
| first step | | the end of the first new step |

`own`: the total less the bare phases without Slurm's queue; `own_beside_slurm`: less that too. Both differ by what
else the machine does while it imports, which is most of the time; `own_phases` is the difference in the phases alone
in which the launcher takes part: step, queue and launch.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' cluster and workspace

import _results  # noqa: E402

from relayrun.chain.plan import Plan  # noqa: E402
from relayrun.chain.tasks import free_port  # noqa: E402
from relayrun.files import read_lines  # noqa: E402
from relayrun.rundir import triggers  # noqa: E402
from relayrun.rundir.layout import AttemptDir, RunDir  # noqa: E402
from relayrun.rundir.records import Begin, Left, Started, commits  # noqa: E402
from tests.slurm.cluster import TestCluster  # noqa: E402
from tests.workspace import Workspace  # noqa: E402

REPETITIONS = 7
PHASES = ("step", "save", "queue", "launch", "import", "init", "load", "first step")
STEPS = 5
"""That an attempt does before it is asked to leave."""

Phases = dict[str, float]


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    load = os.getloadavg()
    folder = Path(tempfile.mkdtemp(prefix="relay-"))
    cluster = TestCluster(folder / "c", nodes=2, cpus=8, gpus=1)
    cluster.up()
    try:
        workspace = Workspace.make(cluster.work)
        config = workspace.config(
            "run", training={"steps": 1_000_000}, job={"nodes": 2, "ntasks_per_node": 1, "time": "30"},
            cluster={"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}},
        )  # fmt: skip
        pairs: list[tuple[Phases, Phases]] = []
        for number in range(repetitions):
            chain, begin = relay(cluster, workspace.run("run"), config)
            bare = by_hand(workspace.run("run"), workspace.run(f"bare{number}"), begin)
            pairs.append((chain, bare | {"queue": slurm_alone(cluster), "launch": 0.0}))
            print(f"{number + 1}: chain {rounded(pairs[-1][0])}\n   bare  {rounded(pairs[-1][1])}", flush=True)
    finally:
        cluster.down()
        shutil.rmtree(folder)
    write(pairs, load)


def relay(cluster: TestCluster, run: RunDir, config: Path) -> tuple[Phases, Begin]:
    """One baton passed in a chain that is ended after it: the phases, and what the second attempt began with."""
    cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config, "--resume"], cwd=ROOT)
    first = max(run.attempt_numbers(), default=0) + 1
    before, after = run.attempt(first), run.attempt(first + 1)
    cluster.wait_until(lambda: done(before) >= STEPS, timeout=120, interval=0.05)
    began = Begin.read(before.begin)
    assert began is not None
    signalled = time.time()
    cluster.run(["scancel", "--signal=USR2", "--batch", began.job_id])
    cluster.wait_until(lambda: done(after) >= 1, timeout=120, interval=0.05)
    triggers.touch(run, "exit")
    name = Plan.load(run).job_name
    begin, started = Begin.read(after.begin), Started.read(after.started)
    assert begin is not None
    assert started is not None
    phases = leaving(before, signalled)
    phases |= {
        "queue": begin.start_time - signalled - sum(phases.values()),
        "launch": started.process - begin.start_time,
    }
    phases |= starting(after, started, started.process)
    cluster.wait_until(lambda: not [job for job in cluster.queue() if job.name == name], timeout=60, interval=0.2)
    return phases, begin


def by_hand(run: RunDir, bare: RunDir, begin: Begin) -> Phases:
    """The same attempt as two plain processes, in a run directory of its own; with sessions of their own, as Slurm's:
    Linux may share out a busy machine by session."""
    attempt = bare.attempt(begin.attempt)
    attempt.path.mkdir(parents=True)
    bare.checkpoints.mkdir()
    shutil.copytree(run.config, bare.config)
    shutil.copy(run.manifest, bare.manifest)
    Begin.of(asdict(begin) | {"job_end_time": None}).write(attempt.begin)
    shared = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "relayrun.training", f"--run-dir={bare.path}", f"--attempt={begin.attempt}"]
    with open(bare.path / "log", "wb") as log:
        spawned = time.time()
        ranks = [
            subprocess.Popen(
                command,
                env=shared | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank}"},
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
            for rank in range(2)
        ]
    try:
        wait(lambda: done(attempt) >= STEPS)
        signalled = time.time()
        for rank in ranks:
            rank.send_signal(signal.SIGUSR2)
        for rank in ranks:
            assert rank.wait(60) == 0, (bare.path / "log").read_text()
    finally:
        for rank in ranks:
            rank.kill()
    started = Started.read(attempt.started)
    assert started is not None
    return leaving(attempt, signalled) | starting(attempt, started, spawned)


def slurm_alone(cluster: TestCluster) -> float:
    """Seconds from the end of a job, whose step slept on both nodes, to the start of its singleton successor."""
    marks = [cluster.work / "first-ended", cluster.work / "second-began"]
    for mark, wrap in zip(marks, ("srun sleep 2; date +%s.%N", "date +%s.%N"), strict=True):
        mark.unlink(missing_ok=True)
        job = cluster.sbatch(
            ["--job-name=alone", "--dependency=singleton", "--nodes=2", f"--output={mark}", f"--wrap={wrap}"]
        )
    cluster.wait_job(job)
    ended, began = (float(mark.read_text()) for mark in marks)
    return began - ended


def leaving(attempt: AttemptDir, signalled: float) -> Phases:
    left, commit = Left.read(attempt.outcome), commits(attempt)[-1]
    assert left is not None
    saving = commit.time - commit.seconds
    return {"step": saving - signalled, "save": left.time - saving}


def starting(attempt: AttemptDir, started: Started, since: float) -> Phases:
    first = next(line for line in read_lines(attempt.metrics) if "loss" in line)
    return {
        "import": started.imported - since,
        "init": started.initialised - started.imported,
        "load": started.loaded - started.initialised,
        "first step": first["time"] - started.loaded,
    }


def done(attempt: AttemptDir) -> int:
    return sum(1 for line in read_lines(attempt.metrics) if "loss" in line)


def wait(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.05)


def rounded(phases: Phases) -> dict[str, float]:
    return {name: round(phases[name], 3) for name in PHASES}


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def write(pairs: list[tuple[Phases, Phases]], load: tuple[float, float, float]) -> None:
    totals = [sum(chain.values()) for chain, _ in pairs]
    own = [total - sum(bare.values()) + bare["queue"] for total, (_, bare) in zip(totals, pairs, strict=True)]
    phases = [sum(chain[name] - bare[name] for name in ("step", "queue", "launch")) for chain, bare in pairs]
    beside = [total - sum(bare.values()) for total, (_, bare) in zip(totals, pairs, strict=True)]
    figures: dict[str, Any] = {
        "unit": "seconds, where it is no share",
        "repetitions": len(pairs),
        "load_average": {"before": load, "after": os.getloadavg()},
        "total": spread(totals),
        "chain": {name: spread([chain[name] for chain, _ in pairs]) for name in PHASES},
        "bare": {name: spread([bare[name] for _, bare in pairs]) for name in PHASES},
        "own": spread(own),
        "own_share": spread([part / total for part, total in zip(own, totals, strict=True)]),
        "own_beside_slurm": spread(beside),
        "own_beside_slurm_share": spread([part / total for part, total in zip(beside, totals, strict=True)]),
        "own_phases": spread(phases),
        "own_phases_share": spread([part / total for part, total in zip(phases, totals, strict=True)]),
    }
    for name in [name for name in figures if name.startswith(("total", "own"))]:
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures[name].items()))
    print(_results.write("relay", figures))


if __name__ == "__main__":
    main()
