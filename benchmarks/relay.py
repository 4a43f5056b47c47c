"""Seconds from a signal to the successor's first new step, by phases, beside the same phases without a launcher.

The real training program (two CPU ranks, a Llama of 12 layers whose checkpoint is about 1 GB) in a chain on a Slurm of
this machine. A repetition: SIGUSR2 to the batch script of the running job, until the next job has done a step; then the
same checkpoint by hand, two processes without Slurm and supervisor, until a step, then SIGUSR2 and the save.

| phase | from | to |
|---|---|---|
| signal | the signal to the batch script | it has acted |
| step | | the start of the save: the step that is under way |
| save | | rank 0's last word |
| end | | Slurm's controller has taken the end of the job |
| queue | | Slurm starts the next job's batch script |
| begin | | the supervisor has opened the next attempt |
| launch | | rank 0's process exists |
| import | | torch, megatron-core and the program are imported |
| init | | ranks have met, model and optimizer are made |
| load | | the checkpoint is in place |
| first step | | the end of the first new step |

`own` is the launcher's: signal, end, begin and launch (with the start of srun). `queue` is Slurm's alone, by the clocks
of its logs: on an idle cluster up to a second, and hours on a busy one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
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

from relayrun.control.rundir import triggers  # noqa: E402
from relayrun.control.rundir.attempt import Attempt  # noqa: E402
from relayrun.control.rundir.plan import Plan  # noqa: E402
from relayrun.control.rundir.records import AttemptOutcome, AttemptStart, StartTimes  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from relayrun.control.scheduler.local_srun import free_port  # noqa: E402
from relayrun.files import read_json_lines  # noqa: E402
from tests.slurm.cluster import TestCluster  # noqa: E402
from tests.workspace import Workspace  # noqa: E402

REPETITIONS = 5
PHASES = ("signal", "step", "save", "end", "queue", "begin", "launch", "import", "init", "load", "first step")
OWN = ("signal", "end", "begin", "launch")
MODEL = {
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 12,
    "num_query_groups": 12,
}
STEPS = 5
"""That an attempt does before it is asked to leave."""

Phases = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repetitions", type=int, nargs="?", default=REPETITIONS, help="default: %(default)s")
    repetitions = parser.parse_args().repetitions
    load = os.getloadavg()
    folder = Path(tempfile.mkdtemp(prefix="relay-"))
    cluster = TestCluster(folder / "c", nodes=2, cpus=8, gpus=1)
    cluster.up()
    try:
        workspace = Workspace.make(cluster.work)
        config = workspace.config(
            "run",
            model=MODEL,
            training={"steps": 1_000_000},
            data={"max_epochs": 1e9},
            job={"nodes": 2, "ntasks_per_node": 1, "time": "30"},
            cluster={"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}},
        )
        pairs: list[tuple[Phases, Phases]] = []
        for number in range(repetitions):
            chain, begin = relay(cluster, workspace.run("run"), config)
            bare = by_hand(workspace.run("run"), workspace.run(f"bare{number}"), begin)
            pairs.append((chain, bare))
            print(f"{number + 1}: chain {rounded(pairs[-1][0])}\n   bare  {rounded(pairs[-1][1])}", flush=True)
    finally:
        cluster.down()
        shutil.rmtree(folder)
    write(pairs, load)


def relay(cluster: TestCluster, run: Run, config: Path) -> tuple[Phases, AttemptStart]:
    """One baton passed in a chain that is ended after it: the phases, and what the second attempt began with."""
    cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config, "--resume"], cwd=ROOT)
    first = max(run.attempt_numbers(), default=0) + 1
    before, after = run.attempt(first), run.attempt(first + 1)
    cluster.wait_until(lambda: done(before) >= STEPS, timeout=120, interval=0.05)
    began = AttemptStart.read(before.begin)
    assert began is not None
    signalled = time.time()
    cluster.run(["scancel", "--signal=USR2", "--batch", began.job_id])
    cluster.wait_until(lambda: done(after) >= 1, timeout=120, interval=0.05)
    triggers.touch_trigger(run, "exit")
    name = Plan.load(run).job_name
    begin, started = AttemptStart.read(after.begin), StartTimes.read(after.started)
    assert begin is not None
    assert started is not None
    acted = before.stop.stat().st_mtime
    phases = {"signal": acted - signalled} | leaving(before, acted)
    over = logged(cluster.path / "log/slurmctld.log", rf"_job_complete: JobId={began.job_id} done")
    launched = logged(
        cluster.path / f"log/slurmd-{first_host(cluster, begin)}.log", rf"Launching batch job {begin.job_id} for"
    )
    phases |= {
        "end": over - signalled - sum(phases.values()),
        "queue": launched - over,
        "begin": begin.start_time - launched,
        "launch": started.process - begin.start_time,
    }
    phases |= starting(after, started, started.process)
    cluster.wait_until(lambda: not [job for job in cluster.queue() if job.name == name], timeout=60, interval=0.2)
    return phases, begin


def by_hand(run: Run, bare: Run, begin: AttemptStart) -> Phases:
    """The same attempt as two plain processes, in a run directory of its own; with sessions of their own, as Slurm's:
    Linux may share out a busy machine by session."""
    attempt = bare.attempt(begin.attempt)
    attempt.path.mkdir(parents=True)
    bare.checkpoints.mkdir()
    shutil.copytree(run.config, bare.config)
    shutil.copy(run.manifest, bare.manifest)
    AttemptStart.of(asdict(begin) | {"job_end_time": None}).write(attempt.begin)
    shared = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "relayrun.train", f"--run-dir={bare.path}", f"--attempt={begin.attempt}"]
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
    started = StartTimes.read(attempt.started)
    assert started is not None
    return leaving(attempt, signalled) | starting(attempt, started, spawned)


def logged(log: Path, words: str) -> float:
    """When one of Slurm's daemons wrote a line with these words: seconds since 1970, to the millisecond."""
    match = re.search(rf"^\[([\d-]+T[\d:]+)\.(\d{{3}})\] .*{words}", log.read_text(), re.M)
    assert match is not None, (log, words)
    return time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) + int(match[2]) / 1000


def first_host(cluster: TestCluster, begin: AttemptStart) -> str:
    return cluster.run(["scontrol", "show", "hostnames", begin.nodes]).stdout.split()[0]


def leaving(attempt: Attempt, signalled: float) -> Phases:
    outcome, commit = AttemptOutcome.read(attempt.outcome), attempt.read_commits()[-1]
    assert outcome is not None
    saving = commit.time - commit.seconds
    return {"step": saving - signalled, "save": outcome.time - saving}


def starting(attempt: Attempt, started: StartTimes, since: float) -> Phases:
    first = next(line for line in read_json_lines(attempt.metrics) if "loss" in line)
    return {
        "import": started.imported - since,
        "init": started.initialised - started.imported,
        "load": started.loaded - started.initialised,
        "first step": first["time"] - started.loaded,
    }


def done(attempt: Attempt) -> int:
    return sum(1 for line in read_json_lines(attempt.metrics) if "loss" in line)


def wait(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.05)


def rounded(phases: Phases) -> dict[str, float]:
    return {name: round(phases[name], 3) for name in PHASES if name in phases}


def write(pairs: list[tuple[Phases, Phases]], load: tuple[float, float, float]) -> None:
    totals = [sum(chain.values()) for chain, _ in pairs]
    own = [sum(chain[name] for name in OWN) for chain, _ in pairs]
    figures: dict[str, Any] = {
        "unit": "seconds, where it is no share",
        "repetitions": len(pairs),
        "model": MODEL,
        "load_average": {"before": load, "after": os.getloadavg()},
        "total": _results.spread(totals),
        "chain": {name: _results.spread([chain[name] for chain, _ in pairs]) for name in PHASES},
        "bare": {name: _results.spread([bare[name] for _, bare in pairs]) for name in PHASES if name in pairs[0][1]},
        "own": _results.spread(own),
        "own_share": _results.spread([part / total for part, total in zip(own, totals, strict=True)]),
    }
    for name in [name for name in figures if name.startswith(("total", "own"))]:
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures[name].items()))
    print(_results.write("relay", figures))


if __name__ == "__main__":
    main()
