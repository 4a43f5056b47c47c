"""Check a run with Megatron-LM: its checkout, whether the checkout takes the flags, and the launcher that holds them.

No line of the launcher (`megatron_lm.args_file`) runs except its arrays; a constant or an #SBATCH line that differs
from the run is an error.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.config.compose.megatron_flags import FLAG_OF_SETTING
from relayrun.config.compose.schema import DataSection, MegatronConfig, RunConfig, TrainingSection
from relayrun.config.sections.batch_systems import SETTINGS_INSTEAD
from relayrun.control.chain import job_script
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.errors import URL_WRITE_HINT, RelayrunError, why_url_is_refused
from relayrun.masking import SECRET_WORD
from relayrun.slurmtime import parse_time
from relayrun.submit.check.findings import Findings, count_noun
from relayrun.submit.launcher_overrides import PROFILER_VARIABLE, setting_variables
from relayrun.submit.megatron_lm import flags
from relayrun.submit.megatron_lm.bash_values import MARK
from relayrun.submit.megatron_lm.checkout import ask_parser
from relayrun.submit.megatron_lm.command_line import CommandLine, command_line, config_launcher, launcher_variables
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.submit.megatron_lm.launcher_file import Launcher
from relayrun.submit.sbatch_header import CHAIN_OPTIONS, option_words, sbatch_options

LAUNCHER_FINDING = "megatron_lm.launcher"

ATTEMPT_VARIABLES = re.compile(
    r"MASTER_(ADDR|PORT)|WORLD_SIZE|(LOCAL_|NODE_)?RANK|(PYTHON|LD_LIBRARY_|LIBRARY_|C)?PATH"
    r"|TORCH_NCCL_AVOID_RECORD_STREAMS"
)
"""Variables that an attempt sets, or that are put together from several; and one that torch ignores since 2.8."""


def check_launcher_file(
    config: MegatronConfig,
    plan: Plan,
    run: Run,
    script: str | Path | None,
    adopted: Mapping[str, str],
    findings: Findings,
) -> None:
    """Refuse every constant and every option of sbatch of the file that is not what runs.

    `script`: as for `report`; with the path of a launcher its own header holds. `adopted`: options of the job that this
    runs in, if it is to become the first of the chain.
    """
    if config.megatron_lm.args_file is None:
        return
    file, before = Path(config.megatron_lm.args_file), len(findings.errors)
    try:
        _check_constants(config, plan, run, file, findings)
    except RelayrunError:  # of the arrays, said already
        return
    rendered = sbatch_options(
        job_script.job_script(plan, run) if script is None or isinstance(script, Path) else script
    )
    header = {name: value for name, (value, _) in rendered.items()}
    if isinstance(script, Path):
        header |= {name: value for name, (value, _) in sbatch_options(script.read_text(encoding="utf-8")).items()}
    _check_header(config, plan, file, header | dict(adopted), findings)
    if len(findings.errors) == before:
        findings.ok(LAUNCHER_FINDING, f"constants and #SBATCH lines of {file} say what runs, but for those named here")


def _check_constants(config: MegatronConfig, plan: Plan, run: Run, file: Path, findings: Findings) -> None:
    variables, merged = launcher_variables(config, run), command_line(config, run).merged
    settings = setting_variables(config.trainer) | {
        PROFILER_VARIABLE: "debug.profile=nsys",
        "CMD_PREFIX": "cluster.command_prefix",
    }
    runs: dict[str, str] = {name: variables.get(name, "") for name in settings} | {
        PROFILER_VARIABLE: str(config.debug.profile == "nsys").lower(),
        "CMD_PREFIX": shlex.join(config.cluster.command_prefix),
        "CLUSTER": config.cluster.name,
    }
    for name, setting in settings.items():
        if (found := merged.find(FLAG_OF_SETTING.get(setting, ""))) is not None:
            runs[name] = " ".join(found.values) or "true"
    if config.data is not None and config.data.mixture:
        settings.pop("MIXTURE")  # a file, whose data sets are in the config by now
    site = plan.environment
    ranks = os.environ | job_script.rank_defaults(str(plan.cpus_per_task), trainer=plan.trainer, site=site) | site
    launcher = config_launcher(config, run)
    folders = {name for name in variables if name.endswith("_DIR")} - set(settings)
    for name, value in launcher.variables.items():
        where = launcher.where(name)
        if name in settings:
            _compare_constant(name, value, runs[name], settings[name], where, findings)
        elif name in folders and value is not None and value.startswith("/") and _is_literal(launcher, name):
            _compare_constant(name, value, variables[name], "run_dir", where, findings)
    for name, value in launcher.environment.items():
        known = None if MARK.search(value) else value
        if name not in settings and not ATTEMPT_VARIABLES.fullmatch(name) and (known is not None or name not in ranks):
            where = launcher.where(name)
            _compare_constant(name, known, ranks.get(name), f"cluster.environment.{name}", where, findings)
    for name, setting in settings.items():
        given, flag = os.environ.get(name, ""), merged.find(FLAG_OF_SETTING.get(setting, ""))
        if given and flag is not None and flag.source.startswith(f"{file}:") and not _is_same_value(given, runs[name]):
            words = f"{name}={given} is given, and this file says {flag.text}"
            remedy = f"leave {name} empty, or change the file"
            findings.refuse(LAUNCHER_FINDING, words, where=flag.source, remedy=remedy)


def _is_literal(launcher: Launcher, name: str) -> bool:
    """Return whether a folder is written out, and not put together from other variables."""
    found = re.findall(rf"(?m)(?<![\w$]){name}=[\"']?([^\s\"']*)", launcher.text)
    return bool(found) and re.search(r"\$(?!\{?(USER|HOME)\b)", found[-1]) is None


def _compare_constant(
    name: str, yours: str | None, runs: str | None, setting: str, where: str, findings: Findings
) -> None:
    if yours == "" or (yours is not None and runs is not None and _is_same_value(yours, runs)):
        return  # an empty one is as in the config
    hidden = SECRET_WORD.search(name) is not None
    has = f"the run has {'no ' + setting if not runs else 'another' if hidden else runs}"
    if yours is None:
        words = f"{name} is computed, and no line of this file runs: {has}"
        remedy = f"write its value here; {setting} sets that of the run"
    else:
        words = f"{name}={'***' if hidden else yours} is not what runs: {has}"
        variable = "" if setting.startswith("cluster.") else f" ({name})"
        remedy = f"set {setting}{variable}, or let this line say what runs"
    findings.refuse(LAUNCHER_FINDING, words, where=where, remedy=remedy)


def _is_same_value(yours: str, runs: str) -> bool:
    if yours.lower() in ("true", "false"):
        return yours.lower() == (runs or "false")
    root = places.project_folder() if runs.startswith("/") else ""  # a relative path is one of the project's
    parts = [[os.path.normpath(os.path.join(root, part.strip())) for part in text.split(",")] for text in (yours, runs)]
    return parts[0] == parts[1] or flags.are_same_values(yours.split(), runs.split())


def _check_header(
    config: MegatronConfig, plan: Plan, file: Path, header: dict[str, str | None], findings: Findings
) -> None:
    job = config.job
    given: dict[str, str | None] = {
        "ntasks": str(job.nodes * job.ntasks_per_node),
        "gpus": str(job.nodes * job.gpus_per_node),
        "gres": f"gpu:{job.gpus_per_node}",
        "gpus-per-node": str(job.gpus_per_node),
        "gpus-per-task": f"{job.gpus_per_node / job.ntasks_per_node:g}",
    }
    given |= {name: value for name, (value, _) in option_words(plan.srun_options, 0)} | header
    for name, (yours, line) in sbatch_options(file.read_text(encoding="utf-8")).items():
        said = f"--{name}" + ("" if yours is None else f"={yours}")
        if name in CHAIN_OPTIONS:
            words = f"{said} is the chain's own, and is left out: {SETTINGS_INSTEAD[name]}"
            findings.ok(LAUNCHER_FINDING, f"{file}:{line}: {words}")
        elif name not in given or not _is_same_option(name, yours, given[name]):
            has = "no such option" if name not in given else given[name] or "it without a value"
            container = "set cluster.container={runtime: edf, image: ...}"
            how = container if name == "environment" else SETTINGS_INSTEAD.get(name, f"set job.sbatch={{{name}: ...}}")
            words = f"{said} is not what runs: the run has {has}"
            where = f"{file}:{line}"
            findings.refuse(LAUNCHER_FINDING, words, where=where, remedy=f"{how}, or let this line say what runs")


def _is_same_option(name: str, yours: str | None, runs: str | None) -> bool:
    if yours is None or runs is None:
        return yours == runs
    return _canonical_option(name, yours) == _canonical_option(name, runs) or flags.are_same_values([yours], [runs])


def _canonical_option(name: str, value: str) -> Any:
    try:
        if name == "time":
            return parse_time(value)
        if name == "mem" and (found := re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.I)) is not None:
            return int(found[1]) << 10 * "KMGT".index((found[2] or "M").upper())
    except ValueError:
        pass
    return value


_FLAGS_THAT_WRITE = frozenset(
    {"data-cache-path", "tensorboard-dir", "wandb-save-dir", "memory-snapshot-path"}
    | {f"non-persistent-{kind}-ckpt-dir" for kind in ("global", "local")}
)
"""Flags that name a place that Megatron-LM writes to, and makes as a local folder; of URLs it knows msc:// alone."""


def check_megatron_lm(config: MegatronConfig, findings: Findings, *, contained: bool) -> None:
    """Look at the program of the checkout and at its flags. `contained`: the ranks' Python is in a container."""
    _check_program(config, findings)
    with findings.catching("megatron_lm.flags"):
        line = command_line(config, Run(Path(config.run_dir or "")))
        _check_flags(config, line, findings, contained=contained)
        _check_chain_flags(config, line, findings)


def _check_flags(config: MegatronConfig, line: CommandLine, findings: Findings, *, contained: bool) -> None:
    name = "megatron_lm.flags"
    for flag in line.merged.flags:
        for value in flag.values if flag.name in _FLAGS_THAT_WRITE else ():
            if (url := why_url_is_refused(value)) is not None and not value.startswith("msc://"):
                findings.refuse(name, f"{flag.text}: {url}", where=flag.source, remedy=URL_WRITE_HINT)
    for note in line.notes:
        findings.ok("megatron_lm.args", note)
    program = config.megatron_lm.program
    said = ask_parser(
        line.checkout,
        line.merged.flags,
        python=config.cluster.rank_python,
        in_container=contained,
        program=program,
        environment=job_script.rank_defaults(
            str(config.job.cpus_per_task), trainer=config.trainer, site=config.cluster.environment
        )
        | config.cluster.environment
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config.world_size)},
    )
    for refusal in said.refusals:
        tell = findings.refuse if said.certain else findings.warn
        tell(name, refusal.words, where=refusal.source, remedy=refusal.hint)
    number, version = count_noun(len(line.merged.flags), "flag"), line.checkout.version
    if not said.certain:
        how = f"its own parser could not be asked ({said.unavailable}), so its text was searched for {number}"
        findings.skip(name, f"{version}: {how}; the job asks the parser, and ends the chain where it refuses one")
    elif not said.refusals:
        tell, together = findings.ok, "and its validation takes them together"
        if said.lacking:
            together += f", without {', '.join(said.lacking)}, whose package this machine lacks"
        if said.unjudged is not None:
            tell, together = findings.skip, f"its validation of them together was not asked ({said.unjudged})"
        tell(name, f"{version}: its own parser takes all {number}, {together}")


def _check_chain_flags(config: MegatronConfig, line: CommandLine, findings: Findings) -> None:
    """Warn of flags with which the chain cannot do all of its work."""
    if line.merged.find("profile") is not None and line.checkout.dialect is MegatronDialect.SWISS_AI:
        words = (
            "with --profile this checkout takes no signal: relayrun asks it by its own files; where Slurm alone asks, "
            "the attempt does not save, and the next one goes on from its last checkpoint"
        )
        remedy = "profile in a run of its own, with checkpoint.interval below what may be lost"
        findings.warn("megatron_lm.profile", words, setting="debug.profile", remedy=remedy)
    stages, impl = line.merged.find("pipeline-model-parallel-size"), line.merged.find("transformer-impl")
    norm_first = line.merged.find("post-layer-norm") or line.merged.find("multi-latent-attention")
    norm_first = impl if impl is not None and impl.values == ("local",) else norm_first
    swiss_stages = line.checkout.dialect is MegatronDialect.SWISS_AI and stages is not None and stages.values != ("1",)
    if norm_first is not None and swiss_stages:
        words = f"with {norm_first.text} on several pipeline stages, this checkout swaps the weight decay of norms and "
        words += "matrices of the later stages when it loads"
        remedy = "take one pipeline stage, or NVIDIA's core 0.16; `relayrun help megatron-flags` says why"
        findings.warn("megatron_lm.weight_decay", words, where=norm_first.source, remedy=remedy)
    interval = line.merged.find("log-interval")
    if interval is not None and interval.values != ("1",):
        words = (
            f"{interval.text}: the chain sees only those iterations, and chain.hang_timeout must be longer than the "
            "time between two of them"
        )
        findings.warn("megatron_lm.log", words, where=interval.source, remedy="leave log-interval out")
    if twice := line.repeated_saves:
        words = f"iteration {twice[0]} is saved twice, over itself: by --save-interval, and before the batch size grows"
        remedy = "take an interval that no step of the ramp ends with"
        findings.warn("megatron_lm.save", words, setting="checkpoint.interval", remedy=remedy)


def _check_program(config: MegatronConfig, findings: Findings) -> None:
    folder, program = Path(config.megatron_lm.dir), config.megatron_lm.program
    if not (folder / program).is_file():
        programs = ", ".join(sorted(path.name for path in folder.glob("pretrain_*.py")))
        words = f"{folder} has no {program}"
        remedy = f"it has {programs}" if programs else None
        findings.refuse("megatron_lm.program", words, setting="megatron_lm.program", remedy=remedy)


_END_OF_DOCUMENT_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def as_native_config(config: MegatronConfig, findings: Findings) -> RunConfig | None:
    """Return what the flags of a run say that it reads, as a config of the native trainer says it; else None.

    It is no whole config: it has the sections `data` and `training`, and of the latter what is known; a sequence of one
    token says that no length is.
    """
    try:
        merged = command_line(config, Run(Path(config.run_dir or ""))).merged
    except RelayrunError:  # said already
        return None
    if merged.find("mock-data") is not None:
        findings.ok("data.shards", "made-up tokens: nothing is read", setting="data.mock_data")
        return None
    shards, model = merged.find("data-path") or merged.find("train-data-path"), merged.find("tokenizer-model")
    kind = merged.find("tokenizer-type")
    files = merged.find("data-args-path") or merged.find("per-split-data-args-path")
    other = files or (None if kind is None or kind.values == ("HuggingFaceTokenizer",) else kind)
    sets = {name: merged.find(f"{name}-data-path") for name in ("valid", "test")}
    held_out = {name: _prefixes_of_flag(given) for name, given in sets.items() if given is not None}
    if shards is None or model is None or not model.values or other is not None:
        why = "no flag names both" if other is None else f"{other.text} of {other.source}"
        findings.skip("data.tokenizer", f"shards and their tokenizer are not compared: {why}")
        return None
    data = config.data
    if data is None or not shards.source.startswith("data."):
        if urls := [
            word for words in (_prefixes_of_flag(shards), *held_out.values()) for word in words if "://" in word
        ]:
            findings.skip("data.tokenizer", f"shards and their tokenizer are not compared: {urls[0]} is a URL")
            return None
        own = {} if data is None else {name: getattr(data, name) for name in ("allow_other_tokenizer", "max_epochs")}
        words = [glob.escape(word) for word in _prefixes_of_flag(shards)]  # which Megatron-LM takes for no pattern
        data = DataSection.model_construct(datasets=words, validation=held_out, **own)
    if (split := merged.find("split")) is not None and (parts := re.findall(r"[.\d]+", "".join(split.values))):
        first, *rest = map(float, parts)
        data = data.model_copy(update={"split": sum(rest) / (first + sum(rest)) if first else data.split})
    said = {name: merged.find(name.replace("_", "-")) is not None for name in _END_OF_DOCUMENT_FLAGS}
    data = data.model_copy(update={"tokenizer": model.values[0], **said})
    names = ("steps", "micro_batch_size", "global_batch_size", "seq_length")
    found = {name: merged.find(FLAG_OF_SETTING[f"training.{name}"]) for name in names}
    numbers = {name: int(flag.values[0]) for name, flag in found.items() if flag and "".join(flag.values).isdecimal()}
    training = TrainingSection.model_construct(**{"seq_length": 1} | dict(config.training or {}) | numbers)
    return RunConfig.model_construct(trainer=config.trainer, data=data, training=training)


def _prefixes_of_flag(found: Flag) -> list[str]:
    """The words of a flag that are no weights."""
    return [word for word in found.values if re.fullmatch(r"[\d.]+([eE][-+]?\d+)?", word) is None]


def has_known_length(read: RunConfig) -> bool:
    """Return whether the flags say how much is read: the number of sequences, and their length."""
    return read.training.seq_length > 1 and {"steps", "global_batch_size"} <= read.training.model_fields_set
