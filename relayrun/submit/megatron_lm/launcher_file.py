"""A launcher of somebody else: the flags of the training that it starts, its variables and its options of sbatch.

    read_launcher("train.sbatch", {"HOME": "/home/ada"}).flags

The launcher is followed (`bash_run`), and no line of it runs. A file that starts no training gives the flags of its
arrays NAME_ARGS=( --flag value ... ).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from relayrun.errors import ConfigError, combined_error, did_you_mean
from relayrun.masking import describe_secret
from relayrun.submit.megatron_lm import flags
from relayrun.submit.megatron_lm.bash_builtins import Started, read_script
from relayrun.submit.megatron_lm.bash_run import Script
from relayrun.submit.megatron_lm.bash_syntax import UnreadableBash, line_number
from relayrun.submit.megatron_lm.bash_values import MARK, Source, UnknownValue, ask_bash
from relayrun.submit.megatron_lm.flags import Flag

REPLACED_FLAGS = {
    "save": "every run has a folder of its own, which `run_dir` names",
    "load": "a run goes on from its own folder; `checkpoint.load` names what a new one begins with",
    "trigger-path": "the chain's triggers lie in the run directory: `relayrun save`, `relayrun stop`",
    "tensorboard-dir": "tracking.tensorboard writes into the run directory",
    "wandb-project": "W&B's project is `project`",
    "wandb-exp-name": "W&B's name is `name`, one run for all jobs",
    "wandb-save-dir": "W&B writes into the run directory",
}
"""Flags that a run decides, and why; their values may be known in a job alone."""
_DATA_PROGRAM = "create_data_config.py"
"""The earlier system's program that lists the shards of folders."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What a launcher says."""

    path: Path
    text: str
    script: Script
    training: Started | None
    """None: the file has arrays of flags alone."""
    flags: list[Flag]
    datasets: list[str] | None
    """Folders of shards that the launcher lists by the earlier system's program."""
    environment: dict[str, str]
    """Variables that the launcher exports to the training."""

    @property
    def variables(self) -> dict[str, str | None]:
        """Variables that the launcher sets, with their last values; None: only a job knows it."""
        before = self.script.before
        return {
            name: None if isinstance(value, dict) or MARK.search(value) else value
            for name, value in self.script.variables.items()
            if before.get(name) != value
        }

    def where(self, name: str) -> str:
        """The last line that names a variable in front of a value."""
        found = list(re.finditer(rf"(?<![\w$]){re.escape(name)}\b(?!\}})", _without_comments(self.text)))
        return f"{self.path}:{line_number(self.text, found[-1].start())}" if found else str(self.path)


SECRET_HINT = "let the program read the variable itself"


def secret_words(name: str) -> str:
    """Return the words of a refusal."""
    return f"${name} is a secret of this environment, and what a launcher makes of it would stand in files"


def without_secrets(environment: Mapping[str, str]) -> tuple[Mapping[str, str], dict[str, str]]:
    """Return the variables, of which each secret stands for itself (`${NAME}`), and those of the secrets."""
    secrets = {name: f"${{{name}}}" for name, value in environment.items() if describe_secret(value, variable=name)}
    return {**environment, **secrets}, secrets


def read_launcher(
    path: Path, environment: Mapping[str, str], defaults: Mapping[str, str] = {}, hints: Mapping[str, str] = {}
) -> Launcher:
    """Follow the launcher at `path`. Raises ConfigError, which names lines.

    `environment`: variables that are set when it begins, and its arguments as 1, 2 and so on. `defaults`: values of
    variables that it reads and never sets. `hints`: settings that give a variable its value, by its name.
    """
    text = _read(path)
    environment, secrets = without_secrets(environment)
    script = Script(environment, defaults, Source(str(path), text))
    script.positional = [value for name, value in environment.items() if name.isdigit()]
    try:
        script.follow()
        _refuse_no_bash(path, text)  # behind what is said better here
    except UnreadableBash as error:
        where = getattr(error, "where", script.source.where(error.at))
        raise ConfigError(error.words, where=where, hint="write the value itself, or use megatron_lm.args") from None
    training = _training(path, script)
    words = _words_of_arrays(path, script) if training is None else training.words[training.program + 1 :]
    plain = _without_comments(text)
    places = [(word, _place(path, plain, word, training)) for word in words]
    for name, shown in secrets.items():
        for word, where in places:
            if shown in word:
                raise ConfigError(f"{word}: {secret_words(name)}", where=where, hint=SECRET_HINT)
    _refuse_unknown(script, [Flag(name=word, source=where) for word, where in places[:1]], hints)  # it may be any flag
    found = flags.flags_from_words(places, where=str(path))
    datasets = [folder for flag in found for folder in _folders(script, flag)] or None
    kept = [flag for flag in found if not list(_folders(script, flag))]
    _refuse_unknown(script, kept, hints)
    exported = {name: value for name in script.exported if isinstance(value := script.variables.get(name), str)}
    exported = dict(training.environment) if training is not None else exported
    return Launcher(
        path=path,
        text=text,
        script=script,
        training=training,
        flags=kept,
        datasets=datasets,
        environment={
            name: value for name, value in exported.items() if name in script.assigned or environment.get(name) != value
        },
    )


def _read(path: Path) -> str:
    try:
        text = read_script(path)
    except OSError as error:
        where = f"megatron_lm.args_file {path}"
        raise ConfigError(f"cannot be read: {error.strerror}", where=where, hint="name a file that exists") from None
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8", where=path, hint="name a launcher in Bash") from None
    except UnreadableBash as error:
        raise ConfigError(error.words, where=path, hint="name a launcher in Bash") from None
    for control, what in (("\0", "a NUL byte"), ("\r", "a carriage return, as Windows ends lines")):
        if control in text:
            line = line_number(text, text.index(control))
            raise ConfigError(f"holds {what}", where=f"{path}:{line}", hint="dos2unix takes carriage returns away")
    return re.sub("[\ue000\ue001]", "?", text)


def _refuse_no_bash(path: Path, text: str) -> None:
    """Raise ConfigError if Bash itself finds an error in the script; it reads it, and runs nothing (-n)."""
    said = (ask_bash('said=$(bash --norc -n <<< "$1" 2>&1) || echo "$said"', text) or "").strip().splitlines()
    if said:
        found = re.fullmatch(r".*?: line (\d+): (.*)", said[0])
        where, message = (f"{path}:{found[1]}", found[2]) if found is not None else (str(path), said[0])
        raise ConfigError(f"this is no Bash: {message}", where=where, hint="mend it, or use megatron_lm.args")


def _training(path: Path, script: Script) -> Started | None:
    """The training that a launcher starts; None if it starts none."""
    found = {tuple(each.words): each for each in script.found.launched}
    if len(found) < 2:
        return next(iter(found.values()), None)
    lines = ", ".join(sorted({each.where.rpartition(":")[2] for each in found.values()}, key=int))
    raise ConfigError(
        f"training starts {len(found)} times, in lines {lines}: a run is one of them",
        where=path,
        hint="give the variables that decide, as in --env NAME=VALUE, or take the others out",
    )


def _words_of_arrays(path: Path, script: Script) -> list[str]:
    found = [
        script.values(name) if isinstance(value, dict) else value.split()
        for name, value in script.variables.items()
        if name.endswith("_ARGS") and name not in script.before and (isinstance(value, dict) or name != "DATA_ARGS")
    ]
    if not found:
        raise ConfigError(
            "this file starts no training, and has no array of flags",
            where=path,
            hint="name a launcher that starts pretrain_*.py, or write NAME_ARGS=( --flag value ... )",
        )
    return [word for words in found for word in words]


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)(^|[ \t])#.*$", lambda found: found[1] + " " * (len(found[0]) - len(found[1])), text)


def _place(path: Path, plain: str, word: str, training: Started | None) -> str:
    """`FILE:LINE` of a flag: the line that writes it, or that of the training."""
    name = word.partition("=")[0]
    found = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", plain) if name.startswith("--") else None
    if found is not None:
        return f"{path}:{line_number(plain, found.start())}"
    return str(path) if training is None else training.where


def _folders(script: Script, flag: Flag) -> Iterator[str]:
    """The folders whose shards the earlier system's program lists for a flag."""
    for unknown in script.unknowns(" ".join(flag.values)):
        words = list(unknown.command)
        if flag.name.endswith("data-path") and any(word.endswith(_DATA_PROGRAM) for word in words):
            yield from filter(None, ",".join(words[words.index("-p") + 1 :] if "-p" in words else []).split(","))


def _refuse_unknown(script: Script, found: list[Flag], hints: Mapping[str, str]) -> None:
    """Raise ConfigError for flags with a value that only a job knows."""
    errors = []
    for flag in found:
        unknown = script.unknowns(" ".join((flag.name, *flag.values)))
        if not unknown or (flag.name in REPLACED_FLAGS and len(flag.values) == 1):
            continue  # a second value may be any flag
        words, hint = _why_unknown(script, unknown[0], hints)
        errors.append(ConfigError(f"--{MARK.sub('...', flag.name)}: {words}", where=unknown[0].where, hint=hint))
    if errors:
        raise errors[0] if len(errors) == 1 else combined_error(errors, "values of the launcher are not known here")


def _why_unknown(script: Script, unknown: UnknownValue, hints: Mapping[str, str]) -> tuple[str, str]:
    if (name := unknown.unset) and name in hints:
        return f"${name} has no value: set {hints[name]}, or write the value itself", f"set {hints[name]}"
    if name:
        near = did_you_mean(name, [*script.variables, *script.defaults], most=1)
        hint = "give it behind the launcher" if name.isdigit() else f"give it: {name}=VALUE in the environment"
        return f"${name} has no value{'; ' + near if near else ''}", hint
    return unknown.words, "write the value itself"
