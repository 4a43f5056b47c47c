#!/usr/bin/env python3
"""`make drill-kills`: ranks are killed every minute and nodes lost every ten, and training goes on in its job.

    python benchmarks/kills.py [--minutes 60] [--kill-every 60] [--lose-every 600]

A real Slurm on this machine, four simulated nodes with two ranks each and spare ones, the real training program with a
tiny model. Three runs of one config, one after the other:

1. with as many spare nodes as are lost: for MINUTES from its first step on a random rank has SIGKILL, and a random node
   other than the batch host is lost as by a power loss (SIGSTOP for all its processes, then SIGKILL, srun first);
2. with one spare node, by the same clock, until it has done as many steps (--spares 0 leaves it out);
3. undisturbed, as many steps.

Effective training time is the part of the time since the first step in which steps were done that count: a step that is
done again counts once. Losses are compared bit for bit, so are weights and optimizer, samples by number. Exits 1 where
a claim does not hold; each is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' cluster and workspace

import _results  # noqa: E402

from relayrun.drill.kills import ranks, timeline, verdict  # noqa: E402
from relayrun.drill.kills.verdict import Event, Shown  # noqa: E402
from relayrun.rundir import triggers  # noqa: E402
from relayrun.rundir.plan import Plan  # noqa: E402
from relayrun.rundir.records import Outcome  # noqa: E402
from relayrun.rundir.run import Run  # noqa: E402
from tests.slurm import power_loss  # noqa: E402
from tests.slurm.cluster import TestCluster  # noqa: E402
from tests.workspace import Workspace  # noqa: E402

NODES, RANKS_PER_NODE = 4, 2
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
STEPS = 1_000_000
"""That the learning rate is planned for; no run does so many."""
START_SECONDS = 600
"""How long a run may take to its first step."""
PAUSE = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of the first run; default: %(default)s")
    parser.add_argument("--kill-every", type=float, default=60, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--lose-every", type=float, default=600, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument(
        "--spares", type=int, default=1, help="of the second run; 0: there is none; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=1, help="of what is killed; default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the figures there, not into benchmarks/results")
    options = parser.parse_args()
    lost = sum(kind == "node" for _, kind in schedule(options, until=60 * options.minutes))
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    cluster = TestCluster(folder / "c", nodes=NODES + 2 * lost + 1, cpus=8, gpus=1, node_timeout=10)
    cluster.up()
    try:
        drill = Drill(cluster, options)
        untrue = drill.perform(lost)
    finally:
        cluster.down()
    if untrue:
        print(f"the runs are kept in {folder}")
    else:
        shutil.rmtree(folder)
    for claim in untrue:
        print(f"does not hold: {claim}")
    return 1 if untrue else 0


def schedule(options: argparse.Namespace, *, until: float = float("inf")) -> Iterator[tuple[float, str]]:
    """When what is done, in seconds since the first step: a kill at each multiple, a node half-way before one."""
    kill, node = options.kill_every, options.lose_every - options.kill_every / 2
    while min(kill, node) < until:
        if kill < node:
            yield kill, "kill"
            kill += options.kill_every
        else:
            yield node, "node"
            node += options.lose_every


class Drill:
    """The runs on one cluster."""

    def __init__(self, cluster: TestCluster, options: argparse.Namespace) -> None:
        self.cluster, self.options = cluster, options
        self.workspace = Workspace.make(cluster.work)
        self._loads: list[float] = []

    def perform(self, lost: int) -> list[str]:
        """Do the runs, write and print the figures; return the claims that do not hold."""
        seconds = 60 * self.options.minutes
        first, events = self._disturbed("spares", spares=lost, seconds=seconds)
        outcome = Outcome.read(first.attempt(first.attempt_numbers()[-1]).outcome)
        if outcome is None:
            raise SystemExit(f"the run has not come to its end: relayrun status {first.path}")
        last = outcome.iteration
        done = [("spares", first, events, lost)]
        if self.options.spares:
            spares = self.options.spares
            done.append(("one_spare", *self._disturbed("one-spare", spares=spares, stop_after=last), spares))
        whole = self._run("undisturbed", spares=0, stop_after=last)
        self._wait_for_end(whole)
        undisturbed = timeline.of(whole)
        figures: dict[str, Any] = {
            "minutes": self.options.minutes,
            "kill_every_seconds": self.options.kill_every,
            "lose_every_seconds": self.options.lose_every,
            "nodes": NODES,
            "ranks": NODES * RANKS_PER_NODE,
            "model": MODEL,
            "load_average": statistics.mean(self._loads),
            "undisturbed": {"seconds": undisturbed.seconds, "step_seconds": undisturbed.step, "steps": last},
        }
        untrue: list[str] = []
        for name, run, happened, spares in done:
            shown = verdict.show(run, whole, last=last, events=happened, restarts=self._restarts(run))
            figures[name] = shown.figures() | {
                "spare_nodes": spares,
                "undisturbed_over_seconds": undisturbed.seconds / shown.line.seconds,
            }
            untrue += [f"{name}: {claim}" for claim in shown.untrue(spares=spares)]
            self._print(name, shown, spares, undisturbed)
        print(
            f"undisturbed: {undisturbed.seconds:.0f} s for {last} steps, median {undisturbed.step:.3f} s; "
            f"{os.cpu_count()} processors, load {figures['load_average']:.1f}"
        )
        if (share := figures["spares"]["effective_share"]) < verdict.LEAST_SHARE:
            untrue.append(f"effective training time {share:.1%}, {verdict.LEAST_SHARE:.0%} wanted")
        figures["does_not_hold"] = untrue
        print(_results.write("kills", figures, self.options.output))
        return untrue

    def _disturbed(
        self, name: str, *, spares: int, seconds: float = float("inf"), stop_after: int | None = None
    ) -> tuple[Run, list[Event]]:
        """Kill and lose by the schedule, for so many seconds from the first step on, or until the run ends."""
        generator = random.Random(self.options.seed)
        run = self._run(name, spares=spares, stop_after=stop_after)
        began = self._wait_for_first_step(run)
        events: list[Event] = []
        for after, kind in schedule(self.options, until=seconds):
            if not self._wait_until(began + after, run):
                break
            events += self._kill(run, generator) if kind == "kill" else self._lose(run, generator)
        if seconds < float("inf"):
            self._wait_until(began + seconds, run)
            triggers.touch(run, "exit")
        self._wait_for_end(run)
        return run, events

    def _run(self, name: str, *, spares: int, stop_after: int | None = None) -> Run:
        config = self.workspace.config(
            name,
            model=MODEL,
            training={"steps": STEPS, "stop_after": stop_after, "eval_interval": 500, "global_batch_size": 16},
            parallel={"use_distributed_optimizer": True},
            data={"max_epochs": 1e9, "split": 0.1},
            checkpoint={"interval": 200, "memory_interval": "auto"},
            chain={"recovery": "node"},
            job={"nodes": NODES, "ntasks_per_node": RANKS_PER_NODE, "spare_nodes": spares, "time": "1-00:00:00"},
            cluster={
                "name": "test",
                "scheduler": "slurm",
                "python": sys.executable,
                "environment": {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)},
            },
        )
        self.cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config], cwd=ROOT)
        return self.workspace.run(name)

    def _kill(self, run: Run, generator: random.Random) -> list[Event]:
        chosen = self._soon(run, lambda: ranks.kill_one(run, generator))
        return [] if chosen is None else [Event(time=time.time(), kind="kill", rank=chosen.rank, node=chosen.node)]

    def _lose(self, run: Run, generator: random.Random) -> list[Event]:
        """Lose a node that trains. The batch host's loss is that of the job, which Slurm then begins again."""
        begin = run.attempt(run.attempt_numbers()[-1]).read_begin()
        assert begin is not None
        host = self.cluster.job(begin.job_id)["BatchHost"]
        nodes = self._soon(run, lambda: sorted({process.node for process in ranks.living(run)} - {host}))
        if not nodes:
            return []
        node = generator.choice(nodes)
        now = time.time()
        power_loss.lose(self.cluster, node)
        return [Event(time=now, kind="node", node=node)]

    def _soon(self, run: Run, act: Callable[[], Any]) -> Any:
        """What `act` gives as soon as it gives something; None where the run ends."""
        while not (found := act()):
            if self._over(run):
                return None
            time.sleep(0.01)
        return found

    def _wait_until(self, moment: float, run: Run) -> bool:
        """Until then, in seconds since 1970; whether the run goes on."""
        while (left := moment - time.time()) > 0:
            if self._over(run):
                return False
            self._loads.append(os.getloadavg()[0])
            time.sleep(min(left, 1.0))
        return not self._over(run)

    def _wait_for_first_step(self, run: Run) -> float:
        def first() -> float | None:
            try:
                return timeline.of(run).began
            except ValueError:
                return None

        return self.cluster.wait_until(first, START_SECONDS, PAUSE, what="the first step") or 0.0

    def _over(self, run: Run) -> bool:
        number = run.attempt_numbers()[-1]
        return run.attempt(number).outcome.exists() or run.stop.exists()

    def _wait_for_end(self, run: Run) -> None:
        name = Plan.load(run).job_name
        while any(job.name == name for job in self.cluster.queue()):
            self._loads.append(os.getloadavg()[0])
            time.sleep(1.0)

    def _restarts(self, run: Run) -> dict[str, int]:
        begins = [run.attempt(number).read_begin() for number in run.attempt_numbers()]
        return {begin.job_id: int(self.cluster.job(begin.job_id)["Restarts"]) for begin in begins if begin is not None}

    def _print(self, name: str, shown: Shown, spares: int, undisturbed: timeline.Timeline) -> None:
        figures = shown.figures()
        print(
            f"{name} ({spares} spare nodes): effective training time {figures['effective_share']:.1%} of "
            f"{figures['seconds']:.0f} s ({undisturbed.seconds:.0f} s undisturbed), "
            f"a step {figures['step_seconds']:.3f} s\n"
            f"  {figures['kills']} kills, {figures['nodes_lost']} nodes lost, {figures['rounds']} rounds, from "
            f"{figures['rounds_from']}, {figures['steps_lost']} of {figures['steps']} steps lost, "
            f"{figures['jobs']} job{'s' * (figures['jobs'] > 1)}"
        )
        for phase, values in figures["round_seconds"].items():
            print(f"  {phase:8} median {values['median']:.2f} s, p95 {values['p95']:.2f} s")
        for what, lines in shown.faults.items():
            print(f"  {what}: {lines[0] if lines else 'the same as undisturbed'}")


if __name__ == "__main__":
    sys.exit(main())
