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
    words = f"whose site file is copied: {', '.join(project.site_names())}"
    default = "default: generic where there is an sbatch, else local"
    parser.add_argument("--cluster", metavar="NAME", help=f"{words} ({default})")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write a project, and print the next commands. Raises RelayrunError."""
    check_outputs({"FOLDER": options.folder})
    cluster = options.cluster or ("generic" if shutil.which("sbatch") else "local")
    made = project.make_project(options.folder, cluster=cluster)
    for name, written in made.items():
        if not written:
            print(f"kept as it was: {options.folder / name}")
    print(
        f"{options.folder}: {sum(made.values())} files written, for cluster {cluster!r}; next:\n"
        f"  cd {shlex.quote(str(options.folder))}\n"
        f"  relayrun check {project.RUN_CONFIG} --set data.mock_data=true\n"
        f"  relayrun submit {project.RUN_CONFIG} --set data.mock_data=true --set training.steps=40"
    )
    return 0
