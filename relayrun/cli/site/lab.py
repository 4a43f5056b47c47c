"""`relayrun gpu-check`, `drill`, `trial` and `site probe`: test GPUs, faults and programs, and measure a cluster."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relayrun import places
from relayrun.cli import add_set_option
from relayrun.config.compose import sites
from relayrun.config.compose.schema import ClusterSection
from relayrun.config.compose.writable import check_writable
from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.errors import ConfigError, InputError
from relayrun.files import atomic_file
from relayrun.lab import trial
from relayrun.lab.faults import session
from relayrun.lab.faults.experiment import FaultSite
from relayrun.lab.faults.session import FaultSession
from relayrun.lab.gpucheck import check, report
from relayrun.lab.gpucheck.check import PARTS
from relayrun.lab.gpucheck.performance import large_run_sections
from relayrun.lab.gpucheck.runs import checked_config
from relayrun.lab.gpucheck.setup import CheckSetup
from relayrun.lab.site_probe import SiteProbe, write_facts
from relayrun.terminal import print_rows
from relayrun.watch.text import json_text

DEFAULT_FAULTS = "rank-killed,batch-script-killed,latest-torn,rank-stopped,cancelled,crash-loop"
"""The commonest faults, in less than an hour."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C."""


def add_trial_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun trial`."""
    parser.add_argument("config", type=Path, help="run config; the trial is a run of its own, NAME-trial")
    add_set_option(parser, "as for `relayrun submit`: --set job.nodes=1")
    parser.add_argument("--minutes", type=int, default=10, metavar="N", help="limit of its jobs (default: %(default)s)")
    parser.set_defaults(run=run_trial)


def run_trial(options: argparse.Namespace) -> int:
    """Run the trial and print what it showed; return 1 if a promise did not hold. Raises RelayrunError."""
    for each in (found := trial.run_trial(options.config, options.overrides, minutes=options.minutes)):
        print(f"{'ok' if each.good else 'NOT OK'}: {each.words}")
    return 0 if all(each.good for each in found) else 1


def add_site_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun site`."""
    probe = parser.add_subparsers(dest="verb", required=True).add_parser("probe", help="one job of two minutes")
    probe.add_argument("--cluster", required=True, metavar="FILE", help="the site file, by its path; it is written to")
    probe.add_argument("--directory", type=Path, default=Path(), metavar="DIR", help="that all nodes see (default: .)")
    probe.add_argument("--queue", type=float, default=60, metavar="MINUTES", help="how long the job may wait")
    probe.set_defaults(run=run_site_probe)


def run_site_probe(options: argparse.Namespace) -> int:
    """Measure a cluster, and write `probed` into its site file. Raises RelayrunError."""
    cluster, file = read_cluster(options.cluster), Path(options.cluster)
    outputs = {"--cluster": file, "--directory": options.directory}
    check_writable(outputs, cluster=cluster["name"], read_only_paths=cluster.get("read_only_paths", []))
    with tempfile.TemporaryDirectory(dir=options.directory.absolute(), prefix="relayrun-probe-") as folder:
        facts = SiteProbe(cluster, Path(folder), queue=60 * options.queue).run()
    write_facts(file, facts)
    print(f"{file}: probed: " + "; ".join(f"{name}: {', '.join(found)}" for name, found in facts.items()))
    return 0


def add_drill_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun drill`."""
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a file of configs/clusters/, by its name or path"
    )
    parser.add_argument("--faults", default=DEFAULT_FAULTS, metavar="NAME,...", help="or all (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of a job (default: %(default)s)")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="that all nodes see; default: logs/drill/CLUSTER")
    parser.add_argument("--list", action="store_true", help="the faults; nothing is done")
    parser.add_argument("--yes", action="store_true", help="do not ask before jobs are queued")
    parser.add_argument("--again", action="store_true", help="do rows again that are done")
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    parser.add_argument("--time", type=int, default=15, metavar="MINUTES", help="limit of a job (default: %(default)s)")
    parser.add_argument(
        "--queue", type=float, default=60, metavar="MINUTES", help="how long a job may wait (default: %(default)s)"
    )
    parser.set_defaults(run=run_drill)


def run_drill(options: argparse.Namespace) -> int:
    """Inject the faults that have no result yet, and write the page; return 1 if one failed, 130 after Ctrl-C."""
    faults = session.select_faults("all" if options.list else options.faults)
    cluster = read_cluster(options.cluster)
    if not batch_system(cluster["scheduler"]).slurm:
        raise ConfigError(f"cluster {cluster['name']} has no Slurm, whose jobs the drill disturbs", where="--cluster")
    if options.list:
        for fault in faults:
            print(f"{fault.name}: {fault.what}")
        return 0
    drill = FaultSession(_drill_site(options, cluster), faults)
    with drill.locked():
        return _run_session(drill, options)


def _drill_site(options: argparse.Namespace, cluster: dict[str, Any]) -> FaultSite:
    """The site of the drill. Raises ConfigError for a number below 1, or a folder that is read-only."""
    for name, value in (("--nodes", options.nodes), ("--time", options.time), ("--queue", options.queue)):
        if value < 1:
            raise ConfigError(f"{value} is less than 1", where=name)
    folder = options.directory or places.project_folder() / "logs" / "drill" / cluster["name"]
    check_writable({"--directory": folder}, cluster=cluster["name"], read_only_paths=cluster.get("read_only_paths", []))
    return FaultSite(
        folder=folder.expanduser().absolute(),
        cluster=cluster,
        slurm=slurm_scheduler(patience=120),
        nodes=options.nodes,
        minutes=options.time,
        queue_seconds=60 * options.queue,
        tell=lambda words: print(words, file=sys.stderr if options.json else sys.stdout, flush=True),
    )


def _run_session(drill: FaultSession, options: argparse.Namespace) -> int:
    tell = drill.site.tell
    if options.again:
        drill.forget_results()
    if names := drill.pending_tests():
        drill.check()
        tell(f"{drill.cost(names)}; in {drill.folder}")
        if not options.yes and not _confirmed():
            tell("nothing was queued")
            return 1
    stopped = False
    try:
        drill.run_pending()
    except KeyboardInterrupt:
        stopped = True
    finally:
        with atomic_file(drill.folder / "drill.md") as temporary:
            temporary.write_text(session.markdown_report(drill), encoding="utf-8")
    if options.json:
        print(json_text(session.session_as_json(drill)))
    else:
        print_rows(session.TABLE_COLUMNS, session.table_rows(drill), title=session.session_headline(drill))
    tell(f"{drill.folder / 'drill.md'} says it, too")
    if stopped:
        tell("stopped; the same command goes on behind the rows that are done")
        return INTERRUPTED_EXIT_CODE
    return int(bool(drill.failed_results()))


def _confirmed() -> bool:
    """True if a person agrees. Raises InputError without a terminal."""
    if not sys.stdin.isatty():
        raise InputError("nobody can be asked whether to queue this", hint="add --yes")
    return input("Queue these jobs? [y/N] ").strip().lower() in ("y", "yes")


def add_gpu_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun gpu-check`."""
    parts = ", ".join(part.name for part in PARTS)
    parser.add_argument("--tiny", action="store_true", help="walk the same way on CPUs, with a tiny model")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"of: {parts}")
    words = "of one GPU's parts, which are cut to their share of it (default: %(default)s)"
    parser.add_argument("--minutes", type=float, default=check.MINUTES, metavar="N", help=words)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: benchmarks/results/gpu-NAME.json")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where it works; default: logs/gpu-check/DATE")
    words = "a file of configs/clusters/, or a path (default: %(default)s)"
    parser.add_argument("--cluster", default="local", metavar="NAME", help=words)
    add_set_option(parser, "a setting of all training runs of the check: --set training.transformer_impl=local")
    parser.add_argument(
        "--hook", dest="hooks", action="append", default=[], metavar="MODULE:CLASS", help="a hook of your own in them"
    )
    parser.set_defaults(run=run_gpu_check)


def run_gpu_check(options: argparse.Namespace) -> int:
    """Check this machine; return 1 if a target is missed. Raises RelayrunError."""
    cluster = read_cluster(options.cluster)
    folder = options.folder or places.project_folder() / "logs" / "gpu-check" / time.strftime("%Y%m%d-%H%M%S")
    outputs, read_only = {"--folder": folder, "--output": options.output}, cluster.get("read_only_paths", [])
    check_writable(outputs, cluster=cluster["name"], read_only_paths=read_only)
    setup = CheckSetup(
        folder=str(folder.absolute()),
        tiny=options.tiny,
        cluster=cluster_inside_job(cluster, tiny=options.tiny),
        overrides=options.overrides,
        hooks=options.hooks,
    )
    check.select_parts(options.only, PARTS)
    checked_config(setup, "check", large_run_sections(setup, micro_batch=1, steps=1))
    say = partial(print, flush=True)
    path, table = check.run_check(setup, only=options.only, output=options.output, minutes=options.minutes, say=say)
    check.print_result(path, table)
    return report.check_exit_code(table)


def read_cluster(name: str) -> dict[str, Any]:
    """Read a cluster's file by its name in configs/clusters/ or its path. Raises ConfigError."""
    values = sites.read_site(name, folders=sites.site_folders(), where="--cluster").values
    try:
        ClusterSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: {first['msg'].removeprefix('Value error, ')}", where=name) from None
    return values


def cluster_inside_job(cluster: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Return section `cluster` of the training runs: the job has loaded modules and entered the container already."""
    names = ("name", "python", "command_prefix", "transformer_engine")
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # many runs start at once, each with few kernels to compile
    environment = threads | cluster.get("environment", {}) | {"WANDB_MODE": "disabled"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if tiny else {}
    kept = {name: cluster[name] for name in names if name in cluster}
    return {**kept, "scheduler": "local", "environment": environment}
