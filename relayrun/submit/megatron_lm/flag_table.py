"""Which setting becomes which flag of Megatron-LM: one table, and the settings that have none, with the reason.

Every setting of the sections model, training, optimizer, checkpoint, parallel, data and tracking stands here once,
which a test holds. What a setting says is said to Megatron-LM also where it is Megatron's own default: defaults differ
between checkouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from relayrun.config.compose.schema import MegatronConfig, OptimizerSection, Section
from relayrun.config.sections.data import DEFAULT_LANES
from relayrun.config.sections.model import TransformerSection
from relayrun.config.sections.training import BatchSizes
from relayrun.errors import ConfigError, combined_error
from relayrun.submit.megatron_lm.checkout import Checkout
from relayrun.submit.megatron_lm.flags import Flag

FlagValues = tuple[str, ...] | None
"""The words behind a flag; empty for a flag alone, None for no flag."""


@dataclass(frozen=True)
class RowContext:
    """What a row may look at besides its own setting."""

    config: MegatronConfig
    checkout: Checkout


@dataclass(frozen=True)
class FlagRow:
    """A setting and a flag that it becomes."""

    setting: str
    """`section.name`; `section` alone for what every run with that section has."""
    flag: str
    how: Callable[[Any, RowContext], FlagValues]
    words: str
    """How the flag is written, for people."""


def _value(setting: str, flag: str) -> FlagRow:
    """The setting's value behind the flag; no flag for null."""
    return FlagRow(setting, flag, lambda value, _: None if value is None else (str(value),), f"--{flag} VALUE")


def _switch(setting: str, flag: str) -> FlagRow:
    """The flag alone where the setting is true."""
    return FlagRow(setting, flag, lambda value, _: () if value else None, f"--{flag} where true")


def _where(setting: str, flag: str, is_value: object) -> FlagRow:
    """The flag alone where the setting has this value."""
    return FlagRow(setting, flag, lambda value, _: () if value == is_value else None, f"--{flag} where {is_value}")


def _always(section: str, flag: str, *values: str) -> FlagRow:
    """The same words for every run with the section."""
    return FlagRow(section, flag, lambda _value, _given: values, " ".join([f"--{flag}", *values]))


def _rampup(value: Any, given: RowContext) -> FlagValues:
    if value is None:
        return None
    if len(value) == 3 and all(isinstance(each, int) for each in value):
        return tuple(map(str, value))
    raise ConfigError(
        "Megatron-LM knows a ramp of the form [start, increment, samples] only",
        where="training.rampup_batch_size",
        hint="write it in that form, or train with trainer: native",
    )


def _evaluates(given: RowContext) -> bool:
    """Whether there are validation data; where `data` says nothing of them, whether somebody wants evaluations."""
    data, training = given.config.data, given.config.training
    if data is None:
        return training is not None and training.eval_interval > 0
    return bool(data.split or data.validation)


def _eval_iters(value: int, given: RowContext) -> FlagValues:
    return (str(value if _evaluates(given) else 0),)


def _eval_interval(value: int, given: RowContext) -> FlagValues:
    """0 is after the last iteration only, at which Megatron-LM evaluates anyway.

    Without validation data it is what was the default: NVIDIA's of core 0.16 has none any more, and divides by it.
    """
    assert given.config.training is not None
    return (str(value or given.config.training.steps),) if _evaluates(given) else ("1000",)


def _transformer_impl(value: str, given: RowContext) -> FlagValues:
    """`auto` leaves the choice to Megatron-LM."""
    return None if value == "auto" else (value,)


def _recompute_method(value: Any, given: RowContext) -> FlagValues:
    assert given.config.training is not None
    return ("uniform" if given.config.training.recompute_num_layers is None else "block",) if value == "full" else None


def _recompute_num_layers(value: int | None, given: RowContext) -> FlagValues:
    """Null is every layer: each a unit of its own."""
    assert given.config.training is not None
    return (str(value or 1),) if given.config.training.recompute_granularity == "full" else None


def _iterations(tokens: int | None, steps: int | None, given: RowContext) -> int | None:
    """Iterations that are given as such, or as tokens: the last of them ends with the iteration that trains on it."""
    if tokens is None:
        return steps
    training = given.config.training
    if training is None:
        raise ConfigError(
            "tokens become iterations by the batch size and the sequence length of the section training",
            where="optimizer",
            hint="give the section training, or iterations",
        )
    return BatchSizes(training.global_batch_size, training.rampup_batch_size).reaches(-(-tokens // training.seq_length))


def _warmup(value: int, given: RowContext) -> FlagValues:
    assert given.config.optimizer is not None
    return (str(_iterations(given.config.optimizer.lr_warmup_tokens, value, given)),)


def _decay(value: int | None, given: RowContext) -> FlagValues:
    assert given.config.optimizer is not None
    iterations = _iterations(given.config.optimizer.lr_decay_tokens, value, given)
    return None if iterations is None else (str(iterations),)


def _wsd_style(value: str, given: RowContext) -> FlagValues:
    """The checkout's name of the style, `1-sqrt` or `minus_sqrt`."""
    assert given.config.optimizer is not None
    if given.config.optimizer.lr_decay_style != "WSD":
        return None
    if value in ("minus_sqrt", "1-sqrt"):
        return ("1-sqrt" if given.checkout.says("1-sqrt") else "minus_sqrt",)
    return (value,)


def _but_fp32(setting: str, flag: str) -> FlagRow:
    """The type behind the flag; none for fp32, which is Megatron's without a precision-aware optimizer, too."""
    return FlagRow(
        setting, flag, lambda value, _: None if value == "fp32" else (value,), f"--{flag} VALUE; none for fp32"
    )


def _above_zero(setting: str, flag: str) -> FlagRow:
    return FlagRow(setting, flag, lambda value, _: (str(value),) if value else None, f"--{flag} N above 0")


def _split(value: float, given: RowContext) -> FlagValues:
    """Training, validation and test data in per cent; sets that are given by path are not split."""
    assert given.config.data is not None
    if given.config.data.validation:
        return None
    held_out = (Decimal(str(value)) * 100).normalize()
    return (f"{100 - held_out:f},{held_out:f},0",)


FLAG_TABLE: tuple[FlagRow, ...] = (
    # model
    _value("model.num_layers", "num-layers"),
    _value("model.hidden_size", "hidden-size"),
    _value("model.ffn_hidden_size", "ffn-hidden-size"),
    _value("model.num_attention_heads", "num-attention-heads"),
    _always("model", "group-query-attention"),
    _value("model.num_query_groups", "num-query-groups"),
    _always("model", "position-embedding-type", "rope"),
    _value("model.rotary_base", "rotary-base"),
    FlagRow(
        "model.rotary_percent",
        "rotary-percent",
        lambda value, _: None if value == 1 else (str(value),),
        "--rotary-percent VALUE, where it is below 1",
    ),
    FlagRow(
        "model.rope_scaling_factor",
        "use-rope-scaling",
        lambda value, _: None if value is None else (),
        "--use-rope-scaling, where there is a factor",
    ),
    _value("model.rope_scaling_factor", "rope-scaling-factor"),
    _value("model.make_vocab_size_divisible_by", "make-vocab-size-divisible-by"),
    _always("model", "normalization", "RMSNorm"),
    _value("model.norm_epsilon", "norm-epsilon"),
    _always("model", "swiglu"),
    _always("model", "disable-bias-linear"),
    _switch("model.untie_embeddings_and_output_weights", "untie-embeddings-and-output-weights"),
    _value("model.attention_dropout", "attention-dropout"),
    _value("model.hidden_dropout", "hidden-dropout"),
    _value("model.init_method_std", "init-method-std"),
    # training
    _value("training.seq_length", "seq-length"),
    _value("training.seq_length", "max-position-embeddings"),
    _value("training.micro_batch_size", "micro-batch-size"),
    _value("training.global_batch_size", "global-batch-size"),
    FlagRow("training.rampup_batch_size", "rampup-batch-size", _rampup, "--rampup-batch-size START INCREMENT SAMPLES"),
    _value("training.steps", "train-iters"),
    _value("training.stop_after", "exit-interval"),
    _value("training.seed", "seed"),
    FlagRow("training.eval_steps", "eval-iters", _eval_iters, "--eval-iters N, 0 without validation data"),
    FlagRow(
        "training.eval_interval", "eval-interval", _eval_interval, "--eval-interval N, 1000 without validation data"
    ),
    _where("training.precision", "bf16", "bf16"),
    _switch("training.deterministic", "deterministic-mode"),
    FlagRow(
        "training.transformer_impl", "transformer-impl", _transformer_impl, "--transformer-impl VALUE; none for auto"
    ),
    _where("training.apply_rope_fusion", "no-rope-fusion", False),
    _where("training.gradient_accumulation_fusion", "no-gradient-accumulation-fusion", False),
    _switch("training.cross_entropy_loss_fusion", "cross-entropy-loss-fusion"),
    FlagRow(
        "training.cross_entropy_fusion_impl",
        "cross-entropy-fusion-impl",
        lambda value, _: None if value == "native" else (value,),
        "--cross-entropy-fusion-impl te; none for native",
    ),
    _value("training.recompute_granularity", "recompute-granularity"),
    FlagRow("training.recompute_granularity", "recompute-method", _recompute_method, "--recompute-method, with full"),
    FlagRow("training.recompute_num_layers", "recompute-num-layers", _recompute_num_layers, "--recompute-num-layers N"),
    FlagRow(
        "training.recompute_modules",
        "recompute-modules",
        lambda value, _: None if value is None else tuple(value),
        "--recompute-modules A B",
    ),
    FlagRow("training.manual_gc_interval", "manual-gc", lambda value, _: () if value else None, "--manual-gc above 0"),
    FlagRow(
        "training.manual_gc_interval",
        "manual-gc-interval",
        lambda value, _: (str(value),) if value else None,
        "--manual-gc-interval N above 0",
    ),
    _where("training.loss_mean", "calculate-per-token-loss", "token"),
    # optimizer
    _always("optimizer", "optimizer", "adam"),
    _value("optimizer.lr", "lr"),
    _value("optimizer.min_lr", "min-lr"),
    _value("optimizer.lr_decay_style", "lr-decay-style"),
    FlagRow("optimizer.lr_warmup_steps", "lr-warmup-iters", _warmup, "--lr-warmup-iters N"),
    FlagRow("optimizer.lr_decay_steps", "lr-decay-iters", _decay, "--lr-decay-iters N"),
    _value("optimizer.lr_wsd_decay_steps", "lr-wsd-decay-iters"),
    FlagRow("optimizer.lr_wsd_decay_style", "lr-wsd-decay-style", _wsd_style, "--lr-wsd-decay-style VALUE, with WSD"),
    # settings hold over what a checkpoint says, as natively: TRAINING_STEPS may be raised on a resume
    _always("optimizer", "override-opt_param-scheduler"),
    _value("optimizer.weight_decay", "weight-decay"),
    _value("optimizer.adam_beta1", "adam-beta1"),
    _value("optimizer.adam_beta2", "adam-beta2"),
    _value("optimizer.adam_eps", "adam-eps"),
    _value("optimizer.clip_grad", "clip-grad"),
    _switch("optimizer.use_precision_aware_optimizer", "use-precision-aware-optimizer"),
    _but_fp32("optimizer.main_grads_dtype", "main-grads-dtype"),
    _but_fp32("optimizer.main_params_dtype", "main-params-dtype"),
    _but_fp32("optimizer.exp_avg_dtype", "exp-avg-dtype"),
    _but_fp32("optimizer.exp_avg_sq_dtype", "exp-avg-sq-dtype"),
    # checkpoint
    _value("checkpoint.interval", "save-interval"),
    _always("checkpoint", "ckpt-format", "torch_dist"),
    _switch("checkpoint.async_save", "async-save"),
    # parallel
    _value("parallel.tensor_model_parallel_size", "tensor-model-parallel-size"),
    _switch("parallel.sequence_parallel", "sequence-parallel"),
    _value("parallel.pipeline_model_parallel_size", "pipeline-model-parallel-size"),
    _value("parallel.num_layers_per_virtual_pipeline_stage", "num-layers-per-virtual-pipeline-stage"),
    _value("parallel.context_parallel_size", "context-parallel-size"),
    FlagRow(
        "parallel.expert_model_parallel_size",
        "expert-model-parallel-size",
        lambda value, _: None if value == 1 else (str(value),),
        "--expert-model-parallel-size VALUE above 1",
    ),
    _value("parallel.expert_tensor_parallel_size", "expert-tensor-parallel-size"),
    _switch("parallel.use_distributed_optimizer", "use-distributed-optimizer"),
    FlagRow(
        "parallel.num_distributed_optimizer_instances",
        "num-distributed-optimizer-instances",
        lambda value, _: (str(value),) if value > 1 else None,
        "--num-distributed-optimizer-instances N above 1",
    ),
    _switch("parallel.tp_comm_overlap", "tp-comm-overlap"),
    _switch("parallel.overlap_grad_reduce", "overlap-grad-reduce"),
    _switch("parallel.overlap_param_gather", "overlap-param-gather"),
    _switch("parallel.defer_embedding_wgrad_compute", "defer-embedding-wgrad-compute"),
    _above_zero("parallel.wgrad_deferral_limit", "wgrad-deferral-limit"),
    _switch("parallel.overlap_p2p_communication_warmup_flush", "overlap-p2p-communication-warmup-flush"),
    # data; the shards themselves: `command_line`
    _always("data", "tokenizer-type", "HuggingFaceTokenizer"),
    _value("data.tokenizer", "tokenizer-model"),
    FlagRow("data.split", "split", _split, "--split 100,0,0"),
    _value("data.data_cache_dir", "data-cache-path"),
    _switch("data.reset_position_ids", "reset-position-ids"),
    _switch("data.reset_attention_mask", "reset-attention-mask"),
    _switch("data.eod_mask_loss", "eod-mask-loss"),
    _switch("data.mock_data", "mock-data"),
    # tracking
    _switch("tracking.log_params_norm", "log-params-norm"),
    _switch("tracking.log_params_norm_per_param", "log-params-norm-per-param"),
    _switch("tracking.log_num_zeros_in_grad", "log-num-zeros-in-grad"),
    _above_zero("tracking.timing_log_level", "timing-log-level"),
)

FIXED_FLAGS: tuple[tuple[str, ...], ...] = (
    ("log-interval", "1"),
    ("log-progress",),
    ("log-throughput",),
    ("exit-signal-handler",),
)
"""What the chain needs of every run: it counts the lines of iterations, and asks for a save by a signal."""

SETTINGS_IN_OTHER_FLAGS = {
    "optimizer.lr_warmup_tokens": "becomes `--lr-warmup-iters`",
    "optimizer.lr_decay_tokens": "becomes `--lr-decay-iters`",
    "checkpoint.keep_last": "the chain deletes older checkpoints",
    "checkpoint.keep_every": "the chain deletes older checkpoints",
    "checkpoint.mirror": "the chain copies checkpoints",
    "checkpoint.load": "the first attempt begins with it: `--load` and `--ckpt-step`",
    "checkpoint.finetune": "`--finetune` for the attempts that begin with checkpoint.load",
    "checkpoint.no_load_optim": "`--no-load-optim` for the attempts that begin with checkpoint.load",
    "tracking.tensorboard": "becomes `--tensorboard-dir DIR`, in the run directory",
    "data.datasets": "becomes `--data-path PREFIX ...`, with `--data-args-path` above 100 kB",
    "data.mixture": "becomes `--data-path WEIGHT PREFIX ...`, with `--data-args-path` above 100 kB",
    "data.validation": "becomes `--train-data-path` and `--valid-data-path`",
    "data.allow_other_tokenizer": "the check of the shards' tokenizer",
    "data.max_epochs": "the check of how often the data are read",
}
"""Settings that hold, but not by a flag of their own in `FLAG_TABLE`."""

_MUON = {name: field.default for name, field in OptimizerSection.model_fields.items() if name.startswith("muon_")}

SETTINGS_WITHOUT_FLAG: dict[str, tuple[tuple[Any, ...], str]] = {
    "model.transformer": (
        (TransformerSection(),),
        "its fields have flags of their own, under megatron_lm.args, as in {qk-layernorm: true}",
    ),
    "training.threads": ((0,), "set OMP_NUM_THREADS in cluster.environment"),
    "training.on_nan": (("stop",), "Megatron-LM ends with a traceback; --no-check-for-nan-in-loss-and-grad goes on"),
    "training.on_spike": (("ignore",), "Megatron-LM can leave out no update"),
    "training.spike_window": ((128,), "it belongs to on_spike"),
    "training.spike_threshold": ((10.0,), "it belongs to on_spike"),
    "training.max_skips": ((10,), "it belongs to on_spike"),
    "training.max_rollbacks": ((3,), "it belongs to on_spike"),
    "training.elastic": ((False,), "its ranks go on with as many nodes as they began with"),
    "training.hooks": (([],), "its loop calls no hooks"),
    "training.loss": ((None,), "it has a loss of its own"),
    "model.mapping": ((None,), "evaluation.convert makes folders of transformers from its checkpoints"),
    "model.spec": ((None,), "say it in megatron_lm.args: spec: [MODULE, NAME]"),
    "optimizer.name": (("adam",), "say it in megatron_lm.args: optimizer: muon"),
    "optimizer.class": ((None,), "it knows its own optimizers alone"),
    "optimizer.arguments": (({},), "they belong to optimizer.class"),
    "optimizer.groups": (([],), "its groups are --decoupled-lr and --apply-wd-to-qk-layernorm, in megatron_lm.args"),
    **{f"optimizer.{name}": ((value,), "it belongs to optimizer.name") for name, value in _MUON.items()},
    "checkpoint.writer_threads": ((2,), "Megatron-LM writes two files a rank"),
    "checkpoint.fully_parallel_load": ((True,), "give --ckpt-fully-parallel-load in megatron_lm.args, or leave it out"),
    "checkpoint.memory_interval": ((0,), "its ranks are started again from the disk alone"),
    "checkpoint.no_load_data": ((False,), "its position in the data is the iteration"),
    "tracking.log_interval": ((10,), "every iteration is a line, as the chain needs it"),
    "data.order": (("window", "megatron"), "Megatron-LM has an order of its own"),
    "data.document_window": ((None,), "it cuts one stream of tokens, whatever documents are in it"),
    "data.mask_tokens_except": ((None,), "it masks ends of documents alone"),
    "data.shard_cache_dir": ((None,), "it reads local shards"),
    "data.shard_cache_gb": ((20.0,), "it reads local shards"),
    "data.lanes": ((DEFAULT_LANES,), "it reads token shards, and no streams"),
    "data.num_workers": ((1,), "it reads token shards, and no streams"),
    "data.mock_vocabulary_size": ((128_256,), "Megatron-LM makes its own mock data"),
}
"""Settings that Megatron-LM has nothing for: the values that may stand there all the same, and why no other may."""


def flags_from_settings(config: MegatronConfig, checkout: Checkout) -> list[Flag]:
    """The flags that the settings become, without data and folders. Raises ConfigError for what cannot be said."""
    refuse_settings_without_flag(config)
    given = RowContext(config, checkout)
    found = []
    for row in FLAG_TABLE:
        section, _, name = row.setting.partition(".")
        settings = getattr(config, section)
        if settings is None:
            continue
        values = row.how(getattr(settings, name) if name else None, given)
        if values is not None:
            found.append(Flag(name=row.flag, values=values, source=row.setting))
    return found


def refuse_settings_without_flag(config: MegatronConfig) -> None:
    """Raise ConfigError for settings that Megatron-LM has nothing for, where they are not at their defaults."""
    if errors := list(_settings_without_flag(config)):
        raise combined_error(errors, "settings cannot be said to Megatron-LM")


def _shown(value: Any) -> str:
    return repr(value.model_dump() if isinstance(value, Section) else value)


def _settings_without_flag(config: MegatronConfig) -> Iterator[ConfigError]:
    for setting, (possible, why) in SETTINGS_WITHOUT_FLAG.items():
        section, _, name = setting.partition(".")
        settings = getattr(config, section)
        if settings is not None and (value := getattr(settings, name)) not in possible:
            yield ConfigError(
                f"{_shown(value)} has no meaning for trainer megatron-lm: {why}",
                where=setting,
                hint="leave it out, or train with trainer: native",
            )
    training, data = config.training, config.data
    if training is not None and training.loss_mean == "sample":
        yield ConfigError(
            "Megatron-LM takes the mean over a micro-batch or over tokens, never over samples",
            where="training.loss_mean",
            hint="set micro_batch or token",
        )
    if data is None:
        return
    if data.split and data.validation:
        yield ConfigError(
            "Megatron-LM takes validation data by a split or by paths, not both", where="data.split", hint="leave one"
        )
    for name, source in data.sources.items():
        if source.is_stream:
            yield ConfigError(
                f"Megatron-LM reads token shards, and this data set is {source.source}",
                where=f"data.mixture.{name}.source",
                hint="tokenize it (relayrun dumps), or train with trainer: native",
            )
        if source.order not in (None, "window", "megatron", "mock") or (source.options and not data.mock_data):
            yield ConfigError(
                "Megatron-LM has an order of its own", where=f"data.mixture.{name}", hint="leave out order and options"
            )
