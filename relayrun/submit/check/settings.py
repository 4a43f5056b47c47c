"""Check the settings: placeholders that nobody replaced, values out of range, and variables that hold secrets.

An error is a value that nobody can mean; a warning is a value that somebody may mean. The variables are the key of
Weights & Biases and those that the targets of `notify` name; their values are never shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import filter as matching
from math import inf

from relayrun.config.compose import determinism
from relayrun.config.compose.schema import CommonConfig, MegatronConfig, RunConfig
from relayrun.config.sections.notify import VARIABLE_PATTERN
from relayrun.control.trainers.tools import wandb_mode
from relayrun.masking import SECRET_REMEDY, find_secrets, setting_texts
from relayrun.submit.check.findings import Findings
from relayrun.train.model.size import possible_names


def check_notify_variables(config: CommonConfig, findings: Findings) -> None:
    """Warn of a `${VARIABLE}` that this environment, which the jobs inherit, and `cluster.environment` do not set."""
    name, environment = "notify.variables", {**os.environ, **config.cluster.environment}
    complete = True
    for target, settings in config.notify.targets.items():
        variables = dict.fromkeys(VARIABLE_PATTERN.findall(settings.url or ""))
        if missing := [variable for variable in variables if not environment.get(variable)]:
            complete = False
            words = f"{' and '.join(missing)} not set in this environment: nothing could be sent to {target!r}"
            remedy = f"export {missing[0]} where you submit"
            findings.warn(name, words, setting=f"notify.targets.{target}", remedy=remedy)
    if config.notify.targets and complete:
        findings.ok(name, "every variable of the targets of messages is set")


def check_secrets(config: CommonConfig, findings: Findings) -> None:
    """Refuse values that look like secrets: the config is copied into the run directory and into job scripts."""
    for name, found in find_secrets(config.model_dump(mode="json")):
        words = f"{found} looks like a secret, and the config is copied into the run directory"
        findings.refuse("settings.secret", words, setting=name, value="(not shown)", remedy=SECRET_REMEDY)


PLACEHOLDER = re.compile(r"/set/|CHANGE[_-]?ME\b|<[a-z][a-z _-]*>$", re.IGNORECASE)
"""Placeholders of values that somebody must still set; matched at the beginning of a text."""


@dataclass(frozen=True)
class SettingRange:
    """The expected range of a setting. Bounds belong to the range."""

    setting: str
    why: str
    usual: tuple[float, float]
    """A value outside is a warning."""
    possible: tuple[float, float] = (-inf, inf)
    """A value outside is an error, and so is a lower bound itself."""


_STEP = "Adam moves every weight by about this much in each step, and weights begin near 0.02"
_EPS = "it keeps a division by 0 away, and above the gradients' size it ends the adaptation"
SETTING_RANGES = (
    SettingRange("optimizer.lr", _STEP, usual=(1e-7, 0.02), possible=(-inf, 1.0)),
    SettingRange(
        "optimizer.weight_decay", "0.1 is usual; every step takes lr x weight_decay off a weight", usual=(-inf, 1.0)
    ),
    SettingRange("optimizer.adam_beta1", "0.9 is usual", usual=(0.5, 0.99)),
    SettingRange("optimizer.adam_beta2", "0.95 and 0.999 are usual", usual=(0.8, 0.9999)),
    SettingRange("optimizer.adam_eps", _EPS, usual=(1e-20, 1e-5), possible=(-inf, 1.0)),
    SettingRange("optimizer.clip_grad", "1.0 is usual, 0 is never", usual=(-inf, 100.0)),
    SettingRange("model.init_method_std", "0.02 is usual", usual=(1e-4, 0.2), possible=(0.0, 10.0)),
    SettingRange(
        "model.norm_epsilon", "it keeps a division by 0 away: 1e-5 is usual", usual=(1e-12, 1e-3), possible=(0.0, 1.0)
    ),
    SettingRange("model.hidden_dropout", "above it little gets through", usual=(-inf, 0.5)),
    SettingRange("model.attention_dropout", "above it little gets through", usual=(-inf, 0.5)),
    SettingRange("model.rotary_base", "10,000 and 500,000 are usual", usual=(1000, 1e9)),
    SettingRange("training.spike_threshold", "noise alone reaches it", usual=(3.0, inf)),
)

LONG_WARMUP = 0.5
"""Share of the run above which a warm-up is a warning."""


def check_settings(config: CommonConfig, findings: Findings) -> None:
    """Look at every setting by itself, and at pairs that make no sense together."""
    _placeholders(config, findings)
    check_secrets(config, findings)
    if isinstance(config, RunConfig):
        _check_native(config, findings)
    elif isinstance(config, MegatronConfig):
        _check_ranges(config, findings)
        _ranks(config, findings)


def _check_native(config: RunConfig, findings: Findings) -> None:
    before = len(findings.all)
    _check_ranges(config, findings)
    _decay(config, findings)
    _warmup(config, findings)
    _ranks(config, findings)
    if len(findings.all) == before:
        findings.ok("settings.sense", f"{len(SETTING_RANGES)} settings lie where such settings usually lie")
    if config.job.gpus_per_node:
        with findings.catching("settings.precision"):
            config.training.require_precision()
    if config.training.deterministic:
        cluster = config.cluster
        with findings.catching("settings.deterministic"):
            where = f"cluster.environment of {cluster.name!r}"
            determinism.check_deterministic_environment(cluster.environment, where=where)
    if config.optimizer.groups:
        _groups(config, findings)
    _layout(config, findings)


def _groups(config: RunConfig, findings: Findings) -> None:
    name, setting, names = "settings.groups", "optimizer.groups", possible_names(config.model)
    if config.model.spec is not None:
        return findings.skip(name, "the ranks alone know the parameters of model.spec", setting=setting)
    for match in (group.match for group in config.optimizer.groups if not matching(names, group.match)):
        near = ", ".join(get_close_matches(match, {re.sub(r"\d+", "N", each) for each in names}, cutoff=0.3))
        words = f"{match} matches no parameter of this model"
        return findings.refuse(name, words, setting=setting, remedy=f"names are like {near}")
    return findings.ok(name, "each group can match a parameter of this model")


def find_placeholders(config: CommonConfig) -> list[tuple[str, str]]:
    """Name and value of every setting that still holds the text that stands for a value."""
    data = config.data if isinstance(config, RunConfig | MegatronConfig) else None
    made_up = data is not None and data.mock_data
    return [
        (name, value)
        for name, value in setting_texts(config.model_dump(mode="json"))
        if PLACEHOLDER.match(value) and not (made_up and name.startswith("data."))
    ]


def _placeholders(config: CommonConfig, findings: Findings) -> None:
    found = find_placeholders(config)
    for name, value in found:
        words = f"{value} stands where a value of yours must stand"
        remedy = f"set it in the run config, or with --set {name}=..."
        findings.refuse("settings.placeholder", words, setting=name, value=value, remedy=remedy)
    if not found:
        findings.ok("settings.placeholder", "no setting is still a placeholder")


def _check_ranges(config: RunConfig | MegatronConfig, findings: Findings) -> None:
    for each in SETTING_RANGES:
        section, _, name = each.setting.partition(".")
        if getattr(config, section) is None:
            continue
        value, (low, high) = getattr(getattr(config, section), name), each.usual
        usual = f"at most {high:g}" if low == -inf else f"at least {low:g}" if high == inf else f"{low:g} to {high:g}"
        if not (possible := each.possible[0] < value <= each.possible[1]) or not low <= value <= high:
            tell, fault = (findings.warn, "is unusual") if possible else (findings.refuse, "cannot be meant")
            words, remedy = f"{value:g} {fault}: {each.why}", f"usual is {usual}"
            tell("settings.sense", words, setting=each.setting, remedy=remedy)


def _decay(config: RunConfig, findings: Findings) -> None:
    """Decoupled decay multiplies a weight by 1 - lr x weight_decay in each step."""
    off = config.optimizer.lr * config.optimizer.weight_decay
    if off >= 1:
        words = f"lr x weight_decay is {off:g}: a step would take all of a weight, or turn its sign"
        findings.refuse("settings.sense", words, setting="optimizer.weight_decay", remedy="0.1 is usual")


def _warmup(config: RunConfig, findings: Findings) -> None:
    steps = config.training.steps
    warmup, _ = config.lr_steps(config.training.batch_sizes.reaches)
    name = "lr_warmup_steps" if config.optimizer.lr_warmup_tokens is None else "lr_warmup_tokens"
    if warmup > LONG_WARMUP * steps:
        what = "is longer than" if warmup >= steps else f"takes {warmup / steps:.0%} of"
        words = f"the warm-up of {warmup:,} steps {what} the training of {steps:,}"
        findings.warn("settings.warmup", words, setting=f"optimizer.{name}", remedy="a few per cent are usual")


def _ranks(config: RunConfig | MegatronConfig, findings: Findings) -> None:
    job = config.job
    if job.gpus_per_node and job.ntasks_per_node != job.gpus_per_node:
        what = "share a GPU" if job.ntasks_per_node > job.gpus_per_node else "leave GPUs idle"
        words = f"{job.ntasks_per_node} ranks on {job.gpus_per_node} GPUs of a node {what}"
        findings.warn("settings.ranks", words, setting="job.ntasks_per_node", remedy="one rank a GPU is usual")


def _layout(config: RunConfig, findings: Findings) -> None:
    """The schema has refused what does not divide; here it is said what it comes to."""
    parallel = config.parallel
    micro = config.training.global_batch_size // (config.training.micro_batch_size * config.data_parallel_size)
    split = parallel.expert_model_parallel_size
    experts = f", experts over {split} of them" if split > 1 else ""
    if parallel.expert_tensor_size != parallel.tensor_model_parallel_size:
        experts += f", each expert over {parallel.expert_tensor_size}"
    words = f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size} x "
    words += f"context {parallel.context_parallel_size} x data {config.data_parallel_size}{experts}"
    words += f"; {micro} micro-batches an iteration and rank"
    findings.ok("settings.layout", f"{config.world_size} ranks: {words}")


WANDB_KEY = re.compile(r"(?:local-)?[0-9a-f]{40}|wandb_v1_[A-Za-z0-9_]{40,}")
"""Forms of W&B's keys: 40 hexadecimal digits, of an own server with `local-` in front, and the longer new ones."""


WANDB_MODES = ("online", "offline", "disabled", "run", "dryrun", "shared")


def check_wandb(config: CommonConfig, findings: Findings, environment: Mapping[str, str] = os.environ) -> None:
    """Look at W&B's variables, of this environment and of `cluster.environment`."""
    name = "tracking.wandb"
    if not isinstance(config, RunConfig | MegatronConfig):
        findings.skip(name, f"W&B is the program's own affair: nothing is sent for a run of trainer {config.trainer}")
        return
    environment = {**environment, **config.cluster.environment}
    key, mode = environment.get("WANDB_API_KEY", ""), wandb_mode(environment)
    if (wanted := environment.get("WANDB_MODE", "online")) not in WANDB_MODES:
        remedy = f"write one of {', '.join(WANDB_MODES)}"
        findings.refuse(name, f"WANDB_MODE={wanted} is no mode of W&B", remedy=remedy)
    elif mode == "offline":
        findings.ok(name, "W&B writes files beside the run (WANDB_MODE=offline), for scripts/tools/sync_wandb.py")
    elif mode is None:
        findings.ok(name, "W&B is off: neither WANDB_API_KEY nor WANDB_MODE=offline is in the environment")
    elif WANDB_KEY.fullmatch(key) is None:
        blanks = ", with blanks or line breaks around it" if key != key.strip() else ""
        words = f"WANDB_API_KEY has {len(key)} characters{blanks} and not the form of a key: W&B will refuse it"
        findings.warn(name, words, remedy="export the key that the W&B site shows, 40 characters or wandb_v1_...")
    else:
        findings.ok(name, "W&B is on; WANDB_API_KEY has the form of a key")
