"""A checkout of Megatron-LM: whether its program is there, and whether it takes the flags of the run."""

from __future__ import annotations

from pathlib import Path

from relayrun.config.schema import MegatronConfig
from relayrun.rundir.run import Run
from relayrun.submit.check.finding import Findings, counted
from relayrun.submit.megatron_lm.command_line import CommandLine, command_line, python_of
from relayrun.submit.megatron_lm.parsed import parsed
from relayrun.trainers.megatron_lm.program import Dialect


def look(config: MegatronConfig, findings: Findings, *, contained: bool) -> None:
    """Look at the program of the checkout and at its flags. `contained`: the ranks' Python is in a container."""
    _program(config, findings)
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
            "with --profile this checkout takes no signal: relayrun asks it by its own files; where Slurm alone asks, "
            "the attempt does not save, and the next one goes on from its last checkpoint",
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


def _program(config: MegatronConfig, findings: Findings) -> None:
    folder, program = Path(config.megatron_lm.dir), config.megatron_lm.program
    if not (folder / program).is_file():
        programs = ", ".join(sorted(path.name for path in folder.glob("pretrain_*.py")))
        findings.refuse(
            "megatron_lm.program",
            f"{folder} has no {program}",
            setting="megatron_lm.program",
            remedy=f"it has {programs}" if programs else None,
        )
