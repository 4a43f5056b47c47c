"""The command line of a run with Megatron-LM: from a run config to `MegatronSettings` for plan.json.

`command_line` merges the flags of settings, of a launcher's arrays and of `megatron_lm.args`. `data_path_flags` gives
the shards of the run as `--data-path`: prefixes, with weights if there is a mixture.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.config.compose import megatron_flags
from relayrun.config.compose.megatron_flags import SettingContext
from relayrun.config.compose.schema import DataSection, DataSource, MegatronConfig
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm import MegatronSettings, is_too_long_for_command
from relayrun.errors import ConfigError
from relayrun.submit.launcher_overrides import setting_variables, variable_text
from relayrun.submit.megatron_lm import bash_arrays, flags
from relayrun.submit.megatron_lm.checkout import Checkout
from relayrun.submit.megatron_lm.flags import Flag, MergedFlags, RemovedByArgs
from relayrun.tokens.shards.manifest import check_held_out
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

CHAIN_FLAGS = {
    "save": "every run has a folder of its own, which `run_dir` names",
    "load": "a run goes on from its own folder; `checkpoint.load` names what a new one begins with",
    "ckpt-step": "a run goes on from its newest checkpoint; `checkpoint.load: RUN:ITERATION` names another one",
    "trigger-path": "the chain's triggers lie in the run directory: `relayrun save`, `relayrun stop`",
    "exit-signal": "the chain asks the ranks to save and leave by a signal of its own",
}
"""Flags that an attempt decides, and why nobody else does."""

_FOLDER_VARIABLES = {"save": "CKPT_DIR", "load": "CKPT_DIR", "trigger-path": "TRIGGER_DIR"}
"""Variables of a launcher with which those flags say what holds anyway."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The command of the ranks, and notes on it."""

    settings: MegatronSettings
    checkout: Checkout
    merged: MergedFlags
    notes: list[str]
    """Flags that were given and do not hold, a sentence each."""


def command_line(config: MegatronConfig, run: Run) -> CommandLine:
    """The command of a run, from settings, `args_file` and `args`. Raises ConfigError or InputError."""
    own = config.megatron_lm
    checkout = Checkout.open(own.dir)
    variables = launcher_variables(config, run)
    notes: list[str] = []
    from_file: Sequence[Flag] = []
    if own.args_file is not None:
        file = Path(own.args_file)
        from_file = bash_arrays.flags_in_arrays(file, variables, hints=setting_variables(config.trainer))
        from_file = _without_folders(from_file, variables, notes)
    from_args = flags.flags_from_args(dict(own.args), checkout.flags, source=ARGS_SETTING)
    for entry in from_args:
        _refuse_chain_flag(entry)
    merged = flags.merge_flags([_flags_from_settings(config, run, checkout), from_file, from_args])
    steps = merged.find("train-iters")
    if steps is None or len(steps.values) != 1 or not steps.values[0].isdecimal():
        words = "the chain must know the last iteration, and no flag says it: --train-iters"
        hint = "set training.steps (TRAINING_STEPS), or train-iters in megatron_lm.args"
        raise ConfigError(words, where="training.steps", hint=hint)
    _refuse_blanks(merged)
    settings = MegatronSettings(
        run=[config.cluster.rank_python, str(checkout.folder / own.program), *merged.words],
        dialect=checkout.dialect.value,
        total_steps=int(steps.values[0]),
        dir=str(checkout.folder),
        keep_last=None if config.checkpoint is None else config.checkpoint.keep_last,
        keep_every=None if config.checkpoint is None else config.checkpoint.keep_every,
        load_flags=_load_flags(config),
        profile=config.debug.profile,
        nsys_options=config.debug.nsys_options,
        log_nccl=config.debug.log_nccl,
        wandb_project=config.project,
        wandb_name=config.name,
    )
    return CommandLine(settings=settings, checkout=checkout, merged=merged, notes=[*notes, *merged.notes])


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
    return found


def _load_flags(config: MegatronConfig) -> list[str]:
    """Flags of attempts that begin with `checkpoint.load`: with them every attempt would begin anew."""
    checkpoint = config.checkpoint
    if checkpoint is None:
        return []
    names = {"finetune": checkpoint.finetune, "no-load-optim": checkpoint.no_load_optim}
    return [f"--{name}" for name, given in names.items() if given]


def _without_folders(flags: Sequence[Flag], variables: Mapping[str, str], notes: list[str]) -> list[Flag]:
    """The flags of a launcher without flags that an attempt decides, if these say what holds anyway.

    Raises ConfigError if they say something else.
    """
    kept = []
    for entry in flags:
        name = _FOLDER_VARIABLES.get(entry.name)
        if name is not None and entry.values == (variables[name],):
            notes.append(f"{entry.text} of {entry.source} is left out: {CHAIN_FLAGS[entry.name]}")
            continue
        _refuse_chain_flag(entry)
        kept.append(entry)
    return kept


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
                    raise ConfigError(
                        f"{value!r} holds a blank, and so many prefixes go to Megatron-LM in a file that it splits "
                        "at blanks",
                        where=entry.source,
                        hint="rename the folder, or make a link to it without a blank",
                    )


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
