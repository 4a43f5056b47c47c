"""Sweeps and stages: from the config of a campaign to its run directories, and the state of its runs side by side.

`submit_campaign` makes all run directories or none, and writes `campaign.json` last: after a kill before that nothing
is queued and the submit can be repeated; after a kill behind that any command starts the runs. `check_campaign` checks
every run, and what a stage takes over from the stage before it. `read_campaign_status` and `print_campaign` show
settings that differ, state, loss and cost of the runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.campaign import CampaignDescription, CampaignRunDescription
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.control.chain.budget import budget_end
from relayrun.control.chain.campaign import member_readiness
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership
from relayrun.control.rundir.plan import cost_words
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, RelayrunError, RunDirError, user_name
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import QUIET_LEVELS, count_noun
from relayrun.submit.check.rehearsal import RateEdge, tell_rate_changes
from relayrun.submit.check.report import CheckReport
from relayrun.submit.check.report_text import print_findings
from relayrun.submit.cost import ChainCost, chain_cost
from relayrun.submit.dry_load import CommonValues, refuse_other_values, values_after
from relayrun.submit.initial_checkpoint import refuse_other_model
from relayrun.submit.run_plan import make_plan
from relayrun.terminal import print_rows
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.shards.manifest import Manifest
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun
from relayrun.watch.status.tables import RUN_COLUMNS, run_cells
from relayrun.watch.text import format_optional


@dataclass(frozen=True, kw_only=True)
class CampaignReport:
    """The result of a check of all runs of a campaign."""

    described: CampaignDescription
    reports: dict[str, CheckReport]
    """Report of each run, by its name in the campaign."""

    @property
    def refused(self) -> bool:
        return any(report.findings.errors for report in self.reports.values())


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
    first, *others = (each.findings.all for each in report.reports.values())
    common = [finding for finding in first if all(finding in each for each in others)]
    print_findings(common)
    for name, each in report.reports.items():
        own = [found for found in each.findings.all if found not in common]
        if shown := [found for found in own if found.level not in QUIET_LEVELS or found.name.startswith("stage.")]:
            print(f"{name}:", flush=True)
            print_findings(shown)
    errors = sum(len(each.findings.errors) for each in report.reports.values())
    verdict = "submit would refuse this" if errors else "submit would take this"
    print(f"{count_noun(len(report.reports), 'run')}, {count_noun(errors, 'error')}: {verdict}")


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


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """A run of a campaign at one moment."""

    member: CampaignMember
    status: RunStatus | DamagedRun
    node_hours: float | None
    """Node hours of all its jobs; None if they are not known."""
    words: str
    """Reason of the wait, or of the end."""

    @property
    def state(self) -> str:
        """State of the run, see `summary.RunState`, or `damaged`."""
        return "damaged" if isinstance(self.status, DamagedRun) else self.status.state

    def as_json(self) -> dict[str, Any]:
        """Return the member's name, settings, condition and words, and all fields of its run's status."""
        names = {"member": self.member.name, "settings": self.member.settings, "begins": start_condition(self.member)}
        return names | {"state": self.state, "node_hours": self.node_hours, "words": self.words} | asdict(self.status)


def read_campaign_status(folder: Path, *, now: float) -> list[MemberStatus]:
    """Look at every run of a campaign. Raises RunDirError if there is none."""
    whole = Campaign.load(folder)
    statuses = RunsWatcher().statuses([member.run for member in whole.members], now=now)
    found, entries = {status.path: status for status in statuses}, []
    for member in whole.members:
        status = found[member.run_dir]
        words = run_cells(status)[-1]
        if isinstance(status, RunStatus) and status.state == "queued" and not status.has_job:
            words = _wait_reason(folder, whole, member)
        hours = None
        with suppress(RelayrunError, OSError, ValueError):  # a cost is worth no error
            hours = account_for_run(member.run).node_hours
        entries.append(MemberStatus(member=member, status=status, node_hours=hours, words=words))
    return entries


def _wait_reason(folder: Path, whole: Campaign, member: CampaignMember) -> str:
    stopped = campaign.campaign_stop_reason(folder)
    if stopped is not None:
        return f"nothing more begins: {stopped}"
    ready = member_readiness(folder, whole, member)
    return (ready.why if ready is not None else "") or "waits for its turn"


def start_condition(member: CampaignMember) -> str:
    """Return the condition of a member's start, in words; empty: at once."""
    if member.after is not None:
        return f"after {member.after}"
    if member.source is None:
        return ""
    at = member.source if member.iteration is None else f"{member.source}:{member.iteration}"
    return f"from {at}"


def print_campaign(entries: Sequence[MemberStatus]) -> None:
    """Print a table with a line a run, the settings that differ in a column each."""
    settings = [entry.member.settings for entry in entries]
    names = dict.fromkeys(name for each in settings for name in each)
    differing = [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]
    conditions = [start_condition(entry.member) for entry in entries]
    begins = ["begins"] if any(conditions) else []
    columns = ["run", *(f"{name}|n" for name in differing), *begins, *RUN_COLUMNS[1:6:2], "node hours|n", "why"]
    rows = []
    for entry, own, condition in zip(entries, settings, conditions, strict=True):
        name, *cells = run_cells(entry.status)[:6]
        values = [yaml_file.value_in_line(own[each]) if each in own else "" for each in differing]
        why = "" if entry.state == "done" else entry.words
        hours = format_optional(entry.node_hours, ".2f")
        if entry.node_hours and isinstance(entry.status, RunStatus):
            hours += cost_words(entry.node_hours, entry.status)
        rows.append([name, *values, *[condition] * len(begins), *cells[::2], hours, why])
    print_rows(columns, rows)


def submit_campaign(described: CampaignDescription) -> bool:
    """Make the run directories and the campaign; return whether it is new. Nothing is queued by it.

    A campaign that is there already, with the same runs, is left as it is. Raises RelayrunError; then there is none.
    """
    whole, folder = make_campaign(described), described.folder
    check_stages(described, {})  # before the data, which may take long to read
    if campaign.is_campaign(folder):
        _refuse_changed_campaign(described, whole)
        return False
    if (folder / "plan.json").exists():
        hint = "give this config another name"
        raise ConfigError(f"a run of the name {described.name} lies there", where=folder, hint=hint)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            for run in described.runs:
                _refuse_foreign_run(run.run, folder)
                membership = CampaignMembership(folder=str(folder), member=run.name)
                made_run = submission.prepared_run(
                    run.config, SubmitIntent(), run.given, membership=membership, awaited=run.source is not None
                )
                try:
                    stack.enter_context(made_run)
                except RelayrunError as error:
                    words = f"{'stage' if described.kind == 'stages' else 'run'} {run.name}: {error.message}"
                    raise type(error)(words, where=error.where, hint=error.hint) from None
            frozen = {run.name: run.run.manifest for run in described.runs if run.run.manifest.exists()}
            check_stages(described, {name: Manifest.read(path) for name, path in frozen.items()})
            whole.save(folder)
    except BaseException:
        if made:
            for path in (folder / "campaign.json", folder / "lock"):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody has put something there meanwhile
                folder.rmdir()
        raise
    return True


def campaign_cost(described: CampaignDescription) -> ChainCost:
    """Return the node hours of all runs together. How fast they are is not looked at."""
    most, limit, now = 0.0, 0.0, time.time()
    for run in described.runs:
        plan = make_plan(_without_load(run), run.run, places.CODE_ROOT, revision=0)
        most += chain_cost(run.config, plan, run.run, None, now=now).most
        limit = max(limit, budget_end(run.run, plan, nodes=plan.nodes_of_job, start=now).left)
    return ChainCost(most=min(most, limit), likely=None, config=described.runs[0].config)


def make_campaign(described: CampaignDescription) -> Campaign:
    """Return the record of a described campaign."""
    names = [field.name for field in fields(CampaignMember)]
    return Campaign(
        kind=described.kind,
        name=described.name,
        owner=os.geteuid(),
        scheduler=described.runs[0].config.cluster.scheduler,
        at_once=described.at_once,
        members=[CampaignMember(**{name: getattr(run, name) for name in names}) for run in described.runs],
    )


TAKE_OVER_HINT = "A run of another user goes on alone: `relayrun submit` the newest file in its config/ --take-over"


def _refuse_foreign_run(run: Run, folder: Path) -> None:
    """Raise RunDirError if a run lies in the place of a member, and is none of this campaign's."""
    membership = campaign.read_membership(run)
    strange = run.plan.exists() and (membership is None or membership.folder != str(folder))
    if strange or run.newest_begun() is not None:
        hint = f"give this config another name. {TAKE_OVER_HINT}"
        raise RunDirError("a run lies there already", where=run.path, hint=hint)


def _refuse_changed_campaign(described: CampaignDescription, whole: Campaign) -> None:
    """Raise ConfigError unless the campaign that is there has these runs, with these settings."""
    there, folder = Campaign.load(described.folder), described.folder
    if there.owner != whole.owner:
        words = f"this campaign is {user_name(there.owner)}'s"
        raise RunDirError(words, where=folder, hint=f"give this config another name. {TAKE_OVER_HINT}")
    word = "sweep" if whole.kind == "sweep" else "plan of stages"
    if replace(there, budget={}) != whole:
        hint = f"give this config another name; `relayrun {whole.kind} status {described.name}` shows what is there"
        raise ConfigError(f"another {word} of this name is there", where=folder, hint=hint)
    for run in described.runs:
        own, before = run.run, None
        with suppress(RelayrunError):  # no revision, or an unreadable one
            before = resolve.read_resolved_config(own.config_revision(min(own.revisions(), default=0)))
        if before is None or _comparable_settings(before) != _comparable_settings(run.config):
            hint = f"give this config another name, or go on with `relayrun {whole.kind} resume {described.name}`"
            raise ConfigError(f"this {word} was submitted with other settings", where=own.path, hint=hint)


def _comparable_settings(config: CommonConfig) -> dict[str, Any]:
    """The settings that a config gave: a submit adds the editions of data sets and the mean of the loss."""
    values: dict[str, Any] = config.model_dump(mode="json")
    if isinstance(values.get("training"), dict):
        values["training"].pop("loss_mean", None)
    if isinstance(values.get("data"), dict):
        values["data"].pop("mixture", None)
    return values
