"""The debugging switches in real training: torch's profiler, nsys (a stand-in: there is none here), mock data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from relayrun.config.compose.schema import MOCK_ORDER
from relayrun.files import read_json
from relayrun.tokens.shards.manifest import Manifest

from .conftest import VOCABULARY, Harness

pytestmark = pytest.mark.slow

MOCK = {"tokenizer": "none", "mock_data": True, "mock_vocabulary_size": VOCABULARY}


@pytest.fixture
def mock_harness(harness: Callable[..., Harness]) -> Callable[..., Harness]:
    def make(**sections: dict[str, object]) -> Harness:
        made = harness(data=MOCK, **sections)
        Manifest.build({"mock": None}, {}, vocabulary_size=VOCABULARY, eod=None, tokenizer="mock").write(
            made.run.manifest
        )
        return made

    return make


def test_a_profile_per_rank_the_surroundings_and_made_up_data(
    mock_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ThisIsASecretOfTheEnvironment")
    debug = {
        "profile": "torch",
        "profile_step_start": 4,
        "profile_step_end": 5,
        "profile_ranks": [0, 1],
        "memory_interval": 1,
        "log_nccl": True,
    }
    made = mock_harness(debug=debug, training={"steps": 30}, optimizer={"lr": 0.01})
    attempt = made.train()
    folder = made.run.debug_of(1)
    for rank in (0, 1):
        trace = json.loads((folder / "profile" / f"rank-{rank:04}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if "name" in event]
        # two iterations, each with 8 / (2 x 2) micro-batches, and nothing of the others
        assert sum(name == "aten::embedding" for name in names) == 2 * 2
    text = (folder / "compute_environment.txt").read_text()
    assert "-m relayrun.train" in text
    assert "RANK=0" in text
    assert "hf_ThisIsASecret" not in text
    (log,) = folder.glob("memory_logging-*.txt")
    assert all(" host " in line for line in log.read_text().splitlines())
    assert (folder / "nccl").is_dir()

    losses = [step["loss"] for step in attempt.steps().values()]
    assert losses[-1] < losses[0] - 0.5
    state = read_json(attempt.directory.data)["datasets"]["mock"]
    assert state["order"] == MOCK_ORDER


@pytest.mark.long
def test_nsys_stands_around_the_chosen_ranks_alone(
    mock_harness: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text(
        '#!/bin/bash\necho "$RANK $*" >>"${0%/*}/asked"\n'
        'while [[ "$1" == profile || "$1" == --* ]]; do shift; done\nexec "$@"\n'
    )
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = mock_harness(debug={"profile": "nsys", "profile_ranks": [1]}, training={"steps": 3})
    made.train()
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith(
        f"1 profile --sample=none --trace=nvtx,cudnn,cublas,cuda --output={made.run.debug_of(1)}/profile/rank-0001 "
    )
    assert "--capture-range=cudaProfilerApi --capture-range-end=stop" in asked
