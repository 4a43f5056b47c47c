"""Steps of a pipeline and the stages of `dumps dedup`, killed at random moments: the bytes of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from relayrun.tokens.curate.dedup_jobs import deduplicate
from tests.tokens.test_dedup import HERE as DEDUP
from tests.tokens.test_dedup import PARAGRAPHS, Place, documents, parts
from tests.tokens.test_dump_steps import HERE as STEPS
from tests.tokens.test_dump_steps import Workplace
from tests.waiting import wait_for

KILLS = 10
"""Kills of a test."""
TESTS = 10
"""Tests of each kind of work: a hundred kills."""
SHORT = 2
"""The kills of the test that `make test` has, too."""


class Work(Protocol):
    """What is killed, with a name for each output folder."""

    def run(self, out: str) -> None:
        """Do it, or what is left of it."""

    def content(self, out: str) -> dict[str, Any]:
        """Every byte that must be the same."""


class Steps:
    """Shards of six files on two processes, with a filter, random numbers and a step of the user's own."""

    def __init__(self, folder: Path) -> None:
        rows = [[f"{row} {'drop me ' * (row % 7 == 0)}text {file} {row}" for row in range(300)] for file in range(6)]
        self.place = Workplace(folder, rows)

    def run(self, out: str) -> None:
        even, half = ({"lambda": {"filter_function": f"{STEPS}.{name}"}} for name in ("is_even", "keeps_half"))
        self.place.run([f"{STEPS}.Upper", "sampler", even, half], out, tasks=6, workers=2)

    def content(self, out: str) -> dict[str, Any]:
        shards = self.place.record(out)["shards"]
        return {**self.place.bytes(out), **{name: shards[name]["steps"] for name in shards}}


class Stages:
    """All nine stages on two processes, behind a step, with parquet of dropped documents."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder, documents(number=300) + parts("\n", 100), files=5)

    def run(self, out: str) -> None:
        given = {"evaluations": f"{self.place.folder}/evaluations", "decontamination": {"n_grams": 5}}
        steps = ({"lambda": {"filter_function": f"{DEDUP}.is_long"}},)
        config = self.place.config(out, tasks=4, workers=2, pipeline=steps, sentences=PARAGRAPHS, **given)
        deduplicate(config.model_copy(update={"exclusions": "parquet"}), wait=True)

    def content(self, out: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in (self.place.folder / out).rglob("*"):
            name = str(file.relative_to(self.place.folder / out))
            assert "tmp" not in name
            if file.is_file() and file.parent.name != "records" and file.name != "settings.json":
                found[name] = file.read_bytes()
            elif file.is_file():
                found[name] = {name: value for name, value in json.loads(file.read_text()).items() if name != "seconds"}
        return found


def begin(run: Callable[[str], None], out: str) -> Any:
    """Start the work in a group of processes of its own."""

    def work() -> None:
        os.setsid()
        with open(os.devnull, "w") as sys.stdout:
            run(out)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def kill(process: Any, generator: random.Random, moment: float) -> str | None:
    """Kill one worker, the parent, or all of them after so many seconds; None if it was done before."""
    time.sleep(moment)
    victim = generator.choice(["worker", "parent", "all"])
    workers: list[int] = []
    with contextlib.suppress(OSError):
        workers = [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
    victim = victim if victim != "worker" or workers else "parent"
    with contextlib.suppress(ProcessLookupError):
        if victim == "all":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(generator.choice(workers) if victim == "worker" else process.pid, signal.SIGKILL)
    process.join(120)
    assert process.exitcode is not None, "it hangs after a kill"
    wait_for(lambda: not any(Path(f"/proc/{each}").exists() for each in workers), 60, words="no worker is left")
    return victim if process.exitcode else None


def finish(work: Work, out: str) -> None:
    process = begin(work.run, out)
    process.join(240)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        pytest.param(0, SHORT, marks=pytest.mark.slow),
        *(pytest.param(seed, KILLS, marks=pytest.mark.long) for seed in range(1, TESTS + 1)),
    ],
)
@pytest.mark.parametrize("kind", [Steps, Stages])
def test_kills_at_random_moments_leave_the_same_bytes(
    tmp_path: Path, kind: Callable[[Path], Work], seed: int, kills: int
) -> None:
    generator, work, killed = random.Random(seed), kind(tmp_path), list[str]()
    started = time.monotonic()
    finish(work, "undisturbed")
    seconds, whole, folders = time.monotonic() - started, work.content("undisturbed"), 0
    assert len(whole) > 12
    assert kind is Steps or any("repeated" in name and name.endswith(".c4_dup") for name in whole)
    while len(killed) < kills:
        out = f"out{folders}"
        folders += 1
        while len(killed) < kills:
            victim = kill(begin(work.run, out), generator, generator.uniform(0, seconds))
            if victim is None:
                break
            killed.append(victim)
        finish(work, out)
        assert work.content(out) == whole, killed
    print(f"seed {seed}: {len(killed)} kills of {seconds:.2f} s in {folders} folders: {killed}")
