"""The check of a plan: every run of a sweep or of stages, and what a stage takes over from the stage before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.config.compose.campaign import CampaignDescription, CampaignRunDescription
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.errors import ConfigError
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import QUIET_LEVELS, CheckFinding, count_noun
from relayrun.submit.check.rehearsal import RateEdge, tell_rate_changes
from relayrun.submit.check.report import CheckReport
from relayrun.submit.check.report_text import check_report_as_json, findings_table
from relayrun.submit.dry_load import CommonValues, refuse_other_values, values_after
from relayrun.submit.initial_checkpoint import refuse_other_model
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.shards.manifest import Manifest
from relayrun.watch.text import print_table


@dataclass(frozen=True, kw_only=True)
class CampaignReport:
    """The result of a check of all runs of a campaign."""

    described: CampaignDescription
    reports: dict[str, CheckReport]
    """Report of each run, by its name in the campaign."""

    @property
    def refused(self) -> bool:
        return any(report.findings.errors for report in self.reports.values())

    def common_findings(self) -> list[CheckFinding]:
        """Return the findings that are equal for all runs."""
        first, *others = (report.findings.all for report in self.reports.values())
        return [finding for finding in first if all(finding in each for each in others)]


def check_campaign(described: CampaignDescription) -> CampaignReport:
    """Look at every run as `check_submission` does, and at each edge of stages; nothing is written or queued."""
    reports = {
        run.name: submission.check_submission(_without_load(run), given=run.given, intent=SubmitIntent())
        for run in described.runs
    }
    manifests = {name: report.manifest for name, report in reports.items() if report.manifest is not None}
    faults = {run.name: fault for run, fault in stage_faults(described, manifests)}
    for run in described.runs:
        findings = reports[run.name].findings
        if run.name in faults:
            findings.add_error("stage.checkpoint", faults[run.name])
        elif isinstance(run.config, RunConfig) and run.source is not None:
            data = " and order of the data" if {run.name, run.source} <= manifests.keys() else ""
            findings.ok("stage.checkpoint", f"ranks can load what {run.source} will save: model, optimizer{data}")
    _tell_rates(described, reports)
    return CampaignReport(described=described, reports=reports)


def _without_load(run: CampaignRunDescription) -> CommonConfig:
    """Return the config of a run; of a stage without the checkpoint that the stage before has yet to save."""
    saves = run.config.checkpoint_section
    if run.source is None or saves is None:
        return run.config
    return run.config.model_copy(update={"checkpoint": saves.model_copy(update={"load": None})})


def _tell_rates(described: CampaignDescription, reports: Mapping[str, CheckReport]) -> None:
    """Add the learning rate before and behind each edge of native stages to the findings of the stage behind it."""
    begins: dict[str, TrainingProgress] = {}
    edges: list[RateEdge] = []
    configs = {run.name: run.config for run in described.runs if isinstance(run.config, RunConfig)}
    for run in described.runs:
        if (own := configs.get(run.name)) is None:
            continue
        begins[run.name] = TrainingProgress(own.training.batch_sizes)
        if (before := configs.get(run.source or "")) is not None and not run.counts_from_zero:
            first = begins[run.source or ""]
            end, leg = run.iteration or before.training.end_iteration, first.legs[-1]
            at = TrainingProgress(leg.sizes, iteration=end, consumed_samples=leg.consumed(end), legs=first.legs)
            edges.append((before, own, at, reports[run.name].findings))
            if not own.checkpoint.no_load_data:
                begins[run.name] = TrainingProgress.resume(at.state(), own.training.batch_sizes)
    tell_rate_changes("stage.learning_rate", edges)
    for _, own, at, findings in edges:
        length, end = own.optimizer.lr_wsd_decay_steps or 0, own.lr_steps(at.reaches)[1]
        if length and (held := end - length - at.iteration) > 0:
            words = f"{count_noun(held, 'step')} at a constant rate come before the decay of "
            findings.ok("stage.decay", words + count_noun(length, "step"))


def print_campaign_report(report: CampaignReport) -> None:
    """Print the findings that all runs have, then those of single runs that need a look, and the verdict."""
    common = report.common_findings()
    print_table(findings_table(common))
    for name, each in report.reports.items():
        own = [found for found in each.findings.all if found not in common]
        if shown := [found for found in own if found.level not in QUIET_LEVELS or found.name.startswith("stage.")]:
            print(f"{name}:", flush=True)
            print_table(findings_table(shown))
    errors = sum(len(each.findings.errors) for each in report.reports.values())
    verdict = "submit would refuse this" if errors else "submit would take this"
    print(f"{count_noun(len(report.reports), 'run')}, {count_noun(errors, 'error')}: {verdict}")


def campaign_report_as_json(report: CampaignReport) -> dict[str, Any]:
    """Return a report for JSON: that of each run by its name in the plan."""
    runs = {name: check_report_as_json(each, []) for name, each in report.reports.items()}
    return {"campaign": report.described.name, "refused": report.refused, "runs": runs}


def check_stages(described: CampaignDescription, manifests: Mapping[str, Manifest]) -> None:
    """Raise ConfigError if a stage cannot load what the stage before saves. `manifests`: known data by stage."""
    for run, fault in stage_faults(described, manifests):
        raise ConfigError(f"stage {run.name}: {fault.message}", where=fault.where, hint=fault.hint)


def stage_faults(
    described: CampaignDescription, manifests: Mapping[str, Manifest]
) -> Iterator[tuple[CampaignRunDescription, ConfigError]]:
    """Yield each native stage that cannot load what the stage before saves, and the reason."""
    runs = {run.name: run for run in described.runs}
    saved: dict[str, CommonValues] = {}
    for run in described.runs:
        before, own, manifest = runs.get(run.source or ""), run.config, manifests.get(run.name)
        if not isinstance(own, RunConfig):
            continue
        if before is not None and isinstance(before.config, RunConfig):
            folder = Path(before.run_dir)
            try:
                refuse_other_model(before.config.model, own, folder, hint="let both stages have one model")
                refuse_other_values(saved[before.name], own, manifest, folder)
            except ConfigError as error:
                where = run.given.place(("checkpoint", "load")) or run.name
                yield run, ConfigError(error.message, where=where, hint=error.hint)
        saved[run.name] = values_after(own, manifest, saved.get(run.source or ""))
