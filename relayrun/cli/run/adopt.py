"""`relayrun adopt`: a run config from an existing launcher of Megatron-LM, with a table of every line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from relayrun.config.compose.yaml_file import dump_yaml
from relayrun.errors import ConfigError, combined_error
from relayrun.files import write_atomic
from relayrun.submit.adopt import adopt
from relayrun.terminal import print_rows


def add_adopt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun adopt`."""
    parser.add_argument("launcher", type=Path, help="a launcher in Bash that starts pretrain_*.py; no line of it runs")
    parser.add_argument("--output", type=Path, help="the run config to write; default: configs/runs/NAME.yaml")
    parser.add_argument("--cluster", default="generic", help="the site of the run, a file of configs/clusters")
    parser.add_argument("--checkout", help="folder of Megatron-LM, in place of the launcher's own")
    parser.add_argument(
        "--env", metavar="NAME=VALUE", action="append", default=[], help="a variable that the launcher finds"
    )
    parser.add_argument("arguments", nargs="*", help="its arguments, right behind it")
    parser.set_defaults(run=run_adopt)


def run_adopt(options: argparse.Namespace) -> int:
    """Write the run config, and print the table of lines. Raises ConfigError for parts that nothing takes."""
    given = dict(text.partition("=")[::2] for text in options.env)
    if bad := [text for text in options.env if not text.partition("=")[0].isidentifier()]:
        raise ConfigError(f"{bad[0]!r} is no variable", where="--env", hint="write NAME=VALUE")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    given |= {str(number): text for number, text in enumerate(options.arguments, start=1)}
    found = adopt(options.launcher, outside | given, site=options.cluster, checkout=options.checkout)
    print_rows(
        ("line", "yours", "used", "why"),
        [[text if len(text) <= 90 else f"{text[:87]}..." for text in row] for row in found.rows],
    )
    if found.errors:
        raise combined_error(found.errors, "parts of the launcher are not taken")
    output = options.output or Path("configs", "runs", f"{found.settings['name']}.yaml")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(output, f"# Adopted from {options.launcher.resolve()}\n{dump_yaml(found.settings)}", new=True)
    except FileExistsError:
        raise ConfigError("exists already", where=output, hint="give another --output, or remove it") from None
    print(f"wrote {output}; next: relayrun check {output}")
    return 0
