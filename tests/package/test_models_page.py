"""docs/reference/models.md says what the configs and the benchmark of the families say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("write_models", ROOT / "scripts" / "tools" / "write_models.py")
assert _spec is not None
assert _spec.loader is not None
write_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write_models)


def test_the_page_is_that_of_the_configs_and_results() -> None:
    page = write_models.PAGE.read_text(encoding="utf-8")
    assert write_models.written(page) == page, "run scripts/tools/write_models.py"


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mixtral", "Apertus"])
def test_a_family_trains_as_with_transformers(family: str) -> None:
    found = json.loads(write_models.RESULTS.read_text(encoding="utf-8"))["figures"]["families"][family]
    assert len(found["relayrun"]) == 50
    assert found["relayrun"] == pytest.approx(found["transformers"], abs=1e-5)
