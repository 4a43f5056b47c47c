"""Check the jobs of a run with Slurm: options of sbatch, lines that Bash cannot read, and limits of the partition.

`check_slurm` asks Slurm whether it would take the very job that would be queued, without queueing it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from relayrun.config.compose.schema import CommonConfig
from relayrun.config.compose.sites import sbatch_options_from_environment
from relayrun.config.sections.batch_systems import batch_system
from relayrun.config.sections.job_script import check_setup_lines
from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.control.scheduler.slurm import Slurm
from relayrun.control.scheduler.slurm_commands import NoAnswerError
from relayrun.control.scheduler.slurm_nodes import chosen_partitions, exceeded_limits, first_test
from relayrun.errors import ConfigError, SchedulerError
from relayrun.submit.check.findings import Findings
from relayrun.submit.run_plan import sbatch_options


def check_job_settings(config: CommonConfig, findings: Findings) -> None:
    """Look at options that sbatch does not have, at lines that Bash cannot read, and at what a site file guesses."""
    with findings.catching("job.options"):
        refuse_job_settings(config)
    if config.cluster.not_checked:
        words = f"the site file of {config.cluster.name} was written without having read in the site's documentation: "
        words += "; ".join(config.cluster.not_checked)
        remedy = "ask the site's documentation, or sinfo, and take out of cluster.not_checked what is right"
        findings.warn("job.site", words, setting="cluster.not_checked", remedy=remedy)
    if words := "; ".join(_met_facts(config)):
        findings.warn("job.probed", words, setting="cluster.probed", remedy="`relayrun site probe` measures again")


def _met_facts(config: CommonConfig) -> list[str]:
    """Return what `relayrun site probe` found at the site and the run meets."""
    probed, options = config.cluster.probed, ["time", "nodes", *sbatch_options(config.job)]
    texts = {
        "refused": ("the site refuses --{}", options),
        "rewritten": ("the site changes --{}", options),
        "denied": ("the site lets nobody {} a job", probed.get("denied", []) if config.chain.auto_requeue else []),
        "modules": ("module {} does not load", config.cluster.modules),
        "clocks": ("the clock of node {} is wrong", probed.get("clocks", [])),
        "misplaced": ("a step {} starts on another node", ["by-name"]),
    }
    return [text.format(each) for fact, (text, met) in texts.items() for each in probed.get(fact, []) if each in met]


def refuse_job_settings(config: CommonConfig) -> None:
    """Raise ConfigError for an option that sbatch does not have, for fewer GPUs than a node's ranks, and for lines that
    Bash cannot read."""
    check_setup_lines(config.job.setup, where="job.setup")
    if batch_system(config.cluster.scheduler).slurm:
        gres = str(config.job.sbatch.get("gres", ""))
        gpus = slurm_commands.count_gpus(gres)
        if slurm_commands.asks_for_gpus({"gres": gres}) and gpus < config.job.gpus_per_node:
            words = f"asks for {gpus} GPUs of a node, and job.gpus_per_node is {config.job.gpus_per_node}"
            raise ConfigError(words, where="job.sbatch.gres", hint="give both the same number, or `gres: false`")
        slurm_commands.check_sbatch_options(config.job.sbatch, where="job.sbatch")
        if config.evaluation is not None:
            slurm_commands.check_sbatch_options(config.evaluation.job.sbatch, where="evaluation.job.sbatch")


def check_slurm(plan: Plan, script: str | Path, findings: Findings, *, evaluation: str | None = None) -> None:
    """Ask Slurm whether it would take the job, and the job of an evaluation; nothing is queued.

    `script`: the text of the job's script, or the path of a launcher that sbatch would be given. `evaluation`: the text
    of the script that evaluates a checkpoint; None: none does.
    """
    slurm = slurm_scheduler(patience=0)  # a person waits: once is enough
    try:
        partitions = slurm.partitions()
    except SchedulerError as error:
        words = f"whether Slurm takes the job is not known: {' '.join(error.message.split())}"
        findings.warn("slurm.test", words, remedy=error.hint)
        return
    # relayrun's own sbatch is started without them: they are in its script
    options = {} if isinstance(script, str) else sbatch_options_from_environment(os.environ)
    _limits(partitions, plan, options.get("partition") or plan.sbatch_options.get("partition"), findings)
    _test_job(slurm, script, options, findings, spare_nodes=plan.spare_nodes)
    if evaluation is not None:
        _test_job(slurm, evaluation, {}, findings, of="evaluation")


def _test_job(
    slurm: Slurm,
    script: str | Path,
    options: Mapping[str, str],
    findings: Findings,
    *,
    of: str | None = None,
    spare_nodes: int = 0,
) -> None:
    """`of`: the section whose jobs these are; None: the run's own."""
    name, section, whose = ("slurm.test", "job", "") if of is None else (f"slurm.{of}", f"{of}.job", f"{of}: ")
    with tempfile.NamedTemporaryFile("w", prefix="relayrun-check-", suffix=".sbatch", encoding="utf-8") as file:
        if isinstance(script, str):
            file.write(script)
            file.flush()
        path = Path(file.name) if isinstance(script, str) else script
        try:
            answer, warning = first_test(slurm, path, options, spare_nodes)
        except NoAnswerError as error:
            findings.warn(name, f"{whose}Slurm does not answer: {error.message}", remedy="ask again later")
        except SchedulerError as error:
            remedy = error.hint or f"change {section}, or the job section of the cluster"
            findings.refuse(name, whose + error.message, remedy=remedy)
        else:
            tell = findings.warn if warning else findings.ok
            tell(name, whose + (warning or answer or "sbatch --test-only takes the job"))


def _limits(partitions: list[dict[str, str]], plan: Plan, asked: str | None, findings: Findings) -> None:
    """Compare nodes and time with MaxNodes, MinNodes and MaxTime: Slurm may queue such a job, and never start it."""
    names = asked.split(",") if asked else []
    chosen = chosen_partitions(partitions, asked)
    if not names and not chosen:
        words = "no partition is named, and this Slurm has no default one"
        findings.warn("slurm.partition", words, setting="job.partition")
    if unknown := set(names) - {found["PartitionName"] for found in partitions}:
        known = ", ".join(found["PartitionName"] for found in partitions)
        words = f"there is no partition {', '.join(sorted(unknown))}; there are: {known}"
        findings.refuse("slurm.partition", words, setting="job.partition")
    exceeded = exceeded_limits(chosen, plan)
    for setting, words in exceeded:
        remedy = "lower job.time: a chain goes on in the next job" if setting == "job.time" else None
        tell = findings.warn if "qos" in plan.sbatch_options else findings.refuse
        tell(setting.replace("job", "slurm"), words, setting=setting, remedy=remedy)
    for found in chosen:
        name, state = found["PartitionName"], found.get("State", "UP")
        limits = f"MaxTime {found.get('MaxTime', 'UNLIMITED')}, MaxNodes {found.get('MaxNodes', 'UNLIMITED')}"
        if state != "UP":
            findings.warn("slurm.partition", f"partition {name} is {state}: jobs wait", setting="job.partition")
        elif not exceeded:
            findings.ok("slurm.partition", f"partition {name}: {limits}, {found.get('TotalNodes') or '?'} nodes")
