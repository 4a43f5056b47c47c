"""Each pair of settings of a model, and each with a layout, is refused before anything is queued, or it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training import own_ranks

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2, sequence parallel": (2, {"parallel": TENSOR}),
    "PP2": (2, {"parallel": {"pipeline_model_parallel_size": 2}}),
    "CP2": (2, {"parallel": {"context_parallel_size": 2}}),
    "EP2": (2, {"parallel": {"expert_model_parallel_size": 2}, "model": {"transformer": {"num_moe_experts": 4}}}),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pair_of_settings_is_refused_or_trains(tmp_path: Path, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    module = "tests.training.pairs_of_settings"
    logs = own_ranks.run(module, tmp_path, ranks, json.dumps(sections), timeout=3500)
    answers: dict[str, str] = json.loads(logs[0].read_text().splitlines()[-1])
    assert sum(said == "trains" for said in answers.values()) > (500 if ranks == 1 else 5)
    assert {pair: said for pair, said in answers.items() if said != "trains" and not said.startswith("refused: ")} == {}
