"""From the config of a campaign to its run directories: all of them are made, or none, and the first runs begin.

`campaign.json` is written last. Whoever is killed before it has queued nothing, and may submit again; whoever is killed
behind it leaves a campaign whose runs any command begins.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from relayrun.config.compose import compose
from relayrun.config.compose.campaign import CampaignDescription, CampaignRunDescription
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, RelayrunError, RunDirError
from relayrun.submit import submission
from relayrun.submit.check.state import SubmitIntent
from relayrun.submit.initial_checkpoint import refuse_other_model


def submit_campaign(described: CampaignDescription) -> bool:
    """Make the run directories and the campaign; return whether it is new. Nothing is queued by it.

    A campaign that is there already, with the same runs, is left as it is. Raises RelayrunError; then there is none.
    """
    whole, folder = make_campaign(described), described.folder
    check_stages(described)
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
                _refuse_foreign_run(Run(Path(run.config.run_dir or "")), folder)
                membership = CampaignMembership(folder=str(folder), member=run.member)
                stack.enter_context(
                    submission.prepared_run(
                        run.config,
                        SubmitIntent(),
                        run.given,
                        membership=membership,
                        awaited=run.source is not None,
                    )
                )
            whole.save(folder)
    except BaseException:
        if made:
            _remove_folder(folder)
        raise
    return True


def make_campaign(described: CampaignDescription) -> Campaign:
    """What is written of a described campaign."""
    return Campaign(
        kind=described.kind,
        name=described.name,
        owner=os.geteuid(),
        scheduler=described.runs[0].config.cluster.scheduler,
        at_once=described.at_once,
        members=[
            CampaignMember(
                name=run.member,
                run_dir=run.config.run_dir or "",
                settings=run.settings,
                source=run.source,
                iteration=run.iteration,
                after=run.after,
                evaluated=run.evaluated,
                counts_from_zero=run.counts_from_zero,
            )
            for run in described.runs
        ],
    )


def check_stages(described: CampaignDescription) -> None:
    """Look at what a stage is handed by the one before it. Raises ConfigError."""
    by_name = {run.member: run for run in described.runs}
    for run in described.runs:
        if run.source is not None:
            _check_model(by_name[run.source], run)


def _check_model(before: CampaignRunDescription, run: CampaignRunDescription) -> None:
    """Raise ConfigError unless the weights of the stage before are those of this one's model."""
    if isinstance(before.config, RunConfig) and isinstance(run.config, RunConfig):
        try:
            refuse_other_model(before.config.model, run.config, Path(before.config.run_dir or ""))
        except ConfigError as error:
            where = run.given.place(("checkpoint", "load")) or run.member
            hint = "let both stages have one model"
            raise ConfigError(f"stage {run.member}: {error.message}", where=where, hint=hint) from None


def _refuse_foreign_run(run: Run, folder: Path) -> None:
    """Raise RunDirError where a run lies in the place of a member, and is none of this campaign's."""
    membership = campaign.read_membership(run)
    strange = run.plan.exists() and (membership is None or membership.folder != str(folder))
    if strange or run.newest_begun() is not None:
        raise RunDirError("a run lies there already", where=run.path, hint="give this config another name")


def _refuse_changed_campaign(described: CampaignDescription, whole: Campaign) -> None:
    """Raise ConfigError unless the campaign that is there has these runs, with these settings."""
    there, folder = Campaign.load(described.folder), described.folder
    if there.owner != whole.owner:
        raise RunDirError("this campaign is another user's", where=folder, hint="give this config another name")
    word = "sweep" if whole.kind == "sweep" else "plan of stages"
    if there != whole:
        hint = f"give this config another name; `relayrun {whole.kind} status {described.name}` shows what is there"
        raise ConfigError(f"another {word} of this name is there", where=folder, hint=hint)
    for run in described.runs:
        own = Run(Path(run.config.run_dir or ""))
        revision = min(own.revisions(), default=None)
        try:
            same = revision is not None and _comparable_settings(
                compose.read_resolved_config(own.config_revision(revision))
            ) == (_comparable_settings(run.config))
        except RelayrunError:
            same = False
        if not same:
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


def _remove_folder(folder: Path) -> None:
    """Remove what this submit made of a campaign that it could not make."""
    for path in (folder / "campaign.json", folder / "lock"):
        path.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:  # somebody has put something there meanwhile
        return
