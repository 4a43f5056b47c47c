"""The OpenGenome2 runs: every option of the published recipe beside ours, size, memory, and the shape of a sample."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.places import CODE_ROOT as ROOT
from relayrun.tokens.streams.fragments import group_count
from relayrun.train.model.size import count_parameters, memory_bytes

RUNS = ("og2_7b_thd_gqa", "og2_7b_thd_gqa_global_shuffle")
PAGE = (ROOT / "docs/reference/opengenome2-options.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`|]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
SETTING = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:: ([^`]+))?`")

OPTIONS = {
    "": "config_name_or_path spike_no_more_embedding_init use_megatron_scaled_init skip_embedding_weight_decay "
    "use_weight_decay_grouping use_fp32_master_weights use_meta_device use_te use_torch_compile use_sequence_packing "
    "fp8_layers fp4_layers num_train_steps grad_acc_steps seed",
    "config_kwargs": "vocab_size num_hidden_layers hidden_size intermediate_size num_attention_heads "
    "num_key_value_heads max_position_embeddings initializer_range attn_input_format rope_theta rope_scaling",
    "fp8_config": "enabled",
    "dataset": "tokenizer_name_or_path micro_batch_size num_workers prefetch_factor max_seq_length stride buffer_size "
    "split_samples_in_token_packing token_micro_batch_size pad_sequences_to_be_divisible_by mask_degenerate_bases "
    "uppercase_labels use_stateful_dataloader text_column",
    "dataset.load_dataset_kwargs": "path split streaming",
    "adamw_kwargs": "lr fused betas eps weight_decay",
    "lr_scheduler_kwargs": "num_warmup_steps num_decay_steps min_lr_ratio",
    "checkpoint": "ckpt_dir save_final_model resume_from_checkpoint save_every_n_steps max_checkpoints async_save",
    "validation": "enabled eval_interval num_batches data_path micro_batch_size max_seq_length stride",
    "logger": "frequency",
    "wandb": "name project",
    "profiler": "enabled",
    "quant_stats_config": "enabled",
}
"""What the recipe's two configs, their defaults and its functions for data take, by section."""


def config(name: str) -> RunConfig:
    found = resolve.load_run_config(ROOT / "configs" / "runs" / f"{name}.yaml")
    assert isinstance(found, RunConfig)
    return found


def test_every_option_of_the_recipe_stands_in_the_table() -> None:
    expected = {f"{section}.{name}".strip(".") for section, names in OPTIONS.items() for name in names.split()}
    assert sorted(name for name, _, _ in ROWS) == sorted(expected)


def values(text: str) -> list[Any]:
    """The values between backticks, one for each run where there are two."""
    return [yaml_file.parse_yaml_value(value) for value in re.findall(r"`([^`]+)`", text)]


def setting(settings: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        if not isinstance(settings, dict) or part not in settings:
            return None if name.startswith("model.transformer.") else KeyError(name)
        settings = settings[part]
    return settings


@pytest.mark.parametrize("number", [0, 1], ids=RUNS)
def test_the_settings_are_those_of_the_table(number: int) -> None:
    """A setting alone has the recipe's value, else that behind it; of two the second is that of the second run."""
    dumped = yaml_file.parse_yaml_value(config(RUNS[number]).model_dump_json().replace(f"{ROOT}/", ""))
    compared = 0
    for option, there, here in ROWS:
        given: dict[str, list[Any]] = {}
        for name, value in SETTING.findall(here):
            if name.split(".")[0] in dumped and name != option:
                given.setdefault(name, []).extend([yaml_file.parse_yaml_value(value)] if value else values(there))
        for name, choices in given.items():
            wanted, found = choices[min(number, len(choices) - 1)], setting(dumped, name)
            if name == "optimizer.groups":
                found = [{key: each[key] for key in wanted[0]} for each in found]
            assert found == wanted, (option, name)
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", RUNS)
def test_the_model_has_7b_parameters_and_fits_80_gb(name: str) -> None:
    made = config(name)
    assert count_parameters(made.model, 256) == 6_981_685_248
    assert memory_bytes(made, 256).total < 0.9 * 80e9


@pytest.mark.parametrize("name", RUNS)
def test_an_iteration_has_384_rows_and_replicas_divide_the_lanes(name: str) -> None:
    made = config(name)
    assert made.training.global_batch_size == 384
    assert made.world_size == 48
    assert made.data.lanes % made.data_parallel_size == 0
    files = {"jsonl": 80, "parquet": 1733}[made.data.mixture["metagenomes"].source]
    assert made.data.lanes % group_count(files, made.data.lanes) == 0
    assert made.data.masks_loss
    assert made.training.resolved_loss_mean == "token"


def test_the_figures_of_the_page_are_those_of_the_last_benchmark() -> None:
    found = json.loads((ROOT / "benchmarks/results/sorted_files.json").read_text())["figures"]["runs"]
    page = (ROOT / "docs/how-to/opengenome2.md").read_text(encoding="utf-8")
    for what, key, form in (
        ("change of the loss from step to step, nats", "loss_noise", ".3f"),
        ("largest rise of the loss in one step, nats", "largest_rise", ".2f"),
        ("CPU time of the longest step, over the median", "longest_step", ".1f"),
        ("loss on held-out sequences at the end, nats", "held_out_loss", ".3f"),
    ):
        assert f"| {what} | {found['sorted'][key]:{form}} | {found['shuffled'][key]:{form}} |" in page
    assert found["sorted"]["loss_noise"] > found["shuffled"]["loss_noise"]
    assert {len(run["steps"]["loss"]) for run in found.values()} == {300}
