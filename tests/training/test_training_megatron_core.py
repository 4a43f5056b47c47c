"""megatron-core itself: what relayrun uses of it is there, and the newest supported version trains as the oldest does.

The newest one asks for Python 3.12 when it is installed; what relayrun imports of it runs on 3.11 as well. So a folder
made with

    pip install -t FOLDER --no-deps --only-binary :all: --python-version 3.12 --ignore-requires-python \\
        megatron-core==0.19.2
    pip install -t FOLDER --no-deps triton

and MEGATRON_CORE_NEWER=FOLDER in the environment give these tests both versions. On Python 3.12 the newest is what
`make setup` installs, and all tests run with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.checkpoints import assert_same_bytes
from tests.export.models import write_tokenizer
from tests.training.test_training_oracle import assert_equal, case

Make = Callable[..., Any]

ROOT = Path(__file__).resolve().parents[2]
NEWER = os.environ.get("MEGATRON_CORE_NEWER")
needs_newer = pytest.mark.skipif(
    NEWER is None, reason="MEGATRON_CORE_NEWER names no folder with a newer megatron-core, see the top of this file"
)
SURFACE = ROOT / "tests/training/megatron_surface.py"
PLANTED = """
from megatron.core import parallel_state
from megatron.core.no_such_module import anything
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, no_such_class
from megatron.core.utils import divide

class Own(MLP):
    def no_such_method(self):
        return super().no_such_method()

TransformerConfig(num_layers=1, no_such_field=1)
parallel_state.no_such_function()
divide(1)
"""


def run(*command: str | Path, search: str | None = None) -> str:
    """What a program of a Python prints, with `search` before its packages."""
    if search is None:
        done = warm.run([sys.executable, *command])
        assert done.returncode == 0, done.stderr
        return done.stdout
    path = os.pathsep.join([search, str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_all_that_is_used_of_megatron_core_is_there(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    *problems, last = run(SURFACE, planted).splitlines()
    assert int(last.removesuffix(" imported names")) > 100
    assert problems == [
        "planted.py: megatron.core.no_such_module has no anything",
        "planted.py: megatron.core.transformer.mlp has no no_such_class",
        "planted.py: MLP has no no_such_method",
        "planted.py: TransformerConfig takes no no_such_field",
        "planted.py: divide wants denominator",
        "planted.py: megatron.core.parallel_state has no no_such_function",
    ]


@needs_newer
@pytest.mark.long
@pytest.mark.slow
def test_all_that_is_used_is_there_in_the_newer_version() -> None:
    version = "import relayrun.train.megatron_versions as m; m.check_version(); print(*m.installed_version()[:2])"
    assert run("-c", version, search=NEWER) == "0 19\n"
    assert re.fullmatch(r"\d+ imported names\n", run(SURFACE, search=NEWER))


@needs_newer
@pytest.mark.long
@pytest.mark.slow
def test_each_term_of_the_loss_is_the_same_in_each_layout_with_the_newer_version(tmp_path: Path) -> None:
    layouts = (["TP2+SP", "CP2"], ["PP2", "EP2"], ["DP2", "CP2"])
    cases = [case(*names, data={"eod_mask_loss": True}, loss_mean="token") for names in layouts]
    run("-m", "tests.training.oracle_cases", "0", "1", "0", json.dumps([str(tmp_path), cases, ""]), search=NEWER)
    for found in json.loads((tmp_path / "answers.json").read_text()):
        assert_equal(found)


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_z_loss_coeff": 1e-3}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
DISTRIBUTED = {"use_distributed_optimizer": True}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
CASES = [
    pytest.param({}, DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}, {}, id="DP2-overlap"),
    pytest.param({}, TENSOR, DOCUMENTS, id="TP2-documents"),
    pytest.param({}, {"context_parallel_size": 2}, {}, id="CP2"),
    pytest.param({"qk_layernorm": True, "kv_channels": 16}, {"pipeline_model_parallel_size": 2}, {}, id="PP2-qwen3"),
    pytest.param(EXPERTS, DISTRIBUTED | {"expert_model_parallel_size": 2}, {}, id="EP2-mixtral"),
    pytest.param(
        {"activation_func": "xielu", "gated_linear_unit": False, "qk_layernorm": True}, TENSOR, {}, id="TP2-apertus"
    ),
    pytest.param(LATENT, DISTRIBUTED, {}, id="DP2-latent-attention"),
]
STEPS = 8


@needs_newer
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("transformer", "parallel", "data"), CASES)
def test_the_newer_version_trains_resumes_and_exports_as_the_installed_one(
    harness: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transformer: dict[str, Any],
    parallel: dict[str, Any],
    data: dict[str, Any],
) -> None:
    assert NEWER is not None
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    model: dict[str, Any] = {"transformer": transformer}
    if "multi_latent_attention" in transformer:
        model["num_query_groups"] = 4
    settings = {
        "model": model,
        "parallel": parallel,
        "data": {"tokenizer": tokenizer} | data,
        "training": {"steps": STEPS},
        "checkpoint": {"interval": STEPS // 2, "keep_last": 10},
    }
    before, whole, rest = (harness(**settings) for _ in range(3))
    reference = before.train().steps()

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([NEWER, str(ROOT)]))
    expected = whole.train(imported=False).steps()
    for iteration, step in expected.items():
        assert abs(step["loss"] - reference[iteration]["loss"]) < 1e-5, iteration

    half = STEPS // 2
    resumed = rest.train(imported=False, base_iteration=half, base_path=str(whole.run.checkpoint(half))).steps()
    assert sorted(resumed) == list(range(half + 1, STEPS + 1))
    for iteration, step in resumed.items():
        assert step["loss"].hex() == expected[iteration]["loss"].hex(), iteration
    name = f"iter_{STEPS:07}"
    assert assert_same_bytes(whole.run.checkpoints / name, rest.run.checkpoints / name) > 10

    if transformer is not LATENT:  # transformers has no class for it that relayrun knows
        export = ("-m", "relayrun.cli", "export", "hf", whole.run.path, "--output", tmp_path / "out", "--test-logits")
        said = run(*export, search=NEWER)
        match = re.search(r"differ by at most (\S+) \(largest logit", said)
        assert match is not None, said
        assert float(match[1]) <= 1e-5


@needs_newer
@pytest.mark.long
@pytest.mark.slow
def test_a_checkpoint_of_either_version_goes_on_with_the_other(harness: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NEWER is not None
    settings = {"parallel": DISTRIBUTED, "training": {"steps": STEPS}, "checkpoint": {"interval": STEPS // 2}}
    whole, old_first, new_first = (harness(**settings) for _ in range(3))
    expected = whole.train().steps()
    newer = {"PYTHONPATH": os.pathsep.join([NEWER, str(ROOT)])}
    for made, order in ((old_first, ({}, newer)), (new_first, (newer, {}))):
        for number, environment in enumerate(order):
            if number == 0:
                made.config["training"]["stop_after"] = STEPS // 2
            else:
                del made.config["training"]["stop_after"]
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                steps = made.train(imported=not environment).steps()
            for iteration, step in steps.items():
                assert abs(step["loss"] - expected[iteration]["loss"]) < 1e-5, (order, iteration)
