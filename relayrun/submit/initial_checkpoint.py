"""The first checkpoint of a new run: `checkpoint.load`, found and judged before anything is submitted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import CommandConfig, CommonConfig, MegatronConfig, ModelSection, RunConfig
from relayrun.control.rundir.checkpoint_records import BEGINNING, ResumePoint, is_checkpoint_of, resume_point
from relayrun.control.rundir.find_runs import find_run, split_run_and_iteration
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import megatron_lm_log
from relayrun.control.trainers.torch_files import vet_checkpoint
from relayrun.errors import ConfigError, InputError, RelayrunError
from relayrun.submit.dry_load import common_values, refuse_other_shapes, refuse_other_values
from relayrun.submit.wrap import newest_in_folder
from relayrun.tokens.shards.manifest import Manifest
from relayrun.train.checkpoint import megatron_folder
from relayrun.train.checkpoint.megatron_folder import MegatronCheckpoint
from relayrun.train.export import megatron_settings
from relayrun.train.export.source_and_target import committed_config, find_checkpoint
from relayrun.train.model.size import pad_to_multiple

_FOLDER = re.compile(r"iter_(\d+)")
FREE_FIELDS = frozenset({"hidden_dropout", "attention_dropout", "init_method_std", "mapping", "transformer"})
"""Settings of a model that its weights do not depend on, or (`transformer`) that are compared one by one."""
SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "untie_embeddings_and_output_weights",
)
"""Settings that the shapes of weights depend on. A run may change others on its way, such as rotary_base."""
FREE_FIELDS_OF_PADDING = FREE_FIELDS | {"make_vocab_size_divisible_by"}
"""`FREE_FIELDS` if the padded vocabulary itself is compared: Megatron-LM's padding depends on its layout."""


def find_initial_checkpoint(
    config: CommonConfig, run: Run, manifest: Manifest | None, tell: Callable[[str], None] = lambda words: None
) -> ResumePoint:
    """The checkpoint and the iteration to begin with; BEGINNING if the config names none.

    `manifest`: None if the data could not be read. `tell` is called with the parts that are left behind.
    Raises ConfigError or InputError if it is not there, is torn, or is of another model.
    """
    if isinstance(config, RunConfig):
        return _find_native(config, run, manifest, tell)
    if isinstance(config, CommandConfig):
        return newest_in_folder(config.command, run)
    return _find_megatron_lm(config, run) if isinstance(config, MegatronConfig) else BEGINNING


def _find_native(config: RunConfig, run: Run, manifest: Manifest | None, tell: Callable[[str], None]) -> ResumePoint:
    settings = config.checkpoint
    if is_checkpoint_of(run, newest := resume_point(run)):
        _refuse_other_weights(run, newest.iteration, config)
        _refuse_other_values(newest, config, manifest, own=True)
        return BEGINNING
    if settings.load is None:
        return BEGINNING
    name, folder, wanted = _parse_load(settings.load, run)
    if (megatron := megatron_folder.find_megatron_checkpoint(folder, wanted)) is not None:
        found = _find_megatron_for_native(megatron, config, manifest, tell)
    elif (folder / "metadata.json").is_file():
        found = _find_in_folder(folder, config, wanted)
        refuse_other_shapes(folder, config, manifest)
    else:
        found = _find_in_run(name, folder, config, wanted)
    if megatron is None:
        _refuse_other_values(found, config, manifest, own=False)
    iteration = 0 if settings.finetune else found.iteration
    if iteration >= config.training.end_iteration:
        name = "steps" if config.training.stop_after is None else "stop_after"
        words = f"{found.path} stands at iteration {iteration}, and training.{name} is {config.training.end_iteration}"
        hint = f"raise training.{name}, or set checkpoint.finetune=true to count from 0"
        raise ConfigError(words, where="checkpoint.load", hint=hint)
    return ResumePoint(iteration=iteration, path=found.path)


def _refuse_other_values(found: ResumePoint, config: RunConfig, manifest: Manifest | None, *, own: bool) -> None:
    path = Path(found.path or "")
    if (values := common_values(path)) is not None:
        refuse_other_values(values, config, manifest, path, own=own)


def _parse_load(load: str, run: Run) -> tuple[str, Path, int | None]:
    """The run or folder in `checkpoint.load` (relative paths begin at the project), and the iteration."""
    name, iteration = split_run_and_iteration(load)
    folder = Path(os.path.expanduser(name))
    return name, folder if folder.is_absolute() else places.project_folder(run.path) / folder, iteration


def _find_megatron_lm(config: MegatronConfig, run: Run) -> ResumePoint:
    """A checkpoint of Megatron-LM: of another run here, of a folder with its tracker, or a folder by itself."""
    settings = config.checkpoint
    if settings is None or settings.load is None or is_checkpoint_of(run, resume_point(run)):
        return BEGINNING
    name, folder, wanted = _parse_load(settings.load, run)
    if not folder.is_dir() or (folder / "plan.json").is_file():
        folder = find_run(name).checkpoints
    single = _FOLDER.fullmatch(folder.name)
    if single is not None and wanted is None:
        folder, wanted = folder.parent, int(single[1])
    found = {
        iteration: path
        for iteration, path in megatron_lm_log.all_checkpoints(folder)
        if megatron_lm_log.checkpoint_fault(path) is None
    }
    newest = megatron_lm_log.tracked_iteration(folder) if wanted is None else wanted
    other = Run(folder.parent)
    if other.plan.is_file() and (trainer := Plan.load(other).trainer) != "megatron-lm":  # they only look like its own
        words = f"{other.path} is a run of trainer {trainer}, whose checkpoints Megatron-LM cannot load"
        hint = "export it to a checkpoint of Megatron-LM first (`relayrun help export`)"
        raise ConfigError(words, where="checkpoint.load", hint=hint)
    if config.training is not None and newest is not None and not settings.finetune:
        steps = config.training.steps
        if newest >= steps:
            words = f"{folder} stands at iteration {newest}, and training.steps is {steps}"
            hint = "raise training.steps, or set checkpoint.finetune=true to count from 0"
            raise ConfigError(words, where="checkpoint.load", hint=hint)
    if newest is None or newest not in found:
        raise InputError(
            "there is no checkpoint of Megatron-LM here"
            if newest is None
            else f"there is no whole checkpoint of iteration {newest} here",
            where=f"checkpoint.load: {folder}",
            hint=f"whole ones: {', '.join(map(str, sorted(found))) or 'none'}",
        )
    vet_checkpoint(found[newest], checkout=Path(config.megatron_lm.dir).expanduser())
    return ResumePoint(iteration=0 if settings.finetune else newest, path=str(found[newest]))


def _find_in_folder(folder: Path, config: RunConfig, wanted: int | None) -> ResumePoint:
    """A checkpoint by itself: of a run, or of an import, which lays the model's settings beside it."""
    if wanted is not None:
        words = f"{folder} is one checkpoint, of which no iteration can be chosen"
        raise ConfigError(words, where="checkpoint.load", hint="leave :ITERATION out, or name the run")
    beside = folder / "model.yaml"
    if beside.is_file():
        model, iteration = _read_model(beside)
        refuse_other_model(model, config, folder)
        if iteration is None and not config.checkpoint.finetune:
            raise ConfigError(
                f"{folder} holds weights alone", where="checkpoint.load", hint="set checkpoint.finetune=true"
            )
        return ResumePoint(iteration=iteration or 0, path=str(folder))
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        words = f"{folder} does not say its iteration"
        raise ConfigError(words, where="checkpoint.load", hint="a checkpoint's folder is called iter_0000100")
    return ResumePoint(iteration=int(match[1]), path=str(folder))


def _read_model(path: Path) -> tuple[ModelSection, int | None]:
    """The model of an import, and its iteration if it holds more than weights."""
    try:
        values = yaml_file.read_yaml(path).values
        iteration = values.get("iteration")
        return ModelSection.model_validate(values.get("model")), iteration if isinstance(iteration, int) else None
    except ValidationError as error:
        raise InputError(
            f"this is not the model section of an import: {error.errors()[0]['msg']}", where=path
        ) from None


def _find_in_run(name: str, folder: Path, config: RunConfig, wanted: int | None) -> ResumePoint:
    try:
        found = find_checkpoint(find_run(str(folder) if (folder / "plan.json").is_file() else name), wanted)
    except RelayrunError as error:
        words = f"checkpoint.load={config.checkpoint.load}: {error.message}"
        words += "" if folder.exists() or Path(name).is_absolute() else f", and no folder {folder}"
        near = [f"did you mean {path.parent}?" for path in sorted(folder.glob("iter_*/metadata.json"))]
        raise InputError(words, where=error.where, hint=near[-1] if near else error.hint) from None
    refuse_other_model(found.config.model, config, found.folder)
    return ResumePoint(iteration=found.iteration, path=str(found.folder))


def _find_megatron_for_native(
    found: MegatronCheckpoint, config: RunConfig, manifest: Manifest | None, tell: Callable[[str], None]
) -> ResumePoint:
    """A checkpoint of Megatron-LM for relayrun's own trainer."""
    settings, there = config.checkpoint, found.args.get("padded_vocab_size")
    differences = []
    if manifest is not None and there:
        vocabulary = pad_to_multiple(manifest.vocabulary_size, config.model.make_vocab_size_divisible_by)
        if there != vocabulary:
            differences.append(f"the padded vocabulary is {there} there and {vocabulary} here")
    model = megatron_settings.model_section(found)
    refuse_other_model(model, config, found.folder, free=FREE_FIELDS_OF_PADDING, differences=differences)
    with_optimizer = not (settings.finetune or settings.no_load_optim)
    fault = found.optimizer_fault()
    if with_optimizer and fault is not None:
        hint = "set checkpoint.no_load_optim=true to begin with its weights alone"
        raise ConfigError(f"{found.folder}: {fault}", where="checkpoint.load", hint=hint)
    here = {
        "parallel.use_distributed_optimizer": config.parallel.use_distributed_optimizer,
        "training.precision": config.training.resolved_precision,
    }
    for name, value in found.fixed_settings().items():
        if with_optimizer and here[name] != value:
            raise ConfigError(
                f"{found.folder} was saved with {name} {value}, and it is {here[name]} here",
                where="checkpoint.load",
                hint="set it as it was; `relayrun import megatron` writes the other kind, "
                "checkpoint.no_load_optim=true begins with the weights alone",
            )
    left = None if with_optimizer else "checkpoint.finetune or no_load_optim is set"
    for words in megatron_settings.describe_not_taken(found, optimizer=left):
        tell(f"{found.folder}: not taken: {words}")
    return ResumePoint(iteration=found.iteration, path=str(found.folder))


def refuse_other_model(
    other: ModelSection,
    config: RunConfig,
    folder: Path,
    *,
    free: frozenset[str] = FREE_FIELDS,
    differences: Sequence[str] = (),
    hint: str = "take the model section of the run that made it",
) -> None:
    """Raise ConfigError, naming all differences, unless weights of the one model are some of the other."""
    names = [name for name in ModelSection.model_fields if name not in free]
    if differences := [*_differences(other, config.model, names), *differences]:
        words = f"{folder} is of another model: {'; '.join(differences)}"
        raise ConfigError(words, where="checkpoint.load", hint=hint)


def _refuse_other_weights(run: Run, iteration: int, config: RunConfig) -> None:
    """Raise ConfigError if the run's checkpoint has not the weights of this model, or computes with them otherwise."""
    trained = committed_config(run, iteration) if run.revisions() else None
    if not isinstance(trained, RunConfig):
        return
    if differences := _differences(trained.model, config.model, SHAPE_FIELDS):
        words = f"this run's checkpoint of iteration {iteration} is of another model: {'; '.join(differences)}"
        hint = "put the model section back as it was, or give the run another name"
        raise ConfigError(words, where="model", hint=hint)


def _differences(there: ModelSection, here: ModelSection, names: Iterable[str]) -> list[str]:
    """Settings of these names that differ, and fields of `model.transformer` that affect weights or their use."""
    layers, own_layers = there.transformer, here.transformer
    pairs = {name: (getattr(there, name), getattr(here, name)) for name in names}
    for name in sorted({*layers.of_the_weights, *own_layers.of_the_weights}):
        pairs[f"transformer.{name}"] = getattr(layers, name), getattr(own_layers, name)
    return [f"{name} is {a} there and {b} here" for name, (a, b) in pairs.items() if a != b]
