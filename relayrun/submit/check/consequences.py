"""What a submit changes in effect, for a run that goes on from a checkpoint: steps left, learning rate, W&B."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.checkpoint_records import ResumePoint, is_checkpoint_of
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.tools import wandb_mode
from relayrun.errors import FatalTrainingError, RelayrunError
from relayrun.submit.check.findings import Findings, count_noun
from relayrun.submit.check.rehearsal import tell_rate_changes
from relayrun.submit.dry_load import common_values
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train.export.source_and_target import committed_config

_SCHEDULE = ("steps", "global_batch_size", "rampup_batch_size", "seq_length")
"""Settings of `training` on which the learning rate depends, besides those of `optimizer`."""


def check_consequences(config: RunConfig, run: Run, begins: ResumePoint, findings: Findings) -> None:
    """Say what a run that goes on from `begins` has left, and what its next step has another way."""
    if begins.path is None:
        return
    if begins.iteration:
        with contextlib.suppress(KeyError, FatalTrainingError):  # ranks say better what is damaged
            state = (common_values(Path(begins.path)) or {})["progress"]
            progress = TrainingProgress.resume(state, config.training.batch_sizes)
            _tell_what_is_left(config, progress, findings)
            _tell_rate(config, run, begins, progress, findings)
    mode = wandb_mode({**os.environ, **config.cluster.environment})
    if is_checkpoint_of(run, begins) and mode is None and (run.path / "wandb").is_dir():
        words = "earlier attempts of this run wrote to W&B, and the next one will not: its curve ends here"
        findings.warn("run.wandb", words, remedy="export WANDB_API_KEY, or WANDB_MODE=offline, as before")


def _tell_what_is_left(config: RunConfig, progress: TrainingProgress, findings: Findings) -> None:
    done, end, length = progress.iteration, config.training.end_iteration, config.training.length_in_samples
    if length is not None and (steps := progress.legs[-1].steps_within(length)) != config.training.steps:
        words = f"with the batch sizes so far, {length:,} samples are {steps:,} steps, not {config.training.steps:,}"
        remedy = f"set training.samples and tokens to null, and training.steps={steps}"
        return findings.refuse("run.steps", words, setting="training.steps", remedy=remedy)
    samples = progress.legs[-1].consumed(max(end, done)) - progress.consumed_samples
    words = f"{done:,} of {count_noun(end, 'step')} are done: {count_noun(end - done, 'step')} with "
    findings.ok("run.steps", words + f"{count_noun(samples, 'sample')} are left")
    return None


def _tell_rate(config: RunConfig, run: Run, begins: ResumePoint, at: TrainingProgress, findings: Findings) -> None:
    name, former = "run.learning_rate", _former_config(run, begins)
    if former is None:
        findings.skip(name, "the config of the checkpoint is not known: nor whether the rate jumps at the next step")
    elif _schedule(former) != _schedule(config):
        tell_rate_changes(name, [(former, config, at, findings)])


def _former_config(run: Run, begins: ResumePoint) -> RunConfig | None:
    """Return the native config with which the checkpoint was made; None if it is not known."""
    owner = run if is_checkpoint_of(run, begins) else Run(Path(begins.path or "").parent.parent)
    try:
        found = committed_config(owner, begins.iteration)
    except (RelayrunError, OSError):
        return None
    return found if isinstance(found, RunConfig) else None


def _schedule(config: RunConfig) -> dict[str, Any]:
    names = ("lr", "min_lr", *(name for name in type(config.optimizer).model_fields if name.startswith("lr_")))
    training = {name: getattr(config.training, name) for name in _SCHEDULE}
    return training | {name: getattr(config.optimizer, name) for name in names}
