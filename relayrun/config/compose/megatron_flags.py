"""Settings and arguments of Megatron-LM in one table, for both directions, and the settings without a flag.

Every setting of the sections model, training, optimizer, checkpoint, parallel, data and tracking stands here once, or
in `relayrun help megatron-flags` alone, which a test holds. A setting becomes a flag also if it has Megatron's own
default: defaults differ between checkouts. Exports to checkpoints of Megatron-LM and imports from them copy the rows
that have `saved`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import CommonConfig, MegatronConfig
from relayrun.config.sections.base import Section
from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.errors import ConfigError, combined_error

FlagValues = tuple[str, ...] | None
"""The words behind a flag; empty for a flag alone, None for no flag."""
NOT_SAVED: Any = object()
REQUIRED: Any = object()


@dataclass(frozen=True)
class SettingContext:
    """Values that a row may read besides its own setting."""

    config: MegatronConfig
    says: Callable[[str], bool]
    """True if a text stands in the arguments of the checkout."""


@dataclass(frozen=True)
class FlagRow:
    """A setting and a flag that it becomes."""

    setting: str
    """`section.name`; `section` alone for the flags of every run with that section."""
    flag: str
    how: Callable[[Any, SettingContext], FlagValues]
    words: str
    """Form of the flag in `relayrun help megatron-flags`."""
    saved: Any = NOT_SAVED
    """Megatron's default for a checkpoint without this argument, or REQUIRED; NOT_SAVED: no export or import copies the
    setting."""

    @property
    def argument(self) -> str:
        """The flag's name among the arguments in a checkpoint."""
        return self.flag.replace("-", "_")

    @property
    def section(self) -> str:
        return self.setting.partition(".")[0]

    @property
    def name(self) -> str:
        return self.setting.partition(".")[2]


def _row(
    setting: str, how: Callable[[Any, SettingContext], FlagValues], words: str, flag: str = "", saved: Any = NOT_SAVED
) -> FlagRow:
    """A row whose flag has the setting's name, unless `flag` is given. `words` are those behind the flag."""
    flag = flag or setting.partition(".")[2].replace("_", "-")
    return FlagRow(setting, flag, how, f"--{flag}{words}", saved)


def _value(setting: str, flag: str = "", saved: Any = NOT_SAVED) -> FlagRow:
    """The setting's value behind the flag; no flag for null."""
    return _unless(setting, None, " VALUE", flag, saved)


def _values(section: str, *names: str, saved: Any = NOT_SAVED) -> list[FlagRow]:
    return [_value(f"{section}.{name}", saved=saved) for name in names]


def _unless(setting: str, without: object, words: str, flag: str = "", saved: Any = NOT_SAVED) -> FlagRow:
    """The setting's value behind the flag; no flag for the value `without`."""
    return _row(setting, lambda value, _: None if value == without else (str(value),), words, flag, saved)


def _alone(value: object, _given: SettingContext) -> FlagValues:
    """The flag alone if the setting is true, or a number above 0."""
    return () if value else None


def _switches(section: str, *names: str, saved: Any = NOT_SAVED) -> list[FlagRow]:
    return [_row(f"{section}.{name}", _alone, " where true", saved=saved) for name in names]


def _if(setting: str, is_value: object, flag: str) -> FlagRow:
    return _row(setting, lambda value, _: () if value == is_value else None, f" where {is_value}", flag)


def _always(section: str, flag: str, *values: str) -> FlagRow:
    return _row(section, lambda _value, _given: values, "".join(f" {value}" for value in values), flag)


def _rampup(value: Any, _given: SettingContext) -> FlagValues:
    if value is None:
        return None
    if len(value) == 3 and all(isinstance(each, int) for each in value):
        return tuple(map(str, value))
    words = "Megatron-LM knows a ramp of the form [start, increment, samples] only"
    hint = "write it in that form, or train with trainer: native"
    raise ConfigError(words, where="training.rampup_batch_size", hint=hint)


def _evaluates(given: SettingContext) -> bool:
    """Return True with validation data; without a section `data`, if the config asks for evaluations."""
    data, training = given.config.data, given.config.training
    if data is None:
        return training is not None and training.eval_interval > 0
    return bool(data.split or data.validation)


def _eval_iters(value: int, given: SettingContext) -> FlagValues:
    return (str(value if _evaluates(given) else 0),)


def _eval_interval(value: int, given: SettingContext) -> FlagValues:
    """0 is after the last iteration only, at which Megatron-LM evaluates anyway. Without validation data it is the
    former default: NVIDIA's code of core 0.16 has no default, and divides by it."""
    assert given.config.training is not None
    return (str(value or given.config.training.steps),) if _evaluates(given) else ("1000",)


def _recompute_method(value: Any, given: SettingContext) -> FlagValues:
    assert given.config.training is not None
    return ("uniform" if given.config.training.recompute_num_layers is None else "block",) if value == "full" else None


def _recompute_num_layers(value: int | None, given: SettingContext) -> FlagValues:
    """Null is every layer: each a unit of its own."""
    assert given.config.training is not None
    return (str(value or 1),) if given.config.training.recompute_granularity == "full" else None


def _iterations(tokens: int | None, steps: int | None, given: SettingContext) -> FlagValues:
    """Iterations that are given as such, or as tokens: the last of them ends with the iteration that trains on it."""
    if tokens is not None:
        training = given.config.training
        if training is None:
            words = "tokens become iterations by the batch size and the sequence length of the section training"
            raise ConfigError(words, where="optimizer", hint="give the section training, or iterations")
        sizes = GlobalBatchSizes(training.global_batch_size, training.rampup_batch_size)
        steps = sizes.reaches(-(-tokens // training.seq_length))
    return None if steps is None else (str(steps),)


def _warmup(value: int, given: SettingContext) -> FlagValues:
    assert given.config.optimizer is not None
    return _iterations(given.config.optimizer.lr_warmup_tokens, value, given)


def _decay(value: int | None, given: SettingContext) -> FlagValues:
    assert given.config.optimizer is not None
    return _iterations(given.config.optimizer.lr_decay_tokens, value, given)


def _wsd_style(value: str, given: SettingContext) -> FlagValues:
    """The checkout's name of the style, `1-sqrt` or `minus_sqrt`."""
    assert given.config.optimizer is not None
    if given.config.optimizer.lr_decay_style != "WSD":
        return None
    if value in ("minus_sqrt", "1-sqrt"):
        return ("1-sqrt" if given.says("1-sqrt") else "minus_sqrt",)
    return (value,)


def _split(value: float, given: SettingContext) -> FlagValues:
    """Training, validation and test data in per cent; sets that are given by path are not split."""
    assert given.config.data is not None
    if given.config.data.validation:
        return None
    held_out = (Decimal(str(value)) * 100).normalize()
    return (f"{100 - held_out:f},{held_out:f},0",)


FLAG_TABLE: tuple[FlagRow, ...] = (
    *_values("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", saved=REQUIRED),
    _always("model", "group-query-attention"),
    _value("model.num_query_groups", saved=None),
    _always("model", "position-embedding-type", "rope"),
    _value("model.rotary_base", saved=10_000),
    _unless("model.rotary_percent", 1, " VALUE, where it is below 1"),
    _row("model.rope_scaling_factor", _alone, ", where there is a factor", flag="use-rope-scaling"),
    _value("model.rope_scaling_factor"),
    _value("model.make_vocab_size_divisible_by", saved=None),
    _always("model", "normalization", "RMSNorm"),
    _value("model.norm_epsilon", saved=1e-5),
    _always("model", "swiglu"),
    _always("model", "disable-bias-linear"),
    *_switches("model", "untie_embeddings_and_output_weights", saved=False),
    *_values("model", "attention_dropout", "hidden_dropout", saved=0.1),
    _value("model.init_method_std", saved=0.02),
    _value("training.seq_length", saved=REQUIRED),
    _value("training.seq_length", "max-position-embeddings"),
    *_values("training", "micro_batch_size", "global_batch_size", saved=REQUIRED),
    _row("training.rampup_batch_size", _rampup, " START INCREMENT SAMPLES", saved=None),
    _value("training.steps", "train-iters", saved=None),
    _value("training.stop_after", "exit-interval"),
    _value("training.seed", saved=1234),
    _row("training.eval_steps", _eval_iters, " N, 0 without validation data", flag="eval-iters"),
    _row("training.eval_interval", _eval_interval, " N, 1000 without validation data"),
    _if("training.precision", "bf16", flag="bf16"),
    _row("training.deterministic", _alone, " where true", flag="deterministic-mode"),
    _unless("training.transformer_impl", "auto", " VALUE; none for auto"),
    _if("training.apply_rope_fusion", False, flag="no-rope-fusion"),
    _if("training.gradient_accumulation_fusion", False, flag="no-gradient-accumulation-fusion"),
    *_switches("training", "cross_entropy_loss_fusion"),
    _unless("training.cross_entropy_fusion_impl", "native", " te; none for native"),
    _value("training.recompute_granularity"),
    _row("training.recompute_granularity", _recompute_method, ", with full", flag="recompute-method"),
    _row("training.recompute_num_layers", _recompute_num_layers, " N"),
    _row("training.recompute_modules", lambda value, _: None if value is None else tuple(value), " A B"),
    _row("training.manual_gc_interval", _alone, " above 0", flag="manual-gc"),
    _unless("training.manual_gc_interval", 0, " N above 0"),
    _if("training.loss_mean", "token", flag="calculate-per-token-loss"),
    _always("optimizer", "optimizer", "adam"),
    _value("optimizer.lr", saved=REQUIRED),
    _value("optimizer.min_lr", saved=0.0),
    _value("optimizer.lr_decay_style", saved="linear"),
    _row("optimizer.lr_warmup_steps", _warmup, " N", flag="lr-warmup-iters"),
    _row("optimizer.lr_decay_steps", _decay, " N", flag="lr-decay-iters"),
    _value("optimizer.lr_wsd_decay_steps", "lr-wsd-decay-iters"),
    _row("optimizer.lr_wsd_decay_style", _wsd_style, " VALUE, with WSD"),
    # settings hold over what a checkpoint says, as natively: TRAINING_STEPS may be raised on a resume
    _always("optimizer", "override-opt_param-scheduler"),
    _value("optimizer.weight_decay", saved=0.01),
    _value("optimizer.adam_beta1", saved=0.9),
    _value("optimizer.adam_beta2", saved=0.999),
    _value("optimizer.adam_eps", saved=1e-8),
    _value("optimizer.clip_grad", saved=1.0),
    *_switches("optimizer", "use_precision_aware_optimizer"),
    # fp32 is Megatron's type without a precision-aware optimizer, too
    _unless("optimizer.main_grads_dtype", "fp32", " VALUE; none for fp32"),
    _unless("optimizer.main_params_dtype", "fp32", " VALUE; none for fp32"),
    _unless("optimizer.exp_avg_dtype", "fp32", " VALUE; none for fp32"),
    _unless("optimizer.exp_avg_sq_dtype", "fp32", " VALUE; none for fp32"),
    _value("checkpoint.interval", "save-interval", saved=None),
    _always("checkpoint", "ckpt-format", "torch_dist"),
    *_switches("checkpoint", "async_save"),
    _value("parallel.tensor_model_parallel_size"),
    *_switches("parallel", "sequence_parallel", saved=False),
    *_values("parallel", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    _value("parallel.context_parallel_size"),
    _unless("parallel.expert_model_parallel_size", 1, " VALUE above 1"),
    _value("parallel.expert_tensor_parallel_size"),
    *_switches("parallel", "use_distributed_optimizer"),
    _unless("parallel.num_distributed_optimizer_instances", 1, " N above 1"),
    *_switches("parallel", "tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather"),
    *_switches("parallel", "defer_embedding_wgrad_compute"),
    _unless("parallel.wgrad_deferral_limit", 0, " N above 0"),
    *_switches("parallel", "overlap_p2p_communication_warmup_flush"),
    # the shards of `data` themselves: `relayrun.submit.megatron_lm.command_line`
    _always("data", "tokenizer-type", "HuggingFaceTokenizer"),
    _value("data.tokenizer", "tokenizer-model"),
    _row("data.split", _split, " 100,0,0"),
    _value("data.data_cache_dir", "data-cache-path"),
    *_switches("data", "reset_position_ids", "reset_attention_mask", "eod_mask_loss", saved=False),
    *_switches("data", "mock_data"),
    *_switches("tracking", "log_params_norm", "log_params_norm_per_param", "log_num_zeros_in_grad"),
    _unless("tracking.timing_log_level", 0, " N above 0"),
)

FLAG_OF_SETTING = {row.setting: row.flag for row in reversed(FLAG_TABLE)}
"""The flag of each setting, the first if there are several."""


def megatron_checkpoint_args(config: CommonConfig) -> dict[str, Any]:
    """Return the arguments that an export to a checkpoint copies from settings."""
    rows = (row for row in FLAG_TABLE if row.saved is not NOT_SAVED)
    return {row.argument: attrgetter(row.setting)(config) for row in rows}


def saved_settings(section: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a section that an import copies from a checkpoint's arguments. Raises KeyError for a
    required argument that is missing."""
    return {
        row.name: arguments[row.argument] if row.saved is REQUIRED else arguments.get(row.argument, row.saved)
        for row in FLAG_TABLE
        if row.section == section and row.saved is not NOT_SAVED
    }


FIXED_FLAGS = (("log-interval", "1"), ("log-progress",), ("log-throughput",), ("exit-signal-handler",))
"""Flags of every run: the chain counts the lines of iterations, and asks for a save by a signal."""

SETTINGS_WITHOUT_FLAG: dict[str, str] = {
    f"{section}.{name}": why
    for section, settings in yaml_file.read_yaml(Path(__file__).with_name("settings_without_flag.yaml")).values.items()
    for name, why in settings.items()
}
"""Settings without a counterpart in Megatron-LM, which must have their defaults, and the reason."""


def refuse_settings_without_flag(config: MegatronConfig) -> None:
    """Raise ConfigError for settings off their defaults that have no counterpart in Megatron-LM."""
    if errors := list(_settings_without_flag(config)):
        raise combined_error(errors, "settings cannot be said to Megatron-LM")


def _settings_without_flag(config: MegatronConfig) -> Iterator[ConfigError]:
    for setting, why in SETTINGS_WITHOUT_FLAG.items():
        section, _, name = setting.partition(".")
        settings = getattr(config, section)
        if settings is None:
            continue
        value, default = (
            getattr(settings, name),
            type(settings).model_fields[name].get_default(call_default_factory=True),
        )
        if value != default:
            shown = value.model_dump() if isinstance(value, Section) else value
            yield ConfigError(
                f"{shown!r} has no meaning for trainer megatron-lm: {why}",
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
        if source.order not in (None, "window", "mock") or (source.options and not data.mock_data):
            yield ConfigError(
                "Megatron-LM has an order of its own", where=f"data.mixture.{name}", hint="leave out order and options"
            )
