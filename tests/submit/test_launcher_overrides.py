from __future__ import annotations

import re
from pathlib import Path

import pytest

from relayrun.config.compose import yaml_file
from relayrun.errors import ConfigError
from relayrun.submit import launcher_overrides


def test_a_settings_block_becomes_overrides_with_names_of_any_kind() -> None:
    texts = launcher_overrides.environment_overrides(
        {"MBS": "4", "AUTO_JOB_REQUEUE": "True", "DATASETS": "a b/c, it's", "EXP_NAME": "1e5", "GBS": "", "HOME": "/"}
    )
    assert texts == [
        "data.mixture=null",
        "name='1e5'",
        "data.datasets=['a b/c', 'it''s']",
        "training.micro_batch_size=4",
        "chain.auto_requeue=true",
    ]
    values = {text.partition("=")[0]: yaml_file.parse_yaml_value(text.partition("=")[2]) for text in texts}
    assert values["data.datasets"] == ["a b/c", "it's"]
    assert values["name"] == "1e5"
    assert values["chain.auto_requeue"] is True


def test_the_debugging_switches_have_their_names() -> None:
    texts = launcher_overrides.environment_overrides(
        {"LOG_NCCL": "true", "MOCK_DATA": "false", "NSYS_PROFILER": "TRUE", "TENSORBOARD": "true"}
    )
    assert texts == ["debug.profile=nsys", "tracking.tensorboard=true", "debug.log_nccl=true", "data.mock_data=false"]
    assert launcher_overrides.environment_overrides({"NSYS_PROFILER": "false"}) == []
    with pytest.raises(ConfigError, match="NSYS_PROFILER=1 is neither true nor false"):
        launcher_overrides.environment_overrides({"NSYS_PROFILER": "1"})


def test_a_setting_goes_by_what_the_runs_of_a_trainer_have() -> None:
    given = {"MEGATRON_LM_DIR": "/x y", "MBS": "2"}
    found = launcher_overrides.environment_overrides(given, trainer="megatron-lm")
    assert found == ["training.micro_batch_size=2", "megatron_lm.dir='/x y'"]
    with pytest.raises(ConfigError, match="MEGATRON_LM_DIR=/x y: only a run of trainer megatron-lm has megatron_lm"):
        launcher_overrides.environment_overrides(given)
    assert launcher_overrides.environment_overrides({"MEGATRON_LM_DIR": ""}) == []
    given = {"TRAINING_STEPS": "40", "EXP_NAME": "mine", "MBS": ""}
    assert launcher_overrides.environment_overrides(given, trainer="command") == ["name='mine'", "command.steps=40"]
    with pytest.raises(ConfigError, match=r"MBS=2: only a run of trainer native or megatron-lm has training\.micro"):
        launcher_overrides.environment_overrides({"MBS": "2"}, trainer="command")


def test_resume_is_true_or_false() -> None:
    assert launcher_overrides.boolean_variable({"RESUME": "TRUE"}, "RESUME")
    assert not launcher_overrides.boolean_variable({}, "RESUME")
    with pytest.raises(ConfigError, match="RESUME=yes is neither true nor false"):
        launcher_overrides.boolean_variable({"RESUME": "yes"}, "RESUME")


def test_a_mixture_takes_the_place_of_datasets() -> None:
    texts = launcher_overrides.environment_overrides(
        {"MIXTURE": "/a*,1;/b,2", "DATASETS": "demo-output", "DATASET_CACHE_DIR": "/cache"}
    )
    assert texts == ["data.datasets=[]", "data.mixture='/a*,1;/b,2'", "data.data_cache_dir='/cache'"]


def test_load_names_a_run_or_a_folder_whatever_is_in_it() -> None:
    (text,) = launcher_overrides.environment_overrides({"LOAD": "it's/a run:500"})
    assert yaml_file.parse_yaml_value(text.removeprefix("checkpoint.load=")) == "it's/a run:500"


def test_every_launcher_offers_the_same_settings_and_all_of_them_are_read() -> None:
    launchers = sorted((Path(__file__).resolve().parents[2] / "launchers").glob("submit-*.sh"))
    by_trainer: dict[str, list[list[str]]] = {}
    for path in launchers:
        offered = re.findall(r'^export (\w+)="\$\{\1:-', path.read_text(encoding="utf-8"), re.M)
        if "-og2_" in path.name:  # its raw text is named in the YAML, with how it is read
            offered[1:1] = ["DATASETS", "MIXTURE"]
        by_trainer.setdefault("megatron-lm" if "-megatron-" in path.name else "native", []).append(offered)
    assert {trainer: len(each) for trainer, each in by_trainer.items()} == {"native": 8, "megatron-lm": 2}
    for trainer, each in by_trainer.items():
        assert each == [each[0]] * len(each)
        names = set(launcher_overrides.setting_variables(trainer))
        assert set(each[0]) - names == {"CONFIG", launcher_overrides.PROFILER_VARIABLE}
        given_otherwise = {"RUN_DIR", "CLUSTER", "TOKENIZER"}  # by the config, unless the environment has them
        assert names - set(each[0]) == given_otherwise


def test_a_run_is_as_large_as_the_job_that_it_begins_in() -> None:
    job = {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "8", "SLURM_NNODES": "1"}
    assert launcher_overrides.job_overrides(job) == ["job.nodes=1", "job.ntasks_per_node=2", "job.cpus_per_task=8"]
    assert launcher_overrides.job_overrides({"SLURM_NTASKS_PER_NODE": "", "NODES": "3"}) == []
