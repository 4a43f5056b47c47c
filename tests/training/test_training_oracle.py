"""Each term of the loss has the same gradient on one rank and in each layout, micro-batch size and mask; and the oracle
of `relayrun check --oracle`, which compares them, finds a term that has not.

megatron-core's multi-token prediction is no setting of `model.transformer`; a model of `model.spec` has it here.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import warm
from tests.readme import path_with_relayrun
from tests.training import own_ranks
from tests.training.oracle_cases import BALANCED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP2": {"context_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
    "DP2": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "PP2": {"pipeline_model_parallel_size": 2},
}
MASKED = {"eod_mask_loss": True}
DOCUMENTS = MASKED | {"reset_attention_mask": True, "reset_position_ids": True}
OWN = "tests.training.user_code:z_loss"
ROUTERS = ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"]


def case(*layouts: str, data: dict[str, Any], experts: dict[str, Any] = BALANCED, **training: Any) -> list[Any]:
    parallel: dict[str, Any] = {}
    for name in layouts:
        parallel |= LAYOUTS[name]
    ranks = 2 if "DP2" in layouts or "EP2" in layouts else 1
    for name in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"):
        ranks *= parallel.get(name, 1)
    return [ranks, {"model": {"transformer": experts}, "parallel": parallel, "data": data, "training": training}]


def answers(folder: Path, cases: list[Any], fault: str = "") -> list[dict[str, dict[str, tuple[float, str]]]]:
    """For each case and term what it is compared with, the largest relative difference, and where it is."""
    own_ranks.run("tests.training.oracle_cases", folder, 1, json.dumps([str(folder), cases, fault]), timeout=3000)
    found: list[Any] = json.loads((folder / "answers.json").read_text())
    return found


def assert_equal(found: dict[str, dict[str, tuple[float, str]]]) -> None:
    for term, row in found.items():
        for way, (apart, where) in row.items():
            assert apart < 1e-5, (term, way, where)


def test_each_term_is_the_same_in_a_layout_micro_batch_size_and_mask(tmp_path: Path) -> None:
    (found,) = answers(tmp_path, [case("DP2", data=MASKED, loss_mean="token")])
    assert list(found) == ["tokens", *ROUTERS, "validation sets"]
    assert [set(row) for row in found.values()] == [
        {"2 ranks", "micro-batches of 1"},
        {"2 ranks", "no mask"},
        {"2 ranks", "micro-batches of 1", "no mask"},
        {"2 ranks", "no mask"},
        {"2 ranks", "micro-batches of 1", "no mask"},
        {"2 ranks"},
    ]
    assert_equal(found)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mean", ["micro_batch", "sample", "token"])
@pytest.mark.parametrize("data", [{}, MASKED, DOCUMENTS], ids=["plain", "masked", "documents"])
def test_each_term_is_the_same_in_each_pair_of_layouts(tmp_path: Path, mean: str, data: dict[str, Any]) -> None:
    pairs = [*((name,) for name in LAYOUTS), *itertools.combinations(LAYOUTS, 2)]
    cases = [
        case(*pair, data=data, loss_mean=mean, micro_batch_size=1 + number % 2) for number, pair in enumerate(pairs)
    ]
    for found in answers(tmp_path, cases):
        assert_equal(found)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_loss_of_the_users_own_is_the_same_in_each_layout(tmp_path: Path) -> None:
    cases = [case(name, data=MASKED, experts={}, loss=OWN) for name in LAYOUTS if name != "EP2"]
    for found in answers(tmp_path, cases):
        assert_equal(found)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_multi_token_prediction_is_the_same_but_for_a_mean_over_a_part_of_a_sample(tmp_path: Path) -> None:
    """With context parallelism megatron-core 0.16.1 divides by the tokens of a rank, and ranks have more or less of
    them; sums, as with `loss_mean: token` and a mask, are exact."""
    cases = [
        case("DP2", data={}, experts={}),
        case("DP2", data=MASKED, experts={}, loss_mean="token"),
        case("CP2", data=MASKED, experts={}, loss_mean="token"),
        case("CP2", data={}, experts={}),
    ]
    for _, sections in cases:
        sections["model"]["spec"] = "tests.training.user_code:multi_token_model"
    *same, other = answers(tmp_path, cases)
    for found in same:
        assert list(found) == ["tokens", "losses inside model.spec", "validation sets"]
        assert_equal(found)
    assert 0.01 < other["losses inside model.spec"]["2 ranks"][0] < 0.1


@pytest.mark.parametrize(("fault", "terms"), [("replicas", {"global_aux_loss"}), ("tokens", set(ROUTERS))])
def test_the_oracle_finds_a_term_that_depends_on_the_layout(tmp_path: Path, fault: str, terms: set[str]) -> None:
    (found,) = answers(tmp_path, [case("DP2", data=MASKED, loss_mean="token")], fault)
    assert {term for term, row in found.items() if max(row.values())[0] > 1e-4} == terms


def check(path: Path, **sections: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    ranks, changes = case("CP2", data={})
    model = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8}
    values: dict[str, Any] = {
        "project": "tests",
        "name": "oracle",
        "model": model | {"num_query_groups": 4},
        "data": {"tokenizer": "none", "datasets": ["none"]},
        "training": {"steps": 9, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": 1},
        "parallel": changes["parallel"],
        "job": {"time": "1:00", "ntasks_per_node": ranks},
        "cluster": {"name": "local", "scheduler": "local", "python": warm.python()},
    }
    path.write_text(yaml.safe_dump(values | {name: values[name] | fields for name, fields in sections.items()}))
    command = [sys.executable, "-m", "relayrun", "check", str(path), "--oracle"]
    return warm.run(command, cwd=ROOT)


def test_check_names_the_term_that_differs(tmp_path: Path) -> None:
    """Where every term is equal: `test_the_command_of_the_page`."""
    bad = check(tmp_path / "bad.yaml", training={"loss": "tests.training.user_code:relative_to_the_mean"})
    assert bad.returncode == 1
    assert "model.hidden_size: 256 -> 64" in bad.stdout
    assert "tokens: not equal" in bad.stdout
    fails = check(tmp_path / "fails.yaml", training={"loss": "tests.training.user_code:no_such_loss"})
    assert fails.returncode == 1
    assert "no_such_loss" in fails.stdout.splitlines()[-1]


def test_the_command_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/check.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^```bash oracle\n(.*?)^```$", page, re.M | re.S)
    shown = re.findall(r"^small, on CPUs.*?^every term.*?$", page, re.M | re.S)[0].splitlines()
    environment = {"PATH": path_with_relayrun(), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def plain(lines: list[str]) -> list[str]:
        """Without numbers of rounding, and where they are."""
        return [re.sub(r" *\d\.\de.*", "", line) for line in lines]

    assert plain(shown)[-1].startswith("every term is equal")
    assert set(plain(shown)) <= set(plain(done.stdout.splitlines()))


def test_the_oracle_is_for_the_native_trainer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relayrun", "check", "configs/runs/megatron-llama3-8b.yaml", "--oracle"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "--oracle is for a run config of the trainer native" in done.stderr
