from __future__ import annotations

import pytest

from relayrun import settings
from relayrun.config import yamlfile
from relayrun.errors import ConfigError


def test_a_settings_block_becomes_overrides_with_names_of_any_kind() -> None:
    texts = settings.overrides(
        {"MBS": "4", "AUTO_JOB_REQUEUE": "True", "DATASETS": "a b/c, it's", "EXP_NAME": "1e5", "GBS": "", "HOME": "/"}
    )
    assert texts == ["data.mixture=null", "name='1e5'", "data.datasets=['a b/c', 'it''s']",
                     "training.micro_batch_size=4", "chain.auto_requeue=true"]  # fmt: skip
    values = {text.partition("=")[0]: yamlfile.parse_value(text.partition("=")[2]) for text in texts}
    assert values["data.datasets"] == ["a b/c", "it's"]
    assert values["name"] == "1e5"
    assert values["chain.auto_requeue"] is True


@pytest.mark.parametrize(("name", "value"), [("LOG_NCCL", "true"), ("MEGATRON_LM_DIR", "/x"), ("MOCK_DATA", "1")])
def test_a_setting_without_its_function_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is not supported yet"):
        settings.overrides({name: value})
    assert settings.overrides({name: settings.NOT_BUILT[name]}) == []


def test_resume_is_true_or_false() -> None:
    assert settings.flag({"RESUME": "TRUE"}, "RESUME")
    assert not settings.flag({}, "RESUME")
    with pytest.raises(ConfigError, match="RESUME=yes is neither true nor false"):
        settings.flag({"RESUME": "yes"}, "RESUME")


def test_a_mixture_takes_the_place_of_datasets() -> None:
    texts = settings.overrides({"MIXTURE": "/a*,1;/b,2", "DATASETS": "demo-output", "DATASET_CACHE_DIR": "/cache"})
    assert texts == ["data.datasets=[]", "data.mixture='/a*,1;/b,2'", "data.data_cache_dir='/cache'"]
