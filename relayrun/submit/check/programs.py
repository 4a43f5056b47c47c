"""Check the programs that a run starts on its nodes: Pythons and their packages, modules, and a user's own command.

What a container holds, or what a program does, cannot be known before it runs; the findings say so.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relayrun.config.compose.schema import CommandConfig, CommonConfig, MegatronConfig, RunConfig
from relayrun.config.sections.batch_systems import batch_system
from relayrun.config.sections.notify import VARIABLE_PATTERN
from relayrun.control.notify.notices import NoticeTarget
from relayrun.control.trainers.command import PLACEHOLDERS
from relayrun.errors import ConfigError
from relayrun.submit.check import megatron_lm, rehearsal
from relayrun.submit.check.findings import Findings
from relayrun.submit.check.rehearsal import ANSWER_SECONDS, run_python, runs_in_container, search_path, user_modules
from relayrun.submit.run_plan import fill_in_python
from relayrun.train import megatron_versions
from relayrun.watch.send_notices import INSTALL_HINT, NoticeSendError, check_target

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_PYTHON = re.compile(r"python[\d.]*")


def _check_program(config: CommandConfig, findings: Findings) -> None:
    name, setting = "command.program", "command.run"
    words = fill_in_python(config, config.command.run)
    program = words[0]
    if runs_in_container(config):
        findings.skip(name, f"{program} runs in a container: what it holds is not known from here")
        return
    if shutil.which(program) is None:
        changed = config.cluster.modules or config.job.setup or "PATH" in config.cluster.environment
        how = findings.warn if changed and "/" not in program else findings.refuse
        missing = not Path(program).exists() if "/" in program else True
        what = "there is no such program here" if missing else "this cannot be executed"
        if missing and any(blank in program for blank in " \t"):
            what += ", and no shell reads the command: every word is one of the list"
        how(name, f"{program}: {what}", setting=setting, value=program, remedy="give the program by its path")
        return
    script = words[1] if len(words) > 1 else ""
    if _PYTHON.fullmatch(Path(program).name) and script.endswith(".py") and not Path(script).is_file():
        remedy = "give its path, from the folder that holds `launchers/` or from /"
        findings.refuse(name, f"there is no file {script}", setting=setting, value=script, remedy=remedy)
        return
    findings.ok(name, f"{program} is there and can be executed", setting=setting)


def _check_placeholders(config: CommandConfig, findings: Findings) -> None:
    command, before = config.command, len(findings.all)
    known = [*PLACEHOLDERS, "python"]
    every = ", ".join(f"{{{name}}}" for name in known)
    for setting, words in (("command.run", command.run), ("command.resume", command.resume)):
        for found in (match[1] for word in words for match in _PLACEHOLDER.finditer(word)):
            if setting == "command.run" and found == "checkpoint":
                remedy = "put the words that need it into command.resume"
                empty = "{checkpoint} is empty where the run begins"
                findings.refuse("command.placeholders", empty, setting=setting, remedy=remedy)
            elif found not in known:
                near = difflib.get_close_matches(found, known, n=1, cutoff=0.7)
                how = findings.refuse if near else findings.warn
                text = f"{{{found}}} is none of {every}: it is handed to the program as it stands"
                remedy = f"did you mean {{{near[0]}}}?" if near else "leave it if the program itself reads it"
                how("command.placeholders", text, setting=setting, remedy=remedy)
    if len(findings.all) == before:
        findings.ok("command.placeholders", f"every placeholder is one of {every}")


def _check_progress(config: CommandConfig, findings: Findings) -> None:
    """Say how the chain learns of iterations and checkpoints."""
    command, rule = config.command, config.command.checkpoint
    setting, then = None, ""
    if command.progress is not None:
        setting, groups = "command.progress", ", ".join(re.compile(command.progress).groupindex)
        said = f"lines that match have {groups}; whether it prints such lines"
    elif command.progress_file is not None:
        setting = "command.progress_file"
        said = f"its iterations are read from {command.progress_file}; whether it writes that"
    else:
        said = "it is to say its iterations by relayrun.client; whether it does"
        then = f". Without, it is ended when it prints nothing new for {config.chain.start_timeout} s "
        then += "(chain.start_timeout)"
    findings.assume("command.progress", f"{said} is not known before it runs{then}", setting=setting)
    ways = {
        "up to the one that {} names": rule.tracker,
        "once {} is there; that it is written last is taken on trust": rule.whole_when,
        "once {} has gone; that it is written first is taken on trust": rule.unfinished_when,
        "as soon as it has this name; that it is renamed when whole is taken on trust": "",
    }
    way = next(way.format(file) for way, file in ways.items() if file is not None)
    words = f"{rule.pattern} counts {way}" if rule.pattern else "it is to say its checkpoints by relayrun.client"
    findings.assume("command.checkpoint", words)
    if rule.folder is not None:
        return
    if rule.pattern is not None and not any("{checkpoints}" in word or "{run_dir}" in word for word in command.run):
        text = "nothing tells the program where its checkpoints are to lie"
        remedy = "hand {checkpoints} to it: what lies elsewhere does not count"
        findings.warn("command.checkpoint", text, setting="command.run", remedy=remedy)
    if not command.resume and not any("{iteration}" in word or "{checkpoints}" in word for word in command.run):
        text = "nothing in the command tells the program which checkpoint to go on from"
        remedy = "give the arguments for it, with {checkpoint}; or it asks relayrun.client.checkpoint()"
        findings.warn("command.resume", text, setting="command.resume", remedy=remedy)


def _check_signals(config: CommandConfig, findings: Findings) -> None:
    """Say how the program is asked to save and to leave, and at which point it is done."""
    command = config.command
    client = "relayrun.client"
    leave = " and ".join(filter(None, (command.leave_signal, command.leave_file, client)))
    save = " and ".join(filter(None, (command.save_signal, command.save_file, client)))
    findings.assume("command.asked", f"to leave it is asked by {leave}, to save by {save}; that it obeys is not known")
    end = "ends by itself with exit code 0" if command.steps is None else f"has saved iteration {command.steps:,}"
    if command.done == "evidence":
        end += "; exit code 0 without a step, a checkpoint or a word of the client is a failure (command.done)"
    findings.assume("command.steps", f"the run is done when it {end}", setting="command.steps")


OLDEST_PYTHON = (3, 11)
"""Minimum version of the ranks' Python."""
OLDEST_HOST_PYTHON = (3, 10)
"""Minimum version of the batch script's Python: `control` uses keyword-only dataclasses throughout."""
NATIVE_PACKAGES = ("torch", "megatron.core", "pydantic", "yaml", "numpy")
"""Packages that the ranks import."""
STREAM_PACKAGES = ("pyarrow", "tokenizers")
"""Further packages for data sets of text."""
MEGATRON_LM_PACKAGES = ("torch", "numpy")
"""Packages that any checkout of Megatron-LM imports."""
_PACKAGES_PROGRAM = """
import importlib.util, json, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
json.dump({"version": list(sys.version_info[:2]), "missing": [n for n in sys.argv[1:] if not there(n)]}, sys.stdout)
"""


def check_programs(config: CommonConfig, findings: Findings) -> None:
    """Look at the ranks' Python or program, the batch script's, the modules, and at packages that settings need."""
    if isinstance(config, CommandConfig):
        _check_program(config, findings)
        _check_placeholders(config, findings)
        _check_progress(config, findings)
        _check_signals(config, findings)
        _check_script(config, findings)
    elif isinstance(config, MegatronConfig):
        megatron_lm.check_megatron_lm(config, findings, contained=runs_in_container(config))
        _check_rank_python(config, MEGATRON_LM_PACKAGES, {}, findings)
    elif isinstance(config, RunConfig):
        names = [*NATIVE_PACKAGES, *(STREAM_PACKAGES if config.data.streams else ())]
        _check_rank_python(config, names, user_modules(config), findings)
    if not batch_system(config.cluster.scheduler).one_machine:
        _check_host_python(config, findings)
    if config.cluster.modules:
        _check_modules(config, findings)
    _check_notify(config, findings)
    if isinstance(config, RunConfig):
        _check_packages(config, findings)
        rehearsal.check_user_code(config, findings)
    with findings.catching("node.evaluation"):
        _check_evaluation(config)


def _check_notify(config: CommonConfig, findings: Findings) -> None:
    """Check that apprise is where messages are sent from, and takes the URLs whose variables are set."""
    python, environment = config.cluster.python, {**os.environ, **config.cluster.environment}
    urls = {name: target.url for name, target in config.notify.targets.items() if target.url}
    if urls and python is not None and not runs_in_container(config):
        answer = _ask_python(python, ("apprise",), search_path(config))
        if isinstance(answer, dict) and answer["missing"]:
            how, words = findings.warn if config.cluster.modules else findings.refuse, f"{python} has no apprise"
            how("notify.apprise", words, setting="cluster.python", remedy=INSTALL_HINT)
    for name, url in urls.items():
        is_set = all(environment.get(variable) for variable in VARIABLE_PATTERN.findall(url))
        if is_set and (python is None or _is_here("apprise")):
            try:
                check_target(NoticeTarget(name=name, url=url), environment)
            except NoticeSendError as error:
                remedy = "`relayrun help notify` lists URLs; a webhook is jsons://HOST/PATH"
                findings.refuse("notify.url", str(error), setting=f"notify.targets.{name}", remedy=remedy)


def _check_packages(config: RunConfig, findings: Findings) -> None:
    cluster = config.cluster
    own = cluster.python is None and "PYTHONPATH" not in cluster.environment and not runs_in_container(config)
    # another Python says it when its ranks start
    if own and (found := megatron_versions.version_problem()) is not None:
        findings.refuse("node.megatron_core", found[0], setting="cluster.python", remedy=found[1])
    if wanted := _of_transformer_engine(config):
        with findings.catching("node.transformer_engine"):
            _check_transformer_engine(config, wanted, findings)
    if config.training.gradient_accumulation_fusion:
        with findings.catching("node.apex"):
            _check_apex(config)


def _check_rank_python(config: CommonConfig, names: Sequence[str], own: Mapping[str, str], findings: Findings) -> None:
    """Look for packages, and for modules of a user's `own`, each with its setting, where ranks look for them."""
    cluster = config.cluster
    setting = "cluster.python"
    if runs_in_container(config):
        findings.skip("node.python", "the ranks run in a container: what it holds is not known from here")
        return
    if cluster.python is None and not own and "PYTHONPATH" not in cluster.environment:
        missing = [name for name in names if not _is_here(name)]
        version = list(sys.version_info[:2])
        python = sys.executable
    else:
        python = cluster.rank_python
        found = shutil.which(python)
        if found is None:
            how = findings.warn if cluster.modules or "/" not in python else findings.refuse
            words = "there is no such program here" if not os.path.exists(python) else "this cannot be executed"
            how("node.python", f"{python}: {words}", setting=setting, remedy="give the Python of the ranks")
            return
        answer = _ask_python(found, (*names, *own), search_path(config))
        if answer is None:
            findings.warn("node.python", f"{python} gave no answer within {ANSWER_SECONDS:.0f} s", setting=setting)
            return
        if isinstance(answer, str):
            findings.refuse("node.python", f"{python} does not start: {answer}", setting=setting)
            return
        missing, version = answer["missing"], answer["version"]
    is_python = f"{python} is Python {version[0]}.{version[1]}"
    if tuple(version) < OLDEST_PYTHON:
        words = f"{is_python}, and relayrun needs {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]}"
        findings.refuse("node.python", words, setting=setting)
    elif missing:
        how = findings.warn if cluster.modules else findings.refuse
        words = f"{python} has no {', '.join(missing)}, which the ranks import"
        if own.keys() >= {*missing}:
            remedy = "put its folder into PYTHONPATH of cluster.environment, or install it; the ranks look in "
            how("node.packages", words, setting=own[missing[0]], remedy=remedy + search_path(config))
            return
        remedy = "install it there (pip install 'relayrun[train]'), set cluster.python to the Python that has it, or "
        remedy += "PYTHONPATH in cluster.environment" + ("; the modules may bring it" if cluster.modules else "")
        how("node.packages", words, setting=setting, value=python, remedy=remedy)
    else:
        findings.ok("node.python", f"{is_python} and has what the ranks import")


def _check_script(config: CommandConfig, findings: Findings) -> None:
    """Check that the Python of a command starts, and has all that its script imports unconditionally."""
    words = fill_in_python(config, config.command.run)
    python, script, setting = shutil.which(words[0]), words[1] if len(words) > 1 else "", "command.run"
    is_python = python is not None and _PYTHON.fullmatch(Path(python).name) and script.endswith(".py")
    if python is None or not is_python or not Path(script).is_file() or runs_in_container(config):
        return
    names = _script_imports(script)
    answer = _ask_python(python, names, os.pathsep.join([str(Path(script).parent), search_path(config)]))
    changed = config.cluster.modules or config.job.setup
    how = findings.warn if changed else findings.refuse
    if answer is None:
        findings.warn("command.python", f"{python} gave no answer within {ANSWER_SECONDS:.0f} s", setting=setting)
    elif isinstance(answer, str):
        how("command.python", f"{python} does not start: {answer}", setting=setting, value=python)
    elif answer["missing"]:
        text = f"{python} has no {', '.join(answer['missing'])}, which {script} imports"
        remedy = "install it there, or name the Python that has it in command.run; {python} is cluster.python"
        remedy += "; the modules or lines of job.setup may bring it" if changed else ""
        how("command.packages", text, setting=setting, value=python, remedy=remedy)
    else:
        findings.ok("command.packages", f"{python} has what {script} imports")


def _script_imports(script: str) -> tuple[str, ...]:
    """The packages that a script imports whatever happens: none of a `try`, an `if` or a function."""
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ()  # the program itself says it better
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level]
    return tuple(dict.fromkeys(name.partition(".")[0] for name in names if name))


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


@functools.lru_cache(maxsize=16)
def _ask_python(python: str, names: tuple[str, ...], search_path: str) -> dict[str, Any] | str | None:
    """The version of a Python and what it lacks; in words why it does not say; None if it takes too long."""
    program = [python, "-c", _PACKAGES_PROGRAM, *names]
    return rehearsal.ask_json(program, {"PYTHONPATH": search_path}, limit=ANSWER_SECONDS)


def _check_host_python(config: CommonConfig, findings: Findings) -> None:
    """The batch script's Python runs on a node; the same name here is all that can be asked."""
    setting, python = "cluster.host_python", config.cluster.host_python
    found = shutil.which(python)
    if found is None:
        findings.warn("node.host_python", f"{python} is not on this machine; the nodes must have it", setting=setting)
        return
    answer = _ask_python(found, (), "")
    if answer is None or isinstance(answer, str):
        why = answer or f"no answer within {ANSWER_SECONDS:.0f} s"
        findings.warn("node.host_python", f"{python} does not start here: {why}", setting=setting)
    elif tuple(answer["version"]) < OLDEST_HOST_PYTHON:
        version = ".".join(map(str, answer["version"]))
        words = f"{python} is Python {version} here; the batch script needs {'.'.join(map(str, OLDEST_HOST_PYTHON))}"
        remedy = "set cluster.host_python to a newer one, which needs no packages: of a module of the site, or "
        remedy += f"{sys.executable} if the nodes see it too"
        findings.refuse("node.host_python", words, setting=setting, remedy=remedy)
    else:
        findings.ok("node.host_python", f"{python} is Python {'.'.join(map(str, answer['version']))} here")


def _check_modules(config: CommonConfig, findings: Findings) -> None:
    names, setting = config.cluster.modules, "cluster.modules"
    script = 'type module >/dev/null 2>&1 || exit 99; for name in "$@"; do module is-avail "${name}" || exit 1; done'
    done = run_python(["bash", "-lc", script, "bash", *names], {}, limit=ANSWER_SECONDS)
    if done is None or isinstance(done, str) or done.returncode == 99:
        words = "there is no `module` here: whether the nodes have them is not known"
        findings.warn("node.modules", words, setting=setting)
    elif done.returncode:
        findings.warn("node.modules", "`module is-avail` does not know all of them here", setting=setting)
    else:
        findings.ok("node.modules", f"`module is-avail` knows {', '.join(names)} here")


def _check_evaluation(config: CommonConfig) -> None:
    settings = config.evaluation
    if settings is None:
        return
    scored = settings.tasks or settings.command
    if isinstance(config, RunConfig) and not scored and not config.data.validation and not config.data.split:
        hint = "name tasks of lm-evaluation-harness, or set evaluation.command or data.validation"
        nothing = "there is nothing to evaluate on: neither tasks, nor a command, nor a validation set"
        raise ConfigError(nothing, where="evaluation", hint=hint)
    # another Python's packages are not known here
    if settings.tasks and config.cluster.python is None and importlib.util.find_spec("lm_eval") is None:
        hint = "pip install 'relayrun[evaluate]', or name no tasks"
        raise ConfigError("lm-evaluation-harness is not installed", where="evaluation.tasks", hint=hint)
    for name, words in (("convert", settings.convert), ("command", settings.command)):
        program = words[0] if words else "{python}"
        # what a container holds, or modules and job.setup add, is not known here
        known = not (runs_in_container(config) or config.cluster.modules or config.job.setup) and program != "{python}"
        if known and shutil.which(program) is None:
            hint = "give the program by its path; every word of the command is one of the list"
            raise ConfigError(f"there is no program {program} here", where=f"evaluation.{name}", hint=hint)
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise ConfigError("there is no such folder", where=f"evaluation.include_path: {settings.include_path}")


def _of_transformer_engine(config: RunConfig) -> list[tuple[str, str]]:
    """The settings that need TransformerEngine, each with one that does not."""
    training, optimizer = config.training, config.optimizer
    found = {
        "training.transformer_impl=transformer_engine": (training.transformer_impl == "transformer_engine", "local"),
        "training.apply_rope_fusion=true": (training.apply_rope_fusion is True, "null"),
        "optimizer.use_precision_aware_optimizer=true": (optimizer.use_precision_aware_optimizer, "false"),
        "training.cross_entropy_fusion_impl=te": (
            training.cross_entropy_loss_fusion and training.cross_entropy_fusion_impl == "te",
            "native",
        ),
    }
    return [(name, f"{name.partition('=')[0]}={other}") for name, (asked, other) in found.items() if asked]


def _check_transformer_engine(config: RunConfig, wanted: list[tuple[str, str]], findings: Findings) -> None:
    cluster = config.cluster
    names, others = ", ".join(name for name, _ in wanted), ", ".join(other for _, other in wanted)
    if config.job.gpus_per_node == 0:
        words = f"{names} needs TransformerEngine, whose kernels run on GPUs alone, and this job has none"
        raise ConfigError(words, where="job.gpus_per_node", hint=f"set {others}")
    here = cluster.python is None and importlib.util.find_spec("transformer_engine") is not None
    if not (cluster.transformer_engine or here):
        words = (
            f"{names} needs TransformerEngine, which this Python does not have and cluster {cluster.name!r} does not "
        )
        hint = f"set transformer_engine: true there if the ranks' container has it, or set {others}"
        raise ConfigError(f"{words}declare", where=f"configs/clusters/{cluster.name}.yaml", hint=hint)
    if here:
        findings.ok("node.transformer_engine", "this Python has TransformerEngine")
    else:
        words = f"cluster {cluster.name!r} says that the ranks have TransformerEngine"
        findings.assume("node.transformer_engine", words, setting="cluster.transformer_engine")


def _check_apex(config: RunConfig) -> None:
    """Another Python's packages are not known here; without GPUs there is no such kernel."""
    why = None
    if not config.job.gpus_per_node:
        why = "it is a kernel for GPUs, and the job has none"
    elif config.cluster.python is None and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        why = "this Python has no Apex with fused_weight_gradient_mlp_cuda"
    if why is not None:
        words = f"training.gradient_accumulation_fusion=true cannot be had: {why}"
        hint = "leave it out: then it is used where it can be"
        raise ConfigError(words, where="training.gradient_accumulation_fusion", hint=hint)
