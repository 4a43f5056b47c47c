"""Across the border to Megatron-LM and back, without a checkout; `test_megatron_border.py` needs checkouts."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relayrun.cli import main
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, InputError
from relayrun.submit.initial_checkpoint import find_initial_checkpoint
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.shards.manifest import Manifest
from relayrun.train.checkpoint import megatron_folder
from relayrun.train.checkpoint.megatron_folder import MegatronCheckpoint
from relayrun.train.checkpoint.reader import CheckedReader
from relayrun.train.export import megatron, megatron_settings, megatron_state
from relayrun.train.export.torch_dist import CheckpointReader, TorchDistSavePlan
from tests import warm
from tests.export.models import Imported, make_hf, make_run
from tests.export.trained import make_trained, tensors


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp("trained")
    return make_trained(folder / "run", make_hf(folder / "hf"))


@pytest.fixture(scope="module")
def exported(trained: Imported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "megatron"
    assert main(["export", "megatron", f"{trained.run.path}:7", "--output", str(folder)]) == 0
    return folder


def found(folder: Path, iteration: int | None = None) -> MegatronCheckpoint:
    checkpoint = megatron_folder.find_megatron_checkpoint(folder, iteration)
    assert checkpoint is not None
    return checkpoint


def changed(exported: Path, folder: Path, **arguments: Any) -> Path:
    """A copy with other arguments."""
    shutil.copytree(exported, folder)
    common = torch.load(folder / "iter_0000007/common.pt", weights_only=False)
    for name, value in arguments.items():
        setattr(common["args"], name, value)
    torch.save(common, folder / "iter_0000007/common.pt")
    return folder


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert torch.equal(tensor, other[key]), key


@pytest.mark.slow
def test_there_and_back_bit_for_bit(trained: Imported, exported: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    assert main(["import", "megatron", str(exported), "--output", str(back)]) == 0
    same(tensors(trained.checkpoint), tensors(back))
    before, after = CheckedReader(trained.checkpoint, None).common(), CheckedReader(back, None).common()
    assert CheckedReader(back, None).checked
    assert before["progress"] == after["progress"]
    assert before["fixed"] == after["fixed"]
    step = before["optimizer"]["state"]["common_step"]
    assert torch.equal(step, after["optimizer"]["state"]["common_step"])
    for was, now in zip(before["optimizer"]["param_groups"], after["optimizer"]["param_groups"], strict=True):
        assert was.items() <= now.items()


def test_what_an_import_says(
    trained: Imported, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "megatron", f"{exported}:7", "--output", str(tmp_path / "back")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"iteration 7, 56 samples, weights and optimizer: {tmp_path / 'back'}\n")
    assert "not taken: states of random generators: dropout masks begin anew" in said
    config = resolve.read_resolved_config(trained.run.config_revision(1))
    sections = yaml_file.read_yaml(tmp_path / "back/run.yaml").values
    for name in ("model", "training", "optimizer"):
        mine = getattr(config, name).model_dump(mode="json") | ({"lr_decay_steps": 14} if name == "optimizer" else {})
        assert sections[name] == {setting: mine[setting] for setting in sections[name]}, name
    assert yaml_file.read_yaml(tmp_path / "back/model.yaml").values["iteration"] == 7
    assert json.loads((tmp_path / "back/arguments.json").read_text())["params_dtype"] == "torch.float32"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kind_of_the_optimizer_may_change_on_the_way(tmp_path: Path, precision: str) -> None:
    """distributed → Megatron's plain one → distributed, and plain."""
    made = make_trained(tmp_path / "run", make_hf(tmp_path / "hf"), distributed=True, precision=precision)
    folder = tmp_path / "megatron"
    assert main(["export", "megatron", str(made.run.path), "--output", str(folder)]) == 0
    checkpoint = found(folder)
    assert (checkpoint.distributed, checkpoint.precision, checkpoint.optimizer_fault()) == (None, precision, None)
    again = tmp_path / "again"
    megatron.import_megatron(checkpoint, again, distributed=True)
    same(tensors(made.checkpoint), tensors(again))
    assert CheckedReader(again, None).common()["fixed"]["parallel.use_distributed_optimizer"] is True
    plain = tmp_path / "plain"
    megatron.import_megatron(checkpoint, plain)
    names = {key.split(".")[2] for key in tensors(plain) if key.startswith("optimizer.")}
    assert names == {"exp_avg", "exp_avg_sq"} | ({"fp32_param"} if precision == "bf16" else set())


@pytest.mark.slow
def test_the_state_of_an_older_distributed_optimizer_is_made_whole(exported: Path, tmp_path: Path) -> None:
    """megatron-core before 0.14: each part of a weight flat, in a grid of parts; as of TP2."""
    folder, reader = tmp_path / "flat", CheckpointReader(exported / "iter_0000007")
    contents, wanted = TorchDistSavePlan(), {}
    for key, size in reader.shapes.items():
        contents.copy_tensor(reader, key, key)
        for name in ("exp_avg", "exp_avg_sq", "fp32_param"):
            source = key if name == "fp32_param" else f"optimizer.state.{name}.{key}"
            whole = reader.read(source, start=[0] * len(size), shape=size, dtype=torch.float32)
            wanted[f"optimizer.state.{name}.{key}"] = whole
            layers = 1 if not key.startswith("decoder.layers") else size[0]
            parts = [*([layers] if layers > 1 else []), 2, *[1] * (len(size) - 1 - (layers > 1))]
            if len(parts) > len(size):
                parts = parts[: len(size)]
            cell = [a // b for a, b in zip(size, parts, strict=True)]
            for number in range(torch.Size(parts).numel()):
                at = [int(each) for each in torch.unravel_index(torch.tensor(number), parts)]
                block = whole[tuple(slice(i * n, i * n + n) for i, n in zip(at, cell, strict=True))].reshape(-1)
                contents.add_tensor(
                    f"optimizer.state.{name}.{key}",
                    size=[*parts, block.numel()],
                    start=[*at, 0],
                    part=[1] * len(parts) + [block.numel()],
                    dtype=torch.float32,
                    make=lambda block=block, parts=parts: block.reshape([1] * len(parts) + [-1]).clone(),
                )
    common = torch.load(exported / "iter_0000007/common.pt", weights_only=False)
    groups = [group | {"step": 7} for group in common["optimizer"]["param_groups"]]
    common["optimizer"] = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": "fully_sharded_model_space",
    }
    folder.mkdir()
    contents.write(folder, common)
    assert found(folder).optimizer_fault() == (
        "the state of its distributed optimizer has the form fully_sharded_model_space"
    )
    back = tmp_path / "back"
    assert megatron.import_megatron(found(folder), back, distributed=False).optimizer
    got = tensors(back)
    for key, tensor in wanted.items():
        if "fp32_param" in key:  # the weights are fp32 themselves
            assert key not in got
        else:
            assert torch.equal(got[key], tensor), key


def test_a_state_by_buckets_is_left_behind_in_words(exported: Path, tmp_path: Path) -> None:
    folder = changed(exported, tmp_path / "buckets")
    common = torch.load(folder / "iter_0000007/common.pt", weights_only=False)
    common["optimizer"] = {"param_state_sharding_type": "dp_reshardable"}
    torch.save(common, folder / "iter_0000007/common.pt")
    with_moments = CheckpointReader(folder / "iter_0000007")
    contents = TorchDistSavePlan()
    for key in with_moments.shapes:
        contents.copy_tensor(with_moments, key, key)
    bare = tmp_path / "bare"
    bare.mkdir()
    contents.write(bare, common)
    made = megatron.import_megatron(found(bare), tmp_path / "back")
    assert not made.optimizer
    assert made.not_taken[0] == (
        "the optimizer's moments: the state of its distributed optimizer is in another form (dp_reshardable)"
    )
    assert "iteration" not in yaml_file.read_yaml(tmp_path / "back/model.yaml").values


def test_extra_heads_are_left_behind_in_words(exported: Path, tmp_path: Path) -> None:
    reader, contents = CheckpointReader(exported / "iter_0000007"), TorchDistSavePlan()
    for key in reader.tensors:
        contents.copy_tensor(reader, key, key)
    contents.add_tensor(
        "output_layer.second.weight", size=[2], start=[0], part=[2], dtype=torch.float32, make=lambda: torch.ones(2)
    )
    folder = tmp_path / "more"
    folder.mkdir()
    contents.write(folder, torch.load(exported / "iter_0000007/common.pt", weights_only=False))
    made = megatron.import_megatron(found(folder), tmp_path / "back")
    assert "output_layer.second.weight [2]: the model has no such weight" in made.not_taken
    assert "output_layer.second.weight" not in tensors(tmp_path / "back")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm', not 'RMSNorm'"),
        ({"add_bias_linear": True}, "add_bias_linear is True, not False"),
        ({"multi_latent_attention": True, "xielu": True}, "multi_latent_attention is True, not False; swiglu is True"),
        ({"swiglu": False}, "swiglu is False, not True"),
        ({"fp16": True}, "fp16 is True, not False"),
    ],
)
def test_another_model_is_refused_with_all_that_differs(
    exported: Path, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    folder = changed(exported, tmp_path / "other", **arguments)
    with pytest.raises(InputError, match=f"relayrun has no such model: {words}"):
        megatron_settings.model_section(found(folder))


ARGUMENTS: dict[str, dict[str, Any]] = {
    "Qwen3": {"qk_layernorm": True, "kv_channels": 16},
    "Mixtral": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96, "moe_aux_loss_coeff": 0.01},
    "Apertus": {"qk_layernorm": True, "xielu": True, "swiglu": False, "train_samples": 112, "lr_warmup_samples": 9},
}
"""Arguments in the checkpoints of Megatron-LM of these classes, besides those of a Llama."""


def as_saved_by_megatron(made: Imported, folder: Path, kind: str) -> Path:
    """The weights of a run as a folder of Megatron-LM with local layers, whose norm before experts has this name."""
    reader, contents = CheckpointReader(made.checkpoint), TorchDistSavePlan()
    for key in reader.shapes:
        contents.copy_tensor(reader, key, key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"))
    config = resolve.read_resolved_config(made.run.config_revision(1))
    assert isinstance(config, RunConfig)
    position = TrainingProgress(config.training.batch_sizes, iteration=7)
    args = megatron_state.megatron_arguments(config, 384, torch.float32, position) | ARGUMENTS[kind]
    (folder / "iter_0000007").mkdir(parents=True)
    contents.write(folder / "iter_0000007", {"args": Namespace(**args), "iteration": 7, "checkpoint_version": 3.0})
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.mark.parametrize("kind", [pytest.param("Qwen3", marks=pytest.mark.long), "Mixtral", "Apertus"])
def test_more_classes_than_the_llama_come_from_megatron(kind: str, tmp_path: Path) -> None:
    """To Hugging Face bit by bit, and as a beginning of a run."""
    hf = make_hf(tmp_path / "hf", kind)
    made = make_run(tmp_path / "run", hf)
    folder = as_saved_by_megatron(made, tmp_path / "megatron", kind)
    words = ["--tokenizer", str(hf / "tokenizer.json"), "--output", str(tmp_path / "out")]
    assert main(["export", "hf", str(folder), *words]) == 0
    if kind == "Mixtral":  # whose local layers have another name for a norm; megatron-core starts once in a process
        command = [sys.executable, "-m", "relayrun.cli", "export", "hf", str(folder), "--test-logits"]
        warm.run([*command, *words[:2], "--output", str(tmp_path / "compared")], check=True, timeout=600)
    assert main(["export", "hf", str(made.run.path), "--output", str(tmp_path / "of_run")]) == 0
    same(load_file(hf / "model.safetensors"), load_file(tmp_path / "out/model.safetensors"))
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "of_run/config.json").read_bytes()
    assert main(["import", "megatron", str(folder), "--weights-only", "--output", str(tmp_path / "back")]) == 0
    same(tensors(made.checkpoint), tensors(tmp_path / "back"))
    assert yaml_file.read_yaml(tmp_path / "back/run.yaml").values["optimizer"]["lr_warmup_steps"] == 2 * (
        kind == "Apertus"
    )


def test_experts_that_no_class_has_are_refused_with_what_differs(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", make_hf(tmp_path / "hf", "Mixtral"))
    folder = as_saved_by_megatron(made, tmp_path / "megatron", "Mixtral")
    other = changed(folder, tmp_path / "other", moe_shared_expert_intermediate_size=64)
    with pytest.raises(InputError, match="nearest is Mixtral: moe_shared_expert_intermediate_size is 64"):
        megatron.import_megatron(found(other), tmp_path / "back")


def test_what_has_no_setting_is_named(exported: Path, tmp_path: Path) -> None:
    folder = changed(
        exported, tmp_path / "other", goldfish_loss=True, decoupled_lr=0.1, weight_decay_incr_style="linear"
    )
    words = megatron_settings.describe_not_taken(found(folder), optimizer=None)
    for name in ("--goldfish-loss True", "--decoupled-lr 0.1", "--weight-decay-incr-style 'linear'"):
        assert any(name in each for each in words), name


def config_of(trained: Imported, load: Path | str, **sections: dict[str, Any]) -> RunConfig:
    config = resolve.read_resolved_config(trained.run.config_revision(1)).model_dump()
    config["checkpoint"] |= {"load": str(load)}
    for name, changes in sections.items():
        config[name] |= changes
    return RunConfig.model_validate(config)


def test_a_run_begins_with_such_a_folder_as_it_lies(trained: Imported, exported: Path, tmp_path: Path) -> None:
    manifest, said = Manifest.read(trained.run.manifest), []
    for load in (exported, f"{exported}:7", exported / "iter_0000007"):
        base = find_initial_checkpoint(config_of(trained, load), Run(tmp_path), manifest, said.append)
        assert (base.iteration, base.path) == (7, str(exported / "iter_0000007"))
    assert "dropout masks begin anew" in said[0]
    common = CheckedReader(exported / "iter_0000007", None).common()
    assert common["data"] is None
    assert common["progress"]["consumed_samples"] == 56
    assert float(common["optimizer"]["state"]["common_step"]) == 7


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"hidden_size": 128}}, "hidden_size is 64 there and 128 here"),
        ({"model": {"norm_epsilon": 1e-4}}, "norm_epsilon is 1e-06 there and 0.0001 here"),
        ({"model": {"make_vocab_size_divisible_by": 1024}}, "the padded vocabulary is 384 there and 1024 here"),
        ({"parallel": {"use_distributed_optimizer": True}}, "parallel.use_distributed_optimizer False, and it is True"),
        ({"training": {"precision": "bf16"}}, "training.precision fp32, and it is bf16 here"),
        ({"training": {"steps": 7}}, "stands at iteration 7, and training.steps is 7"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_before_it_is_queued(
    trained: Imported, exported: Path, tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        find_initial_checkpoint(
            config_of(trained, exported, **sections), Run(tmp_path), Manifest.read(trained.run.manifest)
        )


def test_the_folder_must_hold_the_iteration(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this folder has no checkpoint of iteration 8"):
        megatron_folder.find_megatron_checkpoint(exported, 8)
    with pytest.raises(InputError, match="this is the checkpoint of iteration 7, not 8"):
        megatron_folder.find_megatron_checkpoint(exported / "iter_0000007", 8)
    torn = tmp_path / "torn"
    shutil.copytree(exported, torn)
    (torn / "iter_0000007/common.pt").unlink()
    with pytest.raises(InputError, match=r"there is no common\.pt in it"):
        megatron_folder.find_megatron_checkpoint(torn)
    (torn / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(InputError, match="names no iteration: 'seven'"):
        megatron_folder.find_megatron_checkpoint(torn)
    assert megatron_folder.find_megatron_checkpoint(tmp_path) is None


def test_a_checkpoint_of_a_run_is_not_taken_for_one(trained: Imported) -> None:
    assert megatron_folder.find_megatron_checkpoint(trained.checkpoint) is None


def test_hugging_face_from_the_folder_is_that_from_the_run(trained: Imported, exported: Path, tmp_path: Path) -> None:
    tokenizer = str(trained.hf / "tokenizer.json")
    of_run, of_folder = tmp_path / "run", tmp_path / "folder"
    assert main(["export", "hf", str(trained.run.path), "--output", str(of_run)]) == 0
    arguments = ["--ckpt-step", "7", "--hf-tokenizer", tokenizer, "--output", str(of_folder)]
    assert main(["export", "hf", str(exported), *arguments]) == 0
    same(load_file(of_run / "model.safetensors"), load_file(of_folder / "model.safetensors"))
    assert (of_run / "config.json").read_bytes() == (of_folder / "config.json").read_bytes()


def test_an_export_of_the_folder_needs_a_tokenizer(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "hf", str(exported), "--output", str(tmp_path / "hf")]) == 1
    assert "give --tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_the_plain_torch_format_has_the_moments_by_number(trained: Imported, tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    arguments = ["--optimizer", "--transformer-impl", "local", "--output", str(folder)]
    assert main(["export", "torch", str(trained.run.path), *arguments]) == 0
    state = torch.load(folder / "iter_0000007/mp_rank_00/model_optim_rng.pt", weights_only=False)
    matrices, norms = (group["params"] for group in state["optimizer"]["param_groups"])
    assert len(matrices) == 2 + 3 * 4
    assert len(norms) == 1 + 3 * 2
    assert [*matrices, *norms] == [*range(len(state["optimizer"]["state"]))]
    names = [name for name in state["model"] if "norm" not in name]
    shapes = {number: state["optimizer"]["state"][number]["exp_avg"].shape for number in matrices}
    assert sorted(shapes.values()) == sorted(state["model"][name].shape for name in names)
    whole = tensors(trained.checkpoint)["optimizer.state.exp_avg.embedding.word_embeddings.weight"]
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], whole)
    assert state["opt_param_scheduler"]["num_steps"] == 56
