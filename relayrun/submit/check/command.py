"""A program of the user's own: what can be seen of it before it runs, and what cannot be known."""

from __future__ import annotations

import ast
import difflib
import re
import shutil
from pathlib import Path

from relayrun.config.compose.schema import CommandConfig
from relayrun.control.trainers.command import PLACEHOLDERS
from relayrun.submit.check.findings import Findings
from relayrun.submit.trainer_settings import command_words

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_PYTHON = re.compile(r"python[\d.]*")


def python_and_script(config: CommandConfig) -> tuple[str, str] | None:
    """Return the Python and the script that a command begins with, both as they are found here; else None."""
    words = command_words(config, config.command.run)
    found = shutil.which(words[0])
    script = words[1] if len(words) > 1 else ""
    if found is None or not _PYTHON.fullmatch(Path(found).name) or not script.endswith(".py"):
        return None
    return (found, script) if Path(script).is_file() else None


def script_imports(script: str) -> tuple[str, ...]:
    """Return the packages that a script imports whatever happens: none of a `try`, an `if` or a function."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()  # the program itself says it better
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level]
    return tuple(dict.fromkeys(name.partition(".")[0] for name in names if name))


def check_command(config: CommandConfig, findings: Findings, *, contained: bool) -> None:
    """Look at the program, its placeholders, and how it is followed and asked. `contained`: it runs in a container."""
    _check_program(config, findings, contained=contained)
    _check_placeholders(config, findings)
    _check_progress(config, findings)
    _check_signals(config, findings)


def _check_program(config: CommandConfig, findings: Findings, *, contained: bool) -> None:
    name, setting = "command.program", "command.run"
    words = command_words(config, config.command.run)
    program = words[0]
    if contained:
        findings.ok(name, f"{program} runs in a container: what it holds is not known from here")
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
        findings.refuse(
            name,
            f"there is no file {script}",
            setting=setting,
            value=script,
            remedy="give its path, from the folder that holds `launchers/` or from /",
        )
        return
    findings.ok(name, f"{program} is there; what it does is not known before it runs", setting=setting)


def _check_placeholders(config: CommandConfig, findings: Findings) -> None:
    command, before = config.command, len(findings.all)
    known = [*PLACEHOLDERS, "python"]
    for setting, words in (("command.run", command.run), ("command.resume", command.resume)):
        for found in (match[1] for word in words for match in _PLACEHOLDER.finditer(word)):
            if setting == "command.run" and found == "checkpoint":
                findings.refuse(
                    "command.placeholders",
                    "{checkpoint} is empty where the run begins",
                    setting=setting,
                    value=words,
                    remedy="put the words that need it into command.resume",
                )
            elif found not in known:
                near = difflib.get_close_matches(found, known, n=1, cutoff=0.7)
                how = findings.refuse if near else findings.warn
                how(
                    "command.placeholders",
                    f"{{{found}}} is none of {', '.join(f'{{{each}}}' for each in known)}: "
                    "it is handed to the program as it stands",
                    setting=setting,
                    value=words,
                    remedy=f"did you mean {{{near[0]}}}?" if near else "leave it if the program itself reads it",
                )
    if len(findings.all) == before:
        findings.ok("command.placeholders", f"every placeholder is one of {', '.join(f'{{{n}}}' for n in known)}")


def _check_progress(config: CommandConfig, findings: Findings) -> None:
    """How its iterations and checkpoints are told."""
    command, rule = config.command, config.command.checkpoint
    if command.progress is None and command.progress_file is not None:
        findings.ok(
            "command.progress",
            f"its iterations are read from {command.progress_file}; whether it writes that is not known before it runs",
            setting="command.progress_file",
        )
    elif command.progress is None:
        findings.ok(
            "command.progress",
            "it is to say its iterations by relayrun.client; whether it does is not known before it runs. Without, "
            f"it is ended {config.chain.start_timeout} s after its start (chain.start_timeout)",
        )
    else:
        groups = ", ".join(re.compile(command.progress).groupindex)
        findings.ok(
            "command.progress",
            f"lines that match have {groups}; whether it prints such lines is not known before it runs",
            setting="command.progress",
        )
    if rule.pattern is None:
        words = "it is to say its checkpoints by relayrun.client"
    elif rule.tracker is not None:
        words = f"{rule.pattern} counts up to the one that {rule.tracker} names"
    elif rule.whole_when is not None:
        words = f"{rule.pattern} counts once {rule.whole_when} is in it; that it is written last is taken on trust"
    else:
        words = f"{rule.pattern} counts as soon as it has this name; that it is renamed when whole is taken on trust"
    findings.ok("command.checkpoint", words)
    if rule.pattern is not None and not any("{checkpoints}" in word or "{run_dir}" in word for word in command.run):
        findings.warn(
            "command.checkpoint",
            "nothing tells the program where its checkpoints are to lie",
            setting="command.run",
            remedy="hand {checkpoints} to it: what lies elsewhere does not count",
        )
    if not command.resume and not any("{iteration}" in word or "{checkpoints}" in word for word in command.run):
        findings.warn(
            "command.resume",
            "nothing in the command tells the program which checkpoint to go on from",
            setting="command.resume",
            remedy="give the arguments for it, with {checkpoint}; or it asks relayrun.client.checkpoint()",
        )


def _check_signals(config: CommandConfig, findings: Findings) -> None:
    """How it is asked to save and to leave, and when it is done."""
    command = config.command
    client = "relayrun.client"
    leave = " and ".join(filter(None, (command.leave_signal, command.leave_file, client)))
    save = " and ".join(filter(None, (command.save_signal, command.save_file, client)))
    findings.ok("command.asked", f"to leave it is asked by {leave}, to save by {save}; that it obeys is not known")
    end = "ends by itself with exit code 0" if command.steps is None else f"has saved iteration {command.steps:,}"
    findings.ok("command.steps", f"the run is done when it {end}", setting="command.steps")
