"""Laws over histories of chains: a Slurm in memory, by seed. `python -m tests.histories SEED` replays one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.control import chain_state
from relayrun.control.chain import jobs, requested_options, supervisor
from relayrun.control.scheduler import slurm_states
from relayrun.control.scheduler.slurm import Slurm
from tests.histories import mutants
from tests.histories.clock import START, Clock, join_thread, start_thread
from tests.histories.story import history_with, play
from tests.histories.ways import DIRECTED, WAYS

ROOT = Path(__file__).resolve().parents[2]

LONG_SECONDS = 600.0
SHORT = 25
"""Histories in `make test`: others each day."""
BROKE_ONCE = {
    17: "what a full disk left unrecorded, the cluster's account, became a person's wish",
    45: "the same, with answers of Slurm that were lost",
    233: "a job that an operator requeued counted as cancelled",
    414: "the same, after the loss of a node",
    1020: "a person cancelled while the disk took no record, and the chain trained on",
    1055: "the same, by the successor",
    1795818391: "Slurm never answered when the fallback job was to be queued, and the next script died in begin",
    1795765975: "a limit kept every successor out of the queue, a kill ended the script, and status had no reason",
    520410: "a batch script was killed at its start, and a limit had refused its fallback job: status says so",
    1795902066: "Slurm had forgotten a job that a person had cancelled when the fallback job behind it started",
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


@pytest.mark.parametrize(
    ("program", "passes"), [("", True), ("raise SystemExit(1)", False), ("import time; time.sleep(60)", None)]
)
def test_a_run_that_is_not_over_in_time_catches_no_mutant(program: str, passes: bool | None, tmp_path: Path) -> None:
    assert mutants._passes(["-c", program], tmp_path, seconds=0.3 if passes is None else 30.0) is passes


with_accepted = requested_options._with_accepted


def as_the_plan_has_it(known: Any, job_id: str, options: Any) -> Any:
    """What Slurm accepted, without what a submit plugin rewrote."""
    return with_accepted(known, job_id, dict(options) | ({"qos": "normal", "account": "team"} if options else {}))


PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "reservation_ends": (slurm_states, "HELD_STATES", frozenset(), "never silent"),
    "reservation_vanishes": (slurm_states, "HELD_STATES", frozenset(), "never silent"),
    "maintenance": (Slurm, "_reservations", lambda _: {}, "the end is Slurm's"),
    "plugin_rewrites": (requested_options, "_with_accepted", lambda *words: as_the_plan_has_it(*words), "wish kept"),
    "clock_skewed": (chain_state, "clock_ahead", lambda *_: 0.0, "the end is Slurm's"),
    "file_system_fails": (supervisor, "write_stop", lambda *_, **__: None, "never silent"),
}
"""By stories: a planted defect of the product, and the law that it breaks."""
TRIES = 100


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stories", PLANTED)
def test_the_laws_see_a_defect_in_each_story(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same history keeps the laws without the defect."""
    owner, name, stand_in, law = PLANTED[stories]
    kind = history_with(*stories.split())
    monkeypatch.setattr(owner, name, stand_in)
    found = (seed for seed in range(TRIES) if any(each.startswith(law) for each in play(seed, kind).broken))
    seed = next(found)
    monkeypatch.undo()
    assert not play(seed, kind).broken


def test_the_laws_see_a_cancelling_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slurm, "_accounted_state", lambda *_: "")
    monkeypatch.setattr(jobs, "stop_chain_without_files", lambda *_, **__: "")
    assert any("a person's word" in law for law in play(1020).broken)


@pytest.mark.parametrize(("way", "seed"), [("guard", 1), ("retry", 0)])
def test_a_way_closes_the_hole_of_its_own_histories(way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random histories seldom meet it: see `tests.histories.ways`."""
    assert not play(seed, DIRECTED[way]).broken
    monkeypatch.setattr(*WAYS[way])
    assert play(seed, DIRECTED[way]).broken


def broken() -> list[str]:
    """The laws that a few histories break."""
    return [law for seed in range(8) for law in play(seed).broken]
