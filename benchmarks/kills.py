#!/usr/bin/env python3
"""`make drill-kills`: ranks are killed every minute and nodes lost every ten, and training goes on in its job.

    python benchmarks/kills.py [--minutes 60] [--kill-every 60] [--lose-every 600] [--folder FOLDER]

A real Slurm on this machine, four simulated nodes with two ranks each and spare ones, the real training program with a
tiny model. Three runs of one config, one after the other:

1. with as many spare nodes as are lost: for MINUTES from its first step on a random rank has SIGKILL, and a random node
   other than the batch host is lost as by a power loss (SIGSTOP for all its processes, then SIGKILL, srun first);
2. with one spare node, by the same clock, until it has done as many steps, or a part of them (--spares-part; --spares 0
   leaves this run out);
3. undisturbed, as many steps.

`--stop-every` and `--lose-host-every` add a random rank that has SIGSTOP, and the loss of the batch host, with which
Slurm begins the job again. With `--folder`, runs that an earlier call has finished there are not done again.

Effective training time is the part of the time since the first step in which steps were done that count: a step that is
done again counts once. Losses are compared bit for bit, so are weights and optimizer, samples by number. Exits 1 where
a claim does not hold; each is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' cluster and workspace

import _results  # noqa: E402

from relayrun.drill.kills import ranks, timeline, verdict  # noqa: E402
from relayrun.drill.kills.verdict import Event, Shown  # noqa: E402
from relayrun.files import write_json  # noqa: E402
from relayrun.rundir import triggers  # noqa: E402
from relayrun.rundir.plan import Plan  # noqa: E402
from relayrun.rundir.records import Outcome  # noqa: E402
from relayrun.rundir.run import Run  # noqa: E402
from tests.slurm import power_loss  # noqa: E402
from tests.slurm.cluster import TestCluster  # noqa: E402
from tests.workspace import Workspace  # noqa: E402

NODES = 4
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
INTERVAL = 200
"""Iterations between saves."""
EVALUATIONS = 3 * INTERVAL
"""Iterations between evaluations."""
STEPS = 1_000_000
"""That the learning rate is planned for; no run does so many."""
START_SECONDS = 600
"""How long a run may take to its first step."""
HANG_SECONDS = 10
"""Within which a rank that stands still is taken to hang, where some are stopped."""
QUEUE_SECONDS = 5.0
"""Between two looks whether a run has a job."""
PAUSE = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of the first run; default: %(default)s")
    parser.add_argument("--kill-every", type=float, default=60, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--lose-every", type=float, default=600, metavar="SECONDS", help="default: %(default)s")
    for name in ("--stop-every", "--lose-host-every"):
        parser.add_argument(name, type=float, default=float("inf"), metavar="SECONDS", help="default: never")
    parser.add_argument("--folder", type=Path, help="for the runs, which then are kept there; default: a temporary one")
    parser.add_argument(
        "--spares", type=int, default=1, help="of the second run; 0: there is none; default: %(default)s"
    )
    parser.add_argument(
        "--spares-part",
        type=float,
        default=1.0,
        metavar="PART",
        help="of the first run's steps that the second one does; default: all of them",
    )
    parser.add_argument("--ranks-per-node", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed; default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the figures there, not into benchmarks/results")
    options = parser.parse_args()
    kinds = [kind for _, kind in schedule(options, until=60 * options.minutes)]
    lost, hosts = kinds.count("node"), kinds.count("host")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    place = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets have short paths
    cluster = TestCluster(place / "c", nodes=NODES + 2 * (lost + hosts) + 1, cpus=8, gpus=1, node_timeout=10)
    cluster.up()
    try:
        drill = Drill(cluster, options, folder)
        untrue = drill.perform(lost)
    finally:
        cluster.down()
        shutil.rmtree(place)
    if untrue or options.folder:
        print(f"the runs are kept in {folder}")
    else:
        shutil.rmtree(folder)
    for claim in untrue:
        print(f"does not hold: {claim}")
    return 1 if untrue else 0


def schedule(options: argparse.Namespace, *, until: float = float("inf")) -> Iterator[tuple[float, str]]:
    """When what is done, in seconds since the first step: a kill at each multiple, all else half-way before one."""
    every = {
        "kill": options.kill_every,
        "node": options.lose_every,
        "stop": options.stop_every,
        "host": options.lose_host_every,
    }
    due = {kind: seconds - (kind != "kill") * options.kill_every / 2 for kind, seconds in every.items()}
    while due[kind := min(due, key=lambda kind: due[kind])] < until:
        yield due[kind], kind
        due[kind] += every[kind]


class Drill:
    """The runs on one cluster."""

    def __init__(self, cluster: TestCluster, options: argparse.Namespace, folder: Path) -> None:
        self.cluster, self.options = cluster, options
        self._folder = folder
        self.workspace = Workspace(folder) if (folder / "tokenizer.json").exists() else Workspace.make(folder)
        self._queue_looked_at = 0.0
        self._restarts: dict[str, dict[str, int]] = {}
        """How often Slurm began the jobs of each run again."""
        self._loads: list[float] = []

    def perform(self, lost: int) -> list[str]:
        """Do the runs, write and print the figures; return the claims that do not hold."""
        seconds = 60 * self.options.minutes
        first, events = self._disturbed("spares", spares=lost, seconds=seconds)
        outcome = Outcome.read(first.attempt(first.attempt_numbers()[-1]).outcome)
        if outcome is None:
            raise SystemExit(f"the run has not come to its end: relayrun status {first.path}")
        last = outcome.iteration
        done = [("spares", first, events, lost, last)]
        if spares := self.options.spares:
            part = last  # or else an iteration behind which the undisturbed run saves and evaluates, too
            if self.options.spares_part < 1:
                part = max(1, int(self.options.spares_part * last) // EVALUATIONS) * EVALUATIONS
            done.append(("one_spare", *self._disturbed("one-spare", spares=spares, stop_after=part), spares, part))
        whole, _ = self._once("undisturbed", lambda: (self._run("undisturbed", spares=0, stop_after=last), []))
        undisturbed = timeline.of(whole)
        figures: dict[str, Any] = {
            "minutes": self.options.minutes,
            "kill_every_seconds": self.options.kill_every,
            "lose_every_seconds": self.options.lose_every,
            "stop_every_seconds": _finite(self.options.stop_every),
            "lose_host_every_seconds": _finite(self.options.lose_host_every),
            "nodes": NODES,
            "ranks": NODES * self.options.ranks_per_node,
            "model": MODEL,
            "load_average": statistics.mean(self._loads),
            "undisturbed": {"seconds": undisturbed.seconds, "step_seconds": undisturbed.step, "steps": last},
        }
        untrue: list[str] = []
        for name, run, happened, spares, until in done:
            shown = verdict.show(run, whole, last=until, events=happened, restarts=self._restarts[run.path.name])
            figures[name] = shown.figures() | {
                "spare_nodes": spares,
                "undisturbed_over_seconds": undisturbed.seconds * until / last / shown.line.seconds,
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
        """A run with faults by the schedule, for so many seconds from the first step on, or until the run ends."""
        return self._once(name, lambda: self._with_faults(name, spares, seconds, stop_after))

    def _once(self, name: str, perform: Callable[[], tuple[Run, list[Event]]]) -> tuple[Run, list[Event]]:
        """Do a run to its end, if no earlier call has; return it with what happened to it."""
        done, run = self._folder / f"{name}.done.json", self.workspace.run(name)
        if not done.exists():
            shutil.rmtree(run.path, ignore_errors=True)  # of a call that was cut
            run, events = perform()
            self._wait_for_end(run)
            write_json(done, {"events": [*map(asdict, events)], "restarts": self._restarts_of(run)})
        kept = json.loads(done.read_text(encoding="utf-8"))
        self._restarts[name] = kept["restarts"]
        return run, [Event(**event) for event in kept["events"]]

    def _with_faults(self, name: str, spares: int, seconds: float, stop_after: int | None) -> tuple[Run, list[Event]]:
        generator = random.Random(self.options.seed)
        run = self._run(name, spares=spares, stop_after=stop_after)
        began = self._wait_for_first_step(run)
        events: list[Event] = []
        for after, kind in schedule(self.options, until=seconds):
            if not self._wait_until(began + after, run):
                break
            if kind in ("kill", "stop"):
                events += self._signal(run, generator, kind)
            else:
                events += self._lose(run, generator, kind)
        if seconds < float("inf"):
            self._wait_until(began + seconds, run)
            triggers.touch(run, "exit")
        return run, events

    def _run(self, name: str, *, spares: int, stop_after: int | None = None) -> Run:
        config = self.workspace.config(
            name,
            model=MODEL,
            training={"steps": STEPS, "stop_after": stop_after, "eval_interval": EVALUATIONS, "global_batch_size": 16},
            parallel={"use_distributed_optimizer": True},
            data={"max_epochs": 1e9, "split": 0.1},
            checkpoint={"interval": INTERVAL, "keep_every": INTERVAL, "memory_interval": "auto"},
            chain={"recovery": "node"}
            | ({"hang_timeout": HANG_SECONDS} if self.options.stop_every < float("inf") else {}),
            job={
                "nodes": NODES,
                "ntasks_per_node": self.options.ranks_per_node,
                "spare_nodes": spares,
                "time": "1-00:00:00",
            },
            cluster={
                "name": "test",
                "scheduler": "slurm",
                "python": sys.executable,
                "environment": {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)},
            },
        )
        self.cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config], cwd=ROOT)
        return self.workspace.run(name)

    def _signal(self, run: Run, generator: random.Random, kind: str) -> list[Event]:
        """Kill or stop a random rank."""
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        chosen = self._soon(run, lambda: ranks.signal_one(run, generator, number))
        return [] if chosen is None else [Event(time=time.time(), kind=kind, rank=chosen.rank, node=chosen.node)]

    def _lose(self, run: Run, generator: random.Random, kind: str) -> list[Event]:
        """Lose a node that trains: another than the batch host, or that one: then Slurm begins the job again."""
        nodes = self._soon(run, lambda: sorted({process.node for process in ranks.living(run)}))
        begin = run.attempt(run.attempt_numbers()[-1]).read_begin()
        if not nodes or begin is None:
            return []
        host = self.cluster.job(begin.job_id)["BatchHost"]
        node = host if kind == "host" else generator.choice([node for node in nodes if node != host])
        now = time.time()
        power_loss.lose(self.cluster, node)
        return [Event(time=now, kind=kind, node=node)]

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
        """Whether the chain has ended. An attempt's end is not its, where the next job waits behind it."""
        if run.stop.exists():
            return True
        if time.monotonic() - self._queue_looked_at < QUEUE_SECONDS:
            return False
        self._queue_looked_at = time.monotonic()
        return not self._has_job(run)

    def _has_job(self, run: Run) -> bool:
        name = Plan.load(run).job_name
        return any(job.name == name for job in self.cluster.queue())

    def _wait_for_end(self, run: Run) -> None:
        while self._has_job(run):
            self._loads.append(os.getloadavg()[0])
            time.sleep(1.0)

    def _restarts_of(self, run: Run) -> dict[str, int]:
        begins = [run.attempt(number).read_begin() for number in run.attempt_numbers()]
        return {begin.job_id: int(self.cluster.job(begin.job_id)["Restarts"]) for begin in begins if begin is not None}

    def _print(self, name: str, shown: Shown, spares: int, undisturbed: timeline.Timeline) -> None:
        figures = shown.figures()
        print(
            f"{name} ({spares} spare nodes): effective training time {figures['effective_share']:.1%} of "
            f"{figures['seconds']:.0f} s ({undisturbed.seconds:.0f} s undisturbed), "
            f"a step {figures['step_seconds']:.3f} s\n"
            f"  {figures['kills']} kills, {figures['stops']} stops, {figures['nodes_lost']} nodes lost and "
            f"{figures['hosts_lost']} batch hosts, {figures['rounds']} rounds, from "
            f"{figures['rounds_from']}, {figures['steps_lost']} of {figures['steps']} steps lost, "
            f"{figures['jobs']} job{'s' * (figures['jobs'] > 1)}"
        )
        for phase, values in figures["round_seconds"].items():
            print(f"  {phase:8} median {values['median']:.2f} s, p95 {values['p95']:.2f} s")
        for what, lines in shown.faults.items():
            print(f"  {what}: {lines[0] if lines else 'the same as undisturbed'}")


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None


if __name__ == "__main__":
    sys.exit(main())
