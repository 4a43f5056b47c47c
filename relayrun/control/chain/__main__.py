"""`python3 -m relayrun.control.chain COMMAND`: for launchers/lib, `watch` and the agents."""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

from relayrun.control.chain import background, failover, supervisor, watch
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.checkpoint_hashes import hash_new_checkpoints
from relayrun.errors import run_main

EXIT_DISK_FULL = 28
"""Exit code of `begin` if the disk of the run directory is full: `launchers/lib/again.sh` waits longer."""


def main() -> int:
    """Run the supervisor command of the command line; return its exit code. Raises RelayrunError."""
    parser = argparse.ArgumentParser(prog="relayrun.control.chain", description="The supervisor beside the ranks.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("begin", "watch", "guard", "end", "orphaned", "fallback", "tell", "hash"):
        command = commands.add_parser(name)
        command.add_argument("--run-dir", type=Path, required=True)
        if name not in ("begin", "fallback", "tell"):
            command.add_argument("--attempt", type=int, required=True)
        if name in ("watch", "guard"):
            command.add_argument("--batch-pid", type=int, required=True)
        if name == "end":
            command.add_argument("--exit-code", type=int, required=True)
        if name == "orphaned":
            command.add_argument("--node", type=int, required=True)
            command.add_argument("--restart", type=int, required=True)
    options = parser.parse_args()
    run = Run(options.run_dir)
    if options.command == "begin":
        try:
            return supervisor.begin_attempt(run)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            print(f"error: {run.path}: {error.strerror}", file=sys.stderr)
            return EXIT_DISK_FULL
    if options.command == "watch":
        watch.Watch(run, options.attempt).loop(options.batch_pid)
        return 0
    if options.command == "guard":
        return watch.run_guard(run, options.attempt, batch_pid=options.batch_pid)
    if options.command == "orphaned":
        return failover.close_orphaned_attempt(run, options.attempt, node=options.node, restart_number=options.restart)
    if options.command == "fallback":
        return failover.run_fallback_job(run)
    if options.command == "hash":
        hash_new_checkpoints(run, run.attempt(options.attempt))
        return 0
    if options.command == "tell":
        background.send_notices(run, Plan.load_in_job(run))
        return 0
    return supervisor.end_attempt(run, options.attempt, options.exit_code)


if __name__ == "__main__":
    sys.exit(run_main(main))
