"""What can be known to be wrong before anything is submitted."""

from __future__ import annotations

import importlib.util
import logging
import math
import tempfile
from pathlib import Path

from relayrun.config import determinism
from relayrun.config.schema import RunConfig
from relayrun.config.setup_lines import check_setup
from relayrun.config.writable import check_writable
from relayrun.data.order.samples import SampleOrder
from relayrun.errors import ConfigError, InputError
from relayrun.rundir.lead import SAVES
from relayrun.rundir.lineage import Lineage
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.rundir.start_time import start_seconds
from relayrun.scheduler import sbatch_options
from relayrun.shards.made_by import check_tokenizer
from relayrun.shards.manifest import Manifest
from relayrun.slurmtime import format_time

log = logging.getLogger(__name__)

OWN_ORDERS = ("window", "megatron")
"""Those that cut a stream of tokens into windows; what a user's own makes of few tokens only it knows."""


def check(config: RunConfig) -> None:
    """Raise a RelayrunError for the first thing that would make a job fail.

    The schema has judged the numbers already; here are the things that lie outside the config.
    """
    if config.parallel.context_parallel_size > 1 or config.training.transformer_impl == "transformer_engine":
        _check_transformer_engine(config)
    if config.job.gpus_per_node:
        config.training.require_precision()
    if config.training.deterministic:
        cluster = config.cluster
        determinism.check_environment(cluster.environment, where=f"cluster.environment of {cluster.name!r}")
    _check_evaluation(config)


def check_outputs(config: RunConfig, logs: Path) -> None:
    """Raise ConfigError where a job of the run would write below a path that its cluster protects.

    Checkpoints, records, evaluations and debugging's files lie in the run directory. `logs`: the folder of the jobs'.
    """
    check_writable(
        {"run_dir": config.run_dir, "data.data_cache_dir": config.data.data_cache_dir, "the jobs' logs": logs},
        cluster=config.cluster.name,
        read_only_paths=config.cluster.read_only_paths,
    )


def check_job(config: RunConfig) -> None:
    """Raise ConfigError for an option that sbatch does not have, and for lines of a job that Bash cannot read."""
    check_setup(config.job.setup, where="job.setup")
    if config.cluster.scheduler == "slurm":
        sbatch_options.check(config.job.sbatch, where="job.sbatch")
        if config.evaluation is not None:
            sbatch_options.check(config.evaluation.job.sbatch, where="evaluation.job.sbatch")


def check_data(config: RunConfig, manifest: Manifest, *, begun: bool) -> None:
    """Raise a RelayrunError for a data set without one whole sample, or made with another tokenizer than the run's.

    `manifest`: without editions. `begun`: the run exists, and was told of shards without a record.
    """
    training, data = config.training, config.data
    for name, source in data.sources.items():
        if (source.order or data.order) in OWN_ORDERS and not data.mock_data:
            SampleOrder(manifest.datasets[name], seq_length=training.seq_length, seed=0, name=name, split=data.split)
    for name, shards in manifest.validation.items():
        SampleOrder(shards, seq_length=training.seq_length, seed=0, name=name)
    if data.mock_data:
        return
    allow, ends_matter = data.allow_other_tokenizer, data.depends_on_ends
    if (without := check_tokenizer(manifest, allow=allow, ends_matter=ends_matter, look=True)) and not begun:
        log.info("%d shards do not say which tokenizer made them; ids are checked again as they are read", without)


def check_time_limit(config: RunConfig, plan: Plan, run: Run) -> None:
    """Raise a ConfigError where leaving, or what start and save took in earlier attempts, needs the whole job.time."""
    limit = f"job.time ({plan.time_limit} s)"
    for name, seconds in (("lead", plan.lead), ("signal_lead", float(plan.signal_lead))):
        if getattr(config.chain, name) != "auto" and seconds >= plan.time_limit:
            raise ConfigError(
                f"chain.{name} {seconds:.0f} leaves nothing of {limit}",
                hint=f"raise job.time, or leave chain.{name} to be measured (auto)",
            )
    starts, saves = start_seconds(run), Lineage(run).newest_saves(SAVES)
    if not starts:
        return
    start, save = min(starts), min(saves, default=0.0)
    leaving = max(save, plan.lead_floor)
    if start + leaving >= plan.time_limit:
        raise ConfigError(
            f"in earlier attempts the start took {start:.0f} s at best and a save {save:.0f} s (leaving is given "
            f"{leaving:.0f} s): nothing of {limit} is left to train in",
            hint=f"raise job.time, to {format_time(math.ceil(2 * (start + leaving)))} or more",
        )


def check_log_folder(folder: Path) -> None:
    """Make the folder of the jobs' logs. Raises InputError if this user cannot write there: jobs die without a word."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # asks the file system: root and NFS judge otherwise than the mode
            pass
    except OSError as error:
        raise InputError(
            f"the folder of the jobs' logs cannot be written: {error.strerror}, so every job would end at once",
            where=folder,
            hint="let its owner open it (chmod g+w), or use a checkout of your own",
        ) from None


def _check_evaluation(config: RunConfig) -> None:
    settings = config.evaluation
    if settings is None:
        return
    if not settings.tasks and not config.data.validation and not config.data.split:
        raise ConfigError(
            "there is nothing to evaluate on: neither tasks nor a validation set",
            where="evaluation",
            hint="name tasks of lm-evaluation-harness, or set data.validation",
        )
    # another Python's packages are not known here
    if settings.tasks and config.cluster.python is None and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "lm-evaluation-harness is not installed",
            where="evaluation.tasks",
            hint="pip install 'relayrun[evaluation]', or name no tasks",
        )
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise ConfigError("there is no such folder", where=f"evaluation.include_path: {settings.include_path}")


def _check_transformer_engine(config: RunConfig) -> None:
    cluster = config.cluster
    here = cluster.python is None and importlib.util.find_spec("transformer_engine") is not None
    if not (cluster.transformer_engine or here):
        what = "parallel.context_parallel_size above 1"
        if config.training.transformer_impl == "transformer_engine":
            what = "training.transformer_impl=transformer_engine"
        raise ConfigError(
            f"{what} needs TransformerEngine, which this Python does not have and cluster {cluster.name!r} does not "
            "declare",
            where=f"configs/clusters/{cluster.name}.yaml",
            hint="set transformer_engine: true there if the ranks' container has it",
        )
