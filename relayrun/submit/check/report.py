"""The report of a check: the findings of all subjects, and the forecast."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.config.compose.schema import CommonConfig, MegatronConfig, RunConfig
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import format_bytes
from relayrun.errors import RelayrunError
from relayrun.submit import policies
from relayrun.submit.check import data, existing_run, megatron_lm, programs, settings, slurm, storage
from relayrun.submit.check.data import DatasetUsage
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import Findings
from relayrun.submit.cost import ChainCost, chain_cost
from relayrun.submit.forecast import Forecast, forecast_run
from relayrun.tokens.shards.manifest import Manifest
from relayrun.trust import group_writable_parent

USABLE_GPU_MEMORY = 0.9
"""Share of a GPU's memory that a run can use; the rest is for CUDA, NCCL's buffers and gaps."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of a check."""

    config: CommonConfig
    run: Run
    plan: Plan
    findings: Findings
    manifest: Manifest | None
    """The run's data, without editions; None if they could not be read, and for a trainer command."""
    cost: ChainCost
    usage: list[DatasetUsage] = field(default_factory=list)
    forecast: Forecast | None = None
    """None if the size of the vocabulary is not known, and for a foreign trainer."""


def check_run(
    config: CommonConfig,
    plan: Plan,
    run: Run,
    *,
    log_folder: Path,
    given: LocatedSettings | None = None,
    intent: SubmitIntent | None = None,
    script: str | Path | None = None,
    adopted: Mapping[str, str] | None = None,
) -> CheckReport:
    """Look at everything; nothing is written or queued.

    `given`: the locations of the settings. `intent`: with it the run's own state and jobs are looked at. `script`:
    what Slurm is asked about, see `slurm.check_slurm`; None: it is not asked. `adopted`: options of this very job,
    which becomes the first of the chain.
    """
    findings = check_config(config, given)
    storage.check_written_paths(config, run, log_folder, findings)
    with findings.catching("place.run_dir", ok=f"run directory {run.path}"):
        existing_run.refuse_unwritable_run(run)
        if run.path.exists() and (above := group_writable_parent(run.path)) is not None:
            words = f"the group of {above} may rename run directories there, and cannot change what lies in them"
            findings.ok("place.run_dir", words, where=above)
    read = megatron_lm.as_native_config(config, findings) if isinstance(config, MegatronConfig) else config
    manifest = data.check_data(read, run, findings) if isinstance(read, RunConfig) else None
    used: list[DatasetUsage] = []
    future: Forecast | None = None
    if intent is not None:
        existing_run.check_existing_run(config, plan, run, manifest, intent, findings)
    if isinstance(read, RunConfig) and manifest is not None and (config is read or megatron_lm.has_known_length(read)):
        evolved = with_editions(config, run, manifest) if isinstance(config, RunConfig) else read
        used = data.check_usage(evolved, run, manifest, findings)
    if isinstance(config, RunConfig) and manifest is not None:
        with findings.catching("run.lineage"):
            future = forecast_run(config, plan, run, manifest.vocabulary_size)
    if future is not None:
        _check_gpu_memory(future, findings)
        _check_host_memory(future, findings)
        with findings.catching("storage.space"):
            storage.check_space(future, run, findings, quota_command=config.cluster.quota_command)
    if isinstance(config, MegatronConfig):
        megatron_lm.check_launcher_file(config, plan, run, script, adopted or {}, findings)
    if batch_system(plan.scheduler).slurm and script is not None:
        evaluation = None if config.evaluation is None else policies.evaluation_script(config, plan, run)
        slurm.check_slurm(plan, script, findings, evaluation=evaluation)
    settings.check_wandb(config, findings)
    settings.check_notify_variables(config, findings)
    return CheckReport(
        config=config,
        run=run,
        plan=plan,
        findings=findings,
        manifest=manifest,
        usage=used,
        cost=chain_cost(config, plan, run, future, now=time.time()),
        forecast=future,
    )


def check_config(config: CommonConfig, given: LocatedSettings | None = None) -> Findings:
    """Look at what the config alone, and this machine's Pythons, tell."""
    findings = settings_findings(config, given)
    programs.check_programs(config, findings)
    return findings


def settings_findings(config: CommonConfig, given: LocatedSettings | None = None) -> Findings:
    """Look at the settings themselves; nothing that they name is started or opened."""
    findings = Findings(config, given)
    settings.check_settings(config, findings)
    slurm.check_job_settings(config, findings)
    return findings


def with_editions(config: RunConfig, run: Run, manifest: Manifest) -> RunConfig:
    """The config with the names under which a run that has begun counts its data sets, if it accepts them."""
    with contextlib.suppress(RelayrunError):
        evolved = existing_run.evolved_data(config, run, manifest, accept=True)
        return config if evolved is None else evolved.config
    return config


def _check_gpu_memory(future: Forecast, findings: Findings) -> None:
    needed, there = future.memory.total, future.gpu_memory
    words = f"the fullest GPU needs {format_bytes(needed)} by formula"
    if not future.gpus:
        return
    if there is None:
        findings.skip("memory.gpu", f"{words}; cluster.gpu_memory_gb does not say what it has", value=round(needed))
    elif needed > USABLE_GPU_MEMORY * there:
        usable = format_bytes(USABLE_GPU_MEMORY * there)
        words += f"; {USABLE_GPU_MEMORY:.0%} of its {format_bytes(there)} are {usable}"
        remedy = "lower training.micro_batch_size, set training.recompute_granularity, or split the model further"
        findings.warn("memory.gpu", words, setting="training.micro_batch_size", value=round(needed), remedy=remedy)
    else:
        findings.assume("memory.gpu", f"{words}, of {format_bytes(there)}", value=round(needed))


def _check_host_memory(future: Forecast, findings: Findings) -> None:
    """Compare the copies of saves with the memory of a job; further memory of a rank is not counted."""
    there, needed = future.config.job.mem_bytes, future.host_copies
    if not there or not needed:
        return
    words = f"copies of saves take {format_bytes(needed)} of a node's memory by formula"
    words += f", of {format_bytes(there)} in job.mem"
    if needed > USABLE_GPU_MEMORY * there:
        remedy = "ask for more memory, take more nodes, or set checkpoint.async_save=false"
        findings.warn("memory.host", words, setting="job.mem", value=needed, remedy=remedy)
    else:
        findings.assume("memory.host", words, value=needed)
