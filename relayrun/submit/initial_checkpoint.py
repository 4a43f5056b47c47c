"""What a new run begins with: `checkpoint.load`, found and judged before anything is submitted."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import ValidationError

from relayrun import places
from relayrun.config import yamlfile
from relayrun.config.schema import CommonConfig, MegatronConfig, Model, RunConfig
from relayrun.errors import ConfigError, InputError, RelayrunError
from relayrun.export.checkpoint_source import find_checkpoint
from relayrun.rundir.find import find_run
from relayrun.rundir.lineage import BEGINNING, Durable, durable, is_own
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.trainers.megatron_lm import checkpoints

_ITERATION = re.compile(r"(?P<name>.+):(?P<iteration>\d+)")
_FOLDER = re.compile(r"iter_(\d+)")
FREE = frozenset({"hidden_dropout", "attention_dropout", "init_method_std"})
"""Settings of a model that its weights do not depend on."""


def find_initial_checkpoint(config: CommonConfig, run: Run) -> Durable:
    """The checkpoint and the iteration to begin with; BEGINNING where the config names none.

    Raises ConfigError or InputError if it is not there, is torn, or is of another model.
    """
    if isinstance(config, RunConfig):
        return _native(config, run)
    return _megatron_lm(config, run) if isinstance(config, MegatronConfig) else BEGINNING


def _native(config: RunConfig, run: Run) -> Durable:
    settings = config.checkpoint
    if settings.load is None or is_own(run, durable(run)):
        return BEGINNING
    match = _ITERATION.fullmatch(settings.load)
    name, wanted = (match["name"], int(match["iteration"])) if match else (settings.load, None)
    folder = Path(os.path.expanduser(name))
    folder = folder if folder.is_absolute() else places.project(run.path) / folder
    single = (folder / "metadata.json").is_file()
    found = _folder(folder, config, wanted) if single else _run(name, config, wanted)
    iteration = 0 if settings.finetune else found.iteration
    if iteration >= config.training.end_iteration:
        name = "steps" if config.training.stop_after is None else "stop_after"
        raise ConfigError(
            f"{found.path} stands at iteration {iteration}, and training.{name} is {config.training.end_iteration}",
            where="checkpoint.load",
            hint=f"raise training.{name}, or set checkpoint.finetune=true to count from 0",
        )
    return Durable(iteration=iteration, path=found.path)


def _megatron_lm(config: MegatronConfig, run: Run) -> Durable:
    """A checkpoint of Megatron-LM: of another run here, of a folder with its tracker, or a folder by itself."""
    settings = config.checkpoint
    if settings is None or settings.load is None or is_own(run, durable(run)):
        return BEGINNING
    match = _ITERATION.fullmatch(settings.load)
    name, wanted = (match["name"], int(match["iteration"])) if match else (settings.load, None)
    folder = Path(os.path.expanduser(name))
    folder = folder if folder.is_absolute() else places.project(run.path) / folder
    if not folder.is_dir() or (folder / "plan.json").is_file():
        folder = find_run(name).checkpoints
    single = _FOLDER.fullmatch(folder.name)
    if single is not None and wanted is None:
        folder, wanted = folder.parent, int(single[1])
    found = {iteration: path for iteration, path in checkpoints.every(folder) if checkpoints.fault(path) is None}
    newest = checkpoints.tracked(folder) if wanted is None else wanted
    other = Run(folder.parent)
    if other.plan.is_file() and (trainer := Plan.load(other).trainer) != "megatron-lm":  # they only look like its own
        raise ConfigError(
            f"{other.path} is a run of trainer {trainer}, whose checkpoints Megatron-LM cannot load",
            where="checkpoint.load",
            hint="export it to a checkpoint of Megatron-LM first (docs/export.md)",
        )
    if config.training is not None and newest is not None and not settings.finetune:
        steps = config.training.steps
        if newest >= steps:
            raise ConfigError(
                f"{folder} stands at iteration {newest}, and training.steps is {steps}",
                where="checkpoint.load",
                hint="raise training.steps, or set checkpoint.finetune=true to count from 0",
            )
    if newest is None or newest not in found:
        raise InputError(
            "there is no checkpoint of Megatron-LM here"
            if newest is None
            else f"there is no whole checkpoint of iteration {newest} here",
            where=f"checkpoint.load: {folder}",
            hint=f"whole ones: {', '.join(map(str, sorted(found))) or 'none'}",
        )
    return Durable(iteration=0 if settings.finetune else newest, path=str(found[newest]))


def _folder(folder: Path, config: RunConfig, wanted: int | None) -> Durable:
    """A checkpoint by itself: of a run, or of an import, which lays the model's settings beside it."""
    if wanted is not None:
        raise ConfigError(
            f"{folder} is one checkpoint, of which no iteration can be chosen",
            where="checkpoint.load",
            hint="leave :ITERATION out, or name the run",
        )
    beside = folder / "model.yaml"
    if beside.is_file():
        _same_model(_model(beside), config, folder)
        if not config.checkpoint.finetune:
            raise ConfigError(
                f"{folder} holds weights alone", where="checkpoint.load", hint="set checkpoint.finetune=true"
            )
        return Durable(iteration=0, path=str(folder))
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise ConfigError(
            f"{folder} does not say its iteration",
            where="checkpoint.load",
            hint="a checkpoint's folder is called iter_0000100",
        )
    return Durable(iteration=int(match[1]), path=str(folder))


def _model(path: Path) -> Model:
    try:
        return Model.model_validate(yamlfile.read(path).values.get("model"))
    except ValidationError as error:
        raise InputError(
            f"this is not the model section of an import: {error.errors()[0]['msg']}", where=path
        ) from None


def _run(name: str, config: RunConfig, wanted: int | None) -> Durable:
    try:
        found = find_checkpoint(find_run(name), wanted)
    except RelayrunError as error:
        raise InputError(
            f"checkpoint.load={config.checkpoint.load}: {error.message}", where=error.where, hint=error.hint
        ) from None
    _same_model(found.config.model, config, found.folder)
    return Durable(iteration=found.iteration, path=str(found.folder))


def _same_model(other: Model, config: RunConfig, folder: Path) -> None:
    differences = [
        f"{name} is {getattr(other, name)} there and {value} here"
        for name, value in config.model.model_dump().items()
        if name not in FREE and getattr(other, name) != value
    ]
    if differences:
        raise ConfigError(
            f"{folder} is of another model: {'; '.join(differences)}",
            where="checkpoint.load",
            hint="take the model section of the run that made it",
        )
