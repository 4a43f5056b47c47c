"""`relayrun drill`: the faults that a chain must survive, on one's own cluster, with a page for the operations team."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.config.compose.writable import check_writable
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError, InputError
from relayrun.files import atomic_file
from relayrun.lab.faults import page, session
from relayrun.lab.faults.control import TestClusterControl
from relayrun.lab.faults.perform import DrillTools
from relayrun.lab.faults.reach import LocalSignalSender, StepSignalSender
from relayrun.lab.faults.session import DrillSession
from relayrun.lab.faults.small_run import DrillSite
from relayrun.lab.gpucheck.site import read_cluster
from relayrun.watch.status.run_status_text import json_text
from relayrun.watch.status.terminal import print_table

DEFAULT_FAULTS = "rank-killed,batch-script-killed,latest-torn,rank-stopped,cancelled,crash-loop"
"""What is done where nobody names faults: the commonest, in less than an hour."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C."""


def add_drill_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun drill`."""
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a file of configs/clusters/, by its name or path"
    )
    parser.add_argument("--faults", default=DEFAULT_FAULTS, metavar="NAME,...", help="or all (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of a job (default: %(default)s)")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="that all nodes see; default: logs/drill/CLUSTER")
    parser.add_argument("--list", action="store_true", help="the faults, and which are left out here; nothing is done")
    parser.add_argument("--yes", action="store_true", help="do not ask before jobs are queued")
    parser.add_argument("--again", action="store_true", help="do rows again that are done")
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    parser.add_argument("--time", type=int, default=15, metavar="MINUTES", help="limit of a job (default: %(default)s)")
    parser.add_argument(
        "--queue", type=float, default=60, metavar="MINUTES", help="how long a job may wait (default: %(default)s)"
    )
    parser.add_argument(
        "--test-cluster",
        type=Path,
        metavar="DIR",
        help="the folder of scripts/tools/test_cluster.sh: its daemons may be ended, too",
    )
    parser.set_defaults(run=run_drill)


def run_drill(options: argparse.Namespace) -> int:
    """Do the rows that are not done, and write the page; return 1 where one failed, 130 after Ctrl-C."""
    faults = session.select_faults("all" if options.list else options.faults)
    cluster = read_cluster(options.cluster)
    if cluster.get("scheduler") != "slurm":
        raise ConfigError(f"cluster {cluster['name']} has no Slurm, whose jobs the drill disturbs", where="--cluster")
    control = None if options.test_cluster is None else TestClusterControl(options.test_cluster)
    skipped = session.skipped_faults(faults, test_cluster=control is not None)
    if options.list:
        for fault in faults:
            reason = f" (left out: {skipped[fault.name]})" if fault.name in skipped else ""
            print(f"{fault.name}: {fault.what}{reason}")
        return 0
    company = DrillTools(
        site=_drill_site(options, cluster),
        slurm=Slurm(patience=120),
        reach=StepSignalSender(Slurm(patience=30)) if control is None else LocalSignalSender(),
        control=control,
        queue_seconds=60 * options.queue,
        tell=lambda words: print(words, file=sys.stderr if options.json else sys.stdout, flush=True),
    )
    drill = DrillSession(company, faults, skipped=skipped)
    with drill.locked():
        return _run_session(drill, options)


def _drill_site(options: argparse.Namespace, cluster: dict[str, Any]) -> DrillSite:
    """Where the drill takes place. Raises ConfigError where a number is none, or the folder cannot be written."""
    for name, value in (("--nodes", options.nodes), ("--time", options.time), ("--queue", options.queue)):
        if value < 1:
            raise ConfigError(f"{value} is less than 1", where=name)
    folder = options.directory or places.project_folder() / "logs" / "drill" / cluster["name"]
    check_writable({"--directory": folder}, cluster=cluster["name"], read_only_paths=cluster.get("read_only_paths", []))
    return DrillSite(folder=folder.expanduser().absolute(), cluster=cluster, nodes=options.nodes, minutes=options.time)


def _run_session(drill: DrillSession, options: argparse.Namespace) -> int:
    tell = drill.company.tell
    for name, reason in drill.skipped.items():
        tell(f"{name} is left out: {reason}")
    if options.again:
        drill.again()
    stopped = False
    if names := drill.to_do():
        drill.check()
        tell(f"{drill.cost(names).words}; in {drill.folder}")
        if not options.yes and not _confirmed():
            tell("nothing was queued")
            return 1
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            drill.go_on()
        except KeyboardInterrupt:
            stopped = True
        finally:
            signal.signal(signal.SIGTERM, before)
            _write_reports(drill)
    else:
        _write_reports(drill)
    if options.json:
        print(json_text(page.session_as_json(drill)))
    else:
        print_table(page.terminal_table(drill))
    tell(f"{drill.folder / 'drill.html'} and drill.md say it, too")
    if stopped:
        tell("stopped; the same command goes on behind the rows that are done")
        return INTERRUPTED_EXIT_CODE
    return 0 if page.all_passed(drill.results()) else 1


def _write_reports(drill: DrillSession) -> None:
    for name, text in (("drill.md", page.markdown_report(drill)), ("drill.html", page.html_report(drill))):
        with atomic_file(drill.folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _confirmed() -> bool:
    """Whether a person says yes. Raises InputError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise InputError("nobody can be asked whether to queue this", hint="add --yes")
    return input("Queue these jobs? [y/N] ").strip().lower() in ("y", "yes")
