"""The arguments in a checkpoint of Megatron-LM as sections of a run config, and as the source of an export.

Arguments without a setting are reported, or refused if they change the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relayrun.config.compose import yaml_file
from relayrun.config.compose.megatron_flags import saved_settings
from relayrun.config.compose.schema import CheckpointSection, ModelSection, OptimizerSection, RunConfig, TrainingSection
from relayrun.config.sections.model import ExpertFields
from relayrun.control.trainers.pickle_records import is_record
from relayrun.errors import InputError
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.checkpoint.megatron_folder import MegatronCheckpoint
from relayrun.train.export.source_and_target import CheckpointSource
from relayrun.train.model.size import pad_to_multiple

MEGATRON_TABLES = yaml_file.read_yaml(Path(__file__).with_name("megatron_arguments.yaml")).values
_STYLES = {"1-sqrt": "minus_sqrt", "minus_sqrt": "minus_sqrt"}


def model_section(checkpoint: MegatronCheckpoint) -> ModelSection:
    """Return the model section. Raises InputError, naming each difference, if no run can train the model."""
    args, where = checkpoint.args, checkpoint.folder
    gated = not args.get("xielu")
    differences = [
        f"{name} is {_text(args.get(name, default))}, not {_text(wanted)}"
        for name, (default, wanted) in {**MEGATRON_TABLES["model"], "swiglu": (False, gated)}.items()
        if not _equal(args.get(name, default), wanted)
    ]
    if differences:
        raise InputError(
            f"relayrun has no such model: {'; '.join(differences)}",
            where=where,
            hint="runs train models with RMSNorm, SwiGLU or xIELU, rotary positions and grouped queries, without "
            "biases; Megatron-LM itself can go on in a chain, see `trainer: megatron-lm`",
        )
    heads_of_values = "num_query_groups" if args.get("group_query_attention") else "num_attention_heads"
    try:
        return ModelSection(
            **saved_settings("model", args)
            | {
                "num_query_groups": args[heads_of_values],
                "rope_scaling_factor": args.get("rope_scaling_factor", 8.0) if args.get("use_rope_scaling") else None,
                "make_vocab_size_divisible_by": args.get("make_vocab_size_divisible_by", 128)
                * args.get("tensor_model_parallel_size", 1),
                "transformer": _transformer(args),
            }
        )
    except (KeyError, TypeError, ValidationError) as error:
        words = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        raise InputError(f"its arguments do not describe a model: {words}", where=where) from None


def _transformer(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `model.transformer`: the norms and sizes of heads, xIELU, and the experts."""
    found: dict[str, Any] = {"qk_layernorm": bool(args.get("qk_layernorm"))}
    if args.get("kv_channels") != args["hidden_size"] // args["num_attention_heads"]:
        found["kv_channels"] = args.get("kv_channels")
    if args.get("xielu"):
        found |= {"activation_func": "xielu", "gated_linear_unit": False}
    if args.get("num_experts"):
        found |= {name: value for name in ExpertFields.model_fields if (value := args.get(name)) is not None}
        found["num_moe_experts"] = args["num_experts"]
    return found


def run_sections(checkpoint: MegatronCheckpoint) -> dict[str, dict[str, Any]]:
    """Return sections of a run config that continues the training. Raises InputError like `model_section`."""
    args = checkpoint.args
    try:
        training = TrainingSection(
            **saved_settings("training", args)
            | {
                "steps": args.get("train_iters") or checkpoint.iteration + 1,
                "precision": "bf16" if checkpoint.precision == "bf16" else "fp32",
            }
        )
        optimizer = OptimizerSection.model_validate(_optimizer(args))
    except (KeyError, TypeError, ValueError) as error:
        words = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        raise InputError(f"its arguments do not describe a training: {words}", where=checkpoint.folder) from None
    data = {name: True for name, value in saved_settings("data", args).items() if value}
    found = {
        "model": model_section(checkpoint).model_dump(mode="json"),
        "training": training.model_dump(mode="json", exclude_unset=True, exclude_none=True),
        "optimizer": optimizer.model_dump(mode="json", exclude_unset=True, exclude_none=True),
        "data": data,
        "parallel": {"use_distributed_optimizer": checkpoint.distributed is not None},
    }
    if isinstance(interval := args.get("save_interval"), int):
        found["checkpoint"] = CheckpointSection(interval=interval).model_dump(mode="json", exclude_unset=True)
    return found


def _optimizer(args: Mapping[str, Any]) -> dict[str, Any]:
    decay = _iterations(args, "lr_decay") or args.get("train_iters")
    warmup = _iterations(args, "lr_warmup") or 0
    if args.get("lr_warmup_fraction") is not None and decay:
        warmup = round(args["lr_warmup_fraction"] * decay)
    found = saved_settings("optimizer", args) | {
        "min_lr": args.get("min_lr") or 0.0,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
    }
    if found["lr_decay_style"] == "WSD":
        style = args.get("lr_wsd_decay_style", "exponential")
        steps = _iterations(args, "lr_wsd_decay")
        found |= {"lr_wsd_decay_steps": steps, "lr_wsd_decay_style": _STYLES.get(style, style)}
    return found


def _iterations(args: Mapping[str, Any], name: str) -> int | None:
    """Return a length of the schedule, which may be given in samples."""
    samples = args.get(f"{name}_samples")
    return args.get(f"{name}_iters") or (samples and -(-samples // args["global_batch_size"]))


def describe_not_taken(checkpoint: MegatronCheckpoint, *, optimizer: str | None) -> list[str]:
    """Return the parts that a run does not take over, in words. `optimizer`: why not its moments; None: they are."""
    args = checkpoint.args
    words = [] if optimizer is None else [f"the optimizer's moments: {optimizer}"]
    words.append("states of random generators: dropout masks begin anew")
    if "rerun_state_machine" in checkpoint.common:
        words.append("the state of the rerun machine")
    if args.get("data_path") or args.get("train_data_path") or args.get("data_args_path"):
        words.append(
            f"the data: only that {checkpoint.consumed_samples} samples were read; no order of relayrun is that of "
            "Megatron-LM, so set checkpoint.no_load_data: true, which begins the data anew"
        )
    words += [
        f"--{name.replace('_', '-')} {_text(args[name])}: there is no such setting"
        for name, neutral in MEGATRON_TABLES["neutral"].items()
        if name in args and not _equal(args[name], neutral) and args[name] not in (None, False)
    ]
    return words


def _equal(found: Any, wanted: Any) -> bool:
    if is_record(found):  # a member of an enumeration
        return str(wanted) == str(found).rpartition(".")[2]
    if wanted is None or wanted is False:
        return found is None or found is False
    return bool(found == wanted)


def _text(value: Any) -> str:
    return str(value) if is_record(value) else repr(value)


def megatron_source(checkpoint: MegatronCheckpoint, tokenizer: str | None) -> CheckpointSource:
    """Return the source of an export. `tokenizer`: None for the tokenizer in the arguments, if it can be opened. Raises
    InputError without a tokenizer, if it has more entries than the embeddings, and like `model_section`."""
    name = tokenizer or _tokenizer_of_arguments(checkpoint)
    found = load_tokenizer(TokenizeOptions(tokenizer=name, append_eod="auto"))
    sections = run_sections(checkpoint)
    model, rows = sections["model"], checkpoint.args.get("padded_vocab_size")
    if isinstance(rows, int) and pad_to_multiple(found.size, model["make_vocab_size_divisible_by"]) != rows:
        if found.size > rows:
            raise InputError(
                f"the tokenizer {name} has {found.size} entries, the embeddings {rows}",
                where=checkpoint.folder,
                hint="give the tokenizer that the model was trained with",
            )
        model["make_vocab_size_divisible_by"] = rows
    config = RunConfig.model_validate(
        sections
        | {
            "project": "megatron-lm",
            "name": "checkpoint",
            "data": {"tokenizer": name, "datasets": [str(checkpoint.folder)]},
            "checkpoint": {"interval": 1},
            "job": {"time": "1"},
            "cluster": {"name": "none", "scheduler": "local"},
        }
    )
    manifest = Manifest(
        datasets={},
        validation={},
        vocabulary_size=found.size,
        eod=found.eos_id,
        tokenizer=name,
        tokenizer_fingerprint=found.fingerprint,
    )
    return CheckpointSource(
        run=None,
        iteration=checkpoint.iteration,
        folder=checkpoint.folder,
        config=config,
        manifest=manifest,
        context=checkpoint.args.get("max_position_embeddings") or 0,
    )


def _tokenizer_of_arguments(checkpoint: MegatronCheckpoint) -> str:
    kind, name = checkpoint.args.get("tokenizer_type"), checkpoint.args.get("tokenizer_model")
    if kind == "HuggingFaceTokenizer" and isinstance(name, str) and Path(name).exists():
        return name
    raise InputError(
        f"its tokenizer ({kind}, {name}) cannot be opened here",
        where=checkpoint.folder,
        hint="give --tokenizer: a folder or file of Hugging Face, or a name on its hub",
    )
