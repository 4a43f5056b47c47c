"""The baselines are what is published, and what was agreed on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import ModelSection
from relayrun.errors import ConfigError
from relayrun.places import CODE_ROOT as ROOT
from relayrun.submit.check.report import check_config
from relayrun.train.model.size import count_parameters, flops_per_token, memory_bytes, pad_to_multiple, peak_flops

VOCABULARY = 128_256
# Sums of the safetensors metadata of meta-llama/Llama-3.2-1B, -3.2-3B, -3.1-8B and -3.1-70B on the Hugging Face hub
# (huggingface.co/api/models/NAME?expand=safetensors); the model cards round them to 1.23B, 3.21B, 8B, 70B.
PUBLISHED = {"1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248, "70b": 70_553_706_496}

OTHERS = {
    "qwen3-0.6b": (151_936, 596_049_920),
    "qwen3-8b": (151_936, 8_190_735_360),
    "apertus-8b": (131_072, 8_053_338_176),
    "apertus-70b": (131_072, 70_599_864_480),
    "mixtral-8x7b": (32_000, 46_702_792_704),
}
"""Vocabulary and parameters; the model cards round them to 0.6B, 8.2B, 8.053B, 70B and 46.7B."""

COMMON = {
    "model.init_method_std": 0.008944,
    "model.rope_scaling_factor": 8.0,
    "training.micro_batch_size": 1,
    "training.seq_length": 8192,
    "training.seed": 28,
    "training.precision": "bf16",
    "optimizer.lr_decay_style": "cosine",
    "optimizer.lr_warmup_steps": 200,
    "optimizer.weight_decay": 0.1,
    "optimizer.adam_beta1": 0.9,
    "optimizer.adam_beta2": 0.95,
    "optimizer.clip_grad": 1.0,
    "optimizer.use_precision_aware_optimizer": True,
    "optimizer.main_grads_dtype": "bf16",
    "training.transformer_impl": "transformer_engine",
    "training.cross_entropy_loss_fusion": True,
    "training.recompute_granularity": None,
    "data.reset_position_ids": True,
    "data.reset_attention_mask": True,
    "data.eod_mask_loss": True,
    "parallel.use_distributed_optimizer": True,
    "parallel.overlap_grad_reduce": True,
    "parallel.overlap_param_gather": True,
    "job.ntasks_per_node": 4,
    "job.gpus_per_node": 4,
    "job.cpus_per_task": 72,
}
AGREED = {
    "8b": COMMON
    | {
        "job.nodes": 16,
        "training.global_batch_size": 128,
        "optimizer.lr": 2.2e-4,
        "optimizer.min_lr": 2.2e-5,
        "training.manual_gc_interval": 500,
        "parallel.tensor_model_parallel_size": 1,
        "parallel.pipeline_model_parallel_size": 1,
    },
    "70b": COMMON
    | {
        "job.nodes": 32,
        "training.global_batch_size": 1024,
        "optimizer.lr": 1.5e-4,
        "optimizer.min_lr": 1.5e-5,
        "training.manual_gc_interval": 50,
        "parallel.tensor_model_parallel_size": 4,
        "parallel.sequence_parallel": True,
        "parallel.pipeline_model_parallel_size": 8,
        "parallel.num_layers_per_virtual_pipeline_stage": 5,
        "parallel.defer_embedding_wgrad_compute": True,
        "parallel.wgrad_deferral_limit": 22,
        "parallel.overlap_p2p_communication_warmup_flush": True,
    },
}


def model(name: str) -> ModelSection:
    return ModelSection.model_validate(
        yaml_file.read_yaml(ROOT / "configs" / "models" / f"{name}.yaml").values["model"]
    )


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_baseline_has_as_many_parameters_as_published(size: str) -> None:
    assert count_parameters(model(f"llama3-{size}"), VOCABULARY) == PUBLISHED[size]


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_has_as_many_parameters_as_published(name: str) -> None:
    vocabulary, published = OTHERS[name]
    assert count_parameters(model(name), vocabulary) == published


def test_the_small_ones_have_what_their_names_say() -> None:
    small = model("llama3-440m")
    assert count_parameters(small, 49_152) == 361_821_120  # SmolLM2-360M, the sum of its safetensors metadata
    assert count_parameters(small, VOCABULARY) == 437_760_960
    assert round(count_parameters(model("llama-160m"), VOCABULARY) / 1e6) == 160
    assert round(count_parameters(model("llama-3m"), 4096) / 1e6) == 3


def test_the_vocabulary_of_llama_3_needs_no_padding() -> None:
    assert (pad_to_multiple(VOCABULARY, 128), pad_to_multiple(300, 128)) == (VOCABULARY, 384)


@pytest.mark.parametrize("size", AGREED)
def test_a_baseline_is_as_agreed(size: str) -> None:
    config = resolve.load_run_config(ROOT / "configs" / "runs" / f"llama3-{size}.yaml").model_dump()
    found = {name: config[name.split(".")[0]][name.split(".")[1]] for name in AGREED[size]}
    assert found == AGREED[size]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tensor_model_parallel_size=1", "sequence_parallel splits over tensor-parallel ranks"),
        ("parallel.tensor_model_parallel_size=16", "num_query_groups 8 is no multiple of"),
        ("parallel.pipeline_model_parallel_size=1", "num_layers_per_virtual_pipeline_stage needs pipeline"),
        ("parallel.num_layers_per_virtual_pipeline_stage=3", "the 10 layers of a pipeline stage cannot be split"),
        ("parallel.num_layers_per_virtual_pipeline_stage=10", "the 10 layers of a pipeline stage cannot be split"),
        ("parallel.overlap_grad_reduce=false", "overlap_param_gather needs"),
        ("parallel.use_distributed_optimizer=false", "overlap_param_gather needs"),
        ("training.global_batch_size=1004", "251 micro-batches per iteration and rank are no multiple of"),
        ("training.seq_length=8190", "training.seq_length 8190 is no multiple of"),
        ("model.make_vocab_size_divisible_by=2", "make_vocab_size_divisible_by 2 is no multiple of"),
        ("model.ffn_hidden_size=28670", "model.ffn_hidden_size 28670 is no multiple of"),
    ],
)
def test_a_wrong_combination_is_refused_by_its_rule(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-70b.yaml", [override])


ROOM = 0.9 * 97_871 * 2**20
"""Bytes of a GH200 as nvidia-smi says; a tenth is for CUDA, NCCL's buffers and what lies between allocations."""


@pytest.mark.parametrize("size", ["440m", "1b", "3b", "8b", "70b"])
def test_a_baseline_fits_a_gpu_of_96_gb_by_formula(size: str) -> None:
    path = ROOT / "configs" / "runs" / f"llama3-{size}.yaml"
    assert memory_bytes(resolve.load_run_config(path), VOCABULARY).total < ROOM


def test_the_estimate_of_memory_counts_what_a_gpu_holds() -> None:
    """Llama 3.2 1B on one GPU in bf16: 18 bytes a parameter, and per token 16 layers and the loss."""
    path = ROOT / "configs" / "runs" / "llama3-1b.yaml"
    one = ["job.nodes=1", "job.ntasks_per_node=1", "training.seq_length=4096", "training.micro_batch_size=2"]
    found = memory_bytes(resolve.load_run_config(path, one), VOCABULARY)
    assert found.state == 18 * PUBLISHED["1b"]
    assert found.activations == 2 * 4096 * 16 * 2 * (8 * 2048 + 3 * 8192)
    assert found.loss == 2 * 4096 * 12 * VOCABULARY
    whole = memory_bytes(resolve.load_run_config(path, [*one, "training.recompute_granularity=full"]), VOCABULARY)
    assert whole.activations == 2 * 4096 * (16 * 2 * 2048 + 2 * (8 * 2048 + 3 * 8192))
    undivided = memory_bytes(
        resolve.load_run_config(
            path, ["parallel.use_distributed_optimizer=false", "parallel.overlap_param_gather=false"]
        ),
        VOCABULARY,
    )
    assert undivided.state == 18 * PUBLISHED["1b"]
    fp32 = memory_bytes(resolve.load_run_config(path, [*one, "training.precision=fp32"]), VOCABULARY)
    assert fp32.state == 16 * PUBLISHED["1b"]


def test_the_8b_needs_its_gradients_in_bf16_to_recompute_nothing() -> None:
    path = ROOT / "configs" / "runs" / "llama3-8b.yaml"
    assert memory_bytes(resolve.load_run_config(path, ["optimizer.main_grads_dtype=fp32"]), VOCABULARY).total > ROOM


def test_the_estimate_of_memory_knows_types_and_stages() -> None:
    """The 70B on 128 GPUs: a rank has a 32nd of the model, and divides the optimizer over 4."""
    path = ROOT / "configs" / "runs" / "llama3-70b.yaml"
    own = PUBLISHED["70b"] / 32

    def state(*overrides: str) -> float:
        return memory_bytes(resolve.load_run_config(path, overrides), VOCABULARY).state / own

    plain = "optimizer.use_precision_aware_optimizer=false"
    assert state() == 2 + 2 + 12 / 4
    assert state("optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=fp8") == 2 + 2 + 7 / 4
    assert state(plain) == 2 + 2 + (12 + 4) / 4
    assert state(plain, "optimizer.main_grads_dtype=fp32") == 2 + 4 + 12 / 4
    # the first stage is the fullest, unless the last one defers much
    layer = 2 * (8 * 8192 + 3 * 28672) * 8192 / 4
    first = memory_bytes(resolve.load_run_config(path), VOCABULARY)
    assert (first.activations, first.loss) == (pytest.approx(23 * 5 * layer), 0)
    last = memory_bytes(resolve.load_run_config(path, ["parallel.wgrad_deferral_limit=200"]), VOCABULARY)
    tokens = 8192 / 4
    assert last.activations == pytest.approx(9 * 5 * layer)
    assert last.loss == tokens * (12 * VOCABULARY + 200 * 2 * (VOCABULARY + 8192))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.context_parallel_size=3"], "128 ranks .* no multiple of tensor x pipeline x context .* 4 x 8 x 3"),
        (
            ["parallel.context_parallel_size=2", "training.seq_length=8200", "training.transformer_impl=local"],
            "8200 is no multiple of 16: each of the 2",
        ),
        (
            ["parallel.context_parallel_size=32", "training.transformer_impl=local", "job.nodes=256"],
            "num_attention_heads 64 is no multiple of tensor x context parallel size 4 x 32",
        ),
        (
            [
                "parallel.context_parallel_size=2",
                "training.transformer_impl=transformer_engine",
                "data.reset_attention_mask=true",
            ],
            "needs the local attention",
        ),
    ],
)
def test_what_an_attention_cannot_do_is_refused_by_its_rule(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-70b.yaml", overrides)


def test_transformer_engine_is_refused_before_submission_unless_the_cluster_has_it() -> None:
    config = resolve.load_run_config(
        ROOT / "configs" / "runs" / "llama3-70b.yaml", ["data.mock_data=true", "cluster.transformer_engine=false"]
    )
    with pytest.raises(ConfigError, match="use_precision_aware_optimizer=true needs TransformerEngine, which") as error:
        check_config(config).raise_errors()
    without = ["training.transformer_impl=local", "optimizer.use_precision_aware_optimizer=false"]
    assert all(setting in str(error.value) for setting in without)
    declared = config.cluster.model_copy(update={"transformer_engine": True})
    check_config(config.model_copy(update={"cluster": declared})).raise_errors()
    values = ["data.mock_data=true", "cluster.transformer_engine=false", *without]
    check_config(resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-70b.yaml", values)).raise_errors()


def test_what_needs_transformer_engine_is_refused_without_gpus() -> None:
    values = ["data.mock_data=true", "job.gpus_per_node=0", "training.transformer_impl=local"]
    config = resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-8b.yaml", values)
    with pytest.raises(ConfigError, match=r"use_precision_aware_optimizer=true needs .* kernels run on GPUs alone"):
        check_config(config).raise_errors()


def test_one_minus_the_root_has_two_names() -> None:
    values = ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_steps=9", "optimizer.lr_wsd_decay_style=1-sqrt"]
    found = resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-8b.yaml", values)
    assert found.optimizer.lr_wsd_decay_style == "1-sqrt"


def test_a_token_costs_six_flops_per_parameter_and_the_causal_half_of_attention() -> None:
    eight = model("llama3-8b")
    expected = 6 * (8_030_261_248 - VOCABULARY * 4096 - 65 * 4096) + 6 * 32 * 4096 * 8192
    assert flops_per_token(eight, VOCABULARY, 8192) == expected
    tied = model("llama3-1b")  # the output layer counts, although it is the embeddings
    assert flops_per_token(tied, VOCABULARY, 0) == 6 * (1_235_814_400 - 33 * 2048)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 120GB", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("AMD Instinct MI250X", 383e12 / 2),
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI325X", 1307.4e12),
        ("NVIDIA H20", None),
        ("CPU", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_the_name_that_torch_gives(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.precision=fp32"], "optimizer.main_grads_dtype=bf16 needs training.precision bf16"),
        (
            ["training.precision=fp32", "optimizer.main_grads_dtype=fp32"],
            "optimizer.use_precision_aware_optimizer needs training.precision bf16",
        ),
        (
            ["parallel.use_distributed_optimizer=false", "parallel.overlap_param_gather=false"],
            "use_precision_aware_optimizer needs parallel.use_distributed_optimizer",
        ),
        (
            ["optimizer.use_precision_aware_optimizer=false", "optimizer.exp_avg_dtype=bf16"],
            "exp_avg_dtype bf16 needs use_precision_aware_optimizer",
        ),
        (["optimizer.name=muon"], "use_precision_aware_optimizer is an Adam; set it to false with muon"),
        (["training.deterministic=true"], "set training.cross_entropy_loss_fusion=false"),
        (["parallel.defer_embedding_wgrad_compute=true"], "it needs pipeline_model_parallel_size above 1"),
        (
            [
                "parallel.pipeline_model_parallel_size=2",
                "parallel.defer_embedding_wgrad_compute=true",
                "parallel.wgrad_deferral_limit=1",
            ],
            "cannot compute the rest of a single micro-batch; set 2 or more",
        ),
        (
            [
                "parallel.pipeline_model_parallel_size=2",
                "parallel.defer_embedding_wgrad_compute=true",
                "training.global_batch_size=32",
            ],
            "32 is one micro-batch per iteration and rank: parallel.defer_embedding_wgrad_compute needs two",
        ),
        (["parallel.wgrad_deferral_limit=22"], "wgrad_deferral_limit needs defer_embedding_wgrad_compute"),
        (
            ["parallel.overlap_p2p_communication_warmup_flush=true"],
            "warmup_flush needs num_layers_per_virtual_pipeline_stage",
        ),
    ],
)
def test_what_a_precision_or_a_pipeline_lacks_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-8b.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr_warmup_tokens=1"], "lr_warmup_steps and lr_warmup_tokens say the same"),
        (["optimizer.lr_decay_tokens=1", "optimizer.lr_decay_steps=4000"], "lr_decay_steps and lr_decay_tokens say"),
        (["optimizer.lr_decay_tokens=1"], "lr_warmup_steps 200 must be below optimizer.lr_decay_tokens, in steps 1"),
        (["optimizer.lr_decay_style=WSD"], "lr_wsd_decay_steps belongs to lr_decay_style WSD"),
        (["optimizer.lr_wsd_decay_steps=9"], "lr_wsd_decay_steps belongs to lr_decay_style WSD"),
        (["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_steps=4801"], "must fit between the warm-up of 200"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-8b.yaml", overrides)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ("[16, 16]", "has 3 numbers, not 2"),
        ("[16, 0, 1000]", "is neither"),
        ("[16, true, 1000]", "is neither"),
        ("[[16, 100], [32]]", "is neither"),
        ("[]", "is neither"),
        ("[128, 16, 1000]", "start 128 must be below global_batch_size 128 by a multiple of increment 16"),
        ("[16, 100, 1000]", "start 16 must be below"),
        ("[[64, 100], [64, 100]]", "must rise, not be"),
        ("[32, 32, 3000]", "stage 1 of 4: global batch size 32 from sample 0 on is no multiple of micro_batch_size x"),
        ("[[64, 100], [96, 200]]", "stage 2 of 3: global batch size 96 from sample 100 on is no multiple of"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused_and_its_stage_named(ramp: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve.load_run_config(ROOT / "configs" / "runs" / "llama3-8b.yaml", [f"training.rampup_batch_size={ramp}"])


def test_a_stage_without_enough_micro_batches_for_the_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stage 1 of 3: .*: 1 micro-batches per iteration and rank are no"):
        resolve.load_run_config(
            ROOT / "configs" / "runs" / "llama3-70b.yaml", ["training.rampup_batch_size=[[4, 100], [8, 200]]"]
        )


def test_a_ramp_comes_back_from_a_config_revision(tmp_path: Path) -> None:
    for ramp in ("[64, 64, 5000]", "[[64, 5000]]"):
        config = resolve.load_run_config(
            ROOT / "configs" / "runs" / "llama3-8b.yaml", [f"training.rampup_batch_size={ramp}"]
        )
        (tmp_path / "0001.yaml").write_text(resolve.dump_run_config(config))
        assert resolve.read_resolved_config(tmp_path / "0001.yaml") == config
        assert config.training.batch_sizes.at(4999) == 64
        assert config.training.batch_sizes.at(5000) == 128


def test_lengths_in_tokens_follow_the_ramp() -> None:
    config = resolve.load_run_config(
        ROOT / "configs" / "runs" / "llama3-8b.yaml",
        [
            "training.rampup_batch_size=[[64, 640]]",
            "optimizer.lr_warmup_steps=0",
            f"optimizer.lr_warmup_tokens={640 * 8192}",
            f"optimizer.lr_decay_tokens={1281 * 8192}",
        ],
    )
    assert config.lr_steps(config.training.batch_sizes.reaches) == (10, 16)


def test_tokens_become_whole_iterations() -> None:
    tokens = 128 * 8192
    config = resolve.load_run_config(
        ROOT / "configs" / "runs" / "llama3-8b.yaml",
        [
            "optimizer.lr_warmup_steps=0",
            f"optimizer.lr_warmup_tokens={10 * tokens + 1}",
            f"optimizer.lr_decay_tokens={100 * tokens}",
        ],
    )
    assert config.lr_steps(config.training.batch_sizes.reaches) == (11, 100)
