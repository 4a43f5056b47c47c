"""Laws over histories of chains: a Slurm in memory, by seed. `python -m tests.histories SEED` replays one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relayrun.control.chain import requested_options
from relayrun.control.scheduler.slurm import Slurm
from tests.histories.clock import START, Clock, join_thread, start_thread
from tests.histories.story import play

ROOT = Path(__file__).resolve().parents[2]

LONG_SECONDS = 600.0
SHORT = 25
"""Histories in `make test`: others each day."""
BROKE_ONCE = {
    17: "what a full disk left unrecorded, the cluster's account, became a person's wish",
    45: "the same, with answers of Slurm that were lost",
    233: "a job that an operator requeued counted as cancelled",
    414: "the same, after the loss of a node",
    1795765975: "a limit kept every successor out of the queue, a kill ended the script, and status had no reason",
}


def keeps_the_laws(seed: int) -> None:
    """Play a history; fail with all that happened if it breaks a law."""
    outcome = play(seed)
    told = "\n".join([*outcome.lines, *outcome.broken, f"replay: python -m tests.histories {seed}"])
    assert not outcome.broken, told


@pytest.mark.parametrize("seed", BROKE_ONCE)
def test_histories_that_broke_a_law(seed: int) -> None:
    keeps_the_laws(seed)


def test_todays_histories_keep_the_laws() -> None:
    first = int(time.time() // 86_400) * SHORT
    for seed in range(first, first + SHORT):
        keeps_the_laws(seed)


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_SECONDS)
def test_ten_minutes_of_histories_keep_the_laws() -> None:
    seed, until = int(time.time()), time.monotonic() + LONG_SECONDS
    while time.monotonic() < until:
        keeps_the_laws(seed)
        seed += 1


SAME = (17, 45, 1795765975)


def test_a_history_is_the_same_to_the_last_line() -> None:
    told = "".join(f"{line}\n" for seed in SAME for line in play(seed).lines)
    program = f"from tests.histories.story import play; [print(*play(n).lines, sep='\\n') for n in {SAME}]"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    again = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True
    )
    assert again.stdout.decode() == told


def test_a_second_thread_takes_no_part_in_a_history() -> None:
    clock = Clock()
    began: list[str] = []

    def write() -> None:
        with contextlib.suppress(AssertionError):
            os.mkdir("/nowhere/at/all")

    def program() -> int:
        helper = threading.Thread(target=lambda: began.append(threading.current_thread().name))
        helper.start()
        helper.join()
        start_thread(stranger := threading.Thread(target=write))
        join_thread(stranger)
        return 0

    with clock.installed(lambda: None, lambda: None):
        clock.start("program", program)
        clock.run(START + 1.0)
    assert began == ["program"]
    assert [str(error).partition(" works")[2] for error in clock.errors] == [" beside program"]


def test_nothing_of_a_history_is_left() -> None:
    before = dict(os.environ), time.time, os.open
    play(7)
    assert (dict(os.environ), time.time, os.open) == before


def test_the_laws_see_a_job_that_is_taken_for_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slurm, "cancelled", lambda *_, **__: True)
    assert any("no person did anything" in law for law in broken())


def test_the_laws_see_a_wish_that_nobody_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requested_options, "wished_options", lambda _: {"qos": "high"})
    assert any("which nobody wished" in law for law in broken())


def test_the_laws_see_a_chain_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slurm, "submit", lambda *_, **__: "1")
    assert any("no job, no STOP" in law for law in broken())


def broken() -> list[str]:
    """The laws that a few histories break."""
    return [law for seed in range(8) for law in play(seed).broken]
