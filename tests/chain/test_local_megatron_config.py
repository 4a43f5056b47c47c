"""A run config of trainer megatron-lm, from `relayrun submit` to the last iteration, with a real checkout on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import megatron_lm_log
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.files import read_json_lines
from tests.checkouts import checkout_of, config, evaluated
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("dialect", list(MegatronDialect), ids=lambda dialect: dialect.value)
def test_settings_and_arrays_and_args_train_a_checkout(
    dialect: MegatronDialect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = checkout_of(dialect)
    arrays = "MORE_ARGS=( --lr 2e-3 --save $CKPT_DIR --load $CKPT_DIR )\n"
    path = config(tmp_path, checkout, arrays=arrays)
    assert main(["submit", str(path)]) == 0, capsys.readouterr().err
    run = Run(tmp_path / "run")
    words = Plan.load(run).trainer_settings["run"]
    assert words[words.index("--lr") + 1] == "2e-3"
    assert resume_point(run).iteration == 8
    assert [line["iteration"] for line in read_json_lines(run.attempt(1).metrics)] == list(range(1, 9))
    assert [iteration for iteration, _ in megatron_lm_log.all_checkpoints(run.checkpoints)] == [6, 8]
    assert (run.path / "data_cache").is_dir()
    # raised on a resume: the schedule is the settings', whatever the checkpoint says
    assert main(["resume", str(run.path), "--set", "training.steps=10"]) == 0, capsys.readouterr().err
    assert resume_point(run).iteration == 10


@pytest.mark.parametrize("dialect", list(MegatronDialect), ids=lambda dialect: dialect.value)
def test_checkpoints_of_a_checkout_are_converted_and_scored_beside_the_chain(
    dialect: MegatronDialect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/how-to/export.md says, by lm-evaluation-harness."""
    evaluation = evaluated(tmp_path) | {"interval": 4}
    path = config(tmp_path, checkout_of(dialect), evaluation=evaluation)
    assert main(["submit", str(path)]) == 0, capsys.readouterr().err
    run = Run(tmp_path / "run")
    # jobs of their own, behind the chain's end too
    wait_for(lambda: len(list(read_json_lines(run.evaluations_view))) == 2, 600, step=0.2)
    lines = list(read_json_lines(run.evaluations_view))
    assert [(line["iteration"], line["status"]) for line in lines] == [(4, "done"), (8, "done")], lines
    for line in lines:
        assert line["results"]["tiny_choice"]["acc"] in [n / 12 for n in range(13)]
        assert line["settings"]["program"].startswith("lm_eval ")
