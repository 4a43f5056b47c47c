"""`model.transformer` against the TransformerConfig of the installed megatron-core, which is read, not imported."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.resolve import TRANSFORMER_FIELDS
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.model import (
    LLAMA_DEFAULTS,
    NEEDS_TRANSFORMER_ENGINE,
    NOT_SAVED_WITH_WEIGHTS,
    ModelSection,
    TransformerSection,
)
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError
from relayrun.submit.initial_checkpoint import find_initial_checkpoint
from relayrun.train.model import size
from tests.history import began


@dataclass(frozen=True)
class Field:
    """A field of megatron-core's dataclasses, as its source has it."""

    annotation: str
    value: ast.expr | None

    @property
    def default(self) -> object:
        """What stands behind the annotation, or in a `field(default=...)`."""
        value = self.value
        if isinstance(value, ast.Call):
            value = next(keyword.value for keyword in value.keywords if keyword.arg == "default")
        assert value is not None
        return ast.literal_eval(value)


def fields_in(source: str) -> dict[str, Field]:
    """The fields of all classes of megatron-core's file."""
    found = {}
    for part in ast.parse(source).body:
        for line in part.body if isinstance(part, ast.ClassDef) else []:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = Field(ast.unparse(line.annotation), line.value)
    return found


def installed() -> dict[str, Field]:
    """A later class's field holds: MLATransformerConfig has defaults of its own."""
    core = Path(str(distribution("megatron-core").locate_file("megatron/core")))
    names = ("model_parallel_config.py", "transformer/transformer_config.py")
    return {name: field for file in names for name, field in fields_in((core / file).read_text()).items()}


INSTALLED = installed()
GONE = {"moe_extended_tp"}
"""Fields that megatron-core 0.16 has and 0.19 has not."""
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs/runs/demo.yaml"
TAKEN = TransformerSection.model_json_schema()["properties"]
SETTINGS_FOR_TRANSFORMER_FIELDS = yaml_file.read_yaml(TRANSFORMER_FIELDS).values


def test_nothing_is_taken_that_megatron_core_does_not_have() -> None:
    assert len(INSTALLED) > 200
    others = {*TransformerSection.model_fields, *SETTINGS_FOR_TRANSFORMER_FIELDS} - set(INSTALLED)
    assert others in (set(), GONE), "of the other version that relayrun runs with"
    assert not set(TransformerSection.model_fields) & set(SETTINGS_FOR_TRANSFORMER_FIELDS)
    assert set(TransformerSection.model_fields) >= {*NEEDS_TRANSFORMER_ENGINE, *NOT_SAVED_WITH_WEIGHTS, *LLAMA_DEFAULTS}


def test_every_field_of_megatron_core_was_looked_at() -> None:
    """A field of a newer version may be on by default and change what is trained: read it, then add its name."""
    looked_at = set((ROOT / "tests/golden/transformer_fields.txt").read_text().split())
    assert set(INSTALLED) - looked_at == set()


def test_what_is_elsewhere_is_a_setting() -> None:
    for setting in SETTINGS_FOR_TRANSFORMER_FIELDS.values():
        section: Any = RunConfig
        *sections, name = setting.split(".")
        for part in sections:
            section = section.model_fields[part].annotation
        assert name in section.model_fields, setting


@pytest.mark.parametrize("name", sorted(set(TransformerSection.model_fields) - LLAMA_DEFAULTS))
def test_defaults_are_those_of_megatron_core(name: str) -> None:
    if name == "multi_latent_attention":  # the class is chosen by it
        assert TransformerSection.model_fields[name].default is False
    else:
        assert TransformerSection.model_fields[name].default == INSTALLED[name].default


def shapes(annotation: str) -> set[str]:
    """The kinds of value that an annotation names: of its words, its literals and its containers."""
    words = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "Callable": "string"}
    found = set()
    for node in ast.walk(ast.parse(annotation, mode="eval")):
        if isinstance(node, ast.Name) and node.id in words:
            found.add(words[node.id])
        elif isinstance(node, ast.Name) and node.id in ("List", "Tuple", "list", "tuple"):
            found.add("array")
        elif isinstance(node, ast.Name) and node.id == "Optional":
            found.add("null")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add("string")
    return found


def taken(schema: Any) -> Iterator[str]:
    """The kinds of value that a JSON schema takes."""
    if isinstance(schema, dict):
        if "type" in schema:
            yield schema["type"]
        elif "const" in schema or "enum" in schema:
            yield "string"
        for inner in ("anyOf", "items"):
            yield from taken(schema.get(inner))
    elif isinstance(schema, list):
        for each in schema:
            yield from taken(each)


@pytest.mark.parametrize("name", sorted(TransformerSection.model_fields))
def test_types_are_those_of_megatron_core(name: str) -> None:
    ours, theirs = set(taken(TAKEN[name])), shapes(INSTALLED[name].annotation)
    # a list that is not there is None, a width that may be left out too; no field takes what Megatron's does not
    assert ours - {"null"} == theirs - {"null"}
    assert "null" not in ours or "null" in theirs or name == "q_lora_rank"  # which Megatron's layers ask for None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("qk_layernrom=true", "qk_layernrom: there is no such field; did you mean 'qk_layernorm'?"),
        ("qk_layernorm=often", "qk_layernorm: Input should be a valid boolean, not 'often'"),
        ("kv_channels=0", "kv_channels: Input should be greater than 0, not 0"),
        ("num_layers=3", "num_layers: a run says this with model.num_layers; set that"),
        ("layernorm_epsilon=1e-6", "a run says this with model.norm_epsilon; set that"),
        ("sequence_parallel=true", "a run says this with parallel.sequence_parallel; set that"),
        ("recompute_granularity=full", "a run says this with training.recompute_granularity; set that"),
        ("params_dtype=bf16", "a run says this with training.precision; set that"),
        ("softmax_type=learnable", "that relayrun sets itself, or whose effect its layers lack, are refused"),
        ("mamba_head_dim=64", "there is no such field"),
        ("window_size=[16, 1]", "which a language model must not: write 0"),
        ("window_attn_skip_freq=2", "and window_size is not set"),
        ("no_rope_freq=3", "num_layers 5 is no multiple of transformer.no_rope_freq 3"),
        ("no_rope_freq=[1]", "transformer.no_rope_freq has 1 numbers, and there are 5 layers"),
        ("activation_func=xielu", "set gated_linear_unit: false"),
        ("q_lora_rank=16", "q_lora_rank: only with multi_latent_attention: true"),
        ("moe_router_topk=1", "moe_router_topk: only with num_moe_experts"),
        ("fp8_margin=1", "fp8_margin: only with fp8"),
        ("fp8=hybrid", "set training.transformer_impl=transformer_engine, or leave it out"),
        ("moe_extended_tp=true", "a run says this with parallel.expert_tensor_parallel_size; set that"),
        ("expert_tensor_parallel_size=1", "a run says this with parallel.expert_tensor_parallel_size; set that"),
    ],
)
def test_what_cannot_work_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve.load_run_config(DEMO, [f"model.transformer.{text}"])
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("transformer", "others", "words"),
    [
        (", no_rope_freq: [1, 0, 0, 0, 0]", [], "no_rope_freq does not go with multi_latent_attention"),
        (", rotary_interleaved: true", [], "rotary_interleaved does not go with multi_latent_attention"),
        ("", ["model.rotary_percent=0.5"], "set model.transformer.rope_type=rope, or model.rotary_percent=1"),
        ("", ["model.rope_scaling_factor=8"], "model.rope_scaling_factor is Llama's"),
    ],
)
def test_what_latent_attention_leaves_out_is_refused(transformer: str, others: list[str], words: str) -> None:
    given = [f"model.transformer={{multi_latent_attention: true{transformer}}}", "model.num_query_groups=6", *others]
    with pytest.raises(ConfigError) as caught:
        resolve.load_run_config(DEMO, given)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("transformer", "others", "words"),
    [
        ("", ["training.precision=fp32"], "set training.precision=bf16"),
        (
            ", fp8_margin: 1",
            [],
            "does not go with fp8_recipe tensorwise; set fp8_recipe to delayed, or leave",
        ),
        (", fp8_wgrad: false", [], "fp8_wgrad does not go with fp8_recipe tensorwise"),
        (
            ", fp8_recipe: delayed, first_last_layers_bf16: true",
            [],
            "to tensorwise or mxfp8 or blockwise",
        ),
        (", fp8_recipe: mxfp8, fp8_dot_product_attention: true", [], "set fp8_recipe to delayed or tensorwise"),
        (", fp8_recipe: delayed, fp8_multi_head_attention: true", [], "needs fp8_dot_product_attention: true"),
        (", num_layers_at_end_in_bf16: 2", [], "num_layers_at_end_in_bf16 needs first_last_layers_bf16: true"),
        (", first_last_layers_bf16: true, num_layers_at_start_in_bf16: 6", [], "6 is above the 5 layers of a pipeline"),
        ("", ["model.ffn_hidden_size=520"], "model.ffn_hidden_size comes to 520 on a rank, no multiple of 16"),
        (", kv_channels: 20", [], "model.num_attention_heads x channels of a head comes to 120 on a rank"),
        (", num_moe_experts: 2, moe_ffn_hidden_size: 24", [], "transformer.moe_ffn_hidden_size comes to 24 on a rank"),
        (", fp8_recipe: mxfp8", ["training.seq_length=130"], "has 520 tokens"),
        ("", ["training.seq_length=129", "training.micro_batch_size=1"], "129 tokens on a rank"),
    ],
)
def test_what_products_in_8_bits_cannot_do_is_refused(transformer: str, others: list[str], words: str) -> None:
    recipe = "" if "recipe" in transformer else ", fp8_recipe: tensorwise"
    given = [f"model.transformer={{fp8: hybrid{recipe}{transformer}}}", *others]
    with pytest.raises(ConfigError) as caught:
        resolve.load_run_config(
            DEMO, ["training.transformer_impl=transformer_engine", "training.precision=bf16", *given]
        )
    assert words in caught.value.message


def test_products_in_8_bits_are_taken_where_they_can_be() -> None:
    engine = ["training.transformer_impl=transformer_engine", "training.precision=bf16"]
    for fields in ("", ", fp8_recipe: delayed, fp8_margin: 1", ", fp8_recipe: blockwise, first_last_layers_bf16: true"):
        resolve.load_run_config(DEMO, [*engine, f"model.transformer={{fp8: e4m3{fields}}}"])


def test_a_window_over_ranks_needs_the_local_attention() -> None:
    window = ["model.transformer.window_size=[15, 0]", "parallel.context_parallel_size=2"]
    with pytest.raises(ConfigError, match=r"set training\.transformer_impl=local"):
        resolve.load_run_config(DEMO, [*window, "training.transformer_impl=transformer_engine"])
    resolve.load_run_config(DEMO, window)


def test_a_checkpoint_of_another_model_is_refused_by_field(tmp_path: Path) -> None:
    """Fields that only bear on how a model is trained may differ, and defaults may be written down."""
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    (folder / "metadata.json").write_text("{}")

    def begun(there: dict[str, Any], here: str) -> ResumePoint:
        config = resolve.load_run_config(DEMO, [f"model.transformer={here}", f"checkpoint.load={folder}"])
        assert isinstance(config, RunConfig)
        model = config.model.model_dump(exclude={"transformer"}) | {"transformer": there}
        (folder / "model.yaml").write_text(yaml_file.dump_yaml({"model": model, "iteration": 5}))
        return find_initial_checkpoint(config, Run(tmp_path / "run"), None)

    experts = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.1}
    assert begun({"qk_layernorm": True}, "{qk_layernorm: true, kv_channels: null}").iteration == 5
    assert begun(experts, "{num_moe_experts: 4, moe_token_dispatcher_type: alltoall}").iteration == 5
    with pytest.raises(ConfigError) as caught:
        begun({"qk_layernorm": True, "kv_channels": 64}, "{kv_channels: 32}")
    assert "transformer.kv_channels is 64 there and 32 here; transformer.qk_layernorm is True there and False here" in (
        caught.value.message
    )


def test_a_resume_with_another_model_is_refused_by_field(tmp_path: Path) -> None:
    """What the checkpoint was trained with counts, not what somebody submitted since."""
    run = Run(tmp_path / "run")
    folder = run.checkpoint(5)
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"12345")
    began(run, 1, base=0)
    run.attempt(1).append_commit(
        CheckpointCommit(iteration=5, path=str(folder), consumed_samples=40, time=0.0, seconds=1.0, files={"a": 5})
    )
    run.config.mkdir(exist_ok=True)
    for number, text in ((1, "{qk_layernorm: true}"), (2, "{}")):
        run.config_revision(number).write_text(
            resolve.dump_run_config(resolve.load_run_config(DEMO, [f"model.transformer={text}"]))
        )

    def resumed(*overrides: str) -> ResumePoint:
        return find_initial_checkpoint(resolve.load_run_config(DEMO, overrides), run, None)

    assert resumed("model.transformer.qk_layernorm=true", "model.rotary_base=20000").path is None  # its own: no other
    with pytest.raises(ConfigError) as caught:
        resumed("model.hidden_size=384")
    assert caught.value.message == (
        "this run's checkpoint of iteration 5 is of another model: hidden_size is 192 there and 384 here; "
        "transformer.qk_layernorm is True there and False here"
    )


PAGE = (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_the_page_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    block, export = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    assert export.split()[:3] == ["relayrun", "export", "hf"]  # run by the tests of exports
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[:2] for words in commands] == [["relayrun", name] for name in ("explain", "explain", "config")]
    for words in commands:
        assert main(words[1:]) == 0
    printed = capsys.readouterr().out
    assert "model.transformer.qk_layernorm" in printed
    assert "kv_channels: 64" in printed


@pytest.mark.parametrize(("line", "words"), re.findall(r"^\| `(\w+: [^`]+)` \| (.*) \|$", PAGE, re.M))
def test_the_errors_of_the_page_are_said(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve.load_run_config(DEMO, [f"model.transformer={{{line}}}"])
    assert words in caught.value.message


def test_the_example_of_the_page_is_a_config(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    path = tmp_path / "example.yaml"
    path.write_text(example.replace("../models", str(ROOT / "configs/models")))
    values = resolve.read_settings(path).values["model"]["transformer"]
    assert TransformerSection.model_validate(values).model_dump() == {
        "kv_channels": 128,
        "qk_layernorm": True,
        "window_size": [4095, 0],
        "window_attn_skip_freq": 4,
    }


def test_every_model_of_the_page_is_there() -> None:
    named = set(re.findall(r"`([a-z]+[\d.]*-\d[\w.]*)`", PAGE))
    assert named == {path.stem for path in (ROOT / "configs/models").glob("*.yaml")}


def test_a_revision_holds_what_was_set(tmp_path: Path) -> None:
    config = resolve.load_run_config(
        DEMO, ["model.transformer={kv_channels: 32, qk_layernorm: true, qk_l2_norm: false}"]
    )
    assert isinstance(config, RunConfig)
    assert config.model.transformer.model_dump() == {"kv_channels": 32, "qk_layernorm": True}
    (tmp_path / "revision.yaml").write_text(resolve.dump_run_config(config))
    assert resolve.read_resolved_config(tmp_path / "revision.yaml") == config
    before = resolve.load_run_config(DEMO)
    text = resolve.dump_run_config(before)
    assert "  transformer: {}\n" in text
    (tmp_path / "revision.yaml").write_text(text.replace("  transformer: {}\n", ""))  # as a user may leave it out
    assert resolve.read_resolved_config(tmp_path / "revision.yaml") == before


def shape(**transformer: Any) -> ModelSection:
    return ModelSection(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        transformer=TransformerSection.model_validate(transformer),
    )


def test_parameters_are_counted() -> None:
    plain = size.count_parameters(shape(), 128)
    assert plain == 4 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 2 * 128 * 64 + 64
    assert size.count_parameters(shape(qk_layernorm=True), 128) == plain + 4 * 2 * 16
    assert size.count_parameters(shape(kv_channels=32), 128) == plain + 4 * (64 * (64 + 2 * 32) + 64 * 64)
    assert size.count_parameters(shape(add_qkv_bias=True), 128) == plain + 4 * (64 + 2 * 32)
    assert size.count_parameters(shape(add_bias_linear=True), 128) == plain + 4 * (64 + 2 * 32 + 64 + 2 * 96 + 64)
    assert size.count_parameters(shape(normalization="LayerNorm"), 128) == plain + 4 * 2 * 64 + 64
    two = shape(gated_linear_unit=False, activation_func="xielu")
    assert size.count_parameters(two, 128) == plain - 4 * (64 * 96 - 2)


def test_a_window_makes_attention_cheaper() -> None:
    scores = size.flops_per_token(shape(), 128, 1000) - size.flops_per_token(shape(), 128, 0)
    assert scores == 12 * 64 * 500 * 4
    windowed = shape(window_size=[99, 0], window_attn_skip_freq=4)
    found = size.flops_per_token(windowed, 128, 1000) - size.flops_per_token(shape(), 128, 0)
    seen = sum(min(position, 99) + 1 for position in range(1000)) / 1000
    assert found == pytest.approx(12 * 64 * (3 * seen + 500), rel=1e-12)
