"""`relayrun init`: a new project, with launchers, configs and a site file."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.submit import project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun init`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if missing; files in it are kept")
    parser.add_argument("--template", choices=project.TEMPLATES, default="native", help="what the project is for")
    words = f"the site file to copy: {', '.join(project.site_names())}, or the path of your own"
    default = "default: generic if there is an sbatch, else local"
    parser.add_argument("--cluster", metavar="NAME_OR_PATH", help=f"{words} ({default})")
    parser.add_argument("--inside", action="store_true", help="allow a FOLDER inside another project or checkout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write a project, and print the next commands. Raises RelayrunError."""
    check_outputs({"FOLDER": options.folder})
    cluster = options.cluster or ("generic" if shutil.which("sbatch") else "local")
    made = project.make_project(options.folder, cluster=cluster, template=options.template, inside=options.inside)
    kept = len(made) - (new := sum(made.values()))
    words = f", {kept} were there and are kept" if kept else ""
    print(f"{options.folder}: {new} files written, for cluster {cluster!r}{words}; next:")
    print(
        *(f"  {line}" for line in (f"cd {shlex.quote(str(options.folder))}", *project.TEMPLATES[options.template])),
        sep="\n",
    )
    return 0
