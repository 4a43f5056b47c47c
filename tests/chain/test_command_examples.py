"""The examples of docs/how-to/command.md on one machine: killed, they go on as if they had not been."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.files import read_json_lines
from relayrun.submit.run_plan import trainer_settings
from tests.chain.test_local_chain import ends, logs, run_chain
from tests.command_examples import (
    LAST_CHECKPOINT,
    NAMES,
    Uncut,
    assert_same_checkpoints,
    config,
    kill_a_rank,
    left_over,
    losses,
)
from tests.waiting import wait_for

from .conftest import MakeRun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.long) for name in (*NAMES, "lightning_trainer")],
)
def test_an_example_that_is_killed_goes_on_as_if_it_had_not_been(name: str, make_run: MakeRun, tmp_path: Path) -> None:
    if name == "lightning_trainer":
        pytest.importorskip("lightning", reason="the example needs Lightning: pip install lightning")
    last = 20
    pace = ["--save-at=5", "--hold-at=12", f"--held={tmp_path / 'held'}"]
    made = resolve.load_run_config(config(tmp_path, name, last=last, pace=pace))
    uncut = Uncut(tmp_path, name, last)
    settings = trainer_settings(made, Run(tmp_path / "run"))
    run, plan = make_run(
        total_steps=last, trainer="command", trainer_settings=settings, ntasks_per_node=1, time_limit=3600
    )
    chain = threading.Thread(target=run_chain, args=(run, plan))
    chain.start()

    def held() -> bool:
        assert chain.is_alive(), logs(run)
        return (tmp_path / "held").exists() and any(read_json_lines(run.attempt(1).commits))

    wait_for(held, 600, words=lambda: logs(run))
    kill_a_rank(run, name)
    chain.join(600)
    assert not chain.is_alive()
    records = ends(run)
    assert [end.cause for end in records] == ["failed", "done"], logs(run)
    assert records[0].durable_iteration == 5
    assert (stop_reason(run) or "").startswith(f"the last iteration, {last}, is saved")
    assert losses(run.metrics_view) == uncut.losses()
    final = LAST_CHECKPOINT[name].format(last)
    assert_same_checkpoints(uncut.folder / final, run.checkpoints / final)
    assert left_over(run) == []
