"""What the jobs of a run ask of sbatch, and a person's own lines in them."""

from __future__ import annotations

from relayrun.config.compose.schema import CommonConfig
from relayrun.config.sections.setup_lines import check_setup_lines
from relayrun.control.scheduler import sbatch_options
from relayrun.submit.check.findings import Findings


def check_job_settings(config: CommonConfig, findings: Findings) -> None:
    """Look at options that sbatch does not have, at lines that Bash cannot read, and at what a site file guesses."""
    with findings.catching("job.options"):
        refuse_job_settings(config)
    if config.cluster.not_checked:
        findings.warn(
            "job.site",
            f"the site file of {config.cluster.name} was written without having read in the site's documentation: "
            + "; ".join(config.cluster.not_checked),
            setting="cluster.not_checked",
            remedy="ask the site's documentation, or sinfo, and take out of cluster.not_checked what is right",
        )


def refuse_job_settings(config: CommonConfig) -> None:
    """Raise ConfigError for an option that sbatch does not have, and for lines of a job that Bash cannot read."""
    check_setup_lines(config.job.setup, where="job.setup")
    if config.cluster.scheduler == "slurm":
        sbatch_options.check_sbatch_options(config.job.sbatch, where="job.sbatch")
        if config.evaluation is not None:
            sbatch_options.check_sbatch_options(config.evaluation.job.sbatch, where="evaluation.job.sbatch")
