"""`relayrun gpu-check`: what this machine's GPUs do with relayrun, in one command; or the same as one Slurm job."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from relayrun import places
from relayrun.config.compose.writable import check_writable
from relayrun.lab.gpucheck import job, perform, report, site
from relayrun.lab.gpucheck.check import PARTS
from relayrun.lab.gpucheck.setup import CheckSetup


def add_gpu_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun gpu-check`."""
    parts = ", ".join(part.name for part in PARTS)
    parser.add_argument("--tiny", action="store_true", help="walk the same way on CPUs, with a tiny model")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"of: {parts}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: benchmarks/results/gpu-NAME.json")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where it works; default: logs/gpu-check/DATE")
    parser.add_argument(
        "--cluster",
        default="local",
        metavar="NAME",
        help="a file of configs/clusters/, or a path (default: %(default)s)",
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes of the job, where the cluster has Slurm"
    )
    parser.add_argument("--time", default="15", metavar="LIMIT", help="of the job (default: %(default)s minutes)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of all training runs of the check: --set training.transformer_impl=local",
    )
    parser.add_argument(
        "--hook", dest="hooks", action="append", default=[], metavar="MODULE:CLASS", help="a hook of your own in them"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # this is the job
    parser.set_defaults(run=run_gpu_check)


def run_gpu_check(options: argparse.Namespace) -> int:
    """Check this machine, or submit the job that does; return 1 where a promise is broken."""
    cluster = site.read_cluster(options.cluster)
    folder = options.folder or places.project_folder() / "logs" / "gpu-check" / time.strftime("%Y%m%d-%H%M%S")
    check_writable(
        {"--folder": folder, "--output": options.output},
        cluster=cluster["name"],
        read_only_paths=cluster.get("read_only_paths", []),
    )
    setup = CheckSetup(
        folder=str(folder.absolute()),
        tiny=options.tiny,
        cluster=site.cluster_inside_job(cluster, tiny=options.tiny),
        overrides=options.overrides,
        hooks=options.hooks,
        nodes=options.nodes,
    )
    perform.select_parts(options.only, PARTS)
    site.check_arguments(setup, slurm=cluster["scheduler"] == "slurm")
    if cluster["scheduler"] == "slurm" and not options.inside:
        perform.prepare_folder(setup)
        number, script = job.submit_check_job(setup, cluster, command_inside_job(options, folder), time=options.time)
        print(
            f"job {number}: {script}\nresult {options.output or 'below ' + str(perform.RESULTS_FOLDER)}, folder {folder}"
        )
        return 0
    path, table = perform.run_check(
        setup, only=options.only, output=options.output, say=lambda text: print(text, flush=True)
    )
    perform.print_result(path, table)
    return report.check_exit_code(table)


def command_inside_job(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the same command as Python runs it inside the job."""
    words = [
        "-m",
        "relayrun.cli",
        "gpu-check",
        "--inside",
        f"--cluster={options.cluster}",
        f"--folder={folder.absolute()}",
        f"--nodes={options.nodes}",
    ]
    words += ["--tiny"] if options.tiny else []
    words += [f"--output={options.output.absolute()}"] if options.output else []
    words += [f"--set={text}" for text in options.overrides] + [f"--hook={text}" for text in options.hooks]
    return words + (["--only", *options.only] if options.only else [])
