"""What a submit tells the chain of Megatron-LM besides its flags: its code, its checkpoints; and what is warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import MegatronConfig
from relayrun.control.rundir.plan import Plan
from relayrun.control.trainers.megatron_lm import MegatronSettings
from relayrun.submit import submission
from relayrun.submit.check.findings import Findings
from relayrun.submit.check.megatron_lm import check_megatron_lm
from tests.config.test_trainer_configs import MEGATRON, written

from .stand_in import stand_in


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "logs")


def submitted(folder: Path, checkout: Path, **sections: Any) -> MegatronSettings:
    """The settings of the trainer in the plan of a submitted run."""
    own = MEGATRON["megatron_lm"] | {"dir": str(checkout)}
    config = resolve.load_run_config(written(folder, MEGATRON | {"megatron_lm": own} | sections))
    return MegatronSettings.of(Plan.load(submission.submit_run(config).run).trainer_settings)


def test_the_checkout_itself_and_all_checkpoints_where_nothing_else_is_asked_for(tmp_path: Path) -> None:
    checkout = stand_in(tmp_path / "Megatron-LM")
    settings = submitted(tmp_path, checkout)
    assert settings.dir == str(checkout)
    assert settings.run[1] == str(checkout / "pretrain_gpt.py")
    assert (settings.keep_last, settings.keep_every) == (None, None)


def test_the_section_of_checkpoints_says_which_stay(tmp_path: Path) -> None:
    checkout = stand_in(tmp_path / "Megatron-LM")
    settings = submitted(tmp_path, checkout, checkpoint={"interval": 5, "keep_last": 2, "keep_every": 50})
    assert (settings.keep_last, settings.keep_every) == (2, 50)


@pytest.mark.slow
def test_a_copy_of_the_checkout_is_what_the_ranks_run(tmp_path: Path) -> None:
    checkout = stand_in(tmp_path / "Megatron-LM")
    settings = submitted(tmp_path, checkout, debug={"backup_codebase": True})
    copy = tmp_path / "run" / "code" / "megatron-lm" / "0001"
    assert settings.dir == str(copy)
    assert settings.run[1] == str(copy / "pretrain_gpt.py")
    text = (copy / "megatron" / "training" / "arguments.py").read_text()
    assert text == (checkout / "megatron" / "training" / "arguments.py").read_text()
    assert str(checkout) in (tmp_path / "run" / "config" / "0001.yaml").read_text()  # a resume takes it again


@pytest.mark.parametrize(
    ("dialect", "flags", "warned"),
    [
        ("swiss-ai", {"pipeline-model-parallel-size": 2, "transformer-impl": "local"}, True),
        ("swiss-ai", {"pipeline-model-parallel-size": 2, "transformer-impl": "transformer_engine"}, False),
        ("swiss-ai", {"pipeline-model-parallel-size": 1, "transformer-impl": "local"}, False),
        ("swiss-ai", {"pipeline-model-parallel-size": 2, "post-layer-norm": True}, True),
        ("nvidia", {"pipeline-model-parallel-size": 2, "transformer-impl": "local"}, False),
    ],
)
def test_a_checkout_that_swaps_weight_decay_when_it_loads_is_warned_of(
    dialect: str, flags: dict[str, Any], warned: bool, tmp_path: Path
) -> None:
    """See tests/chain/test_local_megatron_alone.py."""
    checkout = stand_in(tmp_path / "Megatron-LM", dialect=dialect)
    own = MEGATRON["megatron_lm"] | {"dir": str(checkout), "args": flags | {"train-iters": 8}}
    config = resolve.load_run_config(written(tmp_path, MEGATRON | {"megatron_lm": own}))
    assert isinstance(config, MegatronConfig)
    findings = Findings(config)
    check_megatron_lm(config, findings, contained=False)
    assert ("megatron_lm.weight_decay" in {each.name for each in findings.all}) is warned
