"""A checkout of Megatron-LM: whether it is there, with its program, and whether it takes the flags of the run."""

from __future__ import annotations

from pathlib import Path

from relayrun.config.schema import MegatronConfig
from relayrun.rundir.run import Run
from relayrun.submit.check.finding import Findings, counted
from relayrun.submit.megatron_lm.command_line import CommandLine, command_line, python_of
from relayrun.submit.megatron_lm.parsed import parsed
from relayrun.trainers.megatron_lm.program import Dialect


def look(config: MegatronConfig, findings: Findings, *, contained: bool) -> None:
    """Look at the checkout's folder, its program and its flags. `contained`: the ranks' Python is in a container."""
    before = len(findings.errors)
    _place(config, findings)
    if len(findings.errors) > before:
        return
    with findings.catching("megatron_lm.flags"):
        line = command_line(config, Run(Path(config.run_dir or "")))
        _flags(config, line, findings, contained=contained)
        _of_the_chain(config, line, findings)


def _flags(config: MegatronConfig, line: CommandLine, findings: Findings, *, contained: bool) -> None:
    """What holds, and what the checkout says of it."""
    name = "megatron_lm.flags"
    for note in line.notes:
        findings.ok("megatron_lm.args", note)
    program = config.megatron_lm.program
    said = parsed(line.checkout, line.merged.flags, python=python_of(config), in_container=contained, program=program)
    for refusal in said.refusals:
        tell = findings.refuse if said.certain else findings.warn
        tell(name, refusal.words, where=refusal.source, remedy=refusal.hint)
    number, version = counted(len(line.merged.flags), "flag"), line.checkout.version
    if not said.certain:
        findings.ok(
            name,
            f"{version}: its own parser could not be asked ({said.unavailable}), so its text was searched for "
            f"{number}; the job asks the parser, and ends the chain where it refuses one",
        )
    elif not said.refusals:
        findings.ok(name, f"{version}: its own parser takes all {number}")


def _of_the_chain(config: MegatronConfig, line: CommandLine, findings: Findings) -> None:
    """What the chain could not do with these flags."""
    if line.merged.find("profile") is not None and line.checkout.dialect is Dialect.SWISS_AI:
        findings.warn(
            "megatron_lm.profile",
            "with --profile this checkout takes no signal: an attempt that is to leave does not save, and goes on from "
            "its last checkpoint",
            setting="debug.profile",
            remedy="profile in a run of its own, with checkpoint.interval below what may be lost",
        )
    interval = line.merged.find("log-interval")
    if interval is not None and interval.values != ("1",):
        findings.warn(
            "megatron_lm.log",
            f"{interval.text}: the chain sees only those iterations, and chain.hang_timeout must be longer than the "
            "time between two of them",
            where=interval.source,
            remedy="leave log-interval out",
        )


def _place(config: MegatronConfig, findings: Findings) -> None:
    """The checkout's folder, its program, its arguments, and the file of further flags."""
    own = config.megatron_lm
    folder = Path(own.dir)
    if not folder.is_dir():
        findings.refuse(
            "megatron_lm.dir",
            "there is no such folder",
            setting="megatron_lm.dir",
            remedy="set it, or MEGATRON_LM_DIR in the launcher, to a checkout of Megatron-LM",
        )
        return
    if not (folder / "megatron" / "training" / "arguments.py").is_file():
        findings.refuse(
            "megatron_lm.dir",
            "this is no checkout of Megatron-LM: it has no megatron/training/arguments.py",
            setting="megatron_lm.dir",
        )
    if not (folder / own.program).is_file():
        programs = ", ".join(sorted(path.name for path in folder.glob("pretrain_*.py")))
        findings.refuse(
            "megatron_lm.program",
            f"{folder} has no {own.program}",
            setting="megatron_lm.program",
            remedy=f"it has {programs}" if programs else None,
        )
    if own.args_file is not None and not Path(own.args_file).is_file():
        findings.refuse("megatron_lm.args_file", "there is no such file", setting="megatron_lm.args_file")
