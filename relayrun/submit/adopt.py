"""Turns an existing launcher of Megatron-LM into a run config, line by line: taken, replaced for a reason, or an error.

found = adopt(Path("train.sbatch"), {"MODEL": "8b"}, site="alps")
found.settings, found.rows, found.errors
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayrun.config.compose import sites
from relayrun.config.sections.base import NAME_PATTERN
from relayrun.errors import ConfigError
from relayrun.masking import SECRET_WORD
from relayrun.submit.megatron_lm.bash_builtins import PROGRAM
from relayrun.submit.megatron_lm.bash_values import MARK
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.submit.megatron_lm.launcher_file import (
    REPLACED_FLAGS,
    SECRET_HINT,
    Launcher,
    read_launcher,
    secret_words,
    without_secrets,
)
from relayrun.submit.sbatch_header import (
    SHORT_OPTIONS,
    Adopted,
    refuse_other_options,
    sbatch_options,
    section,
    take_header,
)

_CHAIN_VARIABLES = re.compile(r"MASTER_(ADDR|PORT)|WORLD_SIZE|(LOCAL_|NODE_)?RANK")
_SRUN_SWITCHES = re.compile(r"-[luKs]+|--(label|unbuffered|exclusive|overlap|no-kill|exact|overcommit|pty)")
_SRUN_OWN = re.compile(
    r"[luK]+|label|unbuffered|nodes|ntasks|ntasks-per-node|overlap|cpus-per-task|gpus-per-node|kill-on-"
    r"bad-exit|wait|output|error|job-name|exclusive"
)
"""Options of srun for ranks, which the chain starts itself."""
_RANK_STARTERS = re.compile(r"(?:.*/)?(?:torchrun|torch\.distributed\.(?:run|launch))")
_PER_JOB = re.compile(r"\$(\w+) has a value in a job alone")
_OF_A_RANK = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK"}


def adopt(path: Path, environment: Mapping[str, str], *, site: str, checkout: str | None = None) -> Adopted:
    """Adopt the launcher at `path`. Raises ConfigError if it cannot be followed.

    `environment`: its variables, arguments as 1, 2 and so on. `site`: the run's `cluster`. `checkout`: not its own one.
    """
    header = sbatch_options(path.read_text(encoding="utf-8", errors="replace"))
    folder = {"PWD": header["chdir"][0] or ""} if "chdir" in header else {}  # as Slurm sets it
    launcher = read_launcher(path, _job_variables(header) | dict(environment) | folder)
    if launcher.training is None:
        raise ConfigError("this file starts no training", where=path, hint="ARGS_FILE takes a file of arrays alone")
    found = Adopted({"project": "", "name": "", "trainer": "megatron-lm", "cluster": site})
    _take_names(launcher, header, found)
    _take_program(launcher, found, checkout)
    take_header(path, header, found)
    _take_words_before(launcher, found)
    _take_flags(launcher, found)
    _take_environment(launcher, found)
    _take_other_lines(launcher, header, found)
    inert = {name: value for name, value in found.settings.get("job", {}).items() if name != "setup"}
    for name, shown in without_secrets(environment)[1].items():
        if shown in str(found.settings | {"job": inert}):  # Bash expands it in `job.setup`
            found.refuse(str(path), secret_words(name), SECRET_HINT)
    _with_site(found, sites.read_site(site, folders=sites.site_folders(None), where="--cluster").values)
    return found


def _job_variables(header: Mapping[str, tuple[str | None, int]]) -> dict[str, str]:
    """The variables in which Slurm tells a job its options."""
    given = {name: value for name, (value, _) in header.items() if value is not None}
    number = {name: value for name, value in given.items() if value.isdigit()}
    nodes, tasks = number.get("nodes", None if {"nodes", "ntasks"} & {*given} else "1"), number.get("ntasks-per-node")
    total = number.get("ntasks") or (str(int(nodes) * int(tasks)) if nodes and tasks else None)
    names = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": total,
        "SLURM_NPROCS": total,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_CPUS_PER_TASK": number.get("cpus-per-task"),
        "SLURM_GPUS_PER_NODE": number.get("gpus-per-node"),
        "SLURM_JOB_NAME": given.get("job-name"),
        "SLURM_JOB_PARTITION": given.get("partition"),
    }
    return {name: value for name, value in names.items() if value is not None and "," not in value}


def _take_names(launcher: Launcher, header: Mapping[str, tuple[str | None, int]], found: Adopted) -> None:
    flags = {flag.name: MARK.sub("", " ".join(flag.values)).rstrip("-_") for flag in launcher.flags}
    job_name = re.sub(r"%.", "", header.get("job-name", (None, 0))[0] or "")
    variables = {name: launcher.script.variables.get(name) for name in ("PROJECT_NAME", "EXP_NAME")}
    wanted = {
        "project": (flags.get("wandb-project"), variables["PROJECT_NAME"], "adopted"),
        "name": (flags.get("wandb-exp-name"), variables["EXP_NAME"], job_name, launcher.path.stem),
    }
    for setting, given in wanted.items():
        value = next(each for each in given if isinstance(each, str) and each and not MARK.search(each))
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")
        found.settings[setting] = plain if re.match(NAME_PATTERN, plain) else "adopted"
        found.row("", value, f"{setting}: {found.settings[setting]}")


def _take_program(launcher: Launcher, found: Adopted, checkout: str | None) -> None:
    assert launcher.training is not None
    program, where = launcher.training.words[launcher.training.program], launcher.training.where
    folder, _, name = program.rpartition("/")
    if checkout is None and (MARK.search(program) or not folder.startswith("/")):
        words = f"the folder of {name} is not known here: {MARK.sub('...', program)}"
        found.refuse(where, words, "give --checkout FOLDER")
    own = section(found, "megatron_lm")
    own["dir"] = checkout or folder
    if name != "pretrain_gpt.py":
        own["program"] = name
    found.row(where, MARK.sub("...", program), f"megatron_lm.dir: {own['dir']}", "--checkout" if checkout else "")


def _take_words_before(launcher: Launcher, found: Adopted) -> None:
    """The words in front of the program: srun with its options, variables, torchrun and wrappers."""
    assert launcher.training is not None
    where, words = launcher.training.where, launcher.training.words[: launcher.training.program]
    cluster, prefix = section(found, "cluster_settings"), list[str]()
    if words and re.fullmatch(r"(?:.*/)?srun", words[0]):
        words = words[1:]
        while words and words[0].startswith("-"):
            option, *words = words
            if "=" not in option and not _SRUN_SWITCHES.fullmatch(option) and words and not words[0].startswith("-"):
                option, words = f"{option}={words[0]}", words[1:]
            name = option.lstrip("-").partition("=")[0]
            name = SHORT_OPTIONS.get(name, name) if option[1] != "-" else name
            if _SRUN_OWN.fullmatch(name):
                found.row(where, f"srun {option}", "the chain's own", "it starts the ranks and their logs itself")
            else:
                cluster.setdefault("srun_options", []).append(option)
                found.row(where, f"srun {option}", "cluster.srun_options")
    while words:
        word, *words = words
        if _RANK_STARTERS.fullmatch(word):
            words = _take_starter(word, words, where, found)
        elif re.fullmatch(r"(?:.*/)?python[\d.]*", word):
            rest = [each for each in words if each not in ("-u", "-m") and not _RANK_STARTERS.fullmatch(each)]
            words = words if rest != words and "-m" in words else rest
            if "container" in cluster:
                cluster["python"] = word
            found.row(where, word, "cluster.python", "" if "container" in cluster else "the Python of the run's site")
        elif word not in ("env", "exec", "nohup", "time", "-u", "-m"):
            prefix.append(word)
    if unknown := launcher.script.unknowns(" ".join(prefix)):
        found.refuse(where, f"a word in front of the program: {unknown[0].words}", "write the value itself")
    if prefix:
        cluster["command_prefix"] = prefix if "=" not in prefix[0] else ["env", *prefix]
        found.row(where, shlex.join(prefix), "cluster.command_prefix")


def _take_starter(word: str, words: list[str], where: str, found: Adopted) -> list[str]:
    """Take the options of torchrun: the chain starts as many ranks itself."""
    job = section(found, "job")
    while words and words[0].startswith("-"):
        option, *words = words
        name, equals, value = option.lstrip("-").replace("-", "_").partition("=")
        if not equals and words and not words[0].startswith("-"):
            value, *words = words
        shown = f"{word} {option} {MARK.sub('...', value)}"
        if name == "nproc_per_node" and value.isdigit():
            tasks = int(job.get("ntasks_per_node", 1))
            job["cpus_per_task"] = max(1, int(job.get("cpus_per_task", 1)) * tasks // int(value))
            job["ntasks_per_node"] = int(value)
            found.row(where, f"{word} {option}", f"job.ntasks_per_node: {value}", "each rank is a task of the chain")
        elif name == "nnodes" and value.isdigit() and job.setdefault("nodes", int(value)) != int(value):
            found.refuse(where, f"{shown} is not the number of nodes, {job['nodes']}", "let both say the same")
        elif name in ("nproc_per_node", "no_python", "module", "m"):
            found.refuse(where, f"{shown} is not taken", "write a number")
        else:
            found.row(where, shown, "the chain's own", "it starts the ranks itself")
    return words


def _take_flags(launcher: Launcher, found: Adopted) -> None:
    flags: dict[str, Flag] = {}
    for flag in launcher.flags:
        if flag.name in flags:
            found.row(flags[flag.name].source, flags[flag.name].text, "no effect", f"{flag.text} stands behind it")
        flags[flag.name] = flag
    args: dict[str, Any] = {}
    section(found, "megatron_lm")["args"] = args
    _take_checkpoint(flags, found)
    if launcher.datasets is not None:
        _take_data(launcher, flags, found)
    for name, flag in flags.items():
        if name == "tensorboard-dir":
            section(found, "tracking")["tensorboard"] = True
        if name in REPLACED_FLAGS:
            found.row(flag.source, MARK.sub("...", flag.text), "the run's own", REPLACED_FLAGS[name])
        elif name in ("exit-signal-handler", "exit-signal"):
            found.row(flag.source, flag.text, "the chain's own", "it asks the ranks to save and leave by a signal")
        elif name == "ckpt-step":
            found.refuse(flag.source, f"{flag.text} would hold at every start", "use checkpoint.load: RUN:ITERATION")
        else:
            values = [int(v) if re.fullmatch(r"0|-?[1-9]\d{0,17}", v) else v for v in flag.values]
            args[name] = True if not values else values[0] if len(values) == 1 else values
            found.row(flag.source, flag.text, "megatron_lm.args")


def _take_checkpoint(flags: dict[str, Flag], found: Adopted) -> None:
    """`--save` and `--load`: a folder of the run, and what a new run begins with."""
    save, load = flags.get("save"), flags.get("load")
    folder = " ".join(save.values) if save is not None else ""
    if folder.startswith("/") and not MARK.search(folder) and not Path(folder).parent.exists():
        found.settings["run_dir"] = str(Path(folder).parent)
        found.row(save.source if save else "", f"--save {folder}", f"run_dir: {Path(folder).parent}")
    if load is None or (save is not None and load.values == save.values):
        for name in ("finetune", "no-load-rng", "no-load-optim"):
            if name in flags and load is not None:
                words = f"--{name} would hold at every start"
                found.refuse(flags[name].source, words, "set checkpoint.load, or drop it")
        return
    interval = flags.pop("save-interval", None)
    number = "".join(interval.values).replace("_", "") if interval is not None else ""
    if MARK.search(" ".join(load.values)) or not number.isdigit():
        found.refuse(load.source, f"{MARK.sub('...', load.text)} is not taken", "write a folder, and --save-interval")
        return
    own: dict[str, Any] = {"interval": int(number), "load": load.values[0], "async_save": "async-save" in flags}
    found.row(interval.source if interval is not None else "", f"--save-interval {number}", "checkpoint.interval")
    for name in ("finetune", "no-load-optim"):
        if (switch := flags.pop(name, None)) is not None:
            own[name.replace("-", "_")] = True
            found.row(switch.source, switch.text, f"checkpoint.{name.replace('-', '_')}")
    if (flag := flags.pop("no-load-rng", None)) is not None:
        if "finetune" not in own:
            found.refuse(flag.source, "--no-load-rng would hold at every start", "add --finetune, or drop it")
        found.row(flag.source, flag.text, "checkpoint.finetune", "random numbers begin anew with it")
    found.settings["checkpoint"] = own
    found.row(load.source, load.text, "checkpoint.load", "for a run without checkpoints of its own")


def _take_data(launcher: Launcher, flags: dict[str, Flag], found: Adopted) -> None:
    model = flags.get("tokenizer-model")
    if model is None or len(model.values) != 1:
        found.refuse(str(launcher.path), "no --tokenizer-model says what the shards hold", "add it")
        return
    data = section(found, "data")
    data |= {"tokenizer": model.values[0], "datasets": launcher.datasets}
    found.row("", ",".join(launcher.datasets or ()), "data.datasets", "shards are listed at each submit")
    flags.setdefault("split", Flag(name="split", values=("969,30,1",), source=""))
    if (cache := flags.pop("data-cache-path", None)) is not None and "".join(cache.values).startswith("/"):
        data["data_cache_dir"] = cache.values[0]
        found.row(cache.source, cache.text, "data.data_cache_dir")
    elif cache is not None:
        found.refuse(cache.source, f"{cache.text} is a relative folder", "write it from /")


def _take_environment(launcher: Launcher, found: Adopted) -> None:
    cluster, shell, folder = section(found, "cluster_settings"), list[str](), found.settings["megatron_lm"]["dir"]
    own = launcher.script.variables.get("MEGATRON_LM_DIR")
    for name, value in launcher.environment.items():
        where, shown = launcher.where(name), MARK.sub("...", value)
        if _CHAIN_VARIABLES.fullmatch(name):
            found.row(where, f"{name}={shown}", "the chain's own", "it sets the ranks and their meeting point")
        elif re.search(rf"(?:^|[\s/]){PROGRAM.pattern}|torchrun|torch\.distributed", value):
            found.row(where, f"{name}={shown[:80]}", "the command itself", "a part of what the chain starts")
        elif SECRET_WORD.search(name):
            found.row(where, f"{name}=***", "the environment of the submit", "no file holds a secret: export it there")
        elif name == "PYTHONPATH" and MARK.sub("", value).strip(":") in (folder, own):
            found.row(where, f"{name}={shown}", "the program's folder", "Python begins there")
        elif not MARK.search(value):
            cluster.setdefault("environment", {})[name] = value
            found.row(where, f"{name}={value}", "cluster.environment")
        else:
            text = _expression(launcher, value)
            if text is None:
                words = launcher.script.unknowns(value)[0].words
                found.refuse(where, f"{name}={shown}: {words}", "write the value, or unset it")
            else:
                shell.append(f'export {name}="{text}"')
                found.row(where, f"{name}={text}", "cluster.command_prefix", "a value of each rank")
    if shell:
        lines = "; ".join([*shell, 'exec "$@"'])
        cluster["command_prefix"] = ["bash", "-c", lines, "rank", *cluster.get("command_prefix", [])]


def _expression(launcher: Launcher, value: str) -> str | None:
    """A value with its variables that only a rank knows, for Bash; None if something else is unknown."""
    names = [_PER_JOB.fullmatch(unknown.words) for unknown in launcher.script.unknowns(value)]
    plain = re.sub(r'([\\"$`])', r"\\\1", value)
    if not all(names) or not all(re.fullmatch(r"\w+", each[1]) for each in names if each):
        return None
    variables = iter([_OF_A_RANK.get(each[1], each[1]) for each in names if each])
    return MARK.sub(lambda _: f"${{{next(variables)}}}", plain)


def _take_other_lines(launcher: Launcher, header: Mapping[str, tuple[str | None, int]], found: Adopted) -> None:
    script = launcher.script
    for where, line in script.found.setup:
        if MARK.search(line):
            found.refuse(where, f"{MARK.sub('...', line)}: a value is not known here", "write the value itself")
            continue
        section(found, "job").setdefault("setup", []).append(line)
        found.row(where, line, "job.setup")
    for where, line in script.found.ignored:
        found.row(where, MARK.sub("...", line), "not run", "the chain has signals and clean-up of its own")
    for other in script.found.others:
        line = MARK.sub("...", " ".join(other.words))
        if other.words[0] == "sbatch" or " ".join(other.words[:2]) == "scontrol requeue":
            section(found, "chain")["auto_requeue"] = True
            found.row(other.where, line, "chain.auto_requeue", "a successor behind every job")
            refuse_other_options(other.where, other.words[1:], header, found)
        elif other.words[0] not in ("mkdir", "cat", "basename", "dirname"):
            found.row(other.where, line if len(line) < 80 else line[:77] + "...", "not run", "it trains nothing")
    for note in script.notes:
        found.row(note.partition(": ")[0], note.partition(": ")[2], "as it is here", "a file's test, read once")


def _with_site(found: Adopted, site: Mapping[str, Any]) -> None:
    """Put the settings of the launcher over those of the site's file."""
    own = found.settings.pop("cluster_settings", {})
    if own:
        environment = {**(site.get("environment") or {}), **own.pop("environment", {})}
        found.settings["cluster"] = {**site, "environment": environment, **own}
