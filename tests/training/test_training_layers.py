"""TransformerEngine's layers where it is installed on a GPU, local ones elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

pytestmark = pytest.mark.slow

MISSING = "TransformerEngine is not installed where the ranks run, and "


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    program = Path(__file__).with_name("layer_choice.py")
    done = warm.run([sys.executable, program])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_the_layers_follow_the_setting_the_installation_and_the_gpu(found: dict[str, Any]) -> None:
    for gpu in (False, True):
        without = found[f"TE False, GPU {gpu}"]
        assert (without["auto"], without["auto, masked"], without["local"]) == ("local", "local", "local")
        assert without["transformer_engine"] == MISSING + "training.transformer_impl asks for it"
        assert without["context parallel"] == without["window"] == "local"
        installed = found[f"TE True, GPU {gpu}"]
        assert installed["auto"] == ("transformer_engine" if gpu else "local")
        assert installed["context parallel"] == installed["window"] == installed["auto"]
        assert installed["window, context parallel"] == without["window, context parallel"] == "local"
        assert (installed["auto, masked"], installed["local"]) == ("local", "local")
        assert installed["transformer_engine"] == "transformer_engine"


def test_fused_kernels_are_used_where_they_are_and_missed_in_words_where_they_are_asked_for(
    found: dict[str, Any],
) -> None:
    fused = found["fused"]
    none = {"apply_rope_fusion": False, "gradient_accumulation_fusion": False}
    both = {"apply_rope_fusion": True, "gradient_accumulation_fusion": True}
    for kind in ("cpu, there", "cpu, missing", "cuda, missing"):
        assert fused[f"auto, {kind}"] == fused[f"off, {kind}"] == none
    assert fused["auto, cuda, there"] == both
    assert fused["off, cuda, there"] == none
    assert fused["positions, cuda, there"] == both | {"apply_rope_fusion": False}
    rope, total = "training.apply_rope_fusion", "training.gradient_accumulation_fusion"
    assert (fused["rope, cuda, there"], fused["sum, cuda, there"]) == (both, both)
    assert fused["rope, cuda, missing"].startswith(f"{rope} is set and cannot be had: TransformerEngine is not")
    assert fused["sum, cuda, missing"].startswith(f"{total} is set and cannot be had: Apex's fused_weight_gradient")
    for name, setting in (("rope", rope), ("sum", total)):
        assert fused[f"{name}, cpu, there"] == f"{setting} is set and cannot be had: it is a kernel for GPUs"


def test_transformer_engine_is_asked_to_overlap_as_each_version_wants_it(found: dict[str, Any]) -> None:
    common = {"shape": [16, 32], "tp_size": 2, "backend": "nccl"}
    assert found["fused"]["overlap"] == [common | {"fp8": False}, common | {"modes": ["none"]}]


def test_a_recipe_in_8_bits_that_cannot_be_had_here_is_said_before_the_first_step(found: dict[str, Any]) -> None:
    said = found["fp8"]
    assert said["None"] == said["delayed"] == said["tensorwise"] == "can"
    assert said["missing"] == "can"  # the layers say that TransformerEngine is not there
    words = "model.transformer.fp8 hybrid with fp8_recipe {} cannot be had here: "
    assert said["mxfp8"] == words.format("mxfp8") + "a GPU of compute capability 10.0 is needed"
    assert said["blockwise"].startswith(words.format("blockwise") + "TransformerEngine ")
    assert said["unknown"].endswith("does not know it (no such recipe)")
