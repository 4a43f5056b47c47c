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
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made where it is not there; files in it stay")
    parser.add_argument("--template", choices=project.TEMPLATES, default="native", help="what the project is for")
    words = f"whose site file is copied: {', '.join(project.site_names())}, or the path of your own"
    default = "default: generic where there is an sbatch, else local"
    parser.add_argument("--cluster", metavar="NAME_OR_PATH", help=f"{words} ({default})")
    parser.add_argument("--inside", action="store_true", help="also where FOLDER lies in another project or checkout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write a project, and print the next commands. Raises RelayrunError."""
    check_outputs({"FOLDER": options.folder})
    cluster = options.cluster or ("generic" if shutil.which("sbatch") else "local")
    made = project.make_project(options.folder, cluster=cluster, template=options.template, inside=options.inside)
    for name, written in made.items():
        if not written:
            print(f"kept as it was: {options.folder / name}")
    print(f"{options.folder}: {sum(made.values())} files written, for cluster {cluster!r}; next:")
    print(
        *(f"  {line}" for line in (f"cd {shlex.quote(str(options.folder))}", *project.TEMPLATES[options.template])),
        sep="\n",
    )
    return 0
