#!/usr/bin/env python3
"""`make drill-kills`: ranks are killed every minute and nodes lost every ten, and training goes on in its job.

    python benchmarks/kills.py [--minutes 60] [--turns 1] [--kill-every 60] [--lose-every 600] [--folder FOLDER]

A real Slurm on this machine, four simulated nodes with two ranks each and spare ones, the real training program with a
tiny model. A turn is four runs of one config, one after the other:

1. `spares`, with as many spare nodes as are lost: for MINUTES from its first step on a random rank has SIGKILL, and a
   random node other than the batch host is lost as by a power loss (SIGSTOP for all its processes, then SIGKILL, srun
   first);
2. `one_spare`, with one spare node, by the same clock, until it has done as many steps, or a part of them
   (--spares-part; --spares 0 leaves this run out);
3. `undisturbed`, as many steps, with the agents, copies and spare nodes of the first;
4. `bare`, as many steps, with neither: `chain.recovery: job`.

Every turn does as many steps as the first run of the first one, and every second one in the reverse order, so what
changes slowly on the machine counts for all. Figures are the median, smallest and largest of the turns.

`--stop-every` and `--lose-host-every` add a random rank that has SIGSTOP, and the loss of the batch host, with which
Slurm begins the job again. With `--folder`, runs that an earlier call has finished there are not done again.

Effective training time is the undisturbed run's wall time over the disturbed one's, for the same steps, each from the
begin of its first step to the end of its last. Losses are compared bit for bit, so are weights and optimizer, samples
by number. Exits 1 where a claim does not hold; each is printed.
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

from relayrun.control.rundir import triggers  # noqa: E402
from relayrun.control.rundir.plan import Plan  # noqa: E402
from relayrun.control.rundir.records import AttemptOutcome  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from relayrun.files import read_json_lines, write_json  # noqa: E402
from relayrun.lab import compare_runs  # noqa: E402
from tests import random_kills  # noqa: E402
from tests.random_kills import KillEvent, KillReport  # noqa: E402
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
STEPS_BETWEEN_COPIES = 15
"""Iterations between copies in memory, which cost about 2% of the steps here."""
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
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="of all runs; default: %(default)s")
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
        self.restarts: dict[str, dict[str, int]] = {}
        """How often Slurm began the jobs of each run again."""
        self._loads: list[float] = []
        self.load: dict[str, float] = {}
        """The mean load of the machine during each run."""

    def perform(self, lost: int) -> list[str]:
        """Do the runs, write and print the figures; return the claims that do not hold."""
        turns: list[dict[str, Any]] = []
        untrue: list[str] = []
        last = None
        for number in range(1, self.options.turns + 1):
            turn = Turn(self, number, lost, last)
            turn.perform()
            last = turn.last
            turns.append(turn.figures)
            untrue += [f"turn {number}, {claim}" for claim in turn.untrue]
        figures: dict[str, Any] = {
            "minutes": self.options.minutes,
            "kill_every_seconds": self.options.kill_every,
            "lose_every_seconds": self.options.lose_every,
            "stop_every_seconds": _finite(self.options.stop_every),
            "lose_host_every_seconds": _finite(self.options.lose_host_every),
            "nodes": NODES,
            "ranks": NODES * self.options.ranks_per_node,
            "model": MODEL,
            "load_average": statistics.mean(self.load.values()),
            **_results.spreads(turns),
            "turns": turns,
        }
        share = figures["spares"]["effective_training_time"]
        if share["min"] < random_kills.MIN_TRAINING_SHARE:
            untrue.append(f"effective training time {_part(share)}, {random_kills.MIN_TRAINING_SHARE:.0%} wanted")
        figures["does_not_hold"] = untrue
        _print(figures)
        print(_results.write("kills", figures, self.options.output))
        return untrue

    def disturbed(
        self, name: str, *, spares: int, seed: int, seconds: float = float("inf"), stop_after: int | None = None
    ) -> tuple[Run, list[KillEvent]]:
        """A run with faults by the schedule, for so many seconds from the first step on.

        `stop_after`: it ends by itself behind this iteration, else after these seconds.
        """
        return self._once(name, lambda: self._with_faults(name, spares, seed, seconds, stop_after))

    def alone(self, name: str, *, spares: int | None, stop_after: int) -> Run:
        """A run without faults; `spares`: None: without agents and copies, too."""
        return self._once(name, lambda: (self._run(name, spares=spares, stop_after=stop_after), []))[0]

    def _once(self, name: str, perform: Callable[[], tuple[Run, list[KillEvent]]]) -> tuple[Run, list[KillEvent]]:
        """Do a run to its end, if no earlier call has; return it with what happened to it."""
        done, run = self._folder / f"{name}.done.json", self.workspace.run(name)
        if not done.exists():
            shutil.rmtree(run.path, ignore_errors=True)  # of a call that was cut
            self._loads.clear()
            run, events = perform()
            self._wait_for_end(run)
            self._bring_back([event.node for event in events if event.kind in ("node", "host")])
            load = statistics.mean(self._loads or [os.getloadavg()[0]])
            kept = {"events": [*map(asdict, events)], "restarts": self._restarts_of(run), "load_average": load}
            write_json(done, kept)
        kept = json.loads(done.read_text(encoding="utf-8"))
        self.restarts[name], self.load[name] = kept["restarts"], kept["load_average"]
        return run, [KillEvent(**event) for event in kept["events"]]

    def _with_faults(
        self, name: str, spares: int, seed: int, seconds: float, stop_after: int | None
    ) -> tuple[Run, list[KillEvent]]:
        generator = random.Random(seed)
        run = self._run(name, spares=spares, stop_after=stop_after)
        began = self._wait_for_first_step(run)
        events: list[KillEvent] = []
        for after, kind in schedule(self.options, until=seconds):
            if not self._wait_until(began + after, run):
                break
            if kind in ("kill", "stop"):
                events += self._signal(run, generator, kind)
            else:
                events += self._lose(run, generator, kind)
        if stop_after is None:
            self._wait_until(began + seconds, run)
            triggers.touch_trigger(run, "exit")
        return run, events

    def _run(self, name: str, *, spares: int | None, stop_after: int | None = None) -> Run:
        hangs = {"hang_timeout": HANG_SECONDS} if self.options.stop_every < float("inf") else {}
        config = self.workspace.config(
            name,
            model=MODEL,
            training={"steps": STEPS, "stop_after": stop_after, "eval_interval": EVALUATIONS, "global_batch_size": 16},
            parallel={"use_distributed_optimizer": True},
            data={"max_epochs": 1e9, "split": 0.1},
            checkpoint={"interval": INTERVAL, "keep_every": INTERVAL}
            | ({} if spares is None else {"memory_interval": STEPS_BETWEEN_COPIES}),
            chain={} if spares is None else {"recovery": "node"} | hangs,
            job={
                "nodes": NODES,
                "ntasks_per_node": self.options.ranks_per_node,
                "spare_nodes": spares or 0,
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

    def _signal(self, run: Run, generator: random.Random, kind: str) -> list[KillEvent]:
        """Kill or stop a random rank."""
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        chosen = self._soon(run, lambda: random_kills.signal_random_rank(run, generator, number))
        return [] if chosen is None else [KillEvent(time=time.time(), kind=kind, rank=chosen.rank, node=chosen.node)]

    def _lose(self, run: Run, generator: random.Random, kind: str) -> list[KillEvent]:
        """Lose a node that trains: another than the batch host, or that one: then Slurm begins the job again."""
        nodes = self._soon(run, lambda: sorted({process.node for process in random_kills.living_ranks(run)}))
        begin = run.attempt(run.attempt_numbers()[-1]).read_begin()
        if not nodes or begin is None:
            return []
        host = self.cluster.job(begin.job_id)["BatchHost"]
        node = host if kind == "host" else generator.choice([node for node in nodes if node != host])
        now = time.time()
        power_loss.lose(self.cluster, node)
        return [KillEvent(time=now, kind=kind, node=node)]

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
                return random_kills.measure_timeline(run).began
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

    def _bring_back(self, nodes: list[str]) -> None:
        """Let nodes that were lost be there for the next run."""
        for node in nodes:
            self.cluster.start_node(node)
        self.cluster.wait_until(
            lambda: all(self.cluster.node_state(node) == "IDLE" for node in nodes), what=f"{nodes} are idle again"
        )


class Turn:
    """One of each run, all with the same steps."""

    def __init__(self, drill: Drill, number: int, lost: int, last: int | None) -> None:
        """`lost`: nodes that the first run loses; `last`: its last iteration, None: as far as its time lets it come."""
        self._drill, self._number, self._lost = drill, number, lost
        self.last = last
        self.figures: dict[str, Any] = {}
        self.untrue: list[str] = []
        self._runs: dict[str, Run] = {}
        self._events: dict[str, list[KillEvent]] = {}

    def perform(self) -> None:
        """Do the runs, those of every second turn in the reverse order, and compare them."""
        names = ["spares", "one_spare", "undisturbed", "bare"]
        for name in names if self._number % 2 else reversed(names):
            if name != "one_spare" or self._drill.options.spares:
                self._once(name)
        self._compare()

    @property
    def _part(self) -> int:
        """Steps of the run with one spare node; the undisturbed run saves and evaluates behind the last one, too."""
        part, last = self._drill.options.spares_part, self._last
        return last if part >= 1 else int(part * last) // EVALUATIONS * EVALUATIONS or last

    @property
    def _last(self) -> int:
        if self.last is None:
            run = self._runs["spares"]
            outcome = AttemptOutcome.read(run.attempt(run.attempt_numbers()[-1]).outcome)
            if outcome is None:
                raise SystemExit(f"the run has not come to its end: relayrun status {run.path}")
            self.last = outcome.iteration
        return self.last

    def _once(self, name: str) -> None:
        drill, seed = self._drill, self._drill.options.seed + self._number - 1
        called = f"{name.replace('_', '-')}-{self._number}"
        if name == "spares":
            seconds = 60 * drill.options.minutes
            found = drill.disturbed(called, spares=self._lost, seed=seed, seconds=seconds, stop_after=self.last)
        elif name == "one_spare":
            found = drill.disturbed(called, spares=drill.options.spares, seed=seed, stop_after=self._part)
        else:
            spares = self._lost if name == "undisturbed" else None
            found = drill.alone(called, spares=spares, stop_after=self._last), []
        self._runs[name], self._events[name] = found

    def _compare(self) -> None:
        whole, bare = self._runs["undisturbed"], self._runs["bare"]
        for name, run in (("undisturbed", whole), ("bare", bare)):
            line = random_kills.measure_timeline(run)
            self.figures[name] = {
                "seconds": line.seconds,
                "step_seconds": line.step,
                "steps": line.steps,
                "load_average": self._drill.load[run.path.name],
            }
        self.figures["undisturbed"]["over_bare"] = seconds_to(whole, self._last) / seconds_to(bare, self._last)
        _, weights = compare_runs.checkpoint_differences(
            bare.checkpoint(self._last), whole.checkpoint(self._last), tensors_only=True
        )
        differs = [*compare_runs.loss_differences(bare, whole, self._last), *weights]
        self.untrue += [f"without agents and copies: {line}" for line in differs[:1]]
        spares = {"spares": self._lost, "one_spare": self._drill.options.spares}
        for name in (each for each in spares if each in self._runs):
            run, until = self._runs[name], self._last if name == "spares" else self._part
            restarts = self._drill.restarts[run.path.name]
            shown = random_kills.report_kills(run, whole, last=until, events=self._events[name], restarts=restarts)
            self.figures[name] = shown.figures() | {
                "spare_nodes": spares[name],
                "load_average": self._drill.load[run.path.name],
                "undisturbed_seconds": seconds_to(whole, until),
                "effective_training_time": seconds_to(whole, until) / shown.timeline.seconds,
            }
            self.untrue += [f"{name}: {claim}" for claim in shown.failed_claims(spares=spares[name])]
            _print_run(f"turn {self._number}, {name}", shown, self.figures[name])


def seconds_to(run: Run, iteration: int) -> float:
    """Wall time of a run of one job without restarts, from the begin of its first step to the end of this one."""
    times = {
        line["iteration"]: float(line["time"]) for line in read_json_lines(run.attempt(1).metrics) if "loss" in line
    }
    return times[iteration] - random_kills.measure_timeline(run).began


def _print_run(name: str, shown: KillReport, figures: dict[str, Any]) -> None:
    print(
        f"{name} ({figures['spare_nodes']} spare nodes): {figures['seconds']:.1f} s for {figures['steps']} steps, "
        f"{figures['undisturbed_seconds']:.1f} s undisturbed: effective training time "
        f"{figures['effective_training_time']:.1%}; {figures['counted_share']:.1%} of its time in steps that count\n"
        f"  {figures['kills']} kills, {figures['stops']} stops, {figures['nodes_lost']} nodes lost and "
        f"{figures['hosts_lost']} batch hosts, {figures['restarts']} restarts, from "
        f"{figures['restarts_from']}, {figures['steps_lost']} of {figures['steps']} steps lost, "
        f"{figures['jobs']} job{'s' * (figures['jobs'] > 1)}"
    )
    for phase, values in figures["restart_seconds"].items():
        print(f"  {phase:8} median {values['median']:.2f} s, p95 {values['p95']:.2f} s")
    for what, lines in shown.faults.items():
        print(f"  {what}: {lines[0] if lines else 'the same as undisturbed'}")


def _print(figures: dict[str, Any]) -> None:
    turns = len(figures["turns"])
    print(f"{turns} turn{'s' * (turns > 1)}, median (smallest to largest):")
    for name in ("bare", "undisturbed", "spares", "one_spare"):
        if name in figures:
            seconds, step = figures[name]["seconds"], figures[name]["step_seconds"]
            print(
                f"  {name:11} {seconds['median']:.1f} s ({seconds['min']:.1f} to {seconds['max']:.1f}), a step "
                f"{step['median']:.4f} s ({step['min']:.4f} to {step['max']:.4f})"
            )
    cost = {end: value - 1 for end, value in figures["undisturbed"]["over_bare"].items()}
    print(f"  agents and copies add {_part(cost)} to the time of the run without them")
    for name in ("spares", "one_spare"):
        if name in figures:
            print(f"  effective training time, {name}: {_part(figures[name]['effective_training_time'])}")
    print(f"  {os.cpu_count()} processors, load {figures['load_average']:.1f}")


def _part(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1%} ({spread['min']:.1%} to {spread['max']:.1%})"


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None


if __name__ == "__main__":
    sys.exit(main())
