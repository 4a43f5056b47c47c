"""The settings block of the Bash launchers: variables of the environment to overrides of a run config.

`MBS=2 sbatch launchers/submit-demo.sh` is `--set training.micro_batch_size=2`; both ways end in the same job. A block
that nobody edited leaves every variable empty, so the YAML holds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

from relayrun.config.compose.schema import CONFIG_CLASSES, CommonConfig, trainers_with
from relayrun.errors import ConfigError

SETTING_VARIABLES = {
    "PROJECT_NAME": "project",
    "EXP_NAME": "name",
    "RUN_DIR": "run_dir",
    "CLUSTER": "cluster",
    "TOKENIZER": "data.tokenizer",
    "DATASETS": "data.datasets",
    "MIXTURE": "data.mixture",
    "DATASET_CACHE_DIR": "data.data_cache_dir",
    "MBS": "training.micro_batch_size",
    "GBS": "training.global_batch_size",
    "SEQ_LEN": "training.seq_length",
    "TRAINING_STEPS": "training.steps",
    "CHECKPOINT_STEPS": "checkpoint.interval",
    "LOAD": "checkpoint.load",
    "AUTO_JOB_REQUEUE": "chain.auto_requeue",
    "TENSORBOARD": "tracking.tensorboard",
    "LOG_NCCL": "debug.log_nccl",
    "MOCK_DATA": "data.mock_data",
    "BACKUP_CODEBASE": "debug.backup_codebase",
}
"""Name in the run config of each setting. An empty setting leaves the config's own value."""

TRAINER_VARIABLES = {
    "megatron-lm": {"MEGATRON_LM_DIR": "megatron_lm.dir", "ARGS_FILE": "megatron_lm.args_file"},
    "command": {"TRAINING_STEPS": "command.steps"},
}
"""Settings that a foreign trainer has besides those of OVERRIDES whose sections it has, or under another name."""

OTHER_VARIABLES = ("CONFIG", "RESUME", "ACCEPT_DATA_CHANGE", "TAKE_OVER")
PYTHON_VARIABLES = {"PYTHON", "HOST_PYTHON"}
"""Variables of the launchers that are no settings of a run."""

PROFILER_VARIABLE = "NSYS_PROFILER"
"""Switch for `debug.profile=nsys`; false leaves the config's own value."""

JOB_VARIABLES = {
    "SLURM_JOB_NUM_NODES": "job.nodes",
    "SLURM_NTASKS_PER_NODE": "job.ntasks_per_node",
    "SLURM_CPUS_PER_TASK": "job.cpus_per_task",
}
"""Variables in which Slurm tells a job its options, and the settings with the same meaning."""

_NO_TEXT = re.compile(r"(?:training|chain|tracking|debug|command)\..*|checkpoint\.interval|data\.mock_data")
"""Settings that are numbers or switches, by their names."""
_ALTERNATIVE_FORM = {"DATASETS": "data.mixture=null", "MIXTURE": "data.datasets=[]"}
"""The config may have its data in the other form; a setting replaces it."""


def setting_variables(trainer: str) -> dict[str, str]:
    """Return the settings that a run of this trainer has, with their names in its config."""
    sections = CONFIG_CLASSES[trainer].model_fields
    common = {setting: name for setting, name in SETTING_VARIABLES.items() if name.partition(".")[0] in sections}
    return common | TRAINER_VARIABLES.get(trainer, {})


def environment_overrides(environment: Mapping[str, str], *, trainer: str = "native") -> list[str]:
    """The `name=value` overrides of a settings block.

    Raises ConfigError for a setting that a run of this trainer has not, for a variable whose name is close to that of a
    setting, and if a switch is neither true nor false.
    """
    _refuse_near_misses(environment)
    names = setting_variables(trainer)
    given = {setting: value for setting in names if (value := environment.get(setting, "")) != ""}
    _refuse_others(environment, names, trainer)
    if "MIXTURE" in given:  # the other one may be what somebody wrote into the block
        given.pop("DATASETS", None)
    replaced = [override for setting, override in _ALTERNATIVE_FORM.items() if setting in given]
    if boolean_variable(environment, PROFILER_VARIABLE):
        replaced.append("debug.profile=nsys")
    return replaced + [f"{names[setting]}={_yaml(names[setting], value)}" for setting, value in given.items()]


def _refuse_near_misses(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a mistyped setting: an exchange of letters, or nearly the same name."""
    known = [*reduce(or_, TRAINER_VARIABLES.values(), SETTING_VARIABLES), PROFILER_VARIABLE, *OTHER_VARIABLES]
    for name in sorted(environment.keys() - known - PYTHON_VARIABLES):
        near = [each for each in known if sorted(each) == sorted(name)] or difflib.get_close_matches(
            name, known, 1, 0.85
        )
        if near and environment[name]:
            hint = f"rename it, or `unset {name}` if it is for another program"
            raise ConfigError(f"{name} is no setting; did you mean {near[0]}?", where="environment", hint=hint)


def _refuse_others(environment: Mapping[str, str], names: Mapping[str, str], trainer: str) -> None:
    for setting, name in reduce(or_, TRAINER_VARIABLES.values(), SETTING_VARIABLES).items():
        if setting not in names and (value := environment.get(setting, "")) != "":
            others = " or ".join(trainers_with(name.partition(".")[0]))
            words = f"{setting}={value}: only a run of trainer {others} has {name}; this one's trainer is {trainer}"
            hint = f"leave it empty, or let CONFIG name a run of trainer {others}"
            raise ConfigError(words, where="settings block", hint=hint)


def job_overrides(environment: Mapping[str, str]) -> list[str]:
    """The `name=value` overrides that make a run as large as the job that it begins in.

    Slurm has granted what the #SBATCH lines, or options of sbatch in their place, asked for: a run that was as large
    as its YAML says would not fit into it.
    """
    return [f"{name}={environment[variable]}" for variable, name in JOB_VARIABLES.items() if environment.get(variable)]


def boolean_variable(environment: Mapping[str, str], name: str) -> bool:
    """Return a setting that is `true` or `false` (the default). Raises ConfigError for anything else."""
    value = environment.get(name, "").lower()
    if value not in ("", "true", "false"):
        raise ConfigError(f"{name}={value} is neither true nor false", where="settings block")
    return value == "true"


def _yaml(setting: str, value: str) -> str:
    """As YAML: texts quoted, whatever is in them; data sets are a list with commas."""
    if setting == "data.datasets":
        return "[" + ", ".join(quote_yaml(folder.strip()) for folder in value.split(",") if folder.strip()) + "]"
    return value.lower() if _NO_TEXT.fullmatch(setting) else quote_yaml(value)


def quote_yaml(text: str) -> str:
    """Return a text as a quoted YAML value, whatever is in it."""
    return "'" + text.replace("'", "''") + "'"


def variable_text(config: CommonConfig, setting: str) -> str:
    """Return a setting as a launcher's variable holds it; empty if it has no value."""
    value: Any = config
    for part in setting.split("."):
        value = getattr(value, part, None)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, str | int | float) else ""
