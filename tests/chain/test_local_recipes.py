"""The recipes of docs/how-to/command.md with the real packages, killed at ten random moments each.

`RELAYRUN_RECIPES_DIR` names a folder with an environment for each package, for instance `torchtitan/bin/python`.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir.run import Run, stop_reason
from tests import command_examples
from tests.command_examples import assert_same_checkpoints, config, left_over, losses
from tests.waiting import wait_for

from .test_local_megatron import job_pid

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(5400)]

ON_CPUS = Path(__file__).resolve().parents[1] / "torchtitan_on_cpu.py"
RECIPES = {
    "huggingface": ("transformers[torch]", "checkpoint-{}", 400),
    "lightning_trainer": ("lightning", "step-{}.ckpt", 400),
    "torchtitan_trainer": ("torchtitan", "checkpoint/step-{}", 160),
}
"""By the name of the example: its package, its checkpoints, and the last iteration."""
KEPT = {"huggingface": 3}
"""Newest checkpoints that a program keeps itself; others keep all."""
KILLS = [signal.SIGKILL, signal.SIGUSR2] * 5
SECONDS = 40.0
"""Longest time between the start of a rank and its kill: imports, the load of a checkpoint, steps, saves."""


def python_of(package: str) -> str:
    """The Python of a recipe; skips where there is none."""
    folder = os.environ.get("RELAYRUN_RECIPES_DIR", "")
    found = Path(folder) / package.partition("[")[0] / "bin/python"
    if not folder or not found.exists():
        pytest.skip(f"RELAYRUN_RECIPES_DIR names no folder with {found}: make it, and pip install {package} in it")
    return str(found)


def written(folder: Path, name: str, *pace: str) -> Path:
    package, _, last = RECIPES[name]
    site = {
        "name": "local",
        "scheduler": "local",
        "python": python_of(package),
        "environment": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    }
    chain = {"max_failed_attempts": 20, "auto_requeue": True}
    path = config(folder, name, last=last, pace=["--save-at=5", *pace], cluster=site, chain=chain)
    text = path.read_text()
    if name == "torchtitan_trainer":
        script = next(line for line in text.splitlines() if line.endswith(f"{name}.py"))
        path.write_text(text.replace(script, f"{script.partition('- ')[0]}- {ON_CPUS}\n{script}"))
    return path


def ranks_of(run: Run) -> set[int]:
    return {pid for pid, words in command_examples.processes(run) if str(command_examples.PACED) in words[:4]}


def _is_up(run: Run, before: set[int], chain: threading.Thread) -> bool:
    return bool(ranks_of(run) - before) or not chain.is_alive()


class Custody:
    """The bytes of every checkpoint since it was recorded, and those that the program has removed itself."""

    def __init__(self, run: Run) -> None:
        self.run, self.hashes = run, dict[Path, dict[str, str]]()

    def look(self, moment: float = 0.0) -> bool:
        """Take up what is recorded; return whether it is that moment."""
        for number in self.run.attempt_numbers():
            for commit in self.run.attempt(number).read_commits():
                path = Path(commit.path)
                if path not in self.hashes and path.exists():
                    self.hashes[path] = hashes(path)
        return time.monotonic() >= moment

    def lost(self, kept: int) -> list[Path]:
        """Checkpoints that changed, or of which a part is gone, or that are gone although `kept` stay."""
        newest = sorted(self.hashes, key=lambda path: int(re.findall(r"\d+", path.name)[0]))[-kept:]
        there = [path for path in self.hashes if path.exists() or path in newest]
        return [path for path in there if hashes(path) != self.hashes[path]]


def hashes(path: Path) -> dict[str, str]:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path] * path.exists()
    return {str(each): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def kill(run: Run, chain: threading.Thread, custody: Custody, seed: int) -> None:
    """Each rank is killed, or its job asked to leave, at a random moment behind its start."""
    generator, before = random.Random(seed), set[int]()
    kills = generator.sample(KILLS, len(KILLS))
    for number, how in enumerate(kills):
        wait_for(partial(_is_up, run, before, chain), 900)
        wait_for(partial(custody.look, time.monotonic() + generator.uniform(0, SECONDS)), 2 * SECONDS)
        assert chain.is_alive(), (number, stop_reason(run))
        pids = ranks_of(run)
        for pid in pids - before if how is signal.SIGKILL else {job_pid(run, number + 1)}:
            os.kill(pid, how)
        before |= pids


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_killed_at_ten_random_moments_trains_as_undisturbed(name: str, tmp_path: Path) -> None:
    _, final, last = RECIPES[name]
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    fast = tmp_path / "fast"
    whole, cut = (Run(tmp_path / folder / name) for folder in ("whole", "cut"))
    assert main(["submit", str(written(tmp_path / "whole", name))]) == 0
    path = written(tmp_path / "cut", name, "--seconds=0.5", f"--fast-when={fast}")
    chain, custody = threading.Thread(target=main, args=(["submit", str(path)],)), Custody(cut)
    chain.start()
    kill(cut, chain, custody, seed=46)
    fast.touch()
    chain.join(1800)
    assert not chain.is_alive()
    for run in (whole, cut):
        assert (stop_reason(run) or "").startswith(f"the last iteration, {last}, is saved")
    assert len(cut.attempt_numbers()) == len(KILLS) + 1
    assert sorted(losses(cut.metrics_view)) == list(range(1, last + 1))
    assert losses(cut.metrics_view) == losses(whole.metrics_view)
    assert_same_checkpoints(whole.checkpoints / final.format(last), cut.checkpoints / final.format(last))
    custody.look()
    assert custody.lost(KEPT.get(name, len(custody.hashes))) == []
    assert len(custody.hashes) > 1
    assert left_over(cut) == []
