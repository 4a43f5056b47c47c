#!/usr/bin/env python3
"""Seconds from a SIGKILL of a rank to the next step of all ranks: our restarts, and those who restart ranks elsewhere.

    pip install --target X --no-deps nvidia-resiliency-ext==0.4.1
    PYTHONPATH=X TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python benchmarks/recovery.py

The variable keeps the store of in_process from one that torch shares.

One toy (`_recovery_toy.py`: two ranks over gloo, steps of 50 ms, a checkpoint every five) below four launchers:

| | |
|---|---|
| torchrun | its elastic agent starts all ranks anew |
| ft_launcher | the launcher of nvidia-resiliency-ext, likewise |
| in_process | nvidia-resiliency-ext inside the process: the ranks that live go on without the dead one |
| command | our restarts with trainer `command` |

and our own trainer, a tiny Llama of megatron-core with the same steps, whose ranks are forked: `native_disk`, and
`native_memory` with copies in memory. The launchers take turns, each with some kills; rank 1 is killed, at a random
moment. Steps lost are those done before the kill that are done again. `equal`: every loss of rank 0 is, bit for
bit, that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' workspace

import _results  # noqa: E402

from relayrun.config.compose import yaml_file  # noqa: E402
from relayrun.control.rundir import restarts  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from relayrun.control.scheduler.local_srun import free_port  # noqa: E402
from relayrun.files import read_json_lines  # noqa: E402
from tests.workspace import Workspace, steps  # noqa: E402

TOY = Path(__file__).resolve().parent / "_recovery_toy.py"
RANKS = 2
LAST = 100_000
"""Nobody comes so far: a side is ended behind its last kill."""
REFERENCE = 1500
"""Iterations of the undisturbed toy; a side whose kills take longer compares so many."""
PATIENCE = 240.0

Lines = list[dict[str, Any]]


class Toy:
    """The toy below one launcher."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str], *, side: str) -> None:
        self.folder, self._in_process, self._ours = folder, side == "in_process", side == "command"
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with open(folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
            )

    def lines(self, rank: int) -> Lines:
        """What a rank has said."""
        return list(read_json_lines(self.folder / f"rank-{rank}.jsonl"))

    def newest(self, rank: int) -> Lines:
        """The same since its last start, whose line is the first."""
        lines = self.lines(rank)
        last = max((number for number, line in enumerate(lines) if "start" in line), default=len(lines))
        return lines[last:]

    def wait_for_steps(self, count: int) -> None:
        """Until each rank has done so many since its last start."""
        _wait(lambda: all(len(self.newest(rank)) > count for rank in range(RANKS)), self.folder)

    def kill(self) -> tuple[float, int]:
        """SIGKILL rank 1; return the seconds to the next step of all ranks that are there then, and the steps lost."""
        before = [line["iteration"] for line in self.newest(0) if "iteration" in line][-1]
        began = {rank: self.newest(rank)[0]["time"] for rank in range(RANKS)}
        os.kill(self.newest(1)[0]["pid"], signal.SIGKILL)
        killed = time.time()
        who = [0] if self._in_process else list(range(RANKS))

        def again() -> bool:
            news = [self.newest(rank) for rank in who]
            return all(new[0]["time"] != began[rank] and len(new) > 1 for rank, new in zip(who, news, strict=True))

        _wait(again, self.folder)
        news = [self.newest(rank) for rank in who]
        return max(new[1]["time"] for new in news) - killed, before - news[0][0]["start"]

    def end(self) -> None:
        """End the launcher and all that it started."""
        self.process.send_signal(signal.SIGINT if self._ours else signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for rank in range(RANKS):
            for line in self.lines(rank):
                if "pid" in line:
                    _end(line["pid"], str(self.folder))
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def losses(self) -> dict[int, str]:
        """The loss of each iteration of rank 0 as it was computed last."""
        return {line["iteration"]: line["loss"] for line in self.lines(0) if "iteration" in line}


def _end(pid: int, mark: str) -> None:
    with contextlib.suppress(OSError):
        if mark in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
            os.kill(pid, signal.SIGKILL)


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder.name}: {(folder / 'log').read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def toy(side: str, folder: Path, last: int = LAST) -> Toy:
    """Start the toy below this launcher."""
    words = [str(TOY), str(folder), str(last)]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}  # else it never comes back
    port = str(free_port())
    rendezvous = ["--nnodes=1", f"--nproc-per-node={RANKS}", "--max-restarts=1000", "--rdzv-backend=c10d"]
    rendezvous += [f"--rdzv-endpoint=127.0.0.1:{port}", "--monitor-interval=0.1"]
    if side == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *words]
    elif side == "ft_launcher":
        program = "nvidia_resiliency_ext.fault_tolerance.launcher"
        command = [sys.executable, "-m", program, *rendezvous, "--ignore-missing-fault-tol-cfg", *words]
    elif side == "in_process":
        command = [sys.executable, str(Path(__file__)), "--start-toy", *words, "--in-process"]
    else:
        values = {
            "project": "benchmarks",
            "name": "recovery",
            "run_dir": str(folder),
            "trainer": "command",
            "command": {
                "run": [sys.executable, *words],
                "progress": r"^step (?P<iteration>\d+) loss (?P<loss>\S+)",
                "checkpoint": {"pattern": "step-{iteration}.pt"},
                "steps": last,
            },
            "chain": {"recovery": "node", "max_failed_restarts": 1000},
            "job": {"time": "30", "ntasks_per_node": RANKS},
            "cluster": {"name": "local", "scheduler": "local"},
        }
        config = folder.parent / f"{folder.name}.yaml"
        config.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
        command = [sys.executable, "-m", "relayrun.cli", "submit", str(config)]
    return Toy(folder, command, environment, side=side)


def start_toy(words: list[str]) -> int:
    """Start the ranks of the toy and nothing around them: who restarts inside a process needs no launcher."""
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    variables = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    ranks = [subprocess.Popen([sys.executable, *words], env=shared | own) for own in variables]
    signal.signal(signal.SIGTERM, lambda _number, _frame: [rank.kill() for rank in ranks])
    return max(abs(rank.wait()) for rank in ranks)


class Native:
    """Our own trainer, forked; `memory`: with copies in memory."""

    def __init__(self, folder: Path, *, memory: bool) -> None:
        folder.mkdir(parents=True)
        workspace = Workspace.make(folder)
        slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "step-delay=0.05"}}
        sections: dict[str, Any] = {
            "training": {"steps": LAST, "hooks": [slow]},
            "data": {"max_epochs": LAST},
            "checkpoint": {"interval": 5, "async_save": False, "memory_interval": int(memory)},
            "parallel": {"use_distributed_optimizer": True},
            "chain": {"recovery": "node", "max_failed_restarts": 1000, "auto_requeue": False},
            "job": {"time": "30", "ntasks_per_node": RANKS},
            "cluster": {"python": sys.executable},
        }
        self.folder, self.run = folder, workspace.run("run")
        config = workspace.config("run", **sections)
        with open(folder / "log", "ab") as log:
            command = [sys.executable, "-m", "relayrun.cli", "submit", str(config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
        self._sections, self._workspace = sections, workspace

    def wait_for_steps(self, count: int) -> None:
        """Until rank 0 has done so many since the newest restart began."""
        attempt = self.run.attempt(1)

        def done() -> bool:
            failed = restarts.read_failed_restarts(attempt)
            base = failed[-1].next_iteration if failed else 0
            return restarts.newest_recorded_iteration(attempt) >= base + count if attempt.begin.exists() else False

        _wait(done, self.folder)

    def kill(self) -> tuple[float, int]:
        """SIGKILL rank 1; return the seconds to the next step, and the steps lost."""
        attempt = self.run.attempt(1)
        count = len(restarts.read_failed_restarts(attempt))
        os.kill(_forked(self.run), signal.SIGKILL)
        killed = time.time()
        _wait(
            lambda: (
                len(restarts.read_failed_restarts(attempt)) > count
                and "all" in restarts.read_failed_restarts(attempt)[-1].seconds
            ),
            self.folder,
        )
        failed = restarts.read_failed_restarts(attempt)[-1]
        return failed.time + failed.seconds["all"] - killed, failed.steps_lost

    def end(self) -> None:
        """Have it cancel its job, as a person would."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def losses(self) -> dict[int, str]:
        """The loss of each iteration."""
        return {iteration: loss for iteration, (loss, _) in steps(self.run).items()}

    def undisturbed(self, last: int) -> dict[int, str]:
        """The losses of a run that nobody kills."""
        sections = self._sections | {
            "training": {"steps": LAST, "stop_after": last},  # the learning rate is planned for all of them
            "chain": {"recovery": "job"},
            "checkpoint": {"interval": 100_000, "async_save": False},
        }
        config = self._workspace.config("whole", **sections)
        command = [sys.executable, "-m", "relayrun.cli", "submit", str(config)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return {iteration: loss for iteration, (loss, _) in steps(self._workspace.run("whole")).items()}


def _forked(run: Run) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, name = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "comm").read_text().strip()
        except OSError:
            continue
        if f"--run-dir={run.path}".encode() in words and name == "rank-1":
            return int(entry.name)
    raise ProcessLookupError(f"rank 1 of {run.path}")


SIDES = ("native_memory", "native_disk", "command", "ft_launcher", "torchrun", "in_process")


def main() -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--kills", type=int, default=4, help="in each turn of each side; default: %(default)s")
    parser.add_argument("--sides", nargs="*", default=list(SIDES))
    options = parser.parse_args()
    generator = random.Random(1)
    top = Path(tempfile.mkdtemp(prefix="recovery-"))
    found: dict[str, list[tuple[float, int]]] = {side: [] for side in options.sides}
    equal: dict[str, bool] = dict.fromkeys(options.sides, True)
    load = [os.getloadavg()[0]]
    reference = toy("torchrun", top / "reference", REFERENCE)
    reference.process.wait()
    expected = reference.losses()
    assert len(expected) == REFERENCE, (top / "reference/log").read_text()
    for turn in range(options.turns):
        for side in options.sides:
            folder = top / f"{side}-{turn}"
            native = side.startswith("native")
            one = Native(folder, memory=side == "native_memory") if native else toy(side, folder)
            kills = 1 if side == "in_process" else options.kills  # the dead rank does not come back
            try:
                for _ in range(kills):
                    one.wait_for_steps(6)
                    time.sleep(generator.uniform(0, 1))
                    found[side].append(one.kill())
                    print(side, *found[side][-1], flush=True)
                one.wait_for_steps(6) if side != "in_process" else time.sleep(2)
            finally:
                one.end()
            losses = one.losses()
            whole = one.undisturbed(max(losses)) if isinstance(one, Native) else expected
            compared = losses.keys() & whole.keys()
            equal[side] &= bool(compared) and all(losses[at] == whole[at] for at in compared)
            load.append(os.getloadavg()[0])
    figures = {side: summary(found[side], equal[side]) for side in options.sides}
    _results.write("recovery", {**figures, "load_average": statistics.median(load), "ranks": RANKS})
    shutil.rmtree(top, ignore_errors=True)
    print(json.dumps(figures, indent=1))
    return 0


def summary(kills: list[tuple[float, int]], equal: bool) -> dict[str, Any]:
    """What is told of one side."""
    seconds = sorted(second for second, _ in kills)
    at = min(len(seconds) - 1, int(0.95 * len(seconds)))
    lost = [steps for _, steps in kills]
    return {
        "kills": len(kills),
        "seconds": _results.spread(seconds),
        "p95": seconds[at],
        "steps_lost": _results.spread(lost),
        "equal": int(equal),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start-toy"]:
        sys.exit(start_toy(sys.argv[2:]))
    sys.exit(main())
