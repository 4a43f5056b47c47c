"""How a chain ended is a field of STOP and of end.json: no reader judges by the words of the reason."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.chain.campaign import condition_readiness
from relayrun.control.decisions import EndFacts, StartFacts, decide_at_end, decide_at_start
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.campaign import Campaign, CampaignMember
from relayrun.control.rundir.records import AttemptEnd, ChainEnd, ChainEndState
from relayrun.control.rundir.run import Run, parse_stop, read_stop, stop_reason, write_stop
from tests.history import make_history

SAVED = "the last iteration, 100, is saved"
"""A foreign program's words, which differ from those of the chain."""


def end_facts(**changes: Any) -> EndFacts:
    facts: dict[str, Any] = {
        "outcome": "done",
        "outcome_reason": SAVED,
        "exit_code": 0,
        "hang": None,
        "cancelled": False,
    }
    counts: dict[str, Any] = {"base_iteration": 0, "durable_iteration": 100, "total_steps": None, "failed_attempts": 2}
    return EndFacts(**{**facts, **counts, "chain": ChainSection(auto_requeue=True), **changes})


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "done"),
        ({"total_steps": 100}, "done"),
        ({"outcome": "saved", "stop_after": 90}, "done"),
        ({"outcome": "exit"}, "stopped"),
        ({"outcome": None, "cancelled": True}, "stopped"),
        ({"outcome": "saved", "reservation": "reservation camp ended"}, "stopped"),
        ({"outcome": "fatal"}, "failed"),
        ({"outcome": None, "durable_iteration": 0}, "failed"),
        ({"outcome": "saved"}, None),
        ({"outcome": "saved", "attempts_without_time": 2}, None),
        ({"outcome": "saved", "attempts_without_time": 3}, "failed"),
        ({"outcome": None, "durable_iteration": 0, "failed_attempts": 0}, None),
        ({"outcome": None, "durable_iteration": 0, "failed_attempts": 0, "same_again": True}, "failed"),
        ({"outcome": None, "same_again": True}, None),  # it brought a new checkpoint
    ],
)
def test_an_attempt_ends_the_chain_with_a_state(changes: dict[str, Any], state: ChainEndState | None) -> None:
    decision = decide_at_end(end_facts(**changes))
    assert decision.chain_end == state
    assert (decision.action == "stop") == (state is not None)


@pytest.mark.parametrize(("failed", "waits", "delay"), [(0, False, 30), (1, False, 60), (0, True, 300), (1, True, 600)])
def test_a_network_or_a_file_system_gets_more_time_to_pass(failed: int, waits: bool, delay: int) -> None:
    facts = end_facts(outcome=None, durable_iteration=0, failed_attempts=failed, waits=waits)
    assert (decide_at_end(facts).action, decide_at_end(facts).delay) == ("retry", delay)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"stopped": ChainEnd("stopped", "the last iteration, 100, is saved")}, "stopped"),
        ({"stopped": ChainEnd("stopped", "")}, "stopped"),
        ({"total_steps": 100}, "done"),
        ({"stop_after": 100}, "done"),
        ({"exit_trigger": "ann"}, "stopped"),
        ({"predecessor_cancelled": True}, "stopped"),
        ({"verdict": ChainEnd("done", SAVED)}, "done"),
        ({"failed_attempts": 3}, "failed"),
        ({"budget": "the budget is over"}, "stopped"),
        ({}, None),
    ],
)
def test_a_job_that_does_not_start_the_ranks_gives_the_state(
    changes: dict[str, Any], state: ChainEndState | None
) -> None:
    facts: dict[str, Any] = {
        "stopped": None,
        "durable_iteration": 100,
        "total_steps": None,
        "exit_trigger": None,
        "verdict": None,
    }
    counts: dict[str, Any] = {"predecessor_cancelled": False, "failed_attempts": 0, "chain": ChainSection()}
    decision = decide_at_start(StartFacts(**{**facts, **counts, **changes}))
    assert decision.chain_end == state
    assert (decision.action == "stop") == (state is not None)


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_stop_keeps_state_and_reason(tmp_path: Path, state: ChainEndState) -> None:
    run = Run(tmp_path)
    write_stop(run, ChainEnd(state, "state: done,\nsays somebody"), words="of a log")
    assert run.stop.read_text().splitlines()[:3] == [f"state: {state}", "reason: state: done, says somebody", ""]
    assert read_stop(run) == ChainEnd(state, "state: done, says somebody")
    write_stop(run, ChainEnd("failed", "the first reason stays"))
    assert stop_reason(run) == "state: done, says somebody"
    assert "of a log" in parse_stop(run.stop.read_text())[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("enough\n", "enough"),
        ("enough\r\nof it", "enough"),
        ("", ""),
        ("the last iteration, 100, is saved\n", "the last iteration, 100, is saved"),
        ("state: finished\nreason: x\n", "state: finished"),
        ("\nstate: done\nreason: x\n", ""),
    ],
)
def test_a_stop_without_a_head_is_a_persons(text: str, reason: str) -> None:
    assert parse_stop(text)[0] == ChainEnd("stopped", reason)


def test_a_person_writes_stop_with_echo(tmp_path: Path) -> None:
    run = Run(tmp_path)
    subprocess.run(["bash", "-c", 'echo "no more money" >"$1"', "bash", run.stop], check=True, timeout=60)
    assert read_stop(run) == ChainEnd("stopped", "no more money")


def test_a_person_declares_a_run_done(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stop.write_bytes(b"state: done\r\nreason: good enough\r\n")
    assert read_stop(run) == ChainEnd("done", "good enough")


def test_the_record_of_an_attempt_keeps_the_end_of_the_chain(tmp_path: Path) -> None:
    """A supervisor may be killed between end.json and STOP: the next one takes the state from the record."""
    attempt = Attempt(str(tmp_path))
    end = AttemptEnd(
        attempt=1,
        cause="done",
        reason=SAVED,
        exit_code=0,
        durable_iteration=100,
        progress=True,
        end_time=1.0,
        action="stop",
        chain_end="done",
    )
    end.write(attempt.end)
    read = attempt.read_end()
    assert read is not None
    assert read.verdict == ChainEnd("done", SAVED)


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_a_stage_begins_after_a_done_run_whatever_its_words(tmp_path: Path, state: ChainEndState) -> None:
    run = make_history(tmp_path / "first", lines=30, attempts=1)
    write_stop(run, ChainEnd(state, SAVED))
    stages = [
        CampaignMember(name="first", run_dir=str(run.path)),
        CampaignMember(name="second", run_dir=str(tmp_path / "second"), after="first"),
    ]
    ready = condition_readiness(
        Campaign(kind="stages", name="p/c", owner=0, scheduler="local", at_once=None, members=stages), stages[1]
    )
    assert (ready.base is not None) == (state == "done")
    assert ready.stuck == (state != "done")
