"""The forecast of effective training time: against simulated chains, from a run's own records, and on the terminal."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from relayrun.submit.effective_time import ASSUMED, CostRange, EffectiveTime, measured_costs
from tests.history import make_history

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import simulator
from _simulated_chain import Setup, SimulatedChain

DAYS = 30


def exactly(value: float, name: str) -> CostRange:
    return replace(ASSUMED[name], low=value, expected=value, high=value)


@pytest.mark.parametrize("in_job", [True, False])
@pytest.mark.parametrize("mtbf_hours", [2.0, 12.0])
def test_the_formula_agrees_with_simulated_chains(*, in_job: bool, mtbf_hours: float) -> None:
    costs = {"save": 10.0, "restart": 120.0, "next_job": 900.0, "hangs": 0.0, "copies": 0.01, "node_share": 1.0}
    future = EffectiveTime(
        nodes=32,
        node_mtbf_hours=32 * mtbf_hours,
        job_hours=24.0,
        costs={name: exactly(value, name) for name, value in costs.items()},
    )
    found = []
    for seed in range(4):
        generator = random.Random(seed)
        setup = Setup(
            nodes=32,
            spare_nodes=future.spare_nodes,
            in_job=in_job,
            max_failed_attempts=1000,
            seconds=DAYS * 86400.0,
            step=5.0,
            save_steps=round(future.save_interval / 5.0),
            save_stall=costs["save"],
            copy_steps=1 if in_job else 0,
            copy_stall=0.05,
            noticed=dict.fromkeys(("rank", "node", "hang"), 0.0),
            restart=costs["restart"],
            job_limit=24 * 3600.0,
            queue=600.0,
            job_start=300.0,
        )
        faults = ((at, "node", node) for at, _, node in simulator.failures(generator, 24 / mtbf_hours))
        found.append(SimulatedChain(setup, faults).play().effective)
    assert future.effective(in_job=in_job).expected == pytest.approx(sum(found) / 4, abs=0.012), found


@pytest.mark.parametrize("name", ["kills", "kills_often"])
def test_the_simulator_reproduces_the_drill(name: str) -> None:
    found = simulator.reproduce(name, 3)
    assert found["difference"]["max"] <= 0.03, found


def test_spare_nodes_are_enough_in_most_jobs() -> None:
    future = EffectiveTime(
        nodes=100,
        node_mtbf_hours=200.0,
        job_hours=10.0,
        costs=dict(ASSUMED) | {"node_share": exactly(1.0, "node_share")},
    )

    def enough(spares: int) -> float:
        return sum(math.exp(-5.0) * 5.0**lost / math.factorial(lost) for lost in range(spares + 1))

    assert enough(future.spare_nodes - 1) < 0.95 <= enough(future.spare_nodes)


def test_costs_are_those_of_the_run(tmp_path: Path) -> None:
    run = Run(make_history(tmp_path / "run", lines=40, attempts=4).path)
    assert "restart" not in dict(measured_costs(run))
    failed = restarts.FailedRestart(
        restart=1,
        time=1.0,
        rank=3,
        node="n0",
        words="killed by SIGKILL",
        iteration=5,
        base_iteration=0,
        durable_iteration=0,
        next_iteration=5,
        again=True,
        seconds={"end": 1.0, "all": 7.0},
    )
    for number, seconds in ((1, 7.0), (2, 9.0), (3, 30.0)):
        replace(failed, seconds={"all": seconds}).append(run.attempt(number).failed_restarts)
    costs = dict(measured_costs(run))
    assert costs["restart"] == replace(ASSUMED["restart"], low=7.0, expected=9.0, high=30.0, source="3 of this run")
    assert costs["next_job"].source == "3 of this run"


def test_the_command_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "--nodes", "2048", "--mtbf-hours", "6330"]) == 0
    text = capsys.readouterr().out
    assert "3.1 h" in text
    assert text.count("assumed") == len(ASSUMED)
    assert main(["forecast", "--nodes", "2048", "--mtbf-hours", "6330", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["effective"]["node"]["expected"] > found["effective"]["job"]["expected"] > 0.8
    assert main(["forecast", "--nodes", "0", "--mtbf-hours", "1"]) == 1
