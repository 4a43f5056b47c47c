"""The check of a plan: every run of a sweep or of stages, and what a stage takes over from the stage before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.config.compose.campaign import CampaignDescription, CampaignRunDescription
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import QUIET_LEVELS, CheckFinding, count_noun
from relayrun.submit.check.rehearsal import rate_changes
from relayrun.submit.check.report import CheckReport
from relayrun.submit.check.report_text import check_report_as_json, findings_table
from relayrun.submit.dry_load import LoadedState, refuse_other_state, state_after
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
        run.name: submission.check_submission(
            run.config, given=run.given, intent=SubmitIntent(), awaited=run.source is not None
        )
        for run in described.runs
    }
    manifests = {name: report.manifest for name, report in reports.items() if report.manifest is not None}
    for run, fault in stage_faults(described, manifests):
        reports[run.name].findings.add_error("stage.checkpoint", fault)
    _tell_rates(described, reports)
    for run in described.runs:
        name = run.name
        if run.source is not None and not any(each.name == "stage.checkpoint" for each in reports[name].findings.all):
            words = f"ranks can load what {run.source} will save: optimizer and model"
            words += ", and the order of the data" if {name, run.source} <= manifests.keys() else ""
            reports[name].findings.ok("stage.checkpoint", words)
    return CampaignReport(described=described, reports=reports)


def _tell_rates(described: CampaignDescription, reports: Mapping[str, CheckReport]) -> None:
    """Add the learning rate before and behind each edge of native stages to the findings of the stage behind it."""
    reached: dict[str, TrainingProgress] = {}
    edges: dict[str, tuple[RunConfig, RunConfig, TrainingProgress]] = {}
    configs = {run.name: run.config for run in described.runs if isinstance(run.config, RunConfig)}
    for run in described.runs:
        own, before = configs.get(run.name), configs.get(run.source or "")
        if own is None:
            continue
        begins = TrainingProgress(own.training.batch_sizes)
        if before is not None and run.source is not None and not run.counts_from_zero:
            at = _advanced(reached[run.source], run.iteration or before.training.end_iteration)
            edges[run.name] = before, own, at
            samples = 0 if own.checkpoint.no_load_data else at.consumed_samples
            legs = [] if own.checkpoint.no_load_data else at.legs
            begins = TrainingProgress(
                own.training.batch_sizes, iteration=at.iteration, consumed_samples=samples, legs=legs
            )
        reached[run.name] = begins
    changes, silent = rate_changes(list(edges.values()))
    for (name, (_, own, at)), change in zip(edges.items(), changes, strict=True):
        findings = reports[name].findings
        if change is None:
            findings.skip(
                "stage.learning_rate", f"the rate of its first step: {silent or 'the schedule cannot be made'}"
            )
        else:
            change.tell("stage.learning_rate", findings)
        if (held := _held(own, at)) > 0:
            steps = count_noun(own.optimizer.lr_wsd_decay_steps or 0, "step")
            findings.ok(
                "stage.decay", f"{count_noun(held, 'step')} at a constant rate come before the decay of {steps}"
            )


def _advanced(begins: TrainingProgress, iteration: int) -> TrainingProgress:
    """Return the progress of a stage at one of its iterations."""
    consumed = begins.legs[-1].consumed(iteration)
    sizes = begins.legs[-1].sizes
    return TrainingProgress(sizes, iteration=iteration, consumed_samples=consumed, legs=begins.legs)


def _held(config: RunConfig, at: TrainingProgress) -> int:
    """Return the iterations of WSD's constant learning rate that a stage has before its decay."""
    if config.optimizer.lr_wsd_decay_steps is None:
        return 0
    _, end = config.lr_steps(at.reaches)
    return end - config.optimizer.lr_wsd_decay_steps - at.iteration


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


def check_stages(described: CampaignDescription, manifests: Mapping[str, Manifest] | None = None) -> None:
    """Raise ConfigError if the ranks of a stage would refuse the checkpoint of the stage that it begins with.

    `manifests`: the data of the stages by name, as far as they are known.
    """
    for run, fault in stage_faults(described, manifests or {}):
        raise ConfigError(f"stage {run.name}: {fault.message}", where=fault.where, hint=fault.hint)


def stage_faults(
    described: CampaignDescription, manifests: Mapping[str, Manifest]
) -> Iterator[tuple[CampaignRunDescription, ConfigError]]:
    """Yield each native stage that cannot load what the stage before saves, and the reason."""
    runs = {run.name: run for run in described.runs}
    states: dict[str, LoadedState] = {}
    for run in described.runs:
        before, own = runs.get(run.source or ""), run.config
        if not isinstance(own, RunConfig):
            continue
        if before is not None and isinstance(before.config, RunConfig):
            where = run.given.place(("checkpoint", "load")) or run.name
            folder, state = Path(before.run_dir), states[before.name]
            try:
                refuse_other_model(before.config.model, own, folder, hint="let both stages have one model")
                refuse_other_state(state, own, manifests.get(run.name), folder)
            except ConfigError as error:
                yield run, ConfigError(error.message, where=where, hint=error.hint)
        states[run.name] = state_after(own, manifests.get(run.name), states.get(run.source or ""))
