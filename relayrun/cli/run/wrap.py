"""`relayrun wrap`: a batch script as it is becomes the program of a chain."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from relayrun.cli import add_set_option
from relayrun.errors import combined_error
from relayrun.submit.sbatch_header import Adopted
from relayrun.submit.wrap import wrap


def add_wrap_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun wrap`."""
    words = "path of its checkpoints with {iteration}, from the script's folder: 'out/epoch=*-step={iteration}.ckpt'"
    parser.add_argument("--checkpoints", required=True, metavar="PATTERN", help=words)
    lines = r"a line of its log: 'step (?P<iteration>\d+)'; without it any new line or checkpoint is a sign of life"
    parser.add_argument("--progress", metavar="REGEX", help=lines)
    parser.add_argument("--cluster", default="generic", help="the site of the run, a file of configs/clusters")
    add_set_option(parser, "any other setting: --set command.checkpoint.whole_when=done, --set name=second")
    parser.add_argument("--resume", action="store_true", help="go on although the chain of this run has ended")
    parser.add_argument("--yes", action="store_true", help="submit without a question, as for `relayrun submit`")
    parser.add_argument("--dry-run", action="store_true", help="print the job script; write and submit nothing")
    parser.add_argument("script", type=Path, help="a script for sbatch")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=lambda options: submit(options))


def wrapped(options: argparse.Namespace, *, one_machine: bool = False) -> Adopted:
    """Return the settings of the script. Raises ConfigError for lines that are not taken."""
    told = {"checkpoints": options.checkpoints, "site": options.cluster, "one_machine": one_machine}
    found = wrap(options.script, options.arguments, **told)
    if found.errors:
        raise combined_error(found.errors, "lines of the script are not taken")
    if options.progress is not None:
        found.settings["command"]["progress"] = options.progress
    return found


def submit(options: argparse.Namespace) -> int:
    """Submit with all checks of a run config; relayrun.pyz, without their packages, has another function here."""
    from relayrun.cli.run.submit import print_dry_run, print_submitted
    from relayrun.config.compose import resolve, sites
    from relayrun.config.compose.yaml_file import LocatedSettings
    from relayrun.config.sections.batch_systems import batch_system
    from relayrun.submit.check.existing_run import SubmitIntent
    from relayrun.submit.cost import confirm_cost
    from relayrun.submit.submission import submit_run

    site = sites.read_site(options.cluster, folders=sites.site_folders(None), where="--cluster").values
    found = wrapped(options, one_machine=batch_system(str(site.get("scheduler"))).one_machine)
    own = found.settings.pop("cluster_settings")
    given = resolve.compose_settings(LocatedSettings(found.settings), options.overrides, of_cluster=own)
    if options.dry_run:
        return print_dry_run(given, SubmitIntent(resume=options.resume))
    confirm, config = partial(confirm_cost, yes=options.yes), resolve.validate_settings(given)
    print_submitted(submit_run(config, resume=options.resume, given=given, confirm=confirm))
    return 0
