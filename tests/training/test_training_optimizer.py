"""Each patch of megatron-core's distributed optimizer is needed: without it its fault is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    program = Path(__file__).with_name("optimizer_patches.py")
    done = warm.run([sys.executable, program, folder])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_patched_resume_is_exact(results: dict[str, Any]) -> None:
    assert results["patched"] == results["uninterrupted"]
    assert results["patched"]["steps"] == [4.0]


def test_checkpoints_are_those_of_megatron_cores_reshardable_format(results: dict[str, Any]) -> None:
    assert results["from megatron-core's format"] == results["uninterrupted"]
    assert results["by megatron-core's format"] == results["uninterrupted"]


def test_without_a_state_to_load_into_it_fails(results: dict[str, Any]) -> None:
    assert "AssertionError" in results["without initialize_state"]["error"]


def test_without_a_step_in_the_loaded_tensors_it_fails(results: dict[str, Any]) -> None:
    assert results["without _set_main_param_and_optimizer_states"]["error"] == "KeyError('step')"


def test_with_one_step_for_all_parameters_it_goes_on_with_other_weights(results: dict[str, Any]) -> None:
    wrong = results["without load_state_dict"]
    assert "error" not in wrong
    assert wrong["steps"] != [4.0]
    assert wrong["weights"] != results["uninterrupted"]["weights"]
