"""`relayrun save`, `relayrun stop` and `relayrun cancel`: ask a chain for a checkpoint, or end it."""

from __future__ import annotations

import argparse
import os

from relayrun.cli import add_run
from relayrun.control.chain import campaign
from relayrun.control.chain.jobs import cancel_chain
from relayrun.control.chain.stop_requests import request_save, request_stop
from relayrun.control.rundir import find_runs
from relayrun.control.rundir.campaign import campaign_folders
from relayrun.errors import user_name
from relayrun.watch import unsent_notices
from relayrun.watch.status import queue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun save`, `relayrun stop` and `relayrun cancel`."""
    add_run(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Request a checkpoint, or end the chain, after a checkpoint or at once."""
    found = find_runs.find_run(options.name)
    scheduler = queue.run_scheduler(found)
    if options.command == "save":
        print(request_save(found, scheduler))
    else:
        end = request_stop if options.command == "stop" else cancel_chain
        print(end(found, scheduler, user=user_name(os.geteuid())))
    unsent_notices.send_in_background(found)
    campaign.start_due_members(campaign_folders([found]))
    return 0
