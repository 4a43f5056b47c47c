"""The command line of a run with Megatron-LM: from a run config to `MegatronSettings` for plan.json.

`command_line` merges the flags of settings, of a launcher's arrays and of `megatron_lm.args`. `data_path_flags` gives
the shards of the run as `--data-path`: prefixes, with weights if there is a mixture.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from relayrun.config.compose import megatron_flags
from relayrun.config.compose.megatron_flags import SettingContext
from relayrun.config.compose.schema import DataSection, DataSource, MegatronConfig, TrainingSection
from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm import MegatronSettings, is_too_long_for_command
from relayrun.errors import ConfigError
from relayrun.submit.launcher_overrides import setting_variables, variable_text
from relayrun.submit.megatron_lm import flags
from relayrun.submit.megatron_lm.bash_values import MARK
from relayrun.submit.megatron_lm.checkout import Checkout
from relayrun.submit.megatron_lm.flags import Flag, MergedFlags, RemovedByArgs
from relayrun.submit.megatron_lm.launcher_file import REPLACED_FLAGS, Launcher, read_launcher
from relayrun.tokens.shards.manifest import check_held_out, doubled_texts
from relayrun.tokens.shards.prefixes import expand_paths, find_prefixes
from relayrun.tokens.shards.shard import Shard


def data_path_flags(data: DataSection) -> list[Flag]:
    """The flags of training and validation data. Raises InputError for a path that leads to no shard.

    Without a mixture no prefix has a weight: Megatron-LM weighs them by their samples. In a mixture the weight of a
    data set goes to its shards by their tokens, so that each of its samples is as likely as the others.
    """
    if data.mock_data:
        return []
    found = {name: expand_paths(source.paths) for name, source in data.sources.items()}
    validation = {
        name: find_prefixes([Path(folder) for folder in folders], listed=True)
        for name, folders in data.validation.items()
    }
    doubled_texts([prefix for prefixes in found.values() for prefix in prefixes], refuse=True)
    check_held_out(found, validation, split=found if data.split else ())
    if data.mixture:
        training, source = _weighted_prefixes(data.mixture, found), "data.mixture"
    else:
        training, source = [prefix for prefixes in found.values() for prefix in prefixes], "data.datasets"
    if not data.validation:
        return [Flag(name="data-path", values=tuple(training), source=source)]
    held_out = [prefix for prefixes in validation.values() for prefix in prefixes]
    return [
        Flag(name="train-data-path", values=tuple(training), source=source),
        Flag(name="valid-data-path", values=tuple(held_out), source="data.validation"),
    ]


def _weighted_prefixes(mixture: dict[str, DataSource], found: dict[str, list[str]]) -> list[str]:
    """Weights and prefixes in turns."""
    words: list[str] = []
    for name, source in mixture.items():
        prefixes = found[name]
        tokens = [Shard.open(prefix).tokens for prefix in prefixes] if len(prefixes) > 1 else [1]
        total = sum(tokens) or 1
        for prefix, share in zip(prefixes, tokens, strict=True):
            if share:
                words += [f"{source.weight * share / total:.12g}", prefix]
    return words


ARGS_SETTING = "megatron_lm.args"

CHAIN_FLAGS = {name: REPLACED_FLAGS[name] for name in ("save", "load", "trigger-path")} | {
    "ckpt-step": "a run goes on from its newest checkpoint; `checkpoint.load: RUN:ITERATION` names another one",
    "exit-signal": "the chain asks the ranks to save and leave by a signal of its own",
}
"""Flags that an attempt decides, and why nobody else does."""

_FOLDER_VARIABLES = {"save": "CKPT_DIR", "load": "CKPT_DIR", "trigger-path": "TRIGGER_DIR"}
"""Variables of a launcher with which those flags say what holds anyway."""

_SECTIONS_OF_LAUNCHERS = ("model", "training", "optimizer", "parallel", "checkpoint", "tracking", "data")
"""Sections whose flags a launcher says itself."""

_SAMPLE_FLAGS = frozenset({"train-samples", "lr-warmup-samples", "lr-decay-samples", "lr-wsd-decay-samples"})
_LOAD_FLAGS = ("finetune", "no-load-optim")
_DATA_FLAGS = frozenset({"data-path", "train-data-path", "valid-data-path", "data-cache-path", "mock-data"})
"""Flags of `data` for a launcher that names no shards."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The command of the ranks, and notes on it."""

    settings: MegatronSettings
    checkout: Checkout
    merged: MergedFlags
    notes: list[str]
    """Flags that were given and do not hold, a sentence each."""

    repeated_saves: list[int]
    """Iterations that Megatron-LM saves twice."""


def command_line(config: MegatronConfig, run: Run) -> CommandLine:
    """The command of a run, from settings, `args_file` and `args`. Raises ConfigError or InputError."""
    own = config.megatron_lm
    checkout = Checkout.open(own.dir)
    variables = launcher_variables(config, run)
    notes: list[str] = []
    from_file: Sequence[Flag] = []
    launcher = None if own.args_file is None else config_launcher(config, run)
    if launcher is not None:
        from_file = _without_folders(launcher, variables, notes)
    from_args = flags.flags_from_args(dict(own.args), checkout.flags, source=ARGS_SETTING)
    for entry in from_args:
        _refuse_chain_flag(entry)
    settings_flags = _flags_from_settings(config, run, checkout)
    if launcher is not None:
        settings_flags = _without_sections(settings_flags, launcher, notes)
    merged = flags.merge_flags([settings_flags, from_file, from_args])
    steps, repeated = train_iterations(merged)
    _refuse_blanks(merged)
    settings = MegatronSettings(
        run=[config.cluster.rank_python, str(checkout.folder / own.program), *merged.words],
        dialect=checkout.dialect.value,
        total_steps=steps,
        dir=str(checkout.folder),
        keep_last=None if config.checkpoint is None else config.checkpoint.keep_last,
        keep_every=None if config.checkpoint is None else config.checkpoint.keep_every,
        # of attempts that begin with checkpoint.load: with them every attempt would begin anew
        load_flags=[f"--{name}" for name in _LOAD_FLAGS if getattr(config.checkpoint, name.replace("-", "_"), False)],
        profile=config.debug.profile,
        nsys_options=config.debug.nsys_options,
        log_nccl=config.debug.log_nccl,
        wandb_project=config.project,
        wandb_name=config.name,
    )
    notes += merged.notes
    return CommandLine(settings=settings, checkout=checkout, merged=merged, notes=notes, repeated_saves=repeated)


def _flags_from_settings(config: MegatronConfig, run: Run, checkout: Checkout) -> list[Flag]:
    """All flags but those of `args_file` and `args`."""
    megatron_flags.refuse_settings_without_flag(config)
    given, found = SettingContext(config, checkout.says), list[Flag]()

    def add(name: str, values: Iterable[object] = (), *, source: str) -> None:
        found.append(Flag(name=name, values=tuple(map(str, values)), source=source))

    for row in megatron_flags.FLAG_TABLE:
        settings = getattr(config, row.section)
        values = None if settings is None else row.how(getattr(settings, row.name) if row.name else None, given)
        if values is not None:
            add(row.flag, values, source=row.setting)
    if config.data is not None:
        found += data_path_flags(config.data)
        if config.data.data_cache_dir is None and not config.data.mock_data:
            # Megatron's own is beside the data, which may be read-only
            add("data-cache-path", [run.data_cache], source="run_dir")
    for name, *fixed in megatron_flags.FIXED_FLAGS:
        add(name, fixed, source="the chain")
    if "exit-signal" in checkout.flags:  # rank.sh has it ignored in a rank's children, which SIGTERM would end
        add("exit-signal", ["SIGUSR2"], source="the chain")
    if config.tracking.tensorboard:
        add("tensorboard-dir", [run.tensorboard], source="tracking.tensorboard")
    debug = config.debug
    if debug.profile is not None:
        add("profile", source="debug.profile")
        add("profile-step-start", [debug.profile_step_start], source="debug.profile_step_start")
        add("profile-step-end", [debug.profile_step_end], source="debug.profile_step_end")
        add("profile-ranks", debug.profile_ranks, source="debug.profile_ranks")
    if debug.profile == "torch":
        add("use-pytorch-profiler", source="debug.profile")
    training = config.training
    return found if training is None or training.rampup_batch_size is None else _in_samples(found, training)


def _in_samples(found: list[Flag], training: TrainingSection) -> list[Flag]:
    """Flags with samples in place of iterations: Megatron-LM takes a ramp of the batch size with samples alone."""
    sizes, steps = GlobalBatchSizes(training.global_batch_size, training.rampup_batch_size), training.steps
    ramp = training.rampup_batch_size or ()
    last = sizes.consumed_by(steps)
    # within the ramp Megatron-LM counts an iteration that begins at the last sample
    last -= iterations_of_samples(last, training.global_batch_size, ramp)[0] != steps
    changed = []
    for flag in found:
        name = flag.name.replace("-iters", "-samples")
        number = int(flag.values[0]) if name != flag.name and name in _SAMPLE_FLAGS else None
        if number is not None:
            before = sizes.consumed_by(max(steps - number, 0)) if "wsd" in name else 0
            samples = last if "train" in name else sizes.consumed_by(steps if before else number) - before
            flag = replace(flag, name=name, values=(str(samples),))
        changed.append(flag)
    return changed


def _without_folders(launcher: Launcher, variables: Mapping[str, str], notes: list[str]) -> list[Flag]:
    """The flags of a launcher without flags that an attempt decides. Raises ConfigError if one of them matters."""
    kept = []
    saved = next((entry.values for entry in launcher.flags if entry.name == "save"), None)
    for entry in launcher.flags:
        name = _FOLDER_VARIABLES.get(entry.name)
        same = name is not None and entry.values == (variables[name],)
        own = entry.name in ("save", "trigger-path") or (entry.name == "load" and entry.values == saved)
        if same or own or entry.name.startswith("wandb-"):
            notes.append(f"{MARK.sub('...', entry.text)} of {entry.source} is left out: {REPLACED_FLAGS[entry.name]}")
            continue
        _refuse_chain_flag(entry)
        kept.append(entry)
    return kept


def _without_sections(settings: list[Flag], launcher: Launcher, notes: list[str]) -> list[Flag]:
    """The flags of settings that a launcher leaves to them: no flag of the model that it lacks is added."""
    given = {entry.name for entry in launcher.flags}
    sections = _SECTIONS_OF_LAUNCHERS if launcher.training is not None else ("model",) if "num-layers" in given else ()
    data = launcher.datasets is not None or not any(name.endswith("data-path") or name == "mock-data" for name in given)
    kept, left = [], list[str]()
    for entry in settings:
        section = entry.source.partition(".")[0]
        of_data = section == "data" and data and entry.name in _DATA_FLAGS
        if section not in sections or of_data or (entry.name == "save-interval" and "save-interval" not in given):
            kept.append(entry)
        elif entry.name not in given:
            left.append(entry.text)
    if left:
        words = f"{launcher.path} says the flags of {', '.join(sections)}; these of the config are left out"
        notes.append(f"{words}: {' '.join(left)}")
    return kept


def config_launcher(config: MegatronConfig, run: Run) -> Launcher:
    """The launcher of `megatron_lm.args_file`, followed with the variables of this run and the environment."""
    variables, settings = launcher_variables(config, run), setting_variables(config.trainer)
    defaults = {name: value for name, value in variables.items() if name in settings or name.endswith("_DIR")}
    facts = {name: value for name, value in variables.items() if name not in defaults}
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return read_launcher(Path(config.megatron_lm.args_file or ""), outside | facts, defaults, hints=settings)


def train_iterations(merged: MergedFlags) -> tuple[int, list[int]]:
    """The last iteration of a training with these flags; and the iterations that Megatron-LM saves twice: by
    --save-interval, and before the batch size grows. Raises ConfigError if no flag says the length."""
    numbers = {
        name: [int(value.replace("_", "")) for value in found.values]
        for name in ("train-iters", "train-samples", "global-batch-size", "rampup-batch-size", "save-interval")
        if (found := merged.find(name)) is not None and all(re.fullmatch(r"\d+(_\d+)*", each) for each in found.values)
    }
    if len(numbers.get("train-iters", ())) == 1:
        return numbers["train-iters"][0], []
    samples, size = numbers.get("train-samples", ()), numbers.get("global-batch-size", ())
    if len(samples) == len(size) == 1 and (ramp := numbers.get("rampup-batch-size", [])) in ([], ramp[:3]):
        steps, grows = iterations_of_samples(samples[0], size[0], ramp)
        saves = numbers.get("save-interval", ())
        return steps, [at for at in grows if at < steps and any(at % each == 0 for each in saves)]
    words = "the chain must know the last iteration, and no flag says it: --train-iters"
    hint = "set training.steps (TRAINING_STEPS), or train-iters in megatron_lm.args"
    if samples:
        words = "--train-samples become iterations by --global-batch-size, and no flag says that"
        hint = "set global-batch-size in megatron_lm.args"
    raise ConfigError(words, where="training.steps", hint=hint)


def iterations_of_samples(samples: int, size: int, ramp: Sequence[int] = ()) -> tuple[int, list[int]]:
    """The number of iterations that Megatron-LM makes of `--train-samples`, and those after which the batch size grows.

    A last batch that is not full is left out. `ramp`: `--rampup-batch-size START INCREMENT SAMPLES`. Its batches count
    as long as no more samples than the ramp's were consumed before them, as in Megatron-LM's update_train_iters.
    """
    try:
        sizes = GlobalBatchSizes(size, ramp or None)
    except ValueError as error:
        raise ConfigError(str(error), where="rampup-batch-size", hint="give START INCREMENT SAMPLES") from None
    iterations = sizes.reaches(min(ramp[2], samples) + 1) if ramp else 0
    iterations += max(samples - sizes.consumed_by(iterations), 0) // size
    return iterations, [each.iteration for each in sizes.runs(0, 0)[1:]]


def _refuse_chain_flag(entry: Flag | RemovedByArgs) -> None:
    if (why := CHAIN_FLAGS.get(entry.name)) is not None:
        raise ConfigError(f"--{entry.name} is the chain's: {why}", where=entry.source, hint="leave it out")
    if isinstance(entry, RemovedByArgs) and entry.name == "exit-signal-handler":
        raise ConfigError(
            "without --exit-signal-handler no attempt saves before its job ends", where=entry.source, hint="leave it"
        )


def _refuse_blanks(merged: MergedFlags) -> None:
    """Raise ConfigError for prefixes with blanks in a file of prefixes, which Megatron-LM splits at blanks."""
    for entry in merged.flags:
        if entry.name.endswith("data-path") and is_too_long_for_command(entry.values):
            for value in entry.values:
                if value.split() != [value]:
                    words = f"{value!r} holds a blank, and so many prefixes go to Megatron-LM in a file that it splits "
                    hint = "rename the folder, or make a link to it without a blank"
                    raise ConfigError(f"{words}at blanks", where=entry.source, hint=hint)


def launcher_variables(config: MegatronConfig, run: Run) -> dict[str, str]:
    """The variables of a launcher that the arrays of `args_file` may name, with the values that they have here."""
    job, ranks, owner = config.job, config.world_size, pwd.getpwuid(os.geteuid())
    named = setting_variables(config.trainer).items()
    found = {variable: text for variable, setting in named if (text := variable_text(config, setting))}
    facts: dict[str, object] = {
        "PROJECT_DIR": run.path.parent,
        "EXP_DIR": run.path,
        "CKPT_DIR": run.checkpoints,
        "TRIGGER_DIR": run.triggers,
        "LOGGING_DIR": run.path,
        "TENSORBOARD_DIR": run.tensorboard,
        "SLURM_NNODES": job.nodes,
        "SLURM_JOB_NUM_NODES": job.nodes,
        "SLURM_NTASKS": ranks,
        "SLURM_NPROCS": ranks,
        "WORLD_SIZE": ranks,
        "SLURM_NTASKS_PER_NODE": job.ntasks_per_node,
        "SLURM_CPUS_PER_TASK": job.cpus_per_task,
        **({"SLURM_GPUS_PER_NODE": job.gpus_per_node} if job.gpus_per_node else {}),
        "USER": owner.pw_name,
        "HOME": owner.pw_dir,
    }
    return found | {name: str(fact) for name, fact in facts.items()}
