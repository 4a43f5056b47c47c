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
from relayrun.control.scheduler.slurm_nodes import unusable_nodes
from relayrun.errors import ConfigError, SchedulerError
from relayrun.slurmtime import format_time, parse_time
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
        gpus = slurm_commands.gpus_of_gres(str(config.job.sbatch.get("gres", "")))
        if gpus is not None and gpus < config.job.gpus_per_node:
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
    _test_job(slurm, script, options, findings)
    if evaluation is not None:
        _test_job(slurm, evaluation, {}, findings, of="evaluation")


def _test_job(
    slurm: Slurm, script: str | Path, options: Mapping[str, str], findings: Findings, *, of: str | None = None
) -> None:
    """`of`: the section whose jobs these are; None: the run's own."""
    name, section, whose = ("slurm.test", "job", "") if of is None else (f"slurm.{of}", f"{of}.job", f"{of}: ")
    with tempfile.NamedTemporaryFile("w", prefix="relayrun-check-", suffix=".sbatch", encoding="utf-8") as file:
        if isinstance(script, str):
            file.write(script)
            file.flush()
        path = Path(file.name) if isinstance(script, str) else script
        try:
            answer = slurm.test(path, options)
        except NoAnswerError as error:
            findings.warn(name, f"{whose}Slurm does not answer: {error.message}", remedy="ask again later")
        except SchedulerError as error:
            if away := unusable_nodes(slurm, error):
                words = "too few nodes can be used now; a job that fits the cluster waits for some of"
                findings.warn(name, f"{whose}{words} {', '.join(away)}")
                return
            remedy = f"change {section}, or the job section of the cluster"
            findings.refuse(name, whose + error.message, remedy=remedy)
        else:
            findings.ok(name, whose + (" ".join(answer.split()) or "sbatch --test-only takes the job"))


def _limits(partitions: list[dict[str, str]], plan: Plan, asked: str | None, findings: Findings) -> None:
    """Compare nodes and time with MaxNodes, MinNodes and MaxTime: Slurm may queue such a job, and never start it."""
    if asked is None:
        chosen = [found for found in partitions if found.get("Default") == "YES"]
        if not chosen:
            words = "no partition is named, and this Slurm has no default one"
            findings.warn("slurm.partition", words, setting="job.partition")
    else:
        names = asked.split(",")
        chosen = [found for found in partitions if found["PartitionName"] in names]
        if unknown := set(names) - {found["PartitionName"] for found in partitions}:
            known = ", ".join(found["PartitionName"] for found in partitions)
            words = f"there is no partition {', '.join(sorted(unknown))}; there are: {known}"
            findings.refuse("slurm.partition", words, setting="job.partition")
    for found in chosen:
        _limit(found, plan, findings)


def _limit(partition: dict[str, str], plan: Plan, findings: Findings) -> None:
    name, before = partition["PartitionName"], len(findings.all)
    limit = partition.get("MaxTime", "UNLIMITED")
    if limit not in ("UNLIMITED", "INFINITE") and plan.time_limit > parse_time(limit):
        longer = f"{format_time(plan.time_limit)} is more than partition {name} allows, {limit}"
        remedy = "lower job.time: a chain goes on in the next job"
        findings.refuse("slurm.time", longer, setting="job.time", remedy=remedy)
    nodes, most = plan.nodes_of_job, partition.get("MaxNodes", "UNLIMITED")
    least, there = partition.get("MinNodes", "0"), partition.get("TotalNodes", "")
    wrong = {
        f"more than partition {name} allows, {most}": most.isdecimal() and nodes > int(most),
        f"fewer than partition {name} asks for, {least}": least.isdecimal() and nodes < int(least),
        f"more than partition {name} has, {there}": there.isdecimal() and nodes > int(there),
    }
    for words in (words for words, found in wrong.items() if found):
        findings.refuse("slurm.nodes", f"{nodes} nodes are {words}", setting="job.nodes")
    if (state := partition.get("State", "UP")) != "UP":
        findings.warn("slurm.partition", f"partition {name} is {state}: jobs wait", setting="job.partition")
    if len(findings.all) == before:
        findings.ok("slurm.partition", f"partition {name}: MaxTime {limit}, MaxNodes {most}, {there or '?'} nodes")
