"""Everything that is known of a run before it is queued: the findings of all subjects, and the forecast."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.config.compose.schema import CommonConfig, Job, MegatronConfig, RunConfig
from relayrun.config.compose.yamlfile import LocatedSettings
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.submit import evaluation_job
from relayrun.submit.check import (
    data,
    job,
    launcher_file,
    megatron_lm,
    node,
    notify,
    owner,
    place,
    settings,
    slurm,
    state,
    storage,
    tracking,
)
from relayrun.submit.check.finding import Findings
from relayrun.submit.check.state import Intent
from relayrun.submit.check.usage import Usage
from relayrun.submit.forecast import Forecast, forecast, in_bytes
from relayrun.tokens.shards.manifest import Manifest

ROOM = 0.9
"""Share of a GPU's memory that a run can use; the rest is for CUDA, NCCL's buffers and gaps."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found."""

    config: CommonConfig
    run: Run
    plan: Plan
    findings: Findings
    manifest: Manifest | None
    """The run's data, without editions; None where they could not be read, and for a trainer command."""
    usage: list[Usage] = field(default_factory=list)
    forecast: Forecast | None = None
    """None where the size of the vocabulary is not known, and for a foreign trainer."""


def report(
    config: CommonConfig,
    plan: Plan,
    run: Run,
    *,
    log_folder: Path,
    given: LocatedSettings | None = None,
    intent: Intent | None = None,
    script: str | Path | None = None,
    adopted: Mapping[str, str] | None = None,
) -> Report:
    """Look at everything; nothing is written or queued.

    `given`: where the settings were written. `intent`: with it the run's own state and jobs are looked at. `script`:
    what Slurm is asked about, see `slurm.look`; None: it is not asked. `adopted`: options of this very job, which
    becomes the first of the chain.
    """
    findings = of_config(config, given)
    place.look(config, run, log_folder, findings)
    with findings.catching("place.run_dir", ok=f"run directory {run.path}"):
        owner.refuse_unwritable(run)
    read = megatron_lm.as_read(config, findings) if isinstance(config, MegatronConfig) else config
    manifest = data.look(read, run, findings) if isinstance(read, RunConfig) else None
    used: list[Usage] = []
    future: Forecast | None = None
    if intent is not None:
        state.look(config, plan, run, manifest, intent, findings)
    if isinstance(read, RunConfig) and manifest is not None and (config is read or megatron_lm.can_be_counted(read)):
        evolved = _with_editions(config, run, manifest) if isinstance(config, RunConfig) else read
        used = data.look_at_usage(evolved, run, manifest, findings)
    if isinstance(config, RunConfig) and manifest is not None:
        with findings.catching("run.lineage"):
            future = forecast(config, plan, run, manifest.vocabulary_size)
    if future is not None:
        _memory(future, findings)
        _host_memory(config.job, future, findings)
        with findings.catching("storage.space"):
            storage.look(future, run, findings, quota_command=config.cluster.quota_command)
    storage.look_at_purges(config.cluster.purge_days, run, manifest, findings)
    if isinstance(config, MegatronConfig):
        launcher_file.look(config, plan, run, script, adopted or {}, findings)
    if plan.scheduler == "slurm" and script is not None:
        evaluation = None if config.evaluation is None else evaluation_job.script(config, plan, run)
        slurm.look(plan, script, findings, evaluation=evaluation)
    tracking.look(config, findings)
    notify.look(config, findings)
    return Report(config=config, run=run, plan=plan, findings=findings, manifest=manifest, usage=used, forecast=future)


def of_config(config: CommonConfig, given: LocatedSettings | None = None) -> Findings:
    """Look at what the config alone, and this machine's Pythons, tell."""
    findings = Findings(config, given)
    settings.look(config, findings)
    job.look(config, findings)
    node.look(config, findings)
    return findings


def _with_editions(config: RunConfig, run: Run, manifest: Manifest) -> RunConfig:
    """The config with the names under which a run that has begun counts its data sets, where it would take them."""
    with contextlib.suppress(RelayrunError):
        evolved = state.evolved(config, run, manifest, accept=True)
        return config if evolved is None else evolved.config
    return config


def _memory(future: Forecast, findings: Findings) -> None:
    needed, there = future.memory.total, future.gpu_memory
    words = f"the fullest GPU needs {in_bytes(needed)} by formula"
    if not future.gpus:
        return
    if there is None:
        findings.ok("memory.gpu", f"{words}; cluster.gpu_memory_gb does not say what it has", value=round(needed))
    elif needed > ROOM * there:
        findings.warn(
            "memory.gpu",
            f"{words}; {ROOM:.0%} of its {in_bytes(there)} are {in_bytes(ROOM * there)}",
            setting="training.micro_batch_size",
            value=round(needed),
            remedy="lower training.micro_batch_size, set training.recompute_granularity, or split the model further",
        )
    else:
        findings.ok("memory.gpu", f"{words}, of {in_bytes(there)}", value=round(needed))


def _host_memory(job: Job, future: Forecast, findings: Findings) -> None:
    """Whether copies of saves fit into what a job asks for; what else a rank needs is not counted."""
    there, needed = job.mem_bytes, future.host_copies
    if not there or not needed:
        return
    words = f"copies of saves take {in_bytes(needed)} of a node's memory by formula, of {in_bytes(there)} in job.mem"
    if needed > ROOM * there:
        findings.warn(
            "memory.host",
            words,
            setting="job.mem",
            value=needed,
            remedy="ask for more memory, take more nodes, or set checkpoint.async_save=false",
        )
    else:
        findings.ok("memory.host", words, value=needed)
