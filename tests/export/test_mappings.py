"""Models of transformers besides the Llama, there and back: the same bits, the same config, or one clear error."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from relayrun.cli import main
from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ModelSection
from relayrun.errors import ConfigError, InputError
from relayrun.places import CODE_ROOT as ROOT
from relayrun.train.export import model_families
from relayrun.train.export.model_mapping import QKV, ModelSizes
from tests import warm
from tests.export.models import LLAMA3, make_hf, make_run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

OWN = "examples.export.qwen2:QWEN2"
KINDS = ["Qwen3", "Mixtral", "Apertus"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def differences(one: Path, other: Path) -> list[str]:
    """Names of the tensors that are not the same bits, or not in both."""
    first, second = tensors(one), tensors(other)
    return [name for name in first.keys() | second.keys() if not torch.equal(first.get(name), second.get(name))]


@pytest.mark.parametrize("kind", [pytest.param("Qwen3", marks=pytest.mark.long), "Mixtral", "Apertus", "Qwen2"])
def test_what_is_imported_is_exported_again_bit_by_bit(tmp_path: Path, kind: str) -> None:
    hf = make_hf(tmp_path / "hf", kind)
    made = make_run(tmp_path / "run", hf, mapping=OWN if kind == "Qwen2" else None)
    assert main(["export", "hf", str(made.run.path), "--output", str(tmp_path / "out")]) == 0
    assert differences(hf, tmp_path / "out") == []
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", hf))
    assert ours["architectures"] == [f"{kind}ForCausalLM"]
    others = {"rope_parameters", "max_position_embeddings", "eos_token_id", "bos_token_id", "head_dim"}
    names = ours.keys() & theirs.keys() - others
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    model = yaml_file.read_yaml(made.checkpoint / "model.yaml").values["model"]
    assert model.get("mapping") == (OWN if kind == "Qwen2" else None)
    assert ModelSection.model_validate(model).transformer.qk_layernorm == (kind in ("Qwen3", "Apertus"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "Qwen2"])
def test_megatron_core_and_transformers_give_the_same_logits(tmp_path: Path, kind: str, scaling: bool) -> None:
    changes: dict[str, Any] = {"rope_parameters": LLAMA3 | {"rope_theta": 100.0}} if scaling else {}
    mapping = OWN if kind == "Qwen2" else None
    hf = make_hf(tmp_path / "hf", kind, **changes, tie_word_embeddings=scaling)
    made = make_run(tmp_path / "run", hf, mapping=mapping)
    command = ["-m", "relayrun.cli", "export", "hf", str(made.run.path), "--output", str(tmp_path / "out")]
    done = warm.run([sys.executable, *command, "--test-logits", "--max-shard-size", "50KB"])
    assert done.returncode == 0, done.stderr
    match = re.search(r"differ by at most (\S+) \(largest logit (\S+)\)", done.stdout)
    assert match is not None, done.stdout
    assert float(match[1]) <= 1e-5 * max(1.0, float(match[2]))
    assert float(match[2]) > 0.1


@pytest.mark.slow
@pytest.mark.long
def test_logits_are_compared_of_a_run_that_tells_documents_apart(tmp_path: Path) -> None:
    """A row of random tokens is one document for both sides, whatever ends one in training."""
    hf = make_hf(tmp_path / "hf")
    documents = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    tokenizer = {"tokenizer": str(hf / "tokenizer.json"), "datasets": [str(tmp_path / "run/data")]}
    made = make_run(tmp_path / "run", hf, data=tokenizer | documents)
    command = [sys.executable, "-m", "relayrun.cli", "export", "hf", str(made.run.path), "--output"]
    done = warm.run([*command, str(tmp_path / "out"), "--test-logits"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"differ by at most (\S+) \(largest logit", done.stdout)


def test_transformers_computes_the_same_of_what_went_there_and_back(tmp_path: Path) -> None:
    """Its config too: the rotary positions of an Apertus are others where config.json does not name them."""
    from transformers import AutoModelForCausalLM

    hf = make_hf(tmp_path / "hf", "Apertus")
    made = make_run(tmp_path / "run", hf)
    assert main(["export", "hf", str(made.run.path), "--output", str(tmp_path / "out")]) == 0
    tokens = torch.randint(300, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
            for path in (tmp_path / "out", hf)
        )
    assert torch.equal(ours, theirs)


def test_experts_lie_in_one_tensor_each_and_are_found_by_number(tmp_path: Path) -> None:
    """Whatever layout wrote it: a checkpoint has the shapes of the whole."""
    hf = make_hf(tmp_path / "hf", "Mixtral", num_hidden_layers=2)
    made = make_run(tmp_path / "run", hf)
    from relayrun.train.export.torch_dist import CheckpointReader

    reader = CheckpointReader(made.checkpoint)
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert reader.shapes[key] == (2, 4, 192, 64)
    assert reader.shapes["decoder.layers.mlp.router.weight"] == (2, 4, 64)
    assert f"{key.removesuffix('weight')}_extra_state/shard_1.3_2.4" in reader.objects
    (third,) = reader.read(key, start=[1, 2, 0, 0], shape=[1, 1, 192, 64], dtype=torch.float32)[0]
    found = tensors(hf)
    gate = next(
        value for name, value in found.items() if name.endswith("layers.1.block_sparse_moe.experts.2.w1.weight")
    )
    assert torch.equal(third[:96], gate)


@pytest.mark.parametrize(
    ("transformer", "message"),
    [
        ({"add_qkv_bias": True}, "nearest is Llama: add_qkv_bias is True"),
        (
            {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 64},
            "nearest is Mixtral: moe_shared_expert_inter",
        ),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}, "load_balancing_type is 'sinkhorn'"),
        ({"window_size": [9, 0]}, "nearest is Llama: window_size is [9, 0]"),
        ({"qk_layernorm": True, "num_moe_experts": 4}, "nearest is "),
    ],
)
def test_a_model_of_no_class_is_refused_with_what_differs(transformer: dict[str, Any], message: str) -> None:
    model = ModelSection(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=2,
        transformer=transformer,  # type: ignore[arg-type]
    )
    with pytest.raises(InputError, match=re.escape(message)) as error:
        model_families.mapping_for_model(model)
    assert "a mapping of your own" in (error.value.hint or "")
    with pytest.raises(InputError, match="only a Llama goes across the border to Megatron-LM; this has"):
        model_families.require_llama(model, "here")


@pytest.mark.parametrize(("name", "value"), [("rotary_percent", 0.5), ("spec", "my_team.layers:layers")])
def test_another_setting_of_the_model_is_refused_without_a_mapping(name: str, value: object) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "num_query_groups": 2}
    with pytest.raises(InputError, match=re.escape(f"nearest is Llama: {name} is {value!r}")):
        model_families.mapping_for_model(ModelSection.model_validate(sizes | {name: value}))
    assert (
        model_families.mapping_for_model(ModelSection.model_validate(sizes | {name: value, "mapping": OWN})).name
        == "Qwen2"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_named_config_is_of_the_class_of_its_name(path: Path) -> None:
    model = ModelSection.model_validate(yaml_file.read_yaml(path).values["model"])
    family = {"og2-7b": "llama"}.get(path.stem, path.stem)  # its name is the data's
    assert family.startswith(model_families.mapping_for_model(model).model_type)


def test_what_only_training_knows_does_not_matter() -> None:
    model = ModelSection(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=2,
        transformer={  # type: ignore[arg-type]
            "num_moe_experts": 4,
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
        },
    )
    assert model_families.mapping_for_model(model).name == "Mixtral"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no path", "'no path' is no import path"),
        ("no.such.module:NAME", "cannot be imported: ModuleNotFoundError"),
        ("examples.export.qwen2:NONE", "cannot be imported: AttributeError"),
        ("relayrun.train.export.model_mapping:QKV", "is QueryKeyValue, not a ModelMapping"),
    ],
)
def test_a_path_to_no_mapping_is_one_clear_error(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_families.import_mapping(path)


def test_another_number_in_xielu_is_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf(tmp_path / "hf", "Apertus", num_hidden_layers=1)
    weights = load_file(hf / "model.safetensors")
    weights["model.layers.0.mlp.act_fn.beta"] = torch.tensor(0.25)
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", "hf", str(hf), "--output", str(tmp_path / "out")]) == 1
    assert "act_fn.beta is 0.25; only 0.5 can be imported" in capsys.readouterr().err


def test_the_groups_of_queries_are_taken_apart_as_they_lie() -> None:
    """Row by row, for matrices and for biases: two groups of two queries, heads of three channels."""
    sizes = ModelSizes(layers=1, hidden=4, vocabulary=9, heads=4, groups=2, head=3, ffn=8)
    rows = torch.arange(24)
    queries, keys, values = QKV.split(rows, sizes)
    assert queries.tolist() == [*range(6), *range(12, 18)]
    assert keys.tolist() == [*range(6, 9), *range(18, 21)]
    assert values.tolist() == [*range(9, 12), *range(21, 24)]
    assert torch.equal(QKV.join([queries, keys, values], sizes), rows)


def test_the_example_of_the_page_is_the_file() -> None:
    page = (ROOT / "docs/how-to/export.md").read_text(encoding="utf-8")
    example = (ROOT / "examples/export/qwen2.py").read_text(encoding="utf-8")
    assert example.partition("\n\n")[2].strip() in page
